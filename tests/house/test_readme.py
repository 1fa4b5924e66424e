"""README.md, CONTRIBUTING.md, docs/: examples run, commands parse, links and files are there.

Blocks marked ``python gpu`` run where a GPU is.  What the others put on "cuda" is put on the CPU
elsewhere.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import blockscale as bs
from blockscale.base.manifest import read_manifest
from tests.kit.paths import ROOT, without_torch

README = ROOT / "README.md"
if not README.is_file():
    pytest.skip("no checkout around the tests, so no README.md", allow_module_level=True)
SMALLER = {'k384"], seconds=60': 'k384_f32"], trials=2', "384": "64"}
"""What the tests change: the time examples take."""
GPU_RESULTS = ("gpu-nvidia-h200-2026-11-26.json", "moe-nvidia-h200-2026-11-27.json")
PAGES = ("README.md", "CONTRIBUTING.md")
PAGES += tuple(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))
NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


def page(name):
    return (ROOT / name).read_text(encoding="utf-8")


def between(marker, text):
    return text.split(f"<!-- {marker}:start -->")[1].split(f"<!-- {marker}:end -->")[0].strip()


def blocks(language, name):
    """Return the contents of all code blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page(name), re.M | re.S)


def example(word, name, language="python"):
    """Return the code block of a page that has ``word``."""
    [found] = [block for block in blocks(language, name) if word in block]
    return found


def commands():
    """Return every command line of the bash blocks, of all pages."""
    found = "".join(block for name in PAGES for block in blocks("bash", name))
    found = re.sub(r"\\\n *", "", found).splitlines()
    return [line for line in dict.fromkeys(found) if line and not line.startswith("#")]


def run_example(code, folder, environ=None):
    """Run Python code in a process of its own, in ``folder``; return the lines that it prints."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = environ or {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=folder, env=environ, text=True, capture_output=True)
    assert run.returncode == 0, f"{code}\n{run.stderr}"
    return run.stdout.splitlines()


def smaller(examples):
    for long, short in SMALLER.items():
        assert any(long in code for code in examples), f"{long} is in no example any more"
        examples = [code.replace(long, short) for code in examples]
    return examples


def and_says_tvm(code):
    """Return the code, which then prints whether it has imported tvm."""
    return f"{code}\nimport sys\nprint('tvm' in sys.modules)"


@pytest.mark.always
def test_python_examples_run(tmp_path):
    """Tune, build and call, in two processes; 8 s: they import tvm, and torch."""
    tune, build, called = smaller(
        [example(word, "README.md") for word in ("bs.tune", "bs.build", '"kernels.so")\nw')]
    )
    compiled = run_example(f"{tune}\n{build}", tmp_path, without_torch())
    printed = run_example(and_says_tvm(called), tmp_path)
    assert sum(line.startswith("linear_nvfp4_n64_k64_") for line in compiled) == 4 + 3
    assert "scale_sweep_b16_f32" in compiled
    assert printed[-1] == "False", "the calling process imported tvm"
    assert 0.05 < float(re.search(r"relative error (\S+)", printed[0])[1]) < 0.15


def test_the_example_of_the_emulator_runs(tmp_path):
    code = example("launch", "docs/emulator.md")
    assert run_example(and_says_tvm(code), tmp_path) == ["20 [0. 2. 4. 6.]", "False"]


@pytest.mark.exhaustive
def test_examples_of_other_pages_run(tmp_path):
    """In one process that imports torch; 10 s: kernels are built on first use."""
    examples = [example(word, "docs/gemm.md") for word in ("bs.mm_fp4", "bs.grouped_mm_act")]
    examples += [example("prepare_linear_weights", "docs/linear.md")]
    examples += [example("mxfp8", "docs/moe_codes.md")]
    printed = run_example("\n".join(examples), tmp_path)
    # of one product of two 4-bit operands, and of three
    for line, most in zip(printed[:2], (0.15, 0.3), strict=True):
        assert 0.05 < float(re.search(r"relative error (\S+)", line)[1]) < most


@pytest.fixture(scope="module")
def gpu_library(tmp_path_factory):
    """Return the folder where the command of docs/gpu.md has built its GPU library."""
    folder = tmp_path_factory.mktemp("gpu")
    short, line = [line for line in commands() if "--target sm_90a,sm_100a" in line]
    assert {*short.split()} < {*line.split()}, "README.md builds what docs/gpu.md does not"
    command, arguments, _ = click_command(shlex.split(line))
    with contextlib.chdir(folder):
        run = CliRunner().invoke(command, arguments)
    assert run.exit_code == 0, run.output
    return folder


def on_this_machine(code):
    return code if torch.cuda.is_available() else code.replace('device="cuda"', 'device="cpu"')


@pytest.mark.exhaustive
@NEEDS_NVCC
def test_the_gpu_example_runs(gpu_library):
    """A library for two architectures, then calls, on the CPU where no GPU is; 10 s: nvcc."""
    held = read_manifest(gpu_library / "kernels-gpu.so")
    assert held["target"]["archs"] == ["sm_90a", "sm_100a"]
    code = example('"cuda"', "README.md")
    printed = run_example(on_this_machine(code), gpu_library)
    assert 0.05 < float(re.search(r"relative error (\S+)", printed[0])[1]) < 0.13
    run_example(on_this_machine(example("flashinfer", "docs/gpu.md", "python gpu")), gpu_library)


def test_the_moe_examples_run(tmp_path):
    """Functions and module on the CPU; 7 s: kernels are built on first use."""
    [functions, module] = blocks("python", "docs/moe.md")
    printed = run_example(f"{functions}\n{module}", tmp_path)
    assert 0.1 < float(re.search(r"relative error (\S+)", printed[0])[1]) < 0.25


def test_the_moe_calls_run(tmp_path):
    """Those on a GPU, smaller and on the CPU; 5 s, as above."""
    code = example("fused_moe", "docs/moe.md", "python gpu")
    changes = {'bs.load("moe.so")\n': "", '"cuda"': '"cpu"', "128, 2048, 768": "16, 64, 32"}
    for gpu, here in changes.items():
        assert gpu in code
        code = code.replace(gpu, here)
    printed = run_example(f"{code}\nprint(tuple(y.shape), y.dtype)", tmp_path)
    assert printed == ["(16, 64) torch.bfloat16"]


def test_moe_errors_are_those_of_the_file():
    section = between("errors", page("docs/moe.md"))
    source = re.search(r"\]\(\.\./(bench/results/moe-errors[^)]+)\)", page("docs/moe.md"))[1]
    assert section in page(source)


def test_gpu_examples_compile():
    examples = [(code, name) for name in PAGES for code in blocks("python gpu", name)]
    assert len(examples) == 5
    for code, name in examples:
        compile(code, name, "exec")


@pytest.mark.gpu
@NEEDS_NVCC
def test_graph_and_compile_example_runs(gpu_library):
    for code in blocks("python gpu", "docs/gpu.md"):
        run_example(code, gpu_library)


def test_signature_on_the_page():
    """Names, order, kinds and defaults of the parameters are the function's."""
    [text] = blocks("text", "docs/gpu.md")
    written = {}
    exec(f"{text.strip().replace('bs.', 'def ', 1)}: ...", written)
    shown = inspect.signature(written["add_rmsnorm_fp4quant"]).parameters.values()
    real = inspect.signature(bs.add_rmsnorm_fp4quant).parameters.values()
    assert [(p.name, p.kind, p.default) for p in shown] == [
        (p.name, p.kind, p.default) for p in real
    ]


