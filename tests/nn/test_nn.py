"""blockscale.nn: modules give what the functions give, and keep their weights in state_dict."""

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale import nn
from tests.kit.helpers import rejects, same
from tests.reference import core as ref
from tests.reference import moe as moe

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 64, 32  # as in test_nn_checkpoint: its kernels


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values)


def prepared(seed=0, **options):
    """Return random weights in layout "linear", or another."""
    layer = moe.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, "nvfp4", seed=seed)
    names = ("w13", "w2", "w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
    given = {name: torch.from_numpy(getattr(layer, name)) for name in names}
    return bs.prepare_moe_weights(**given, **options)


WEIGHTS = prepared()
X, LOGITS = normal(5, HIDDEN), normal(5, EXPERTS, seed=1)
ROUTED = bs.moe_route(LOGITS, TOP_K)
EXPECTED = bs.fused_moe(X, WEIGHTS, *ROUTED)


# ---- FusedMoE -----------------------------------------------------------------------------------


def test_layer_is_the_functions():
    """Logits, or ids and weights; leading dimensions stay."""
    layer = nn.FusedMoE(WEIGHTS, TOP_K)
    same(layer(X, LOGITS), EXPECTED)
    same(layer(X, topk_ids=ROUTED[0], topk_weights=ROUTED[1]), EXPECTED)
    y = layer(X.view(1, 5, HIDDEN), LOGITS.view(1, 5, EXPERTS))
    same(y, EXPECTED[None])
    same(layer(X.view(5, 1, HIDDEN), topk_ids=ROUTED[0][:, None], topk_weights=ROUTED[1][:, None]),
         EXPECTED[:, None])  # fmt: skip


def test_router_and_shared_expert():
    """The router makes the logits; what the shared expert makes is added."""
    router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
    shared = nn.Linear.from_float(normal(HIDDEN, HIDDEN, seed=2))
    layer = nn.FusedMoE(WEIGHTS, TOP_K, router=router, shared=shared)
    with torch.no_grad():
        routed = bs.moe_route(router(X), TOP_K)
        same(layer(X), bs.fused_moe(X, WEIGHTS, *routed) + shared(X))


@pytest.mark.parametrize("act_fmt", [None, "nvfp4"])
def test_shared_experts_among_the_others(act_fmt):
    """The last of the weights have every token, with weight 1, whatever the router says."""
    count, routed = 2, EXPERTS - 2
    layer = nn.FusedMoE(WEIGHTS, 1, shared_experts=count, act_fmt=act_fmt)
    logits = LOGITS[:, :routed].contiguous()
    ids, factors = bs.moe_route(logits, 1)
    every = torch.tensor([[routed, routed + 1]], dtype=torch.int32).repeat(len(X), 1)
    both = torch.cat((ids, every), 1), torch.cat((factors, torch.ones(len(X), count)), 1)
    same(layer(X, logits), bs.fused_moe(X, WEIGHTS, *both, act_fmt=act_fmt))
    given = layer(X, topk_ids=ids.long(), topk_weights=factors)
    same(given, layer(X, logits))
    dropped = torch.full_like(ids, routed)  # an id that the router does not have
    alone = bs.fused_moe(X, WEIGHTS, every, torch.ones(len(X), count), act_fmt=act_fmt)
    same(layer(X, topk_ids=dropped, topk_weights=factors), alone)


def test_shared_experts_that_are_refused():
    with rejects("FusedMoE", "shared_experts=1", "weight_on_input", "shared="):
        nn.FusedMoE(WEIGHTS, 1, shared_experts=1, weight_on_input=True)
    with rejects("FusedMoE", "shared_experts=4", "1 to 3"):
        nn.FusedMoE(WEIGHTS, 1, shared_experts=4)(X, LOGITS)


def test_routing_options():
    """They reach moe_route."""
    bias = normal(EXPERTS, seed=3)
    options = {"renormalize": False, "scale": 2.5, "n_group": 2, "topk_group": 1}
    layer = nn.FusedMoE(WEIGHTS, TOP_K, scoring="sigmoid", correction_bias=bias, **options)
    routed = bs.moe_route(LOGITS, TOP_K, scoring="sigmoid", correction_bias=bias, **options)
    for got, expected in zip(layer.route(LOGITS), routed, strict=True):
        assert torch.equal(got, expected)


def test_without_a_router():
    with rejects("FusedMoE", "neither logits nor topk_ids", "router"):
        nn.FusedMoE(WEIGHTS, TOP_K)(X)


def test_state_dict(tmp_path):
    """Saved, loaded into other weights or into none, the layer gives the same."""
    layer = nn.FusedMoE(WEIGHTS, TOP_K, correction_bias=torch.zeros(EXPERTS))
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    others = (prepared(seed=1), torch.ones(EXPERTS)), (None, torch.ones(EXPERTS)), (None, None)
    for weights, bias in others:
        other = nn.FusedMoE(weights, TOP_K, correction_bias=bias)
        assert other.load_state_dict(state) == ([], [])
        same(other(X, LOGITS), EXPECTED)
        assert other.weights.meta() == WEIGHTS.meta()


def test_state_of_another_size():
    """Weights are taken over with their sizes, format and layout."""
    tiled = prepared(layout="tiles64")
    layer = nn.FusedMoE(WEIGHTS, TOP_K)
    layer.load_state_dict(nn.FusedMoE(tiled, TOP_K).state_dict())
    assert layer.weights.meta() == tiled.meta()
    for (_, a), (_, b) in zip(layer.weights.tensors(), tiled.tensors(), strict=True):
        assert torch.equal(a, b)
    with rejects("layout 'tiles64'", "cpu"):
        layer(X, LOGITS)


def test_buffers_that_fit_stay():
    """A captured CUDA graph reads the memory that it knew."""
    layer = nn.FusedMoE(prepared(seed=1), TOP_K)
    before = [value.data_ptr() for value in layer.buffers()]
    layer(X, LOGITS)
    layer.load_state_dict(nn.FusedMoE(WEIGHTS, TOP_K).state_dict())
    assert [value.data_ptr() for value in layer.buffers()] == before
    same(layer(X, LOGITS), EXPECTED)


def test_in_a_model():
    """Names have the module's prefix; loading a model finds its layers."""
    model = torch.nn.Sequential(
        nn.FusedMoE(WEIGHTS, TOP_K, router=torch.nn.Linear(HIDDEN, EXPERTS))
    )
    state = model.state_dict()
    assert {"0.w13", "0.w2_scale", "0.meta", "0.router.weight"} <= set(state)
    empty = torch.nn.Sequential(nn.FusedMoE(None, TOP_K, router=torch.nn.Linear(HIDDEN, EXPERTS)))
    with rejects("no weights yet", "state_dict"):
        empty(X)
    empty.load_state_dict(state)
    assert "meta" in "".join(state)  # the caller's state is as it was
    with torch.no_grad():
        same(empty(X), model(X))


def test_states_that_do_not_fit():
    """A missing description, or another kind of experts, is said."""
    layer = nn.FusedMoE(WEIGHTS, TOP_K)
    state = layer.state_dict()
    relu = moe.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, "mxfp4", activation="relu2")
    given = {n: torch.from_numpy(getattr(relu, n)) for n in ("w13", "w2", "w13_scale", "w2_scale")}
    other = nn.FusedMoE(
        bs.prepare_moe_weights(**given, fmt="mxfp4", activation="relu2"), 2, activation="relu2"
    )
    with pytest.raises(RuntimeError, match=r"gated=True experts, but .* 'relu2'"):
        other.load_state_dict(state)
    del state["meta"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"meta"'):
        layer.load_state_dict(state)


def test_dtypes_stay():
    """module.to(dtype) is for the other modules around: scales must not be rounded."""
    layer = nn.FusedMoE(WEIGHTS, TOP_K, correction_bias=torch.rand(EXPERTS),
                        router=torch.nn.Linear(HIDDEN, EXPERTS)).to(torch.bfloat16)  # fmt: skip
    assert layer.router.weight.dtype == torch.bfloat16
    assert layer.correction_bias.dtype == torch.float32
    for (_, a), (_, b) in zip(layer.weights.tensors(), WEIGHTS.tensors(), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert layer(X.bfloat16()).dtype == torch.bfloat16


def test_meta_device():
    """A model may be made without memory and loaded afterwards."""
    layer = nn.FusedMoE(WEIGHTS, TOP_K).to("meta")
    assert layer.weights.w13.is_meta
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(nn.FusedMoE(WEIGHTS, TOP_K).state_dict())
    same(layer(X, LOGITS), EXPECTED)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend):
    """One graph, with both functions as operators."""
    torch._dynamo.reset()
    layer = nn.FusedMoE(WEIGHTS, TOP_K, router=torch.nn.Linear(HIDDEN, EXPERTS))
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        same(compiled(X), layer(X))


def test_says_what_it_is():
    text = repr(nn.FusedMoE(WEIGHTS, TOP_K))
    for word in ("experts=4", "hidden=64", "intermediate=32", "nvfp4", "top_k=2", "swiglu"):
        assert word in text


# ---- Linear -------------------------------------------------------------------------------------


FORMATS = ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.exhaustive)]
"""test_nn_checkpoint.py runs both."""


