# cython: language_level=3, boundscheck=False, wraparound=False
"""The typed bridge to the C engine: tables checked, GIL released, signals
looked at. No decisions: what is written where is the caller's."""

import os
import time
from dataclasses import dataclass

import numpy as np

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, Py_buffer, PyBuffer_FillInfo, PyBuffer_Release, \
    PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset


cdef extern from "<sys/mman.h>" nogil:
    int madvise(void *addr, size_t length, int advice)
    enum: MADV_HUGEPAGE


cdef extern from "striate.h" nogil:
    enum: ST_ALIGN
    enum: ST_DIGEST_BYTES
    enum: ST_ECORRUPT
    enum: ST_ECANCELED
    enum: ST_ETRUNCATED
    enum: ST_ERING
    enum: ST_EPLAN
    enum: ST_ESKIPPED
    enum: ST_EHUNG
    enum: ST_EINPUT
    enum: ST_OP_ANY
    enum: ST_OP_OPEN
    enum: ST_OP_CLOSE
    enum: ST_OP_LOCK
    enum: ST_OP_CHMOD
    enum: ST_OP_CHOWN
    enum: ST_OP_ALLOCATE
    enum: ST_OP_TRUNCATE
    enum: ST_OP_WRITE
    enum: ST_OP_READ
    enum: ST_OP_SYNC
    enum: ST_OP_SYNC_DIRECTORY
    enum: ST_OP_RENAME
    enum: ST_OP_UNLINK
    enum: ST_OP_MKDIR
    enum: ST_FAULT_ERROR
    enum: ST_FAULT_SHORT
    enum: ST_FAULT_CUT
    enum: ST_FAULT_HANG
    enum: ST_JOB_CHECKSUM
    enum: ST_JOB_STABLE
    enum: ST_JOB_CAREFUL
    enum: ST_WRITE
    enum: ST_READ

    struct st_io:
        pass
    int st_io_uring(st_io **out)
    int st_io_posix(st_io **out)
    void st_io_free(st_io *io)
    const char *st_io_name(const st_io *io)
    int st_open(st_io *io, int dirfd, const char *name, int flags, unsigned mode)
    int st_close(st_io *io, int fd)
    int st_lock(st_io *io, int fd)
    int st_chmod(st_io *io, int fd, unsigned mode)
    int st_chown(st_io *io, int fd, unsigned uid, unsigned gid)
    int st_allocate(st_io *io, int fd, uint64_t length)
    int st_truncate(st_io *io, int fd, uint64_t length)
    int st_sync(st_io *io, int fd)
    int st_sync_directory(st_io *io, int dirfd)
    int st_rename(st_io *io, int dirfd, const char *old, int to_dirfd, const char *new)
    int st_unlink(st_io *io, int dirfd, const char *name)
    int st_mkdir(st_io *io, int dirfd, const char *name, unsigned mode)
    int st_read(st_io *io, int fd, void *buf, uint64_t length, uint64_t offset)

    struct st_fault:
        uint32_t op
        uint32_t kind
        uint64_t nth
        uint64_t count
        uint64_t value
        char drive[256]
    struct st_trace:
        uint32_t op
        int32_t result
        int32_t fd
        uint32_t flags
        uint64_t offset
        uint64_t length
        const char *name
        const char *to
        const char *where
        const uint8_t *data
    int st_io_fault(st_io **out, st_io *inner, const st_fault *faults, size_t faults_count, bint record_data)
    size_t st_trace_count(const st_io *io)
    int st_trace_get(const st_io *io, size_t index, st_trace *out)

    struct st_extent:
        uint64_t addr
        uint64_t length
    struct st_job:
        uint64_t offset
        uint64_t length
        uint64_t extent_first
        uint32_t extents_count
        uint32_t file
        uint64_t seed
        uint32_t flags
        uint32_t copies_count
        uint64_t copies_first
        uint8_t digest[16]
    struct st_copy:
        uint64_t offset
        uint32_t file
    struct st_group:
        uint64_t job_first
        uint64_t matrix_first
        uint32_t inputs_count
        uint32_t outputs_count
    struct st_result:
        int32_t code
        uint32_t failed_copies
        int32_t failed_code
        uint8_t digest[16]
    struct st_file_stats:
        uint64_t bytes
        uint64_t transfers
        uint64_t busy_ns
        uint64_t flight_ns
        uint64_t errors
    struct st_file:
        int32_t fd
        uint32_t direct
        uint32_t mem_align
        uint32_t offset_align
    struct st_plan:
        uint32_t direction
        uint32_t keep_going
        uint32_t workers_max
        uint32_t depth
        uint64_t budget_bytes
        uint32_t register_buffers
        uint32_t files_count
        st_file *files
        const st_job *jobs
        uint64_t jobs_count
        const st_extent *extents
        uint64_t extents_count
        st_result *results
        const st_group *groups
        uint64_t groups_count
        const uint8_t *matrix
        uint64_t matrix_bytes
        const st_copy *copies
        uint64_t copies_count
        st_file_stats *file_stats
        uint64_t max_bandwidth
        uint64_t file_max_bandwidth
        uint32_t idle_priority
        uint32_t no_borrow
    struct st_failure:
        int32_t code
        int32_t detail
        uint32_t file
        uint64_t job
        uint64_t offset
    struct st_stats:
        uint64_t bytes
        uint64_t zero_copy_bytes
        uint64_t transfers
        uint64_t retries
        uint64_t wait_ns
        uint64_t work_ns
        uint32_t workers_count
        uint32_t depth
        uint32_t registered_workers
        uint32_t register_error
        uint32_t buffered_files
        uint32_t rings_refused
        uint32_t priority_error
        uint64_t slot_bytes
    struct st_run:
        pass
    const char *st_plan_check(const st_plan *plan, uint64_t *job)
    int st_run_start(st_io *io, st_plan *plan, st_run **out)
    int st_run_wait(st_run *run, int timeout_ms)
    void st_run_cancel(st_run *run)
    uint64_t st_run_bytes(const st_run *run)
    int st_run_finish(st_run *run, st_stats *stats, st_failure *failure)
    void st_run_free(st_run *run)
    int st_run_hung(st_run *run, uint64_t timeout_ns, uint32_t *file)
    void st_run_abandon(st_run *run)

    const char *st_checksum_level()
    void st_checksum(const void *data, size_t length, uint64_t seed, uint8_t *digest)
    uint64_t st_block_seed(const uint8_t *uuid, uint64_t index)

    struct st_probe:
        int32_t setup_error
        uint32_t features
        int32_t register_error
    int st_probe_uring(st_probe *out)
    int st_direct_alignment(int fd, uint32_t *mem_align, uint32_t *offset_align)


