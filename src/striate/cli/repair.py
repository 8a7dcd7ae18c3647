"""``striate repair``: makes checkpoints on several drives whole again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from striate.cli.output import Failure, JsonOption, bytes_text, emit, say, with_codes
from striate.cli.targets import DriveOption, ProgressOption, VolumeOption, name_in_volume, required_volume
from striate.drives import display
from striate.engines import Engine
from striate.opening import open_from_member
from striate.superblock import MAGIC, is_member
from striate.volume import Volume

__all__ = ["repair"]


def repair(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A name in the volume, or any member's file; all checkpoints unless given.",
        ),
    ] = None,
    volume: VolumeOption = None,
    drive: DriveOption = None,
    replace: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="An empty directory, one of the volume's, that replaces a drive that is gone."
        ),
    ] = None,
    progress: ProgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restores missing and damaged members from what the others hold. What is whole is left as it is.

    A checkpoint in one file has nothing to be repaired from: see verify, and python -m striate.rescue.
    """
    shows = sys.stderr.isatty() and not as_json if progress is None else progress
    name = checkpoint
    if checkpoint is not None and os.path.lexists(checkpoint):
        used, name = _volume_of_member(checkpoint, drive)
    else:
        used = required_volume(volume, drive)
        if name is not None:
            name_in_volume(name)
    done = used.repair(name, replace=replace, progress=shows)

    def render(console: Console) -> None:
        if not done:
            console.print("Nothing to repair: every member is there. (striate verify reads them all.)")
        for result in done:
            say(
                console,
                f"{display(result.name)}: restored on {', '.join(result.drives)} ({bytes_text(result.bytes_written)})",
            )

    emit(as_json, done, render)


repair.__doc__ = with_codes(repair.__doc__)


def _volume_of_member(path: str, drives: list[str] | None) -> tuple[Volume, str]:
    """The volume that a member belongs to, as it records it (or on the drives given), and the checkpoint's name."""
    raw = Path(path)
    if raw.is_dir():
        raise Failure(
            f"{display(path)} is a directory: give a checkpoint's name, or the file of one of its members."
        )
    with open(raw, "rb") as opened:
        if not is_member(opened.read(len(MAGIC))):
            raise Failure(
                f"{display(path)} is no member of a checkpoint on several drives, and holds nothing to repair it from."
            )
    with open_from_member(path, Engine("posix"), drives=drives or None) as source:
        places = [drive.path for drive in source.drives.drives]
        name = os.fsdecode(source.superblock.name)
    return Volume(drives or places), name