@pytest.mark.parametrize("fmt", FORMATS)
def test_linear(fmt, tmp_path):
    """A quantised layer gives bs.linear on its weight, which is near the layer's; and loads."""
    plain = torch.nn.Linear(64, 32)
    layer = nn.Linear.from_float(plain, fmt)
    scale = (plain.weight.abs().amax() / 2688).reshape(1).detach() if fmt == "nvfp4" else None
    packed, block_scale = bs.quantize(plain.weight.detach(), fmt, scale)
    bias = plain.bias.detach()
    expected = bs.linear(X, packed, block_scale, fmt, scale, bias)
    same(layer(X), expected)
    error = ref.row_error(expected.numpy(), plain(X).detach().double().numpy())
    assert error.max() < 0.2  # 4 bits
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = nn.Linear()
    with rejects("Linear", "no weight yet"):
        other(X)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    same(other(X), expected)
    assert f"in_features=64, out_features=32, fmt={fmt}" in repr(other)
    assert layer.to(torch.bfloat16)(X.bfloat16()).dtype == torch.bfloat16
    assert layer.bias.dtype == torch.float32


def gated_layer(**options):
    w = bs.prepare_linear_weights(
        *bs.quantize(normal(32, 64)), bias=normal(32), gated=True, **options
    )
    return nn.Linear(w, activation="silu"), w


