"""What all commands share: exit codes, one sentence for what went wrong, text or JSON, figures with units."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

__all__ = [
    "CODES_HELP",
    "ExitCode",
    "Failure",
    "JsonOption",
    "bytes_text",
    "emit",
    "error_console",
    "plain",
    "say",
    "seconds_text",
    "stop",
    "table",
    "with_codes",
]


class ExitCode(enum.IntEnum):
    """As docs/design.md has them. 2 is the argument parser's own for wrong usage."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    DAMAGED = 3  # but recoverable
    LOST = 4


CODES_HELP = "Exit status: 0 fine, 1 failed, 2 wrong usage, 3 damaged but recoverable, 4 data lost."


def with_codes(doc: str | None) -> str:
    """A command's help: what it does, and its exit status."""
    return f"{inspect.cleandoc(doc or '')}\n\n{CODES_HELP}"


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output instead of text.")]


class Failure(Exception):
    """Ends the command with one sentence and an exit code: for what is wrong with what a person asked for."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code


def stop(code: ExitCode) -> NoReturn:
    """Ends a command that has said all."""
    raise typer.Exit(int(code))


def _console(*, stderr: bool) -> Console:
    # Not a terminal: 80 columns, or what COLUMNS says; nothing is coloured by guess.
    return Console(stderr=stderr, highlight=False, markup=False)


def error_console() -> Console:
    """For progress and warnings: standard output is for results."""
    return _console(stderr=True)


def emit(as_json: bool, found: Any, render: Callable[[Console], None]) -> None:
    """Prints a result: as JSON (dataclasses and paths included), or as ``render`` draws it."""
    if as_json:
        sys.stdout.write(json.dumps(plain(found), indent=2, ensure_ascii=True) + "\n")
        return
    render(_console(stderr=False))


def plain(value: Any) -> Any:
    """A value as JSON can say it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in value]
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, (bytes, os.PathLike)):
        return os.fsdecode(value)
    if isinstance(value, float) and value != value:
        return None
    return value


def say(console: Console, text: str, *, indent: str = "") -> None:
    """Prints a line, broken between words where it is too long. One with a long path stays whole, for grep to find."""
    lines = [indent + text]
    if max(map(len, text.split()), default=0) <= console.width // 2:
        lines = textwrap.wrap(
            text,
            console.width,
            initial_indent=indent,
            subsequent_indent=indent + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    console.print("\n".join(lines), soft_wrap=True)


def table(*columns: str, right: tuple[int, ...] = (), title: str | None = None) -> Table:
    """A table that stays readable in 80 columns and in a pipe. right: the columns of figures, by number."""
    made = Table(
        box=None, pad_edge=False, title=title, title_justify="left", title_style="", header_style="bold"
    )
    for number, column in enumerate(columns):
        if number in right:
            made.add_column(column, justify="right", no_wrap=True)
        else:
            made.add_column(column, overflow="fold")
    return made


def bytes_text(count: float) -> str:
    """``1.5 GiB``: bytes in binary units, three digits."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1024 or unit == "PiB":
            break
        size /= 1024
    if unit == "B":
        return f"{int(count):,} B"
    return (
        f"{size:.2f} {unit}"
        if abs(size) < 10
        else f"{size:.1f} {unit}"
        if abs(size) < 100
        else f"{size:.0f} {unit}"
    )


def seconds_text(seconds: float) -> str:
    """``850 ms``, ``12.3 s``, ``3 min 20 s``, ``2 h``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return _two(seconds / 60, "min", "s")
    if seconds < 48 * 3600:
        return _two(seconds / 3600, "h", "min")
    return f"{seconds / 86400:.1f} days"


def _two(value: float, large: str, small: str) -> str:
    """A value in two units, of which the larger is sixty of the smaller."""
    whole, rest = divmod(round(value * 60), 60)
    return f"{whole} {large} {rest:02d} {small}" if rest else f"{whole} {large}"
