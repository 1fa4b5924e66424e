"""The tests' own tools: what is kept of compilers and the emulator, and what runs by default."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import tvm
from tvm.script import tirx as T

from blockscale import emulator
from blockscale.emulator.launching import front_door
from blockscale.tir import script
from tests.kit import compiled, emulated, pairwise
from tests.kit.paths import ROOT


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Return the calls of compilers that really ran, in a folder with nothing kept."""
    monkeypatch.setenv("BLOCKSCALE_TEST_CACHE", str(tmp_path / "kept"))
    made, real = [], compiled._run

    def run(command, **options):
        made.append([str(part) for part in command])
        return real(command, **options)

    monkeypatch.setattr(compiled, "_run", run)
    return made


def compile_c(folder, out, *flags):
    """Compile ``folder/one.c`` as a library would, and return the object's bytes."""
    command = ["gcc", *flags, f"-I{folder}", "-c", folder / "one.c", "-o", out]
    done = compiled.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out.read_bytes()


def test_what_decides_is_in_the_key(calls, tmp_path):
    """A changed source, header, flag or file beside it is compiled anew; the same text is not."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')
    (source / "one.h").write_text("#define ONE 1\n")
    first = compile_c(source, tmp_path / "a.o")
    assert compile_c(source, tmp_path / "b.o") == first
    assert len(calls) == 1
    (source / "one.h").write_text("#define ONE 2\n")
    changed = compile_c(source, tmp_path / "c.o")
    assert changed != first
    (source / "one.c").write_text('#include "one.h"\nint one(void) { return ONE + 1; }\n')
    assert compile_c(source, tmp_path / "d.o") != changed
    compile_c(source, tmp_path / "e.o", "-O2")
    assert len(calls) == 4
    (source / "one.h").write_text("#define ONE 1\n")
    (source / "one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')
    assert compile_c(source, tmp_path / "f.o") == first
    assert len(calls) == 4


def test_files_that_a_text_names_are_in_the_key(calls, tmp_path):
    """As the machine code that a library embeds: its path is in the text, not in the command."""
    made = []
    for i, image in enumerate((b"one", b"two", b"one")):
        folder = tmp_path / f"folder{i}"
        folder.mkdir()
        (folder / "image0").write_bytes(image)
        (folder / "one.c").write_text(f'__asm__(".incbin \\"{folder}/image0\\"\\n");\n')
        made.append(compile_c(folder, folder / "one.o"))
    assert made[0] != made[1]
    assert made[0] == made[2]
    assert len(calls) == 2


def test_a_changed_header_of_a_kernel_is_compiled(calls, monkeypatch, tmp_path):
    """The headers of kernels lie in the folders that nvcc is given."""
    from blockscale.lower import nvcc

    monkeypatch.setattr(nvcc, "INCLUDES", (tmp_path,))
    (tmp_path / "own.cuh").write_text("#define OWN 1\n")
    text = '#include "own.cuh"\nextern "C" __global__ void k(int *p) { *p = OWN; }\n'
    first = nvcc.compile_cuda_source(text, "sm_90a", ptx=True).image
    assert nvcc.compile_cuda_source(text, "sm_90a", ptx=True).image == first
    (tmp_path / "own.cuh").write_text("#define OWN 7\n")
    assert nvcc.compile_cuda_source(text, "sm_90a", ptx=True).image != first
    assert nvcc.compile_cuda_source(text, "sm_100a", ptx=True).image != first
    assert sum("nvcc" in call[0] and "-o" in call for call in calls) == 3


def test_errors_are_not_kept(calls, tmp_path):
    """The compiler says again what is wrong, in the words and with the paths of this call."""
    (tmp_path / "one.c").write_text("int one(void) { return two; }\n")
    for out in ("a.o", "b.o"):
        command = ["gcc", "-c", tmp_path / "one.c", "-o", tmp_path / out]
        done = compiled.run(command, capture_output=True, text=True, check=False)
        assert done.returncode
        assert "two" in done.stderr
        assert str(tmp_path) in done.stderr
    assert not list((tmp_path / "kept").glob("??/*"))


def adds(number):
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((4,), "int32")):
        for i in range(4):
            with T.sblock("add"):
                j = T.axis.spatial(4, i)
                x[j] = x[j] + number

    return tvm.IRModule({"main": main})


def test_kernels_of_tvm_are_kept_by_their_text(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKSCALE_TEST_CACHE", str(tmp_path))
    for number in (1, 2, 1):
        x = torch.arange(4, dtype=torch.int32)
        tvm.compile(adds(number), target="llvm")(x)
        assert x.tolist() == [i + number for i in range(4)]
    assert len(list(tmp_path.glob("??/*.o"))) == 2


def test_kernels_of_tvm_are_found_wherever_their_text_stands(monkeypatch, tmp_path):
    """In another file, or further down in it: the product's parser notes no places."""
    script.install()
    monkeypatch.setenv("BLOCKSCALE_TEST_CACHE", str(tmp_path))
    text = adds(3).script()
    for moved in (text, f"\n\n{text}"):
        x = torch.zeros(4, dtype=torch.int32)
        tvm.compile(tvm.script.from_source(moved), target="llvm")(x)
        assert x.tolist() == [3] * 4
    assert len(list(tmp_path.glob("??/*.o"))) == 1


