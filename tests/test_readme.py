"""README.md and CONTRIBUTING.md: examples run, commands parse, links and files are there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
if not README.is_file():
    pytest.skip("no checkout around the tests, so no README.md", allow_module_level=True)
TEXT = README.read_text(encoding="utf-8")
SMALLER = {"384": "64", "seconds=60": "trials=4"}  # what the tests change: the time examples take


def blocks(language, text=TEXT):
    """Return the contents of all code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def commands():
    """Return every command line of the bash blocks, of both documents."""
    texts = [TEXT, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")]
    found = "".join(block for text in texts for block in blocks("bash", text))
    found = found.replace("\\\n", " ").splitlines()
    return [line for line in dict.fromkeys(found) if line and not line.startswith("#")]


def test_python_examples_run(tmp_path):
    """Tune, build, call, emulate, as on the page; 15 s: three processes import torch or tvm."""
    examples = blocks("python")
    assert [re.search(r"tune|build|load|launch", example)[0] for example in examples] == [
        "tune",
        "build",
        "load",
        "launch",
    ]
    for word in SMALLER:
        assert any(word in example for example in examples), f"{word} is in no example any more"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    outputs = []
    for example in examples:
        for long, short in SMALLER.items():
            example = example.replace(long, short)
        code = f"{example}\nimport sys\nprint('tvm' in sys.modules)"
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environ,
            text=True,
            capture_output=True,
        )
        assert run.returncode == 0, f"{example}\n{run.stderr}"
        outputs.append(run.stdout.splitlines())
    tuned, built, called, emulated = outputs
    assert sum(line.startswith("linear_nvfp4_n64_k64_") for line in tuned) == 12
    assert "scale_sweep_b16_f32" in built
    assert called[-1] == "False", "the calling process imported tvm"
    assert emulated == ["20 [0. 2. 4. 6.]", "False"]
    assert 0.05 < float(re.search(r"relative error (\S+)", called[0])[1]) < 0.13


def target(name):
    """Return whether the Makefile has a target."""
    return re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.M) is not None


def click_command(words):
    """Return the click command that ``words`` begin with, its arguments, and its name."""
    from bench import cpu, readme
    from blockscale import cli
    from blockscale.demo import command

    if words[0] == "blockscale":
        return cli.cli, words[1:], "blockscale"
    modules = {"blockscale.demo": command, "bench.cpu": cpu, "bench.readme": readme}
    assert words[:2] == ["python", "-m"], words
    return modules[words[2]].main, words[3:], words[2]


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
    for folder in ("logs", "tuning_logs"):
        (tmp_path / folder).mkdir()
    for file in ("kernel.ptx", "case.json"):
        (tmp_path / file).touch()
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert all(target(word) for word in words[1:])
        return
    if words[0] in (".venv/bin/pre-commit", "git"):
        return
    command, arguments, name = click_command(words)
    context = parse(command, arguments, name)
    help_text = CliRunner().invoke(context.command, ["--help"])
    assert help_text.exit_code == 0
    assert "Example:" in help_text.output


def links():
    """Return every relative link and picture of the two documents."""
    found = []
    for name in ("README.md", "CONTRIBUTING.md"):
        text = re.sub(
            r"^```.*?^```$", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S
        )
        found += re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("link", links())
def test_links_lead_to_files(link):
    assert (ROOT / link).is_file()


def test_named_files_exist():
    """Files and folders in backticks are there; `<op>` and outputs of commands apart."""
    made = ("dist/", ".venv", "logs", "bench/results", "docs/")
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for path in re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:py|toml|txt|md))`", text):
            places = [ROOT / path, ROOT / "blockscale" / path]
            assert path.startswith(made) or any(place.exists() for place in places), (name, path)


def test_measured_tables_are_those_of_the_results():
    """The table of README.md is what the results file that it names gives."""
    from bench import readme

    section = TEXT.split("<!-- bench:start -->")[1].split("<!-- bench:end -->")[0].strip()
    source = re.search(r"\]\((bench/results/\S+\.json)\)", section)
    assert source is not None, "README.md names no results; see `python -m bench.readme --help`"
    results = readme.read(ROOT / source[1], readme.FORMAT)
    assert section == readme.bench_section(results, source[1]).strip()


def test_the_emulators_table_is_that_of_the_results():
    from bench import readme

    section = TEXT.split("<!-- emulator:start -->")[1].split("<!-- emulator:end -->")[0].strip()
    source = re.search(r"\]\((bench/results/\S+\.json)\)", section)
    assert source is not None, "README.md names no results; see `python -m bench.readme --help`"
    results = readme.read(ROOT / source[1], readme.EMULATOR)
    assert section == readme.emulator_section(results, source[1]).strip()


def test_no_trace_of_the_machine_it_was_written_on():
    """No absolute paths, and no index but the default one."""
    for path in [README, ROOT / "CONTRIBUTING.md", *(ROOT / "bench").rglob("*.json")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.~])/(?:root|home|tmp|work|usr)/", text), path
        assert "index-url" not in text