cdef enum:
    # Python's signals are looked at, and progress is told, this often.
    WAIT_MS = 100
    # Below this a checksum takes less time than giving up the GIL.
    CHECKSUM_NOGIL_BYTES = 65536

ALIGN = ST_ALIGN
ECORRUPT = ST_ECORRUPT
ECANCELED = ST_ECANCELED
ETRUNCATED = ST_ETRUNCATED
ERING = ST_ERING
EPLAN = ST_EPLAN
ESKIPPED = ST_ESKIPPED
EHUNG = ST_EHUNG
EINPUT = ST_EINPUT
JOB_CHECKSUM = ST_JOB_CHECKSUM
JOB_STABLE = ST_JOB_STABLE
JOB_CAREFUL = ST_JOB_CAREFUL

# Offsets come from the compiler, so that the two sides cannot drift apart.
JOB_DTYPE = np.dtype({
    "names": ["offset", "length", "extent_first", "extents_count", "file", "seed", "flags", "copies_count",
              "copies_first", "digest"],
    "formats": ["u8", "u8", "u8", "u4", "u4", "u8", "u4", "u4", "u8", ("u1", (ST_DIGEST_BYTES,))],
    "offsets": [
        <size_t>&(<st_job *>NULL).offset,
        <size_t>&(<st_job *>NULL).length,
        <size_t>&(<st_job *>NULL).extent_first,
        <size_t>&(<st_job *>NULL).extents_count,
        <size_t>&(<st_job *>NULL).file,
        <size_t>&(<st_job *>NULL).seed,
        <size_t>&(<st_job *>NULL).flags,
        <size_t>&(<st_job *>NULL).copies_count,
        <size_t>&(<st_job *>NULL).copies_first,
        <size_t>(<st_job *>NULL).digest,
    ],
    "itemsize": sizeof(st_job),
    "aligned": True,
})
EXTENT_DTYPE = np.dtype({
    "names": ["addr", "length"],
    "formats": ["u8", "u8"],
    "offsets": [<size_t>&(<st_extent *>NULL).addr, <size_t>&(<st_extent *>NULL).length],
    "itemsize": sizeof(st_extent),
    "aligned": True,
})
GROUP_DTYPE = np.dtype({
    "names": ["job_first", "matrix_first", "inputs_count", "outputs_count"],
    "formats": ["u8", "u8", "u4", "u4"],
    "offsets": [
        <size_t>&(<st_group *>NULL).job_first,
        <size_t>&(<st_group *>NULL).matrix_first,
        <size_t>&(<st_group *>NULL).inputs_count,
        <size_t>&(<st_group *>NULL).outputs_count,
    ],
    "itemsize": sizeof(st_group),
    "aligned": True,
})
COPY_DTYPE = np.dtype({
    "names": ["offset", "file"],
    "formats": ["u8", "u4"],
    "offsets": [<size_t>&(<st_copy *>NULL).offset, <size_t>&(<st_copy *>NULL).file],
    "itemsize": sizeof(st_copy),
    "aligned": True,
})
RESULT_DTYPE = np.dtype({
    "names": ["code", "failed_copies", "failed_code", "digest"],
    "formats": ["i4", "u4", "i4", ("u1", (ST_DIGEST_BYTES,))],
    "offsets": [
        <size_t>&(<st_result *>NULL).code,
        <size_t>&(<st_result *>NULL).failed_copies,
        <size_t>&(<st_result *>NULL).failed_code,
        <size_t>(<st_result *>NULL).digest,
    ],
    "itemsize": sizeof(st_result),
    "aligned": True,
})

