"""Expert parallelism over gloo: the same bits as the layer of one process; errors on every rank.

What is compared: `blockscale.fused_moe` of all experts in one process, which has tests of its own;
in float32, where no rounding at the end hides a difference.
"""

import os
import re
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d as c10d

import blockscale as bs
from blockscale.base.formats import MOE
from blockscale.checkpoints.convert.convert import convert
from blockscale.checkpoints.files import safetensors
from blockscale.ops.distributed import cpu, parallel
from blockscale.ops.moe.layer import Options
from blockscale.runtime import jit
from blockscale.specs import EpReduce, FusedMoe, Quantize
from blockscale.specs.plans.coded import CodedRow
from tests.distributed import group
from tests.kit.pairwise import few
from tests.kit.paths import CHECKPOINTS
from tests.reference import core as ref
from tests.reference import moe as moe

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, MOST = 8, 64, 32, 3, 6
ROUNDINGS = 3e-7
"""Of a single token: LLVM fuses some of the layer's multiplications and additions there."""

SHORT = 3.0
"""Seconds after which a rank that does not come is given up."""


def layer(seed=0):
    """Return weights of all experts, as checkpoints hold them."""
    made = np.random.default_rng(seed)
    block = MOE["nvfp4"].block

    def numbers(low, high, *shape):
        return torch.from_numpy(made.integers(low, high, shape, dtype=np.uint8))

    return {
        "w13": numbers(0, 256, EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2),
        "w2": numbers(0, 256, EXPERTS, HIDDEN, INTERMEDIATE // 2),
        "w13_scale": numbers(40, 60, EXPERTS, 2 * INTERMEDIATE, HIDDEN // block),
        "w2_scale": numbers(40, 60, EXPERTS, HIDDEN, INTERMEDIATE // block),
        "w13_global_scale": torch.ones(EXPERTS, 2),
        "w2_global_scale": torch.ones(EXPERTS),
    }


def prepared(weights, experts):
    picked = {name: value[list(experts)] for name, value in weights.items()}
    w13, w2 = picked.pop("w13"), picked.pop("w2")
    return bs.prepare_moe_weights(w13, w2, fmt="nvfp4", layout="linear", **picked)


def tokens(seed, rank, count, dtype, experts=EXPERTS):
    made = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(count, HIDDEN, generator=made).to(dtype)
    ids = torch.stack(
        [torch.randperm(experts + 1, generator=made)[:TOP_K] for _ in range(count)]
    ) if count else torch.empty(0, TOP_K, dtype=torch.int64)  # fmt: skip
    ids = torch.where(ids == experts, -1, ids)  # some slots are dropped
    return x, ids, torch.rand(count, TOP_K, generator=made)


MAPS = {
    1: [[7, 6, 5, 4, 3, 2, 1, 0]],
    2: [[6, 0, 2, 4], [1, 3, 7, 5]],
    4: [[0, 1, 2, 3], [4, 5, 0, 1], [6, 7, 0, 2], [3, 5, 0, 6]],  # some on several ranks
}
"""The experts of each rank, by ranks; numbers of experts for which there are kernels anyway."""


@cache
def built(dtype, act_fmt, *counts):
    """Build the kernels once, not in every rank's process; ``counts``: experts of a rank."""
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K, "dtype": dtype}
    sizes["act_fmt"] = act_fmt
    how = {"slots": True, "coded": act_fmt is not None}
    specs = [FusedMoe(count, **sizes, **how) for count in counts]
    specs += [FusedMoe(EXPERTS, **sizes), EpReduce(EXPERTS, TOP_K, HIDDEN, dtype)]
    for spec in specs:
        jit.function(spec)


@pytest.fixture(scope="module", autouse=True)
def _others_built():
    """Build what is no layer."""
    for dtype in ("float32", "bfloat16"):
        jit.function(Quantize("nvfp4", dtype=dtype))
        jit.function(EpReduce(EXPERTS, TOP_K, HIDDEN, dtype))
    jit.function(EpReduce(9, TOP_K, HIDDEN, "float32"))


def _same_as_one(rank, ranks, dispatch):
    weights, found = layer(), []
    whole = prepared(weights, range(EXPERTS))
    how = {"act_fmt": None if dispatch == "bf16" else dispatch}
    if dispatch == "nvfp4":
        how["a1_scale"] = torch.tensor([0.0031])
    for case, owners in enumerate((None, MAPS[ranks])):
        ep = bs.distributed.ExpertParallel(
            *(None, EXPERTS, HIDDEN, TOP_K, MOST, dispatch),
            owners=owners,
            dtype=torch.float32,
            device="cpu",
        )
        mine = prepared(weights, ep.local_experts)
        for call in range(5):
            count = (call * 2 + rank * 3 + case) % (MOST + 1)
            count = 0 if call == 3 and rank == ranks - 1 else count
            x, ids, factors = tokens(10 * case + call, rank, count, torch.float32)
            y = bs.fused_moe(x, mine, ids, factors, ep=ep, **how)
            truth = bs.fused_moe(x, whole, ids, factors, **how)
            apart = (y - truth).abs().max() / truth.abs().max() if count == 1 else 0
            same = torch.equal(y, truth) if count != 1 else float(apart) < ROUNDINGS
            found.append(same and len(y) == count)
    return found


@pytest.mark.always
@pytest.mark.parametrize(
    ("ranks", "dispatch"),
    few([(2, "bf16"), (1, "bf16"), (4, "fp8"), (4, "bf16"), (2, "nvfp4"), (1, "nvfp4")]),
)
def test_equals_the_layer_of_one_process(ranks, dispatch, tmp_path):
    counts = {len(owned) for owned in MAPS[ranks]} | {EXPERTS // ranks}
    built("float32", None if dispatch == "bf16" else dispatch, *sorted(counts))
    found = group.run(ranks, tmp_path, _same_as_one, dispatch)
    assert found == {r: [True] * 10 for r in range(ranks)}


def _sums(rank, ranks):
    """Whether "sums" are those that each rank's experts make, rounded, added up by rank.

    Each rank expects to have its share of the slots.
    """
    shares, real = [], parallel.run_slots
    parallel.run_slots = lambda *given: (shares.append(given[5]), real(*given))[1]
    weights, found = layer(), []
    whole = prepared(weights, range(EXPERTS))
    sizes = EXPERTS, HIDDEN, TOP_K, MOST
    ep = bs.distributed.ExpertParallel(None, *sizes, combine="sums", device="cpu")
    mine = prepared(weights, ep.local_experts)
    for call, count in enumerate((MOST - rank, 0 if rank else 2, 4)):
        x, ids, factors = tokens(20 + call, rank, count, torch.bfloat16)
        total = torch.zeros(count, HIDDEN)
        for other in range(ranks):
            own = torch.where(ids // (EXPERTS // ranks) == other, ids, -1)
            total += bs.fused_moe(x, whole, own, factors).float()
        y = bs.fused_moe(x, mine, ids, factors, ep=ep)
        found.append(torch.equal(y, total.bfloat16()) and shares.pop() == 1 / ranks)
    return found


def test_ranks_add_up_what_they_have(tmp_path):
    assert group.run(2, tmp_path, _sums) == {0: [True] * 3, 1: [True] * 3}


def _rows_that_came(rank, ranks, dispatch):
    """Return the numbers of the rows that came, and those that every rank has sent."""
    scale = None if dispatch == "fp8" else 0.0031
    given = None if scale is None else torch.tensor([scale])
    ep = bs.distributed.ExpertParallel(None, EXPERTS, HIDDEN, TOP_K, MOST, dispatch)
    came = ep.dispatch(*tokens(5, rank, MOST - rank, torch.bfloat16), given)
    ep.combine(torch.zeros(*came.topk_ids.shape, HIDDEN, dtype=torch.bfloat16), came)
    forms = came.hidden.dtype, came.scale.dtype, came.hidden.shape[1]
    return came.kept.rows.numpy(), came.hidden.float().numpy(), came.scale.float().numpy(), forms


@pytest.mark.parametrize("dispatch", ["fp8", "nvfp4"])
def test_rows_are_coded_by_their_owner(dispatch, tmp_path):
    """The bytes of the reference, as views with the dtypes that hold them."""
    scale = None if dispatch == "fp8" else 0.0031
    for rank, (rows, codes, scales, forms) in group.run(
        2, tmp_path, _rows_that_came, dispatch
    ).items():
        truth = []
        for source in range(2):
            x, ids, _ = tokens(5, source, MOST - source, torch.bfloat16)
            there = ((ids >= 4 * rank) & (ids < 4 * rank + 4)).any(1)
            truth.append(moe.coded_rows(x[there].float().numpy(), dispatch, scale))
        truth = np.concatenate(truth)
        assert len(truth)
        assert np.array_equal(rows, truth)
        if dispatch == "nvfp4":
            assert forms == (torch.uint8, torch.float8_e4m3fn, HIDDEN // 2)
            assert np.array_equal(codes, truth[:, : HIDDEN // 2])
            assert np.array_equal(
                scales, ref.e4m3_decode(truth[:, HIDDEN // 2 :][:, : HIDDEN // 16])
            )
        else:
            assert forms == (torch.float8_e4m3fn, torch.float32, HIDDEN)
            numbers = moe.decoded_rows(truth, dispatch, HIDDEN)
            assert np.array_equal(codes * scales[:, None], numbers)


@pytest.mark.parametrize("act_fmt", ["fp8", "nvfp4"])
def test_bytes_of_odd_rows(act_fmt):
    """Zeros of both signs, numbers beyond what scales hold, subnormal factors."""
    made = np.random.default_rng(3)
    x = made.standard_normal((8, 96)).astype(np.float32)
    x *= 2.0 ** np.array([-149, -140, -120, -20, 0, 20, 100, 120])[:, None]
    x[4, :50], x[5, 7] = 0, -0.0
    x[1] = 0
    x[1, 5] = 640 * 2.0**-149  # the factor is rounded to 2^-149, of which it is more than 448
    rows = cpu.coded(torch.from_numpy(x), CodedRow(act_fmt, 96), None).numpy()
    assert np.array_equal(rows, moe.coded_rows(x, act_fmt))


def _module(rank, ranks, dispatch):
    weights = layer(1)
    ep = bs.distributed.ExpertParallel(None, EXPERTS, HIDDEN, TOP_K, MOST, dispatch)
    torch.manual_seed(0)
    router = bs.nn.moe.Router(torch.randn(EXPERTS, HIDDEN))
    shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
    options = {"router": router, "shared": shared}
    options["act_fmt"] = None if dispatch == "bf16" else dispatch
    one = bs.nn.FusedMoE(prepared(weights, range(EXPERTS)), TOP_K, **options)
    ours = bs.nn.FusedMoE(prepared(weights, ep.local_experts), TOP_K, **options, ep=ep)
    x = tokens(0, rank, 4 - rank, torch.bfloat16)[0]
    with torch.no_grad():
        return torch.equal(ours(x), one(x))


@pytest.mark.parametrize("dispatch", few(["bf16", "fp8"]))
def test_module_routes_and_adds_shared_experts(dispatch, tmp_path):
    built("bfloat16", None if dispatch == "bf16" else dispatch, 4)
    assert group.run(2, tmp_path, _module, dispatch) == {0: True, 1: True}


MLP = "model.layers.0.mlp"


def _loaded(rank, ranks, folder, most):
    """Whether the layer of this rank's experts is that of all, and has read no others' bytes."""
    seen, read = [], safetensors._bytes

    def noted(info, mapped):
        seen.append(info.nbytes if ".experts." in info.name or ".tiles64." in info.name else 0)
        return read(info, mapped)

    safetensors._bytes = noted
    one = bs.nn.FusedMoE.from_checkpoint(folder, MLP)
    whole, found = sum(seen), []
    for owners in (None, [[2, 0], [3, 1]]):
        ep = bs.distributed.ExpertParallel(
            None, one.weights.experts, HIDDEN, one.top_k, MOST, owners=owners
        )
        seen.clear()
        ours = bs.nn.FusedMoE.from_checkpoint(folder, MLP, ep=ep)
        found.append(0 < sum(seen) <= whole * most)
        x = tokens(0, rank, 4 - rank, torch.bfloat16)[0]
        with torch.no_grad():
            found.append(torch.equal(ours(x), one(x)))
    ep = bs.distributed.ExpertParallel(None, 6, HIDDEN, 2, MOST)
    seen.clear()
    found.append(_text(lambda: bs.nn.FusedMoE.from_checkpoint(folder, MLP, ep=ep))[0])
    return [*found, sum(seen)]


@pytest.mark.parametrize("stored", few(["one by one", "all in one", "tiles64"]))
def test_a_rank_loads_its_own_experts(stored, tmp_path):
    """From a checkpoint: the bits of one rank, and half of the bytes of the experts."""
    name = "gptoss_mxfp4" if stored == "all in one" else "modelopt_qwen3moe_nvfp4_default_cfg"
    folder = CHECKPOINTS / name
    if stored == "tiles64":
        convert(bs.checkpoints.open(folder), tmp_path / "tiles", target="sm_90a")
        folder = tmp_path / "tiles"
    one = bs.nn.FusedMoE.from_checkpoint(folder, MLP)
    x = tokens(0, 0, 4, torch.bfloat16)[0]
    one(x)  # whose kernels need not be built by each rank
    w, half = one.weights, one.weights.experts // 2
    jit.function(EpReduce(w.experts, one.top_k, HIDDEN, "bfloat16"))
    jit.function(
        FusedMoe(
            *(half, w.hidden, w.intermediate, one.top_k, w.fmt, w.group, one.activation),
            dtype="bfloat16",
            bias=w.bias,
            slots=True,
        )
    )
    found = group.run(2, tmp_path, _loaded, folder, 0.5)
    said = f"ValueError: FusedMoE.from_checkpoint: {MLP} has 4 experts, but ep is of 6; construct"
    for made in found.values():
        assert made[:4] == [True] * 4
        assert made[4].startswith(said)
        assert made[5] == 0


def _text(function):
    began = time.monotonic()
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing was raised", 0.0


def _configurations(rank, ranks):
    def differs(**values):
        sizes = {"experts": 9, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": MOST} | values
        return _text(lambda: bs.distributed.ExpertParallel(None, **sizes))[0]

    return [differs(hidden=HIDDEN + 8 * (rank == 1)), differs(max_tokens=MOST + rank // 2)]


def test_other_configuration_is_an_error_on_every_rank(tmp_path):
    for said in group.run(3, tmp_path, _configurations).values():
        assert "rank 1 has hidden=72, but rank 0 has 64" in said[0]
        assert "rank 2 has max_tokens=7, but rank 0 has 6" in said[1]


def _failures(rank, ranks, how):
    ep = bs.distributed.ExpertParallel(
        None, 9, HIDDEN, TOP_K, MOST, timeout=SHORT, dtype=torch.float32
    )
    x, ids, factors = tokens(0, rank, 2, torch.float32)
    if how.startswith("within"):  # after it has met the others
        if rank == 1:
            seconds = 2 * SHORT if how == "within, hangs" else 0
            ep._exchange._swap = lambda *_: (time.sleep(seconds), os._exit(1))
        said = _text(lambda: ep.dispatch(x, ids, factors))
        time.sleep(SHORT)  # or who comes later blames this rank, which ends
        return *said, _text(lambda: ep.dispatch(x, ids, factors))[0]
    came = ep.dispatch(x, ids, factors)
    y = torch.zeros(*came.topk_ids.shape, HIDDEN)
    if how == "tokens":
        ep.combine(y, came)
        count = MOST + 1 if rank == 1 else 1
        given = tokens(1, rank, count, torch.float32)
        said = _text(lambda: ep.dispatch(*given))
    elif how == "dies" and rank == 2:
        os._exit(1)
    elif how == "hangs" and rank == 2:
        time.sleep(2 * SHORT)
        return "slept", 0.0, ""
    elif how == "bound":
        ep.combine(y, came)
        ep.bound = MOST - rank
        said = _text(lambda: ep.dispatch(x, ids, factors))
    else:
        said = _text(lambda: ep.combine(y, came))
        time.sleep(SHORT if how == "dies" else 0)  # or who comes later blames this rank, which ends
    return *said, _text(lambda: ep.dispatch(x, ids, factors))[0]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("tokens", r"ValueError: ExpertParallel.dispatch: rank 1 has 7 tokens, but the bound is 6"),
        ("dies", r"RuntimeError: ExpertParallel.combine: rank 2 did not come to call 1 within 3 s"),
        ("hangs", r"RuntimeError: ExpertParallel.combine: rank 2 did not come to call 1 within 3"),
        ("within, dies", r"ExpertParallel.dispatch: rank 1 did not come to call 1 within 3 s"),
        ("within, hangs", r"ExpertParallel.dispatch: rank 1 did not come to call 1 within 3 s"),
        ("bound", r"ValueError: ExpertParallel.dispatch: rank \d has bound="),
    ],
)
def test_failures_name_rank_and_step(how, names, tmp_path):
    found = group.run(3, tmp_path, _failures, how, silent=int("within" in how or how == "dies"))
    gone = {1} if "within" in how else {2} if how in ("dies", "hangs") else set()
    for rank in {0, 1, 2} - gone:
        said, seconds, later = found[rank]
        assert seconds < 3 * SHORT
        assert re.search(names, said), said
        assert later == said  # the same again, at once: no later call is corrupted


def alone(**values):
    sizes = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K, "max_tokens": MOST} | values
    return bs.distributed.ExpertParallel(None, **sizes, device="cpu")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"hidden": 0}, "hidden=0 is not a positive integer"),
        ({"hidden": 20}, "hidden=20 is not a multiple of 8, .* pad rows to 24"),
        ({"max_tokens": 70000}, "max_tokens=70000 is more than 65535"),
        ({"experts": 128, "top_k": 65}, "top_k=65 is more than 64"),
        ({"experts": 1025}, "experts=1025 is more than 1024"),
        ({"timeout": float("nan")}, "timeout=nan, but must be a number"),
        ({"timeout": float("inf")}, "timeout=inf is not from 0.001 to 1e[+]09 seconds"),
        ({"timeout": 0}, "timeout=0 is not from 0.001"),
        ({"top_k": 9}, "top_k=9 is more than experts=8"),
        ({"dispatch": "bf8"}, "dispatch"),
        ({"combine": "rows"}, "combine"),
        (
            {"dispatch": "fp8", "hidden": 72},
            "hidden=72 is not a multiple of 16, the elements whose",
        ),
        ({"dispatch": "nvfp4", "hidden": 80}, "hidden=80 is not a multiple of 32"),
        ({"owners": [[0, 1], [2]]}, "owners has 2 entries, but the group has 1"),
        ({"owners": [[0, 1, 1, 2, 3, 4, 5, 6, 7]]}, "one or more different experts"),
        ({"owners": [[0, 1, 2, 4, 5, 6, 7]]}, r"no rank for the experts \[3\]"),
    ],
)
def test_bad_arguments(values, match):
    with pytest.raises(ValueError, match=match):
        alone(**values)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"timeout": "30"}, "timeout is a str"),
        ({"dtype": torch.int8}, "dtype=torch.int8 has no kernels"),
        ({"dtype": "bfloat16"}, "not a torch.dtype; pass torch.bfloat16"),
    ],
)
def test_arguments_of_other_types(values, match):
    with pytest.raises(TypeError, match=f"ExpertParallel: .*{match}"):
        alone(**values)


def _other(**values):
    return lambda x, weights, *rest: ((x, weights, *rest), values)


WRONG = {
    "activation": (_other(activation="swigluu"), "activation='swigluu' is not known"),
    "no hash": (_other(activation=["swiglu"]), "activation="),
    "gate": (_other(activation="relu2"), "does not go with w13"),
    "limit": (_other(limit=-1.0), "limit=-1.0 is not above 0"),
    "scales": (_other(act_fmt="fp8_tensor"), "a1_scale is missing"),
    "scale": (
        _other(act_fmt="fp8_tensor", a1_scale=torch.ones(2), a2_scale=torch.ones(1)),
        "a1_scale has shape",
    ),
    "its grad": (
        _other(act_fmt="nvfp4", a2_scale=torch.ones(1, requires_grad=True)),
        "a2_scale requires grad",
    ),
    "hidden": (
        lambda x, weights, *rest: ((x, replace(weights, hidden=128), *rest), {}),
        "the weights have H=128",
    ),
    "layout": (
        lambda x, weights, *rest: ((x, replace(weights, layout="tiles64"), *rest), {}),
        "the weights are in layout 'tiles64'",
    ),
    "grad": (
        lambda x, weights, ids, factors: ((x, weights, ids, factors.requires_grad_()), {}),
        "topk_weights requires grad",
    ),
    "out": (_other(out=torch.empty(2, HIDDEN, dtype=torch.bfloat16)), "out has dtype bfloat16"),
    "shape of out": (_other(out=torch.empty(1, HIDDEN)), "out has shape"),
    "strides of out": (_other(out=torch.empty(HIDDEN, 2).T), "out of shape .* has strides"),
    "grad of out": (_other(out=torch.empty(2, HIDDEN, requires_grad=True)), "out requires grad"),
    "out is hidden": (lambda *given: (given, {"out": given[0]}), "out overlaps hidden"),
}
"""What is wrong with a call of a layer, and what is said of it."""


@pytest.mark.parametrize("what", WRONG)
def test_wrong_calls_send_nothing(what):
    """So that the same rank may come with a right one."""
    change, match = WRONG[what]
    ep, weights = alone(dtype=torch.float32, combine="sums"), prepared(layer(), range(EXPERTS))
    x, ids, factors = tokens(0, 0, 2, torch.float32)
    for _ in range(2):
        given, options = change(x.clone(), weights, ids, factors.clone())
        with pytest.raises((TypeError, ValueError), match=match):
            bs.fused_moe(*given, **options, ep=ep)
        assert ep._exchange.epoch == 0
        ep._check_layer((x, ids, factors), weights, Options())  # one that is right is remembered
    assert torch.equal(
        bs.fused_moe(x, weights, ids, factors, ep=ep), bs.fused_moe(x, weights, ids, factors)
    )


def test_layers_that_were_checked(monkeypatch):
    """Of the same options and sizes, with other static scales."""
    ep, weights = alone(dtype=torch.float32), prepared(layer(), range(EXPERTS))
    rows = tokens(0, 0, 2, torch.float32)
    asked, real = [], parallel.check_call
    monkeypatch.setattr(parallel, "check_call", lambda *given: (asked.append(1), real(*given))[1])
    for scale in (None, None, torch.ones(1), torch.zeros(1), torch.ones(())):
        ep._check_layer(rows, weights, Options(act_fmt="nvfp4", a1_scale=scale))
    assert len(asked) == 2
    ep._check_layer(rows, weights, Options())
    assert len(asked) == 3
    with pytest.raises(ValueError, match="a1_scale has shape"):
        ep._check_layer(rows, weights, Options(act_fmt="nvfp4", a1_scale=torch.ones(2)))


def _gives_up(rank, ranks):
    def experts(*given):
        raise MemoryError("no room")

    if rank == 1:
        parallel.run_slots = experts
    ep = bs.distributed.ExpertParallel(None, EXPERTS, HIDDEN, TOP_K, MOST, dtype=torch.float32)
    weights = prepared(layer(), ep.local_experts)
    x, ids, factors = tokens(0, rank, 2, torch.float32)
    said = [_text(lambda: bs.fused_moe(x, weights, ids, factors, ep=ep)) for _ in range(2)]
    c10d.barrier()  # or it ends before the others have read what it said
    return said


def test_a_rank_whose_experts_fail_says_so(tmp_path):
    built("float32", None, EXPERTS // 2)
    found = group.run(2, tmp_path, _gives_up)
    assert [text for text, _ in found[1]] == ["MemoryError: no room"] * 2
    for text, seconds in found[0]:
        assert "ExpertParallel.combine: rank 1 is why call 1 was given up (seen by rank 0)" in text
        assert seconds < parallel.TIMEOUT / 2


@pytest.mark.parametrize("bound", [0, MOST + 1, -1, True, 2.0, None])
def test_bounds_that_buffers_do_not_hold(bound):
    ep = alone()
    with pytest.raises(ValueError, match=f"bound={bound} is not an integer from 1 to max_tokens=6"):
        ep.bound = bound
    assert ep.bound == MOST
    ep.bound = 1
    assert ep.bound == 1


def test_calls_out_of_order():
    ep = alone(dtype=torch.float32)
    x, ids, factors = tokens(0, 0, 2, torch.float32)
    came = ep.dispatch(x, ids, factors)
    with pytest.raises(ValueError, match="had no combine"):
        ep.dispatch(x, ids, factors)
    with pytest.raises(ValueError, match="the result of each slot"):
        ep.combine(x, came)
    ep.combine(torch.zeros(*came.topk_ids.shape, HIDDEN), came)
    with pytest.raises(ValueError, match="no open dispatch"):
        ep.combine(x, came)
    with pytest.raises(ValueError, match="topk_ids has shape"):
        ep.dispatch(x, ids[:1], factors)
    with pytest.raises(ValueError, match="weights are of 2 experts"):
        bs.fused_moe(x, prepared(layer(), [0, 1]), ids, factors, ep=ep)
    assert not c10d.is_initialized()


def _views(count, numbers):
    """Return a tensor [count, H], the beginning of numbers."""
    return numbers.view(-1)[: count * HIDDEN].view(count, HIDDEN)


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (lambda y, came: torch.empty(2, HIDDEN, dtype=torch.bfloat16), "out has dtype bfloat16"),
        (lambda y, came: torch.empty(3, HIDDEN), "out has shape"),
        (lambda y, came: torch.empty(2 * HIDDEN), "out has shape"),
        (lambda y, came: torch.empty(HIDDEN, 2).T, "must be contiguous"),
        (lambda y, came: torch.empty(2, HIDDEN, requires_grad=True), "out requires grad"),
        (lambda y, came: [0.0], "out is a list"),
        (lambda y, came: _views(2, y), "out overlaps y"),
        (lambda y, came: _views(2, came.kept.rows), "out overlaps dispatched.hidden"),
    ],
)
@pytest.mark.parametrize("combine", ["slots", "sums"])
def test_outputs_that_sums_do_not_fit(out, match, combine):
    ep = alone(dtype=torch.float32, combine=combine)
    came = ep.dispatch(*tokens(0, 0, 2, torch.float32))
    y = torch.zeros(*came.topk_ids.shape, HIDDEN)
    with pytest.raises((TypeError, ValueError), match=f"ExpertParallel.combine: .*{match}"):
        ep.combine(y, came, out(y, came))
    right = torch.full((2, HIDDEN), float("nan"))
    assert ep.combine(y, came, right) is right
    assert not right.any()


