"""What earlier saves and deletions left on the drives of a volume: finished, swept, or deleted for good.

The locks of the drives are held by whoever calls.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from striate import extents
from striate.drive_set import Drive, DriveSet, locked, open_beneath, parent_of, write_small
from striate.drives import NO_LOCKS, display
from striate.engines import Engine
from striate.errors import CorruptCheckpoint, StriateError, VolumeWarning, drive_error
from striate.generations import look_at, scan, temporaries_on
from striate.member_writer import make_parents, rename_into_place, sync_name
from striate.notices import warn
from striate.plain import Generation
from striate.superblock import (
    SUPERBLOCK_BYTES,
    TOMBSTONE_PREFIX,
    Superblock,
    Tombstone,
    decode_tombstone,
    encode_tombstone,
    tombstone_name,
)

__all__ = ["delete", "finish_others"]


def finish_others(drives: DriveSet, engine: Engine) -> None:
    """Finishes committed generations and deletions, and sweeps temporaries whose saver died. The locks are held.

    Never fails a save: what cannot be done now is left for the next one.
    """
    for name, gone in _tombstones(drives, engine).items():
        _finish_deletion(drives, name, gone, engine, damaged_too=False)
    for drive in drives.usable:
        for file, superblock in list(temporaries_on(drive, engine)):
            with contextlib.suppress(OSError, StriateError), _locked_file(drive, file, engine) as free:
                if free:
                    _finish_one(drives, drive, file, superblock, engine)


@contextlib.contextmanager
def _locked_file(drive: Drive, file: bytes, engine: Engine) -> Iterator[bool]:
    """Locks a temporary: True if its saver is gone. Where locks do not exist nobody can tell, and it stays."""
    fd = open_beneath(drive.dirfd, file, os.O_RDONLY, engine)
    try:
        try:
            engine.io.lock(fd)
            free = True
        except OSError as e:
            if not isinstance(e, BlockingIOError) and e.errno not in NO_LOCKS:
                raise
            free = False
        yield free and stat.S_ISREG(os.fstat(fd).st_mode)
    finally:
        engine.io.close(fd)


def _finish_one(
    drives: DriveSet, drive: Drive, file: bytes, superblock: Superblock | None, engine: Engine
) -> None:
    """Finishes or removes one temporary; raises, and leaves it, where that cannot be decided."""
    io = engine.io
    if superblock is None:
        # Superblocks are durable on all members before the first rename: this was no member yet.
        io.unlink(drive.dirfd, file)
        return
    # A final that cannot be read may be of this very generation, which would then be committed.
    finals = {
        other: final
        for other in drives.usable
        if (final := look_at(other, superblock.name, engine)) is not None
    }
    mine = finals.get(drive)
    if superblock.sequence <= scan(drives, superblock.name, engine).gone:
        io.unlink(drive.dirfd, file)
    elif any(final.uuid == superblock.uuid for final in finals.values()):
        if mine is not None and mine.sequence >= superblock.sequence:
            io.unlink(drive.dirfd, file)
            return
        make_parents(drive, superblock.name, engine)
        rename_into_place(drive, file, superblock.name, engine)
        sync_name(drive, superblock.name, engine)
    elif _all_listed_are_here(drives, drive, file, superblock, engine):
        io.unlink(drive.dirfd, file)


def _all_listed_are_here(
    drives: DriveSet, drive: Drive, file: bytes, superblock: Superblock, engine: Engine
) -> bool:
    """Is every drive present that could bear the final name? Then none does, and the save never was committed."""
    if drives.complete and superblock.volume == drives.volume:
        return True
    fd = open_beneath(drive.dirfd, file, os.O_RDONLY, engine)
    try:
        raw = engine.io.read(fd, superblock.manifest_bytes, superblock.manifest_offset)
        held = extents.decode(raw, superblock, path=f"{drive.path}/{display(file)}")
    except (StriateError, OSError, EOFError):
        return False
    finally:
        engine.io.close(fd)
    here = {other.uuid for other in drives.usable}
    return all(held.drives[number][0] in here for number in superblock.whole)


# ---- deleting --------------------------------------------------------------


def delete(drives: DriveSet, name: bytes, engine: Engine) -> int:
    """Deletes all generations of a name; how many members were removed.

    First a durable tombstone on every drive, so that a drive that comes back later does not bring it back. Raises
    FileNotFoundError (a DriveError) if nothing of that name is there, DriveError when a tombstone cannot be written.
    """
    with locked(drives, engine):
        finish_others(drives, engine)
        seen = scan(drives, name, engine)
        if not seen.committed and not seen.troubles:
            raise drive_error(
                errno.ENOENT, "delete", path=display(name), advice="There is no checkpoint of that name."
            )
        newest = seen.generations[0] if seen.generations else Generation.next(seen.largest_sequence)
        tombstone = Tombstone(name, newest.uuid, max(newest.sequence, seen.largest_sequence))
        for drive in drives.usable:
            try:
                write_small(drive, tombstone_name(name), encode_tombstone(tombstone), engine)
            except OSError as e:
                raise drive_error(
                    e.errno or errno.EIO,
                    "delete",
                    path=f"{drive.path}/{display(name)}",
                    drive=drive.path,
                    state="The deletion is noted on the drives before this one, and not finished: delete again.",
                ) from None
        removed = _finish_deletion(drives, name, tombstone.sequence, engine, damaged_too=True)
        absent = drives.troubles()
    if absent:
        warn(
            f"{display(name)} was deleted, but not on: {'; '.join(absent)}. A note on the other drives keeps it from "
            "coming back, and removes it there when the drive is back.",
            VolumeWarning,
        )
    return removed


def _tombstones(drives: DriveSet, engine: Engine) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for drive in drives.usable:
        with contextlib.suppress(OSError):
            for file in map(os.fsencode, os.listdir(drive.dirfd)):
                if not file.startswith(TOMBSTONE_PREFIX):
                    continue
                try:
                    fd = open_beneath(drive.dirfd, file, os.O_RDONLY, engine)
                    try:
                        block = engine.io.read(fd, SUPERBLOCK_BYTES, 0)
                    finally:
                        engine.io.close(fd)
                    stone = decode_tombstone(block, path=f"{drive.path}/{display(file)}")
                except (StriateError, OSError, EOFError):
                    continue
                found[stone.name] = max(found.get(stone.name, 0), stone.sequence)
    return found


def _finish_deletion(drives: DriveSet, name: bytes, gone: int, engine: Engine, *, damaged_too: bool) -> int:
    """Unlinks members up to the tombstone; when no drive is missing, the tombstones too."""
    removed, clean = 0, drives.complete
    for drive in drives.usable:
        try:
            removed += _unlink_gone(drive, name, gone, engine, damaged_too)
        except (OSError, StriateError):
            clean = False
    if clean:
        for drive in drives.usable:
            with contextlib.suppress(OSError):
                engine.io.unlink(drive.dirfd, tombstone_name(name))
                engine.io.sync_directory(drive.dirfd)
    return removed


def _unlink_gone(drive: Drive, name: bytes, gone: int, engine: Engine, damaged_too: bool) -> int:
    """``damaged_too``: also a member whose superblock is damaged, which says nothing of its age.

    Only who deletes now may take that: a tombstone that lies there since long may be older than the member.
    """
    removed = 0
    try:
        final = look_at(drive, name, engine)
    except CorruptCheckpoint:
        if not damaged_too:
            raise
        final = None
        _unlink(drive, name, engine)
        removed += 1
    if final is not None and final.sequence <= gone:
        _unlink(drive, name, engine)
        removed += 1
    for file, superblock in list(temporaries_on(drive, engine)):
        if superblock is not None and superblock.name == name and superblock.sequence <= gone:
            with _locked_file(drive, file, engine) as free:
                if free:
                    engine.io.unlink(drive.dirfd, file)
    engine.io.sync_directory(drive.dirfd)
    return removed


def _unlink(drive: Drive, name: bytes, engine: Engine) -> None:
    parent = parent_of(drive.dirfd, name)
    try:
        engine.io.unlink(parent, os.path.basename(name))
        engine.io.sync_directory(parent)
    finally:
        os.close(parent)