def test_trim_removes_what_was_not_used_for_longest(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKSCALE_TEST_CACHE", str(tmp_path))
    made = [
        compiled.kept(f"{i}" * 64, ".o", lambda path: path.write_bytes(bytes(100)) and None)
        for i in range(4)
    ]
    for i, path in enumerate(made):
        os.utime(path, (i, i))
    compiled.kept("0" * 64, ".o", lambda path: None)  # used again
    compiled.trim(250)
    assert [path.exists() for path in made] == [True, False, False, True]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (7, 3, 2, 4), (5,), (1, 1), (9, 9, 2)])
def test_every_pair_meets(sizes):
    values = {f"p{i}": range(size) for i, size in enumerate(sizes)}
    params = pairwise.pairs(**values).args[1]
    assert len(params) == len(list(itertools.product(*values.values())))
    few = [param.values for param in params if not param.marks]
    for a, b in itertools.combinations(range(len(sizes)), 2):
        assert {(c[a], c[b]) for c in few} == set(
            itertools.product(values[f"p{a}"], values[f"p{b}"])
        )
    assert {c[0] for c in few} == set(range(sizes[0]))
    assert len(few) <= 2 * max(x * y for x, y in itertools.product(sizes, sizes[1:] or [1]))


def test_each_value_occurs():
    mark = pairwise.each(a=range(5), b="xy", legal=lambda a, b: a != 3 or b == "x")
    few = [param.values for param in mark.args[1] if not param.marks]
    assert {a for a, _ in few} == set(range(5))
    assert {b for _, b in few} == set("xy")
    assert len(few) <= 6


def test_pairs_that_are_illegal_are_left_out():
    mark = pairwise.pairs(a=[1, 2, 3], b=[1, 2, 3], c="xy", legal=lambda a, b, c: a <= b)
    few = [param.values for param in mark.args[1] if not param.marks]
    assert all(a <= b for a, b, _ in few)
    assert {(a, b) for a, b, _ in few} == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a <= b}


def test_options(tmp_path):
    """Without --exhaustive, what is marked so is not even counted as skipped."""
    file = tmp_path / "test_it.py"
    file.write_text(
        "import pytest\nfrom tests.kit.pairwise import pairs, few\n\n\n"
        "@pairs(a=[1, 2, 3], b=[1, 2, 3], c=[1, 2])\ndef test_a(a, b, c):\n    pass\n\n\n"
        "@pytest.mark.parametrize('x', few([1, 2, 3, 4]))\ndef test_b(x):\n    pass\n"
    )
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers"]
    command += ["-c", str(ROOT / "pyproject.toml"), str(file)]
    said = [
        subprocess.run([*command, *more], capture_output=True, text=True, cwd=ROOT).stdout
        for more in ([], ["--exhaustive"])
    ]
    assert "11 passed, 11 deselected" in said[0], said[0]
    assert "22 passed" in said[1], said[1]


