"""`blockscale convert --layout`: the bytes on the disk, and that reading gives the weights back.

Bytes are compared with loops over the formulas of each layout; tiles64 with `prepare_moe_weights`
in test_nn_checkpoint.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.convert.convert import convert
from blockscale.checkpoints.schemes.layout import turned
from tests.checkpoints.test_checkpoint_convert import contents
from tests.kit import checkpoint_files as files
from tests.kit.pairwise import few
from tests.kit.paths import CHECKPOINTS as GOLDEN
from tests.reference import core as ref
from tests.reference import int4 as reference_int4

EXPERTS = "model.layers.0.mlp.experts"
NUMPY = {
    "U8": np.uint8,
    "I32": np.int32,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": np.uint8,
}
FIELDS = ("packed", "block_scale", "global_scale", "zero", "input_scale", "pre_quant_scale")


def stored(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, E4M3 as bytes."""
    found = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        size = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:size]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                value = np.frombuffer(raw[size + first : size + last], NUMPY[entry["dtype"]])
                found[name] = value.reshape(entry["shape"])
    return found


def same_weights(made: bs.checkpoints.Checkpoint, plain: bs.checkpoints.Checkpoint) -> None:
    """Names, codes and scales are equal; values first, they matter most."""
    assert made.names == plain.names
    for name in made:
        a, b = made.weight(name), plain.weight(name)
        facts = [(w.fmt, w.shape, w.group_size, w.gate_up, w.global_divisor) for w in (a, b)]
        assert facts[0] == facts[1], name
        assert torch.equal(a.dequantize(), b.dequantize()), name
        for field in FIELDS:
            one, two = getattr(a, field), getattr(b, field)
            assert (one is None) == (two is None), (name, field)
            if one is not None:
                assert one.dtype == two.dtype, (name, field)
                assert torch.equal(one.float(), two.float().expand(one.shape)), (name, field)


def int4_words(rng, base: str, out: int, inner: int, group: int):
    """AWQ: tensors, codes, zeros, scales."""
    code, zero, scale, _ = files.int4(rng, out, inner, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        f"{base}.qweight": files.words(np.ascontiguousarray(code.T), order),
        f"{base}.qzeros": files.words(np.ascontiguousarray(zero.T), order),
        f"{base}.scales": scale.T,
    }
    return tensors, (code, zero, scale)


def experts(rng, form: str, count: int = 3, hidden: int = 128, inner: int = 64, group: int = 64):
    """Experts of one layer and a dense weight, in one of several forms; config."""
    tensors, config = {}, {}
    leaves = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    leaves["down_proj"] = (hidden, inner)
    if form == "ungated":
        leaves.pop("gate_proj")
    if form in ("awq", "nvfp4", "ungated"):
        for e in range(count):
            for leaf, (rows, cols) in leaves.items():
                base = f"{EXPERTS}.{e}.{leaf}"
                if form == "awq":
                    tensors |= int4_words(rng, base, rows, cols, group)[0]
                    continue
                code, scale, top, _ = files.nvfp4(rng, rows, cols)
                tensors[f"{base}.weight"] = files.nibbles(code)
                tensors[f"{base}.weight_scale"] = scale
                tensors[f"{base}.weight_scale_2"] = np.asarray(top)
                tensors[f"{base}.input_scale"] = np.asarray(e + 0.5, np.float32)
        if form == "awq":
            tensors |= int4_words(rng, "model.o_proj", 128, 128, group)[0]
        return tensors, config

    def values(*shape):
        return (rng.standard_normal(shape) * rng.uniform(0.5, 2)).astype(ml_dtypes.bfloat16)

    if form == "gpt-oss":
        code, scale, _ = files.mxfp4(rng, count, 2 * inner, hidden)
        tensors[f"{EXPERTS}.gate_up_proj_blocks"] = files.nibbles(code).reshape(
            count, 2 * inner, -1, 16
        )
        tensors[f"{EXPERTS}.gate_up_proj_scales"] = scale
        code, scale, _ = files.mxfp4(rng, count, hidden, inner)
        tensors[f"{EXPERTS}.down_proj_blocks"] = files.nibbles(code).reshape(count, hidden, -1, 16)
        tensors[f"{EXPERTS}.down_proj_scales"] = scale
        tensors[f"{EXPERTS}.down_proj_bias"] = values(count, hidden)
        return tensors, {"model_type": "gpt_oss"}
    if form == "plain-oss":
        config["model_type"] = "gpt_oss"
        tensors[f"{EXPERTS}.gate_up_proj"] = values(count, hidden, 2 * inner)
        tensors[f"{EXPERTS}.down_proj"] = values(count, inner, hidden)
    elif form == "plain-stacked":
        tensors[f"{EXPERTS}.gate_up_proj"] = values(count, 2 * inner, hidden)
        tensors[f"{EXPERTS}.down_proj"] = values(count, hidden, inner)
    else:
        for e in range(count):
            for leaf, shape in leaves.items():
                tensors[f"{EXPERTS}.{e}.{leaf}.weight"] = values(*shape)
    tensors["model.o_proj.weight"] = values(128, 128)
    return tensors, config


