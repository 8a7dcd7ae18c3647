"""Savers that are killed, interrupted and limited half-way, and savers that meet."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crash import jobs
from crash.checkpoints import NAME, beside, require_alone, save, version_at, version_of
from crash.processes import run_job

import striate
from support.sanitizer import forks_beside_threads

MANY_CHUNKS = 16 << 20  # with chunks of 4096 bytes: long enough to be interrupted
PAIRS = 500  # with each engine: a thousand


def test_a_saver_killed_at_a_random_moment_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, engine_name: str, processes: Any
) -> None:
    path = tmp_path / NAME
    data_bytes = 1 << 19
    rng = random.Random(22)
    save(0, path, data_bytes=data_bytes)
    standing = old = new = half_way = rounds = 0
    took_s: list[float] = []
    # The first rounds are not killed: they tell how long a save takes here and
    # now. Of the others, every second one is killed once its temporary is there.
    while rounds < 35 or ((half_way < 8 or not old or not new) and rounds < 200):
        rounds += 1
        ours, theirs = processes.Pipe()
        process = processes.Process(
            target=jobs.save_when_told, args=(theirs, str(path), engine_name, standing + 1, data_bytes)
        )
        process.start()
        theirs.close()
        assert ours.recv() == "ready"
        ours.send("go")
        begun = time.monotonic()
        if rounds <= 3:
            wait_s = 60.0
        elif rounds % 2:
            wait_s = rng.uniform(0, 1.3 * sorted(took_s)[len(took_s) // 2])
        else:
            while not beside(path) and not ours.poll():
                pass
            wait_s = rng.uniform(0, 0.01)
        finished = ours.poll(wait_s)
        if finished:
            took_s.append(time.monotonic() - begun)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        finished = finished or (ours.poll() and _received(ours) == "saved")
        half_way += beside(path) != []
        found = version_at(path, data_bytes=data_bytes)
        assert found in (standing, standing + 1)
        assert found == standing + 1 or not finished, "a save that returned is gone"
        new += found != standing
        old += found == standing
        standing = found
    assert half_way >= 8, "no kill met a save in its middle"
    assert old
    assert new
    # A ring lets go of its files some 50 ms after its process is gone.
    time.sleep(1)
    save(standing + 1, path, data_bytes=data_bytes)
    require_alone(path)


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return None  # killed before it had read all that we sent


def test_ctrl_c_half_way_ends_a_save_and_leaves_the_old_checkpoint(
    tmp_path: Path, engine_name: str, processes: Any
) -> None:
    path = tmp_path / NAME
    data_bytes = 3 * MANY_CHUNKS
    save(1, path, data_bytes=data_bytes)
    report = run_job(processes, jobs.interrupted_save, str(path), engine_name, data_bytes, 0.1)
    assert report["outcome"] == "interrupted"
    assert report["found"] == 1
    assert report["beside"] == []
    assert report["descriptors"]
    assert report["threads"]
    assert report["next"] == (3, [])
    # Python looks every 100 ms, what is in flight drains; a busy machine adds to it.
    assert report["after_s"] < 2


def test_ctrl_c_at_any_moment_leaves_the_old_or_the_new_checkpoint_and_nothing_beside_it(
    memory_dir: Path, engine_name: str, processes: Any
) -> None:
    rounds = 40
    interrupted = run_job(
        processes, jobs.interrupted_at_random, str(memory_dir / NAME), engine_name, rounds, 1 << 19
    )
    assert interrupted > rounds // 2


def test_timers_have_no_effect_on_saves_and_loads(tmp_path: Path, engine_name: str, processes: Any) -> None:
    path = tmp_path / NAME
    found, loaded, seen = run_job(processes, jobs.save_under_a_timer, str(path), engine_name, MANY_CHUNKS)
    assert (found, loaded) == (2, 2)
    assert seen > 10
    require_alone(path)


def test_a_file_size_limit_is_a_clear_error_and_leaves_the_old_checkpoint(
    tmp_path: Path, engine_name: str, processes: Any
) -> None:
    path = tmp_path / NAME
    data_bytes = 1 << 20
    save(1, path, data_bytes=data_bytes)
    report, found, after = run_job(
        processes, jobs.save_with_a_file_size_limit, str(path), engine_name, data_bytes, data_bytes // 2
    )
    code, filename, message, left = report
    assert code == errno.EFBIG
    assert filename == str(path)
    assert "ulimit -f" in message
    assert f"the earlier {NAME} is intact" in message
    assert left == []
    assert (found, after) == (1, 3)


def test_two_processes_that_save_one_name_at_once_leave_one_generation_whole(
    tmp_path: Path, engine_name: str, processes: Any
) -> None:
    path = tmp_path / NAME
    rounds, data_bytes = 40, 1 << 18
    barrier = processes.Barrier(3)
    savers = [
        processes.Process(
            target=jobs.save_in_step,
            args=(barrier, str(path), engine_name, list(range(first, 2 * rounds, 2)), data_bytes),
        )
        for first in (0, 1)
    ]
    for saver in savers:
        saver.start()
    winners = set()
    try:
        for n in range(rounds):
            barrier.wait(60)
            barrier.wait(60)
            found = version_at(path, data_bytes=data_bytes)
            assert found in (2 * n, 2 * n + 1)
            winners.add(found % 2)
            require_alone(path)
    finally:
        barrier.abort()
        for saver in savers:
            saver.join(60)
    assert [saver.exitcode for saver in savers] == [0, 0]
    assert winners == {0, 1}, "the two never met"


def test_a_reader_always_finds_a_whole_checkpoint_while_another_saves(
    memory_dir: Path, engine_name: str
) -> None:
    path = memory_dir / NAME
    save(0, path)
    stop = threading.Event()
    failures: list[BaseException] = []
    seen = []

    def read() -> None:
        try:
            while not stop.is_set():
                seen.append(version_of(striate.load(path, engine=engine_name)))  # type: ignore[arg-type]
        except BaseException as e:
            failures.append(e)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in range(1, 60):
        save(version, path, engine=engine_name)
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures
    assert len(set(seen)) > 5


def test_sixteen_threads_of_fifty_saves_each(memory_dir: Path, engine_name: str) -> None:
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            path = memory_dir / f"thread-{thread}"
            for n in range(50):
                save(100 * thread + n, path, engine=engine_name)
                assert version_at(path) == 100 * thread + n
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(found.name for found in memory_dir.iterdir()) == sorted(f"thread-{n}" for n in range(16))


def _require_flat(early: dict[str, int], late: dict[str, int]) -> None:
    assert late["descriptors"] == early["descriptors"]
    assert late["threads"] == early["threads"]
    assert late["locked"] == early["locked"]
    if late["instrumented"]:
        return  # AddressSanitizer keeps freed memory for a while, in mappings of its own
    # Allocators keep what they had; what grows with each save is a leak.
    assert late["maps"] <= early["maps"] + 8
    assert late["resident_mib"] <= early["resident_mib"] + 16


def test_hundreds_of_saves_and_loads_with_sixty_four_descriptors_leak_nothing(
    memory_dir: Path, engine_name: str, processes: Any
) -> None:
    early, late = run_job(processes, jobs.many_pairs, str(memory_dir / NAME), engine_name, PAIRS, 64)
    _require_flat(early, late)
    require_alone(memory_dir / NAME)


def test_two_hundred_saves_loads_and_rotations_with_twenty_failures_leak_nothing(
    memory_dir: Path, engine_name: str, processes: Any
) -> None:
    early, late, failed, found, standing = run_job(
        processes, jobs.rotate, str(memory_dir), engine_name, 200, 2
    )
    _require_flat(early, late)
    assert failed == 20
    assert found == sorted(Path(path).name for path in standing)


def test_workers_forked_after_saves_load_without_hanging(
    memory_dir: Path, engine_name: str, processes: Any
) -> None:
    found, other = run_job(processes, jobs.load_in_workers, str(memory_dir / NAME), engine_name)
    assert found == [2] * 24
    assert other == 9


@forks_beside_threads
@pytest.mark.parametrize("job", [jobs.fork_in_the_middle_of_a_save, jobs.fork_inside_a_callback])
def test_a_child_that_ends_in_the_middle_of_a_save_takes_nothing_of_it_away(
    tmp_path: Path, engine_name: str, processes: Any, job: Callable[..., None]
) -> None:
    path = tmp_path / NAME
    data_bytes = 4 * MANY_CHUNKS
    statuses, in_the_middle, failures, found, left = run_job(
        processes, job, str(path), engine_name, data_bytes, timeout_s=60
    )
    assert set(statuses) == {0}
    assert in_the_middle
    assert failures == []
    assert found == 2
    assert left == []


@forks_beside_threads
def test_a_temporary_whose_saver_died_goes_though_a_child_of_it_lives(
    tmp_path: Path, engine_name: str, processes: Any
) -> None:
    """A child shares its parent's lock unless it lets go: a data loader's worker may outlive a killed trainer."""
    path = tmp_path / NAME
    ours, theirs = processes.Pipe()
    process = processes.Process(
        target=jobs.leave_a_child_alive, args=(theirs, str(path), engine_name, 2 * MANY_CHUNKS)
    )
    process.start()
    assert ours.poll(60)
    child = ours.recv()
    try:
        assert beside(path)
        process.kill()
        process.join()
        deadline = time.monotonic() + 20
        save(2, path)
        while beside(path):
            assert time.monotonic() < deadline, "the child holds the lock of its dead parent"
            save(3, path)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
    assert version_at(path) in (2, 3)


def test_tensors_that_change_during_a_save_never_make_a_corrupt_checkpoint(
    memory_dir: Path, engine_name: str
) -> None:
    """What is written is what was summed, even if another thread trains on the tensor meanwhile."""
    path = memory_dir / NAME
    weights = torch.zeros(1 << 20)
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            weights.add_(1)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(20):
            striate.save({"weights": weights}, path, engine=engine_name)  # type: ignore[arg-type]
            assert striate.verify(path).ok
    finally:
        stop.set()
        trainer.join()
