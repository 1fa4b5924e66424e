"""Damaged and hostile checkpoints are refused in words: where, the value, the rule, the remedy."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest

import blockscale as bs
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.schemes.kinds import natural
from tests.kit import checkpoint_files as files

U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
DATA = b"\1\2\3\4"


def entry(**changes) -> dict:
    return {"x": {**U8, **changes}}


FILES = {
    "empty": (b"", "has 0 bytes, but a safetensors file begins with 8"),
    "short": (b"\1\0\0", "has 3 bytes"),
    "no_header": ((100).to_bytes(8, "little"), "header length is 100, but at most 0 bytes"),
    "huge_header": (b"\xff" * 16, "header length is 18446744073709551615"),
    "pickle": (b"\x80\x02}q\0" * 9, "the header length is"),
    "not_json": (files.file_bytes(b"{]", DATA), "is no JSON"),
    "not_utf8": (files.file_bytes(b'{"\xff":1}', DATA), "is no JSON"),
    "deep": (files.file_bytes(b"[" * 100_000, DATA), "is no JSON"),
    "big_int": (files.file_bytes(b'{"x":' + b"9" * 9999 + b"}", DATA), "is no JSON"),
    "list": (files.file_bytes(b"[1]", DATA), r"is \[1\], but must be a JSON object"),
    "metadata": (files.file_bytes({"__metadata__": 3}, b""), "__metadata__ is 3"),
    "twice": (
        files.file_bytes(b'{"x":%s,"x":%s}' % ((json.dumps(U8).encode(),) * 2), DATA),
        "has the name 'x' twice",
    ),
    "entry": (files.file_bytes({"x": [1]}, DATA), "needs dtype, shape and data_offsets"),
    "no_offsets": (files.file_bytes({"x": {"dtype": "U8", "shape": [4]}}, DATA), "needs dtype"),
    "dtype": (files.file_bytes(entry(dtype="U9"), DATA), "has dtype 'U9', but must have one of"),
    "dtype_list": (files.file_bytes(entry(dtype=["U8"]), DATA), "has dtype"),
    "shape": (files.file_bytes(entry(shape=[-4]), DATA), r"has shape \[-4\]"),
    "shape_float": (files.file_bytes(entry(shape=[4.0]), DATA), r"has shape \[4.0\]"),
    "shape_bool": (files.file_bytes(entry(shape=[4, True]), DATA), r"has shape \[4, True\]"),
    "shape_many": (files.file_bytes(entry(shape=[1] * 99), DATA), "at most 16"),
    "shape_huge": (
        files.file_bytes(entry(shape=[2**62] * 9), DATA),
        "has 4 bytes, but must have",
    ),
    "shape_huge_empty": (
        files.file_bytes(entry(shape=[0, 2**62, 4], data_offsets=[0, 0]), b""),
        r"must multiply to less than 2\^60",
    ),
    "offsets": (files.file_bytes(entry(data_offsets=[4, 0]), DATA), "0 <= begin <= end"),
    "offsets_one": (files.file_bytes(entry(data_offsets=[4]), DATA), "0 <= begin <= end"),
    "offsets_far": (
        files.file_bytes(entry(data_offsets=[1 << 62, (1 << 62) + 4]), DATA),
        "has 4 bytes|truncated",
    ),
    "name_escape": (files.file_bytes({"\x1b[2J": U8}, DATA), "all printable"),
    "name_surrogate": (files.file_bytes({"\ud800": U8}, DATA), "all printable"),
    "name_long": (files.file_bytes({"x" * 1001: U8}, DATA), "has a name of 1001 characters"),
    "size": (files.file_bytes(entry(shape=[5]), DATA), "has 4 bytes, but must have 5"),
    "truncated": (files.file_bytes(entry(), DATA[:3]), "ends at byte .* it was truncated"),
    "trailing": (files.file_bytes(entry(), DATA + b"!"), "what follows belongs to no tensor"),
    "overlap": (
        files.file_bytes({"x": U8, "y": {**U8, "data_offsets": [2, 6]}}, DATA + b"56"),
        "'y' starts at byte .* and overlaps 'x'",
    ),
    "hole": (
        files.file_bytes({"x": U8, "y": {**U8, "data_offsets": [6, 10]}}, DATA + b"123456"),
        "'y' starts at byte .* and leaves a hole after 'x'",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_file_is_refused(tmp_path, case):
    raw, sentence = FILES[case]
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=sentence) as error:
        bs.checkpoints.open(tmp_path)
    assert "model.safetensors" in str(error.value)
    assert len(str(error.value)) < 700


def test_every_truncation_and_every_flipped_byte_of_a_header_is_refused_or_read(tmp_path):
    """No byte can be cut or changed so that anything but a CheckpointError comes."""
    rng = np.random.default_rng(0)
    codes, scale, top, _ = files.nvfp4(rng, 2, 32)
    tensors = {
        "p.weight": files.nibbles(codes),
        "p.weight_scale": scale,
        "p.weight_scale_2": np.asarray(top),
    }
    path = files.save(tmp_path / "model.safetensors", tensors)
    raw = path.read_bytes()
    start = len(raw) - sum(v.nbytes for v in tensors.values())
    for size in range(0, len(raw), 3):
        path.write_bytes(raw[:size])
        with pytest.raises(CheckpointError):
            bs.checkpoints.open(path)
    for at in range(start):
        changed = bytearray(raw)
        changed[at] = rng.integers(256)
        path.write_bytes(changed)
        try:
            ckpt = bs.checkpoints.open(path)
            for name in ckpt:
                ckpt[name].dequantize()
        except CheckpointError:
            pass


def fp4() -> dict[str, np.ndarray]:
    return {
        "p.weight": np.zeros((4, 16), np.uint8),
        "p.weight_scale": np.zeros((4, 2), files.E4M3),
        "p.weight_scale_2": np.asarray(1, np.float32),
    }


def without(name: str) -> dict[str, np.ndarray]:
    return {k: v for k, v in fp4().items() if k != name}


def words() -> dict[str, np.ndarray]:
    return {
        "p.qweight": np.zeros((64, 2), np.int32),
        "p.qzeros": np.zeros((2, 2), np.int32),
        "p.scales": np.zeros((2, 16), np.float16),
    }


WEIGHTS = {
    "no_scale": (without("p.weight_scale"), "U8 weight without 'p.weight_scale'"),
    "no_global": (without("p.weight_scale_2"), "U8 weight without 'p.weight_scale_2'"),
    "no_codes": (without("p.weight"), "belongs to a quantised weight, which is not there"),
    "scale_dtype": (
        {**fp4(), "p.weight_scale": np.zeros((4, 2), np.float32)},
        "'p.weight_scale' has dtype F32, but must have U8 or F8_E8M0 or F8_E4M3",
    ),
    "scale_shape": (
        {**fp4(), "p.weight_scale": np.zeros((4, 3), files.E4M3)},
        r"are \[4, 3\], but",
    ),
    "rows": ({**fp4(), "p.weight_scale": np.zeros((5, 2), files.E4M3)}, r"are \[5, 2\], but"),
    "scalar": ({**fp4(), "p.weight": np.asarray(1, np.uint8)}, r"is \[\] and its block scales"),
    "global_dtype": (
        {**fp4(), "p.weight_scale_2": np.asarray(1, np.float64)},
        "is F64 .*must be one F32",
    ),
    "global_shape": ({**fp4(), "p.weight_scale_2": np.zeros(4, np.float32)}, "must be one F32"),
    "nothing": (
        {"p.weight": np.zeros((0, 16), np.uint8), **{k: v for k, v in fp4().items() if "_2" in k}}
        | {"p.weight_scale": np.zeros((0, 2), files.E4M3)},
        "must not be empty",
    ),
    "both": (
        {**fp4(), "p.weight_packed": fp4()["p.weight"], "p.weight_global_scale": np.ones(1, "f4")},
        "p.weight is there twice, as nvfp4 and as nvfp4",
    ),
    "oss_scales": ({"p_blocks": np.zeros((2, 4, 2, 16), np.uint8)}, "without 'p_scales'"),
    "oss_shape": (
        {
            "p_blocks": np.zeros((2, 4, 2, 15), np.uint8),
            "p_scales": np.zeros((2, 4, 2), np.uint8),
        },
        "but must be",
    ),
    "int4_zeros": (
        {k: v for k, v in words().items() if "qzeros" not in k},
        "without 'p.qzeros'",
    ),
    "int4_shape": ({**words(), "p.scales": np.zeros((2, 17), np.float16)}, r"\[K, N / 8\] \(AWQ\)"),
    "int4_groups": ({**words(), "p.scales": np.zeros((0, 16), np.float16)}, "AWQ"),
    "int4_index": (
        {**words(), "p.g_idx": np.zeros(63, np.int32)},
        r"must be I32 \[64\], one group of each input",
    ),
    "int4_ct": (
        {"p.weight_packed": np.zeros((4, 2), np.int32)},
        "I32 weight without 'p.weight_scale'",
    ),
    "fp8_blocks": (
        {"p.weight": np.zeros((4, 4), files.E4M3), "p.weight_scale_inv": np.ones((1, 1), "f4")},
        None,
    ),
    "fp8_many": (
        {"p.weight": np.zeros((4, 4), files.E4M3), "p.weight_scale_inv": np.ones((2, 2), "f4")},
        "of each row, or of each block of 128 x 128",
    ),
}


@pytest.mark.parametrize("case", [c for c in WEIGHTS if WEIGHTS[c][1]])
def test_tensors_that_do_not_fit_each_other_are_refused_at_once(tmp_path, case):
    tensors, sentence = WEIGHTS[case]
    with pytest.raises(CheckpointError, match=sentence):
        bs.checkpoints.open(files.folder(tmp_path / "c", tensors))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_global_scale_must_be_a_scale(tmp_path, value):
    tensors = {**fp4(), "p.weight_scale_2": np.asarray(value, np.float32)}
    ckpt = bs.checkpoints.open(files.folder(tmp_path / "c", tensors))
    with pytest.raises(CheckpointError, match=r"p.weight_scale_2 is .*, but must be finite"):
        ckpt["p"]


def test_a_divisor_must_not_be_zero(tmp_path):
    tensors = {
        "p.weight_packed": fp4()["p.weight"],
        "p.weight_scale": fp4()["p.weight_scale"],
        "p.weight_global_scale": np.zeros(1, np.float32),
    }
    with pytest.raises(CheckpointError, match=r"is 0.0, but must be finite and above zero"):
        bs.checkpoints.open(files.folder(tmp_path / "c", tensors))["p"]


def test_a_group_index_must_name_groups(tmp_path):
    tensors = {**words(), "p.g_idx": np.full(64, 2, np.int32)}
    with pytest.raises(CheckpointError, match="values from 2 to 2, but there are 2 groups"):
        bs.checkpoints.open(files.folder(tmp_path / "c", tensors))["p"]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "gptq", "bits": 8}, "has bits=8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "stored for 'marlin'"),
        ({"quant_method": "awq", "group_size": 64}, "configuration says group_size 64"),
    ],
)
def test_a_configuration_that_contradicts_the_tensors_is_refused(tmp_path, config, sentence):
    path = files.folder(tmp_path / "c", words(), {"quantization_config": config})
    with pytest.raises(CheckpointError, match=sentence):
        bs.checkpoints.open(path)


def indexed(path, weight_map) -> None:
    files.save(path / "a.safetensors", {"x": np.ones(2, np.float32)})
    files.save(path / "b.safetensors", {"y": np.ones(2, np.float32)})
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ".a.safetensors", "", 3, None]
    + ["a.safetensors\0", "a.safetensors\n", "..\\a.safetensors", "a.bin", ["a.safetensors"]],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, name):
    indexed(tmp_path, {"x": name})
    with pytest.raises(CheckpointError, match="without any path; this index is not to be trusted"):
        bs.checkpoints.open(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({"x": "c.safetensors"}, "which is not in the folder; copy all 1 files"),
        ({"x": "b.safetensors"}, "'x' is in b.safetensors, but it is in no file"),
        ({"x": "b.safetensors", "y": "a.safetensors"}, "'x' is in b.safetensors, but it is in a"),
        ({}, "weight_map is {}"),
        ("[]", "must be a JSON object"),
        ('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}', "the name 'x' twice"),
    ],
)
def test_an_index_must_agree_with_the_files(tmp_path, weight_map, sentence):
    indexed(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=sentence):
        bs.checkpoints.open(tmp_path)


def test_tensors_beside_the_index_count_with_a_note(tmp_path):
    indexed(tmp_path, {"x": "a.safetensors"})
    files.save(tmp_path / "a.safetensors", {"x": np.ones(2, "f4"), "z": np.ones(2, "f4")})
    ckpt = bs.checkpoints.open(tmp_path)
    assert ckpt.names == ["x", "z"]
    assert any("1 tensors are in the files, but not in the index" in note for note in ckpt.notes)


def test_a_name_in_two_shards_a_missing_shard_and_foreign_folders(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no .safetensors file"):
        bs.checkpoints.open(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        bs.checkpoints.open(tmp_path / "no")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin must be saved as safetensors"):
        bs.checkpoints.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither a folder nor a .safetensors file"):
        bs.checkpoints.open(tmp_path / "pytorch_model.bin")
    first = files.save(tmp_path / "model-00001-of-00002.safetensors", {"x": np.ones(2, "f4")})
    with pytest.raises(CheckpointError, match="has 1 of the 2 files model-"):
        bs.checkpoints.open(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"'x' is in model-00001.* and in model-00002"):
        bs.checkpoints.open(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is no regular file"):
        bs.checkpoints.open(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "blockscale_convert.json"])
def test_a_pipe_in_place_of_json_is_not_waited_for(tmp_path, name):
    files.save(tmp_path / "model.safetensors", {"x": np.ones(2, "f4")})
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is no regular file"):
        bs.checkpoints.open(tmp_path)


def test_devices_and_folders_are_no_shards(tmp_path):
    (tmp_path / "a.safetensors").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is no regular file"):
        bs.checkpoints.open(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is no regular file"):
        bs.checkpoints.open(tmp_path)
    (tmp_path / "config.json").symlink_to("/dev/zero")  # is left out: no regular file
    files.save(tmp_path / "model.safetensors", {"x": np.ones(2, "f4")})
    assert bs.checkpoints.open(tmp_path).names == ["x"]


def test_shards_may_be_links_to_a_cache(tmp_path):
    """As downloads lie: snapshots/<revision>/model.safetensors -> ../../blobs/<digest>."""
    (tmp_path / "blobs").mkdir()
    files.save(tmp_path / "blobs" / "0123", {"x": np.ones(2, "f4")})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    assert bs.checkpoints.open(tmp_path / "snapshot").names == ["x"]


def test_json_without_end_is_not_read(tmp_path, monkeypatch):
    path = files.save(tmp_path / "model.safetensors", {"x": np.ones(2, "f4")})
    monkeypatch.setattr("blockscale.checkpoints.files.safetensors._MAX_VALUES", 3)
    with pytest.raises(CheckpointError, match="the header has 7 values, but at most 3 are read"):
        bs.checkpoints.open(path)
    monkeypatch.undo()
    (tmp_path / "config.json").write_text(" " * 100)
    monkeypatch.setattr("blockscale.checkpoints.files.folder._MAX_CONFIG", 99)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        bs.checkpoints.open(path)


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_file_cut_after_it_was_opened_is_no_crash(tmp_path, size):
    path = files.save(tmp_path / "a.safetensors", {"x": np.ones(size, np.uint8)})
    ckpt = bs.checkpoints.open(path)
    os.truncate(path, 10)
    with pytest.raises(CheckpointError, match="the file changed after it was opened"):
        ckpt["x"]


@pytest.mark.parametrize("text", ["{", "[]", '{"quantization_config": 3}', '{"a": 1, "a": 2}'])
def test_a_broken_configuration(tmp_path, text):
    path = files.folder(tmp_path / "c", fp4())
    (path / "config.json").write_text(text)
    if "quant" in text:
        assert bs.checkpoints.open(path).kind == "modelopt-nvfp4"
    else:
        with pytest.raises(CheckpointError, match=r"config\.json"):
            bs.checkpoints.open(path)


@pytest.mark.parametrize(
    "config",
    [
        {"config_groups": 3},
        {"config_groups": {"a": 3}},
        {"config_groups": {"a": {"weights": 3}}},
        {"config_groups": {"a": {"weights": {"group_size": [16]}}}},
        {"config_groups": {"a": {"weights": {"group_size": None}}}},
        {"quant_method": ["x"], "quant_algo": {"a": 1}, "group_size": "x"},
        {"checkpoint_format": 3, "version": None, "bits": None},
    ],
)
def test_values_of_a_configuration_of_any_type_do_no_harm(tmp_path, config):
    for tensors in (fp4(), words()):
        path = files.folder(tmp_path / "c", tensors, {"quantization_config": config})
        try:
            bs.checkpoints.open(path)
        except CheckpointError as error:
            assert "c" in str(error)  # noqa: PT017 - a refusal in words is as good


def test_a_million_tensors_are_opened_in_seconds(tmp_path):
    """No limit, but no quadratic step either."""
    count = 100_000
    entries = (
        f'"layers.{i}.w":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}'
        for i in range(count)
    )
    text = ("{" + ",".join(entries) + "}").encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(files.file_bytes(text, bytes(count)))
    start = time.perf_counter()
    assert len(bs.checkpoints.open(path)) == count
    assert time.perf_counter() - start < 20


def test_names_sort_whatever_digits_they_have():
    names = ["a.10", "a.9", "²", "a.٣", "1", "", "a." + "1" * 5000]
    found = sorted(names, key=natural)
    assert found[0] == ""
    assert found.index("a.9") < found.index("a.10") < found.index(names[-1])
