"""What the drive itself can do, with no checkpoint around it: the same bytes count, preallocation and sync as a save.

Three kinds, because none is always the fastest: fio, one raw ring from `striate.liburing`, and plain buffered I/O.
None of them copies, checks or allocates what a checkpoint must: reads go over and over into the same few slots, which
are made before the clock starts.
"""

import contextlib
import json
import mmap
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from harness.contenders import Contender
from harness.sample import Timing
from harness.state import Spec, State, bytes_of
from harness.workspace import sync_directory
from striate.liburing import Ring

BLOCK_BYTES = 4 << 20
DEPTH = 8
PAGE_BYTES = 4096


def ceilings() -> list[Contender]:
    """Every kind that this machine has."""
    return [*([_fio()] if shutil.which("fio") else []), _raw_ring(), _buffered()]


def _fio() -> Contender:
    """fio with io_uring, O_DIRECT, 4 MiB, depth 8.

    Its own job time counts: from the first write to the end of its fsync, without its start-up and preallocation.
    """

    def save(state: State, path: Path) -> Timing:
        # fio leaves out a last block that is not whole.
        timing = _run_fio(path, "write", -(-bytes_of(state) // BLOCK_BYTES) * BLOCK_BYTES)
        sync_directory(path.parent)
        return timing

    def load(path: Path, _specs: Mapping[str, Spec]) -> Timing:
        return _run_fio(path, "read", path.stat().st_size)

    return Contender("fio", "ceiling", save, load, direct_writes=True, suffix=".raw")


def _raw_ring() -> Contender:
    """One ring, one thread, O_DIRECT, 4 MiB, depth 8."""

    def save(state: State, path: Path) -> Timing:
        length = _padded(bytes_of(state))
        with (
            _slots() as slots,
            _stopwatch() as watch,
            _opened(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT) as fd,
        ):
            # On ext4, XFS and tmpfs this is fallocate mode 0, as a save does; elsewhere glibc may write zeros.
            os.posix_fallocate(fd, 0, length)
            _transfer(fd, "write", slots, length)
            os.fsync(fd)
            sync_directory(path.parent)
        return watch.timing()

    def load(path: Path, _specs: Mapping[str, Spec]) -> Timing:
        with _slots() as slots, _stopwatch() as watch, _opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
            _transfer(fd, "read", slots, os.fstat(fd).st_size)
        return watch.timing()

    return Contender("raw ring", "ceiling", save, load, direct_writes=True, suffix=".raw")


def _buffered() -> Contender:
    """pwrite straight from the tensors, read into one buffer, 4 MiB at a time, through the page cache."""

    def save(state: State, path: Path) -> Timing:
        with _stopwatch() as watch, _opened(path, os.O_WRONLY | os.O_CREAT) as fd:
            os.posix_fallocate(fd, 0, bytes_of(state))
            for piece in _pieces(state):
                while piece:
                    piece = piece[os.write(fd, piece) :]
            os.fsync(fd)
            sync_directory(path.parent)
        return watch.timing()

    def load(path: Path, _specs: Mapping[str, Spec]) -> Timing:
        with _slots(1) as slots, _stopwatch() as watch, _opened(path, os.O_RDONLY) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while os.readv(fd, [slots]):
                pass
        return watch.timing()

    return Contender("buffered", "ceiling", save, load, direct_writes=False, suffix=".raw")


@dataclass
class _Watch:
    started_ns: int
    cpu_started_s: float
    stopped: Timing | None = None

    def timing(self) -> Timing:
        assert self.stopped is not None
        return self.stopped


@contextlib.contextmanager
def _stopwatch() -> Iterator[_Watch]:
    watch = _Watch(time.perf_counter_ns(), _cpu_s())
    yield watch
    watch.stopped = Timing((time.perf_counter_ns() - watch.started_ns) / 1e9, _cpu_s() - watch.cpu_started_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _slots(count: int = DEPTH) -> Iterator[mmap.mmap]:
    """Page-aligned memory, written once: else the kernel would map zero pages, or fault, under the clock."""
    with mmap.mmap(-1, count * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as slots:
        slots[:] = os.urandom(4096) * (len(slots) // 4096)
        yield slots


def _padded(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def _transfer(fd: int, direction: Literal["read", "write"], slots: mmap.mmap, length: int) -> None:
    """Whole blocks at full depth, then what is left of the last one. `length` is a multiple of a page."""
    whole, rest = divmod(length, BLOCK_BYTES)
    with Ring(DEPTH) as ring:
        offsets = range(0, whole * BLOCK_BYTES, BLOCK_BYTES)
        ring.run_transfers(fd, direction, slots, offsets, block_bytes=BLOCK_BYTES, depth=DEPTH)
        if rest:
            ring.run_transfers(fd, direction, slots, [whole * BLOCK_BYTES], block_bytes=rest, depth=1)


def _pieces(state: State) -> Iterator[memoryview]:
    for tensor in state.values():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(raw), BLOCK_BYTES):
            yield raw[start : start + BLOCK_BYTES]


def _run_fio(path: Path, direction: Literal["read", "write"], length: int) -> Timing:
    command = [
        "fio",
        "--name=ceiling",
        f"--filename={path}",
        f"--rw={direction}",
        f"--size={length}",
        f"--bs={BLOCK_BYTES}",
        f"--iodepth={DEPTH}",
        "--ioengine=io_uring",
        "--direct=1",
        "--thread",
        "--fallocate=native",
        "--output-format=json",
    ]
    if direction == "write":
        command.append("--end_fsync=1")
    else:
        # Without it fio drops the page cache itself, under its own clock.
        command.append("--invalidate=0")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fio: {(done.stderr or done.stdout).strip()[-400:]}")
    # fio prints warnings before the JSON.
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    if job["error"] or job[direction]["io_bytes"] < length:
        raise RuntimeError(f"fio moved {job[direction]['io_bytes']} of {length} bytes, error {job['error']}")
    # Milliseconds; holds the final fsync.
    elapsed_s = job["job_runtime"] / 1e3
    return Timing(elapsed_s, elapsed_s * (job["usr_cpu"] + job["sys_cpu"]) / 100)