OPS = {
    "any": ST_OP_ANY,
    "open": ST_OP_OPEN,
    "close": ST_OP_CLOSE,
    "lock": ST_OP_LOCK,
    "chmod": ST_OP_CHMOD,
    "chown": ST_OP_CHOWN,
    "allocate": ST_OP_ALLOCATE,
    "truncate": ST_OP_TRUNCATE,
    "write": ST_OP_WRITE,
    "read": ST_OP_READ,
    "sync": ST_OP_SYNC,
    "sync_directory": ST_OP_SYNC_DIRECTORY,
    "rename": ST_OP_RENAME,
    "unlink": ST_OP_UNLINK,
    "mkdir": ST_OP_MKDIR,
}
OP_NAMES = {number: name for name, number in OPS.items()}
FAULT_KINDS = {"error": ST_FAULT_ERROR, "short": ST_FAULT_SHORT, "cut": ST_FAULT_CUT, "hang": ST_FAULT_HANG}

CODE_WORDS = {
    ST_ECORRUPT: "checksum mismatch",
    ST_ECANCELED: "cancelled",
    ST_ETRUNCATED: "the file ends too early",
    ST_ERING: "io_uring failed",
    ST_EPLAN: "bad job table",
    ST_ESKIPPED: "not run",
    ST_EHUNG: "no answer in time",
    ST_EINPUT: "an input of its group failed",
}


@dataclass(frozen=True)
class Fault:
    op: str
    kind: str = "error"
    nth: int = 0
    count: int = 1
    value: int = 5
    drive: bytes = b""


@dataclass(frozen=True)
class Trace:
    op: str
    result: int
    fd: int
    offset: int
    length: int
    name: bytes | None
    to: bytes | None
    data: bytes | None
    where: bytes | None


@dataclass(frozen=True)
class File:
    fd: int
    direct: bool = False
    mem_align: int = 0
    offset_align: int = 0


@dataclass(frozen=True)
class FileStats:
    bytes: int
    transfers: int
    busy_s: float
    flight_s: float
    errors: int


@dataclass(frozen=True)
class Stats:
    engine: str
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
    files: tuple


@dataclass(frozen=True)
class Probe:
    setup_error: int
    features: int
    register_error: int


class RunError(Exception):
    """The first hard error of a run."""

    def __init__(self, code, detail, job, file, offset, stats):
        if code in CODE_WORDS:
            words = CODE_WORDS[code]
            if detail:
                words += f" ({os.strerror(-detail)})"
        else:
            words = os.strerror(-code)
        super().__init__(f"{words}: job {job}, file {file}, offset {offset}")
        self.code = code
        self.detail = detail
        self.job = job
        self.file = file
        self.offset = offset
        self.stats = stats

    def __reduce__(self):
        return type(self), (self.code, self.detail, self.job, self.file, self.offset, self.stats)


