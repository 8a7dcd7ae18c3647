"""Groups, copies and dying files, against arithmetic of the test's own."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from striate import _engine
from striate._engine import Fault, File, Io
from striate.groups import Shape, matrix, recovery
from support.contents import cycling
from support.tables import threads

LENGTHS = (10_000, 4096, 4097)


@pytest.fixture(params=["uring", "posix"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def times(a: int, b: int) -> int:
    """Multiplication in GF(2^8) with 0x11d, bit by bit."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


TABLE = np.array([[times(a, b) for b in range(256)] for a in range(256)], np.uint8)


def expected_checks(blocks: Sequence[bytes], shape: Shape) -> list[bytes]:
    longest = max(map(len, blocks))
    arrays = [np.frombuffer(block.ljust(longest, b"\0"), np.uint8) for block in blocks]
    found = []
    for row in matrix(shape)[:, : len(blocks)]:
        total = np.zeros(longest, np.uint8)
        for factor, block in zip(row.tolist(), arrays, strict=True):
            total ^= TABLE[factor][block]
        found.append(total.tobytes())
    return found


class Bench:
    """One group over its files. Owns descriptors and memory."""

    def __init__(self, folder: Path, io: Io, data: Sequence[bytes], shape: Shape) -> None:
        self.io, self.shape, self.data = io, shape, list(data)
        self.count = len(data)
        self.paths = [folder / f"block{n}" for n in range(self.count + shape.checks)]
        flags = os.O_RDWR | os.O_CREAT
        self.fds = [os.open(path, flags, 0o600) for path in self.paths]
        self.memory = [np.frombuffer(block, np.uint8).copy() for block in data]
        self.longest = max(map(len, data))

    def files(self, dead: Sequence[int] = ()) -> list[File]:
        return [File(-1 if n in dead else fd) for n, fd in enumerate(self.fds)]

    def jobs(self, lengths: Sequence[int]) -> Any:
        jobs = np.zeros(len(lengths), _engine.JOB_DTYPE)
        jobs["length"] = lengths
        jobs["flags"] = _engine.JOB_CHECKSUM
        return jobs

    def write(self, **options: Any) -> Any:
        jobs = self.jobs([*map(len, self.data), *[self.longest] * self.shape.checks])
        jobs["file"] = range(len(jobs))
        jobs["seed"] = [7] * len(jobs) if self.shape.is_copies else range(len(jobs))
        extents = np.zeros(self.count, _engine.EXTENT_DTYPE)
        extents["addr"] = [memory.ctypes.data for memory in self.memory]
        extents["length"] = [*map(len, self.data)]
        jobs["extent_first"][: self.count] = range(self.count)
        jobs["extents_count"][: self.count] = 1
        groups = np.zeros(1, _engine.GROUP_DTYPE)
        groups["inputs_count"], groups["outputs_count"] = self.count, self.shape.checks
        coefficients = matrix(self.shape)[:, : self.count].tobytes()
        files = options.pop("files", self.files())
        return self.io.run("write", files, jobs, extents, groups=groups, matrix=coefficients, **options)

    def blocks(self) -> list[bytes]:
        return [*self.data, *expected_checks(self.data, self.shape)]

    def recover(
        self, present: Sequence[int], wanted: Sequence[int], **options: Any
    ) -> tuple[Any, list[bytes]]:
        """Reads the present blocks (numbers in the files) and computes the wanted ones."""
        whole = self.blocks()
        order = [*present, *wanted]
        jobs = self.jobs([len(whole[n]) for n in order])
        jobs["file"][: len(present)] = present
        jobs["seed"] = order
        for row, n in enumerate(order):
            jobs["digest"][row] = np.frombuffer(xxhash.xxh3_128_digest(whole[n], seed=n), np.uint8)
        memory = [np.zeros(len(whole[n]), np.uint8) for n in wanted]
        extents = np.zeros(len(order), _engine.EXTENT_DTYPE)
        extents["length"] = jobs["length"]
        extents["addr"][len(present) :] = [m.ctypes.data for m in memory]
        jobs["extent_first"], jobs["extents_count"] = range(len(order)), 1
        groups = np.zeros(1, _engine.GROUP_DTYPE)
        groups["inputs_count"], groups["outputs_count"] = len(present), len(wanted)

        def number(n: int) -> int:
            return n if n < self.count else self.shape.data + n - self.count

        coefficients = recovery(self.shape, [*map(number, present)], [*map(number, wanted)], self.count)
        results, _ = self.io.run(
            "read",
            self.files(),
            jobs,
            extents,
            groups=groups,
            matrix=coefficients.tobytes(),
            keep_going=True,
            **options,
        )
        return results, [m.tobytes() for m in memory]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.mark.parametrize(
    ("data", "checks", "short"),
    [(k, m, short) for k in range(1, 7) for m in range(4) for short in (0, 1) if k > short],
)
def test_every_set_of_losses_comes_back_bit_for_bit(
    tmp_path: Path, kind: str, data: int, checks: int, short: int
) -> None:
    shape = Shape(data, checks)
    blocks = [cycling(LENGTHS[n % 3] if n else LENGTHS[0], start=31 * n) for n in range(data - short)]
    bench = Bench(tmp_path, Io(kind), blocks, shape)  # type: ignore[arg-type]
    results, _ = bench.write()
    assert not results["code"].any()
    whole = bench.blocks()
    for n, block in enumerate(whole):
        content = bench.paths[n].read_bytes()
        assert content[: len(block)] == block and not any(content[len(block) :])
        seed = 7 if shape.is_copies else n
        assert results["digest"][n].tobytes() == xxhash.xxh3_128_digest(block, seed=seed)
    if not shape.is_copies:
        for losses in range(1, checks + 1):
            for lost in itertools.combinations(range(len(whole)), losses):
                present = [n for n in range(len(whole)) if n not in lost][: len(blocks)]
                results, found = bench.recover(present, lost)
                assert not results["code"].any()
                assert found == [whole[n] for n in lost]
    bench.close()


