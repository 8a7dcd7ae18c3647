"""Typed face of the compiled engine. No logic: see native/include/striate.h."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

ALIGN: Final[int]  # 4096, bytes
# Structured dtypes with the field names of struct st_job, st_extent, st_result.
JOB_DTYPE: Final[np.dtype[np.void]]  # digest is ("u1", (16,))
EXTENT_DTYPE: Final[np.dtype[np.void]]
RESULT_DTYPE: Final[np.dtype[np.void]]
GROUP_DTYPE: Final[np.dtype[np.void]]
COPY_DTYPE: Final[np.dtype[np.void]]

ECORRUPT: Final[int]
ECANCELED: Final[int]
ETRUNCATED: Final[int]
ERING: Final[int]
EPLAN: Final[int]
ESKIPPED: Final[int]
EHUNG: Final[int]
EINPUT: Final[int]

JOB_CHECKSUM: Final[int]
JOB_STABLE: Final[int]
JOB_CAREFUL: Final[int]

@dataclass(frozen=True)
class Fault:
    # "any", "open", "close", "lock", "chmod", "chown", "allocate", "truncate", "write", "read", "sync",
    # "sync_directory", "rename", "unlink", "mkdir"
    op: str
    kind: Literal["error", "short", "cut", "hang"] = "error"
    nth: int = 0
    count: int = 1  # 0: for ever
    value: int = 5  # errno; of "short", the bytes that a transfer answers at most; of "hang", milliseconds (0: an hour)
    drive: bytes = b""  # only what lies below a path that begins so; at most 255 bytes

@dataclass(frozen=True)
class Trace:
    op: str
    result: int
    fd: int
    offset: int  # also: flags of open, mode of chmod
    length: int
    name: bytes | None
    to: bytes | None
    data: bytes | None
    where: bytes | None  # path of fd, or of the directory

@dataclass(frozen=True)
class File:
    fd: int
    direct: bool = False
    mem_align: int = 0  # bytes, 0: unknown
    offset_align: int = 0

@dataclass(frozen=True)
class FileStats:
    bytes: int  # moved, padding included
    transfers: int
    busy_s: float  # with at least one transfer in flight
    flight_s: float  # of all transfers, summed
    errors: int

@dataclass(frozen=True)
class Stats:
    engine: str  # "uring", "posix", "fault(uring)", ...
    bytes: int
    zero_copy_bytes: int
    transfers: int
    retries: int
    wait_s: float
    work_s: float
    elapsed_s: float
    workers_count: int
    depth: int
    registered_workers: int
    register_error: int
    buffered_files: int
    rings_refused: int
    slot_bytes: int
    priority_error: int
    files: tuple[FileStats, ...]

class RunError(Exception):
    """First hard error of a run. code: -errno or one of the codes above; detail: -errno of the ring call for ERING."""

    code: int
    detail: int
    job: int
    file: int
    offset: int
    stats: Stats

class Io:
    """The drive interface. Methods raise OSError(errno, strerror) with nothing else; the caller adds the path."""

    def __init__(
        self,
        kind: Literal["uring", "posix"],
        *,
        faults: Sequence[Fault] = (),
        trace: bool = False,  # wrap in the fault engine even with no faults, and copy what writes carry
    ) -> None: ...
    @property
    def name(self) -> str: ...
    def open(self, dirfd: int, name: bytes, flags: int, mode: int = 0o666) -> int: ...
    def close(self, fd: int) -> None: ...
    def lock(self, fd: int) -> None: ...  # BlockingIOError when another holds it
    def chmod(self, fd: int, mode: int) -> None: ...
    def chown(self, fd: int, uid: int, gid: int) -> None: ...
    def allocate(self, fd: int, length: int) -> None: ...
    def truncate(self, fd: int, length: int) -> None: ...
    def sync(self, fd: int) -> None: ...
    def sync_directory(self, dirfd: int) -> None: ...
    def rename(self, dirfd: int, old: bytes, new: bytes, to_dirfd: int | None = None) -> None: ...
    def mkdir(self, dirfd: int, name: bytes, mode: int = 0o777) -> None: ...  # FileExistsError
    def unlink(self, dirfd: int, name: bytes) -> None: ...
    def read(self, fd: int, length: int, offset: int) -> bytes: ...  # EOFError when the file ends before
    def run(
        self,
        direction: Literal["write", "read"],
        files: Sequence[File],
        jobs: NDArray[np.void],
        extents: NDArray[np.void],
        *,
        keep_going: bool = False,
        workers_max: int = 0,
        depth: int = 0,
        budget_bytes: int = 0,
        register_buffers: bool = True,
        progress: Callable[[int], None] | None = None,  # bytes done, about every 100 ms, and once at the end
        groups: NDArray[np.void] | None = None,
        matrix: bytes = b"",
        copies: NDArray[np.void] | None = None,
        max_bandwidth: int = 0,  # bytes/s of the run, 0: no limit
        file_max_bandwidth: int = 0,
        idle_priority: bool = False,
        hang_timeout_s: float = 0.0,  # 0: waits for ever, and may borrow memory
    ) -> tuple[NDArray[np.void], Stats]:
        """Blocks with the GIL released, looks at Python's signals every 100 ms. A signal handler (or progress)
        that raises cancels the run, waits for what is in flight and lets the exception through. With hang_timeout_s
        it does not wait longer than that for a drive, nor after a second exception: the run is then given up too.
        Memory in extents and the arrays must stay alive until this returns.
        ValueError: a wrong option or table, with the job's index; OSError ENOMEM: one slot does not fit budget_bytes;
        RunError: the first hard error; EHUNG with the file that did not answer, after which threads, descriptors and
        these tables stay as they are."""
    def traces(self) -> list[Trace]: ...

@dataclass(frozen=True)
class Probe:
    setup_error: int
    features: int
    register_error: int

# Any C-contiguous buffer -> 16 bytes, canonical (big-endian) XXH3-128.
def checksum(data: object, seed: int) -> bytes: ...
def checksum_level() -> str: ...
def block_seeds(uuid: bytes, first: int, count: int) -> NDArray[np.uint64]: ...
def probe() -> Probe: ...
def direct_alignment(fd: int) -> tuple[int, int] | None: ...

# Writable bytes over memory that owner keeps alive.
def memory_view(address: int, length: int, owner: object) -> memoryview: ...

# madvise(MADV_HUGEPAGE) of the whole 2 MiB pages inside; never fails.
def advise_huge_pages(address: int, length: int) -> None: ...
