"""Which generations stand on the drives of a volume, and which of them counts.

Reading only. A generation is committed when any member bears its final name;
temporaries with the same uuid are then members too. What is found counts, not
what was recorded.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from striate.drive_set import Drive, DriveSet, read_small
from striate.drives import display, is_temporary_name
from striate.engines import Engine
from striate.errors import (
    CorruptCheckpoint,
    DriveError,
    StriateError,
    UnsupportedFormat,
)
from striate.superblock import Superblock, decode, decode_tombstone, is_member, tombstone_name

__all__ = ["Found", "Generation", "Scan", "look_at", "names_on", "scan", "temporaries_on"]

_RESCANS = 20
_NAP_S = 0.001


@dataclass(frozen=True, eq=False)
class Found:
    """A member as it stands on a drive, under its final name or as a temporary."""

    drive: Drive
    file: bytes  # relative to the drive's directory
    final: bool
    superblock: Superblock

    @property
    def path(self) -> str:
        return f"{self.drive.path}/{display(self.file)}"


@dataclass(eq=False)
class Generation:
    """The members found of one save, one for each member number, finals before temporaries."""

    name: bytes
    uuid: bytes
    sequence: int
    members: dict[int, Found] = field(default_factory=dict)
    committed: bool = False

    @property
    def superblock(self) -> Superblock:
        return next(iter(self.members.values())).superblock


@dataclass(eq=False)
class Scan:
    """All that was found under one name. ``generations``: newest first. ``gone``: deleted up to this sequence."""

    name: bytes
    generations: list[Generation]
    gone: int
    troubles: dict[Drive, str]

    @property
    def sight(self) -> object:
        """What two looks must have in common to be looks at the same."""
        members = {(m.drive, m.file, m.superblock) for g in self.generations for m in g.members.values()}
        return members, self.gone, self.troubles

    @property
    def committed(self) -> list[Generation]:
        return [g for g in self.generations if g.committed and g.sequence > self.gone]

    @property
    def largest_sequence(self) -> int:
        return max([self.gone, *(generation.sequence for generation in self.generations)])


def look_at(drive: Drive, file: bytes, engine: Engine) -> Superblock | None:
    """The superblock of a file; None if there is no file, or one that is not ours.

    Raises CorruptCheckpoint, UnsupportedFormat, DriveError.
    """
    block = read_small(drive, file, engine)
    if block is None or not is_member(block):
        return None
    return decode(block, path=f"{drive.path}/{display(file)}")


def scan(found: DriveSet, name: bytes, engine: Engine) -> Scan:
    """Gathers final and temporary members of a name from every usable drive."""
    seen = _scan_once(found, name, engine)
    for turn in range(_RESCANS):
        # Drives are looked at one after the other, and a save may rename meanwhile. Two looks in a row that saw the
        # same are the truth of one moment: a generation is sealed on all drives before it bears its name on any.
        again = _scan_once(found, name, engine)
        if again.sight == seen.sight:
            break
        seen = again
        time.sleep(_NAP_S * turn)
    return seen


def _scan_once(found: DriveSet, name: bytes, engine: Engine) -> Scan:
    members: list[Found] = []
    troubles: dict[Drive, str] = {}
    gone = 0
    for drive in found.usable:
        # Temporaries first: one that is renamed between the two looks is then seen twice and not never.
        temporaries = [
            Found(drive, file, False, superblock)
            for file, superblock in temporaries_on(drive, engine)
            if superblock is not None and superblock.name == name
        ]
        try:
            gone = max(gone, _gone(drive, name, engine))
            superblock = look_at(drive, name, engine)
        except (CorruptCheckpoint, UnsupportedFormat, DriveError) as e:
            troubles[drive] = str(e)
            superblock = None
        if superblock is not None:
            members.append(Found(drive, name, True, superblock))
        members.extend(temporaries)
    return Scan(name, _by_generation(name, members), gone, troubles)


def _by_generation(name: bytes, members: Sequence[Found]) -> list[Generation]:
    generations: dict[bytes, Generation] = {}
    for member in members:
        block = member.superblock
        generation = generations.setdefault(block.uuid, Generation(name, block.uuid, block.sequence))
        generation.committed |= member.final
        generation.sequence = max(generation.sequence, block.sequence)
        known = generation.members.get(block.member)
        if known is None or (member.final and not known.final):
            generation.members[block.member] = member
    return sorted(generations.values(), key=lambda g: (g.sequence, g.uuid), reverse=True)


def _gone(drive: Drive, name: bytes, engine: Engine) -> int:
    block = read_small(drive, tombstone_name(name), engine)
    if block is None:
        return 0
    try:
        tombstone = decode_tombstone(block, path=f"{drive.path}/{display(tombstone_name(name))}")
    except StriateError:
        return 0
    return tombstone.sequence if tombstone.name == name else 0


def temporaries_on(drive: Drive, engine: Engine) -> Iterator[tuple[bytes, Superblock | None]]:
    """The temporaries of a drive; None where there is no whole superblock (not written yet, or never).

    Those of a newer version, and those that cannot be read, are left out: nobody here can judge them.
    """
    try:
        files = [os.fsencode(file) for file in os.listdir(drive.dirfd)]
    except OSError:
        return
    for file in filter(is_temporary_name, files):
        try:
            yield file, look_at(drive, file, engine)
        except CorruptCheckpoint:
            yield file, None
        except (UnsupportedFormat, OSError):
            continue


def names_on(found: DriveSet, engine: Engine) -> list[bytes]:
    """Names of all members under their final names on the usable drives, sorted."""
    names: set[bytes] = set()
    for drive in found.usable:
        for file in _walk(drive.dirfd):
            try:
                superblock = look_at(drive, file, engine)
            except (StriateError, OSError):
                continue
            if superblock is not None and superblock.name == file:
                names.add(file)
    return sorted(names)


def _walk(dirfd: int) -> Iterator[bytes]:
    """Regular files below a directory, relative to it; ours that are not members, and links, left out."""
    pending = [b""]
    while pending:
        below = pending.pop()
        try:
            fd = os.open(
                below or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirfd
            )
        except OSError:
            continue
        try:
            entries = list(os.scandir(fd))
            for entry in entries:
                name = os.fsencode(entry.name)
                path = below + b"/" + name if below else name
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    pending.append(path)
                elif stat.S_ISREG(mode) and not name.startswith(b".striate"):
                    yield path
        except OSError:
            continue
        finally:
            os.close(fd)
