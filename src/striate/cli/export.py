"""``striate export``: a checkpoint as one safetensors file or as a file of torch.save."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from striate.cli.output import Failure, JsonOption, bytes_text, emit, say, with_codes
from striate.cli.targets import (
    CheckpointArgument,
    DriveOption,
    ForceOption,
    ProgressOption,
    VolumeOption,
    opened,
)
from striate.export import Exported, export_safetensors, export_torch
from striate.progress import shown

__all__ = ["export"]


class Form(str, enum.Enum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"


class Ties(str, enum.Enum):
    DROP = "drop"
    COPY = "copy"


_SUFFIXES = {".safetensors": Form.SAFETENSORS, ".pt": Form.TORCH, ".pth": Form.TORCH, ".bin": Form.TORCH}


def export(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)],
    to: Annotated[
        Form | None,
        typer.Option(help="The form; by the suffix of OUT (.safetensors, .pt, .pth, .bin) unless given."),
    ] = None,
    ties: Annotated[
        Ties, typer.Option(help="Further names of one tensor, in safetensors: left out, or copied.")
    ] = Ties.DROP,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="For a torch file: rebuild objects of any class, which runs their code."
        ),
    ] = False,
    volume: VolumeOption = None,
    drive: DriveOption = None,
    force: ForceOption = False,
    progress: ProgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a checkpoint as one file that other programs read: safetensors (the tensors), or torch.save (all of it).

    Every chunk is checked on the way. Needs some 100 MiB of memory, whatever the size. OUT appears when it is whole.
    """
    form = to or _SUFFIXES.get(out.suffix)
    if form is None:
        raise Failure(f"{out}: its suffix tells no form: add --to safetensors or --to torch.")
    shows = sys.stderr.isatty() and not as_json if progress is None else progress
    with (
        opened(checkpoint, volume, drive) as source,
        shown(shows, f"exporting {source.name}", source.manifest.table.data_bytes) as report,
    ):
        if form is Form.SAFETENSORS:
            done = export_safetensors(source, out, ties=ties.value, overwrite=force, progress=report)
        else:
            done = export_torch(source, out, weights_only=not trust, overwrite=force, progress=report)
    emit(as_json, done, lambda console: _draw(console, done))


export.__doc__ = with_codes(export.__doc__)


def _draw(console: Console, done: Exported) -> None:
    what = "tensors" if done.form == "safetensors" else "storages"
    say(console, f"{done.path}: {done.tensors_count:,} {what}, {bytes_text(done.file_bytes)}")
    for line in done.left_out:
        say(console, indent="  ", text=f"left out: {line}")
    if done.left_out:
        say(console, indent="  ", text="A .pt file has room for everything.")
