"""Power is cut before every operation of a save. The method stands in power.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from crash import power
from crash.checkpoints import CHUNK_BYTES, NAME, beside, save, state, version_at, version_of

import striate
from striate._engine import Fault, Io, Trace

OLD, NEW, NEXT = 1, 2, 3
NAME_BYTES = NAME.encode()
STALE = b".striate-" + b"5a" * 16


class Checker:
    """Fills a real directory with states that a cut leaves, and asks striate what it finds there."""

    def __init__(self, directory: Path, *, data_bytes: int = 3 * CHUNK_BYTES) -> None:
        self.directory = directory
        self.path = directory / NAME
        self.data_bytes = data_bytes
        self.states_count = 0
        # What load gives depends on the bytes under the name and on nothing
        # else, what the sweeper does on the names alone: each is tried once.
        self._found: dict[bytes | None, int | str | None] = {}
        self._swept: set[tuple[frozenset[bytes], bool]] = set()

    def found(self, contents: Mapping[bytes, bytes]) -> int | str | None:
        """The version under the name, None if there is no such file, or in words why it cannot be loaded."""
        content = contents.get(NAME_BYTES)
        if content not in self._found:
            power.fill(self.directory, contents)
            try:
                self._found[content] = version_at(self.path, data_bytes=self.data_bytes)
            except FileNotFoundError:
                self._found[content] = None
            except striate.StriateError as e:
                self._found[content] = f"{type(e).__name__}: {e}"
        return self._found[content]

    def left_by_the_next_save(self, contents: Mapping[bytes, bytes]) -> list[str]:
        key = (frozenset(contents), isinstance(self.found(contents), str))
        if key in self._swept:
            return []
        self._swept.add(key)
        power.fill(self.directory, contents)
        save(NEXT, self.path)
        assert version_at(self.path) == NEXT
        return beside(self.path)

    def faults(
        self,
        before: Mapping[bytes, bytes],
        trace: Sequence[Trace],
        *,
        finished: bool = True,
        rng: random.Random | None = None,
        samples: int = 0,
    ) -> Iterator[str]:
        """What is wrong, for every cut: over all states, or ``samples`` random ones. ``finished``: save returned."""
        rng = rng or random.Random(0)
        old = OLD if NAME_BYTES in before else None
        for number, (where, disk) in enumerate(power.cuts(self.directory, before, trace)):
            allowed = {NEW} if finished and number == len(trace) else {old, NEW}
            states: Iterable[dict[bytes, bytes]]
            if samples:
                states = (disk.some_state(rng) for _ in range(samples))
            else:
                states = disk.every_state(NAME_BYTES, rng)
            for contents in states:
                self.states_count += 1
                if self.found(contents) not in allowed:
                    yield f"power cut {where}: found {self.found(contents)}"
                elif left := self.left_by_the_next_save(contents):
                    yield f"power cut {where}: the next save left {left}"


def traced_save(
    directory: Path, engine_name: str, *, overwrites: bool, data_bytes: int = 3 * CHUNK_BYTES
) -> tuple[dict[bytes, bytes], list[Trace]]:
    """The contents before a save, and its trace. A temporary of a saver that died lies there too, to be swept."""
    if overwrites:
        save(OLD, directory / NAME, data_bytes=data_bytes)
    (directory / STALE.decode()).write_bytes(b"left by a saver that died" * 1000)
    before = power.contents_of(directory)
    io = Io(engine_name, trace=True)  # type: ignore[arg-type]
    save(NEW, directory / NAME, engine=io, data_bytes=data_bytes)
    return before, io.traces()


@pytest.mark.parametrize("overwrites", [True, False], ids=["over an old one", "where none was"])
def test_power_cut_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    memory_dir: Path, engine_name: str, overwrites: bool
) -> None:
    before, trace = traced_save(memory_dir, engine_name, overwrites=overwrites)
    assert {"write", "sync", "rename", "sync_directory"} <= {entry.op for entry in trace}
    checker = Checker(memory_dir)
    assert list(checker.faults(before, trace)) == []
    # Before each operation there is at least one state, and up to the rename's
    # sync at least the temporary there and not there.
    assert checker.states_count > 2 * len(trace)


@pytest.mark.parametrize("seed", range(8))
def test_power_cut_leaves_the_old_or_the_new_one_of_a_checkpoint_of_many_chunks(
    memory_dir: Path, seed: int
) -> None:
    data_bytes = 50 * CHUNK_BYTES
    before, trace = traced_save(memory_dir, "posix", overwrites=bool(seed % 2), data_bytes=data_bytes)
    checker = Checker(memory_dir, data_bytes=data_bytes)
    assert list(checker.faults(before, trace, rng=random.Random(seed), samples=8)) == []


def test_power_cut_during_a_save_that_fails_leaves_the_old_checkpoint(memory_dir: Path) -> None:
    save(OLD, memory_dir / NAME)
    before = power.contents_of(memory_dir)
    count = len(_traced(memory_dir, before, []))
    checker = Checker(memory_dir)
    failed = 0
    for nth in range(count):
        trace = _traced(memory_dir, before, [Fault("any", nth=nth, value=5)])
        failed += any(entry.result == -5 for entry in trace)
        assert list(checker.faults(before, trace, finished=False)) == []
    assert failed == count


def _traced(directory: Path, before: Mapping[bytes, bytes], faults: Sequence[Fault]) -> list[Trace]:
    power.fill(directory, before)
    io = Io("posix", faults=faults, trace=True)
    try:
        save(NEW, directory / NAME, engine=io)
    except striate.DriveError:
        assert faults
    return io.traces()


@pytest.mark.parametrize(
    "wrong_order",
    [
        power.without("sync"),
        power.without("sync_directory"),
        power.renamed_before("sync"),
        power.renamed_before("truncate"),
        power.renamed_before("write"),
        power.directory_synced_before_rename,
        power.old_one_deleted_first,
        power.written_in_place,
    ],
    ids=[
        "no sync of the file",
        "no sync of the directory",
        "rename before the sync",
        "rename before the length",
        "rename before the header",
        "directory synced before the rename",
        "old one deleted first",
        "written in place",
    ],
)
@pytest.mark.parametrize("samples", [0, 40], ids=["all states", "random states"])
def test_a_wrong_order_of_the_same_operations_is_found_guilty(
    memory_dir: Path, wrong_order: Callable[[Sequence[Trace]], list[Trace]], samples: int
) -> None:
    before, trace = traced_save(memory_dir, "posix", overwrites=True)
    checker = Checker(memory_dir)
    guilty = next(checker.faults(before, wrong_order(trace), samples=samples), None)
    assert guilty is not None


def test_on_a_drive_that_lies_about_its_syncs_damage_is_noticed_and_never_loaded(memory_dir: Path) -> None:
    """A drive without a safe cache can break any order. Then at least no wrong tensor may come back."""
    before, trace = traced_save(memory_dir, "posix", overwrites=True)
    lied = [entry for entry in trace if entry.op not in ("sync", "sync_directory")]
    *_, (_, disk) = power.cuts(memory_dir, before, lied)
    assert disk.states_count(NAME_BYTES) > 500
    seen: dict[str, int] = {"old": 0, "new": 0, "noticed": 0}
    path = memory_dir / NAME
    rng = random.Random(0)
    tried: set[bytes] = set()
    for contents in disk.every_state(NAME_BYTES, rng):
        content = contents[NAME_BYTES]
        if content in tried:
            continue
        tried.add(content)
        power.fill(memory_dir, {NAME_BYTES: content})
        noticed, loaded = "", None
        try:
            loaded = striate.load(path, engine="posix")
        except striate.StriateError as e:
            noticed = str(e)
        if loaded is None:
            assert str(path) in noticed
            seen["noticed"] += 1
        else:
            # version_of compares bit for bit: a mixture fails here.
            seen["old" if version_of(loaded) == OLD else "new"] += 1
    assert min(seen.values()) > 0, seen
    assert seen["noticed"] > 200, seen


def test_the_state_of_a_version_differs_from_others_in_every_chunk() -> None:
    """Otherwise a mixture of two versions could pass for one of them."""
    one, other = state(OLD)["model"]["weights"], state(NEW)["model"]["weights"]
    for start in range(0, len(one), CHUNK_BYTES // 4):
        assert not one[start : start + CHUNK_BYTES // 4].equal(other[start : start + CHUNK_BYTES // 4])
