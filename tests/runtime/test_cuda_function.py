"""Calling the functions of a CUDA library from Python: what is passed on, and one error per rule.

Kernels run in the emulator; torch tensors that claim to be on a GPU are torch's fake tensors.
"""

import gc
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from blockscale.base import tensors
from blockscale.base.manifest import REPLAY
from blockscale.emulator.host.standin import open_file
from blockscale.emulator.host.tensors import Arguments
from blockscale.runtime.function_cuda import PROGRAMMATIC, CudaFunction
from blockscale.specs import Param
from tests.kit.tiny_cuda import WIDTH, library_file, manifest

NAN = float("nan")


def unexpected(*_):
    raise AssertionError("the library was called")


def function(name="mix", compiled=unexpected):
    """Return a function that calls ``compiled``."""
    return CudaFunction(name, manifest()["functions"][name], compiled)


@contextmanager
def emulated(*values, name="mix"):
    """Let a function see CPU tensors as tensors of an emulated GPU."""
    library = open_file(library_file(), "sm_100a", None)
    with library.answering():
        library.driver.begin()
        compiled = library.module.get_function(name)
        with Arguments(values, library.driver.memory) as arguments:
            yield function(name, compiled), arguments.values, library.driver


def given(rows=4):
    """Return x, codes, residual, out, residual_out."""
    x, residual = torch.randint(-99, 99, (2, rows, WIDTH)).float()
    codes = torch.randint(0, 256, (rows, WIDTH), dtype=torch.uint8)
    return x, codes, residual, torch.full_like(x, NAN), torch.full_like(x, NAN)


def test_all_outputs_given():
    x, codes, residual, out, updated = given()
    with emulated(x, codes, residual, out, updated) as (f, (gx, gc, gr, go, gu), driver):
        assert f.kind == "cuda"
        result = f(gx, gc, None, None, 0.5, 2, gr, go, gu)
        assert result[0] is go
        assert result[1] is gu
        named = f(residual=gr, x=gx, codes=gc, a=1.0, out=go, residual_out=gu, k=1, flags=1)
        assert named[1] is gu
        assert [launch.programmatic for launch in driver.launches] == [False, True]
    assert torch.equal(out, x + codes)
    assert torch.equal(updated, residual + 1)


def test_updated_in_place():
    x, codes, residual, out, _ = given()
    want = residual * 2 + 1
    with emulated(x, codes, residual, out) as (f, (gx, gc, gr, go), _):
        results = f(gx, gc, None, None, 2, 1, gr, go, None)
        assert [a is b for a, b in zip(results, (go, gr), strict=True)] == [True, True]
        assert torch.equal(residual, residual)
    assert torch.equal(residual, want)


def test_one_output_and_flags():
    y = torch.full((4,), -1, dtype=torch.int32)
    with emulated(y, name="pair") as (f, (gy,), driver):
        assert f(gy) is gy
        assert f(gy, PROGRAMMATIC) is gy
        assert [launch.programmatic for launch in driver.launches] == [False, True]
    assert y.tolist() == [0, 1, 0, 1]


def test_errors_are_the_full_sentences():
    """The library refuses quickly; Python finds the words."""
    x, codes, residual, out, _ = given()
    short = torch.zeros(4, 32)
    with emulated(x, codes, residual, out, short) as (f, (gx, gc, gr, go, gs), _):
        with pytest.raises(ValueError, match=r"mix: out has shape \(4, 32\), but shape\[1\] mu"):
            f(gx, gc, None, None, 1, 1, gr, gs, None)
        with pytest.raises(ValueError, match=r"mix: out overlaps x in memory.*memory of its own"):
            f(gx, gc, None, None, 1, 1, gr, gx, None)
        with pytest.raises(TypeError, match=r"mix: a is 'one', expected a number of float32; pass"):
            f(gx, gc, None, None, "one", 1, gr, go, None)
        with pytest.raises(TypeError, match=r"k is 1.5, expected a number of int32; pass a Pyth"):
            f(gx, gc, None, None, 1, 1.5, gr, go, None)
        with pytest.raises(ValueError, match=r"k is 2147483648, which is no int32; pass a num"):
            f(gx, gc, None, None, 1, 2**31, gr, go, None)
        with pytest.raises(ValueError, match=r"mix: a is nan; pass a number"):
            f(gx, gc, None, None, NAN, 1, gr, go, None)
        with pytest.raises(ValueError, match=r"mix: a is -?nan; pass a number"):
            f.direct(gx, gc, None, None, NAN, 1, gr, go, None)
        with pytest.raises(TypeError, match=r"mix: x is missing; pass a tensor of float32"):
            f(None, gc, None, None, 1, 1, gr, go, None)
        with pytest.raises(TypeError, match=r"mix: out is missing, and only for torch tensors are"):
            f(gx, gc, None, None, 1, 1, gr, None, None)
        with pytest.raises(TypeError, match=r"scale is 'x', not a tensor; pass a torch tensor"):
            f(gx, gc, "x", None, 1, 1, gr, go, None)
        with pytest.raises(TypeError, match=r"mix: got 11 arguments for 9 parameters"):
            f(gx, gc, None, None, 1, 1, gr, go, None, 1, 2)