cdef int check(int ret) except -1:
    """ret of a C call; negative is raised."""
    if ret >= 0:
        return ret
    if ret == ST_ETRUNCATED:
        raise EOFError("the file ends before the bytes asked for")
    raise OSError(-ret, os.strerror(-ret))


cdef uint64_t address_of(table, str name, dtype) except? 0:
    """Where a table lies, once it is known to be what C takes it for."""
    if not isinstance(table, np.ndarray):
        raise ValueError(f"{name} must be a numpy array, not {type(table).__name__}")
    if table.dtype != dtype:
        raise ValueError(f"{name} must have dtype {name.upper().rstrip('S')}_DTYPE, not {table.dtype}")
    if table.ndim != 1 or not table.flags.c_contiguous or not table.flags.aligned:
        raise ValueError(f"{name} must be one-dimensional, contiguous and aligned")
    return <uint64_t><uintptr_t>table.ctypes.data


# Thirty years: its nanoseconds fit 64 bits.
TIMEOUT_MAX_S = 1_000_000_000

# What runs that were given up still look at, for as long as their drives hang.
ABANDONED = []


cdef class Io:
    """The drive interface over one engine. Close nothing under it: descriptors are the caller's."""

    cdef st_io *io

    def __init__(self, kind, *, faults=(), trace=False):
        cdef st_io *inner = NULL
        cdef st_fault *rules
        cdef int ret

        if self.io != NULL:
            raise TypeError("an Io is initialised once")
        if kind not in ("uring", "posix"):
            raise ValueError(f"kind must be 'uring' or 'posix', not {kind!r}")
        faults = list(faults)
        for fault in faults:
            if fault.op not in OPS:
                raise ValueError(f"unknown operation {fault.op!r}")
            if fault.kind not in FAULT_KINDS:
                raise ValueError(f"unknown kind of fault {fault.kind!r}")
            if len(fault.drive) > 255:
                raise ValueError("the drive of a fault has at most 255 bytes")
            if fault.nth < 0 or fault.count < 0 or fault.value < 0:
                raise ValueError("nth, count and value of a fault are not negative")
        check(st_io_uring(&inner) if kind == "uring" else st_io_posix(&inner))
        if not faults and not trace:
            self.io = inner
            return
        rules = <st_fault *>calloc(len(faults) + 1, sizeof(st_fault))
        if rules == NULL:
            st_io_free(inner)
            raise MemoryError()
        try:
            for i, fault in enumerate(faults):
                rules[i].op = OPS[fault.op]
                rules[i].kind = FAULT_KINDS[fault.kind]
                rules[i].nth = fault.nth
                rules[i].count = fault.count
                rules[i].value = fault.value
                memcpy(rules[i].drive, <const char *>fault.drive, len(fault.drive))
            check(st_io_fault(&self.io, inner, rules, len(faults), trace))
        except BaseException:
            st_io_free(inner)
            raise
        finally:
            free(rules)

    def __dealloc__(self):
        st_io_free(self.io)

    @property
    def name(self):
        return st_io_name(self.io).decode()

    def open(self, int dirfd, bytes name not None, int flags, unsigned mode=0o666):
        cdef const char *text = c_name(name)
        cdef int ret
        with nogil:
            ret = st_open(self.io, dirfd, text, flags, mode)
        return check(ret)

    def close(self, int fd):
        cdef int ret
        with nogil:
            ret = st_close(self.io, fd)
        check(ret)

    def lock(self, int fd):
        check(st_lock(self.io, fd))

    def chmod(self, int fd, unsigned mode):
        cdef int ret
        with nogil:
            ret = st_chmod(self.io, fd, mode)
        check(ret)

    def chown(self, int fd, uid, gid):
        # -1: leave as it is, as with chown(2).
        cdef unsigned new_uid = <unsigned><int64_t>uid
        cdef unsigned new_gid = <unsigned><int64_t>gid
        cdef int ret
        with nogil:
            ret = st_chown(self.io, fd, new_uid, new_gid)
        check(ret)

    def allocate(self, int fd, uint64_t length):
        cdef int ret
        with nogil:
            ret = st_allocate(self.io, fd, length)
        check(ret)

    def truncate(self, int fd, uint64_t length):
        cdef int ret
        with nogil:
            ret = st_truncate(self.io, fd, length)
        check(ret)

    def sync(self, int fd):
        cdef int ret
        with nogil:
            ret = st_sync(self.io, fd)
        check(ret)

    def sync_directory(self, int dirfd):
        cdef int ret
        with nogil:
            ret = st_sync_directory(self.io, dirfd)
        check(ret)

    def rename(self, int dirfd, bytes old not None, bytes new not None, to_dirfd=None):
        cdef const char *before = c_name(old)
        cdef const char *after = c_name(new)
        cdef int there = dirfd if to_dirfd is None else to_dirfd
        cdef int ret
        with nogil:
            ret = st_rename(self.io, dirfd, before, there, after)
        check(ret)

    def mkdir(self, int dirfd, bytes name not None, unsigned mode=0o777):
        cdef const char *text = c_name(name)
        cdef int ret
        with nogil:
            ret = st_mkdir(self.io, dirfd, text, mode)
        check(ret)

    def unlink(self, int dirfd, bytes name not None):
        cdef const char *text = c_name(name)
        cdef int ret
        with nogil:
            ret = st_unlink(self.io, dirfd, text)
        check(ret)

    def read(self, int fd, uint64_t length, uint64_t offset):
        cdef bytes out
        cdef char *to
        cdef int ret
        if length > <uint64_t>(<size_t>-1 >> 1):
            raise OverflowError("length is larger than memory can be")
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>length)
        to = PyBytes_AS_STRING(out)
        with nogil:
            ret = st_read(self.io, fd, to, length, offset)
        check(ret)
        return out

    def run(self, direction, files, jobs, extents, *, bint keep_going=False, unsigned workers_max=0,
            unsigned depth=0, uint64_t budget_bytes=0, bint register_buffers=True, progress=None,
            groups=None, bytes matrix=b"", copies=None, uint64_t max_bandwidth=0, uint64_t file_max_bandwidth=0,
            bint idle_priority=False, double hang_timeout_s=0.0):
        cdef st_plan *plan
        cdef st_file *table
        cdef st_file_stats *facts
        cdef const char *wrong
        cdef uint64_t job = 0
        cdef bint abandoned = False

        if direction not in ("write", "read"):
            raise ValueError(f"direction must be 'write' or 'read', not {direction!r}")
        if not 0 <= hang_timeout_s <= TIMEOUT_MAX_S:
            raise ValueError(f"hang_timeout_s is 0 to {TIMEOUT_MAX_S} seconds, not {hang_timeout_s}")
        files = list(files)
        address_of(jobs, "jobs", JOB_DTYPE)
        results = np.zeros(len(jobs), RESULT_DTYPE)
        # On the heap: an abandoned run looks at its plan for as long as its drive hangs.
        plan = <st_plan *>calloc(1, sizeof(st_plan))
        table = <st_file *>calloc(len(files) + 1, sizeof(st_file))
        facts = <st_file_stats *>calloc(len(files) + 1, sizeof(st_file_stats))
        try:
            if plan == NULL or table == NULL or facts == NULL:
                raise MemoryError()
            plan.direction = ST_WRITE if direction == "write" else ST_READ
            plan.keep_going = keep_going
            plan.workers_max = workers_max
            plan.depth = depth
            plan.budget_bytes = budget_bytes
            plan.register_buffers = register_buffers
            plan.jobs = <const st_job *><uintptr_t>address_of(jobs, "jobs", JOB_DTYPE)
            plan.jobs_count = len(jobs)
            plan.extents = <const st_extent *><uintptr_t>address_of(extents, "extents", EXTENT_DTYPE)
            plan.extents_count = len(extents)
            plan.results = <st_result *><uintptr_t>address_of(results, "results", RESULT_DTYPE)
            if groups is not None:
                plan.groups = <const st_group *><uintptr_t>address_of(groups, "groups", GROUP_DTYPE)
                plan.groups_count = len(groups)
            plan.matrix = <const uint8_t *>PyBytes_AS_STRING(matrix)
            plan.matrix_bytes = len(matrix)
            if copies is not None:
                plan.copies = <const st_copy *><uintptr_t>address_of(copies, "copies", COPY_DTYPE)
                plan.copies_count = len(copies)
            plan.max_bandwidth = max_bandwidth
            plan.file_max_bandwidth = file_max_bandwidth
            plan.idle_priority = idle_priority
            plan.no_borrow = hang_timeout_s > 0
            plan.files_count = len(files)
            plan.files = table
            plan.file_stats = facts
            for i, file in enumerate(files):
                table[i].fd = file.fd
                table[i].direct = bool(file.direct)
                table[i].mem_align = file.mem_align
                table[i].offset_align = file.offset_align
            with nogil:
                wrong = st_plan_check(plan, &job)
            if wrong != NULL:
                raise ValueError(f"{wrong.decode()} (job {job})")
            stats = self.drive(plan, progress, hang_timeout_s, &abandoned)
        finally:
            if abandoned:
                ABANDONED.append((self, jobs, extents, results, groups, matrix, copies))
            else:
                free(plan)
                free(table)
                free(facts)
        return results, stats

    cdef drive(self, st_plan *plan, progress, double hang_timeout_s, bint *abandoned):
        """Starts a run and sees it to its end, whatever happens meanwhile.

        *abandoned, also when something is raised: the plan and its tables must live for ever.
        """
        cdef st_run *run = NULL
        cdef st_stats stats
        cdef st_failure failure
        cdef uint64_t timeout_ns = <uint64_t>(hang_timeout_s * 1e9)
        cdef uint32_t hung_file = 0
        cdef bint done = False
        cdef bint hung = False
        cdef int ret

        memset(&stats, 0, sizeof(stats))
        started = time.monotonic()
        pid = os.getpid()
        with nogil:
            ret = st_run_start(self.io, plan, &run)
        check(ret)
        try:
            while not done:
                with nogil:
                    done = st_run_wait(run, WAIT_MS)
                    if timeout_ns and not done:
                        hung = st_run_hung(run, timeout_ns, &hung_file)
                PyErr_CheckSignals()
                if progress is not None:
                    progress(st_run_bytes(run))
                if os.getpid() != pid:
                    raise RuntimeError("forked in the middle of a run: its threads are the parent's")
                if hung:
                    break
            if not hung:
                with nogil:
                    ret = st_run_finish(run, &stats, &failure)
        finally:
            # After an exception this cancels, and waits for what is in flight:
            # the drive must not touch the caller's memory once it is theirs again.
            # A child that was forked meanwhile (by progress, by a handler) has
            # none of the threads: there, joining them would crash.
            if os.getpid() == pid:
                if timeout_ns and not hung and not done:
                    hung = drain(run, timeout_ns)
                abandoned[0] = hung
                with nogil:
                    if hung:
                        st_run_abandon(run)
                    else:
                        st_run_free(run)
        if hung:
            raise RunError(ST_EHUNG, 0, 0, hung_file, 0, self.facts(plan, &stats, started))
        facts = self.facts(plan, &stats, started)
        if ret < 0:
            raise RunError(failure.code, failure.detail, failure.job, failure.file, failure.offset, facts)
        return facts

    cdef facts(self, st_plan *plan, st_stats *stats, started):
        return Stats(
            engine=self.name,
            bytes=stats.bytes,
            zero_copy_bytes=stats.zero_copy_bytes,
            transfers=stats.transfers,
            retries=stats.retries,
            wait_s=stats.wait_ns / 1e9,
            work_s=stats.work_ns / 1e9,
            elapsed_s=time.monotonic() - started,
            workers_count=stats.workers_count,
            depth=stats.depth,
            registered_workers=stats.registered_workers,
            register_error=stats.register_error,
            buffered_files=stats.buffered_files,
            rings_refused=stats.rings_refused,
            slot_bytes=stats.slot_bytes,
            priority_error=stats.priority_error,
            files=tuple(
                FileStats(
                    plan.file_stats[i].bytes,
                    plan.file_stats[i].transfers,
                    plan.file_stats[i].busy_ns / 1e9,
                    plan.file_stats[i].flight_ns / 1e9,
                    plan.file_stats[i].errors,
                )
                for i in range(plan.files_count)
            ),
        )

    def traces(self):
        cdef size_t count = st_trace_count(self.io)
        cdef st_trace entry
        traces = []
        for index in range(count):
            check(st_trace_get(self.io, index, &entry))
            traces.append(Trace(
                op=OP_NAMES[entry.op],
                result=entry.result,
                fd=entry.fd,
                offset=entry.flags if entry.op in (ST_OP_OPEN, ST_OP_CHMOD) else entry.offset,
                length=entry.length,
                name=None if entry.name == NULL else <bytes>entry.name,
                to=None if entry.to == NULL else <bytes>entry.to,
                data=None if entry.data == NULL else (<const char *>entry.data)[:entry.length],
                where=None if entry.where == NULL else <bytes>entry.where,
            ))
        return traces


