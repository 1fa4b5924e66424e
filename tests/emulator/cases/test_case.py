"""Cases: every kind of argument reaches `launch`; bad cases say what is wrong.

`launch` is a stand-in here; test_cases.py runs real kernels.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from blockscale.emulator import case
from blockscale.emulator.case import Case, CaseError
from tests.emulator.cases.case_kit import MAP, Machine, case_data, write


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(case, "launch", made.launch)
    monkeypatch.setattr(case, "TensorMap", made.tensor_map)
    monkeypatch.setattr(case, "Struct", made.struct)
    return made


@pytest.fixture
def path(tmp_path) -> Path:
    return write(tmp_path, case_data())


def test_every_kind_of_argument_reaches_launch(machine, path):
    report, outcomes = Case.load(path).run(seed=7, max_instructions=99)
    (call,) = machine.calls
    assert (call.entry, call.grid, call.block) == ("k", (2, 1, 1), (128, 1, 1))
    assert (call.cluster, call.dynamic_smem, call.seed) == ((2, 1, 1), 1024, 7)
    assert call.max_instructions == 99
    assert "beside the case" in call.ptx
    a, c, null, i32, i64, u64, f32, tensor_map, struct = call.args
    assert a.dtype == np.uint16
    assert null is None
    assert [type(value) for value in (i32, i64, u64, f32)] == [
        np.int32,
        np.int64,
        np.uint64,
        np.float32,
    ]
    assert (i32, i64, u64, f32) == (-5, 1 << 40, (1 << 64) - 1, np.float32(0.1))
    assert tensor_map.array is a
    assert tensor_map.keywords == {"dtype": "BFLOAT16", **MAP}
    assert struct.content == bytes(8) + b"\xff" * 16
    assert struct.pointers[8] is c
    assert struct.pointers[16] is a
    assert report.seed == 7
    assert [o.passed for o in outcomes] == [True]


def test_output_buffers_start_as_poison_and_every_run_has_fresh_ones(machine, path):
    case = Case.load(path)  # there is no c.npy: an output need not have a file
    assert (case.files["c.npy"].view(np.uint8) == 0xFF).all()
    case.run()
    case.run()
    assert machine.calls[0].args[1] is not machine.calls[1].args[1]
    assert (case.files["c.npy"].view(np.uint8) == 0xFF).all()
    assert "max_instructions" not in vars(machine.calls[0])


def test_ptx_may_be_text_or_another_file(machine, path, tmp_path):
    other = tmp_path / "other.ptx"
    other.write_text("// other\n")
    case = Case.load(tmp_path)  # a folder stands for its case.json
    case.run(ptx="// text\n")
    case.run(ptx=other)
    assert [call.ptx for call in machine.calls] == ["// text\n", "// other\n"]
    with pytest.raises(CaseError, match=r"gone.ptx: No such file.*beside it, or the file"):
        case.run(ptx=tmp_path / "gone.ptx")


@pytest.mark.parametrize(
    ("arg", "dtype"),
    [
        ({"buffer": {"file": "a.npy", "dtype": "bfloat16", "shape": [3, 4]}, **MAP}, "BFLOAT16"),
        ({"buffer": "a.npy", "dtype": "16U4_ALIGN8B", **MAP}, "16U4_ALIGN8B"),
        ({"buffer": 0, "tensorDataType": 9, **MAP}, 9),
        (
            {"file": "a.npy", "dtype": "bfloat16", "tensor_map": {"dtype": "UINT16", **MAP}},
            "UINT16",
        ),
        ({"file": "a.npy", "dtype": "bfloat16", **MAP}, "BFLOAT16"),
        ({"buffer": {"file": "a.npy", "dtype": "bfloat16"}, "map": MAP}, "BFLOAT16"),
    ],
)
def test_spellings_of_a_tensor_map(machine, tmp_path, arg, dtype):
    data = case_data()
    data["args"][7] = {"kind": "tensormap", **arg}
    Case.load(write(tmp_path, data)).run()
    call = machine.calls[0]
    assert call.args[7].array is call.args[0]
    assert call.args[7].keywords == {"dtype": dtype, **MAP}


def test_names_of_cuda_h_are_understood(machine, tmp_path):
    data = case_data()
    names = {"globalDim": [4, 3], "globalStrides": [16], "boxDim": [4, 3], "oobFill": 0}
    more = {"elementStrides": [1, 1], "interleave": 0, "swizzle": 3, "l2Promotion": 1}
    data["args"][7] = {"kind": "tensormap", "file": "a.npy", "tensorDataType": 9, **names, **more}
    Case.load(write(tmp_path, data)).run()
    assert machine.calls[0].args[7].keywords == {
        "dtype": 9,
        "global_dim": [4, 3],
        "global_strides_bytes": [16],
        "box_dim": [4, 3],
        "element_strides": [1, 1],
        "interleave": 0,
        "swizzle": 3,
        "oob_fill": 0,
    }


def test_the_output_of_a_tensor_map_or_struct_is_its_buffer(machine, tmp_path):
    data = case_data()
    data["args"][7] = {"kind": "tensormap", "file": "c.npy", "dtype": "FLOAT32", **MAP}
    data["outputs"][0]["arg"] = 7
    data["outputs"].append({**data["outputs"][0], "file": "c.npy", "arg": 8})
    _, outcomes = Case.load(write(tmp_path, data)).run()
    assert [(o.name, o.passed) for o in outcomes] == [("c.npy", True)] * 2


BAD = {  # edit of the case -> the sentence
    "args[0].kind = 'buf'": r"args\[0\]: kind 'buf' is unknown; use one of buffer, null, i32",
    "args[0].file = 'gone.npy'": r"args\[0\]: gone.npy: No such file or directory; files lie",
    "args[0].file = 'kernel.ptx'": r"args\[0\]: kernel.ptx is no .npy file",
    "args[0].shape = [4, 3]": r"args\[0\]: a.npy has shape \(3, 4\); the case says \(4, 3\)",
    "args[0].dtype = 'float32'": r"a.npy holds uint16; dtype float32 is stored as float32",
    "args[0].dtype = 'quux'": r"args\[0\]: dtype 'quux' is unknown; use one of NumPy's numbers, b",
    "args[3].value = 1 << 40": r"args\[3\]: value 1099511627776 is no i32 .*a number that fits",
    "args[3].value = 'x'": r"args\[3\]: value 'x' is no i32",
    "args[6].value = None": r"args\[6\]: value None is no f32",
    "args[8].hex = 'zz'": r"args\[8\]: hex 'zz' is no row of hex digits",
    "args[8].size = 25": r"args\[8\]: hex holds 24 bytes, size says 25",
    "args[8].pointers[0].offset = 17": r"args\[8\].pointers\[0\]: offset 17 leaves no room .* 16$",
    "args[7].box_dim": r"args\[7\]: box_dim is missing; give every argument of cuTensorMapEncodeTi",
    "args = {}": r"args: is no list of objects",
    "entry": r"entry: 'entry' is missing; give the name of the kernel",
    "grid = [0]": r"grid: is \[0\]; it is one to three positive integers, x first",
    "dynamic_smem = -1": r"dynamic_smem: is -1; it is a number of bytes, 0 or more",
    "outputs[0].arg = 9": r"outputs\[0\]: arg is 9; it is the index of one of the 9 args",
    "outputs[0].arg = 3": r"outputs\[0\]: args\[3\] is a i32; an output is a buffer",
    "outputs[0].file = 'd.npy'": r"outputs\[0\]: 'd.npy' is no buffer of args; name one of them",
    "outputs[0].expected = 'no.npy'": r"outputs\[0\]: no.npy: No such file",
}


@pytest.mark.parametrize(("edit", "sentence"), BAD.items(), ids=BAD)
def test_bad_cases_say_where_and_what(tmp_path, edit, sentence):
    data = case_data()
    place, assigned, value = edit.partition(" = ")
    *way, last = [int(w) if w.isdigit() else w for w in re.findall(r"\w+", place)]
    node = data
    for step in way:
        node = node[step]
    if assigned:
        node[last] = eval(value)
    else:
        del node[last]
    path = write(tmp_path, data)
    with pytest.raises(CaseError, match=sentence) as raised:
        Case.load(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_files_that_are_no_case(tmp_path):
    with pytest.raises(CaseError, match="No such file or directory; name a case"):
        Case.load(tmp_path)
    (tmp_path / "case.json").write_text("{")
    with pytest.raises(CaseError, match=r"no JSON: .*; write it again"):
        Case.load(tmp_path)
    (tmp_path / "case.json").write_text("[]")
    with pytest.raises(CaseError, match="holds a list; a case is one JSON object"):
        Case.load(tmp_path)