HARDWARE = sorted(path.stem for path in (ROOT / "tests" / "hardware").glob("test_*.py"))
ABSENT = ("tvm", "xdist", "pytest_timeout", "hypothesis", "triton")
WITHOUT = f"""
import importlib.abc
import importlib.metadata
import sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def without_compilers(code, *arguments):
    """Run Python where only what a GPU machine needs can be imported."""
    told = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT)}
    environ = os.environ | told
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tests_of_hardware_need_no_compiler():
    """They are collected where apache-tvm-ffi, torch, numpy and pytest are, and nothing else."""
    code = "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "tests/hardware"]
    said = without_compilers(code, *options)
    for name in HARDWARE:
        assert f"tests/hardware/{name}.py::" in said, said


def test_programs_of_hardware_need_no_compiler():
    """What runs on the GPU machine beside the tests."""
    code = "import importlib\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    files = sorted((ROOT / "tests" / "hardware").glob("[!_]*.py"))
    assert len(files) > len(HARDWARE)
    without_compilers(code, *(f"tests.hardware.{path.stem}" for path in files))


def test_programs_of_the_emulator_are_kept_by_text_and_entry(tmp_path, monkeypatch):
    """One is parsed once; without functions, which a run does not need; short texts never kept."""
    from blockscale.emulator.launching.link import linked

    monkeypatch.setenv("BLOCKSCALE_TEST_CACHE", str(tmp_path))
    head = ".version 9.0\n.target sm_90a\n.address_size 64\n.global .u32 here;\n"
    text = head + "".join(f".visible .entry {name}()\n{{\nret;\n}}\n" for name in "ab")
    long = text + "// " + "x" * compiled.LONG_PTX + "\n"
    asked = []

    def counted(ptx, entry):
        asked.append(entry)
        return linked(ptx, entry)

    for _ in range(2):  # as two processes
        kept = compiled._keeping_programs(counted)
        for entry in "ab":
            program, own = kept(long, entry), linked(long, entry)
            assert (program.units, program.places) == (own.units, own.places)
            assert program.module.variables == own.module.variables
            assert program.name == entry
        kept(text, "a")
    assert asked == ["a", "b", "a", "a"]


def test_kernels_of_libraries_are_kept_by_text(tmp_path, monkeypatch):
    """With parameters and directives, which a launch is checked by, and no instructions."""
    from blockscale.emulator.host import launches

    monkeypatch.setenv("BLOCKSCALE_TEST_CACHE", str(tmp_path))
    real, asked = getattr(launches.kernels_of, "kept", launches.kernels_of), []

    def counted(ptx):
        asked.append(ptx)
        return real(ptx)

    monkeypatch.setattr(launches, "kernels_of", counted)
    text = ".version 9.0\n.target sm_90a\n.address_size 64\n.func none()\n{\nret;\n}\n"
    text += ".visible .entry a(.param .u32 n, .param .u64 at)\n.reqntid 64\n{\nret;\n}\n"
    long = text + "// " + "x" * compiled.LONG_PTX + "\n"
    other = long.replace("entry a(", "entry b(")
    for _ in range(2):  # as two processes
        kernels = compiled._keeping_kernels(launches)
        found = kernels(long)
        assert list(found) == ["a"]
        assert found["a"].params == [(0, 4), (8, 8)]
        assert found["a"].directive(".reqntid") == (64, 1, 1)
        assert found["a"].static_smem == real(long)["a"].static_smem
        assert kernels(long)["a"] is not found["a"]  # a host sets attributes of its own
        assert list(kernels(other)) == ["b"]
        kernels(text)
    assert asked == [long, other, text, text]


# ---- Emulated launches ---------------------------------------------------------------------------

ADDS = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry adds(.param .u64 at, .param .u32 number)
{
.reg .b32 %r<4>;
.reg .b64 %rd<3>;
ld.param.u64 %rd0, [at];
ld.param.u32 %r0, [number];
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd1, %r1, 4, %rd0;
ld.global.u32 %r2, [%rd1];
add.u32 %r2, %r2, %r0;
st.global.u32 [%rd1], %r2;
ret;
}
"""