cdef bint drain(st_run *run, uint64_t timeout_ns) noexcept:
    """Cancels and waits for what is in flight. True: a drive hangs, or a second interrupt says not to wait for it."""
    cdef uint32_t file = 0
    cdef bint hung = False
    cdef bint done = False

    st_run_cancel(run)
    while not hung and not done:
        with nogil:
            done = st_run_wait(run, WAIT_MS)
            if not done:
                hung = st_run_hung(run, timeout_ns, &file)
        try:
            PyErr_CheckSignals()
        except BaseException:
            # What began the drain is raised on; another interrupt can only mean: now.
            hung = not done
    return hung


cdef const char *c_name(bytes name) except NULL:
    if b"\0" in name:
        raise ValueError("embedded null byte")
    return <const char *>PyBytes_AS_STRING(name)


cdef class Borrowed:
    """Memory at an address, kept alive by its owner, as a buffer."""

    cdef object owner
    cdef void *address
    cdef Py_ssize_t length

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.address, self.length, 0, flags)


def memory_view(uint64_t address, Py_ssize_t length, owner):
    """Writable bytes over memory that owner keeps alive; the view keeps owner."""
    cdef Borrowed memory = Borrowed()
    if length < 0 or (address == 0 and length):
        raise ValueError("no memory lies there")
    memory.owner = owner
    # A buffer of no bytes still needs an address that is not NULL.
    memory.address = <void *><uintptr_t>(address if length else <uint64_t><uintptr_t><void *>memory)
    memory.length = length
    return memoryview(memory)


