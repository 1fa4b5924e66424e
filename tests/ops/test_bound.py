"""`blockscale.bind`: calls on fixed tensors, on the CPU and with libraries of CUDA kernels."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blockscale as bs
from blockscale.ops import call
from blockscale.runtime.function import Function

K, N = 64, 32
BF16 = torch.bfloat16


def weight(fmt="nvfp4", **options):
    """Return codes and scales [N, K]."""
    return bs.quantize(torch.randn(N, K), fmt, **options)


def rows(*lead, k=K):
    return torch.randn(*lead, k, dtype=BF16)


def test_nothing_runs_until_it_is_called():
    """Outputs are written by calls alone, in place, and a residual is not updated before."""
    x, residual, w = rows(3), rows(3), torch.ones(K, dtype=BF16)
    codes = torch.full((3, K // 2), 0xFF, dtype=torch.uint8)
    scale = torch.full((3, K // 16), 0xFF, dtype=torch.uint8)
    before = residual.clone()
    step = bs.bind(bs.add_rmsnorm_fp4quant, x, residual, w, codes, scale)
    assert (codes == 0xFF).all()
    assert torch.equal(residual, before)
    other = before.clone()
    want = bs.add_rmsnorm_fp4quant(x, other, w)
    got = step()
    assert got[0] is codes
    assert got[1] is scale
    assert torch.equal(codes, want[0].view(torch.uint8))
    assert torch.equal(scale, want[1].view(torch.uint8))
    assert torch.equal(residual, other)


@pytest.mark.parametrize("lead", [(3,), (2, 2)])
def test_rows_anew(lead):
    """Values that change in place count, others' tensors too; the result stays one tensor."""
    x, (packed, scale) = rows(*lead), weight()
    step = bs.bind(bs.linear, x, packed, scale)
    assert step.rows == ("x",)
    assert torch.equal(step(), bs.linear(x, packed, scale))
    x.copy_(rows(*lead))
    assert torch.equal(step(), bs.linear(x, packed, scale))
    for _ in range(2):
        other = rows(*lead)
        want = bs.linear(other, packed, scale)
        result = step(other)
        assert result is step.result
        assert torch.equal(result, want)
    assert torch.equal(step(), bs.linear(x, packed, scale))