def test_what_only_the_library_knows():
    """Where the checks of Python find nothing, its error is raised as it is."""

    def compiled(*_):
        raise ValueError("said by the library")

    x, codes, residual, out, _ = given()
    with (
        emulated(x, codes, residual, out) as (_, (gx, gc, gr, go), _),
        pytest.raises(ValueError, match="said by the library"),
    ):
        function(compiled=compiled)(gx, gc, None, None, 1, 1, gr, go, None)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (lambda t: t, r"x is on cpu, but this library runs on CUDA devices; pass x.cuda\(\)"),
        (lambda t: t.numpy(), r"on cpu, but .* CUDA devices; pass torch.from_numpy\(x\).cuda\(\)"),
        (lambda t: t.to("meta"), r"x is on meta, but this library runs on CUDA devices"),
    ],
)
def test_tensors_elsewhere(place, sentence):
    x, codes, residual, out, _ = given()
    for output in (out, None):
        with pytest.raises(ValueError, match=sentence):
            function(compiled=np.ndarray)(place(x), codes, None, None, 1, 1, residual, output)


# Bound calls ----------------------------------------------------------------------------------


@contextmanager
def bound(*values, recorded=True):
    """Return a bound call of mix, the tensors that the emulated GPU sees, and the driver."""
    with emulated(*values) as (f, seen, driver):
        if recorded:
            module = open_file(library_file(), "sm_100a", None).module
            f.replay = tuple(module.get_function(name) for name in REPLAY)
        gx, gc, gr, go, gu = seen
        yield f.bind(gx, gc, None, None, 0.5, 2, gr, go, gu, PROGRAMMATIC), seen, driver


@pytest.mark.parametrize("recorded", [True, False])
def test_a_bound_call(recorded):
    """It launches when it is called, each time anew; older libraries check each time."""
    x, codes, residual, out, updated = given()
    with bound(x, codes, residual, out, updated, recorded=recorded) as (call, seen, driver):
        assert not driver.launches
        results = call()
        assert results[0] is seen[3]
        assert results[1] is seen[4]
        call()
        call.run()
        assert [launch.programmatic for launch in driver.launches] == [True] * 3
    assert torch.equal(out, x + codes)
    assert torch.equal(updated, 0.5 * residual + 2)


def test_a_bound_call_outlives_its_object():
    """What runs holds what it runs on, and frees the launches with itself."""
    x, codes, residual, out, updated = given()
    freed = []
    with bound(x, codes, residual, out, updated) as (call, _, driver):
        forget = call.function.replay[1]
        call.function.replay = call.function.replay[0], lambda handle: freed.append(handle)
        run = call.function.bind(*call.values, 0).run
        gc.collect()
        run()
        assert [launch.programmatic for launch in driver.launches] == [False]
        assert not freed
        del run
        assert len(freed) == 1
        forget(freed[0])
    assert torch.equal(updated, 0.5 * residual + 2)


def test_a_bound_call_with_tensors_anew():
    """They are checked as always; a residual that is given anew is what is updated."""
    x, codes, residual, out, _ = given()
    other, short = torch.randint(-9, 9, x.shape).float(), torch.zeros(2, WIDTH)
    with emulated(x, codes, residual, out, other, short) as (f, seen, driver):
        gx, gc, gr, go, gx2, gs = seen
        call = f.bind(gx, gc, None, None, 0.5, 2, gr, go, None)
        call.run_on(gx2)
        with pytest.raises(ValueError, match="mix"):
            call.run_on(gs)
        assert len(driver.launches) == 1
    assert torch.equal(out, other + codes)


def test_a_bound_call_is_checked():
    x, codes, residual, out, updated = given()
    with (
        emulated(x, codes, residual, out, updated) as (f, (gx, gc, gr, _, gu), _),
        pytest.raises(ValueError, match=r"mix: out overlaps x in memory.*memory of its own"),
    ):
        f.bind(gx, gc, None, None, 1, 1, gr, gx, gu)


def test_what_is_no_handle():
    module = open_file(library_file(), "sm_100a", None).module
    replay, forget = (module.get_function(name) for name in REPLAY)
    for call, given in ((replay, ()), (replay, (0,)), (replay, ("x",)), (forget, (1, 2))):
        with pytest.raises(TypeError, match="launches are kept under a handle; pass what a recor"):
            call(*given)


# Torch tensors on a GPU -----------------------------------------------------------------------


class Calls(list):
    """A compiled function that keeps what it is given."""

    def __call__(self, *values):
        self.append(values)


@pytest.fixture
def cuda(monkeypatch):
    """Return what makes a fake tensor on a GPU."""
    monkeypatch.setattr(tensors, "address_of", lambda _: lambda tensor: 4096 * id(tensor))
    monkeypatch.setattr(tensors, "check_unwatched", lambda _: None)
    monkeypatch.setattr(tensors, "stranger", lambda _: None)

    def make(*shape, dtype=torch.float32, device="cuda:0"):
        return torch.empty(shape, dtype=dtype, device=device)

    with FakeTensorMode():
        yield make


