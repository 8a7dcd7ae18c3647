"""Job tables for the engine's tests: one stretch of memory, one file, cut into blocks and pieces."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from striate import _engine
from striate._engine import ALIGN, EXTENT_DTYPE, JOB_CHECKSUM, JOB_DTYPE, File, Io

Kind = Literal["uring", "posix"]
KINDS: tuple[Kind, ...] = ("uring", "posix")
BLOCK = 64 << 10  # small, so that a test has many blocks in a few megabytes

Bytes = NDArray[np.uint8]
Table = NDArray[np.void]


def memory(length: int, *, misalign: int = 0) -> Bytes:
    """Zeroed memory that begins ``misalign`` bytes after a page boundary and lives as long as the array."""
    pages = mmap.mmap(-1, length + misalign + ALIGN)
    return np.frombuffer(pages, np.uint8)[misalign : misalign + length]


def address(array: Bytes) -> int:
    return int(array.ctypes.data)


def tables(
    data: Bytes,
    *,
    block_bytes: int = BLOCK,
    cuts: Sequence[int] = (),
    flags: int = JOB_CHECKSUM,
    file: int = 0,
) -> tuple[Table, Table]:
    """``data`` as blocks of one file; ``cuts`` are places inside it where an extent ends and the next one begins."""
    bounds = sorted({0, len(data), *cuts, *range(0, len(data), block_bytes)})
    starts = np.array(bounds[:-1], np.uint64)
    extents = np.zeros(len(starts), EXTENT_DTYPE)
    extents["addr"] = np.uint64(address(data)) + starts
    extents["length"] = np.diff(np.array(bounds, np.uint64))
    offsets = np.arange(0, len(data), block_bytes, dtype=np.uint64)
    jobs = np.zeros(len(offsets), JOB_DTYPE)
    jobs["offset"] = offsets
    jobs["length"] = np.minimum(np.uint64(block_bytes), np.uint64(len(data)) - offsets)
    jobs["extent_first"] = np.searchsorted(starts, offsets)
    jobs["extents_count"] = np.diff(np.append(jobs["extent_first"], np.uint64(len(starts))))
    jobs["file"] = file
    jobs["seed"] = offsets * np.uint64(2654435761) + np.uint64(17)
    jobs["flags"] = flags
    return jobs, extents


def digests(data: Bytes, jobs: Table) -> list[bytes]:
    """What each block's checksum is, by an implementation that is not ours."""
    return [
        xxhash.xxh3_128_digest(
            data[int(job["offset"]) : int(job["offset"] + job["length"])].tobytes(), int(job["seed"])
        )
        for job in jobs
    ]


def found_digests(results: Table) -> list[bytes]:
    return [digest.tobytes() for digest in results["digest"]]


@contextlib.contextmanager
def opened(io: Io, folder: Path, name: bytes = b"file", *, direct: bool = True) -> Iterator[File]:
    """A fresh file. ``direct`` where the file system takes it: tmpfs did not before Linux 6.6."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            fd = io.open(directory, name, flags | (os.O_DIRECT if direct else 0))
        except OSError:
            if not direct:
                raise
            direct = False
            fd = io.open(directory, name, flags)
    finally:
        os.close(directory)
    mem_align, offset_align = _engine.direct_alignment(fd) or (0, 0)
    try:
        yield File(fd, direct, mem_align, offset_align)
    finally:
        with contextlib.suppress(OSError):  # faults may reach this one too; the descriptor goes all the same
            io.close(fd)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    """Anonymous memory of this process that is really there."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