def opened(path: Path, tensors: dict, config: dict | None = None) -> bs.checkpoints.Checkpoint:
    return bs.checkpoints.open(files.folder(path, tensors, config))


FORMS = {
    "gpt-oss": ("128x4", "marlin", "tiles64"),
    "awq": ("marlin", "tiles64", "trtllm sm_90a a8"),
    "nvfp4": ("128x4", "deepgemm", "marlin", "tiles64"),
    "ungated": ("128x4", "tiles64"),
    "plain": ("128x4", "deepgemm", "marlin", "tiles64"),
    "plain-oss": ("deepgemm", "tiles64"),
    "plain-stacked": ("128x4", "deepgemm", "tiles64"),
}


TRTLLM = ("trtllm sm_80", "trtllm sm_90a", "trtllm sm_90a a8")


@pytest.mark.parametrize(
    ("form", "cases"),
    [
        *few([pytest.param(form, cases, id=form) for form, cases in FORMS.items()], every=4),
        pytest.param("awq", TRTLLM[:1], id="trtllm"),
        pytest.param("awq", TRTLLM[1:], id="others of trtllm", marks=pytest.mark.exhaustive),
    ],
)
def test_reading_undoes_every_layout(tmp_path, form, cases):
    """Whatever the layout, names and weights are those of a linear conversion."""
    sizes = {"inner": 128} if form in ("awq", "ungated") else {}
    tensors, config = experts(np.random.default_rng(1), form, **sizes)
    source = opened(tmp_path / "in", tensors, config)
    convert(source, tmp_path / "linear")
    plain = bs.checkpoints.open(tmp_path / "linear")
    for case in cases:
        layout, target, activation = [*case.split(), None, None][:3]
        options = {"layout": layout, "target": target, "activation": activation or "a16"}
        convert(source, tmp_path / case, **options)
        made = bs.checkpoints.open(tmp_path / case)
        same_weights(made, plain)
        said = json.loads((tmp_path / case / "config.json").read_text())["quantization_config"]
        assert said["blockscale"]["layout"] == layout
        record = json.loads((tmp_path / case / "blockscale_convert.json").read_text())
        assert (record["state"], record["layout"]) == ("complete", layout)
        assert any(layout in name for name in stored(tmp_path / case))
        with pytest.raises(CheckpointError, match=f"is in layout '{layout}' already; convert the"):
            convert(made, tmp_path / "again")


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir()))
def test_golden_exports_in_the_layout_of_a_b200(tmp_path, name):
    source = bs.checkpoints.open(GOLDEN / name)
    convert(source, tmp_path / "linear")
    convert(source, tmp_path / "out", target="sm_100a")
    same_weights(bs.checkpoints.open(tmp_path / "out"), bs.checkpoints.open(tmp_path / "linear"))


# ---- Bytes --------------------------------------------------------------------------------------