def inputs(cuda, *lead, rows=6):
    codes = cuda(rows, WIDTH, dtype=torch.uint8)
    return cuda(*(lead or (rows,)), WIDTH), codes, None, None, 0.5, 2, cuda(rows, WIDTH)


def test_outputs_are_allocated(cuda):
    calls = Calls()
    f = function(compiled=calls)
    for _ in range(2):  # the second call knows the signature
        arguments = inputs(cuda)
        out, updated = f(*arguments)
        assert (out.shape, out.dtype, out.device) == ((6, WIDTH), torch.float32, cuda(1).device)
        assert updated is arguments[6]
        assert calls.pop() == (*arguments, out, updated, 0)
    assert len(f._plans) == 1


def test_allocated_with_the_leading_dimensions_of_the_input(cuda):
    f = function(compiled=Calls())
    assert f(*inputs(cuda, 2, 3))[0].shape == (2, 3, WIDTH)
    x, *others = inputs(cuda)
    assert f(x, others[0].view(3, 2, WIDTH), *others[1:])[0].shape == (6, WIDTH)


def test_allocated_on_the_device_of_the_inputs(cuda):
    x, codes, _, _, a, k, residual = inputs(cuda)
    on = [t.to("cuda:1") for t in (x, codes, residual)]
    f = function(compiled=Calls())
    assert f(on[0], on[1], None, None, a, k, on[2])[0].device == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"codes is on cuda:0, but x is on cuda:1; pass all tens"):
        f(on[0], codes, None, None, a, k, on[2])


def test_numbers_have_defaults(cuda):
    calls = Calls()
    x, codes, _, _, _, _, residual = inputs(cuda)
    function(compiled=calls)(x, codes, residual=residual)
    assert calls[0][4:6] == (0.1, 3)
    assert [type(v) for v in calls[0][4:6]] == [float, int]


def test_autograd_is_refused(cuda):
    x, *others = inputs(cuda)
    out = cuda(6, WIDTH)
    x.requires_grad_()
    with pytest.raises(ValueError, match=r"mix: x requires grad, but kernels have no backward"):
        function()(x, *others, out, None)
    calls = Calls()
    with torch.no_grad():
        function(compiled=calls)(x, *others, out, None)
    assert len(calls) == 1


def test_bytes_by_another_name_are_allowed(cuda):
    """Where the tensor library cannot pass a dtype on, its bytes are passed."""
    calls = Calls()

    def compiled(*values):
        if values[1].dtype != torch.uint8:
            raise TypeError("no such dtype in DLPack")
        calls(*values)

    x, codes, *others = inputs(cuda)
    out = cuda(6, WIDTH)
    view = codes.view(torch.float8_e4m3fn)
    assert function(compiled=compiled)(x, view, *others, out, None)[0] is out
    assert calls[0][1].dtype == torch.uint8


def test_nothing_to_do(cuda):
    out, _ = function()(*inputs(cuda, rows=0))
    assert out.shape == (0, WIDTH)


def test_nothing_to_do_with_the_workspace_of_another_call(cuda):
    entry = manifest()["functions"]["mix"]
    entry["params"].append(Param("workspace", "uint8", ("bytes",), output=True).to_manifest())
    f = CudaFunction("mix", entry, unexpected)
    workspace = cuda(512, dtype=torch.uint8)
    out, _, last = f(*inputs(cuda, rows=0), None, None, workspace)
    assert out.shape == (0, WIDTH)
    assert last is workspace


def test_bound_launches_go_to_the_current_stream(cuda, monkeypatch):
    """Of torch tensors: to that of their device, asked for in each call."""
    streams, ran = [7, 9], []
    monkeypatch.setattr(tensors, "pack", lambda value: value)
    monkeypatch.setattr(tensors, "cuda_stream", lambda: lambda device: (device, streams.pop(0)))
    f = function(compiled=lambda *values: values[-1] + 40)
    f.replay = lambda *given: ran.append(given), lambda handle: None
    given = [v.to("cuda:1") if isinstance(v, torch.Tensor) else v for v in inputs(cuda)]
    call = f.bind(*given, None, None, PROGRAMMATIC)
    assert call.results[0].device == torch.device("cuda:1")
    assert not ran
    call()
    call()
    assert ran == [(43, (1, 7)), (43, (1, 9))]


def test_a_torch_tensor_brings_the_stream_to_libraries_that_record_nothing(cuda, monkeypatch):
    """The others are passed as views, which cost less."""
    monkeypatch.setattr(tensors, "pack", lambda value: ("view", value))
    calls = Calls()
    x, codes, *others, residual = inputs(cuda)
    function(compiled=calls).bind(x, codes, *others, residual)()
    assert calls[0][0] is x
    assert calls[0][1] == ("view", codes)
    assert calls[0][6] == ("view", residual)


def test_nothing_to_do_in_a_bound_call(cuda):
    call = function().bind(*inputs(cuda, rows=0))
    assert call()[0].shape == (0, WIDTH)
