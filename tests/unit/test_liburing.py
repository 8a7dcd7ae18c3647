"""striate.liburing against the running kernel: results are the kernel's own, mistakes are errors and not crashes."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from striate.liburing import Completion, Features, Ring, available, features, limits, probe
from striate.liburing._liburing import lib
from support.contents import cycling
from support.sandbox import REFUSABLE, run_python

pytestmark = pytest.mark.needs_io_uring


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring(8) as ring:
        yield ring


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    yield fd
    os.close(fd)


def run_one(ring: Ring) -> Completion:
    assert ring.submit() == 1
    return ring.wait(timeout_s=30)


# ---- operations ---------------------------------------------------------------


@pytest.mark.parametrize("user_data", [0, 1, 2**63, 2**64 - 1])
def test_a_nop_comes_back_with_its_user_data(ring: Ring, user_data: int) -> None:
    ring.queue_nop(user_data=user_data)
    assert run_one(ring) == Completion(user_data, 0)


def test_what_is_written_through_the_ring_is_read_back_through_it(ring: Ring, file: int) -> None:
    wanted = cycling(10_000)
    ring.queue_write(file, wanted, 4096, user_data=1)
    assert run_one(ring) == (1, 10_000)
    ring.queue_fsync(file, user_data=2)
    assert run_one(ring) == (2, 0)
    ring.queue_fsync(file, datasync=True, user_data=3)
    assert run_one(ring) == (3, 0)
    found = bytearray(10_000)
    ring.queue_read(file, found, 4096, user_data=4)
    assert run_one(ring) == (4, 10_000)
    assert bytes(found) == wanted
    assert os.pread(file, 20_000, 0) == bytes(4096) + wanted


def test_a_read_past_the_end_is_short_and_one_beyond_it_zero(ring: Ring, file: int) -> None:
    os.write(file, cycling(100))
    buffer = bytearray(300)
    ring.queue_read(file, buffer, 0)
    assert run_one(ring).result == 100
    ring.queue_read(file, buffer, 100)
    assert run_one(ring).result == 0


def test_without_an_offset_the_file_position_is_used_and_moved(ring: Ring, file: int) -> None:
    os.write(file, cycling(100))
    os.lseek(file, 40, os.SEEK_SET)
    buffer = bytearray(10)
    ring.queue_read(file, buffer, None)
    assert run_one(ring).result == 10
    assert bytes(buffer) == cycling(10, start=40)
    assert os.lseek(file, 0, os.SEEK_CUR) == 50


@pytest.mark.parametrize("operation", ["read", "write", "fsync"])
def test_a_bad_descriptor_is_ebadf_in_the_completion(ring: Ring, operation: str) -> None:
    if operation == "read":
        ring.queue_read(-1, bytearray(8), 0, user_data=7)
    elif operation == "write":
        ring.queue_write(-1, b"12345678", 0, user_data=7)
    else:
        ring.queue_fsync(-1, user_data=7)
    assert run_one(ring) == (7, -errno.EBADF)


def test_two_operations_with_one_user_data_both_come_back(ring: Ring, file: int) -> None:
    ring.queue_write(file, b"a" * 10, 0, user_data=5)
    ring.queue_write(file, b"b" * 20, 10, user_data=5)
    assert ring.submit() == 2
    assert sorted(ring.drain()) == [(5, 10), (5, 20)]


def test_memory_is_kept_until_its_completion_and_let_go_after(ring: Ring) -> None:
    reading, writing = os.pipe()
    buffer = bytearray(4)
    ring.queue_read(reading, buffer, None)
    ring.submit()
    with pytest.raises(BufferError):
        buffer.extend(b"more")  # would move the memory that the kernel writes to
    os.write(writing, b"abcd")
    assert ring.wait(timeout_s=30).result == 4
    buffer.extend(b"more")
    assert buffer == b"abcdmore"
    os.close(reading)
    os.close(writing)


def test_a_temporary_buffer_outlives_its_last_name(ring: Ring, file: int) -> None:
    ring.queue_write(file, bytearray(cycling(1 << 20)), 0)
    gc.collect()
    pressure = [bytearray(b"\xff") * (1 << 20) for _ in range(8)]
    assert run_one(ring).result == 1 << 20
    assert os.pread(file, 1 << 20, 0) == cycling(1 << 20)
    del pressure


# ---- registered buffers ---------------------------------------------------------


def test_registered_buffers_write_and_read_at_a_place_inside_them(ring: Ring, file: int) -> None:
    out, back = bytearray(cycling(8192)), bytearray(8192)
    ring.register_buffers([out, back])
    ring.queue_write_fixed(file, 0, 0, start=4096, length=4096, user_data=1)
    assert run_one(ring) == (1, 4096)
    ring.queue_read_fixed(file, 1, 0, start=100, length=4096, user_data=2)
    assert run_one(ring) == (2, 4096)
    assert back[100:4196] == cycling(4096, start=4096)
    assert not any(back[:100]) and not any(back[4196:])
    ring.unregister_buffers()
    with pytest.raises(IndexError):
        ring.queue_read_fixed(file, 0, 0)


def test_a_place_outside_a_registered_buffer_is_refused_before_the_kernel_sees_it(
    ring: Ring, file: int
) -> None:
    ring.register_buffers([bytearray(4096)])
    for start, length in [(0, 4097), (4097, 0), (-1, 10), (4000, 97), (0, -1)]:
        with pytest.raises(ValueError, match="4096 bytes"):
            ring.queue_read_fixed(file, 0, 0, start=start, length=length)
    assert ring.queued_count == 0


def test_registering_twice_names_the_call(ring: Ring) -> None:
    ring.register_buffers([bytearray(4096)])
    with pytest.raises(OSError, match="io_uring_register_buffers") as caught:
        ring.register_buffers([bytearray(4096)])
    assert caught.value.errno == errno.EBUSY


# ---- the queue -------------------------------------------------------------------


def test_a_full_queue_is_an_error_until_it_is_submitted() -> None:
    with Ring(4) as ring:
        assert ring.entries_count == 4
        for number in range(4):
            ring.queue_nop(user_data=number)
        with pytest.raises(BlockingIOError, match="io_uring_get_sqe") as caught:
            ring.queue_nop()
        assert caught.value.errno == errno.EAGAIN
        assert (ring.queued_count, ring.in_flight_count) == (4, 0)
        assert ring.submit() == 4
        assert (ring.queued_count, ring.in_flight_count) == (0, 4)
        ring.queue_nop(user_data=4)
        ring.submit()
        assert sorted(ring.drain()) == [(number, 0) for number in range(5)]


def test_more_completions_than_the_ring_holds_are_all_delivered() -> None:
    with Ring(1) as ring:
        count = 10 * ring.completions_count
        for number in range(count):
            ring.queue_nop(user_data=number)
            ring.submit()
        assert sorted(done.user_data for done in ring.drain()) == list(range(count))


def test_waiting_for_nothing_is_an_error_and_not_a_hang(ring: Ring) -> None:
    with pytest.raises(RuntimeError, match="0 operations queued"):
        ring.wait()
    ring.queue_nop()
    with pytest.raises(RuntimeError, match="1 operations queued, none submitted"):
        ring.wait()


def test_a_wait_that_times_out_leaves_the_operation_in_flight(ring: Ring) -> None:
    reading, writing = os.pipe()
    buffer = bytearray(3)
    ring.queue_read(reading, buffer, None, user_data=9)
    ring.submit()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        ring.wait(timeout_s=0.2)
    assert time.monotonic() - started >= 0.2
    os.write(writing, b"abc")
    assert ring.wait(timeout_s=30) == (9, 3)
    os.close(reading)
    os.close(writing)


def test_a_signal_interrupts_a_wait_only_if_its_handler_raises(ring: Ring) -> None:
    reading, writing = os.pipe()
    ring.queue_read(reading, bytearray(1), None)
    ring.submit()
    seen = []

    def on_alarm(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) == 3:
            raise InterruptedError("third alarm")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(InterruptedError, match="third alarm"):
            ring.wait(timeout_s=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    os.write(writing, b"x")
    assert ring.wait(timeout_s=30).result == 1
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("bad", [-1, 2**64])
def test_user_data_out_of_range_queues_nothing(ring: Ring, bad: int) -> None:
    with pytest.raises(ValueError, match="user_data"):
        ring.queue_nop(user_data=bad)
    assert ring.queued_count == 0


def test_read_only_and_scattered_memory_is_refused(ring: Ring, file: int) -> None:
    with pytest.raises(TypeError, match="writable"):
        ring.queue_read(file, b"constant", 0)
    with pytest.raises(TypeError, match="contiguous"):
        ring.queue_write(file, memoryview(bytearray(10))[::2], 0)
    with pytest.raises(ValueError, match="offset"):
        ring.queue_write(file, b"x", -1)
    with pytest.raises(ValueError, match="descriptor"):
        ring.queue_write(2**31, b"x", 0)
    assert ring.queued_count == 0


# ---- life ----------------------------------------------------------------------


def test_a_closed_ring_answers_with_errors(file: int) -> None:
    ring = Ring(4)
    ring.close()
    ring.close()
    assert ring.closed
    for call in (
        ring.queue_nop,
        ring.submit,
        ring.wait,
        ring.drain,
        ring.fileno,
        ring.unregister_buffers,
        lambda: ring.queue_read(file, bytearray(4), 0),
        lambda: ring.queue_fsync(file),
        lambda: ring.register_buffers([bytearray(4)]),
        lambda: ring.run_transfers(file, "read", bytearray(4), [0], block_bytes=4, depth=1),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_closing_cancels_a_read_that_would_never_end_and_frees_its_memory() -> None:
    reading, writing = os.pipe()
    buffer = bytearray(16)
    with Ring(4) as ring:
        ring.queue_read(reading, buffer, None)
        ring.submit()
    buffer.extend(b"free again")
    os.write(writing, b"late")
    assert os.read(reading, 16) == b"late"
    assert buffer == bytes(16) + b"free again"
    os.close(reading)
    os.close(writing)


def test_closing_drops_what_was_never_submitted(file: int) -> None:
    reading, writing = os.pipe()
    with Ring(4) as ring:
        ring.queue_read(reading, bytearray(1), None)  # closing must submit a cancellation for this one ...
        ring.submit()
        ring.queue_write(file, b"never", 0)  # ... and must not take this along
    assert os.fstat(file).st_size == 0
    os.close(reading)
    os.close(writing)


def test_rings_leave_no_descriptor_behind(file: int) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with Ring(4) as ring:
            ring.register_buffers([bytearray(4096)])
            ring.queue_nop()
            ring.submit()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forgotten_ring_warns_and_closes_itself() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.warns(ResourceWarning, match="unclosed <Ring"):
        Ring(4)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_ring_in_use_by_another_thread_is_an_error(ring: Ring) -> None:
    reading, writing = os.pipe()
    ring.queue_read(reading, bytearray(1), None, user_data=3)
    ring.submit()
    results: list[Completion] = []
    waiter = threading.Thread(target=lambda: results.append(ring.wait(timeout_s=30)))
    waiter.start()
    while not ring._busy.locked():
        time.sleep(0.001)
    for call in (ring.queue_nop, ring.submit, ring.close):
        with pytest.raises(RuntimeError, match="another thread"):
            call()
    os.write(writing, b"x")
    waiter.join(30)
    assert results == [(3, 1)]
    os.close(reading)
    os.close(writing)


def test_a_forked_child_can_close_a_ring_and_nothing_else(ring: Ring) -> None:
    reading, writing = os.pipe()
    ring.queue_read(reading, bytearray(1), None, user_data=6)
    ring.submit()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                ring.queue_nop()
            except RuntimeError:
                ring.close()
                status = 0 if ring.closed else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.write(writing, b"x")
    assert ring.wait(timeout_s=30) == (6, 1)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("entries", [0, -1, 2**32])
def test_a_ring_of_no_size_is_refused(entries: int) -> None:
    with pytest.raises(ValueError, match="entries"):
        Ring(entries)


def test_a_ring_larger_than_the_kernel_allows_names_the_call() -> None:
    with pytest.raises(OSError, match="io_uring_queue_init_params") as caught:
        Ring(2**31)
    assert caught.value.errno == errno.EINVAL


# ---- the raw ceiling ---------------------------------------------------------------

BLOCK_BYTES = 1 << 16


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_transfers_reach_every_offset_and_take_time(ring: Ring, file: int, depth: int) -> None:
    offsets = [number * BLOCK_BYTES for number in (5, 0, 3, 1, 4, 2, 6, 9, 8, 7)]
    block = cycling(BLOCK_BYTES)
    with mmap.mmap(-1, depth * BLOCK_BYTES) as slots:
        slots[:] = block * depth
        assert ring.run_transfers(file, "write", slots, offsets, block_bytes=BLOCK_BYTES, depth=depth) > 0
        assert os.pread(file, 20 * BLOCK_BYTES, 0) == block * 10
        slots[:] = bytes(depth * BLOCK_BYTES)
        assert ring.run_transfers(file, "read", slots, offsets, block_bytes=BLOCK_BYTES, depth=depth) > 0
        assert slots[:] == block * depth
    assert ring.in_flight_count == 0


def test_transfers_of_nothing_take_no_time(ring: Ring, file: int) -> None:
    assert ring.run_transfers(file, "write", bytearray(512), [], block_bytes=512, depth=1) < 1


def test_a_short_transfer_is_an_error_that_says_where(ring: Ring, file: int) -> None:
    os.ftruncate(file, 3 * 4096 + 100)
    slots = bytearray(2 * 4096)
    with pytest.raises(OSError, match="read at offset 12288: 100 of 4096 bytes"):
        ring.run_transfers(file, "read", slots, range(0, 5 * 4096, 4096), block_bytes=4096, depth=2)
    slots.extend(b"nothing holds it any more")
    ring.queue_nop(user_data=1)
    assert run_one(ring) == (1, 0)


def test_a_failed_transfer_has_its_errno(ring: Ring) -> None:
    with pytest.raises(OSError, match="write of 512 bytes at offset 1024") as caught:
        ring.run_transfers(-1, "write", bytearray(512), [1024], block_bytes=512, depth=1)
    assert caught.value.errno == errno.EBADF


def test_transfers_that_do_not_fit_are_refused(ring: Ring, file: int) -> None:
    for arguments in (
        {"block_bytes": 512, "depth": 9},
        {"block_bytes": 512, "depth": 0},
        {"block_bytes": 1025, "depth": 2},
        {"block_bytes": 0, "depth": 1},
    ):
        with pytest.raises(ValueError, match="depth"):
            ring.run_transfers(file, "write", bytearray(2048), [0], **arguments)
    with pytest.raises(ValueError, match="offset"):
        ring.run_transfers(file, "write", bytearray(2048), [0, -512], block_bytes=512, depth=1)
    with pytest.raises(ValueError, match="direction"):
        ring.run_transfers(file, "copy", bytearray(2048), [0], block_bytes=512, depth=1)  # type: ignore[arg-type]
    ring.queue_nop()
    with pytest.raises(RuntimeError, match="queued"):
        ring.run_transfers(file, "write", bytearray(2048), [0], block_bytes=512, depth=1)
    assert os.fstat(file).st_size == 0


# ---- what the kernel offers ------------------------------------------------------------


def test_the_operations_and_features_that_the_engine_needs_are_there() -> None:
    found = probe()
    assert all(found.supports(op) for op in ("nop", "readv", "writev", "read_fixed", "write_fixed", "fsync"))
    assert Features.NODROP in features()
    with pytest.raises(ValueError, match="raed"):
        found.supports("raed")


def test_the_tables_of_names_agree_with_the_header() -> None:
    from striate.liburing.probe import _OP_NAMES

    for name in ("fsync", "read", "renameat", "send_zc"):
        assert _OP_NAMES.index(name) == getattr(lib, f"IORING_OP_{name.upper()}")
    for name in ("NODROP", "EXT_ARG", "LINKED_FILE"):
        assert Features[name] == getattr(lib, f"IORING_FEAT_{name}")


def test_limits_are_those_of_the_process_and_of_the_kernel() -> None:
    found = limits()
    assert found.kernel_release == os.uname().release
    assert found.entries_max is not None and found.entries_max >= 4096
    with Ring(found.entries_max) as ring:
        assert ring.entries_count == found.entries_max
    sysctl = Path("/proc/sys/kernel/io_uring_disabled")
    assert found.io_uring_disabled == (int(sysctl.read_text()) if sysctl.exists() else None)
    code = (
        "from striate.liburing import limits; print(limits().memlock_soft_bytes, limits().memlock_hard_bytes)"
    )
    assert run_python(code, limits={"memlock": 65536}).stdout.split() == ["65536", "65536"]


def test_where_it_works_there_is_no_reason_against_it() -> None:
    assert available() == (True, "")


@pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter"])
@pytest.mark.parametrize("code", REFUSABLE)
def test_a_refusal_is_told_with_its_reason_and_raises_the_errno(call: str, code: str) -> None:
    done = run_python(
        """
        from striate.liburing import Ring, available, limits
        print(available())
        print(limits().entries_max)
        try:
            with Ring(2) as ring:
                ring.queue_nop()
                ring.submit()
        except OSError as error:
            print(error.errno, error)
        """,
        refuse={call: code},
    )
    told, _, raised = done.stdout.splitlines()
    # EOPNOTSUPP is one number with ENOTSUP, and errorcode knows the latter name.
    assert told.startswith("(False,") and errno.errorcode[getattr(errno, code)] in told
    name = "io_uring_queue_init_params" if call == "io_uring_setup" else "io_uring_submit"
    assert raised.startswith(f"{getattr(errno, code)} ") and name in raised
