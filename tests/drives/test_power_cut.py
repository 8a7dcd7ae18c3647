"""Power is cut before every operation of a save, a repair and a deletion over several drives.

The model of a disk is that of crash/power.py, one for each drive: what was not synced is kept, dropped or garbled, on
each drive by itself. Whatever is left, the name holds the old generation or the new one, whole, and the next save
finds the way and leaves nothing beside it.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from crash import power
from drives.conftest import left_on
from drives.volumes import NAME, flip, require_version, state, version_of, volume

import striate
from striate._engine import Io, Trace

OLD, NEW, NEXT = 1, 2, 3
LAYOUTS: list[tuple[str, int, dict[str, int]]] = [("stripe", 2, {}), ("mirror", 2, {}), ("parity", 3, {})]
LAYOUT_IDS = [layout for layout, _, _ in LAYOUTS]

Contents = list[dict[bytes, bytes]]


@pytest.fixture
def folders() -> Iterator[Callable[[int], list[Path]]]:
    """Drives in memory: these tests are about names and moments, and a sync on a disk takes its time."""
    shm = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="striate-test-", dir=shm if shm.is_dir() else None))

    def make(count: int) -> list[Path]:
        made = [base / f"drive{number}" for number in range(count)]
        for folder in made:
            folder.mkdir()
        return made

    yield make
    shutil.rmtree(base)


class Disks:
    """The drives of a volume, as far as a trace was replayed."""

    def __init__(self, drives: Sequence[Path], before: Contents) -> None:
        self.disks = {
            os.fsencode(drive): power.Disk(drive, contents)
            for drive, contents in zip(drives, before, strict=True)
        }
        self.of: dict[int, power.Disk] = {}

    def replay(self, entry: Trace) -> None:
        if entry.op == "open" and entry.result >= 0:
            assert entry.where is not None
            self.of[entry.result] = self.disks[entry.where]
            self.disks[entry.where].replay(entry)
        elif entry.op in ("rename", "unlink", "sync_directory"):
            assert entry.where is not None
            self.disks[entry.where].replay(entry)
        elif entry.fd in self.of:
            self.of[entry.fd].replay(entry)
            if entry.op == "close":
                del self.of[entry.fd]

    def some_state(self, rng: random.Random) -> Contents:
        return [disk.some_state(rng) for disk in self.disks.values()]


def contents_of(drives: Sequence[Path]) -> Contents:
    return [power.contents_of(drive) for drive in drives]


def fill(drives: Sequence[Path], contents: Contents) -> None:
    for drive, files in zip(drives, contents, strict=True):
        power.fill(drive, files)


def faults(
    drives: Sequence[Path],
    before: Contents,
    trace: Sequence[Trace],
    allowed: set[Any],
    at_end: set[Any],
    found: Callable[[], Any],
    after: Callable[[], None],
    samples: int,
) -> list[str]:
    """What is wrong, cut by cut, in ``samples`` random states each."""
    rng = random.Random(7)
    disks = Disks(drives, before)
    wrong = []
    for number in range(len(trace) + 1):
        for _ in range(samples):
            fill(drives, disks.some_state(rng))
            where = f"before operation {number} ({trace[number].op})" if number < len(trace) else "at the end"
            try:
                seen = found()
            except striate.StriateError as e:
                seen = f"{type(e).__name__}: {e}"
            if seen not in (at_end if number == len(trace) else allowed):
                wrong.append(f"{where}: found {seen}")
            after()
        if number < len(trace):
            disks.replay(trace[number])
    return wrong


def traced(
    drives: list[Path], layout: str, options: dict[str, int], work: Callable[[striate.Volume], Any]
) -> list[Trace]:
    io = Io("posix", trace=True)
    work(volume(drives, layout, options, engine=io))
    return io.traces()


def version_on(drives: list[Path], layout: str, options: dict[str, int]) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", striate.VolumeWarning)
        try:
            return version_of(volume(drives, layout, options).load(NAME))
        except FileNotFoundError:
            return None


def save_again(drives: list[Path], layout: str, options: dict[str, int]) -> None:
    volume(drives, layout, options).save(state(NEXT), NAME)
    require_version(volume(drives, layout, options).load(NAME), NEXT)
    for drive in drives:
        assert left_on(drive) == {NAME}


@pytest.mark.parametrize("overwrites", [True, False], ids=["over an old one", "the first of a volume"])
@pytest.mark.parametrize(("layout", "count", "options"), LAYOUTS, ids=LAYOUT_IDS)
def test_a_save_cut_anywhere_leaves_the_old_or_the_new_generation(
    folders: Callable[[int], list[Path]], layout: str, count: int, options: dict[str, int], overwrites: bool
) -> None:
    drives = folders(count)
    if overwrites:
        volume(drives, layout, options).save(state(OLD), NAME)
    before = contents_of(drives)
    trace = traced(drives, layout, options, lambda used: used.save(state(NEW), NAME))
    assert sum(entry.op == "rename" and entry.to == NAME.encode() for entry in trace) == count
    old = OLD if overwrites else None
    wrong = faults(
        drives,
        before,
        trace,
        {old, NEW},
        {NEW},
        lambda: version_on(drives, layout, options),
        lambda: save_again(drives, layout, options),
        samples=2,
    )
    assert wrong == []


def test_a_repair_cut_anywhere_loses_nothing(folders: Callable[[int], list[Path]], quiet: list[Any]) -> None:
    drives = folders(3)
    volume(drives, "parity", {}).save(state(OLD), NAME)
    # Two members with a bad block each, in different groups: the old members are needed until the new one is whole.
    for drive, offset in ((drives[0], 4096 + 5), (drives[1], 4096 + 3 * 4096 + 5)):
        flip(drive / NAME, offset)
    before = contents_of(drives)
    trace = traced(drives, "parity", {}, lambda used: used.repair())

    def after() -> None:
        volume(drives, "parity", {}).repair()
        assert volume(drives, "parity", {}).verify(NAME).ok
        for drive in drives:
            assert left_on(drive) == {NAME}

    wrong = faults(
        drives, before, trace, {OLD}, {OLD}, lambda: version_on(drives, "parity", {}), after, samples=3
    )
    assert wrong == []


def test_a_deletion_cut_anywhere_is_whole_or_not_begun_and_the_next_save_finishes_it(
    folders: Callable[[int], list[Path]], quiet: list[Any]
) -> None:
    drives = folders(2)
    volume(drives, "mirror", {}).save(state(OLD), NAME)
    before = contents_of(drives)
    trace = traced(drives, "mirror", {}, lambda used: used.delete(NAME))
    wrong = faults(
        drives,
        before,
        trace,
        {OLD, None},
        {None},
        lambda: version_on(drives, "mirror", {}),
        lambda: save_again(drives, "mirror", {}),
        samples=2,
    )
    assert wrong == []


@pytest.mark.parametrize("op", ["sync", "sync_directory"])
def test_the_method_notices_a_sync_that_is_missing(folders: Callable[[int], list[Path]], op: str) -> None:
    drives = folders(2)
    volume(drives, "stripe", {}).save(state(OLD), NAME)
    before = contents_of(drives)
    trace = power.without(op)(traced(drives, "stripe", {}, lambda used: used.save(state(NEW), NAME)))

    def forget() -> None:
        pass

    wrong = faults(
        drives, before, trace, {OLD, NEW}, {NEW}, lambda: version_on(drives, "stripe", {}), forget, samples=4
    )
    assert wrong
