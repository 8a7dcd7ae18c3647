"""Scrub and repair of a checkpoint on several drives.

Verify reads every block, check blocks too, and reports drive by drive. Repair
writes whole new members of the same generation and renames them into place:
what was there is replaced at one moment, or not at all.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from striate import image
from striate.drive_set import Drive, DriveSet, locked
from striate.drives import Place
from striate.engines import Engine
from striate.errors import DataLost
from striate.generations import scan
from striate.manifest import DIGEST_BYTES
from striate.member_set import MemberSet
from striate.member_writer import (
    make_parents,
    rename_into_place,
    sync_name,
    write_blocks,
    write_manifest,
    write_superblock,
)
from striate.plain import Temporary, padded
from striate.scrub import Damage, VerifyReport
from striate.superblock import Superblock

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

    def raise_if_damaged(self) -> None:
        """Raises DataLost if something cannot be restored; what the layout makes up for can be loaded."""
        if not self.lost:
            return
        wrong = tuple(
            f"drive {m.drive}: {m.missing or f'{len(m.damages)} damaged block(s)'}"
            for m in self.members
            if not m.ok
        )
        raise DataLost(
            f"{self.path} cannot be read whole: {'; '.join(wrong)}. Gone: {', '.join(self.lost[:8])}"
            f"{f' and {len(self.lost) - 8} more' if len(self.lost) > 8 else ''}. Mount the drives that are missing, or "
            "load an earlier generation.",
            path=self.path,
            tensors=self.lost,
            drives=wrong,
        )


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
        damages=tuple(damage for member in members for damage in member.damages),
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
    if member and trouble and trouble.manifest:
        block = member.found.superblock
        reason = f"drive {trouble.drive}: {trouble.manifest}"
        damages = [
            *damages,
            Damage("manifest", None, block.manifest_offset, block.manifest_bytes, (), reason),
        ]
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
    """Writes a whole new member for each that is missing or damaged and whose drive is there.

    Saves go on meanwhile: the locks are taken for the renames alone, and a generation that has been replaced by then
    is left as it is. Raises DataLost, before anything is written, if something cannot be restored; DriveError if a
    drive fails, which leaves what was there.
    """
    held = opened.manifest
    report = verify_set(opened)
    unrecoverable = opened.unrecoverable()
    if len(unrecoverable):
        raise opened.data_lost(unrecoverable)
    bad = [member.number for member in report.members if not member.ok]
    targets = {n: drive for n in bad if (drive := drives.by_uuid(held.drives[n][0])) is not None}
    whole = frozenset(n for n in range(len(held.drives)) if n not in bad or n in targets)
    written: list[str] = []
    total = 0
    for number, drive in targets.items():
        block = _superblock(opened, number, whole)
        if not _write_member(opened, block, drive, drives, engine, progress):
            break
        total += block.manifest_offset + block.manifest_bytes
        written.append(drive.path)
    return Repaired(os.fsdecode(opened.generation.name), held.uuid.hex(), tuple(written), total)


def _superblock(opened: MemberSet, number: int, whole: frozenset[int]) -> Superblock:
    """That of a new member, like those of the others."""
    return dataclasses.replace(
        opened.superblock,
        drive=opened.manifest.drives[number][0],
        member=number,
        manifest_offset=int(opened.manifest.blocks.member_bytes[number]),
        whole=whole,
    )


def _write_member(
    opened: MemberSet,
    block: Superblock,
    drive: Drive,
    drives: DriveSet,
    engine: Engine,
    progress: Progress | None,
) -> bool:
    """A whole new member in the place of the old one. False: a save has replaced the generation meanwhile."""
    try:
        existing = os.stat(block.name, dir_fd=drive.dirfd, follow_symlinks=False)
    except OSError:
        existing = None
    place = Place(drive.directory, block.name, existing)
    temporary = Temporary(engine, drive.dirfd, place, "The checkpoint is as it was.")
    try:
        temporary.create(block.uuid)
        temporary.take_mode()
        temporary.allocate(padded(block.manifest_offset + block.manifest_bytes))
        _copy_blocks(opened, block.member, temporary, engine, progress)
        write_manifest(temporary, opened.manifest_raw, block.manifest_offset, engine)
        with temporary.step("sync"):
            # Its generation is committed already: a superblock that a power cut kept alone would make a member of
            # what is none.
            engine.io.sync(temporary.fd)
        with locked(drives, engine):
            if not _is_newest(drives, block, engine):
                return False
            write_superblock(temporary, block, engine)
            with temporary.step("rename"):
                make_parents(drive, block.name, engine)
                rename_into_place(drive, temporary.name, block.name, engine)
                temporary.name = b""
                sync_name(drive, block.name, engine)
    finally:
        temporary.abort()
    return True


def _is_newest(drives: DriveSet, block: Superblock, engine: Engine) -> bool:
    committed = scan(drives, block.name, engine).committed
    return bool(committed) and committed[0].uuid == block.uuid


def _copy_blocks(
    opened: MemberSet, number: int, temporary: Temporary, engine: Engine, progress: Progress | None
) -> None:
    """Reads or recovers the blocks of a member, a batch at a time, and writes them to its new file."""
    blocks = opened.manifest.blocks
    rows = np.flatnonzero(blocks.member == number)
    lengths = blocks.length[rows].astype(np.int64)
    per_batch = max(1, _BATCH_BYTES // max(1, int(lengths.max()) if len(lengths) else 1))
    done = 0
    for first in range(0, len(rows), per_batch):
        batch = rows[first : first + per_batch]
        sizes = lengths[first : first + per_batch]
        starts = np.cumsum(sizes) - sizes
        memory = np.empty(int(sizes.sum()), np.uint8)
        addresses = np.uint64(memory.ctypes.data) + starts.astype(np.uint64)
        pieces = image.Pieces(
            first=np.arange(len(batch), dtype=np.uint64),
            count=np.ones(len(batch), np.uint32),
            offset=starts,
            job_length=sizes,
            chunk=batch,
            addr=addresses,
            length=sizes.astype(np.uint64),
        )
        lost = opened.read_blocks(batch, pieces, verify=True)
        if len(lost):
            raise opened.data_lost(lost)
        write_blocks(temporary, blocks.offset[batch], addresses, sizes.astype(np.uint64), engine)
        done += int(sizes.sum())
        if progress is not None:
            progress(done)