def advise_huge_pages(uint64_t address, uint64_t length):
    """Asks for huge pages where whole ones (2 MiB) lie inside. Advice: never fails."""
    cdef uint64_t huge = 2 << 20
    cdef uint64_t first, end
    if address > <uint64_t>-1 - length or length < huge:
        return
    first = (address + huge - 1) // huge * huge
    end = (address + length) // huge * huge
    if first < end:
        with nogil:
            madvise(<void *><uintptr_t>first, end - first, MADV_HUGEPAGE)


def checksum(data, uint64_t seed):
    """XXH3-128 of a C-contiguous buffer, 16 bytes, big-endian."""
    cdef uint8_t digest[16]
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len < CHECKSUM_NOGIL_BYTES:
            st_checksum(view.buf, view.len, seed, digest)
        else:
            with nogil:
                st_checksum(view.buf, view.len, seed, digest)
    finally:
        PyBuffer_Release(&view)
    return (<char *>digest)[:16]


def checksum_level():
    return st_checksum_level().decode()


def block_seeds(bytes uuid not None, uint64_t first, Py_ssize_t count):
    """Seeds of blocks first, first + 1, ...: see st_block_seed."""
    cdef const uint8_t *text
    cdef uint64_t[::1] seeds
    cdef Py_ssize_t i
    if len(uuid) != 16:
        raise ValueError(f"a uuid has 16 bytes, not {len(uuid)}")
    if count < 0:
        raise ValueError("count is not negative")
    out = np.empty(count, np.uint64)
    text = <const uint8_t *>PyBytes_AS_STRING(uuid)
    seeds = out
    with nogil:
        for i in range(count):
            seeds[i] = st_block_seed(text, first + i)
    return out


def probe():
    """What this kernel says to a ring of four entries and to one registered page."""
    cdef st_probe answer
    cdef int ret
    with nogil:
        ret = st_probe_uring(&answer)
    check(ret)
    return Probe(setup_error=answer.setup_error, features=answer.features, register_error=answer.register_error)


def direct_alignment(int fd):
    """(memory, offset) alignment of O_DIRECT in bytes, (0, 0) when it is refused, None when the kernel does not say."""
    cdef uint32_t mem_align, offset_align
    cdef int ret
    import errno
    with nogil:
        ret = st_direct_alignment(fd, &mem_align, &offset_align)
    if ret == -errno.ENOTSUP:
        return None
    check(ret)
    return mem_align, offset_align
