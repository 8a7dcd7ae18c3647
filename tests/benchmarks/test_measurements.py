"""A measurement counts what it says, and nothing else."""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from harness.cold import evict, warm_share
from harness.ratios import paired_ratio
from harness.sample import MeasurementFailed, Timing, measure

MIB = 1 << 20


def hold(length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Memory that the process really has: each page written."""
    return np.full(length, 7, dtype=np.uint8)


def test_time_of_the_action_alone_counts() -> None:
    sample = measure(
        lambda: time.sleep(0.2),
        prepare=lambda: time.sleep(0.8),
        warm_up=lambda: time.sleep(0.8),
        enter=lambda: time.sleep(0.8),
        check=lambda: time.sleep(0.8),
    )
    assert 0.2 <= sample.elapsed_s < 0.8


def test_cpu_seconds_are_those_of_the_action_and_sleep_costs_none() -> None:
    def burn(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    sample = measure(lambda: burn(0.3), warm_up=lambda: burn(0.3))
    assert sample.cpu_s is not None
    assert 0.29 <= sample.cpu_s < 0.55
    idle = measure(lambda: time.sleep(0.3))
    assert idle.cpu_s is not None
    assert idle.cpu_s < 0.1


def test_extra_memory_is_the_peak_above_what_was_prepared_even_if_freed_again() -> None:
    kept: list[object] = []

    def rise_and_fall() -> None:
        hold(96 * MIB)

    sample = measure(rise_and_fall, prepare=lambda: kept.append(hold(64 * MIB)))
    assert sample.extra_bytes is not None
    assert 94 * MIB < sample.extra_bytes < 112 * MIB


def test_what_a_contender_times_itself_replaces_the_time_around_it() -> None:
    sample = measure(lambda: time.sleep(0.1) or Timing(12.5, 3.25))
    assert (sample.elapsed_s, sample.cpu_s, sample.extra_bytes) == (12.5, 3.25, None)


def fail() -> None:
    raise OSError(28, "drive of the test is full")


@pytest.mark.parametrize("part", ["action", "prepare", "warm_up", "enter", "check"])
def test_a_failure_in_the_child_comes_back_in_its_own_words(part: str) -> None:
    parts = {"action": lambda: None} | {part: fail}
    with pytest.raises(MeasurementFailed, match="drive of the test is full"):
        measure(**parts)


def test_a_child_that_is_killed_is_a_failed_measurement() -> None:
    with pytest.raises(MeasurementFailed, match=f"status -{signal.SIGKILL}"):
        measure(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_evicted_files_are_cold_and_read_ones_are_warm(drive: Path) -> None:
    path = drive / "data"
    with open(path, "wb") as file:
        file.write(os.urandom(16 * MIB))
        os.fsync(file.fileno())
    path.read_bytes()
    assert warm_share([path]) == 1.0
    how, share = evict(path)
    assert "posix_fadvise" in how
    assert share == 0.0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        assert len(mapped[: 8 * MIB]) == 8 * MIB
    assert warm_share([path]) == pytest.approx(0.5, abs=0.05)


def test_a_directory_is_evicted_file_by_file(drive: Path) -> None:
    for name in ("a", "b"):
        with open(drive / name, "wb") as file:
            file.write(os.urandom(2 * MIB))
            os.fsync(file.fileno())
    assert warm_share([drive / "a", drive / "b"]) == 1.0
    assert evict(drive)[1] == 0.0


def test_the_ratio_is_taken_round_by_round_so_a_slow_round_cancels() -> None:
    # The third round is ten times slower for both: medians of the columns would say 1.5.
    ratio = paired_ratio([2.0, 3.0, 20.0], [1.0, 2.0, 10.0])
    assert ratio.median == 2.0
    assert ratio.low == 1.5
    assert ratio.high == 2.0


def test_equal_ratios_leave_no_doubt_and_noisy_ones_do() -> None:
    steady = paired_ratio([3.0] * 9, [2.0] * 9)
    assert (steady.median, steady.low, steady.high) == (1.5, 1.5, 1.5)
    noisy = paired_ratio([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8], [1.0] * 9)
    assert noisy.median == 1.4
    assert 1.0 < noisy.low < 1.3
    assert 1.5 < noisy.high < 1.8
    assert noisy == paired_ratio([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8], [1.0] * 9)


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot pair 2 with 1"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="cannot pair 0 with 0"):
        paired_ratio([], [])
