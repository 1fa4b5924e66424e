"""States of modules: what they lack is said, parts may come in any order, others are refused."""

from itertools import permutations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import blockscale as bs
from blockscale import nn
from tests.kit.helpers import rejects

K, N, E = 64, 32, 2
BF16 = torch.bfloat16


def quantised(fmt="nvfp4", *sizes):
    return bs.quantize(torch.randn(*(sizes or (N, K))), fmt)


def linear(fmt="nvfp4", **options):
    given = {"bias": torch.randn(N), "pre_quant_scale": torch.rand(K) + 0.5}
    return nn.Linear(*quantised(fmt), fmt, torch.rand(1) if fmt == "nvfp4" else None, **given)


def dense():
    return nn.Linear(fmt="dense", weight=torch.randn(N, K).to(BF16), bias=torch.randn(N))


def int4():
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    weight = bs.int4.prepare(
        *(codes, torch.rand(N, 2) + 0.5, torch.randint(0, 16, (N, 2), dtype=torch.uint8)),
        group_size=32,
        layout="rows",
        group_index=torch.randperm(K).to(torch.int32) // 32,
        pre_quant_scale=torch.rand(K) + 0.5,
        bias=torch.randn(N),
    )
    return nn.Int4Linear(weight)


def moe():
    (w13, s13), (w2, s2) = quantised("nvfp4", E, 2 * N, K), quantised("nvfp4", E, K, N)
    weights = bs.prepare_moe_weights(
        *(w13, w2),
        w13_scale=s13,
        w2_scale=s2,
        w13_bias=torch.randn(E, 2 * N),
        w2_bias=torch.randn(E, K),
    )
    return nn.FusedMoE(weights, 1, correction_bias=torch.rand(E))


def router():
    return nn.Router(torch.randn(E, K), torch.randn(E))


def shared():
    layers = [torch.nn.Linear(K, N), torch.nn.Linear(K, N), torch.nn.Linear(N, K)]
    return nn.SharedExpert(*layers, factor=torch.randn(1, K))


