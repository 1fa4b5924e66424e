"""Library files: written whole or not at all, and refused when damaged or made for elsewhere."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from blockscale.base import abi, files
from blockscale.base.errors import LibraryError, LinkError
from blockscale.base.manifest import MAGIC, append_manifest, elf_machine, read_manifest
from blockscale.building.export import write_library
from blockscale.runtime.library import load
from tests.kit.library_seal import seal
from tests.kit.tiny_kernels import (
    WIDTH,
    elf_bytes,
    library_bytes,
    library_file,
    manifest,
    object_file,
    variant,
)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_manifest_round_trip():
    assert read_manifest(library_file()) == manifest()
    library = load(library_file())
    assert library.manifest == manifest()
    assert library.meta == {"note": "tiny"}


@pytest.mark.parametrize("keep", [1, 63, 64, 1000, 0.3, 0.9, 1.0])
def test_truncated_inside_the_elf(tmp_path, keep):
    size = keep if isinstance(keep, int) else int(len(elf_bytes()) * keep)
    with pytest.raises(LibraryError, match=r"cut\.so: .*(truncated|not with the ELF magic)"):
        load(write(tmp_path / "cut.so", library_bytes()[:size]))


@pytest.mark.parametrize("missing", [1, 15, 16, 40, 55, 56, 100])
def test_truncated_after_the_elf(tmp_path, missing):
    with pytest.raises(LibraryError, match="without the blockscale footer, so it was truncated"):
        load(write(tmp_path / "cut.so", library_bytes()[:-missing]))


@pytest.mark.parametrize("at", [0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("part", ["elf", "json", "length", "digest"])
def test_flipped_bit(tmp_path, part, at):
    data, elf = bytearray(library_bytes()), len(elf_bytes())
    start, size = {
        "elf": (0, elf),
        "json": (elf, len(data) - 56 - elf),
        "length": (len(data) - 56, 8),
        "digest": (len(data) - 48, 32),
    }[part]
    data[start + int((size - 1) * at)] ^= 0x10
    with pytest.raises(LibraryError, match=r"have SHA-256 .* but the footer says"):
        load(write(tmp_path / "flip.so", bytes(data)))


def test_wrong_magic(tmp_path):
    data = library_bytes()[:-1] + b"!"
    with pytest.raises(LibraryError, match="without the blockscale footer"):
        load(write(tmp_path / "magic.so", data))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "the file is empty, 0 bytes"),
        (b"hello, this is text", r"begins with b'hell', not with the ELF magic"),
        (MAGIC, "not with the ELF magic"),
    ],
)
def test_garbage(tmp_path, data, sentence):
    with pytest.raises(LibraryError, match=sentence):
        load(write(tmp_path / "garbage.so", data))


def test_foreign_library():
    import tvm_ffi.libinfo

    with pytest.raises(LibraryError, match="without a blockscale manifest, so blockscale did not"):
        load(tvm_ffi.libinfo.find_libtvm_ffi())


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such kernel library; build it.*none\.so"):
        load(tmp_path / "none.so")
    with pytest.raises(IsADirectoryError, match=r"this is a folder; pass the \.so file in it"):
        load(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[1, 2", b"\xff\xfe"])
def test_manifest_that_is_no_json(tmp_path, text):
    with pytest.raises(LibraryError, match="the manifest is not JSON"):
        load(write(tmp_path / "json.so", seal(elf_bytes(), text)))


def test_manifest_length_beyond_the_file(tmp_path):
    with pytest.raises(LibraryError, match="the manifest is not JSON"):
        load(write(tmp_path / "length.so", seal(elf_bytes(), b"{}", 2**63)))


def nested(levels):
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    ("levels", "sentence"),
    [(100_000, "is not JSON .maximum recursion depth"), (80, "has more than 64 levels; build")],
)
def test_manifest_that_nests_deeply(tmp_path, levels, sentence):
    with pytest.raises(LibraryError, match=sentence):
        load(write(tmp_path / "deep.so", seal(elf_bytes(), b'{"meta":' + nested(levels) + b"}")))


@pytest.mark.parametrize("keep", [0, 1, 20, 63, 64, 500, 0.2, 0.5, 0.9, 0.9999])
def test_truncated_image_signed_again(tmp_path, keep):
    """The dynamic loader would read past the end of the file, and the process be killed."""
    size = keep if isinstance(keep, int) else int(len(elf_bytes()) * keep)
    data = append_manifest(elf_bytes()[:size], manifest())
    with pytest.raises(LibraryError, match=r"cut\.so: .*(so it was truncated|ELF machine None)"):
        load(write(tmp_path / "cut.so", data))


SEGMENTS, SECTIONS = 32, 40
"""Where the ELF header says where a table begins."""


def field(at: int, size: int) -> int:
    return int.from_bytes(elf_bytes()[at : at + size], "little")


@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 10**6])
@pytest.mark.parametrize(
    ("at", "size", "sentence"),
    [
        (32, 8, "the table of segments reaches from"),
        (40, 8, "the table of sections reaches from"),
        (54, 2, "the table of segments reaches|entries of the ELF tables have"),
        (56, 2, "the table of segments reaches|segment [0-9]+ reaches"),
        (58, 2, "the table of sections reaches|entries of the ELF tables have"),
        (60, 2, "the table of sections reaches"),
        ((SEGMENTS, 8), 8, "segment 0 reaches from"),
        ((SEGMENTS, 32), 8, "segment 0 reaches from"),
        ((SECTIONS, 64 + 24), 8, "section 1 reaches from"),
        ((SECTIONS, 64 + 32), 8, "section 1 reaches from"),
    ],
)
def test_tables_that_point_elsewhere(tmp_path, at, size, sentence, value):
    elf = bytearray(elf_bytes())
    at = at if isinstance(at, int) else field(at[0], 8) + at[1]
    elf[at : at + size] = min(value, 256**size - 1).to_bytes(size, "little")
    with pytest.raises(LibraryError, match=sentence):
        load(write(tmp_path / "elf.so", append_manifest(bytes(elf), manifest())))


def test_a_dynamic_section_that_is_not_loaded(tmp_path):
    """The loader takes its address for one of the process."""
    elf = bytearray(elf_bytes())
    table = field(SEGMENTS, 8)
    [entry] = [e for i in range(field(56, 2)) if field(e := table + 56 * i, 4) == 2]
    elf[entry + 16 : entry + 24] = (2**40).to_bytes(8, "little")
    with pytest.raises(LibraryError, match="the dynamic section, is not loaded; build the"):
        load(write(tmp_path / "elf.so", append_manifest(bytes(elf), manifest())))


def edit(path: str, value: object):
    """Return a change that sets (or with ``...`` deletes) the value at a dotted path."""

    def change(contents):
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        for parent in parents:
            contents = contents[parent]
        if value is ...:
            del contents[last]
        else:
            contents[last] = value

    return change


PARAM = "functions.crop.params.0"


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("format", 2, "manifest format 2 is newer than 1.*upgrade blockscale"),
        ("format", 0, "manifest key format is 0, expected a positive integer"),
        ("format", "1", "manifest key format is '1', expected an integer"),
        ("format", ..., "the manifest has no format"),
        ("abi.tvm_ffi", 3, "manifest key abi.tvm_ffi is 3, expected a string"),
        ("abi.facts", 3, "manifest key abi.facts is 3, expected an object"),
        ("abi.facts.kTVMFFINone", "0", "abi.facts.kTVMFFINone is '0'"),
        ("abi.facts.TVMFFIAny.members.v_ptr", [8], "an offset and a size"),
        ("target.features", "avx2", "target.features is 'avx2', expected a list"),
        ("target.features", [1], r"target.features\[0\] is 1, expected a string"),
        ("functions", {}, "expected at least one function"),
        ("functions", {"a b": {}}, "'a b', expected C identifiers"),
        ("functions.crop", [], r"functions.crop is \[\], expected an object"),
        ("functions.crop.base", ..., "has no functions.crop.base"),
        ("functions.crop.params", [], "expected at least one output"),
        ("functions.crop.buckets", [{"tuned": 1}], r"buckets\[0\].tuned is 1, expected true or"),
        (f"{PARAM}.name", "a-b", "is 'a-b', expected an identifier"),
        (f"{PARAM}.name", "out", "is 'out', expected a name that no other"),
        ("functions.scale_f32.params.0.output", True, "expected outputs after all inputs"),
        (f"{PARAM}.dtype", "float128", "is 'float128', expected one of float32"),
        (f"{PARAM}.shape", ["rows", 1.5], r"shape\[1\] is 1.5, expected an integer or a string"),
        (f"{PARAM}.shape", ["rows", "__import__('os')"], r"is no dimension .*write an integer"),
        (f"{PARAM}.shape", ["rows", "cols // 0"], "is no dimension"),
        (f"{PARAM}.shape", ["1+" * 20_000 + "1"], r"is no dimension \(40001 characters\)"),
        (f"{PARAM}.default", "1", "is '1', expected an integer or a number or null"),
        (f"{PARAM}.default", 10**400, "expected a number that float32 can hold"),
        (f"{PARAM}.default", float("nan"), "is nan, expected a number that float32 can hold"),
        (f"{PARAM}.sneaky", 1, r"params\[0\] is 'sneaky', expected no keys but name, dtype"),
        ("functions.crop.params", [{}] * 1000, "is 1000, expected at most 256"),
    ],
)
def test_bad_manifest(path, value, sentence):
    contents = manifest()
    edit(path, value)(contents)
    with pytest.raises(LibraryError, match=sentence):
        append_manifest(b"", contents)


def test_newer_format_is_refused_on_load(tmp_path):
    text = b'{"format": 7, "shape of things to come": true}'
    with pytest.raises(LibraryError, match="manifest format 7 is newer than 1"):
        load(write(tmp_path / "new.so", seal(elf_bytes(), text)))


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("target.features", ["fpu", "avx9000"], r"needs the CPU features avx9000, .*level"),
        ("target.kind", "metal", "is for target 'metal', but"),
        (
            "abi.facts.TVMFFIAny.size",
            24,
            r"built with apache-tvm-ffi 0\.1.*, but in the installed .* TVMFFIAny has 16 bytes "
            "instead of 24; install another",
        ),
        ("abi.facts.TVM_FFI_VERSION_MINOR", 2, "TVM_FFI_VERSION_MINOR is 1 instead of 2"),
        ("abi.blockscale", 9, "uses calling convention 9, but"),
        ("functions.extra", None, "the manifest lists extra, but the code has no such function"),
    ],
)
def test_library_for_another_machine_or_version(tmp_path, path, value, sentence):
    def change(contents):
        edit(path, contents["functions"]["crop"] if value is None else value)(contents)

    with pytest.raises(LibraryError, match=sentence):
        load(variant(tmp_path / "other.so", change))


def test_names_of_releases_do_not_matter(tmp_path):
    """What the headers declare decides, not what the release that built it is called."""
    assert load(variant(tmp_path / "any.so", edit("abi.tvm_ffi", "9.9.9")))["crop"]


def test_headers_that_cannot_be_read(tmp_path, monkeypatch):
    """A release without headers is refused, and the message says why."""
    from tvm_ffi import libinfo

    path = variant(tmp_path / "none.so", lambda contents: None)
    abi.declared.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(libinfo, "find_dlpack_include_path", lambda: str(tmp_path))
            with pytest.raises(LibraryError, match=r"cannot tell whether .*No such file"):
                load(path)
    finally:
        abi.declared.cache_clear()


def test_cpu_features_can_be_given(tmp_path):
    path = variant(tmp_path / "avx.so", edit("target.features", ["avx9000"]))
    assert "crop" in load(path, cpu_features={"avx9000"})


def test_other_architecture(tmp_path):
    machine = elf_machine(library_bytes())
    foreign = struct.pack("<H", 183 if machine == 62 else 62)
    elf = elf_bytes()[:18] + foreign + elf_bytes()[20:]
    with pytest.raises(LibraryError, match=r"holds code for .*, but this machine is"):
        load(write(tmp_path / "arm.so", append_manifest(elf, manifest())))


def test_replaced_file_is_loaded_anew(tmp_path):
    path = tmp_path / "kernels.so"
    first = load(variant(path, edit("meta", {"n": 1})))
    assert load(path).meta == {"n": 1}
    variant(tmp_path / "next.so", edit("meta", {"n": 2})).rename(path)
    second = load(path)
    assert (first.meta, second.meta) == ({"n": 1}, {"n": 2})
    x = np.ones((2, WIDTH), np.float32)
    assert (first["scale_f32"](x) == 2).all()
    assert (second["scale_f32"](x) == 2).all()
    mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert str(path.stat().st_ino) in mapped, "the old code runs under the new manifest"


OVERWRITE = """
import os, sys
from pathlib import Path
from blockscale.base.errors import LibraryError
from blockscale.runtime.library import load
path = Path(sys.argv[1])
load(path)
path.write_bytes(Path(sys.argv[2]).read_bytes())
try:
    load(path)
