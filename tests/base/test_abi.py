"""What the headers of apache-tvm-ffi declare, as a C compiler reads it; what differs, in words."""

import copy
import json
import subprocess
from pathlib import Path

import pytest
from tvm_ffi import libinfo

from blockscale.base import abi

TEXTS = {
    header: Path(getattr(libinfo, finder)(), header).read_text()
    for finder, header in abi.HEADERS.items()
}


def compiled(folder):
    """Return the facts as gcc sees them."""
    lines = []
    for name in abi.STRUCTURES:
        lines.append(f'printf("S {name} %zu\\n", sizeof({name}));')
        for member in abi.declared()[name]["members"]:
            at = f"offsetof({name}, {member}), sizeof((({name} *)0)->{member})"
            lines.append(f'printf("M {name} {member} %zu %zu\\n", {at});')
    for name in (*abi.VERSIONS, *abi.VALUES):
        lines.append(f'printf("V {name} %d\\n", (int){name});')
    source = folder / "facts.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <tvm/ffi/c_api.h>\nint main(void) {"
        + "\n".join(lines)
        + "return 0; }"
    )
    folders = [f"-I{getattr(libinfo, finder)()}" for finder in abi.HEADERS]
    subprocess.run(["gcc", *folders, str(source), "-o", str(folder / "facts")], check=True)
    facts = {}
    for line in subprocess.check_output([folder / "facts"], text=True).splitlines():
        kind, name, *rest = line.split()
        if kind == "V":
            facts[name] = int(rest[0])
        elif kind == "S":
            facts[name] = {"size": int(rest[0]), "members": {}}
        else:
            facts[name]["members"][rest[0]] = [int(rest[1]), int(rest[2])]
    return facts


def test_as_the_compiler_sees_it(tmp_path):
    """Every size, offset and value, of every fact that there is."""
    assert compiled(tmp_path) == abi.declared()
    assert set(abi.declared()) == {*abi.VERSIONS, *abi.STRUCTURES, *abi.VALUES}


def test_facts_survive_json():
    """A manifest holds them."""
    facts = abi.declared()
    assert abi.differences(json.loads(json.dumps(facts)), facts) == []


def changed(header, old, new):
    """Return the facts of headers in which one text is another."""
    assert TEXTS[header].count(old) >= 1, old
    return abi.read({**TEXTS, header: TEXTS[header].replace(old, new)})


API, DLPACK = abi.HEADERS.values()
CHANGES = [
    (API, "#define TVM_FFI_VERSION_MINOR 1", "#define TVM_FFI_VERSION_MINOR 2", "MINOR is 2 inst"),
    (API, "kTVMFFITensor = 70", "kTVMFFITensor = 71", "kTVMFFITensor is 71 instead of 70"),
    (API, "uint32_t __padding;", "uint64_t __padding;", "TVMFFIObject has 32 bytes instead of 24"),
    (API, "void* v_ptr;", "void* v_pointer;", "TVMFFIAny.v_ptr is missing"),
    (API, "double v_float64;", "double v_float64[2];", "TVMFFIAny has 24 bytes instead of 16"),
    (DLPACK, "int32_t ndim;", "int64_t ndim;", "DLTensor.dtype has 4 bytes at 24 instead of 4"),
    (DLPACK, "kDLBfloat = 4U", "kDLBfloat = 5U", "kDLBfloat is 5 instead of 4"),
    (DLPACK, "} DLDataType;", "} DLType;", "DLDataType is missing"),
]


@pytest.mark.parametrize(("header", "old", "new", "words"), CHANGES, ids=[c[3] for c in CHANGES])
def test_what_differs_is_said(header, old, new, words):
    """A release with another layout, another number, without a name."""
    if words == "DLDataType is missing":  # those that hold one cannot be laid out
        with pytest.raises(ValueError, match="DLTensor: 'DLDataType'"):
            changed(header, old, new)
        return
    assert any(words in text for text in abi.differences(abi.declared(), changed(header, old, new)))


def test_what_is_added_does_not_matter():
    """Members of a union, structures and indices that a library does not know."""
    more = changed(API, "void* v_ptr;", "void* v_ptr; float v_float32;")
    assert "v_float32" in more["TVMFFIAny"]["members"]
    assert abi.differences(abi.declared(), more) == []
    assert abi.differences(more, abi.declared()) == ["TVMFFIAny.v_float32 is missing"]
    facts = copy.deepcopy(abi.declared())
    facts["kTVMFFINew"] = 79
    assert abi.differences(abi.declared(), facts) == []


def test_a_member_that_is_not_understood():
    """It is an error, never a guess."""
    with pytest.raises(ValueError, match=r"TVMFFIByteArray: .*not understood: 'size_t size : 3'"):
        changed(API, "size_t size;", "size_t size : 3;")
