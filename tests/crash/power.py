"""A disk that loses power: every state in which a cut can leave a directory, made from the trace of a save.

The method
----------
The fault engine records what a save asked of its drive, in the order in which
it asked, with the bytes that its writes carried. A ``Disk`` replays a prefix
of that trace, and so stands just before one operation: that is the cut. It
knows two things of everything: what is *durable*, and what is *pending*.

A file is a string of bytes on the medium and a list of pending effects:
    piece    one 4096-byte piece of a write, at its offset
    resize   a new length, by truncate or allocate
fsync of the file applies all of them. Until then, at a cut, each by itself is
    kept     it reached the medium
    dropped  it did not; what was there before stays (zeros where nothing was)
    garbled  (pieces) the drive was in the middle of it: random bytes
so that a write of several pieces can be torn between any two of them, a later
write can survive an earlier one, and a file can be shorter or longer than
both its old and its new length. A write counts as pending from the moment it
is submitted: a cut before its completion and one after are the same cut.

A directory is a table from names to files on the medium, and a list of
pending changes, each of them atomic (a rename adds and removes at once, as
rename(2) promises):
    create, rename, unlink
fsync of the directory applies all of them; fsync of a *file* does not make its
name durable (on most file systems it does; POSIX does not say so, and we do
not rely on it). A cut leaves
    a prefix of the pending changes, as a journaled file system does, or
    any subset of them, applied in their order, as an unjournaled one may.
Modes, owners and locks do not outlive a cut here: nothing depends on them.

What must hold in each such state, and is checked on a real directory that is
filled with it:
    1. load() of the name gives the old or the new checkpoint, bit for bit; it
       raises FileNotFoundError if, and only if, the name is absent, which it
       may be only if there was no old one.
    2. Once save() has returned, it is the new one.
    3. The next save succeeds and leaves nothing beside its file.

All states are tried where there are few (a checkpoint of three chunks, every
cut, every subset of names, every fate of each pending piece of the file that
bears the name); beyond that, random ones from a seed. What a sweeper never
reads, the bytes of a temporary, is drawn at random.

That the method looks is itself tested: traces in which a sync is missing or
the rename comes too early must be found guilty (test_power_cut.py).

What it does not model: pieces torn below 4096 bytes, and drives that damage
what was durable.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from striate._engine import Trace

PIECE_BYTES = 4096

KEPT, DROPPED, GARBLED = "kept", "dropped", "garbled"


@dataclass(frozen=True)
class Piece:
    offset: int
    data: bytes

    fates = (KEPT, DROPPED, GARBLED)


@dataclass(frozen=True)
class Resize:
    length: int
    only_grows: bool

    fates = (KEPT, DROPPED)


Effect = Piece | Resize


@dataclass
class File:
    durable: bytes = b""
    pending: list[Effect] = field(default_factory=list)

    def after(self, fates: Sequence[str], rng: random.Random) -> bytes:
        """The bytes that a cut leaves, given the fate of each pending effect."""
        content = bytearray(self.durable)
        for effect, fate in zip(self.pending, fates, strict=True):
            if fate == DROPPED:
                continue
            if isinstance(effect, Resize):
                if len(content) < effect.length:
                    content.extend(bytes(effect.length - len(content)))
                elif not effect.only_grows:
                    del content[effect.length :]
                continue
            stop = effect.offset + len(effect.data)
            content.extend(bytes(max(0, effect.offset - len(content))))
            content[effect.offset : stop] = (
                rng.randbytes(len(effect.data)) if fate == GARBLED else effect.data
            )
        return bytes(content)

    def sync(self) -> None:
        self.durable = self.after([KEPT] * len(self.pending), random.Random(0))
        self.pending = []


# A change of names: name -> number of a file, None where the name goes.
Change = Mapping[bytes, int | None]


class Disk:
    """One directory and its files, as far as the trace was replayed."""

    def __init__(self, directory: Path, contents: Mapping[bytes, bytes]) -> None:
        self.directory = os.fsencode(directory)
        self.files = [File(content) for content in contents.values()]
        self.durable_names = {name: number for number, name in enumerate(contents)}
        self.names = dict(self.durable_names)
        self.pending_names: list[Change] = []
        self._opened: dict[int, int] = {}

    def replay(self, entry: Trace) -> None:
        if entry.result < 0:
            return  # it was refused, and did nothing
        if entry.op == "open":
            self._open(entry)
        elif entry.op == "close":
            self._opened.pop(entry.fd, None)
        elif entry.op == "write":
            assert entry.data is not None
            self._write(self.files[self._opened[entry.fd]], entry.offset, entry.data[: entry.result])
        elif entry.op in ("truncate", "allocate"):
            grows = entry.op == "allocate"
            self.files[self._opened[entry.fd]].pending.append(Resize(entry.length, grows))
        elif entry.op == "sync":
            self.files[self._opened[entry.fd]].sync()
        elif entry.op == "sync_directory":
            self.durable_names, self.pending_names = dict(self.names), []
        elif entry.op == "rename":
            assert entry.name is not None and entry.to is not None
            self._change({entry.to: self.names[entry.name], entry.name: None})
        elif entry.op == "unlink":
            assert entry.name is not None
            self._change({entry.name: None})
        else:
            assert entry.op in ("read", "lock", "chmod", "chown"), f"the model does not know {entry.op}"

    def _open(self, entry: Trace) -> None:
        assert entry.name is not None
        directory, name = os.path.split(entry.name)
        assert directory in (b"", self.directory), f"a file elsewhere was opened: {entry.name!r}"
        if name not in self.names:
            assert entry.offset & os.O_CREAT
            self.files.append(File())
            self._change({name: len(self.files) - 1})
        number = self.names[name]
        if entry.offset & os.O_TRUNC:
            self.files[number].pending.append(Resize(0, only_grows=False))
        self._opened[entry.result] = number

    def _change(self, change: Change) -> None:
        self.pending_names.append(change)
        self.names = _changed(self.names, [change])

    @staticmethod
    def _write(file: File, offset: int, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            file.pending.append(Piece(offset + start, data[start : start + PIECE_BYTES]))

    # ---- what a cut leaves -----------------------------------------------

    def tables(self) -> list[dict[bytes, int]]:
        """Every table of names that a cut can leave: all subsets of the pending changes, prefixes among them."""
        found: list[dict[bytes, int]] = []
        for choice in itertools.product((True, False), repeat=len(self.pending_names)):
            table = _changed(self.durable_names, itertools.compress(self.pending_names, choice))
            if table not in found:
                found.append(table)
        return found

    def every_state(self, name: bytes, rng: random.Random) -> Iterator[dict[bytes, bytes]]:
        """All that a cut can leave under ``name``, with each table of names. Other files get random fates."""
        for table in self.tables():
            number = table.get(name)
            effects = self.files[number].pending if number is not None else []
            for fates in itertools.product(*(effect.fates for effect in effects)):
                yield {
                    other: self.files[at].after(fates, rng) if at == number else self._any_content(at, rng)
                    for other, at in table.items()
                }

    def some_state(self, rng: random.Random) -> dict[bytes, bytes]:
        table = rng.choice(self.tables())
        return {other: self._any_content(at, rng) for other, at in table.items()}

    def states_count(self, name: bytes) -> int:
        """How many every_state gives."""
        count = 0
        for table in self.tables():
            number = table.get(name)
            fates = 1
            for effect in self.files[number].pending if number is not None else []:
                fates *= len(effect.fates)
            count += fates
        return count

    def _any_content(self, number: int, rng: random.Random) -> bytes:
        file = self.files[number]
        return file.after([rng.choice(effect.fates) for effect in file.pending], rng)


def _changed(names: Mapping[bytes, int], changes: Iterator[Change] | Sequence[Change]) -> dict[bytes, int]:
    table = dict(names)
    for change in changes:
        for name, number in change.items():
            if number is None:
                table.pop(name, None)
            else:
                table[name] = number
    return table


def contents_of(directory: Path) -> dict[bytes, bytes]:
    """The durable contents of a directory before a save, for a Disk to start from."""
    return {os.fsencode(path.name): path.read_bytes() for path in sorted(directory.iterdir())}


def fill(directory: Path, contents: Mapping[bytes, bytes]) -> None:
    """Makes a directory hold exactly this."""
    for path in list(directory.iterdir()):
        path.unlink()
    for name, content in contents.items():
        (directory / os.fsdecode(name)).write_bytes(content)


def cuts(
    directory: Path, before: Mapping[bytes, bytes], trace: Sequence[Trace]
) -> Iterator[tuple[str, Disk]]:
    """The disk just before each operation, and after the last one, with words for where that is."""
    disk = Disk(directory, before)
    for number, entry in enumerate(trace):
        yield f"before operation {number} ({entry.op})", disk
        disk.replay(entry)
    yield "after the last operation", disk


# ---- orders that are wrong, to see that the method finds them ----------------


def without(op: str) -> Callable[[Sequence[Trace]], list[Trace]]:
    """The same save, with every operation of a kind left out."""
    return lambda trace: [entry for entry in trace if entry.op != op]


def renamed_before(op: str) -> Callable[[Sequence[Trace]], list[Trace]]:
    """The same save, with its rename moved before the last operation of a kind."""

    def reorder(trace: Sequence[Trace]) -> list[Trace]:
        rename = next(entry for entry in trace if entry.op == "rename")
        rest = [entry for entry in trace if entry is not rename]
        at = max(n for n, entry in enumerate(rest) if entry.op == op)
        return [*rest[:at], rename, *rest[at:]]

    return reorder


def directory_synced_before_rename(trace: Sequence[Trace]) -> list[Trace]:
    sync = next(entry for entry in trace if entry.op == "sync_directory")
    rest = [entry for entry in trace if entry is not sync]
    at = next(n for n, entry in enumerate(rest) if entry.op == "rename")
    return [*rest[:at], sync, *rest[at:]]


def old_one_deleted_first(trace: Sequence[Trace]) -> list[Trace]:
    """As rotations do that remove the last checkpoint before the next is safe."""
    rename = next(n for n, entry in enumerate(trace) if entry.op == "rename")
    unlink = dataclasses.replace(trace[rename], op="unlink", name=trace[rename].to, to=None)
    return [*trace[:rename], unlink, *trace[rename:]]


def written_in_place(trace: Sequence[Trace]) -> list[Trace]:
    """As torch.save does: the file is opened under its own name and overwritten."""
    rename = next(entry for entry in trace if entry.op == "rename")
    changed = []
    for entry in trace:
        if entry.op == "open" and entry.name == rename.name:
            flags = entry.offset & ~os.O_EXCL | os.O_TRUNC
            changed.append(dataclasses.replace(entry, name=rename.to, offset=flags))
        elif entry is not rename:
            changed.append(entry)
    return changed