KINDS = {
    "nvfp4": (linear, nn.Linear),
    "mxfp4": (lambda: linear("mxfp4"), nn.Linear),
    "dense": (dense, nn.Linear),
    "int4": (int4, nn.Int4Linear),
    "moe": (moe, lambda: nn.FusedMoE(None, 1)),
    "router": (router, router),
    "shared": (shared, shared),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def equal(module, other):
    """Whether two modules have the same state: the same names, numbers and description."""
    one, two = module.state_dict(), other.state_dict()
    return [*one] == [*two] and all(torch.equal(bits(one[name]), bits(two[name])) for name in one)


def bits(value):
    return value.contiguous().view(torch.uint8)


@each_kind
def test_each_tensor_that_a_state_lacks_is_named(kind):
    """With a buffer for it or none; what is here is not lost with it."""
    make, empty = KINDS[kind]
    state = make().state_dict()
    assert len(state) > 2
    for name in state:
        less = {key: value for key, value in state.items() if key != name}
        for other in (make(), empty()):
            with pytest.raises(RuntimeError, match=rf'Missing key.*"{name}"'):
                other.load_state_dict(less)
            if name == "meta":
                continue
            assert other.load_state_dict(less, strict=False) == ([name], [])
            other.load_state_dict({name: state[name]}, strict=False)
            assert equal(make_of(empty, state), other)


def make_of(empty, state):
    made = empty()
    assert made.load_state_dict(state) == ([], [])
    return made


@each_kind
@pytest.mark.parametrize("assign", [False, True])
def test_parts_in_any_order(kind, assign):
    """As at once: into a module like it, into one of other sizes, and into one without weights."""
    make, empty = KINDS[kind]
    state = make().state_dict()
    whole, first, *others = make_of(empty, state), *[key for key in state if key != "meta"]
    parts = [{"meta": state["meta"]}, {first: state[first]}, {key: state[key] for key in others}]
    for order in permutations(parts):
        for target in (make(), empty()):
            for part in order:
                target.load_state_dict(part, strict=False, assign=assign)
            assert equal(target, whole)


def test_parts_into_a_layer_of_another_size():
    """Nothing that is here is written before the description says what it will be."""
    state = linear().state_dict()
    parts = [{"bias": state["bias"]}, {k: v for k, v in state.items() if k != "bias"}]
    for order in (parts, parts[::-1]):
        other = nn.Linear(*quantised("nvfp4", 2 * N, K), bias=torch.randn(2 * N))
        for part in order:
            other.load_state_dict(part, strict=False)
        assert equal(other, make_of(nn.Linear, state))


def test_a_state_from_before_there_was_a_list():
    """What the module has and the state lacks is missing; parts come in any order."""
    layer = linear()
    state = layer.state_dict()
    text = b'{"fmt": "nvfp4", "gated": false}'
    state["meta"] = torch.tensor([*text], dtype=torch.uint8)
    less = {key: value for key, value in state.items() if key != "bias"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"bias"'):
        linear().load_state_dict(less)
    assert nn.Linear().load_state_dict(less) == ([], [])
    x = torch.randn(3, K)
    for order in ((less, {"bias": state["bias"]}), ({"bias": state["bias"]}, less)):
        for other in (nn.Linear(), linear()):
            for part in order:
                other.load_state_dict(part, strict=False)
            assert torch.equal(other(x), layer(x))
    old = {"meta": torch.tensor([*b'{"fmt": "dense"}'], dtype=torch.uint8)}
    other = linear()
    other.load_state_dict({**old, "weight": torch.ones(N, K)}, strict=False)
    assert other.packed is None


def test_bytes_of_another_name():
    """Scales that come alone, as E4M3, are the same bytes and not the numbers they stand for."""
    layer = linear()
    state = layer.state_dict()
    other = make_of(nn.Linear, state)
    scale = state["block_scale"].view(torch.float8_e4m3fn)
    other.load_state_dict({"block_scale": scale}, strict=False)
    assert equal(layer, other)


FAMILIES = {"nvfp4": "Linear", "mxfp4": "Linear", "dense": "Linear"}
STRANGERS = [
    (one, two)
    for one, two in permutations(KINDS, 2)
    if FAMILIES.get(one, one) != FAMILIES.get(two, two) and {one, two} != {"router", "shared"}
]
"""A router and a shared expert describe nothing: torch names what is another's."""


@pytest.mark.parametrize(("source", "target"), STRANGERS)
def test_a_state_of_another_kind_changes_nothing(source, target):
    """`Linear` takes all of its formats; of others the error says what to do."""
    make, empty = KINDS[target]
    for other in (make(), empty()):
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"load (it|a state)"):
            other.load_state_dict(KINDS[source][0]().state_dict(), strict=False)
        after = other.state_dict()
        assert [*after] == [*before]
        assert all(torch.equal(bits(after[name]), bits(before[name])) for name in after)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(3, device="meta"), "device meta.*load a state that has data"),
        ({"fmt": "nvfp4"}, "no tensor"),
        (torch.tensor([*b"[]"], dtype=torch.uint8), "not a description"),
        (torch.tensor([*b'{"tensors": {"bias": ["no", [1]]}}'], dtype=torch.uint8), "is damaged"),
        (torch.tensor([*b'{"tensors": {"bias": 1}}'], dtype=torch.uint8), "is damaged"),
        (torch.tensor([*b'{"tensors": {"bias": ["uint8", [-1]]}}'], dtype=torch.uint8), "damaged"),
    ],
)
def test_descriptions_that_cannot_be_read(value, said):
    state = {**linear().state_dict(), "meta": value}
    with pytest.raises(RuntimeError, match=said):
        nn.Linear().load_state_dict(state)


@each_kind
def test_distributed_checkpoints(kind):
    """torch finds the description under its name, and takes the state that it made."""
    make, empty = KINDS[kind]
    model = torch.nn.Sequential(make(), torch.nn.Linear(2, 2))
    state = get_model_state_dict(model)
    assert "0.meta" in state
    other = torch.nn.Sequential(empty(), torch.nn.Linear(2, 2))
    assert set_model_state_dict(other, state) == ([], [])
    assert equal(other[0], model[0])
    assert torch.equal(model[0].meta, state["0.meta"])


def test_residuals_of_int4_layers():
    """Neither broadcast, nor promoted to another dtype."""
    layer, x = int4(), torch.randn(3, K, dtype=BF16)
    residual = torch.randn(3, N, dtype=BF16)
    assert torch.equal(layer(x, residual), layer(x) + residual)
    assert layer(x[None], residual[None]).shape == (1, 3, N)
    assert layer(x, residual[None]).shape == (3, N)
    for wrong in (
        residual.float(),
        residual[:, :1].clone(),
        residual[:1],
        residual.expand(2, 3, N).clone(),
    ):
        with rejects("Int4Linear", "residual has"):
            layer(x, wrong)
