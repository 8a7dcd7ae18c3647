"""``striate ls``: the checkpoints of a volume, or in directories."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

import striate
from striate.cli.output import Failure, JsonOption, bytes_text, emit, say, table, with_codes
from striate.cli.targets import DriveOption, VolumeOption, volume_of
from striate.drives import display
from striate.errors import StriateError
from striate.importing import kind_of
from striate.superblock import MAGIC, is_member

__all__ = ["ls"]


@dataclass(frozen=True)
class Listed:
    """One checkpoint. ``kind``: "striate", "safetensors", "torch", or "n of m members". ``size_bytes``: of its file."""

    name: str
    kind: str
    size_bytes: int | None
    saved_s: float
    uuid: str
    trouble: str = ""


def ls(
    directories: Annotated[
        list[str] | None,
        typer.Argument(metavar="DIR", help="Directories of checkpoints; the current one, or the volume."),
    ] = None,
    volume: VolumeOption = None,
    drive: DriveOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists checkpoints: those of the volume, or the files in directories: what they are, and when they were saved."""
    used = None if directories else volume_of(volume, drive)
    found: list[Listed] = []
    if used is not None:
        for entry in used.list():
            members = f"{entry.members_found} of {entry.members_count} members"
            trouble = "" if entry.members_found == entry.members_count else "repair, or mount what is missing"
            found.append(Listed(entry.name, members, None, entry.created_s, entry.uuid, trouble))
    else:
        for directory in directories or ["."]:
            found += _in_directory(directory, several=len(directories or []) > 1)
    emit(as_json, found, lambda console: _draw(console, found))


ls.__doc__ = with_codes(ls.__doc__)


def _in_directory(directory: str, *, several: bool) -> list[Listed]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as e:
        raise Failure(f"{display(directory)}: {e.strerror}: give a directory that can be read.") from None
    found = []
    for entry in entries:
        if entry.name.startswith(".striate-"):
            continue
        shown_name = display(entry.path if several else entry.name)
        try:
            if entry.is_file():
                listed = _listed(entry.path, shown_name, entry.stat())
            else:
                kind = kind_of(entry.path) if entry.is_dir() else None
                listed = Listed(shown_name, kind, None, entry.stat().st_mtime, "") if kind else None
        except OSError as e:
            listed = Listed(shown_name, "", None, 0, "", e.strerror or str(e))
        if listed is not None:
            found.append(listed)
    return found


def _listed(path: str, name: str, stat: os.stat_result) -> Listed | None:
    """What a file is; None if it is no checkpoint."""
    with open(path, "rb") as opened:
        member = is_member(opened.read(len(MAGIC)))
    kind: str | None = "a member" if member else kind_of(path)
    if kind is None or kind == "sharded safetensors":
        return None if kind is None else Listed(name, kind, stat.st_size, stat.st_mtime, "")
    if kind == "torch":
        return Listed(name, "torch", stat.st_size, stat.st_mtime, "")
    try:
        info = striate.info(path)
    except StriateError as e:
        return Listed(name, kind, stat.st_size, stat.st_mtime, "", str(e).split(". ")[0])
    if info.kind == "member":
        there = sum(not m.trouble for m in info.members)
        kind = f"{there} of {len(info.members)} members"
        trouble = "" if there == len(info.members) else "repair, or mount what is missing"
        return Listed(name, kind, info.file_bytes, info.created_s, info.uuid, trouble)
    return Listed(name, info.kind, stat.st_size, info.created_s or stat.st_mtime, info.uuid)


def _draw(console: Console, found: list[Listed]) -> None:
    if not found:
        console.print("no checkpoints")
        return
    sized = any(entry.size_bytes is not None for entry in found)
    lines = table("saved (UTC)", "name", "kind", *(("size",) if sized else ()), right=(3,) if sized else ())
    for entry in found:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.saved_s)) if entry.saved_s else ""
        size = "" if entry.size_bytes is None else bytes_text(entry.size_bytes)
        lines.add_row(saved, entry.name, entry.kind, *((size,) if sized else ()))
    console.print(lines)
    for entry in found:
        if entry.trouble:
            say(console, f"{entry.name}: {entry.trouble}")