def test_an_input_that_fails_leaves_the_outputs_undone_and_says_so(tmp_path: Path, kind: str) -> None:
    bench = Bench(tmp_path, Io(kind), [cycling(9000, start=n) for n in range(3)], Shape(3, 1))  # type: ignore[arg-type]
    bench.write()
    content = bytearray(bench.paths[0].read_bytes())
    content[17] ^= 1
    bench.paths[0].write_bytes(content)
    results, _ = bench.recover([0, 1, 3], [2])
    assert results["code"].tolist() == [_engine.ECORRUPT, 0, 0, _engine.EINPUT]
    bench.close()


@pytest.mark.parametrize("shape", [Shape(1, 2), Shape(3, 2)])
def test_a_file_that_dies_in_a_write_costs_its_own_blocks_alone(
    tmp_path: Path, kind: str, shape: Shape
) -> None:
    prefix = os.fsencode(tmp_path / "block1")
    io = Io(kind, faults=[Fault("write", drive=prefix, count=0)])  # type: ignore[arg-type]
    bench = Bench(tmp_path, io, [cycling(9000, start=n) for n in range(shape.data)], shape)
    results, stats = bench.write(keep_going=True)
    assert [code != 0 for code in results["code"].tolist()] == [n == 1 for n in range(shape.width)]
    assert results["code"][1] == -5 and stats.files[1].errors and not stats.files[0].errors
    for n, block in enumerate(bench.blocks()):
        if n != 1:
            assert bench.paths[n].read_bytes()[: len(block)] == block
    with pytest.raises(_engine.RunError) as caught:
        bench.write()
    assert (caught.value.code, caught.value.file) == (-5, 1)
    bench.close()


def test_a_file_that_is_dead_from_the_start_still_counts_in_the_sums(tmp_path: Path, kind: str) -> None:
    bench = Bench(tmp_path, Io(kind), [cycling(9000, start=n) for n in range(2)], Shape(2, 1))  # type: ignore[arg-type]
    results, _ = bench.write(keep_going=True, files=bench.files(dead=[0]))
    assert results["code"].tolist() == [_engine.ESKIPPED, 0, 0]
    assert bench.paths[0].read_bytes() == b""
    assert bench.paths[2].read_bytes()[:9000] == bench.blocks()[2]
    assert results["digest"][0].tobytes() == xxhash.xxh3_128_digest(bench.data[0], seed=0)
    with pytest.raises(ValueError, match="not open"):
        bench.write(files=bench.files(dead=[0]))
    bench.close()


