"""The ``blockscale`` command: tune, build, inspect, convert, emulate, logs check, logs merge, list.

Only ``tune``, ``build`` and ``logs`` import tvm.
"""

from __future__ import annotations

import sys
import traceback

import click

from blockscale.base import words
from blockscale.base.version import VERSION
from blockscale.cli.build import build
from blockscale.cli.common import echo, print_json
from blockscale.cli.convert import convert
from blockscale.cli.emulate import emulate
from blockscale.cli.inspect import inspect
from blockscale.cli.logs import logs
from blockscale.cli.names import list_names
from blockscale.cli.tune import tune

_FAILURES = (ValueError, TypeError, OSError, RuntimeError, ModuleNotFoundError)


_HELP = """Tune, build and look into libraries of 4-bit block-scaled kernels.

NAMES are names of kernels (see: blockscale list). A name without its dtype at the end stands for
all dtypes.

\b
Example: blockscale tune linear_nvfp4_n384_k384 --seconds 30 &&
         blockscale build linear_nvfp4_n384_k384 -o kernels.so --logs logs
"""
"""``\\b`` keeps the lines of the example, which a shell can run as they are printed."""


@click.group(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="blockscale")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Handle the options of the group; each command does its own work."""


for _command in (build, convert, emulate, inspect, list_names, logs, tune):
    cli.add_command(_command)


def main() -> None:
    """Run the command line; exit code 1: bad logs or a bad kernel, 2: an error, 130: Ctrl-C."""
    arguments = sys.argv[1:]
    try:
        status = cli.main(arguments, prog_name="blockscale", standalone_mode=False)
    except click.Abort:
        echo("Interrupted.", err=True)
        raise SystemExit(130) from None
    except click.ClickException as error:
        _fail(error.format_message(), arguments, getattr(error, "ctx", None))
    except _FAILURES as error:
        if "--debug" in arguments:
            traceback.print_exc()
        _fail(_sentence(error), arguments)
    raise SystemExit(status if isinstance(status, int) else 0)


def _fail(sentence: str, arguments: list[str], ctx: click.Context | None = None) -> None:
    if "--json" in arguments and not _takes_a_path(arguments):
        print_json({"error": sentence})
    else:
        echo(f"blockscale: {sentence}", err=True)
        if ctx is not None:
            echo(f"Try '{ctx.command_path} --help'.", err=True)
    raise SystemExit(2)


def _takes_a_path(arguments: list[str]) -> bool:
    """Return whether --json of the command that is called names a file."""
    command: click.Command = cli
    for word in arguments:
        if isinstance(command, click.Group):
            command = command.commands.get(word, command)
    options = (each for each in command.params if isinstance(each, click.Option))
    return any("--json" in each.opts and not each.is_flag for each in options)


def _sentence(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return words.missing(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main()
