"""The benchmarks as a person runs them: at smoke size, interrupted, on a throttled drive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
OURS = {"striate (uring)", "striate (posix)"}
PEERS = {"torch.save", "safetensors", "DCP (1 thread)", "DCP (4 threads)"}
CEILINGS = {"raw ring", "buffered"}


def test_save_load_at_smoke_size_measures_everyone_and_says_so_in_json(run_script: Run, drive: Path) -> None:
    done = run_script("benchmarks/save_load.py", "--smoke", "--dir", drive, "--json", drive / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((drive / "out.json").read_text())
    assert set(found["save"]) >= OURS | PEERS | CEILINGS
    assert set(found["load"]) >= OURS | PEERS | CEILINGS | {"striate load_into", "(new memory)"}
    for direction in ("save", "load"):
        for name, entry in found[direction].items():
            assert len(entry["samples"]) == 1
            assert entry["elapsed_s_median"] > 0
            if name != found["ours"]:
                ours_s = found[direction][found["ours"]]["elapsed_s_median"]
                assert entry["ours_times_as_fast"]["median"] == pytest.approx(
                    entry["elapsed_s_median"] / ours_s
                )
        fastest = found[f"{direction}_of_ceiling"]["striate (uring)"]["fastest"]
        assert fastest in CEILINGS | {"fio"}
    # A load is of new tensors, so their bytes must be in its extra memory.
    for name in OURS | PEERS:
        assert found["load"][name]["extra_bytes_median"] > 0.9 * found["payload_bytes"]
    assert found["load"]["striate load_into"]["extra_bytes_median"] < 8 * found["payload_bytes"]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [path.name for path in drive.iterdir()] == ["out.json"]


def test_many_small_at_smoke_size_measures_both_shapes(run_script: Run, drive: Path) -> None:
    done = run_script("benchmarks/many_small.py", "--smoke", "--dir", drive, "--json", drive / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((drive / "out.json").read_text())
    assert set(found["flat"]["save"]) == set(found["flat"]["load"]) == {"striate", "torch", "safetensors"}
    assert set(found["nested"]["save"]) == set(found["nested"]["load"]) == {"striate", "torch"}
    assert found["count"] == 400
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [path.name for path in drive.iterdir()] == ["out.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(drive: Path, number: signal.Signals) -> None:
    script = str(REPOSITORY / "benchmarks" / "save_load.py")
    command = [sys.executable, script, "--size", "64M", "--rounds", "500", "--dir", str(drive)]
    # A session of its own, as a terminal's Ctrl-C reaches the children too.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as run:
        try:
            deadline = time.monotonic() + 120
            while not any(drive.glob("*/checkpoint*")):
                assert run.poll() is None, run.communicate()[0]
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if number == signal.SIGINT:
                os.killpg(run.pid, number)
            else:
                run.send_signal(number)
            output, _ = run.communicate(timeout=60)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 130, output
    assert "nothing is left behind" in output
    assert list(drive.iterdir()) == []


def _bench_drives() -> set[str]:
    """Loop devices on images of the benchmarks: other tests make drives at the same time."""
    found = set()
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if "striate-bench-" in backing.read_text():
                found.add(backing.parts[3])
    return found


def test_a_throttled_drive_holds_direct_saves_and_all_loads_to_its_rate(run_script: Run, drive: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a throttled drive needs root: loop device, mount, cgroup")
    before = _bench_drives()
    done = run_script(
        "benchmarks/save_load.py",
        *("--size", "64M", "--rounds", "1", "--throttle", "100", "--json", drive / "out.json"),
        *("--only", "uring", "--only", "raw ring", "--only", "safetensors"),
    )
    if done.returncode == 2 and "no block cgroup" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((drive / "out.json").read_text())
    rate = 100e6
    # Above the rate by what the cgroup lets through at first; below it by what the contender itself costs.
    for direction, name in (
        ("save", "raw ring"),
        ("load", "raw ring"),
        ("load", "safetensors"),
        ("save", "striate (uring)"),
    ):
        speed = found["payload_bytes"] / found[direction][name]["elapsed_s_median"]
        assert 0.5 * rate < speed < 1.3 * rate, (direction, name, speed)
    assert _bench_drives() <= before
    groups = Path("/sys/fs/cgroup").glob("**/striate-bench-*")
    assert [group for group in groups if not Path("/proc", group.name.rpartition("-")[2]).exists()] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--only", "torch.save"), "must keep one of its engines"),
        (("--size", "900T"), "Nothing was written"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_reason(
    run_script: Run, drive: Path, options: tuple[str, ...], words: str
) -> None:
    done = run_script("benchmarks/save_load.py", *options, "--dir", drive)
    assert done.returncode == 2
    assert words in " ".join(done.stdout.split())
    assert list(drive.iterdir()) == []