@pytest.mark.parametrize("fmt", ["nvfp4", "int4"])
def test_layers_take_rows_of_any_strides(fmt):
    """A model passes the last of its hidden states; torch's own layers take them too."""
    if fmt == "int4":
        codes = torch.randint(0, 256, (32, 32), dtype=torch.uint8)
        weight = bs.int4.prepare(codes, torch.rand(32, 2) + 0.5, group_size=32, layout="rows")
        layer = nn.Int4Linear(weight)
    else:
        layer = nn.Linear(*bs.quantize(normal(32, 64)))
    x = normal(2, 3, 64)
    for rows in (x[:, -1:], x.transpose(0, 1), x[:, ::2]):
        assert not rows.is_contiguous()
        same(layer(rows), layer(rows.clone(memory_format=torch.contiguous_format)))


def test_linear_of_prepared_weights(tmp_path):
    """Gated, with an activation and a residual: bs.linear on its buffers, saved and loaded."""
    layer, weights = gated_layer()
    residual = normal(len(X), 16)
    expected = bs.linear(X, weights, activation="silu", residual=residual)
    same(layer(X, residual), expected)
    assert (layer.in_features, layer.out_features) == (64, 16)
    assert "fmt=nvfp4, activation=silu, gated" in repr(layer)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    other = nn.Linear(gated=True, activation="silu")
    other.load_state_dict(state)
    same(other(X, residual), expected)
    with pytest.raises(RuntimeError, match="gated=True, but the module has gated=False"):
        nn.Linear().load_state_dict(state)
    with rejects("Linear", "activation='none'", "gated"):
        nn.Linear(weights)


def test_linear_keeps_its_layout():
    """As a layer in layout "tiles64" is moved, saved and loaded; the CPU says what it lacks."""
    layer, weights = gated_layer(layout="tiles64")
    assert layer.to(torch.float16).weights.meta() == weights.meta()
    other = nn.Linear(gated=True, activation="silu")
    other.load_state_dict(layer.state_dict())
    for (name, a), (_, b) in zip(other.weights.tensors(), weights.tensors(), strict=True):
        assert torch.equal(a, b), name
    assert other.weights.meta() == weights.meta()
    assert (other.in_features, other.out_features) == (64, 16)
    with rejects("linear", "layout 'tiles64'", "'linear'"):
        other(X)
    made = layer.to("meta").to_empty(device="cpu")
    made.load_state_dict(other.state_dict())
    assert torch.equal(made.weights.packed, weights.packed)


def test_linear_of_a_state_without_sizes():
    """States that were saved before weights were prepared have a format alone."""
    layer = nn.Linear.from_float(torch.nn.Linear(64, 32))
    state = layer.state_dict()
    state["meta"] = torch.tensor([*b'{"fmt": "nvfp4"}'], dtype=torch.uint8)
    state["block_scale"] = state["block_scale"].view(torch.float8_e4m3fn)
    other = nn.Linear()
    other.load_state_dict(state)
    same(other(X), layer(X))
    assert (other.in_features, other.out_features) == (64, 32)


def test_dense_linear_with_an_activation():
    """The same on a dense weight, whose product torch computes."""
    weight, bias = normal(32, 64), normal(32)
    layer = nn.Linear(fmt="dense", weight=weight, bias=bias, gated=True, activation="relu2")
    gate, up = torch.nn.functional.linear(X, weight, bias).chunk(2, -1)
    residual = normal(len(X), 16)
    assert torch.allclose(layer(X, residual), gate.relu() ** 2 * up + residual)
    assert (layer.in_features, layer.out_features) == (64, 16)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_linear(backend):
    """One graph, whose buffers are the operator's arguments."""
    torch._dynamo.reset()
    layer, _ = gated_layer()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(2):
        same(compiled(X), layer(X))


