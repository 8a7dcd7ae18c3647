"""``striate``: the program. Each command stands in a module of its own; here they are put together.

Most commands need torch, which takes seconds to import: only the module of the command that is called is.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

import striate
from striate.cli.output import ExitCode, Failure, error_console
from striate.errors import CorruptCheckpoint, DataLost, StriateError

__all__ = ["COMMANDS", "app_of", "main"]

# Command -> module, in the order of the help.
COMMANDS = {
    "ls": "ls",
    "inspect": "inspect",
    "verify": "verify",
    "repair": "repair",
    "diff": "diff",
    "export": "export",
    "convert": "convert",
    "import": "convert",
    "doctor": "doctor",
    "bench": "bench",
    "plan": "plan",
}


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"striate {striate.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def app_of(arguments: Sequence[str]) -> typer.Typer:
    """The program, with the command that the arguments call, or with all of them."""
    app = typer.Typer(
        name="striate",
        help="Checkpoints for PyTorch that keep up with the drives: look at them, check them, repair them, convert "
        "them; measure a node's drives, and plan what they have to hold.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    asked = arguments[0] if arguments else ""
    # Completion asks for what is not written yet.
    one = asked in COMMANDS and "_STRIATE_COMPLETE" not in os.environ
    for name in [asked] if one else COMMANDS:
        module = COMMANDS[name]
        command = getattr(import_module(f"striate.cli.{module}"), module)
        app.command(name, hidden=name == "import")(command)
    return app


def exit_code_of(error: BaseException) -> ExitCode:
    """What a shell is told of an error."""
    if isinstance(error, Failure):
        return error.code
    if isinstance(error, (DataLost, CorruptCheckpoint)):
        return ExitCode.LOST
    return ExitCode.FAILED


def _sentence(error: BaseException) -> str:
    if isinstance(error, (Failure, StriateError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: Any = None,
) -> None:
    error_console().print(f"warning: {message}", soft_wrap=True)


def main() -> None:
    """Runs the command line. Ends the process with an exit code; no error of a person's or a drive's is a traceback."""
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        # A path that is no text is shown escaped, not refused.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app_of(sys.argv[1:])(prog_name="striate")
    except (Failure, StriateError, OSError, MemoryError) as e:
        if isinstance(e, BrokenPipeError):  # somebody has read enough
            sys.stderr.close()
            sys.exit(int(ExitCode.FAILED))
        code = exit_code_of(e)
        if "--json" in sys.argv:
            print(json.dumps({"error": _sentence(e), "kind": type(e).__name__, "exit_code": int(code)}))
        else:
            error_console().print(f"striate: {_sentence(e)}", soft_wrap=True)
        sys.exit(int(code))
