"""``striate verify``: reads all of a checkpoint and compares every checksum."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import striate
from striate.cli.output import ExitCode, Failure, JsonOption, bytes_text, emit, say, stop, table, with_codes
from striate.cli.targets import DriveOption, ProgressOption, VolumeOption, name_in_volume, volume_of
from striate.drives import display
from striate.errors import CorruptCheckpoint, DataLost
from striate.repair import MemberHealth, VolumeReport
from striate.scrub import Damage, VerifyReport

__all__ = ["verify"]


def verify(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT",
            help="Files, members on several drives, or names in the volume.",
            show_default=False,
        ),
    ],
    volume: VolumeOption = None,
    drive: DriveOption = None,
    progress: ProgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reads every byte, check blocks and copies included, and compares every checksum. Changes nothing."""
    reports: list[VerifyReport] = []
    gone: list[tuple[str, str]] = []
    shows = sys.stderr.isatty() and not as_json if progress is None else progress
    for checkpoint in checkpoints:
        try:
            reports.append(_verified(checkpoint, volume, drive, shows))
        except (CorruptCheckpoint, DataLost) as e:
            gone.append((checkpoint, str(e)))
    code = _code(reports, gone)

    def render(console: Console) -> None:
        for report in reports:
            _draw(console, report)
        for checkpoint, why in gone:
            say(console, f"{display(checkpoint)}: LOST")
            say(console, indent="  ", text=f"{why}")

    found = {
        "checkpoints": [
            {**vars(report), "ok": report.ok, "recoverable": _recoverable(report)} for report in reports
        ],
        "lost": [{"checkpoint": checkpoint, "error": why} for checkpoint, why in gone],
        "exit_code": int(code),
    }
    emit(as_json, found, render)
    if code:
        stop(code)


verify.__doc__ = with_codes(verify.__doc__)


def _verified(checkpoint: str, volume: Path | None, drives: list[str] | None, progress: bool) -> VerifyReport:
    if os.path.lexists(checkpoint):
        return striate.verify(checkpoint, drives=drives or None, progress=progress)
    used = volume_of(volume, drives)
    if used is None:
        raise Failure(
            f"{display(checkpoint)} does not exist, and no volume is given in which it could be a name."
        )
    name_in_volume(checkpoint)
    return used.verify(checkpoint, progress=progress)


def _recoverable(report: VerifyReport) -> bool:
    return report.ok or (isinstance(report, VolumeReport) and report.recoverable)


def _code(reports: list[VerifyReport], gone: list[tuple[str, str]]) -> ExitCode:
    if gone or not all(map(_recoverable, reports)):
        return ExitCode.LOST
    return ExitCode.FINE if all(report.ok for report in reports) else ExitCode.DAMAGED


def _draw(console: Console, report: VerifyReport) -> None:
    several = isinstance(report, VolumeReport)
    if report.ok:
        chunks = f"{report.chunks_count:,} chunk{'s' * (report.chunks_count != 1)}"
        say(console, f"{report.path}: whole ({bytes_text(report.file_bytes)}, {chunks})")
        return
    say(console, f"{report.path}: {'DAMAGED, recoverable' if _recoverable(report) else 'LOST in part'}")
    if isinstance(report, VolumeReport):
        for member in report.members:
            if not member.ok:
                _draw_member(console, member)
    else:
        _draw_damages(console, report.damages)
    tensors = list(dict.fromkeys(name for damage in report.damages for name in damage.tensors))
    if isinstance(report, VolumeReport):
        tensors = list(report.lost)
    if tensors:
        more = f" and {len(tensors) - 8} more" if len(tensors) > 8 else ""
        say(
            console,
            indent="  ",
            text=f"tensors {'gone' if several else 'concerned'}: {', '.join(tensors[:8])}{more}",
        )
    if several and _recoverable(report):
        say(console, indent="  ", text="It can be loaded. Make it whole again: striate repair")
    else:
        say(
            console,
            "  Load an earlier checkpoint, or restore this one from a copy. What is left: "
            "striate.load(..., partial=True) or python -m striate.rescue --partial",
        )


def _draw_member(console: Console, member: MemberHealth) -> None:
    if member.missing:
        say(console, indent="  ", text=f"drive {member.drive}: {member.missing}")
        return
    say(
        console,
        indent="  ",
        text=f"drive {member.drive}: {len(member.damages):,} of {member.blocks_count:,} blocks damaged",
    )
    _draw_damages(console, member.damages)


def _draw_damages(console: Console, damages: tuple[Damage, ...]) -> None:
    lines = table("region", "chunk", "offset", "bytes", "reason", right=(1, 2, 3))
    for damage in damages[:20]:
        chunk = "" if damage.chunk is None else str(damage.chunk)
        lines.add_row(damage.region, chunk, f"{damage.offset:,}", f"{damage.length:,}", damage.reason)
    console.print(lines)
    if len(damages) > 20:
        console.print(f"  ... and {len(damages) - 20:,} more")
