"""Scrub and repair of a checkpoint on several drives.

Verify reads every block, check blocks too, and reports drive by drive. Repair
writes whole new members of the same generation and renames them into place:
what was there is replaced at one moment, or not at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from striate import _engine, extents, image
from striate.drive_set import Drive, DriveSet
from striate.drives import Place, display
from striate.engines import Engine
from striate.manifest import DIGEST_BYTES
from striate.member_set import MemberSet
from striate.plain import Temporary, padded
from striate.scrub import Damage, VerifyReport
from striate.superblock import SUPERBLOCK_BYTES, Superblock
from striate.transaction import make_parents, rename_into_place, sync_name, write_whole

__all__ = ["MemberHealth", "Repaired", "VolumeReport", "repair_generation", "verify_set"]

Progress = Callable[[int], None]

# Blocks are recovered and written in batches of this, so that repair needs no more memory than a save.
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class MemberHealth:
    """One member as verify found it. ``missing``: why there is none, "" if there is; ``damages``: its bad blocks."""

    number: int
    drive: str
    file_bytes: int
    blocks_count: int
    missing: str = ""
    damages: tuple[Damage, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.missing and not self.damages


@dataclass(frozen=True)
class VolumeReport(VerifyReport):
    """What verify saw of a checkpoint on several drives. ``lost``: tensors that no longer can be restored.

    ``ok`` only if every member is there and every block of it is whole; ``recoverable`` if nothing is lost.
    """

    members: tuple[MemberHealth, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(member.ok for member in self.members)

    @property
    def recoverable(self) -> bool:
        return not self.lost


@dataclass(frozen=True)
class Repaired:
    """What repair did to one checkpoint. ``drives``: those that got a new member."""

    name: str
    uuid: str
    drives: tuple[str, ...]
    bytes_written: int


# ---- verify ----------------------------------------------------------------


def verify_set(opened: MemberSet, *, progress: Progress | None = None) -> VolumeReport:
    """Reads every block of every member that is there. Damage is reported, not raised."""
    held = opened.manifest
    rows = np.flatnonzero(np.isin(held.blocks.member, list(opened.members)))
    damages = _scrub(opened, rows, progress)
    by_member: dict[int, list[Damage]] = {}
    for number, damage in damages:
        by_member.setdefault(number, []).append(damage)
    members = tuple(_health(opened, number, by_member.get(number, [])) for number in range(len(held.drives)))
    return VolumeReport(
        path=opened.path,
        uuid=held.uuid.hex(),
        sequence=opened.generation.sequence,
        file_bytes=opened.file_bytes,
        chunks_count=len(held.digests) // DIGEST_BYTES,
        damages=tuple(damage for _, damage in damages),
        members=members,
        lost=tuple(_lost(opened)),
    )


def _scrub(opened: MemberSet, rows: NDArray[np.int64], progress: Progress | None) -> list[tuple[int, Damage]]:
    """Each block of ``rows`` read from its own place; (member, what is wrong with it)."""
    held = opened.manifest
    found = opened.read_in_place(rows, progress=progress)
    damages = []
    for row, reason, wanted, seen in found:
        number = int(held.blocks.member[row])
        region = "data" if row < len(held.digests) // DIGEST_BYTES else "check"
        chunk = row if region == "data" else None
        damages.append(
            (
                number,
                Damage(
                    region,
                    chunk,
                    int(held.blocks.offset[row]),
                    int(held.blocks.length[row]),
                    tuple(opened.tensors_in([row])),
                    f"drive {opened.members[number].found.drive.path}: {reason}"
                    if number in opened.members
                    else reason,
                    wanted,
                    seen,
                ),
            )
        )
    return damages


def _health(opened: MemberSet, number: int, damages: list[Damage]) -> MemberHealth:
    trouble = opened.troubles.get(number)
    member = opened.members.get(number)
    drive = member.found.drive.path if member else trouble.drive if trouble else ""
    return MemberHealth(
        number=number,
        drive=drive,
        file_bytes=os.fstat(member.fd).st_size if member else 0,
        blocks_count=int((opened.manifest.blocks.member == number).sum()),
        missing="" if member else (trouble.missing if trouble else "its member was not found"),
        damages=tuple(damages),
    )


def _lost(opened: MemberSet) -> list[str]:
    """Names of the tensors in blocks that can neither be read nor recovered, after a scrub."""
    return opened.tensors_in(opened.unrecoverable())


# ---- repair ----------------------------------------------------------------


def repair_generation(
    opened: MemberSet, drives: DriveSet, engine: Engine, *, progress: Progress | None = None
) -> Repaired:
    """Writes a whole new member for each that is missing or damaged and whose drive is there. The locks are held.

    Raises DataLost, before anything is written, if something cannot be restored; DriveError if a drive fails, which
    leaves what was there.
    """
    held = opened.manifest
    report = verify_set(opened)
    unrecoverable = opened.unrecoverable()
    if len(unrecoverable):
        raise opened.data_lost(unrecoverable)
    block = opened.generation.superblock
    written, total = [], 0
    numbers = [member.number for member in report.members if not member.ok]
    targets = {number: drives.by_uuid(held.drives[number][0]) for number in numbers}
    whole = frozenset(n for n in range(len(held.drives)) if n not in numbers or targets.get(n) is not None)
    raw = opened.manifest_raw
    for number in numbers:
        drive = targets[number]
        if drive is None:
            continue
        total += _write_member(opened, number, drive, block, raw, whole, engine, progress)
        written.append(drive.path)
    return Repaired(display(opened.generation.name), held.uuid.hex(), tuple(written), total)


def _write_member(
    opened: MemberSet,
    number: int,
    drive: Drive,
    like: Superblock,
    raw: bytes,
    whole: frozenset[int],
    engine: Engine,
    progress: Progress | None,
) -> int:
    held = opened.manifest
    blocks = held.blocks
    rows = np.flatnonzero(blocks.member == number)
    ends = blocks.offset[rows] + blocks.length[rows]
    manifest_offset = padded(max(SUPERBLOCK_BYTES, int(ends.max()) if len(rows) else 0))
    name = opened.generation.name
    try:
        existing = os.stat(name, dir_fd=drive.dirfd, follow_symlinks=False)
    except OSError:
        existing = None
    state = "The checkpoint is as it was."
    temporary = Temporary(engine, drive.dirfd, Place(drive.directory, name, existing), state)
    try:
        temporary.create(held.uuid)
        temporary.take_mode()
        temporary.allocate(padded(manifest_offset + len(raw)))
        _copy_blocks(opened, rows, temporary, engine, progress)
        block = Superblock(
            uuid=like.uuid,
            sequence=opened.generation.sequence,
            volume=like.volume,
            drive=held.drives[number][0],
            member=number,
            members=like.members,
            shape=like.shape,
            chunk_bytes=like.chunk_bytes,
            manifest_offset=manifest_offset,
            manifest_bytes=len(raw),
            manifest_digest=extents.manifest_digest(raw, held.uuid),
            whole=whole,
            name=name,
        )
        with temporary.step("repair"):
            make_parents(drive, name, engine)
            write_whole(temporary, raw, block, engine, in_order=True)
            rename_into_place(drive, temporary.name, name, engine)
            temporary.name = b""
            sync_name(drive, name, engine)
    finally:
        temporary.abort()
    return manifest_offset + len(raw)


def _copy_blocks(
    opened: MemberSet,
    rows: NDArray[np.int64],
    temporary: Temporary,
    engine: Engine,
    progress: Progress | None,
) -> None:
    """Reads or recovers the blocks of a member, a batch at a time, and writes them to its new file."""
    blocks = opened.manifest.blocks
    lengths = blocks.length[rows].astype(np.int64)
    per_batch = max(1, _BATCH_BYTES // max(1, int(lengths.max()) if len(lengths) else 1))
    done = 0
    for first in range(0, len(rows), per_batch):
        batch = rows[first : first + per_batch]
        sizes = lengths[first : first + per_batch]
        starts = np.cumsum(sizes) - sizes
        memory = np.empty(int(sizes.sum()), np.uint8)
        pieces = image.Pieces(
            first=np.arange(len(batch), dtype=np.uint64),
            count=np.ones(len(batch), np.uint32),
            offset=starts,
            job_length=sizes,
            chunk=batch,
            addr=np.uint64(memory.ctypes.data) + starts.astype(np.uint64),
            length=sizes.astype(np.uint64),
        )
        lost = opened.read_blocks(batch, pieces, verify=True)
        if len(lost):
            raise opened.data_lost(lost)
        jobs = np.zeros(len(batch), _engine.JOB_DTYPE)
        table = np.zeros(len(batch), _engine.EXTENT_DTYPE)
        table["addr"], table["length"] = pieces.addr, pieces.length
        jobs["offset"], jobs["length"] = blocks.offset[batch], sizes
        jobs["extent_first"], jobs["extents_count"] = np.arange(len(batch)), 1
        try:
            engine.run("write", [temporary.file()], jobs, table)
        except _engine.RunError as e:
            temporary.fail(-e.code if -4096 < e.code < 0 else errno.EIO, "write", e.offset)
        done += int(sizes.sum())
        if progress is not None:
            progress(done)