@pytest.fixture
def emulations(monkeypatch, tmp_path):
    """Return the names of kernels that were really emulated, in a folder with nothing kept."""
    monkeypatch.setenv("BLOCKSCALE_TEST_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(emulated, "WORTH_S", 0.0)
    made, real = [], emulated._execution

    def execution(program, *rest):
        made.append(program.name)
        return real(program, *rest)

    monkeypatch.setattr(emulated, "_execution", execution)
    return made


def added(x, number, ptx=ADDS, **options):
    """Return ``x`` with ``number`` added by a kernel, and the launch's report."""
    out = x.copy()
    return out, emulator.launch(ptx, block=32, args=[out, number], **options)


def test_a_launch_is_emulated_once(emulations):
    """It changes the same bytes again, and says the same."""
    x = np.arange(32, dtype=np.uint32)
    first, again = added(x, 5), added(x, 5)
    assert (first[0] == x + 5).all()
    assert (again[0] == x + 5).all()
    assert first[1] == again[1]
    assert first[1].instructions["st.global.u32"] == 1
    assert emulations == ["adds"]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: added(x + (np.arange(32) == 31), 5),
        lambda x: added(x, 6),
        lambda x: added(x, 5, seed=1),
        lambda x: added(x, 5, dynamic_smem=16),
        lambda x: added(x, 5, max_instructions=10**6),
        lambda x: added(x, 5, ADDS.replace("add.u32 %r2, %r2", "sub.u32 %r2, %r2")),
        lambda x: added(np.append(x, x[:1]), 5),
        lambda x: added(x, 5, progress=True),
    ],
    ids=["byte", "parameter", "seed", "memory", "limit", "kernel", "size", "progress"],
)
def test_what_decides_a_launch_is_in_its_key(emulations, other):
    x = np.arange(32, dtype=np.uint32)
    added(x, 5)
    out, report = other(x)
    assert len(emulations) == 2
    assert (out[:31] != x[:31]).all()
    assert report.instructions["st.global.u32"] == 1


def test_an_edited_emulator_emulates_again(emulations, monkeypatch):
    x = np.arange(32, dtype=np.uint32)
    added(x, 5)
    monkeypatch.setattr(compiled, "emulators_source", lambda: "another")
    added(x, 5)
    assert len(emulations) == 2


def test_a_replaced_part_of_the_emulator_is_run(emulations, monkeypatch):
    """A test that replaces a constant, a function or a method sees what that does."""
    from blockscale.emulator.launching import execute
    from blockscale.emulator.machine import memory

    x = np.arange(32, dtype=np.uint32)
    added(x, 5)
    with monkeypatch.context() as patch:
        patch.setattr(execute, "QUANTUM", 1)
        added(x, 5)
    with monkeypatch.context() as patch:
        patch.setattr(memory.GlobalMemory, "offsets", lambda *_: np.zeros(32, np.int64))
        added(x, 5)
    assert len(emulations) == 3
    added(x, 5)
    assert len(emulations) == 3


def test_an_error_is_raised_again(emulations):
    """With its place, and what the kernel had stored before it."""
    ptx = ADDS.replace("ret;", "ld.global.u32 %r3, [%rd1 + 4096];\nret;")
    said = []
    for _ in range(2):
        x = np.arange(32, dtype=np.uint32)
        with pytest.raises(emulator.IllegalOperation, match="past the end of argument 0") as error:
            emulator.launch(ptx, block=32, args=[x, 5])
        assert (x == np.arange(32) + 5).all()
        said.append((str(error.value), error.value.rule, error.value.place, error.value.report))
    assert said[0] == said[1]
    assert emulations == ["adds"]


def test_clocks_are_read(emulations):
    """Whoever reads the time of day gets another one."""
    ptx = ADDS.replace("mov.u32 %r1, %tid.x;", "mov.u32 %r1, %tid.x;\nmov.u64 %rd2, %globaltimer;")
    for _ in range(2):
        added(np.zeros(32, np.uint32), 5, ptx)
    assert len(emulations) == 2


