"""What models of transformers have fused: products of one input, gates and ups, norms, attention.

That logits stay those of the dequantised model is tested with everything else, in
test_transformers.py; here: what is fused and what is not, and that parts get what is theirs.
"""

from __future__ import annotations

import copy
import re
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blockscale as bs
from tests.integrations.test_transformers import FLAT, loaded, logits, made, near, saved_again
from tests.kit import hf_models
from tests.kit.helpers import rejects

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("blockscale.integrations.transformers")
fused = pytest.importorskip("blockscale.integrations.hf_fused")

K, SIZES = 32, (8, 4, 12)


def linear(n: int = sum(SIZES), seed: int = 0) -> bs.nn.Linear:
    weight = torch.randn(n, K, generator=torch.Generator().manual_seed(seed))
    return bs.nn.Linear.from_float(weight)


class Counted(torch.nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = linear(), 0
        self.in_features, self.out_features = K, sum(SIZES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


@pytest.fixture
def parts() -> Any:
    """The layer, and the modules that share it."""
    layer: Any = Counted()
    shared = fused.Shared(layer, SIZES)
    return layer, [fused.Part(shared, number) for number in range(len(SIZES))]


def wanted(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return layer.layer(x).split(SIZES, -1)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- Layers that read the same tensor -----------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_one_product_serves_all_parts(parts, order):
    layer, each = parts
    for seed in (1, 2):
        x = random(2, 3, K, seed=seed)
        for number in order:
            assert torch.equal(each[number](x), wanted(layer, x)[number])
    assert layer.calls == 2, "one for each tensor"
    assert each[0].shared.held is None, "nothing is kept of what all parts have had"
    assert [part.out_features for part in each] == [*SIZES]
    assert [part.in_features for part in each] == [K] * 3


def test_a_part_that_is_called_by_itself_is_right(parts):
    """With another tensor of the same values, once more, or after the tensor was written to."""
    layer, (q, k, v) = parts
    x, other = random(3, K), random(5, K, seed=2)
    assert torch.equal(q(x), wanted(layer, x)[0])
    assert torch.equal(q(x), wanted(layer, x)[0])
    assert torch.equal(k(other), wanted(layer, other)[1])
    assert torch.equal(k(x), wanted(layer, x)[1])
    assert torch.equal(v(x.clone()), wanted(layer, x)[2])
    q(x)
    x.mul_(2)
    assert torch.equal(k(x), wanted(layer, x)[1])
    with torch.inference_mode():
        inner = random(3, K)
        assert torch.equal(q(inner), wanted(layer, inner)[0])
        assert torch.equal(v(inner), wanted(layer, inner)[2])


def test_threads_do_not_get_each_others_columns(parts):
    layer, each = parts
    given = [random(4, K, seed=seed) for seed in range(2)]
    truth = [wanted(layer, x) for x in given]
    wrong, barrier = [], Barrier(2)

    def run(number: int) -> None:
        barrier.wait()
        for _ in range(200):
            for at, part in enumerate(each):
                if not torch.equal(part(given[number]), truth[number][at]):
                    wrong.append((number, at))

    threads = [Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copies_share_among_themselves(parts):
    layer, each = parts
    holder = torch.nn.ModuleDict({"whole": layer, **{str(i): p for i, p in enumerate(each)}})
    again = copy.deepcopy(holder)
    x = random(3, K)
    again["0"](x)
    again["1"](x)
    assert (again["whole"].calls, layer.calls) == (1, 0)
    assert again["0"].shared.layer is again["whole"]
    assert not [*each[0].buffers()], "the weight is the parent's"


def test_compiled_parts_are_one_product(parts):
    layer, each = parts
    layer.calls = 0
    whole, count = layer.layer, []

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [part(x) for part in each]

    def backend(graph: Any, given: Any) -> Any:
        count.append(sum("blockscale" in str(node.target) for node in graph.graph.nodes))
        return graph

    for part in each:
        part.shared.layer = whole
    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    with torch.no_grad():
        for seed in (1, 2):
            x = random(3, K, seed=seed)
            for got, want in zip(compiled(x), whole(x).split(SIZES, -1), strict=True):
                assert torch.equal(got, want)
    assert count == [1]
    assert each[0].shared.held is None


# ---- What is recognised -------------------------------------------------------------------------


class Mlp(torch.nn.Module):
    """An MLP as models have it, but for what a test changes."""

    def __init__(self, act: Any = torch.nn.SiLU(), bias: bool = True, more: bool = False) -> None:  # noqa: B008
        super().__init__()
        self.gate_proj, self.up_proj = torch.nn.Linear(4, 3, bias), torch.nn.Linear(4, 3, bias)
        self.down_proj, self.act_fn = torch.nn.Linear(3, 4, bias), act
        if more:
            self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Clamped(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-3, 3))


class Swapped(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Called(Mlp):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize(
    ("module", "act"),
    [
        (Mlp(), "silu"),
        (Mlp(torch.nn.GELU("tanh")), "gelu_tanh"),
        (Mlp(torch.nn.GELU()), None),
        (Mlp(torch.nn.Identity()), None),
        (Mlp(more=True), None),
        (Mlp(torch.nn.PReLU()), None),
        (Clamped(), None),
        (Swapped(), None),
        (Called(), None),
        (torch.nn.Sequential(), None),
    ],
)
def test_mlps_are_tried(module, act):
    assert fused.mlp_activation(module.to("meta")) == act


class Norm(torch.nn.Module):
    """As `LlamaRMSNorm`; ``plus``: Gemma's weights are around 0."""

    def __init__(self, eps: float = 1e-6, plus: float = 0.0, mean: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(random(16, seed=5))
        self.variance_epsilon, self.plus, self.mean = eps, plus, mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True) if self.mean else wide
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.plus) * wide.to(x.dtype)


class Doubled(Norm):
    """Whose eps is another than it says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.variance_epsilon, before = 2 * self.variance_epsilon, self.variance_epsilon
        found = super().forward(x)
        self.variance_epsilon = before
        return found


def test_norms_are_tried():
    kept = {
        "plus": Norm(plus=1.0),
        "layer": Norm(mean=True),
        "doubled": Doubled(),
        "torch": torch.nn.RMSNorm(16),
        "wider": Norm().double(),
    }
    model = torch.nn.ModuleDict({"rms": Norm(1e-3), **kept})
    x, weight = random(3, 16), model["rms"].weight
    before = model["rms"](x)
    fused.fuse_norms(model, torch.float32)
    assert {name: model[name] for name in kept} == kept
    assert type(model["rms"]) is torch.nn.RMSNorm
    assert model["rms"].weight is weight
    assert torch.allclose(model["rms"](x), before, rtol=1e-6, atol=1e-6)
    rounded = model["rms"].bfloat16()(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    error = (rounded.float() - before).norm() / before.norm()
    assert error < 6e-3, "the input, the weight and the result are rounded"


# ---- Models -------------------------------------------------------------------------------------


def test_scales_of_parts_that_differ_stay(tmp_path):
    """Each row has that of its part; codes and scales are saved as they were read."""
    stored = made(tmp_path, "llama", "modelopt-nvfp4", num_hidden_layers=1)
    model = loaded(stored.folder)
    layer = model.model.layers[0]
    weights = layer.self_attn.qkv_proj.weights
    assert weights.by_row
    assert len(weights.global_scale.unique()) == 3
    assert type(layer.mlp).__name__ == "GatedMlp"
    assert layer.mlp.gate_up_proj.weights.global_scale.shape == (2,)
    near(model, stored.dense)
    saved_again(model, tmp_path / "again")
    before, after = (bs.checkpoints.open(p) for p in (stored.folder, tmp_path / "again"))
    assert {n for n in before.names if "input_scale" not in n} == set(after.names)
    for name in stored.quantised:
        assert torch.equal(after[name].packed, before[name].packed), name
        assert torch.equal(after[name].dequantize(), before[name].dequantize()), name


def test_scales_that_are_equal_are_one(tmp_path):
    stored = made(tmp_path, "llama", "modelopt-mxfp4", num_hidden_layers=1)
    weights = loaded(stored.folder).model.layers[0].self_attn.qkv_proj.weights
    assert not weights.by_row
    assert weights.global_scale.shape == (1,)


def test_parts_in_another_order_of_groups_stay_apart(tmp_path):
    """Act-order of GPTQ, which each layer has of its own."""
    stored = made(tmp_path, "llama", "gptq", num_hidden_layers=1)
    model = loaded(stored.folder)
    assert isinstance(model.model.layers[0].self_attn.q_proj, bs.nn.Int4Linear)
    assert isinstance(model.model.layers[0].mlp.up_proj, bs.nn.Int4Linear)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, ("Part", "GatedMlp", "RMSNorm")),
        ({"projections": False}, ("Linear", "GatedMlp", "RMSNorm")),
        ({"mlps": False}, ("Part", "LlamaMLP", "RMSNorm")),
        ({"norms": False}, ("Part", "GatedMlp", "LlamaRMSNorm")),
    ],
)
def test_everything_can_be_left_out(tmp_path, options, kinds):
    stored = made(tmp_path, "llama", "ct-nvfp4", num_hidden_layers=1)
    with hf.fusing(**options):
        model = loaded(stored.folder)
        saved_again(model, tmp_path / "again")
    layer = model.model.layers[0]
    found = layer.self_attn.q_proj, layer.mlp, layer.input_layernorm
    assert tuple(type(module).__name__ for module in found) == kinds
    if kinds[1] == "LlamaMLP":
        assert type(layer.mlp.up_proj).__name__ == "Part", "gate and up are one product still"
    near(model, stored.dense)


def test_layers_that_are_quantised_while_loading_are_fused(tmp_path):
    hf_models.stock(tmp_path / "plain", hf_models.config("llama", num_hidden_layers=1))
    for fmt in ("nvfp4", "int4"):
        config = hf.BlockscaleConfig(fmt, skip=["o_proj"])
        whole = loaded(tmp_path / "plain", quantization_config=config)
        with hf.fusing(projections=False, mlps=False):
            apart = loaded(tmp_path / "plain", quantization_config=config)
        assert type(whole.model.layers[0].self_attn.v_proj).__name__ == "Part"
        assert type(apart.model.layers[0].self_attn.v_proj).__name__ != "Part"
        torch.testing.assert_close(logits(whole), logits(apart), rtol=1e-4, atol=1e-5)
        saved_again(whole, tmp_path / fmt)


# ---- Attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "few", "added"),
    [(1, True, False), (3, True, True), (3, False, True), (1, False, False)],
)
def test_attention_of_one_token(rows, few, added, monkeypatch):
    """Queries that share keys; a mask for each row of the batch; beside NumPy in float64."""
    from blockscale.integrations import hf_attention

    heads, groups, length, size = 6, 2, 9, 8
    q, k, v = (
        random(rows, h, n, size, seed=h + n) for h, n in ((heads, 1), (groups, length), (groups, 9))
    )
    mask = torch.arange(length) <= torch.arange(4, 4 + rows)[:, None, None, None]
    monkeypatch.setattr(hf_attention, "sdpa_attention_forward", None)  # is not called
    monkeypatch.setattr(hf_attention, "few", lambda *_: few)
    module = torch.nn.Identity()
    given = torch.where(mask, 0.0, -torch.inf) if added else mask
    got, _ = hf_attention.attention(module, q, k, v, given, scaling=0.3)
    assert got.shape == (rows, 1, heads, size)
    for b in range(rows):
        for h in range(heads):
            keys, values = k[b, h // 3].double().numpy(), v[b, h // 3].double().numpy()
            scores = 0.3 * keys @ q[b, h, 0].double().numpy()
            weights = np.where(mask[b, 0, 0].numpy(), np.exp(scores - scores.max()), 0)
            want = weights @ values / weights.sum()
            np.testing.assert_allclose(got[b, 0, h].numpy(), want, rtol=1e-5, atol=1e-6)


def test_products_are_for_few_heads_of_keys(monkeypatch):
    """Of GPUs alone; of more heads where it is compiled or keys are many; of 16 bits."""
    from blockscale.integrations import hf_attention

    class Fake:
        """What `few` asks of a tensor."""

        is_cuda, requires_grad, dtype = True, False, torch.bfloat16

        def __init__(self, *shape):
            self.shape = shape

    def asked(batch, length):
        return hf_attention.few(Fake(batch, 8, 4, 128), Fake(batch, 8, length, 128))

    many, long = hf_attention.HEADS // 8, hf_attention.LENGTH
    assert [asked(many, long), asked(many + 1, long), asked(many, long - 1)] == [True, False, False]
    assert [asked(many // 2, 64), asked(many // 2 + 1, 64)] == [True, False]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert [asked(many, 64), asked(many + 1, long)] == [True, False]
    monkeypatch.setattr(hf_attention, "FLOAT_SUMS", False)
    assert not asked(1, long)
    monkeypatch.setattr(hf_attention, "FLOAT_SUMS", True)
    monkeypatch.setattr(Fake, "dtype", torch.float32)
    assert not asked(1, long)
    monkeypatch.setattr(Fake, "dtype", torch.float16)
    monkeypatch.setattr(Fake, "is_cuda", False)
    assert not asked(1, long)


@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize("scaling", [None, 0.5])
def test_scores_are_scaled(by_products, scaling, monkeypatch):
    """As a model says, else by the root of a head's size."""
    from blockscale.integrations import hf_attention

    monkeypatch.setattr(hf_attention, "few", lambda rows, key: by_products)
    made = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 1, 16, generator=made)
    key, value = torch.randn(2, 2, 2, 9, 16, generator=made)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    options = {} if scaling is None else {"scaling": scaling}
    found, _ = hf_attention.attention(torch.nn.Module(), query, key, value, mask, **options)
    keys, values = (part.double().repeat_interleave(2, 1) for part in (key, value))
    scores = query.double() @ keys.mT * (scaling or 16**-0.5)
    want = (scores.softmax(-1) @ values).transpose(1, 2)
    assert torch.allclose(found.double(), want, atol=1e-5)


def test_the_choice_breaks_no_graph():
    """A break in each layer cost a fourth of a step's time on an H200."""
    from blockscale.integrations import hf_attention

    def chosen(rows, key):
        return rows if hf_attention.few(rows, key) else key

    with FakeTensorMode(), torch.no_grad():
        rows, key = (
            torch.empty(1, 8, n, 128, dtype=torch.bfloat16, device="cuda") for n in (4, 64)
        )
        found = torch.compile(chosen, backend="eager", fullgraph=True)(rows, key)
    assert found.shape == (rows if hf_attention.FLOAT_SUMS else key).shape


def test_attention_of_a_model(tmp_path):
    """Prompts and steps with a static cache; a sink is refused."""
    stored = made(tmp_path, "llama", "modelopt-nvfp4", num_key_value_heads=2)
    given = torch.tensor([[5, 9, 3, 7], [0, 0, 8, 2]])
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    options["attention_mask"] = (given > 0).long()
    plain = loaded(stored.folder).generate(given, **options)
    model = loaded(stored.folder, attn_implementation="blockscale")
    assert torch.equal(model.generate(given, **options), plain)
    near(model, stored.dense)
    oss = made(tmp_path / "oss", "gpt_oss", "openai")
    with rejects("attn_implementation='blockscale'", "has sinks"):
        logits(loaded(oss.folder, attn_implementation="blockscale"))


def test_bfloat16_with_all_of_it(tmp_path):
    stored = made(tmp_path, "llama", "modelopt-nvfp4", initializer_range=FLAT)
    model = loaded(stored.folder, torch.bfloat16, attn_implementation="blockscale")
    near(model, stored.dense, torch.bfloat16)
    assert not re.search(r"LlamaRMSNorm|LlamaMLP", str(model))
