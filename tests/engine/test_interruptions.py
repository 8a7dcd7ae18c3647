"""Signals, exceptions and forks in the middle of a run: it drains, lets go of everything, and says why."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from striate._engine import Fault, Io, RunError
from support.contents import cycling
from support.sanitizer import forks_beside_threads
from support.tables import (
    BLOCK,
    KINDS,
    Bytes,
    Kind,
    digests,
    found_digests,
    memory,
    open_descriptors,
    opened,
    resident_bytes,
    tables,
    threads,
)

# Seconds long: one page a transfer.
SLOW = [Fault("any", "short", count=0, value=4096)]


def filled(length: int) -> Bytes:
    data = memory(length, misalign=64)
    data[:] = np.frombuffer(cycling(length), np.uint8)
    return data


class Alarm(Exception):
    pass


@contextlib.contextmanager
def handling(number: int, handler: object) -> Iterator[None]:
    before = signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_ends_a_run_within_a_moment_and_leaves_nothing_running(kind: Kind, tmp_path: Path) -> None:
    data = filled(2000 * BLOCK)
    jobs, extents = tables(data)
    before = open_descriptors(), threads()
    with handling(signal.SIGINT, signal.default_int_handler):
        io = Io(kind, faults=SLOW)
        with opened(io, tmp_path) as file:
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                io.run("write", [file], jobs, extents)
            took = time.monotonic() - started
            timer.join()
            assert 0.2 < took < 5
            assert threads() == before[1]
            written = sum(trace.op == "write" for trace in io.traces())
            assert 0 < written < len(data) // 4096 - 100
            # The drive does not touch our memory any more, and the next run works.
            jobs, extents = tables(data[: 4 * BLOCK])
            results, _ = Io(kind).run("write", [file], jobs, extents)
            assert found_digests(results) == digests(data[: 4 * BLOCK], jobs)
    assert (open_descriptors(), threads()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_or_progress_that_raises_cancels_the_run(kind: Kind, tmp_path: Path) -> None:
    data = filled(2000 * BLOCK)
    jobs, extents = tables(data)

    def ring(*_: object) -> None:
        raise Alarm

    def refuse(done: int) -> None:
        if done:
            raise Alarm(done)

    io = Io(kind, faults=SLOW)
    with opened(io, tmp_path) as file:
        with handling(signal.SIGALRM, ring):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            # Four blocks of many transfers each: not even the block in flight is finished.
            large = tables(data, block_bytes=len(data) // 4 // 4096 * 4096)
            with pytest.raises(Alarm):
                io.run("write", [file], *large)
        assert sum(trace.op == "write" for trace in io.traces()) < len(data) // 4096 - 100
        with pytest.raises(Alarm) as caught:
            io.run("write", [file], jobs, extents, progress=refuse)
        assert 0 < caught.value.args[0] < len(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_timer_every_millisecond_has_no_effect(kind: Kind, tmp_path: Path) -> None:
    data = filled(1500 * BLOCK)
    rings = 0

    def ring(*_: object) -> None:
        nonlocal rings
        rings += 1

    io = Io(kind)
    with handling(signal.SIGALRM, ring), opened(io, tmp_path) as file:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        jobs, extents = tables(data)
        io.allocate(file.fd, len(data))
        results, stats = io.run("write", [file], jobs, extents)
        io.sync(file.fd)
        target = memory(len(data))
        jobs, extents = tables(target)
        jobs["digest"] = results["digest"]
        _, read_stats = io.run("read", [file], jobs, extents)
    assert rings > 0
    assert (stats.retries, read_stats.retries) == (0, 0)
    assert np.array_equal(target, data)


@pytest.mark.parametrize("kind", KINDS)
def test_descriptors_threads_and_memory_stay_flat_over_many_runs_good_and_bad(
    kind: Kind, tmp_path: Path
) -> None:
    data = filled(40 * BLOCK)
    jobs, extents = tables(data)

    def round_of_runs() -> None:
        for nth in (3, 1000):
            io = Io(kind, faults=[Fault("write", nth=nth)])
            with opened(io, tmp_path) as file, contextlib.suppress(RunError):
                io.run("write", [file], jobs, extents)

    for _ in range(5):
        round_of_runs()
    gc.collect()
    before = open_descriptors(), threads(), resident_bytes()
    for _ in range(50):
        round_of_runs()
    gc.collect()
    assert (open_descriptors(), threads()) == before[:2]
    # Slots never given back would be 50 MiB by now.
    assert resident_bytes() <= before[2] + (12 << 20)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_leave_every_signal_to_the_threads_that_expect_it(kind: Kind, tmp_path: Path) -> None:
    data = filled(200 * BLOCK)
    jobs, extents = tables(data)
    before = set(os.listdir("/proc/self/task"))
    masks: set[int] = set()

    def look(_: int) -> None:
        for task in set(os.listdir("/proc/self/task")) - before:
            with contextlib.suppress(OSError):  # it may have left
                status = Path("/proc/self/task", task, "status").read_text()
                masks.update(
                    int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk")
                )

    with opened(Io(kind), tmp_path) as file:
        Io(kind, faults=SLOW).run("write", [file], jobs, extents, progress=look)
    assert masks
    for mask in masks:
        for number in (
            signal.SIGINT,
            signal.SIGALRM,
            signal.SIGTERM,
            signal.SIGCHLD,
            signal.SIGUSR1,
            signal.SIGPROF,
        ):
            assert mask >> (number - 1) & 1


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_not_shared_with_a_forked_child(kind: Kind, tmp_path: Path) -> None:
    data = filled(1000 * BLOCK)  # long enough for several looks, on a slow build too
    jobs, extents = tables(data)
    apart: list[int] = []  # bytes of mappings that a child does not get ("dc" in their flags), at each look

    def look(_: int) -> None:
        total = size = 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if line.startswith("Size:"):
                size = int(line.split()[1]) << 10
            elif line.startswith("VmFlags:") and "dc" in line.split():
                total += size
        apart.append(total)

    with opened(Io(kind), tmp_path) as file:
        _, stats = Io(kind, faults=SLOW).run("write", [file], jobs, extents, progress=look)
    assert max(apart) >= stats.slot_bytes > 0


@forks_beside_threads
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_forked_in_the_middle_of_a_run_disturbs_nothing_and_can_run_itself(
    kind: Kind, tmp_path: Path
) -> None:
    data = filled(300 * BLOCK)
    jobs, extents = tables(data)
    small_jobs, small_extents = tables(data[: 10 * BLOCK])
    (tmp_path / "child").mkdir()
    io = Io(kind, faults=[Fault("any", "short", count=0, value=16384)])
    children: list[int] = []

    def fork(done: int) -> None:
        if len(children) >= 3:
            return
        child = os.fork()
        if child:
            children.append(child)
            return
        status = 1
        signal.alarm(120)  # a child that hangs is told by its status
        try:
            mine = Io(kind)
            with opened(mine, tmp_path / "child", str(os.getpid()).encode()) as file:
                results, _ = mine.run("write", [file], small_jobs, small_extents)
                status = 0 if found_digests(results) == digests(data[: 10 * BLOCK], small_jobs) else 2
        finally:
            os._exit(status)

    with opened(io, tmp_path) as file:
        results, _ = io.run("write", [file], jobs, extents, progress=fork)
    assert found_digests(results) == digests(data, jobs)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert children
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_many_threads_may_run_at_once(kind: Kind, tmp_path: Path) -> None:
    data = filled(20 * BLOCK)
    wrong: list[object] = []
    io = Io(kind)

    def save(index: int) -> None:
        try:
            for _ in range(5):
                jobs, extents = tables(data)
                with opened(io, tmp_path, str(index).encode()) as file:
                    results, _ = io.run("write", [file], jobs, extents)
                if found_digests(results) != digests(data, jobs):
                    wrong.append(index)
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=save, args=(index,)) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