def read_copies(
    io: Io, paths: Sequence[Path], blocks: Sequence[bytes], **options: Any
) -> tuple[Any, bytes, Any]:
    """Reads blocks that lie one after the other in each of the files."""
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    length = len(blocks[0])
    jobs = np.zeros(len(blocks), _engine.JOB_DTYPE)
    jobs["offset"], jobs["length"] = np.arange(len(blocks)) * length, length
    jobs["flags"] = _engine.JOB_CHECKSUM
    jobs["copies_count"] = len(paths) - 1
    jobs["copies_first"] = np.arange(len(blocks)) * (len(paths) - 1)
    for n, block in enumerate(blocks):
        jobs["digest"][n] = np.frombuffer(xxhash.xxh3_128_digest(block), np.uint8)
    copies = np.zeros(len(blocks) * (len(paths) - 1), _engine.COPY_DTYPE)
    copies["offset"] = np.repeat(jobs["offset"], len(paths) - 1)
    copies["file"] = np.tile(np.arange(1, len(paths)), len(blocks))
    memory = np.zeros(length * len(blocks), np.uint8)
    extents = np.zeros(len(blocks), _engine.EXTENT_DTYPE)
    extents["addr"] = memory.ctypes.data + np.arange(len(blocks)) * length
    extents["length"] = length
    jobs["extent_first"], jobs["extents_count"] = np.arange(len(blocks)), 1
    try:
        results, stats = io.run("read", [File(fd) for fd in fds], jobs, extents, copies=copies, **options)
    finally:
        for fd in fds:
            os.close(fd)
    return results, memory.tobytes(), stats


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Threads of a run that was given up end when their drive answers: other tests count threads."""
    before = threads()
    yield
    deadline = time.monotonic() + 10
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threads() <= before


@pytest.fixture
def mirrored(tmp_path: Path) -> tuple[list[Path], list[bytes]]:
    blocks = [cycling(8192, start=n) for n in range(20)]
    paths = [tmp_path / f"copy{n}" for n in range(3)]
    for path in paths:
        path.write_bytes(b"".join(blocks))
    return paths, blocks


def test_copies_share_the_reading(mirrored: tuple[list[Path], list[bytes]], kind: str) -> None:
    paths, blocks = mirrored
    results, found, stats = read_copies(Io(kind), paths, blocks)  # type: ignore[arg-type]
    assert found == b"".join(blocks) and not results["code"].any() and not results["failed_copies"].any()
    assert sum(file.transfers for file in stats.files) == len(blocks)
    assert all(file.transfers for file in stats.files)


def test_a_copy_that_is_wrong_or_cannot_be_read_is_passed_over_and_named(
    mirrored: tuple[list[Path], list[bytes]], kind: str
) -> None:
    paths, blocks = mirrored
    content = bytearray(paths[0].read_bytes())
    content[3 * 8192 + 5] ^= 1
    paths[0].write_bytes(content)
    io = Io(kind, faults=[Fault("read", drive=os.fsencode(paths[1]), count=0)])  # type: ignore[arg-type]
    results, found, _ = read_copies(io, paths, blocks, workers_max=1, depth=1)
    assert found == b"".join(blocks) and not results["code"].any()
    assert any(bits & 2 for bits in results["failed_copies"].tolist())
    assert set(results["failed_code"].tolist()) <= {0, -5, _engine.ECORRUPT}
    for path in (paths[0], paths[2]):
        path.write_bytes(b"")
    results, _, _ = read_copies(io, paths, blocks, keep_going=True)
    assert (results["failed_copies"] == 7).all()
    assert set(results["code"].tolist()) <= {-5, _engine.ETRUNCATED}


def test_a_slow_copy_gets_less_to_do(mirrored: tuple[list[Path], list[bytes]], kind: str) -> None:
    paths, blocks = mirrored
    io = Io(kind, faults=[Fault("read", "hang", drive=os.fsencode(paths[0]), count=0, value=60)])  # type: ignore[arg-type]
    _, found, stats = read_copies(io, paths, blocks, workers_max=3, depth=1)
    assert found == b"".join(blocks)
    slow, *fast = (file.transfers for file in stats.files)
    assert slow <= 3 < sum(fast)


def test_a_drive_that_hangs_is_named_and_left_alone(
    mirrored: tuple[list[Path], list[bytes]], kind: str
) -> None:
    paths, blocks = mirrored
    io = Io(kind, faults=[Fault("read", "hang", drive=os.fsencode(paths[0]), count=0, value=1000)])  # type: ignore[arg-type]
    with pytest.raises(_engine.RunError, match="no answer in time") as caught:
        read_copies(io, paths[:1], blocks, hang_timeout_s=0.3)
    assert (caught.value.code, caught.value.file) == (_engine.EHUNG, 0)


@pytest.mark.parametrize("hang_timeout_s", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_time_out_that_is_none_is_refused(
    mirrored: tuple[list[Path], list[bytes]], hang_timeout_s: float
) -> None:
    paths, blocks = mirrored
    with pytest.raises(ValueError, match="hang_timeout_s"):
        read_copies(Io("posix"), paths, blocks, hang_timeout_s=hang_timeout_s)


def test_a_slow_drive_is_not_a_hanging_one(mirrored: tuple[list[Path], list[bytes]], kind: str) -> None:
    paths, blocks = mirrored
    io = Io(kind, faults=[Fault("read", "hang", count=0, value=100)])  # type: ignore[arg-type]
    _, found, stats = read_copies(io, paths[:1], blocks, workers_max=2, depth=2, hang_timeout_s=0.45)
    assert found == b"".join(blocks) and stats.elapsed_s > 0.45


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_gives_a_hanging_drive_up_at_the_time_out_and_a_second_one_at_once(
    mirrored: tuple[list[Path], list[bytes]], kind: str, interrupts: int
) -> None:
    paths, blocks = mirrored
    io = Io(kind, faults=[Fault("read", "hang", drive=os.fsencode(paths[0]), count=0, value=1500)])  # type: ignore[arg-type]

    def press() -> None:
        for _ in range(interrupts):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    started = time.monotonic()
    kept = len(abandoned())
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            read_copies(io, paths[:1], blocks, hang_timeout_s=0.9 if interrupts == 1 else 60.0)
        took = time.monotonic() - started
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert took < 1.4 and (interrupts == 2 or took > 0.85)
    # The workers look at their tables for as long as the drive hangs.
    assert len(abandoned()) == kept + 1


def abandoned() -> list[Any]:
    found: list[Any] = _engine.ABANDONED  # type: ignore[attr-defined]
    return found


def test_a_process_ends_while_a_drive_hangs_for_ever(tmp_path: Path, kind: str) -> None:
    script = f"""
