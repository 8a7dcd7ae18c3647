"""``striate diff``: which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from striate.cli.output import ExitCode, JsonOption, emit, say, stop, table, with_codes
from striate.cli.targets import DriveOption, ProgressOption, VolumeOption, opened
from striate.compare import Comparison, TensorDifference, compare
from striate.progress import shown

__all__ = ["diff"]

_HELP = "A checkpoint of striate or a safetensors file, a member, or a name in the volume."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_HELP, show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same.", show_default=False)],
    volume: VolumeOption = None,
    drive: DriveOption = None,
    most: Annotated[int, typer.Option("--most", min=1, help="Show at most so many lines of each kind.")] = 30,
    progress: ProgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compares two checkpoints tensor by tensor, every byte checked on the way. Exit status 1 if they differ."""
    shows = sys.stderr.isatty() and not as_json if progress is None else progress
    with (
        opened(a, volume, drive) as left,
        opened(b, volume, drive) as right,
        shown(shows, "comparing", left.manifest.table.data_bytes) as report,
    ):
        found = compare(left, right, progress=report)
    emit(as_json, {**vars(found), "equal": found.equal}, lambda console: _draw(console, found, most))
    if not found.equal:
        stop(ExitCode.FAILED)


diff.__doc__ = with_codes(diff.__doc__)


def _draw(console: Console, found: Comparison, most: int) -> None:
    if found.equal:
        console.print(f"equal: {found.same:,} tensors, value by value")
        return
    if found.differing:
        lines = table(
            "tensor", "values that differ", "max |a-b|", "mean |a-b|", "max rel.", right=(1, 2, 3, 4)
        )
        for entry in found.differing[:most]:
            lines.add_row(entry.name, *_figures(entry))
        console.print(lines)
        if len(found.differing) > most:
            console.print(f"... and {len(found.differing) - most:,} more (--most, --json)")
        console.print()
    for title, names in (
        (f"only in A ({found.a})", found.only_a),
        (f"only in B ({found.b})", found.only_b),
        ("not compared (cannot be read alone)", found.not_compared),
    ):
        if names:
            more = f" and {len(names) - most:,} more" if len(names) > most else ""
            say(console, f"{title}: {', '.join(names[:most])}{more}")
    if found.object_differs:
        console.print("The Python object around the tensors differs (numbers, strings, nesting).")
    console.print(f"{found.same:,} tensors are equal, {len(found.differing):,} differ")


def _figures(entry: TensorDifference) -> tuple[str, ...]:
    forms = "" if entry.a == entry.b else f"{entry.a} -> {entry.b} "
    if entry.max_abs is None:
        return (forms.strip() or "differs", "", "", "")
    share = f"{forms}{entry.values_differing:,} of {entry.values_count:,}"
    return (
        share,
        *(
            f"{value:.3g}"
            for value in (entry.max_abs, entry.mean_abs, entry.max_relative)
            if value is not None
        ),
    )
