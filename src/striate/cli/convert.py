"""``striate convert`` (also ``import``): somebody else's checkpoint as one of striate's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import striate
from striate.cli.output import Failure, JsonOption, bytes_text, emit, say, seconds_text, with_codes
from striate.cli.targets import (
    DriveOption,
    ForceOption,
    ProgressOption,
    VolumeOption,
    name_in_volume,
    volume_of,
)
from striate.drives import display
from striate.importing import Foreign, opened_foreign
from striate.volume import Volume

__all__ = ["convert"]


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A file of torch.save or safetensors, a model.safetensors.index.json or its directory, or a "
            "directory of torch.distributed.checkpoint.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="The file to write; with --volume or --drive, a name in the volume.",
            show_default=False,
        ),
    ],
    volume: VolumeOption = None,
    drive: DriveOption = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run the code that SOURCE's pickle names.")] = False,
    scratch: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where a DCP directory's tensors are put together; beside OUT unless given.",
            show_default=False,
        ),
    ] = None,
    force: ForceOption = False,
    progress: ProgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Saves another program's checkpoint with striate, checksums and all. SOURCE stays as it is.

    Tensors are mapped from SOURCE and not loaded, so that its size needs no memory. A file of torch.save keeps its
    whole object; safetensors becomes a flat dict; DCP the nested state, whose dict keys DCP has turned into text.
    """
    used = volume_of(volume, drive)
    if used is None and os.path.lexists(out) and not force:
        raise Failure(f"{display(out)} exists: give another name, or --force to replace it.")
    if used is not None:
        name_in_volume(out)
    if used is not None and not force and any(entry.name == out for entry in used.list()):
        raise Failure(f"{display(out)} exists in the volume: give another name, or --force to replace it.")
    if used is None and os.path.exists(out) and os.path.samefile(source, out):
        raise Failure(f"{display(out)} is what is read from: give another name.")
    shows = sys.stderr.isatty() and not as_json if progress is None else progress
    beside = scratch or (None if used is not None else Path(out).resolve().parent)
    with opened_foreign(source, weights_only=not trust, scratch=beside) as foreign:
        result = _save(foreign, out, used, shows)
    found = {**vars(result), "kind": foreign.kind, "files": foreign.files}

    def render(console: Console) -> None:
        say(
            console,
            f"{result.path}: {result.tensors_count:,} tensors, {bytes_text(result.data_bytes)}, from {foreign.kind}"
            f" in {seconds_text(result.elapsed_s)}",
        )

    emit(as_json, found, render)


convert.__doc__ = with_codes(convert.__doc__)


def _save(foreign: Foreign, out: str, volume: Volume | None, progress: bool) -> striate.SaveResult:
    if volume is not None:
        return volume.save(foreign.obj, out, progress=progress)
    return striate.save(foreign.obj, out, progress=progress)