def test_linear_zero_weight():
    """A weight of zeros has a global scale all the same."""
    layer = nn.Linear.from_float(torch.zeros(32, 64))
    assert not layer(X).any()
    with rejects("Linear.from_float", "weight is a list"):
        nn.Linear.from_float([1.0])


def test_rows_of_fp8():
    """The module passes act_fmt on, of tensors and of a prepared weight; a dense one has none."""
    packed, scale = bs.quantize(normal(32, 64), "mxfp4")
    x = normal(3, 64, seed=1)
    weights = bs.prepare_linear_weights(packed, scale, fmt="mxfp4", act_fmt="fp8")
    want = bs.linear(x, weights, act_fmt="fp8")
    for given in ((weights,), (packed, scale, "mxfp4")):
        for fast in (False, True):  # which only products of 8 bits differ by
            layer = nn.Linear(*given, act_fmt="fp8", fast_accum=fast)
            same(layer(x), want)
            assert "act_fmt=fp8" in repr(layer)
            assert ("fast_accum" in repr(layer)) == fast
    assert not torch.equal(want, bs.linear(x, weights))
    with rejects("Linear: act_fmt='fp8'", "fmt='dense'"):
        nn.Linear(fmt="dense", weight=normal(32, 64), act_fmt="fp8")
    with rejects("Linear: fast_accum=True", "act_fmt=None"):
        nn.Linear(weights, fast_accum=True)


# ---- What does not fit together -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", torch.ones(64)),
        ("global_scale", torch.ones(1)),
        ("block_scale", torch.ones(64, 4)),
        ("weight", torch.ones(64, 64)),
        ("fmt", "mxfp4"),
        ("gated", True),
    ],
)
def test_nothing_goes_beside_a_prepared_weight(name, value):
    weights = nn.Linear.from_float(normal(64, HIDDEN)).weights
    with rejects(f"but {name} is given too", "prepare_linear_weights"):
        nn.Linear(weights, activation="silu", **{name: value})


def test_numbers_of_another_count_are_refused():
    """Broadcast they would make results of another shape."""
    weight, one_row = normal(96, HIDDEN), normal(HIDDEN)
    with rejects(r"pre_quant_scale has shape \[5, 1\]", f"have .{HIDDEN}"):
        nn.Linear(fmt="dense", weight=weight, pre_quant_scale=normal(5, 1))
    weights = nn.Linear.from_float(weight).weights
    with rejects(r"pre_quant_scale has shape \[63\]", f"have .{HIDDEN}"):
        nn.Linear(weights, pre_quant_scale=one_row[1:])
    with rejects(r"bias has shape \[1\]", "have .96"):
        nn.Linear(fmt="dense", weight=weight, bias=one_row[:1])
    layer = nn.Linear(fmt="dense", weight=weight)
    same(layer(X, normal(5, 96)), layer(X) + normal(5, 96))
    for residual in (normal(1), normal(7, 5, 96), normal(5, 96).half()):
        with pytest.raises((TypeError, ValueError), match="residual has"):
            layer(X, residual)


def test_rows_of_fp8_see_a_changed_weight():
    """Calls with an act_fmt multiply a second copy, made anew once the first is another."""
    codes = torch.randint(0, 256, (96, 32), dtype=torch.uint8)
    weight = bs.int4.prepare(codes, torch.rand(96, 2), layout="rows", group_size=32)
    layer = nn.Int4Linear(weight)
    layer.act_fmt = "fp8"
    before = layer(X)
    assert torch.equal(layer(X), before)
    layer.scale.mul_(2)
    same(layer(X), 2 * before)
    layer.packed = torch.zeros_like(layer.packed)
    assert not torch.equal(layer(X), 2 * before)


def test_logits_are_of_the_experts():
    """Slots of experts that there are not would be dropped, silently."""
    layer = nn.FusedMoE(WEIGHTS, TOP_K)
    for wrong in (2, 16):
        with rejects(f"logits has {wrong} columns", f"{EXPERTS} experts"):
            layer(X, normal(5, wrong))
    layer = nn.FusedMoE(WEIGHTS, 1, weight_on_input=True)
    with rejects("topk_weights has 2 columns", "one expert"):
        layer(X, topk_ids=ROUTED[0], topk_weights=ROUTED[1])


def test_what_is_shared_keeps_the_dtype():
    shared = torch.nn.Linear(HIDDEN, HIDDEN)

    def wide(rows):
        return shared(rows.float())

    with torch.no_grad():
        rows = X.to(torch.bfloat16)
        layer = nn.FusedMoE(WEIGHTS, TOP_K)
        layer.shared = wide
        y = layer(rows, LOGITS)
        assert y.dtype == rows.dtype
        expected = bs.fused_moe(rows, WEIGHTS, *ROUTED).float() + wide(rows)
        torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
