"""Every answer a drive can give: errors, short counts, interruptions, nothing at all, a power cut."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from striate import _engine
from striate._engine import JOB_CHECKSUM, JOB_STABLE, Fault, Io, RunError
from support.contents import cycling
from support.tables import (
    BLOCK,
    KINDS,
    Bytes,
    Kind,
    Table,
    digests,
    found_digests,
    memory,
    open_descriptors,
    opened,
    tables,
    threads,
)


def filled(length: int, *, misalign: int = 64) -> Bytes:
    data = memory(length, misalign=misalign)
    data[:] = np.frombuffer(cycling(length), np.uint8)
    return data


def wanting(jobs: Table, wanted: Bytes) -> Table:
    jobs["digest"] = np.frombuffer(b"".join(digests(wanted, jobs)), np.uint8).reshape(-1, 16)
    return jobs


def stored(folder: Path, data: Bytes) -> None:
    padded = -(-len(data) // 4096) * 4096
    (folder / "file").write_bytes(data.tobytes().ljust(padded, b"\0"))


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_write_failing_in_turn_stops_the_run_and_names_its_place(
    kind: Kind, stable: bool, tmp_path: Path
) -> None:
    data = filled(20 * BLOCK, misalign=0)
    jobs, extents = tables(data, flags=JOB_CHECKSUM | (JOB_STABLE if stable else 0))
    before = open_descriptors(), threads()
    for nth in range(20):
        io = Io(kind, faults=[Fault("write", nth=nth, value=errno.EIO)])
        with opened(io, tmp_path) as file, pytest.raises(RunError) as caught:
            io.run("write", [file], jobs, extents, workers_max=3)
        error = caught.value
        assert error.code == -errno.EIO
        assert error.offset == int(jobs["offset"][error.job])
        assert error.file == 0
        assert error.stats.bytes < len(data)
        failed = [trace for trace in io.traces() if trace.op == "write" and trace.result == -errno.EIO]
        assert [trace.offset for trace in failed] == [error.offset]
        del io
    assert (open_descriptors(), threads()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_each_read_failing_in_turn_stops_the_run_and_names_its_place(kind: Kind, tmp_path: Path) -> None:
    data = filled(20 * BLOCK)
    target = memory(len(data), misalign=64)
    jobs, extents = tables(target)
    wanting(jobs, data)
    for nth in range(20):
        io = Io(kind, faults=[Fault("read", nth=nth, value=errno.ENODATA)])
        with opened(io, tmp_path) as file:
            stored(tmp_path, data)
            with pytest.raises(RunError) as caught:
                io.run("read", [file], jobs, extents, workers_max=3)
        assert caught.value.code == -errno.ENODATA
        assert caught.value.offset == int(jobs["offset"][caught.value.job])


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_told_to_go_on_records_every_error_and_moves_the_rest(kind: Kind, tmp_path: Path) -> None:
    data = filled(30 * BLOCK)
    io = Io(kind, faults=[Fault("read", nth=4, count=3, value=errno.EIO)])
    target = memory(len(data), misalign=64)
    jobs, extents = tables(target)
    wanting(jobs, data)
    jobs["digest"][20, 3] ^= 1
    with opened(io, tmp_path) as file:
        stored(tmp_path, data)
        os.truncate(tmp_path / "file", 29 * BLOCK + 5)
        results, stats = io.run("read", [file], jobs, extents, keep_going=True)
    codes = results["code"].tolist()
    assert codes[29] in (_engine.ETRUNCATED, -errno.EIO)
    assert codes[20] in (_engine.ECORRUPT, -errno.EIO)
    assert sorted(set(codes)) in (
        [_engine.ETRUNCATED, _engine.ECORRUPT, -errno.EIO, 0],
        [_engine.ECORRUPT, -errno.EIO, 0],
        [_engine.ETRUNCATED, -errno.EIO, 0],
    )
    assert codes.count(-errno.EIO) == 3
    good = [index for index, code in enumerate(codes) if code == 0]
    assert stats.bytes == len(good) * BLOCK
    for index in good:
        part = slice(index * BLOCK, (index + 1) * BLOCK)
        assert np.array_equal(target[part], data[part])


SCRIPTS = {
    "one short count that is not aligned": [Fault("any", "short", nth=3, count=1, value=1000)],
    "short counts all the way": [Fault("any", "short", nth=0, count=0, value=4096)],
    "short counts between sectors": [Fault("any", "short", nth=0, count=0, value=10_000)],
    "interrupted": [Fault("any", "error", nth=2, count=20, value=errno.EINTR)],
    "out of resources for a while": [Fault("any", "error", nth=2, count=20, value=errno.EAGAIN)],
    "short and interrupted by turns": [
        Fault("any", "short", nth=0, count=0, value=20_000),
        Fault("any", "error", nth=4, count=1, value=errno.EINTR),
        Fault("any", "error", nth=6, count=1, value=errno.EAGAIN),
    ],
}


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_short_and_interrupted_transfers_are_continued(
    kind: Kind, script: str, direct: bool, aligned: bool, tmp_path: Path
) -> None:
    data = filled(10 * BLOCK + 700, misalign=0 if aligned else 64)
    jobs, extents = tables(data, flags=JOB_CHECKSUM | JOB_STABLE)
    io = Io(kind, faults=SCRIPTS[script])
    with opened(Io(kind), tmp_path, direct=direct) as file:
        results, stats = io.run("write", [file], jobs, extents)
        assert stats.retries > 0
        assert stats.buffered_files == 0
        assert found_digests(results) == digests(data, jobs)
        assert (tmp_path / "file").read_bytes()[: len(data)] == data.tobytes()

        os.truncate(file.fd, len(data))
        target = memory(len(data), misalign=0 if aligned else 64)
        jobs, extents = tables(target)
        wanting(jobs, data)
        _, stats = Io(kind, faults=SCRIPTS[script]).run("read", [file], jobs, extents)
        assert stats.retries > 0
        assert np.array_equal(target, data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("direction", "fault", "code"),
    [
        ("write", Fault("write", "error", count=0, value=errno.EAGAIN), -errno.EAGAIN),
        ("write", Fault("write", "error", count=0, value=errno.EINTR), -errno.EINTR),
        ("write", Fault("write", "short", count=0, value=0), -errno.EIO),
        ("write", Fault("write", "error", nth=3, value=errno.ENOSPC), -errno.ENOSPC),
        ("write", Fault("write", "error", nth=3, value=errno.EFBIG), -errno.EFBIG),
        ("read", Fault("read", "error", count=0, value=errno.EAGAIN), -errno.EAGAIN),
        ("read", Fault("read", "short", count=0, value=0), _engine.ETRUNCATED),
    ],
)
def test_a_drive_that_never_gets_on_is_an_error_and_not_a_loop(
    kind: Kind, direction: str, fault: Fault, code: int, tmp_path: Path
) -> None:
    data = filled(5 * BLOCK)
    jobs, extents = tables(data)
    wanting(jobs, data)
    with opened(Io(kind), tmp_path) as file:
        stored(tmp_path, data)
        with pytest.raises(RunError) as caught:
            Io(kind, faults=[fault]).run(direction, [file], jobs, extents)  # type: ignore[arg-type]
    assert caught.value.code == code
    assert os.strerror(errno.EAGAIN) in str(caught.value) or code != -errno.EAGAIN


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("missing", [1, 700, 4096, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_ends_too_early_is_truncated_and_not_corrupt(
    kind: Kind, missing: int, direct: bool, tmp_path: Path
) -> None:
    data = filled(3 * BLOCK)
    jobs, extents = tables(data)
    wanting(jobs, data)
    io = Io(kind)
    with opened(io, tmp_path, direct=direct) as file:
        stored(tmp_path, data)
        os.truncate(tmp_path / "file", len(data) - missing)
        with pytest.raises(RunError, match="ends too early") as caught:
            io.run("read", [file], jobs, extents, workers_max=1, depth=1)
    assert caught.value.code == _engine.ETRUNCATED
    assert caught.value.job == (len(data) - missing) // BLOCK


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_read_again_before_it_is_called_corrupt(
    kind: Kind, aligned: bool, direct: bool, tmp_path: Path
) -> None:
    data = filled(12 * BLOCK, misalign=0 if aligned else 64)
    wanted = data.copy()
    target = memory(len(data), misalign=0 if aligned else 64)
    jobs, extents = tables(target)
    wanting(jobs, wanted)
    data[7 * BLOCK + 12345] ^= 4
    io = Io(kind, trace=True)
    with opened(io, tmp_path, direct=direct) as file:
        stored(tmp_path, data)
        with pytest.raises(RunError, match="checksum") as caught:
            io.run("read", [file], jobs, extents)
    assert (caught.value.code, caught.value.job) == (_engine.ECORRUPT, 7)
    assert caught.value.offset == 7 * BLOCK
    asked = [trace.offset for trace in io.traces() if trace.op == "read"]
    assert asked.count(7 * BLOCK) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_o_direct_refused_at_a_transfer_makes_the_file_buffered(kind: Kind, tmp_path: Path) -> None:
    data = filled(30 * BLOCK + 5)
    jobs, extents = tables(data)
    with opened(Io(kind), tmp_path) as file:
        io = Io(kind, faults=[Fault("write", nth=2, value=errno.EINVAL)])
        results, stats = io.run("write", [file], jobs, extents, workers_max=2, depth=1)
        assert found_digests(results) == digests(data, jobs)
        assert stats.buffered_files == 1
        assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert (tmp_path / "file").read_bytes()[: len(data)] == data.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_einval_of_a_buffered_file_is_an_error(kind: Kind, tmp_path: Path) -> None:
    data = filled(3 * BLOCK)
    jobs, extents = tables(data)
    io = Io(kind, faults=[Fault("write", value=errno.EINVAL)])
    with opened(Io(kind), tmp_path, direct=False) as file, pytest.raises(RunError) as caught:
        io.run("write", [file], jobs, extents)
    assert caught.value.code == -errno.EINVAL


@pytest.mark.parametrize("kind", KINDS)
def test_an_alignment_that_the_drive_does_not_take_ends_buffered_and_right(
    kind: Kind, tmp_path: Path
) -> None:
    data = filled(5 * BLOCK, misalign=4)
    jobs, extents = tables(data, flags=JOB_CHECKSUM | JOB_STABLE)
    io = Io(kind)
    with opened(io, tmp_path) as file:
        lying = _engine.File(file.fd, direct=True, mem_align=4, offset_align=512)
        results, stats = io.run("write", [lying], jobs, extents)
        assert found_digests(results) == digests(data, jobs)
        assert stats.zero_copy_bytes == len(data)
        really_picky = file.direct and file.mem_align > 4
        assert stats.buffered_files == (1 if really_picky else 0)
    assert (tmp_path / "file").read_bytes() == data.tobytes()


NAMESPACE = [
    "open",
    "lock",
    "chmod",
    "chown",
    "allocate",
    "truncate",
    "sync",
    "sync_directory",
    "rename",
    "unlink",
    "mkdir",
]


def perform(io: Io, folder: int, op: str, fd: int) -> None:
    calls = {
        "open": lambda: io.close(io.open(folder, b"second", os.O_CREAT | os.O_RDWR)),
        "lock": lambda: io.lock(fd),
        "chmod": lambda: io.chmod(fd, 0o640),
        "chown": lambda: io.chown(fd, os.getuid(), -1),
        "allocate": lambda: io.allocate(fd, 8192),
        "truncate": lambda: io.truncate(fd, 100),
        "sync": lambda: io.sync(fd),
        "sync_directory": lambda: io.sync_directory(folder),
        "rename": lambda: io.rename(folder, b"first", b"third"),
        "unlink": lambda: io.unlink(folder, b"third"),
        "mkdir": lambda: io.mkdir(folder, b"below", 0o700),
    }
    calls[op]()


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_on_names_does_its_work_and_is_traced(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind, trace=True)
    folder = io.open(-100, os.fsencode(tmp_path), os.O_RDONLY | os.O_DIRECTORY)
    fd = io.open(folder, b"first", os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    assert not os.get_inheritable(fd)
    for op in NAMESPACE:
        perform(io, folder, op, fd)
    facts = os.fstat(fd)
    assert stat.S_IMODE(facts.st_mode) == 0o640
    assert facts.st_size == 100
    assert sorted(os.listdir(tmp_path)) == ["below", "second"]
    assert stat.S_IMODE((tmp_path / "below").stat().st_mode) == 0o700
    io.close(fd)
    io.close(folder)
    traces = io.traces()
    assert [trace.op for trace in traces] == [
        "open", "open", "open", "close", *NAMESPACE[1:], "close", "close"
    ]  # fmt: skip
    assert traces[1].name == b"first"
    assert traces[1].offset & os.O_EXCL
    assert traces[1].result == fd
    renamed = next(trace for trace in traces if trace.op == "rename")
    assert (renamed.name, renamed.to, renamed.fd) == (b"first", b"third", folder)
    assert all(trace.result >= 0 for trace in traces)


@pytest.mark.parametrize("op", NAMESPACE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_call_on_names_changes_nothing(kind: Kind, op: str, tmp_path: Path) -> None:
    plain = Io(kind)
    folder = plain.open(-100, os.fsencode(tmp_path), os.O_RDONLY | os.O_DIRECTORY)
    fd = plain.open(folder, b"first", os.O_CREAT | os.O_RDWR, 0o600)
    (tmp_path / "third").write_bytes(b"x")
    before = (sorted(os.listdir(tmp_path)), os.fstat(fd).st_size, os.fstat(fd).st_mode, open_descriptors())
    io = Io(kind, faults=[Fault(op, value=errno.EDQUOT)])
    with pytest.raises(OSError, match="quota") as caught:
        perform(io, folder, op, fd)
    assert caught.value.errno == errno.EDQUOT
    after = (sorted(os.listdir(tmp_path)), os.fstat(fd).st_size, os.fstat(fd).st_mode, open_descriptors())
    assert after == before
    perform(io, folder, op, fd)  # once only
    plain.close(fd)
    plain.close(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_power_cut_nothing_happens_and_nothing_leaks(kind: Kind, tmp_path: Path) -> None:
    data = filled(6 * BLOCK)
    jobs, extents = tables(data)
    before = open_descriptors()
    for nth in range(9):
        io = Io(kind, faults=[Fault("any", "cut", nth=nth)], trace=True)
        directory = os.open(tmp_path, os.O_DIRECTORY)
        failed = False
        fd = -1
        try:
            fd = io.open(directory, b"file", os.O_CREAT | os.O_RDWR | os.O_TRUNC)
            io.lock(fd)
            io.run("write", [_engine.File(fd)], jobs, extents, workers_max=2)
            io.sync(fd)
        except (OSError, RunError):
            failed = True
        assert failed
        traces = io.traces()
        assert all(trace.result >= 0 for trace in traces[:nth])
        assert all(trace.result == -errno.EIO for trace in traces[nth:])
        written = [trace for trace in traces[:nth] if trace.op == "write"]
        if fd >= 0:
            found = (tmp_path / "file").read_bytes()
            for trace in written:
                assert trace.data is not None
                assert found[trace.offset : trace.offset + trace.length] == trace.data
            assert sum(len(trace.data or b"") for trace in written) == len(written) * BLOCK
            with pytest.raises(OSError, match="Input/output"):
                io.close(fd)
            other = Io(kind)
            again = other.open(directory, b"file", os.O_RDWR)
            other.lock(again)  # the lock went with the descriptor
            other.close(again)
        os.close(directory)
    assert open_descriptors() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_another_holds_is_a_blocking_io_error(kind: Kind, tmp_path: Path) -> None:
    io = Io(kind)
    with opened(io, tmp_path) as first, opened(io, tmp_path) as second:
        io.lock(first.fd)
        with pytest.raises(BlockingIOError):
            io.lock(second.fd)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_read_is_whole_or_an_error_from_any_place(kind: Kind, direct: bool, tmp_path: Path) -> None:
    data = cycling(3_000_000)
    faults = [
        Fault("read", "error", nth=1, value=errno.EINTR),
        Fault("read", "short", nth=3, value=5000),
        Fault("read", "short", nth=5, value=70_000),
    ]
    for io in (Io(kind), Io(kind, faults=faults)):
        with opened(io, tmp_path, direct=direct) as file:
            (tmp_path / "file").write_bytes(data)
            for offset, length in (
                (0, 1),
                (1, 4096),
                (511, 2),
                (4095, 2),
                (0, len(data)),
                (len(data) - 3, 3),
                (7, 0),
            ):
                assert io.read(file.fd, length, offset) == data[offset : offset + length]
            for offset, length in ((0, len(data) + 1), (len(data), 1), (len(data) + 5000, 1)):
                with pytest.raises(EOFError):
                    io.read(file.fd, length, offset)
    io = Io(kind, faults=[Fault("read", value=errno.EINVAL)])
    with opened(io, tmp_path, direct=direct) as file:
        (tmp_path / "file").write_bytes(data)
        if file.direct:
            assert io.read(file.fd, 10, 20) == data[20:30]  # refused with O_DIRECT, then without
        else:
            with pytest.raises(OSError, match="Invalid"):
                io.read(file.fd, 10, 20)