CHASES = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry chases(.param .u64 table)
{
.reg .b32 %r<2>;
.reg .b64 %rd<5>;
ld.param.u64 %rd0, [table];
ld.global.u64 %rd1, [%rd0];
ld.global.u64 %rd2, [%rd0 + 8];
ld.global.u32 %r0, [%rd1];
add.u32 %r0, %r0, 1;
st.global.u32 [%rd2], %r0;
ld.global.u64 %rd3, [%rd0 + 16];
add.u64 %rd3, %rd3, 0x10000000000;
st.global.u64 [%rd0 + 16], %rd3;
ret;
}
"""
FAR = 1 << 40
"""What it adds to the third word: no address of a piece of memory before, maybe one after."""


def chased(number, order, offset=0, third=0, ptx=CHASES, pieces=None):
    """Run a kernel that follows addresses in memory, of pieces of memory in some order.

    Returns what it stored as the table's third word, and the address of the target.
    """
    from blockscale.emulator.host.memory import address_of, aligned

    pieces = sorted(pieces or (aligned(64) for _ in range(3)), key=address_of)
    table, source, target = (pieces[i] for i in order)
    for piece in pieces:
        piece[:] = 0xFF
    source.view(np.uint32)[:] = number
    words = [address_of(source), address_of(target) + offset, third]
    table[:24] = np.array(words, np.uint64).view(np.uint8)
    regions = [(address_of(piece), piece) for piece in pieces]
    params = address_of(table).to_bytes(8, "little")
    front_door.run(ptx, "chases", 1, 1, 1, 0, params, regions)
    assert target.view(np.uint32)[offset // 4] == number + 1
    assert (np.delete(target.view(np.uint32), offset // 4) == 0xFFFFFFFF).all()
    assert (table[24:] == 0xFF).all()
    return int(table[16:24].view(np.uint64)[0]), address_of(target) + offset


def test_addresses_of_a_process_are_no_part_of_a_launch(emulations):
    """Those in parameters and in memory; but what they point to is."""
    held = [np.zeros(1 << k, np.uint8) for k in range(12)]  # others move elsewhere
    for order in itertools.permutations(range(3)):
        chased(7, order)
        held += [np.zeros(333, np.uint8)]
    assert len(emulations) == 1
    chased(8, (0, 1, 2))
    assert len(emulations) == 2
    chased(7, (0, 1, 2), offset=4)
    assert len(emulations) == 3
    chased(7, (2, 1, 0), offset=4)
    assert len(emulations) == 3


def test_an_address_that_is_stored_is_one_of_this_process(emulations):
    """A launch that stored one is emulated again."""
    ptx = CHASES.replace("add.u64 %rd3, %rd3, 0x10000000000;", "add.u64 %rd3, %rd2, 4;")
    held = []
    for order in itertools.permutations(range(3)):
        stored, target = chased(7, order, ptx=ptx)
        assert stored == target + 4
        held += [np.zeros(333, np.uint8)]
    assert len(emulations) == 6


def test_a_number_that_looks_like_an_address_stays_a_number(emulations):
    """Wherever the memory of the process that reads it lies."""
    from blockscale.emulator.host.memory import address_of, aligned

    own, others = ([aligned(64) for _ in range(3)] for _ in range(2))
    for number in map(address_of, own):
        for pieces in (own, others, own):
            stored, _ = chased(7, (0, 1, 2), third=(number - FAR) % (1 << 64), pieces=pieces)
            assert stored == number
    assert len(emulations) == 6  # where it looks like one, each time


def test_launches_of_several_devices_are_emulated_once(emulations, monkeypatch):
    """All together; another number, launch or device is another run."""
    from blockscale.emulator.launching import world as machines

    began, real = [], machines.World._begin
    monkeypatch.setattr(emulated, "_replaced", lambda: False)  # but for this:
    monkeypatch.setattr(machines.World, "_begin", lambda *own: began.append(own[1]) or real(*own))

    def run(numbers, devices=2):
        world = emulator.World(devices, seed=3)
        x = [np.arange(32, dtype=np.uint32) for _ in range(devices)]
        at = [world.add(device, x[device], "x") for device in range(devices)]
        for device, number in numbers:
            world.launch(device, ADDS, block=32, args=[at[device], number])
        reports = world.run(max_instructions=10_000)
        for device in range(devices):
            added = sum(number for own, number in numbers if own == device)
            assert (x[device] == np.arange(32) + added).all()
            assert not world.devices[device].queue
        return reports

    for i, numbers in enumerate(([(0, 5), (1, 7)], [(0, 5), (1, 8)], [(1, 7), (0, 5), (0, 1)])):
        began.clear()
        first = run(numbers)
        assert len(began) == len(numbers)
        assert run(numbers) == first
        assert len(began) == len(numbers)
        assert [len(own) for own in first] == [1 + (i == 2), 1]
    run(numbers, devices=3)
    assert len(began) == 6
