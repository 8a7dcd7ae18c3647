"""Which checkpoint a command means: a file, a member on a drive, or a name in a volume."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from striate import torch_api
from striate.cli.output import Failure
from striate.drive_set import open_drives
from striate.drives import display
from striate.engines import Engine
from striate.member import Readable
from striate.opening import open_generation
from striate.superblock import check_name
from striate.torch_api import about
from striate.volume import Volume

__all__ = [
    "CheckpointArgument",
    "DriveOption",
    "ForceOption",
    "ProgressOption",
    "VolumeOption",
    "name_in_volume",
    "opened",
    "required_volume",
    "volume_of",
]

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint's file, any of its members on several drives, or its name in the volume.",
        show_default=False,
    ),
]
VolumeOption = Annotated[
    Path | None,
    typer.Option(
        "--volume",
        envvar="STRIATE_VOLUME",
        metavar="FILE",
        help="The TOML file that describes the volume.",
        show_default=False,
    ),
]
DriveOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drive",
        metavar="DIR",
        help="A drive of the volume, instead of a TOML file; repeat it for each one.",
        show_default=False,
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there under the name.")]
ProgressOption = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress", help="A progress bar; on a terminal, unless told.", show_default=False
    ),
]


def volume_of(volume: Path | None, drives: list[str] | None) -> Volume | None:
    """The volume that a person told of, if any. Raises Failure for a file that describes none."""
    try:
        if drives:
            # What is on the drives says how it is laid out; only a save would have to be told.
            return Volume(drives)
        return None if volume is None else Volume.from_file(volume)
    except OSError as e:
        raise Failure(f"the volume's file cannot be read: {volume}: {e.strerror}.") from None
    except (ValueError, TypeError) as e:
        raise Failure(str(e)) from None


def required_volume(volume: Path | None, drives: list[str] | None) -> Volume:
    found = volume_of(volume, drives)
    if found is None:
        raise Failure("no volume: give --volume FILE, or --drive DIR for each drive, or set STRIATE_VOLUME.")
    return found


def name_in_volume(name: str) -> bytes:
    """Raises Failure for what cannot be a name."""
    try:
        return check_name(name)
    except ValueError as e:
        raise Failure(str(e)) from None


@contextlib.contextmanager
def opened(
    checkpoint: str,
    volume: Path | None,
    drives: list[str] | None,
    *,
    engine: Engine | None = None,
    verify: bool = True,
) -> Iterator[Readable]:
    """Opens what CHECKPOINT means: a path if there is one, otherwise a name in the volume.

    Raises Failure if there is neither, or if it is a torch.save file; what opening raises.
    """
    chosen = engine or Engine()
    if os.path.lexists(checkpoint):
        if os.path.isdir(checkpoint):
            raise Failure(f"{display(checkpoint)} is a directory: give a file in it (striate ls lists them).")
        with torch_api.opened(checkpoint, chosen, verify, drives or None) as source:
            if source is None:
                raise Failure(
                    f"{display(checkpoint)} is a torch.save file: convert it (striate convert), or load it with "
                    "striate.load."
                )
            yield source
        return
    used = volume_of(volume, drives)
    if used is None:
        raise Failure(
            f"{display(checkpoint)} does not exist, and no volume is given in which it could be a name."
        )
    raw = name_in_volume(checkpoint)
    with open_generation(open_drives(used.drives, chosen), raw, chosen) as source, about(source.path):
        yield source