except LibraryError as error:
    print(error, flush=True)
os._exit(0)  # the mapped pages are gone: not even the library's own exit code can run
"""


@pytest.mark.always
def test_overwritten_file_is_refused(tmp_path):
    """In a process of its own: truncating a loaded file takes its memory away."""
    path = variant(tmp_path / "kernels.so", edit("meta", {"n": 1}))
    other = variant(tmp_path / "other.so", edit("meta", {"n": 2}))
    command = [sys.executable, "-c", OVERWRITE, str(path), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "was overwritten in place after this process had" in done.stdout


def test_only_kernels_are_exported():
    command = ["nm", "-D", "--defined-only", "--format=posix", str(library_file())]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {line.split()[0] for line in lines} == {
        f"__tvm_ffi_{f}" for f in manifest()["functions"]
    }


def test_only_system_libraries_and_tvm_ffi_are_needed():
    """glibc before 2.34 has threads and dlopen in files of their own."""
    command = ["readelf", "--dynamic", "--wide", str(library_file())]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    needed = {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}
    system = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"}
    assert {name for name in needed - system if not name.startswith("ld-")} == {"libtvm_ffi.so"}


def test_export_is_reproducible(tmp_path):
    objects = [object_file().read_bytes()]
    assert write_library(objects, manifest(), tmp_path / "a.so").read_bytes() == library_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["a.so"]


def test_failed_export_leaves_the_old_file(tmp_path, monkeypatch):
    old = write(tmp_path / "kernels.so", b"old")
    with pytest.raises(LinkError, match=r"the C compiler 'no-such-cc' does not run .* install"):
        write_library([object_file()], manifest(), old, cc="no-such-cc")
    with pytest.raises(LinkError, match="'false' ended with status 1; the command was"):
        write_library([object_file()], manifest(), old, cc="false")
    contents = manifest()
    contents["functions"]["absent"] = contents["functions"]["crop"]
    with pytest.raises(LinkError, match="__tvm_ffi_absent"):
        write_library([object_file()], contents, old)

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_library([object_file()], manifest(), old)
    assert old.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["kernels.so"]


def test_bad_export_arguments(tmp_path):
    with pytest.raises(ValueError, match="objects is empty"):
        write_library([], manifest(), tmp_path / "a.so")
    with pytest.raises(ValueError, match=r"objects\[0\] begins with b'int ', not with the ELF"):
        write_library([b"int main;"], manifest(), tmp_path / "a.so")
    with pytest.raises(FileNotFoundError, match=r"is not a folder.*create it first"):
        write_library([object_file()], manifest(), tmp_path / "no" / "a.so")
    foreign = object_file().read_bytes() + b"\0__TVMFFIFunctionCall\0"
    with pytest.raises(ValueError, match="through __TVMFFIFunctionCall, which a blockscale"):
        write_library([foreign], manifest(), tmp_path / "a.so")
    with pytest.raises(LibraryError, match=r"write_library\(a.so\): the manifest has no format"):
        write_library([object_file()], {}, tmp_path / "a.so")