def scales(fmt: str, rows: int = 192, cols: int = 192):
    rng = np.random.default_rng(2)
    if fmt == "mxfp4":
        code, scale, _ = files.mxfp4(rng, rows, 2 * cols)
        return {"p.weight_packed": files.nibbles(code), "p.weight_scale": scale}, scale
    code, scale, top, _ = files.nvfp4(rng, rows, cols)
    tensors = {"p.weight": files.nibbles(code), "p.weight_scale": scale}
    return tensors | {"p.weight_scale_2": np.asarray(top)}, scale.view(np.uint8)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_bytes_of_128x4(tmp_path, fmt):
    """Padding is zero; each byte is where tcgen05 reads it."""
    tensors, scale = scales(fmt, rows=130, cols=96)
    convert(opened(tmp_path / "in", tensors), tmp_path / "out", layout="128x4")
    made = stored(tmp_path / "out")["p.weight_scale_128x4"]
    assert made.shape == (256, 8)
    expected = np.zeros(256 * 8, np.uint8)
    for r, c in np.ndindex(scale.shape):
        tile = (r // 128 * 2 + c // 4) * 512
        expected[tile + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale[r, c]
    np.testing.assert_array_equal(made.reshape(-1), expected)


def test_bytes_of_deepgemm(tmp_path):
    """Words of four blocks, rows innermost and up to a multiple of 4."""
    tensors, scale = scales("nvfp4", rows=130)
    convert(opened(tmp_path / "in", tensors), tmp_path / "out", layout="deepgemm")
    made = stored(tmp_path / "out")["p.weight_scale_deepgemm"]
    assert made.shape == (3, 132)
    raw = made.view(np.uint8).reshape(3, 132, 4)
    for r, c in np.ndindex(scale.shape):
        assert raw[c // 4, r, c % 4] == scale[r, c]
    assert not raw[:, 130:].any()


def test_bytes_of_deepgemm_experts(tmp_path):
    """Gate and up rows in turns of 8, then the rows of each 128 permuted; global scales of both."""
    rng = np.random.default_rng(3)
    count, hidden, inner = 2, 128, 64
    tensors, _ = experts(rng, "nvfp4", count, hidden, inner)
    convert(opened(tmp_path / "in", tensors), tmp_path / "out", layout="deepgemm")
    made = stored(tmp_path / "out")
    for e in range(count):
        for role, leaf in (("w13", None), ("w2", "down_proj")):
            rows = 2 * inner if leaf is None else hidden
            codes = made[f"{EXPERTS}.deepgemm.{role}"][e]
            words = made[f"{EXPERTS}.deepgemm.{role}_scale"][e]
            raw = words.view(np.uint8).reshape(-1, rows, 4)
            for r in range(rows):
                base, row = f"{EXPERTS}.{e}.{leaf}", r
                if leaf is None:
                    part = "gate_proj" if r // 8 % 2 == 0 else "up_proj"
                    base, row = f"{EXPERTS}.{e}.{part}", r // 16 * 8 + r % 8
                np.testing.assert_array_equal(codes[r], tensors[f"{base}.weight"][row])
                scale = tensors[f"{base}.weight_scale"].view(np.uint8)[row]
                at = r // 128 * 128 + 4 * (r % 32) + r % 128 // 32
                np.testing.assert_array_equal(raw[:, at].reshape(-1), scale)
        tops = [tensors[f"{EXPERTS}.{e}.{n}.weight_scale_2"] for n in ("gate_proj", "up_proj")]
        np.testing.assert_array_equal(made[f"{EXPERTS}.deepgemm.w13_global"][e], tops)
        inputs = made[f"{EXPERTS}.deepgemm.down_input_scale"]
        assert inputs[e] == e + 0.5


@pytest.mark.parametrize("fmt", ["nvfp4", "int4", "int4 column"])
def test_bytes_of_marlin(tmp_path, fmt):
    """Scales [K / block, N]: of every 64 (32) of a line, one of each eighth in turns."""
    if fmt == "nvfp4":
        tensors, scale = scales(fmt)
    else:
        group = 64 if fmt == "int4" else 128
        tensors, (_, _, scale) = int4_words(np.random.default_rng(4), "p", 192, 128, group)
    convert(opened(tmp_path / "in", tensors), tmp_path / "out", layout="marlin")
    made = stored(tmp_path / "out")["p.weight_scale_marlin"]
    order = [i + 8 * j for i in range(8) for j in range(8)]
    if fmt == "nvfp4":
        order = [order[4 * (i // 4) + (0, 2, 1, 3)[i % 4]] for i in range(64)]
    if fmt == "int4 column":
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    lines = scale.T.reshape(-1, len(order))[:, order].reshape(scale.T.shape)
    np.testing.assert_array_equal(made, lines)


@pytest.mark.parametrize(
    ("target", "activation", "steps"),
    few([("sm_80", "a16", "full"), ("sm_90a", "a16", "full"), ("sm_90a", "a8", "transpose")]),
)
def test_bytes_of_trtllm_experts(tmp_path, target, activation, steps):
    """[K, N] with the columns of up first; zeros are (8 - z) * scale in the scales' dtype."""
    rng = np.random.default_rng(5)
    shapes = {"gate_proj": (320, 128), "up_proj": (320, 128), "down_proj": (128, 320)}
    tensors, parts = {}, {}
    for leaf, (rows, cols) in shapes.items():
        made, parts[leaf] = int4_words(rng, f"{EXPERTS}.0.{leaf}", rows, cols, 64)
        tensors |= made
    source = opened(tmp_path / "in", tensors)
    convert(source, tmp_path / "out", layout="trtllm", target=target, activation=activation)
    made = stored(tmp_path / "out")
    for role, leaves in (("w13", ("up_proj", "gate_proj")), ("w2", ("down_proj",))):
        code, zero, scale = (np.concatenate([parts[n][i] for n in leaves]).T for i in range(3))
        plain = ref.pack(code ^ 8)[None]
        expected = reference_int4.preprocess(plain, activation, 4, steps)
        base = f"{EXPERTS}.trtllm.{role}"
        np.testing.assert_array_equal(made[base], expected)
        np.testing.assert_array_equal(made[f"{base}_scale"][0], scale)
        np.testing.assert_array_equal(made[f"{base}_zero"][0], zero)
        zeros = ((8 - zero.astype(np.float32)) * scale.astype(np.float32)).astype(np.float16)
        np.testing.assert_array_equal(made[f"{base}_zeros"][0], zeros)
        if activation == "a8":
            groups, cols = scale.shape
            i = 2 if groups == 2 else 1
            wide = scale.astype(np.float32).astype(ml_dtypes.bfloat16)
            wide = wide.reshape(groups // i, i, cols).transpose(0, 2, 1).reshape(groups // i, -1)
            np.testing.assert_array_equal(made[f"{base}_scale_interleaved"][0], wide)


def test_codes_of_dense_trtllm(tmp_path):
    """Dense kernels of sm 90 do not interleave columns; 8 is the zero of a weight without zeros."""
    tensors, (code, _, scale) = int4_words(np.random.default_rng(6), "p", 320, 128, 64)
    symmetric = tensors | {"p.qzeros": np.full((2, 40), 0x88888888, np.uint32).view(np.int32)}
    convert(opened(tmp_path / "in", symmetric), tmp_path / "out", layout="trtllm", target="sm_90a")
    made = stored(tmp_path / "out")
    expected = reference_int4.preprocess(ref.pack((code ^ 8).T)[None], "a16", 4, "no columns")
    np.testing.assert_array_equal(made["p.weight_trtllm"], expected[0])
    np.testing.assert_array_equal(made["p.weight_trtllm_scale"], scale.T)
    assert not made["p.weight_trtllm_zeros"].any()
    assert (made["p.weight_trtllm_zero"] == 8).all()


def test_codes_are_turned():
    """[N, K / 2] to [K, N / 2] over several strips, and back."""
    code = np.random.default_rng(7).integers(0, 16, (528, 34)).astype(np.uint8)
    made = turned(torch.from_numpy(ref.pack(code)))
    np.testing.assert_array_equal(made.numpy(), ref.pack(np.ascontiguousarray(code.T)))
    np.testing.assert_array_equal(turned(made).numpy(), ref.pack(code))


# ---- Quantising ---------------------------------------------------------------------------------


def test_global_scales_are_shared(tmp_path):
    """{q, k, v}, {gate, up}, {w1, w3} of one layer or expert have one amax, others their own."""
    rng = np.random.default_rng(8)
    groups = {
        "a.self_attn": ("q_proj", "k_proj", "v_proj"),
        "a.mlp": ("gate_proj", "up_proj"),
        f"{EXPERTS}.0": ("gate_proj", "up_proj"),
        "b.block_sparse_moe.experts.1": ("w1", "w3"),
        "c.self_attn": ("q_proj",),
        "a.other": ("o_proj", "down_proj", "w2"),
    }
    tensors = {
        f"{base}.{leaf}.weight": (rng.standard_normal((32, 32)) * 4.0**i).astype(np.float32)
        for base, leaves in groups.items()
        for i, leaf in enumerate(leaves)
    }
    convert(opened(tmp_path / "in", tensors), tmp_path / "out", shard_bytes=2000)
    made = stored(tmp_path / "out")
    for base, leaves in groups.items():
        most = {leaf: np.abs(tensors[f"{base}.{leaf}.weight"]).max() for leaf in leaves}
        for leaf in leaves:
            name = f"{base}.{leaf}.weight"
            shared = most[leaf] if base == "a.other" else max(most.values())
            top = np.float32(shared) / np.float32(2688)
            assert made[f"{name}_scale_2"] == top, name
            code, byte = ref.quantize(tensors[name], "nvfp4", float(top))
            np.testing.assert_array_equal(made[f"{name}_scale"], byte)
            np.testing.assert_array_equal(made[name], ref.pack(code))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("form", ["plain-oss", "plain-stacked"])
def test_experts_in_one_tensor_are_quantised(tmp_path, form, fmt):
    """K last, whatever the source's order, rows as they were; one global scale an expert."""
    tensors, config = experts(np.random.default_rng(9), form)
    source = opened(tmp_path / "in", tensors, config)
    convert(source, tmp_path / "out", fmt)
    made = stored(tmp_path / "out")
    for leaf in ("gate_up_proj", "down_proj"):
        values = tensors[f"{EXPERTS}.{leaf}"].astype(np.float32)
        values = values.transpose(0, 2, 1) if form == "plain-oss" else values
        for e, matrix in enumerate(values):
            top = np.abs(matrix).max() / np.float32(2688)
            if fmt == "nvfp4":
                assert made[f"{EXPERTS}.{leaf}_weight_scale_2"][e] == top
            code, byte = ref.quantize(matrix, fmt, float(top) if fmt == "nvfp4" else 1.0)
            np.testing.assert_array_equal(made[f"{EXPERTS}.{leaf}"][e], ref.pack(code))
            np.testing.assert_array_equal(made[f"{EXPERTS}.{leaf}_weight_scale"][e], byte)
    weight = bs.checkpoints.open(tmp_path / "out").weight(f"{EXPERTS}.gate_up_proj")
    assert weight.gate_up == ("interleaved" if form == "plain-oss" else "halves")


def test_keep_leaves_experts_and_layouts_alone(tmp_path):
    tensors, config = experts(np.random.default_rng(10), "plain")
    source = opened(tmp_path / "in", tensors, config)
    convert(source, tmp_path / "plain", keep=("*.down_proj.*",), layout="128x4")
    made = bs.checkpoints.open(tmp_path / "plain")
    assert {made.weight(n).fmt for n in made if "down_proj" in n} == {"bf16"}
    tensors, config = experts(np.random.default_rng(10), "nvfp4")
    convert(
        opened(tmp_path / "in2", tensors), tmp_path / "codes", layout="128x4", keep=("*.0.up*",)
    )
    names = stored(tmp_path / "codes")
    assert f"{EXPERTS}.0.up_proj.weight_scale" in names
    assert f"{EXPERTS}.1.up_proj.weight_scale_128x4" in names


# ---- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "swizzled"}, "layout is 'swizzled', but must be one of linear, 128x4"),
        ({"target": "sm_99"}, "target is 'sm_99', but must be one of cpu, llvm, sm_75"),
        (
            {"layout": "tiles64", "target": "sm_100a"},
            "'tiles64' has no meaning on target 'sm_100",
        ),
        ({"layout": "trtllm"}, "'trtllm' differs from one architecture to the other; choose a"),
        ({"activation": "a8"}, "activation is 'a8', but must be 'a16', or 'a8' with"),
        ({"layout": "trtllm", "target": "sm_80", "activation": "a8"}, "need sm 89 or later"),
    ],
)
def test_options_without_a_meaning(tmp_path, options, words):
    tensors, config = experts(np.random.default_rng(11), "awq", inner=128)
    with pytest.raises(ValueError, match=words):
        convert(opened(tmp_path / "in", tensors, config), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        ("nvfp4", {"layout": "trtllm", "target": "sm_80"}, "is nvfp4, for which layout 'trtllm'"),
        ("awq", {"layout": "128x4"}, "is int4, for which layout '128x4' has no meaning; choose"),
        (
            "awq",
            {"layout": "trtllm", "target": "sm_80"},
            r"experts has K=32, but layout .* a multiple of 64",
        ),
        ("gpt-oss", {"layout": "deepgemm"}, "has K / block=2, but layout 'deepgemm' needs a mult"),
        ("dense", {"layout": "tiles64"}, "'tiles64' has a meaning for: no experts; choose"),
        ("dense", {"layout": "marlin"}, "has N=40, but layout 'marlin' needs a multiple of 64"),
        ("act-order", {"layout": "trtllm", "target": "sm_80"}, "p.weight is in act-order, for"),
        ("f32 scales", {"layout": "tiles64"}, "has scales of F32, but layout 'tiles64' holds"),
        ("smooth", {"layout": "tiles64"}, "in act-order, or has a pre_quant_scale or groups of"),
        ("one input", {"layout": "tiles64"}, "some experts have an input_scale and others have"),
        ("nan", {"layout": "tiles64"}, "a block scale has the byte 0x7f, which is NaN or below"),
        ("zero 16", {"layout": "tiles64"}, "a zero point is 16, but layout 'tiles64' holds those"),
    ],
)
def test_weights_that_a_layout_cannot_hold(tmp_path, form, options, words):
    """Said before anything is written, but for what only the data say."""
    rng = np.random.default_rng(12)
    known = form if form in FORMS else "awq" if form in ("f32 scales", "zero 16") else "nvfp4"
    inner = 32 if options["layout"] == "trtllm" else 64
    tensors, config = experts(rng, known, hidden=128 if form != "gpt-oss" else 64, inner=inner,
                              group=32 if inner == 32 else 64)  # fmt: skip
    lead = f"{EXPERTS}.0.up_proj"
    if form == "dense":
        tensors = scales("nvfp4", rows=40)[0]
    if form == "act-order":
        tensors = int4_words(rng, "p", 64, 64, 32)[0]
        tensors["p.qweight"] = np.zeros((8, 64), np.int32)
        tensors["p.g_idx"] = (rng.permutation(64) // 32).astype(np.int32)
    if form == "f32 scales":
        tensors = {n: v.astype(np.float32) if "scales" in n else v for n, v in tensors.items()}
    if form == "smooth":
        tensors[f"{lead}.pre_quant_scale"] = np.ones(128, np.float32)
    if form == "one input":
        tensors.pop(f"{lead}.input_scale")
    if form == "nan":
        tensors[f"{lead}.weight_scale"].view(np.uint8)[3, 1] = 0x7F
    if form == "zero 16":
        for name in [n for n in tensors if n.endswith(("qweight", "qzeros"))]:
            base = name.rpartition(".")[0]
            groups, out = tensors[f"{base}.scales"].shape
            tensors[f"{base}.qweight"] = np.zeros((groups * 8, out), np.int32)
            tensors[f"{base}.qzeros"] = np.full((groups, out // 8), -1, np.int32)  # 15, less one
    source = opened(tmp_path / "in", tensors, config)
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "out", **options)
    assert not list(tmp_path.glob("out/*.safetensors"))
    if form not in ("nan", "zero 16"):
        assert not (tmp_path / "out").exists()


def test_broken_layouts_are_refused(tmp_path):
    """A configuration or tensors that do not fit each other."""
    tensors, _ = experts(np.random.default_rng(13), "nvfp4")
    convert(opened(tmp_path / "in", tensors), tmp_path / "out", layout="tiles64")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ours = config["quantization_config"]["blockscale"]
    names = stored(tmp_path / "out")

    def refused(words: str, tensors: dict, changed: dict) -> None:
        said = config | {"quantization_config": {"blockscale": changed}}
        files.folder(tmp_path / "broken", {n: v.copy() for n, v in tensors.items()}, said)
        with pytest.raises(CheckpointError, match=words):
            bs.checkpoints.open(tmp_path / "broken")

    facts = ours["experts"][EXPERTS]
    for key, value in (
        *(("hidden", 0), ("hidden", "128"), ("experts", 1 << 40), ("group", 48), ("fmt", "fp8")),
        *(("names", {"up": "a"}), ("gated", 1), ("scale_dtype", "X")),
    ):
        changed = ours | {"experts": {EXPERTS: facts | {key: value}}}
        refused("are described as .* which is none of ours", names, changed)
    refused("none of ours", names, ours | {"layout": "other"})
    refused("none of ours", names, ours | {"experts": {EXPERTS: None}})
    refused("in version 1 of layout tiles64, .* convert .* again", names, ours | {"version": 1})
    refused(
        "w13 is U8 .*, but must be U8",
        names,
        ours | {"experts": {EXPERTS: facts | {"hidden": 192}}},
    )
    less = {n: v for n, v in names.items() if not n.endswith("w2_scale")}
    refused("tiles64.w2_scale is missing, but must be U8", less, ours)
    refused("says sm='80' and activation='a16', but", names, ours | {"sm": "80"})
    plain, _ = scales("nvfp4")
    convert(opened(tmp_path / "in2", plain), tmp_path / "out2", layout="128x4")
    names = stored(tmp_path / "out2")
    ours = {"layout": "128x4"}
    refused("is there without 'p.weight'", {k: names[k] for k in names if k != "p.weight"}, ours)
    cut = names | {"p.weight_scale_128x4": names["p.weight_scale_128x4"][:128]}
    refused(r"which does not fit U8 \[192, 96\] of 'p.weight' in layout '128x4'", cut, ours)


def test_a_missing_codes_name_in_trtllm(tmp_path):
    tensors, _ = int4_words(np.random.default_rng(14), "p", 128, 128, 64)
    convert(opened(tmp_path / "in", tensors), tmp_path / "out", layout="trtllm", target="sm_80")
    names = {n: v.copy() for n, v in stored(tmp_path / "out").items()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    names["p.weight_trtllm_scale"] = names["p.weight_trtllm_scale"][:, :64].copy()
    with pytest.raises(CheckpointError, match=r"is \[128, 64\] with scales .* convert it again"):
        opened(tmp_path / "broken", names, config)


def test_a_layout_is_part_of_the_plan(tmp_path):
    """Another layout is another conversion; the same one goes on and changes nothing."""
    tensors, _ = experts(np.random.default_rng(15), "nvfp4")
    source = opened(tmp_path / "in", tensors)
    convert(source, tmp_path / "out", target="sm_90a")
    before = contents(tmp_path / "out")
    convert(source, tmp_path / "out", target="sm_90a")
    assert contents(tmp_path / "out") == before
    with pytest.raises(CheckpointError, match="another checkpoint, or with other options"):
        convert(source, tmp_path / "out", target="sm_100a")