def target(name):
    """Return whether the Makefile has a target."""
    return re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.M) is not None


def click_command(words):
    """Return the click command that ``words`` begin with, its arguments, and its name."""
    from blockscale.cli import command as cli
    from blockscale.demo import command

    if words[0] == "blockscale":
        return cli.cli, words[1:], "blockscale"
    assert words[:2] == ["python", "-m"], words
    name = words[2]
    assert name.startswith(("bench.", "blockscale.demo")), words
    module = command if name == "blockscale.demo" else bench_module(name)
    return module.main, words[3:], name


def bench_module(name):
    """Return the module that ``python -m name`` runs."""
    found = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__") if hasattr(found, "__path__") else found


def parse_other(words):
    """Return whether ``words`` are no click command; check what they name, as far as it is ours."""
    if words[0] == "make":
        assert all(target(word) for word in words[1:] if "=" not in word)
    elif words[0] == "python" and words[1][0] != "-":
        assert (ROOT / words[1]).is_file(), words
    elif words[:2] == ["python", "-m"] and words[2] in ("bench.gpu", "bench.moe"):
        bench_module(words[2]).arguments(words[3:])
    elif words[:2] == ["python", "-m"] and words[2] in (
        *(
            "bench.moe.loose",
            "bench.int4",
            "bench.layouts",
            "bench.gpu.linear",
            "bench.gpu.engines",
            "bench.moe.fp8",
        ),
        *("bench.gpu.linear_fp8", "bench.gpu.host"),
    ):
        assert callable(bench_module(words[2]).main)
    elif words[0] == "torchrun":
        assert callable(bench_module(words[words.index("-m") + 1]).main)
    elif words[0] == "vllm" or words[:3] == ["python", "-m", "sglang.launch_server"]:
        assert "model" in words  # an engine's own command
    elif words[:3] == ["python", "-m", "blockscale.tuning.server"]:
        bench_module(words[2]).arguments(words[3:])
    elif words[:2] == ["python", "-m"] and words[2].startswith(("tests.", "tvm.exec.")):
        assert importlib.util.find_spec(words[2]) is not None, words
    elif words[:3] == ["python", "-m", "pytest"] or words[0] == "compute-sanitizer":
        named = [ROOT / word for word in words if word.startswith("tests/")]
        assert all(file.exists() for file in named), words
        options = [word for word in words if re.match("--(device|library)", word)]
        assert all(word.split("=")[0] in page("tests/conftest.py") for word in options), words
    else:
        return words[0] in (".venv/bin/pre-commit", "git", "hf", "pip") or words[:2] == [
            "python",
            "-c",
        ]
    return True


