"""`blockscale inspect CHECKPOINT` and `blockscale convert`: tables, JSON, warnings, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from blockscale import checkpoints
from blockscale.checkpoints.convert.convert import convert
from blockscale.runtime import jit, library
from tests.checkpoints.test_checkpoint_fuzz import SOUND
from tests.checkpoints.test_checkpoint_layouts import experts
from tests.cli.test_cli import call
from tests.kit import checkpoint_files as files
from tests.kit.checkpoint_files import E4M3
from tests.kit.paths import CHECKPOINTS as GOLDEN
from tests.reference import core as ref

MODELOPT = GOLDEN / "modelopt_qwen3moe_nvfp4_default_cfg"


def degraded(path: Path) -> Path:
    """Scales into which a global scale was folded: one in four subnormal, one in eight zero."""
    scale = np.full((8, 4), 0x40, np.uint8)
    scale[:, 0], scale[:4, 1] = 3, 0
    tensors = {
        "m.0.p.weight": np.full((8, 32), 0x21, np.uint8),
        "m.0.p.weight_scale": scale.view(files.E4M3),
        "m.0.p.weight_scale_2": np.asarray(1, np.float32),
    }
    return files.folder(path, tensors)


def test_inspect_shows_weights_layer_by_layer(monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, "inspect", str(MODELOPT))
    assert (code, err) == (0, "")
    assert "modelopt-nvfp4, 24 weights, 37.3 KiB in 1 file" in out
    assert "note: 16 x modelopt nvfp4 by names and dtypes of tensors" in out
    lines = [line for line in out.splitlines() if "mlp.experts.*.down_pro" in line]
    cells = [cell.strip() for cell in lines[0].split("│")[2:-1]]
    assert cells == ["nvfp4 / 16", "4", "64 x 32", "4.5 KiB", "-0.185 .. 0.185", "0.0%", "0.0%"]
    assert "no scale is degraded" in out


def test_inspect_says_what_rounding_to_e4m3_would_change(monkeypatch, capsys, tmp_path):
    """Of each NVFP4 weight, of several of a name together; of no other."""
    rng = np.random.default_rng(3)
    tensors, apart, whole = {}, 0.0, 0.0
    for e, top in enumerate((1.0, 4.0)):
        packed = rng.integers(0, 256, (8, 32), dtype=np.uint8)
        scale = rng.integers(0, 0x7F, (8, 4), dtype=np.uint8)
        tensors[f"m.experts.{e}.p.weight"] = packed
        tensors[f"m.experts.{e}.p.weight_scale"] = scale.view(E4M3)
        tensors[f"m.experts.{e}.p.weight_scale_2"] = np.asarray(top, np.float32)
        codes = ref.unpack(packed)
        exact = ref.weight(codes, scale, "nvfp4") * top
        apart += ((ref.rounded_weight(codes, scale) * top - exact) ** 2).sum()
        whole += (exact**2).sum()
        one = np.linalg.norm(ref.rounded_weight(codes, scale) * top - exact)
        tensors[f"m.experts.{e}.q.weight"] = np.ones((8, 64), np.float32)
    path = str(files.folder(tmp_path / "c", tensors))
    _, out, _ = call(monkeypatch, capsys, "inspect", path, "--json")
    found = {weight["name"]: weight for weight in json.loads(out)["weights"]}
    assert found["m.experts.1.p.weight"]["rounding_error"] == pytest.approx(
        one / np.linalg.norm(exact), rel=1e-5
    )
    assert "rounding_error" not in found["m.experts.1.q.weight"]
    _, out, _ = call(monkeypatch, capsys, "inspect", path)
    said = "m.experts.*.p.weight: rounded=True would change it by"
    assert f"{said} {(apart / whole) ** 0.5:.2%}" in out
    assert out.count("rounded=True") == 1


def test_inspect_json_has_the_range_of_every_weight(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "inspect", str(MODELOPT), "--json")
    found = json.loads(out)
    assert (code, found["kind"], len(found["weights"])) == (0, "modelopt-nvfp4", 24)
    expected = np.load(MODELOPT / "expected.npz")
    weights = {w["name"]: w for w in found["weights"]}
    for key in expected.files:
        wanted = pytest.approx((expected[key].min(), expected[key].max()))
        assert (weights[key]["low"], weights[key]["high"]) == wanted
        assert weights[key]["blocks"] * 16 == weights[key]["values"] == expected[key].size


def test_inspect_warns_of_degraded_scales(monkeypatch, capsys, tmp_path):
    code, out, _ = call(monkeypatch, capsys, "inspect", str(degraded(tmp_path / "c")))
    assert code == 0
    assert "4 block scales are zero, but codes below them are not" in out
    assert "12.5% of the block scales are zero: the converter has degraded them" in out
    assert "25.0% of the block scales are subnormal: the converter has degraded them" in out
    assert "no warnings" not in out


def test_blocks_of_zeros_may_have_any_scale(monkeypatch, capsys, tmp_path):
    path = degraded(tmp_path / "c")
    raw = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(raw.replace(b"\x21" * 256, b"\x80" * 256))
    _, out, _ = call(monkeypatch, capsys, "inspect", str(path), "--json")
    (weight,) = json.loads(out)["weights"]
    assert (weight["zero"], weight["subnormal"], weight["lost"]) == (4, 0, 0)


ZEROS = {
    "nvfp4": np.zeros((16, 4), E4M3),
    "fp8": np.zeros((2, 1), np.float32),
    "int4": np.zeros((2, 16), np.float16),
}


@pytest.mark.parametrize("fmt", ZEROS)
def test_weights_of_zeros_are_not_called_degraded(monkeypatch, capsys, tmp_path, fmt):
    """Exporters give their blocks the scale 0: nothing is lost.  One block that is: a warning."""
    scale = ZEROS[fmt]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    tensors = {"p.weight": np.zeros((16, 32), np.uint8), "p.weight_scale": scale}
    tensors["p.weight_scale_2"] = np.ones((), np.float32)
    if fmt == "fp8":
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        tensors = {"p.weight": np.zeros((256, 32), E4M3), "p.weight_scale_inv": scale}
    elif fmt == "int4":
        config = {"quant_method": "gptq", "bits": 4, "group_size": 16}
        tensors = {"p.qweight": np.full((4, 16), 0x77777777, np.int32), "p.scales": scale}
        tensors |= {"p.qzeros": np.full((2, 2), 0x77777777, np.int32)}
        tensors |= {"p.g_idx": (np.arange(32) // 16).astype(np.int32)}
    path = files.folder(tmp_path, tensors, {"quantization_config": config})
    _, out, _ = call(monkeypatch, capsys, "inspect", str(path))
    assert "no scale is degraded: no warnings" in out
    name = next(iter(tensors))
    tensors[name].reshape(-1).view(np.uint8)[0] = 0x35
    path = files.folder(tmp_path, tensors, {"quantization_config": config})
    _, out, _ = call(monkeypatch, capsys, "inspect", str(path))
    assert "are zero" in out


@pytest.mark.parametrize("kind", sorted(SOUND))
def test_inspect_reads_every_kind(monkeypatch, capsys, tmp_path, kind):
    tensors, said = SOUND[kind]
    path = files.folder(tmp_path / "c", tensors, {"quantization_config": said})
    code, out, err = call(monkeypatch, capsys, "inspect", str(path), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert not [warning for weight in found["weights"] for warning in weight["warnings"]]
    assert sum(weight["bytes"] for weight in found["weights"]) == found["bytes"]
    experts = {"experts": "m.experts", "fused": "m.experts", "plain": "m.experts"}
    assert found["modules"] == ([experts[kind]] if kind in experts else [])
    assert call(monkeypatch, capsys, "inspect", str(path))[0] == 0


def test_inspect_names_weights_that_cannot_be_read_and_goes_on(monkeypatch, capsys, tmp_path):
    tensors, _ = SOUND["modelopt"]
    low = {"p.svdquant_lora_a": np.ones((2, 32), files.BF16), "q.weight": np.ones(2, np.float32)}
    path = files.folder(tmp_path / "c", {**tensors, **low})
    code, out, _ = call(monkeypatch, capsys, "inspect", str(path))
    assert code == 0
    assert "warning: p.weight: 1 cannot be read: p.weight has a low-rank part" in out
    assert "1 .. 1" in out


@pytest.mark.parametrize("layout", ["marlin", "deepgemm"])
def test_inspect_goes_on_where_no_kernel_undoes_a_layout(monkeypatch, capsys, tmp_path, layout):
    """Without the compiler a weight in such a layout is a warning, and the others are shown."""
    codes, scale, top, _ = files.nvfp4(np.random.default_rng(5), 64, 64)
    tensors = {"p.weight": files.nibbles(codes), "p.weight_scale": scale}
    tensors |= {"p.weight_scale_2": np.asarray(top), "q.weight": np.ones(2, np.float32)}
    convert(checkpoints.open(files.folder(tmp_path / "in", tensors)), tmp_path / "c", layout=layout)

    def function(spec, *_):
        raise RuntimeError(f"{spec.name}: to be built it needs tvm, which is not installed")

    capsys.readouterr()  # what was built
    library.remembered.clear()
    monkeypatch.setattr(jit, "function", function)
    code, out, err = call(monkeypatch, capsys, "inspect", str(tmp_path / "c"))
    assert (code, err) == (0, "")
    assert "warning: p.weight: 1 cannot be read: relayout_" in out
    assert "to be built it needs tvm" in out
    assert "1 .. 1" in out


def test_inspect_counts_degraded_scales_of_fp8_blocks(monkeypatch, capsys, tmp_path):
    scale = np.array([[np.nan, 0], [1e-40, 1]], np.float32)
    tensors = {"p.weight": np.ones((256, 256), files.E4M3), "p.weight_scale_inv": scale}
    path = files.folder(tmp_path / "c", tensors)
    _, out, _ = call(monkeypatch, capsys, "inspect", str(path), "--json")
    (weight,) = json.loads(out)["weights"]
    found = {key: weight[key] for key in ("blocks", "zero", "subnormal", "nan", "not_finite")}
    assert found == {"blocks": 4, "zero": 1, "subnormal": 1, "nan": 1, "not_finite": 128 * 128}
    assert (weight["low"], weight["high"]) == (0, 1)


@pytest.mark.parametrize("fmt", ["int4", "mxfp4"])
def test_inspect_counts_scales_of_the_other_formats(monkeypatch, capsys, tmp_path, fmt):
    if fmt == "int4":
        tensors = {
            "p.qweight": np.full((64, 2), 0x11111111, np.int32),
            "p.qzeros": np.zeros((2, 2), np.int32),
            "p.scales": np.full((2, 16), 0.1, np.float16),
        }
        tensors["p.scales"][0, :3] = 0, 1e-6, np.nan
    else:
        scale = np.full((4, 8), 120, np.uint8)
        scale[0, :2] = 0, 255
        tensors = {
            "p.weight_packed": np.full((4, 128), 0x11, np.uint8),
            "p.weight_scale": scale,
        }
    _, out, _ = call(
        monkeypatch, capsys, "inspect", str(files.folder(tmp_path / "c", tensors)), "--json"
    )
    (weight,) = json.loads(out)["weights"]
    wanted = {"zero": int(fmt == "int4"), "subnormal": 1, "nan": 1, "not_finite": 32, "blocks": 32}
    assert {k: weight[k] for k in wanted} == wanted


def test_inspect_headers_reads_no_data(monkeypatch, capsys, tmp_path):
    path = degraded(tmp_path / "c")
    monkeypatch.setattr("blockscale.checkpoints.Checkpoint.weight", None)
    code, out, _ = call(monkeypatch, capsys, "inspect", str(path), "--headers", "--all")
    assert (code, "m.0.p.weight" in out, "warn" in out) == (0, True, False)


def test_a_broken_checkpoint_is_one_sentence_and_exit_code_2(monkeypatch, capsys, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"x")
    for arguments in (["inspect"], ["convert", "-o", str(tmp_path / "out")]):
        code, out, err = call(monkeypatch, capsys, *arguments, str(tmp_path / "a.safetensors"))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "has 1 bytes, but a safetensors file begins with 8" in err
    assert not (tmp_path / "out").exists()


def test_convert_tells_what_it_did(monkeypatch, capsys, tmp_path):
    arguments = ["convert", str(GOLDEN / "gptoss_mxfp4"), "-o", str(tmp_path / "out")]
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    assert "out: 1 file, 0.1 MiB, from" in out
    assert "0 weights quantised to nvfp4, 2 re-packed, 18 copied" in out
    assert "note: 1 files are left out, since there is model.safetensors" in out
    code, out, _ = call(monkeypatch, capsys, *arguments, "--json")
    assert json.loads(out)["weights"] == {"copy": 18, "repack": 2}
    assert json.loads(out)["notes"][0].startswith("1 files are left out")
    code, _, err = call(monkeypatch, capsys, *arguments, "--shard-mib", "0")
    assert code == 2
    assert "--shard-mib" in err


def test_convert_refuses_to_keep_what_is_not_there(monkeypatch, capsys, tmp_path):
    """Else it would be quantised."""
    layers = [f"model.layers.{n}.mlp.{leaf}_proj.weight" for n in (0, 1) for leaf in ("up", "down")]
    source = files.folder(tmp_path / "in", dict.fromkeys(layers, np.ones((16, 32), files.BF16)))
    arguments = ["convert", str(source), "-o", str(tmp_path / "out"), "--keep"]
    code, out, err = call(monkeypatch, capsys, *arguments, "*.1.*", "--keep", "layers.0.mlp.up*")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "has no weight that keep='layers.0.mlp.up*' matches; write a pattern of whole na" in err
    assert "the nearest are model.layers.*.mlp.up_proj.weight, model.layers.*.mlp.down" in err
    assert not (tmp_path / "out").exists()
    code, out, _ = call(monkeypatch, capsys, *arguments, "*.1.*")
    assert (code, "2 weights quantised to nvfp4, 0 re-packed, 2 copied" in out) == (0, True)


def test_convert_for_a_target(monkeypatch, capsys, tmp_path):
    """The layout is what the target's kernels read, and what is said; bad options are status 2."""
    arguments = ["convert", str(MODELOPT), "-o", str(tmp_path / "out"), "--target", "sm_90a"]
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    assert "0 weights quantised to nvfp4, 16 re-packed, 8 copied" in out
    assert "12 weights in layout tiles64" in out
    code, out, _ = call(monkeypatch, capsys, *arguments, "--json")
    assert json.loads(out)["layout"] == "tiles64"
    code, out, err = call(monkeypatch, capsys, *arguments, "--layout", "128x4")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "layout '128x4' has no meaning on target 'sm_90a'; choose one of tiles64" in err
    code, out, _ = call(monkeypatch, capsys, "inspect", str(tmp_path / "out"), "--json")
    found = json.loads(out)
    assert code == 0
    assert {w["fmt"] for w in found["weights"] if "proj" in w["name"]} == {"nvfp4"}


def test_convert_says_what_is_rounded(monkeypatch, capsys, tmp_path):
    """Scales of float16 that a kernel reads as bfloat16 alone."""
    tensors, _ = experts(np.random.default_rng(0), "awq", inner=128)
    source = files.folder(tmp_path / "in", tensors)
    arguments = ["convert", str(source), "-o", str(tmp_path / "out"), "--layout", "trtllm"]
    arguments += ["--target", "sm_90a"]
    code, out, _ = call(monkeypatch, capsys, *arguments, "--activation", "a8")
    assert code == 0
    assert "2 tensors of scales also rounded to bfloat16 (…_interleaved), as the W4A8 kernel" in out
    arguments[3] = str(tmp_path / "a16")
    assert json.loads(call(monkeypatch, capsys, *arguments, "--json")[1])["rounded"] == 0
