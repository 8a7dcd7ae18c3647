"""One io_uring, close to the metal: queue, submit, wait, in the caller's order and with the kernel's own results.

No retries, no short-transfer handling, no threads: whoever measures or tests the engine wants to see what the kernel
does. What is added is what keeps a mistake from becoming a crash: memory stays alive while the kernel may touch it,
a closed ring and a ring used by two threads at once are errors.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ._liburing import ffi, lib

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1
_CURRENT_POSITION = _U64_MAX  # (__u64)-1: read or write at the file's own position

# Buffers that the kernel may still write to although nobody can wait for them
# any more. They are kept for the life of the process, on purpose.
_abandoned: list[Any] = []


class Completion(NamedTuple):
    """What became of one operation: the caller's ``user_data``, and ``result``: bytes moved or -errno."""

    user_data: int
    result: int


class _Operation(NamedTuple):
    user_data: int
    memory: Any  # the exported buffer, or None: it cannot be freed or resized while this lives
    sqe: Any


def _call_error(call: str, code: int) -> OSError:
    return OSError(code, f"{call}: {os.strerror(code)}")


class Ring:
    """An io_uring with ``entries`` submission slots (1 to 32768; the kernel rounds up to a power of two).

    A context manager. Use it from one thread at a time. ``queue_*`` take a ``user_data`` (0 to 2**64-1, 0 by default)
    that comes back in the Completion; they raise BlockingIOError when all slots are taken until ``submit`` frees them.

    Errors of the ring's own calls are OSError with ``errno`` set and the call's name in the message. Errors of the
    operations are not raised: they are negative results.
    """

    def __init__(self, entries: int = 8) -> None:
        self._ring: Any = None
        self._queued: deque[int] = deque()
        self._operations: dict[int, _Operation] = {}
        self._next_token = 1
        self._fixed: list[Any] = []
        self._busy = threading.Lock()
        self._pid = os.getpid()
        if not 1 <= entries <= _U32_MAX:
            raise ValueError(f"entries is {entries}: give 1 to 32768")
        ring = ffi.new("struct io_uring *")
        params = ffi.new("struct io_uring_params *")
        code = lib.io_uring_queue_init_params(entries, ring, params)
        if code < 0:
            raise _call_error("io_uring_queue_init_params", -code)
        self._ring = ring
        self._params = params
        self._cqe = ffi.new("struct io_uring_cqe **")

    # ---- facts --------------------------------------------------------------

    @property
    def entries_count(self) -> int:
        """Submission slots."""
        return int(self._params.sq_entries)

    @property
    def completions_count(self) -> int:
        """Completion slots."""
        return int(self._params.cq_entries)

    @property
    def features(self) -> int:
        """IORING_FEAT_* as one number; ``striate.liburing.features()`` names them."""
        return int(self._params.features)

    @property
    def queued_count(self) -> int:
        """Operations queued and not yet submitted."""
        return len(self._queued)

    @property
    def in_flight_count(self) -> int:
        """Operations submitted whose completion has not been returned by ``wait``."""
        return len(self._operations) - len(self._queued)

    @property
    def closed(self) -> bool:
        return self._ring is None

    def fileno(self) -> int:
        with _Use(self):
            return int(self._ring.ring_fd)

    # ---- queue --------------------------------------------------------------

    def queue_nop(self, *, user_data: int = 0) -> None:
        """An operation that does nothing and completes with 0."""
        with _Use(self):
            self._queue(user_data, None, lib.io_uring_prep_nop)

    def queue_read(self, fd: int, buffer: Buffer, offset: int | None, *, user_data: int = 0) -> None:
        """Read ``len(buffer)`` bytes at ``offset`` (bytes; None: the file's position) into writable memory."""
        with _Use(self):
            memory, length = _export(buffer, writable=True)
            self._queue(user_data, memory, lib.io_uring_prep_read, _fd(fd), memory, length, _offset(offset))

    def queue_write(self, fd: int, buffer: Buffer, offset: int | None, *, user_data: int = 0) -> None:
        """Write ``len(buffer)`` bytes at ``offset`` (bytes; None: the file's position)."""
        with _Use(self):
            memory, length = _export(buffer, writable=False)
            self._queue(user_data, memory, lib.io_uring_prep_write, _fd(fd), memory, length, _offset(offset))

    def queue_fsync(self, fd: int, *, datasync: bool = False, user_data: int = 0) -> None:
        """fsync, or fdatasync with ``datasync``. Not ordered after writes that are queued or in flight."""
        with _Use(self):
            flags = lib.IORING_FSYNC_DATASYNC if datasync else 0
            self._queue(user_data, None, lib.io_uring_prep_fsync, _fd(fd), flags)

    def queue_read_fixed(
        self,
        fd: int,
        index: int,
        offset: int,
        *,
        start: int = 0,
        length: int | None = None,
        user_data: int = 0,
    ) -> None:
        """As ``queue_read`` into registered buffer ``index``, ``length`` bytes (None: its rest) from ``start`` on."""
        with _Use(self):
            self._queue_fixed(lib.io_uring_prep_read_fixed, fd, index, offset, start, length, user_data)

    def queue_write_fixed(
        self,
        fd: int,
        index: int,
        offset: int,
        *,
        start: int = 0,
        length: int | None = None,
        user_data: int = 0,
    ) -> None:
        """As ``queue_write`` from registered buffer ``index``, ``length`` bytes (None: its rest) from ``start`` on."""
        with _Use(self):
            self._queue_fixed(lib.io_uring_prep_write_fixed, fd, index, offset, start, length, user_data)

    def _queue_fixed(
        self, prepare: Any, fd: int, index: int, offset: int, start: int, length: int | None, user_data: int
    ) -> None:
        if not 0 <= index < len(self._fixed):
            raise IndexError(f"registered buffer {index} of {len(self._fixed)}")
        memory = self._fixed[index]
        size = len(memory)
        length = size - start if length is None else length
        if not (0 <= start <= size and 0 <= length <= size - start):
            raise ValueError(f"start {start} and length {length} do not lie in a buffer of {size} bytes")
        self._queue(user_data, memory, prepare, _fd(fd), memory + start, length, _offset(offset), index)

    # ---- submit and wait ----------------------------------------------------

    def submit(self) -> int:
        """Hand what is queued to the kernel. Returns how many operations it took, which may be fewer than queued."""
        with _Use(self):
            return self._submit()

    def wait(self, timeout_s: float | None = None) -> Completion:
        """The next completion, in the kernel's order. Waits up to ``timeout_s`` seconds (None: for ever).

        Raises TimeoutError when the time is up, RuntimeError when nothing is in flight. Signals are handled while it
        waits; an exception that a handler raises leaves the operation in flight.
        """
        with _Use(self):
            if not self.in_flight_count:
                raise RuntimeError(
                    f"nothing to wait for: {self.queued_count} operations queued, none submitted"
                )
            return self._wait(timeout_s)

    def drain(self) -> list[Completion]:
        """Wait for all that is in flight; completions in the kernel's order."""
        with _Use(self):
            return [self._wait(None) for _ in range(self.in_flight_count)]

    # ---- registered buffers -------------------------------------------------

    def register_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Pin writable buffers so that ``queue_*_fixed`` can name them by index. One set at a time.

        The kernel counts them against RLIMIT_MEMLOCK of an ordinary user: OSError ENOMEM when it does not suffice.
        """
        with _Use(self):
            exported = [_export(buffer, writable=True) for buffer in buffers]
            iovecs = ffi.new("struct iovec[]", [(memory, length) for memory, length in exported])
            code = lib.io_uring_register_buffers(self._ring, iovecs, len(exported))
            if code < 0:
                raise _call_error("io_uring_register_buffers", -code)
            self._fixed = [memory for memory, _ in exported]

    def unregister_buffers(self) -> None:
        """Let the registered buffers go. Waits, in the kernel, for operations that use them."""
        with _Use(self):
            code = lib.io_uring_unregister_buffers(self._ring)
            if code < 0:
                raise _call_error("io_uring_unregister_buffers", -code)
            self._fixed = []

    # ---- the raw ceiling ----------------------------------------------------

    def run_transfers(
        self,
        fd: int,
        direction: Literal["read", "write"],
        buffer: Buffer,
        offsets: Sequence[int],
        *,
        block_bytes: int,
        depth: int,
    ) -> float:
        """Move one block of ``block_bytes`` at each of ``offsets``, ``depth`` of them in flight; seconds it took.

        ``buffer`` is ``depth`` slots of ``block_bytes``, used over and over: this measures transfers, it copies
        nothing. Neither syncs nor opens: that is the caller's, and so is memory aligned for O_DIRECT (``mmap``).
        Raises OSError for a failed or short transfer, with offset and result in the message, when what is in flight
        has drained; ValueError when ``depth`` passes the ring's slots or ``buffer`` is too small.
        """
        if direction not in ("read", "write"):
            raise ValueError(f"direction is {direction!r}: give 'read' or 'write'")
        with _Use(self):
            if self._operations:
                raise RuntimeError("the ring has operations queued or in flight")
            if not 1 <= depth <= self.entries_count:
                raise ValueError(f"depth is {depth}: the ring has {self.entries_count} entries")
            memory, length = _export(buffer, writable=direction == "read", limit=False)
            if not 1 <= block_bytes <= _U32_MAX or depth * block_bytes > length:
                raise ValueError(
                    f"depth {depth} x block_bytes {block_bytes} does not fit a buffer of {length} bytes"
                )
            prepare = lib.io_uring_prep_read if direction == "read" else lib.io_uring_prep_write
            todo = deque(_offset(offset) for offset in offsets)
            checked_fd = _fd(fd)
            slots = deque(range(depth))
            where: dict[int, int] = {}  # offset by slot, of what is in flight
            failure: OSError | None = None
            start: Any = None
            started = time.perf_counter()
            while where or (todo and failure is None):
                while slots and todo and failure is None:
                    offset = todo.popleft()
                    slot = slots.popleft()
                    where[slot] = offset
                    start = memory + slot * block_bytes
                    self._queue(slot, memory, prepare, checked_fd, start, block_bytes, offset)
                while self._queued:
                    self._submit()
                done = self._wait(None)
                offset = where.pop(done.user_data)
                slots.append(done.user_data)
                if done.result != block_bytes and failure is None:
                    if done.result < 0:
                        failure = _call_error(
                            f"{direction} of {block_bytes} bytes at offset {offset}", -done.result
                        )
                    else:
                        failure = OSError(
                            f"{direction} at offset {offset}: {done.result} of {block_bytes} bytes moved"
                        )
            elapsed_s = time.perf_counter() - started
            if failure is None:
                return elapsed_s
            try:
                raise failure
            finally:
                # The error's traceback holds this frame: what it holds in turn would
                # keep the caller's buffer exported for as long as the error is kept.
                del failure, memory, start

    # ---- life ---------------------------------------------------------------

    def close(self) -> None:
        """Cancel what can be cancelled, wait for the rest, give the ring back. A second call does nothing.

        Waits as long as the drive takes. If a signal handler raises meanwhile, the ring is closed all the same, and
        the memory of what is still in flight is never freed.
        """
        if self._ring is None:
            return
        with _Use(self, in_child=True):
            try:
                # A forked child shares the parent's queues: it must neither submit nor reap.
                if self._pid == os.getpid():
                    self._quiesce()
            finally:
                # The kernel takes a ring down in the background: memory may
                # be written to until each of its operations has ended.
                _abandoned.extend(op.memory for op in self._operations.values() if op.memory is not None)
                self._operations.clear()
                self._queued.clear()
                lib.io_uring_queue_exit(self._ring)
                self._ring = None
                self._fixed = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._ring is not None:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        if self._ring is None:
            return "<Ring closed>"
        return (
            f"<Ring entries={self.entries_count} queued={self.queued_count} in_flight={self.in_flight_count}>"
        )

    # ---- inside: the caller holds the ring ------------------------------------

    def _queue(self, user_data: int, memory: Any, prepare: Any, *arguments: Any) -> None:
        """Fill a submission slot. It bears a token of ours, since two operations may have the same user_data."""
        if not 0 <= user_data <= _U64_MAX:
            raise ValueError(f"user_data is {user_data}: give 0 to 2**64-1")
        sqe = lib.io_uring_get_sqe(self._ring)
        if sqe == ffi.NULL:
            raise _call_error("io_uring_get_sqe", errno.EAGAIN)
        prepare(sqe, *arguments)
        token = self._next_token
        self._next_token += 1
        lib.io_uring_sqe_set_data64(sqe, token)
        self._operations[token] = _Operation(user_data, memory, sqe)
        self._queued.append(token)

    def _submit(self) -> int:
        count = lib.io_uring_submit(self._ring)
        if count < 0:
            raise _call_error("io_uring_submit", -count)
        for _ in range(min(count, len(self._queued))):
            self._queued.popleft()
        return count

    def _peek(self) -> Completion | None:
        """One completion if there is one; completions of our own cancellations (token 0) are dropped."""
        while True:
            code = lib.io_uring_peek_cqe(self._ring, self._cqe)
            if code in (-errno.EAGAIN, -errno.EINTR):
                return None
            if code < 0:
                raise _call_error("io_uring_peek_cqe", -code)
            token, result = int(self._cqe[0].user_data), int(self._cqe[0].res)
            lib.io_uring_cqe_seen(self._ring, self._cqe[0])
            operation = self._operations.pop(token, None)
            if operation is not None:
                return Completion(operation.user_data, result)

    def _wait(self, timeout_s: float | None) -> Completion:
        # poll() on the ring instead of the kernel's own time-out: the same on every kernel, and Python looks at its
        # signals and goes on with what is left of the time (PEP 475).
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            done = self._peek()
            if done is not None:
                return done
            poller = select.poll()
            poller.register(int(self._ring.ring_fd), select.POLLIN)
            if deadline is None:
                poller.poll()
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no completion after {timeout_s} s")
            poller.poll(max(1, round(left_s * 1000)))

    def _quiesce(self) -> None:
        """Make what was never submitted harmless, cancel what runs, wait until the kernel holds none of our memory."""
        for token in self._queued:
            operation = self._operations[token]
            lib.io_uring_prep_nop(operation.sqe)
            lib.io_uring_sqe_set_data64(operation.sqe, token)
        running = [token for token in self._operations if token not in self._queued]
        for token in running:
            sqe = lib.io_uring_get_sqe(self._ring)
            while sqe == ffi.NULL:
                if lib.io_uring_submit(self._ring) < 0:
                    return
                sqe = lib.io_uring_get_sqe(self._ring)
            lib.io_uring_prep_cancel64(sqe, token, 0)
            lib.io_uring_sqe_set_data64(sqe, 0)
        if self._operations and lib.io_uring_submit(self._ring) >= 0:
            self._queued.clear()
            while self._operations:
                self._wait(None)


class _Use:
    """Holds a ring for one call. What would be a data race or a use after close in C is an exception here."""

    def __init__(self, ring: Ring, *, in_child: bool = False) -> None:
        self._ring = ring
        self._in_child = in_child

    def __enter__(self) -> None:
        if not self._ring._busy.acquire(blocking=False):
            raise RuntimeError(
                "the ring is in use by another thread, or by the call that a signal interrupted"
            )
        if self._ring._ring is None:
            self._ring._busy.release()
            raise ValueError("the ring is closed")
        if self._ring._pid != os.getpid() and not self._in_child:
            self._ring._busy.release()
            raise RuntimeError(f"the ring belongs to process {self._ring._pid}: a forked child opens its own")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ring._busy.release()


def _export(buffer: Buffer, *, writable: bool, limit: bool = True) -> tuple[Any, int]:
    try:
        memory = ffi.from_buffer("unsigned char[]", buffer, require_writable=writable)
    except (TypeError, ValueError, BufferError) as error:
        wanted = "contiguous, writable" if writable else "contiguous"
        raise TypeError(f"a {wanted} buffer is needed, not {type(buffer).__name__}: {error}") from None
    if limit and len(memory) > _U32_MAX:
        raise ValueError(f"buffer of {len(memory)} bytes: one operation moves less than 4 GiB")
    return memory, len(memory)


def _offset(offset: int | None) -> int:
    if offset is None:
        return _CURRENT_POSITION
    if not 0 <= offset < 2**63:
        raise ValueError(f"offset is {offset}: give 0 or more, or None for the file's position")
    return offset


def _fd(fd: int) -> int:
    if not -(2**31) <= fd < 2**31:
        raise ValueError(f"fd is {fd}: not a descriptor")
    return fd
