"""The one call protocol: which way a call goes, and what becomes of a kernel's refusal."""

import pytest
import torch

from blockscale.ops import call
from blockscale.runtime import jit, library
from blockscale.specs import Swizzle

X = torch.zeros(2, 4)


class Probe(call.Op[torch.Tensor]):
    """A function that writes down which way its calls go."""

    def __init__(self):
        super().__init__("probe")
        self.ways = []

    def ready(self, spec, options, given):
        self.ways.append("known")
        return given, given[0]

    def check(self, options, given):
        self.ways.append("in full")
        if not isinstance(given[0], torch.Tensor):
            raise TypeError("probe: x is no tensor")
        return call.Checked(Swizzle(), (given[0].view(-1, 4),), given[0])


@pytest.fixture
def kernel(monkeypatch):
    """Put a kernel in place that raises what the list holds; nothing is kept from before."""
    errors = []

    class Kernel:
        def call(self, *_):
            if errors:
                raise errors.pop()

    monkeypatch.setattr(jit, "function", lambda *_: Kernel())
    monkeypatch.setattr(call, "remembered", {})
    return errors


def test_the_second_call_goes_straight(kernel):
    """What a first call found serves calls like it, and no others."""
    op = Probe()
    for options, x in (((), X), ((), X), ((1,), X), ((), X.half()), ((), X)):
        assert op.run(options, (x,)) is x
    assert op.ways == ["in full", "known", "in full", "in full", "known"]


def test_rows_that_a_kernel_does_not_take(kernel):
    """On the CPU a call whose rows had to be laid out is not kept."""
    op = Probe()
    for _ in range(2):
        op.run((), (X.view(2, 2, 2),))
    assert op.ways == ["in full", "in full"]


def test_a_library_that_is_loaded_during_a_call(kernel, monkeypatch):
    """It forgets what is remembered before the call would remember its kernel, the old one."""
    monkeypatch.setattr(library, "_in_use", [])

    class Kernel:
        def call(self, *_):
            library._in_use.insert(0, None)
            call.remembered.clear()

    monkeypatch.setattr(jit, "function", lambda *_: Kernel())
    op = Probe()
    for _ in range(2):
        op.run((), (X,))
    assert op.ways == ["in full", "in full"]


@pytest.mark.parametrize("error", call.REFUSED)
def test_a_refusal(kernel, error):
    """What a kernel refuses is checked in full."""
    op = Probe()
    op.run((), (X,))
    kernel.append(error("no"))
    op.run((), (X,))
    assert op.ways == ["in full", "known", "in full"]


@pytest.mark.parametrize("error", [AttributeError, IndexError, KeyError, RuntimeError])
def test_what_is_no_refusal(kernel, error):
    """A mistake of ours, or of the driver, is nobody's refusal."""
    op = Probe()
    op.run((), (X,))
    kernel.append(error("broken"))
    with pytest.raises(error, match="broken"):
        op.run((), (X,))


def test_what_is_no_tensor(kernel):
    """The checks name it, whatever was called before."""
    op = Probe()
    op.run((), (X,))
    for wrong in (None, 3, [1.0]):
        with pytest.raises(TypeError, match="probe: x is no tensor"):
            op.run((), (wrong,))


def test_options_that_cannot_be_hashed(kernel):
    """They go to the checks, too."""
    op = Probe()
    op.run(([],), (X,))
    assert op.ways == ["in full"]


def test_gradients(kernel):
    """A kernel has no backward, and may not know it: the checks say so."""
    op = Probe()
    x = X.clone().requires_grad_()
    op.run((), (x,))
    op.run((), (x,))
    with torch.no_grad():
        op.run((), (x,))
    assert op.ways == ["in full", "in full", "known"]