@pytest.mark.parametrize("combine", ["slots", "sums"])
def test_outputs_of_more_dimensions(combine):
    """They are written as rows, as by the layer of one process."""
    ep, weights = alone(dtype=torch.float32, combine=combine), prepared(layer(), range(EXPERTS))
    x, ids, factors = tokens(1, 0, 2, torch.float32)
    out, truth = torch.empty(2, 1, HIDDEN), bs.fused_moe(x, weights, ids, factors)
    assert torch.equal(bs.fused_moe(x, weights, ids, factors, ep=ep, out=out), truth)
    assert torch.equal(out.view_as(truth), truth)
    came = ep.dispatch(x, ids, factors)
    assert ep.combine(torch.zeros(2, TOP_K, HIDDEN), came, out).shape == (2, HIDDEN)
    assert not out.any()


def test_what_is_combined_is_of_the_last_dispatch():
    ep, rows = alone(dtype=torch.float32), tokens(0, 0, 2, torch.float32)
    old = ep.dispatch(*rows)
    y = torch.zeros(*old.topk_ids.shape, HIDDEN)
    ep.combine(y, old)
    last = ep.dispatch(*rows)
    for wrong in (old, last[:3], None):
        with pytest.raises(ValueError, match="dispatched is of another dispatch, whose rows are"):
            ep.combine(y, wrong)
    with pytest.raises(TypeError, match="combine: y is a list"):
        ep.combine([], last)
    with pytest.raises(ValueError, match="combine: y requires grad"):
        ep.combine(y.clone().requires_grad_(), last)
    ep.combine(y, last)