import os, sys
import numpy as np
from striate import _engine
from striate._engine import Fault, File, Io
memory = np.zeros(8192, np.uint8)
jobs = np.zeros(1, _engine.JOB_DTYPE)
jobs["length"], jobs["extents_count"] = 8192, 1
extents = np.array([(memory.ctypes.data, 8192)], _engine.EXTENT_DTYPE)
fd = os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT)
try:
    Io({kind!r}, faults=[Fault("write", "hang", value=0)]).run("write", [File(fd)], jobs, extents, hang_timeout_s=0.2)
except _engine.RunError as e:
    sys.exit(77 if e.code == _engine.EHUNG else 1)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 77


@pytest.mark.parametrize("limit", ["max_bandwidth", "file_max_bandwidth"])
def test_bandwidth_is_kept_to(mirrored: tuple[list[Path], list[bytes]], kind: str, limit: str) -> None:
    paths, blocks = mirrored
    _, found, stats = read_copies(Io(kind), paths[:1], blocks, **{limit: 800_000})  # type: ignore[arg-type]
    assert found == b"".join(blocks)
    # 20 blocks of 8 KiB at 800 kB/s; the first one does not wait.
    assert stats.elapsed_s >= 19 * 8192 / 800_000 * 0.98


def test_idle_priority_is_taken(mirrored: tuple[list[Path], list[bytes]], kind: str) -> None:
    paths, blocks = mirrored
    _, found, stats = read_copies(Io(kind), paths, blocks, idle_priority=True)  # type: ignore[arg-type]
    assert found == b"".join(blocks) and stats.priority_error == 0


