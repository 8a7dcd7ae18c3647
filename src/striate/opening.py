"""Which generation of a checkpoint counts, and opening it: in a volume, or from the path of one member."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence

from striate.drive_set import DriveSet, open_drives
from striate.drives import display
from striate.engines import Engine
from striate.errors import CorruptCheckpoint, FormatError, StriateError, drive_error
from striate.extents import decode
from striate.generations import Found, Generation, Scan, look_at, scan
from striate.member_set import MemberMoved, MemberSet, open_member
from striate.superblock import Superblock

__all__ = ["choose", "open_from_member", "open_generation"]

# A save renames its members within milliseconds: to meet several saves in a row at that moment is to be unlucky.
_TURNS = 10
_NAP_S = 0.005


def choose(found: Scan, path: str, drives: DriveSet, generation: str | int | None = None) -> Generation:
    """The newest committed generation, or the one asked for (uuid in hex, or sequence number).

    Raises FileNotFoundError (a DriveError) if there is none, CorruptCheckpoint if only damaged members were found.
    """
    committed = found.committed
    if generation is not None:
        for candidate in committed:
            if generation in (candidate.uuid.hex(), candidate.sequence):
                return candidate
        known = ", ".join(f"{g.uuid.hex()} ({g.sequence})" for g in committed) or "none"
        raise FormatError(f"{path} has no generation {generation}; there are: {known}.")
    if committed:
        return committed[0]
    if found.troubles:
        reasons = "; ".join(f"drive {drive.path}: {reason}" for drive, reason in found.troubles.items())
        raise CorruptCheckpoint(
            f"{path} cannot be read: {reasons}. Load an earlier checkpoint.", path=path, region="superblock"
        )
    absent = drives.troubles()
    advice = "There is no checkpoint of that name on the drives."
    if absent:
        advice += f" But not all drives are there: {'; '.join(absent)}."
    raise drive_error(errno.ENOENT, "load", path=path, advice=advice)


def open_generation(
    drives: DriveSet,
    name: bytes,
    engine: Engine,
    *,
    generation: str | int | None = None,
    hang_timeout_s: float = 0.0,
) -> MemberSet:
    """Opens a checkpoint of a volume for reading. The set owns ``drives`` from here on, also when this raises."""
    return _open(
        drives, lambda: scan(drives, name, engine), display(name), engine, generation, hang_timeout_s
    )


def _open(
    drives: DriveSet,
    look: Callable[[], Scan],
    path: str,
    engine: Engine,
    generation: str | int | None,
    hang_timeout_s: float = 0.0,
) -> MemberSet:
    try:
        for turn in range(_TURNS):
            found = look()
            opened = MemberSet(
                path, choose(found, path, drives, generation), drives, engine, hang_timeout_s=hang_timeout_s
            )
            try:
                opened.open(found.troubles)
            except MemberMoved:
                # Saves replace members one after the other; what is open stays what it is.
                opened.close_members()
                time.sleep(_NAP_S * turn)
                continue
            except BaseException:
                opened.close_members()
                raise
            return opened
        raise _replaced(path)
    except BaseException:
        drives.close()
        raise


def open_from_member(
    path: str | bytes,
    engine: Engine,
    *,
    drives: Sequence[str | bytes | os.PathLike[str]] | None = None,
    generation: str | int | None = None,
) -> MemberSet:
    """Opens the whole checkpoint from the path of one member; ``drives`` overrides where the others are looked for.

    Raises FormatError, CorruptCheckpoint, DataLost, DriveError.
    """
    raw = os.path.abspath(os.fsencode(path))
    directory, file = os.path.split(raw)
    superblock, recorded = _told_by(directory, file, engine)
    in_place = raw.endswith(b"/" + superblock.name)
    root = raw[: -len(superblock.name) - 1] or b"/" if in_place else directory
    others = recorded if drives is None else drives
    found = open_drives([root, *others], engine, labels=False)
    member = Found(found.drives[0], file, True, superblock)

    def look() -> Scan:
        seen = scan(found, superblock.name, engine)
        if not in_place:
            _add(seen, member)
        return seen

    # Moved or copied under another name: this generation, whatever else bears the recorded name.
    wanted = generation if in_place or generation is not None else superblock.uuid.hex()
    return _open(found, look, display(raw), engine, wanted)


def _add(seen: Scan, member: Found) -> None:
    block = member.superblock
    for generation in seen.generations:
        if generation.uuid == block.uuid:
            break
    else:
        generation = Generation(block.name, block.uuid, block.sequence)
        seen.generations.append(generation)
    generation.committed = True
    generation.members[block.member] = member


def _told_by(directory: bytes, file: bytes, engine: Engine) -> tuple[Superblock, list[bytes]]:
    """What one member says: its superblock, and where its manifest has the others (nowhere, if that is damaged)."""
    path = display(os.path.join(directory, file))
    with open_drives([directory], engine, labels=False) as home:
        for turn in range(_TURNS):
            superblock = look_at(home.drives[0], file, engine)
            if superblock is None:
                raise FormatError(f"{path} is no member of a striate checkpoint.")
            try:
                return superblock, _recorded(Found(home.drives[0], file, True, superblock), engine)
            except MemberMoved:
                time.sleep(_NAP_S * turn)
    raise _replaced(path)


def _replaced(path: str) -> StriateError:
    return StriateError(
        f"{path} was replaced {_TURNS} times while it was opened. Nothing was loaded. Load it again."
    )


def _recorded(member: Found, engine: Engine) -> list[bytes]:
    """Where the manifest of a member says that the others were: paths to look at, and to trust in nothing else."""
    try:
        opened = open_member(member, engine)
    except StriateError:
        return []
    block = member.superblock
    try:
        raw = engine.io.read(opened.fd, block.manifest_bytes, block.manifest_offset)
        held = decode(raw, block, path=member.path)
    except (StriateError, OSError, EOFError):
        return []
    finally:
        with contextlib.suppress(OSError):
            engine.io.close(opened.fd)
    return [path for _, path in held.drives if os.path.isabs(path)]