def test_an_input_that_is_written():
    """A residual that is given anew is updated, and the one that was bound is not."""
    x, residual, w = rows(3), rows(3), torch.ones(K, dtype=BF16)
    step = bs.bind(bs.add_rmsnorm_fp4quant, x, residual, w)
    assert step.rows == ("input", "residual")
    kept, other = residual.clone(), rows(3)
    again = other.clone()
    want = bs.add_rmsnorm_fp4quant(x, again, w)
    got = step(x, other)
    assert torch.equal(other, again)
    assert torch.equal(residual, kept)
    for one, two in zip(got, want, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def test_several_tensors_with_rows():
    """Those of an MoE layer: ids and weights, too; its prepared weights are fixed."""
    experts, hidden, inner = 4, 64, 64
    made = [torch.randn(experts, *size) for size in ((2 * inner, hidden), (hidden, inner))]
    (w13, s13), (w2, s2) = (bs.quantize(values) for values in made)
    w = bs.prepare_moe_weights(w13, w2, w13_scale=s13, w2_scale=s2)

    def inputs():
        ids = torch.randint(0, experts, (3, 2), dtype=torch.int32)
        return rows(3, k=hidden), ids, torch.rand(3, 2)

    x, ids, factors = inputs()
    step = bs.bind(bs.fused_moe, x, w, ids, factors)
    assert step.rows == ("hidden", "topk_ids", "topk_weights")
    assert torch.equal(step(), bs.fused_moe(x, w, ids, factors))
    y, other, more = inputs()
    assert torch.equal(step(y, other, more), bs.fused_moe(y, w, other, more))
    with pytest.raises(ValueError, match=r"topk_ids of fused_moe's .* pass it as int32"):
        bs.bind(bs.fused_moe, x, w, ids.long(), factors)


def test_memory_is_held():
    """Tensors may be dropped by the caller."""
    x, (packed, scale) = rows(3), weight()
    want = bs.linear(x, packed, scale)
    step = bs.bind(bs.linear, x, packed.clone(), scale.clone())
    dead = weakref.ref(step)
    del packed, scale
    gc.collect()
    _ = [torch.full((N, K // 2), 0x55, dtype=torch.uint8) for _ in range(8)]
    assert torch.equal(step(), want)
    x.set_(torch.zeros_like(x))  # what is bound is the memory that it had
    assert torch.equal(step(), want)
    del step
    gc.collect()
    assert dead() is None


def test_the_kernel_stays(monkeypatch):
    """What a later library would answer is no matter."""
    x, (packed, scale) = rows(3), weight()
    want = bs.linear(x, packed, scale)
    step = bs.bind(bs.linear, x, packed, scale)
    monkeypatch.setattr(call, "kernel", lambda *_: pytest.fail("was looked up"))
    assert torch.equal(step(), want)
    assert torch.equal(step(x), want)


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        (lambda x: x.float(), TypeError, r"x is float32 \[4, 64\] on cpu, but the call was bound"),
        (lambda x: x[:2], ValueError, r"x is bfloat16 \[2, 64\] on cpu, but .* bound for bfloat16"),
        (lambda x: x.view(2, 2, K), ValueError, r"x is bfloat16 \[2, 2, 64\] on cpu, but"),
        (
            lambda x: x.to("meta"),
            ValueError,
            r"on meta, but the call was bound for .* on cpu; p",
        ),
        (lambda x: x.t().contiguous().t(), ValueError, r"on cpu, not contiguous, but the call was"),
        (lambda x: x.tolist(), TypeError, r"x is a list, not a torch tensor; pass one like that"),
        (lambda x: torch._neg_view(x), ValueError, r"linear: x is a view with the negative bit"),
        (lambda x: x.clone().requires_grad_(), ValueError, r"requires grad"),
    ],
)
def test_tensors_that_are_not_like_those_bound(wrong, error, sentence):
    x, (packed, scale) = rows(4), weight()
    step = bs.bind(bs.linear, x, packed, scale)
    with pytest.raises(error, match=sentence):
        step(wrong(x))


def test_gradients_reach_no_kernel(monkeypatch):
    """A CUDA library knows of none."""
    x, (packed, scale) = rows(4), weight()
    step = bs.bind(bs.linear, x, packed, scale)
    monkeypatch.setattr(step._kernel, "run_on", lambda *_: pytest.fail("was run"))
    x = x.clone().requires_grad_()
    with pytest.raises(ValueError, match="requires grad"):
        step(x)
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(step(x), bs.linear(x, packed, scale))


def test_an_output_that_would_overlap():
    x, (packed, scale) = rows(4, k=N), bs.quantize(torch.randn(N, N))
    out = torch.empty(4, N, dtype=BF16)
    step = bs.bind(bs.linear, x, packed, scale, out=out)
    with pytest.raises(ValueError, match=r"overlaps .* in memory"):
        step(out)


def test_more_tensors_than_have_rows():
    x, (packed, scale) = rows(4), weight()
    step = bs.bind(bs.linear, x, packed, scale)
    with pytest.raises(TypeError, match=r"the bound call got 2 tensors, but takes x anew; bind an"):
        step(x, packed)


def test_what_cannot_be_bound():
    x, (packed, scale) = rows(4), weight()

    def linear(*given):
        return bs.linear(*given)

    with pytest.raises(ValueError, match=r"bind: bias of linear's kernel is none of the argument"):
        bs.bind(bs.linear, x, packed, scale, bias=torch.zeros(N, dtype=BF16))
    with pytest.raises(ValueError, match=r"pass it as bfloat16 \[4, 64\] on cpu, or prepare weig"):
        bs.bind(lambda: linear(x, packed, scale))
    with pytest.raises(ValueError, match=r"<lambda> runs no kernel of blockscale with these argu"):
        bs.bind(lambda: x)
    with pytest.raises(ValueError, match=r"runs 2 kernels of blockscale .* a bound call is one"):
        bs.bind(lambda *given: (linear(*given), linear(*given)), x, packed, scale)
    with pytest.raises(ValueError, match=r"<lambda> computes its result from that of a kernel"):
        bs.bind(lambda *given: linear(*given) + 1, x, packed, scale)
    with pytest.raises(ValueError, match=r"bind: linear has nothing to compute, as its first ten"):
        bs.bind(bs.linear, x[:0], packed, scale)
    with pytest.raises(ValueError, match=r"linear: x has 32 columns, but packed of shape"):
        bs.bind(bs.linear, rows(4, k=32), packed, scale)
    assert not call.RECORDERS  # also after errors


def test_another_thread_runs_its_calls():
    """While one binds, calls of others run."""
    x, (packed, scale) = rows(4), weight()
    want, found = bs.linear(x, packed, scale), []

    def bound(*given):
        other = threading.Thread(target=lambda: found.append(bs.linear(*given)))
        other.start()
        other.join()
        return bs.linear(*given)

    step = bs.bind(bound, x, packed, scale)
    assert torch.equal(found[0], want)
    assert torch.equal(step(), want)


def test_tracers_see_the_function():
    """torch.compile keeps the operator in its graph; a dispatch mode gets it; bind says no."""
    x, (packed, scale) = rows(4), weight()
    step = bs.bind(bs.linear, x, packed, scale)
    other = rows(4)
    want, new = bs.linear(x, packed, scale), bs.linear(other, packed, scale)
    graphs = []

    def backend(module, _):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module

    for function, given, expected in ((lambda: step() + 1, (), want), (step, (other,), new)):
        torch._dynamo.reset()
        made = torch.compile(function, fullgraph=True, backend=backend)(*given)
        assert torch.equal(made, expected + 1 if not given else expected)
        assert any("linear" in str(target) for target in graphs[-1])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(step()).__name__ == "FakeTensor"
        with pytest.raises(RuntimeError, match="torch traces or transforms what this thread does"):
            bs.bind(bs.linear, x, packed, scale)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied):
    """One would write the result of the other."""
    step = bs.bind(bs.linear, rows(3), *weight())
    with pytest.raises(TypeError, match=r"linear: a bound call holds memory.*bind"):
        copied(step)


@pytest.mark.parametrize("bound", [False, True])
def test_autograd_is_told_of_writes(bound, monkeypatch):
    """Of outputs and of inputs updated in place; in the first calls, known ones, and bound ones."""
    direct = property(lambda self: self._compiled and self.call)
    x, w, (packed, scale) = rows(3), torch.ones(K, dtype=BF16), weight()
    out = torch.zeros(3, N, dtype=BF16)
    for known in (False, True, True):
        if known:
            monkeypatch.setattr(Function, "direct", direct, raising=False)
        factor = torch.ones(N, dtype=BF16, requires_grad=True)
        y = (out * factor).sum()
        if bound:
            bs.bind(bs.linear, x, packed, scale, out=out)()
        else:
            bs.linear(x, packed, scale, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        residual = rows(3)
        before, seen = residual._version, x._version
        step = bs.bind(bs.add_rmsnorm_fp4quant, x, residual, w) if bound else None
        assert residual._version == before
        step() if step else bs.add_rmsnorm_fp4quant(x, residual, w)
        assert residual._version > before
        if step:
            other = rows(3)
            step(x, other)
            assert other._version > 0
        assert x._version == seen
    with torch.inference_mode():
        bs.linear(x.clone(), packed, scale, out=out.clone())


def test_autograd_is_told_of_the_tensor_that_is_updated_in_place(monkeypatch):
    """Of that which a call of a CUDA kernel brings, not of that which was bound."""
    x, residual, other = rows(3), rows(3), rows(3)
    kernel = bs.bind(bs.add_rmsnorm_fp4quant, x, residual, torch.ones(K, dtype=BF16))._kernel
    monkeypatch.setattr(kernel.function, "kind", "cuda")
    monkeypatch.setattr(kernel, "_checked", lambda *_: None)
    before = residual._version
    kernel.run_on(x, other)
    assert (other._version, residual._version, x._version) == (1, before, 0)


def test_words():
    x, (packed, scale) = rows(4), weight()
    step = bs.bind(bs.linear, x, packed, scale)
    assert repr(step) == "<blockscale.BoundCall of linear: x bfloat16 [4, 64] on cpu>"
    assert isinstance(step, bs.BoundCall)