def test_slots_of_groups_stay_inside_the_budget(tmp_path: Path, kind: str) -> None:
    bench = Bench(tmp_path, Io(kind), [cycling(8192, start=n) for n in range(4)], Shape(4, 2))  # type: ignore[arg-type]
    _, stats = bench.write(budget_bytes=6 * 8192)
    assert stats.slot_bytes <= 6 * 8192
    with pytest.raises(OSError, match="Cannot allocate"):
        bench.write(budget_bytes=6 * 8192 - 1)
    bench.close()


def test_groups_of_many_slices_and_shapes_share_one_run(tmp_path: Path, kind: str) -> None:
    """Two of 3 + 2 blocks, one of 1 + 0 and one of 1 + 1, in pieces, longer than what is encoded at once."""
    shapes = [Shape(3, 2), Shape(1, 0), Shape(1, 1), Shape(3, 2)]
    lengths = [[300_000, 131_072, 131_073], [200_001], [400_000], [4096, 270_000, 1]]
    blocks = [[cycling(n, start=31 * n) for n in group] for group in lengths]
    whole = [[*group, *expected_checks(group, shape)] for group, shape in zip(blocks, shapes, strict=True)]
    rows = [(g, n) for g, group in enumerate(whole) for n in range(len(group))]
    memory = {(g, n): np.frombuffer(whole[g][n], np.uint8).copy() for g, n in rows if n < shapes[g].data}
    jobs = np.zeros(len(rows), _engine.JOB_DTYPE)
    extents = np.zeros(2 * len(memory), _engine.EXTENT_DTYPE)
    at = extent = 0
    for row, (g, n) in enumerate(rows):
        length = len(whole[g][n])
        jobs[row]["offset"], jobs[row]["length"], jobs[row]["file"] = at, length, n
        jobs[row]["flags"] = _engine.JOB_CHECKSUM
        at += -(-length // 4096) * 4096
        if n < shapes[g].data:
            start = memory[g, n].ctypes.data
            extents[extent] = (start, length // 3)
            extents[extent + 1] = (start + length // 3, length - length // 3)
            jobs[row]["extent_first"], jobs[row]["extents_count"] = extent, 2
            extent += 2
    groups = np.zeros(len(shapes), _engine.GROUP_DTYPE)
    factors = b""
    for g, shape in enumerate(shapes):
        first = rows.index((g, 0))
        groups[g] = (first, len(factors), shape.data, shape.checks)
        factors += matrix(shape).tobytes()
    fds = [os.open(tmp_path / f"file{n}", os.O_RDWR | os.O_CREAT) for n in range(5)]
    shorts = [Fault("write", "short", nth=4, count=3, value=50_000)]
    results, stats = Io(kind, faults=shorts).run(  # type: ignore[arg-type]
        "write", [File(fd) for fd in fds], jobs, extents, groups=groups, matrix=factors
    )
    assert stats.retries >= 1 and not results["code"].any()
    for row, (g, n) in enumerate(rows):
        assert os.pread(fds[n], len(whole[g][n]), int(jobs["offset"][row])) == whole[g][n]
        assert results["digest"][row].tobytes() == xxhash.xxh3_128_digest(whole[g][n])
    assert stats.bytes == sum(map(sum, lengths))
    for fd in fds:
        os.close(fd)


def test_each_write_of_a_group_failing_in_turn_names_its_file(tmp_path: Path, kind: str) -> None:
    shape = Shape(3, 2)
    data = [cycling(9000, start=n) for n in range(3)]
    for nth in range(shape.width):
        io = Io(kind, faults=[Fault("write", nth=nth, value=28)])  # type: ignore[arg-type]
        bench = Bench(tmp_path, io, data, shape)
        with pytest.raises(_engine.RunError) as caught:
            bench.write()
        assert (caught.value.code, caught.value.file, caught.value.job) == (-28, nth, nth)
        bench.close()


def test_each_read_of_a_recovery_failing_in_turn_costs_what_is_computed_from_it(
    tmp_path: Path, kind: str
) -> None:
    Bench(tmp_path, Io(kind), [cycling(9000, start=n) for n in range(3)], Shape(3, 2)).write()  # type: ignore[arg-type]
    for nth in range(3):
        io = Io(kind, faults=[Fault("read", nth=nth, value=61)])  # type: ignore[arg-type]
        bench = Bench(tmp_path, io, [cycling(9000, start=n) for n in range(3)], Shape(3, 2))
        results, found = bench.recover([0, 2, 3], [1, 4])
        codes = results["code"].tolist()
        assert codes == [-61 if n == nth else 0 for n in range(3)] + [_engine.EINPUT] * 2
        assert not any(map(any, found))
        bench.close()


def test_copies_of_a_borrowed_block_take_no_slot(tmp_path: Path, kind: str) -> None:
    memory = np.zeros(2 << 20, np.uint8)
    start = -memory.ctypes.data % 4096
    memory[start : start + (1 << 20)] = np.frombuffer(cycling(1 << 20), np.uint8)
    jobs = np.zeros(3, _engine.JOB_DTYPE)
    jobs["length"], jobs["file"] = 1 << 20, range(3)
    jobs["flags"] = _engine.JOB_CHECKSUM | _engine.JOB_STABLE
    jobs["extents_count"][0] = 1
    extents = np.array([(memory.ctypes.data + start, 1 << 20)], _engine.EXTENT_DTYPE)
    fds = [os.open(tmp_path / f"copy{n}", os.O_RDWR | os.O_CREAT) for n in range(3)]
    groups = group_of(inputs_count=1, outputs_count=2)

    def write(**options: Any) -> Any:
        return Io(kind).run(  # type: ignore[arg-type]
            "write", [File(fd) for fd in fds], jobs, extents, groups=groups, matrix=b"", **options
        )

    results, stats = write()
    assert (stats.slot_bytes, stats.zero_copy_bytes) == (0, 3 << 20)
    assert {digest.tobytes() for digest in results["digest"]} == {xxhash.xxh3_128_digest(cycling(1 << 20))}
    # A run that may be abandoned shows no drive memory of the caller; one slot serves all the copies.
    _, stats = write(hang_timeout_s=60.0)
    assert (stats.slot_bytes, stats.zero_copy_bytes) == (1 << 20, 0)
    for n, fd in enumerate(fds):
        assert (tmp_path / f"copy{n}").read_bytes() == cycling(1 << 20)
        os.close(fd)


def group_of(**columns: int) -> Any:
    groups = np.zeros(1, _engine.GROUP_DTYPE)
    for name, value in columns.items():
        groups[name] = value
    return groups


@pytest.mark.parametrize(
    ("groups", "matrix_bytes", "words"),
    [
        (group_of(inputs_count=1), b"", "do not cover"),
        (group_of(inputs_count=3), b"", "do not cover"),
        (group_of(job_first=1, inputs_count=1), b"", "do not cover"),
        (group_of(outputs_count=2), b"", "no input"),
        (group_of(inputs_count=1, outputs_count=1), b"", "factors"),
        (group_of(inputs_count=1, outputs_count=1, matrix_first=1), b"\1", "factors"),
    ],
)
def test_wrong_groups_are_refused(tmp_path: Path, groups: Any, matrix_bytes: bytes, words: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    memory = np.zeros(8192, np.uint8)
    jobs = np.zeros(2, _engine.JOB_DTYPE)
    jobs["length"], jobs["extents_count"] = 4096, 1
    extents = np.zeros(2, _engine.EXTENT_DTYPE)
    extents["addr"], extents["length"] = memory.ctypes.data, 4096
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(ValueError, match=words):
        Io("posix").run("read", [File(fd)], jobs, extents, groups=groups, matrix=matrix_bytes)
    os.close(fd)


def test_directories_are_made_and_names_moved_between_them(tmp_path: Path, kind: str) -> None:
    io = Io(kind, trace=True)  # type: ignore[arg-type]
    top = os.open(tmp_path, os.O_RDONLY)
    io.mkdir(top, b"below")
    with pytest.raises(FileExistsError):
        io.mkdir(top, b"below")
    below = os.open(tmp_path / "below", os.O_RDONLY)
    (tmp_path / "file").write_bytes(b"x")
    io.rename(top, b"file", b"moved", to_dirfd=below)
    assert (tmp_path / "below/moved").read_bytes() == b"x"
    assert [trace.op for trace in io.traces()] == ["mkdir", "mkdir", "rename"]
    os.close(top)
    os.close(below)