def test_the_layer_has_to_take_what_is_sent():
    """Rows as fp8 and a layer of 16 bits; a scale for rows that have none of the caller."""
    weights = prepared(layer(), range(EXPERTS))
    rows = tokens(0, 0, 2, torch.bfloat16)
    x, ids, factors = rows
    said = "act_fmt=None, but ep sends rows as dispatch='fp8' codes; pass act_fmt='fp8', or"
    with pytest.raises(ValueError, match=f"ExpertParallel: {said}"):
        bs.fused_moe(x, weights, ids, factors, ep=alone(dispatch="fp8"))
    with pytest.raises(ValueError, match="act_fmt='fp8', but ep sends rows as dispatch='nvfp4'"):
        bs.fused_moe(x, weights, ids, factors, act_fmt="fp8", ep=alone(dispatch="nvfp4"))
    with pytest.raises(ValueError, match=f"FusedMoE: {said}"):
        bs.nn.FusedMoE(weights, TOP_K, ep=alone(dispatch="fp8"))
    with pytest.raises(ValueError, match="a1_scale is given, but dispatch='fp8' has no static"):
        alone(dispatch="fp8").dispatch(*rows, torch.ones(1))
    with pytest.raises(ValueError, match="a1_scale has shape"):
        alone(dispatch="nvfp4").dispatch(*rows, torch.ones(2))
    with pytest.raises(TypeError, match="a1_scale has dtype float64"):
        alone(dispatch="nvfp4").dispatch(*rows, torch.ones(1, dtype=torch.float64))
    assert alone(dispatch="fp8").buffer_bytes == 0