def parse(command, arguments, name, parent=None):
    """Parse ``arguments`` without running anything; subcommands too; errors are click's."""
    context = command.make_context(name, list(arguments), parent=parent)
    if hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        return parse(command, rest, name, context)
    return context


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line, tmp_path, monkeypatch):
    """Every line of the bash blocks names something that exists, with options that it has."""
    monkeypatch.chdir(tmp_path)
    for folder in ("logs", "tuning_logs", "tirx", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bench" / "results").mkdir(parents=True)
    results = [f"bench/results/{name}" for name in GPU_RESULTS]
    for file in ("kernel.ptx", "case.json", "kernels.so", *results):
        (tmp_path / file).touch()
    inner = r"\$\((.*?)\)"  # a command whose output is names of kernels
    for part in [*re.findall(inner, line), re.sub(inner, "linear_nvfp4_n64_k64_f32", line)]:
        words = shlex.split(part, comments=True)
        words = words[words[0].startswith("CUDA_VISIBLE_DEVICES=") :]
        if parse_other(words):
            continue
        command, arguments, name = click_command(words)
        context = parse(command, arguments, name)
        help_text = CliRunner().invoke(context.command, ["--help"])
        assert help_text.exit_code == 0
        assert "Example:" in help_text.output


def without_code(name):
    return re.sub(r"^```.*?^```$", "", page(name), flags=re.M | re.S)


def links():
    """Return every relative link and picture of the pages, from the root."""
    found = []
    for name in PAGES:
        text = without_code(name)
        folder = (ROOT / name).parent
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            found.append(os.path.relpath(folder / link, ROOT))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("link", links())
def test_links_lead_to_files(link):
    assert (ROOT / link).is_file()


def test_links_lead_to_headings():
    for name in PAGES:
        for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", without_code(name)):
            other = os.path.relpath((ROOT / name).parent / file, ROOT) if file else name
            headings = re.findall(r"^#+ (.*)$", without_code(other), re.M)
            anchors = [re.sub(r"[^\w -]", "", heading) for heading in headings]
            assert anchor in [a.lower().replace(" ", "-") for a in anchors], (name, file, anchor)


def test_named_files_exist():
    """Files and folders in backticks are there; `<op>` and outputs of commands apart."""
    made = ("dist/", ".venv", "logs", "bench/results", "docs/")
    for name in PAGES:
        for path in re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:py|toml|txt|md))`", page(name)):
            places = [ROOT / path, ROOT / "blockscale" / path]
            assert path.startswith(made) or any(place.exists() for place in places), (name, path)


def test_measured_tables_are_those_of_the_results():
    """The table of docs/cpu.md is what the results file that it names gives."""
    from bench.cpu.report import FORMAT
    from bench.cpu.report import section as make
    from bench.report import read

    section = between("bench", page("docs/cpu.md"))
    source = re.search(r"\]\((\.\./bench/results/\S+\.json)\)", section)
    assert source is not None, "docs/cpu.md names no results; see `python -m bench.readme --help`"
    assert section == make(read(ROOT / "docs" / source[1], FORMAT), source[1]).strip()


@pytest.mark.parametrize(
    "marker", ["emulator", "ep", "ep_four", "host", "linear", "moe_fp8", "moe_loose"]
)
def test_a_table_is_that_of_the_results(marker):
    """Of the file that the page names."""
    from bench.readme import SECTIONS
    from bench.report import read

    name, form, make = SECTIONS[marker]
    section = between(marker, page(name))
    *_, source = re.findall(r"\]\((\.\./bench/results/\S+\.json)\)", section)
    assert section == make(read(ROOT / "docs" / source, form), source).strip()


@pytest.mark.parametrize("name", ["README.md", "docs/gpu.md"])
def test_the_gpu_tables_are_those_of_the_results(name):
    """Once there are results of a GPU, both pages show the file that they name."""
    from bench.gpu import report as gpu_report
    from bench.report import read

    section = between("gpu", page(name))
    source = re.search(r"\]\(((?:\.\./)?bench/results/gpu-\S+\.json)\)", section)
    if source is None:
        assert not [*(ROOT / "bench" / "results").glob("gpu-*.json")], (
            f"{name} names no results; see `python -m bench.gpu.report --help`"
        )
        pytest.skip("bench/results has no results of a GPU yet")
    results = read((ROOT / name).parent / source[1], gpu_report.FORMAT)
    make = gpu_report.readme_section if name == "README.md" else gpu_report.page
    assert section == make(results, source[1]).strip()


def test_no_trace_of_the_machine_it_was_written_on():
    """No absolute paths, and no index but the default one."""
    for path in [*(ROOT / name for name in PAGES), *(ROOT / "bench").rglob("*.json")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.~])/(?:root|home|tmp|work|usr)/", text), path
        assert "index-url" not in text
