"""Every single operation of a save and of a load fails in turn, with each errno that it could answer."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crash.checkpoints import NAME, beside, descriptors, require_alone, save, state, version_at, version_of

import striate
from striate._engine import Fault, Io, Trace
from support.same import same

OLD, NEW, NEXT = 1, 2, 3
ERRNOS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EAGAIN)
RETRIED = (errno.EINTR, errno.EAGAIN)

# Failing these costs nothing: reading the old file's sequence, sweeping what a
# dead saver left, closing what is synced.
TOLERATED = {"close", "unlink"}
NOBODY = 65534


def faulty(engine_name: str, *faults: Fault) -> Io:
    return Io(engine_name, faults=faults, trace=True)  # type: ignore[arg-type]


@pytest.fixture(params=["over an old one", "where none was"])
def path(request: pytest.FixtureRequest, tmp_path: Path, memory_dir: Path) -> Path:
    """A target; with an old checkpoint of another mode and a dead saver's temporary beside it, or in an empty folder.

    One errno goes the whole way to the drive; what differs for the others does not, and syncs are slow.
    """
    code = request.node.callspec.params.get("code", errno.EIO)
    target = (tmp_path if code == errno.EIO else memory_dir) / NAME
    if request.param == "over an old one":
        prepare(target)
    return target


def prepare(target: Path) -> None:
    save(OLD, target)
    target.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(target, NOBODY, NOBODY)
    (target.parent / (".striate-" + "5a" * 16)).write_bytes(b"left by a saver that died")


def restore(target: Path, old: int | None) -> None:
    """The directory as it was before a try."""
    for found in target.parent.iterdir():
        found.unlink()
    if old is not None:
        prepare(target)


def trace_of_a_save(engine_name: str, target: Path, old: int | None) -> list[Trace]:
    io = faulty(engine_name)
    save(NEW, target, engine=io)
    assert version_at(target) == NEW
    restore(target, old)
    return io.traces()


def old_of(target: Path) -> int | None:
    return version_at(target) if target.exists() else None


def found_at(target: Path) -> int | None:
    return version_at(target) if target.exists() else None


def check_error(error: striate.DriveError, target: Path, code: int) -> None:
    """An OSError with errno and file name, and a message with its four parts."""
    assert isinstance(error, OSError)
    assert error.errno == code
    assert error.filename == str(target)
    assert str(target) in str(error)
    assert errno.errorcode[code] in str(error) or os.strerror(code) in str(error)
    assert isinstance(error, striate.DriveFull) == (code in (errno.ENOSPC, errno.EDQUOT))
    assert isinstance(error, striate.DriveMedia) == (code == errno.EIO)


def check_after_a_failed_try(
    error: striate.DriveError | None, failing: str, target: Path, old: int | None
) -> None:
    """The name holds the old checkpoint, and the message says so; or the new one, for the directory's sync only."""
    if error is None:
        assert found_at(target) == NEW
    elif failing == "sync_directory":
        assert found_at(target) == NEW
        assert "bears its name" in str(error)
        assert "power cut" in str(error)
    else:
        assert found_at(target) == old
        assert "Nothing was committed" in str(error) or "Nothing was written" in str(error)
        assert ("is intact" in str(error)) == (old is not None)


@pytest.mark.parametrize("code", ERRNOS, ids=[errno.errorcode[code] for code in ERRNOS])
def test_a_save_whose_operations_fail_in_turn_leaves_the_old_or_the_new_checkpoint(
    path: Path, engine_name: str, code: int
) -> None:
    old = old_of(path)
    operations = [entry.op for entry in trace_of_a_save(engine_name, path, old)]
    raised = set()
    for nth in range(len(operations)):
        io = faulty(engine_name, Fault("any", nth=nth, value=code))
        before = descriptors()
        error = None
        try:
            save(NEW, path, engine=io)
        except striate.DriveError as e:
            error = e
        assert descriptors() == before, f"operation {nth}"
        failed = io.traces()[nth]
        if error is not None:
            assert failed.result == -code, f"operation {nth} ({failed.op}) was not the one that failed"
            check_error(error, path, code)
            raised.add(failed.op)
        check_after_a_failed_try(error, failed.op, path, old)
        # The abort could still remove the temporary: nothing waits for the next save.
        if failed.op != "unlink" or error is not None:
            assert [name for name in beside(path) if name != ".striate-" + "5a" * 16] == []
        save(NEXT, path)
        assert version_at(path) == NEXT
        require_alone(path)
        restore(path, old)
    must_raise = {"open", "chown", "chmod", "allocate", "truncate", "sync", "rename", "sync_directory"}
    if code not in RETRIED:
        # The engine asks again for a transfer, and another name is tried when a lock is taken.
        must_raise |= {"write", "lock"}
    assert must_raise <= raised | {op for op in must_raise if op not in operations}
    assert not raised & TOLERATED


def test_a_save_whose_drive_dies_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    path: Path, engine_name: str
) -> None:
    """From one operation on everything fails, removing the temporary too: the next save removes it."""
    old = old_of(path)
    count = len(trace_of_a_save(engine_name, path, old))
    left_over = 0
    for fault in [Fault("any", nth=nth, count=0) for nth in range(count)] + [
        Fault("any", kind="cut", nth=nth) for nth in range(count)
    ]:
        before = descriptors()
        with pytest.raises(striate.DriveMedia) as caught:
            save(NEW, path, engine=faulty(engine_name, fault))
        assert descriptors() == before, fault
        check_error(caught.value, path, errno.EIO)
        assert found_at(path) in (old, NEW)
        if found_at(path) == NEW:
            assert "bears its name" in str(caught.value)
        left_over += any(name != ".striate-" + "5a" * 16 for name in beside(path))
        save(NEXT, path)
        assert version_at(path) == NEXT
        require_alone(path)
        restore(path, old)
    assert left_over > 0, "no try left a temporary: the sweep was not tested"


def test_a_save_that_fails_and_cannot_remove_its_temporary_names_the_first_error(
    path: Path, engine_name: str
) -> None:
    old = old_of(path)
    io = faulty(engine_name, Fault("write", value=errno.EIO), Fault("unlink", count=0, value=errno.EROFS))
    with pytest.raises(striate.DriveMedia) as caught:
        save(NEW, path, engine=io)
    check_error(caught.value, path, errno.EIO)
    assert found_at(path) == old
    assert beside(path) != []
    save(NEXT, path)
    require_alone(path)


@pytest.mark.parametrize("op", ["chown", "chmod"])
def test_a_file_that_may_not_be_given_away_is_saved_all_the_same(
    tmp_path: Path, engine_name: str, op: str
) -> None:
    path = tmp_path / NAME
    prepare(path)
    io = faulty(engine_name, Fault(op, count=0, value=errno.EPERM))
    save(NEW, path, engine=io)
    assert version_at(path) == NEW
    asked = [entry for entry in io.traces() if entry.op == op]
    assert all(entry.result == -errno.EPERM for entry in asked)
    assert len(asked) > 0 or os.geteuid() != 0
    require_alone(path)


class Interrupted(Io):
    """Ctrl-C in the middle of cleaning up, before or after an operation is done."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.moments = {"before unlink", "after unlink", "after close"}

    def at(self, moment: str) -> None:
        if moment in self.moments:
            self.moments.clear()
            raise KeyboardInterrupt

    def unlink(self, dirfd: int, name: bytes) -> None:
        self.at("before unlink")
        super().unlink(dirfd, name)
        self.at("after unlink")

    def close(self, fd: int) -> None:
        super().close(fd)
        self.at("after close")


@pytest.mark.parametrize("moment", ["before unlink", "after unlink", "after close"])
def test_a_second_interrupt_while_cleaning_up_leaves_nothing_behind(
    tmp_path: Path, engine_name: str, moment: str
) -> None:
    path = tmp_path / NAME
    io = Interrupted(engine_name, faults=[Fault("write", value=errno.EIO)])
    io.moments = {moment}
    before = descriptors()
    with pytest.raises(KeyboardInterrupt):
        save(NEW, path, engine=io)
    assert io.moments == set()
    assert descriptors() == before
    assert beside(path) == []
    assert not path.exists()


def test_a_progress_callback_that_raises_ends_the_save_and_leaves_the_old_checkpoint(
    path: Path, engine_name: str
) -> None:
    old = old_of(path)
    before = descriptors()

    def progress(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        striate.save(state(NEW), path, engine=engine_name, progress=progress)  # type: ignore[arg-type]
    assert found_at(path) == old
    assert descriptors() == before
    require_alone(path)


class Vanishing(Io):
    """Somebody empties the directory while a checkpoint is written to it."""

    def rename(self, dirfd: int, old: bytes, new: bytes) -> None:
        super().unlink(dirfd, old)
        super().rename(dirfd, old, new)


def test_a_temporary_that_somebody_removed_is_named_as_the_reason(path: Path, engine_name: str) -> None:
    old = old_of(path)
    with pytest.raises(FileNotFoundError, match="removed the temporary file") as caught:
        save(NEW, path, engine=Vanishing(engine_name))  # type: ignore[arg-type]
    assert isinstance(caught.value, striate.DriveError)
    assert found_at(path) == old
    require_alone(path)


def test_a_file_system_that_does_not_say_how_big_it_is_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = os.statvfs_result([4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255])
    monkeypatch.setattr(os, "fstatvfs", lambda _: nothing)
    save(NEW, tmp_path / NAME)
    assert version_at(tmp_path / NAME) == NEW
    with pytest.raises(striate.DriveFull) as caught:
        save(NEXT, tmp_path / NAME, engine=faulty("posix", Fault("allocate", value=errno.ENOSPC)))
    assert caught.value.free is None
    assert caught.value.needed is not None


class SweptOnce(Io):
    """A sweeper takes the first temporary in the moment between its making and its lock."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.taken = 0

    def lock(self, fd: int) -> None:
        made = os.readlink(f"/proc/self/fd/{fd}")
        if not self.taken and not made.endswith("5a" * 16):
            self.taken += 1
            os.unlink(made)
        super().lock(fd)


def test_a_temporary_that_a_sweeper_took_before_it_was_locked_is_made_again(
    path: Path, engine_name: str
) -> None:
    io = SweptOnce(engine_name, trace=True)
    before = descriptors()
    save(NEW, path, engine=io)
    assert io.taken == 1
    assert sum(entry.op == "open" and bool(entry.offset & os.O_EXCL) for entry in io.traces()) == 2
    assert version_at(path) == NEW
    assert descriptors() == before
    require_alone(path)


class LetsGoLate(Io):
    """A killed saver's ring still holds its file when the next save begins, and no longer when that one ends."""

    held = -1

    def rename(self, dirfd: int, old: bytes, new: bytes) -> None:
        os.close(self.held)
        super().rename(dirfd, old, new)


def test_a_temporary_that_was_locked_when_a_save_began_is_swept_when_it_ends(
    tmp_path: Path, engine_name: str
) -> None:
    path = tmp_path / NAME
    io = LetsGoLate(engine_name)  # type: ignore[arg-type]
    io.held = os.open(tmp_path / (".striate-" + "5a" * 16), os.O_RDWR | os.O_CREAT)
    fcntl.flock(io.held, fcntl.LOCK_EX)
    save(NEW, path, engine=io)
    assert version_at(path) == NEW
    require_alone(path)


def test_a_temporary_whose_saver_lives_is_never_swept(tmp_path: Path, engine_name: str) -> None:
    path, other = tmp_path / NAME, tmp_path / (".striate-" + "5a" * 16)
    with open(other, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        save(NEW, path, engine=engine_name)
        assert beside(path) == [other.name]
    save(NEXT, path, engine=engine_name)
    require_alone(path)


def test_write_errors_carry_the_offset_that_failed(tmp_path: Path, engine_name: str) -> None:
    path = tmp_path / NAME
    # Workers race: which of the data's offsets the nth write has differs from run to run.
    offsets = set()
    count = sum(entry.op == "write" for entry in trace_of_a_save(engine_name, path, None))
    for nth in range(count):
        io = faulty(engine_name, Fault("write", nth=nth, value=errno.EIO))
        with pytest.raises(striate.DriveMedia) as caught:
            save(NEW, path, engine=io)
        failed = [entry for entry in io.traces() if entry.op == "write"][nth]
        assert caught.value.offset == failed.offset
        assert f"offset {failed.offset}" in str(caught.value)
        offsets.add(failed.offset)
    assert 0 in offsets, "the header's write was not among them"
    assert len(offsets) > 1


@pytest.mark.parametrize("most", [1, 511, 512, 4095, 4096], ids=lambda most: f"at most {most} bytes")
def test_short_transfers_everywhere_change_nothing(tmp_path: Path, engine_name: str, most: int) -> None:
    path = tmp_path / NAME
    # Bigger chunks than one piece: a transfer has something to be continued from.
    wanted = {"a": torch.arange(50_000, dtype=torch.int32), "b": torch.arange(777, dtype=torch.uint8), "n": 7}
    if most < 4096:
        # What moves is whole aligned units, what is answered is less: progress needs an answer past one unit.
        faults = [Fault("write", "short", nth=nth, value=4096 + most) for nth in range(40)]
        reads = [Fault("read", "short", nth=nth, value=4096 + most) for nth in range(40)]
    else:
        faults = [Fault("write", "short", count=0, value=most)]
        reads = [Fault("read", "short", count=0, value=most)]
    io = faulty(engine_name, *faults)
    result = striate.save(wanted, path, engine=io, chunk_bytes=65536)
    assert result.stats is not None
    assert result.stats.retries > 0
    assert same(striate.load(path, engine="posix"), wanted)
    assert same(striate.load(path, engine=faulty(engine_name, *reads)), wanted)
    assert striate.verify(path, engine=faulty(engine_name, *reads)).ok


def test_a_drive_that_takes_no_bytes_and_gives_no_reason_fails_the_save(path: Path, engine_name: str) -> None:
    old = old_of(path)
    with pytest.raises(striate.DriveMedia) as caught:
        save(NEW, path, engine=faulty(engine_name, Fault("write", "short", count=0, value=0)))
    check_error(caught.value, path, errno.EIO)
    assert found_at(path) == old


@pytest.mark.parametrize("code", RETRIED, ids=[errno.errorcode[code] for code in RETRIED])
def test_transfers_that_are_interrupted_are_asked_for_again(
    tmp_path: Path, engine_name: str, code: int
) -> None:
    path = tmp_path / NAME
    io = faulty(engine_name, *(Fault("write", nth=nth, value=code) for nth in range(0, 8, 2)))
    result = save(NEW, path, engine=io)
    assert result.stats is not None
    assert result.stats.retries > 0
    io = faulty(engine_name, *(Fault("read", nth=nth, value=code) for nth in range(0, 8, 2)))
    assert version_of(striate.load(path, engine=io)) == NEW
    assert any(entry.result == -code for entry in io.traces())


# ---- loads -------------------------------------------------------------------


def _loaded_into(path: Path, engine: Any) -> int:
    target = striate.load(path, engine="posix")
    target["version"], target["step"] = 0, torch.zeros((), dtype=torch.int32)
    target["model"] = {name: torch.zeros_like(tensor) for name, tensor in target["model"].items()}
    return version_of(striate.load_into(target, path, engine=engine))


def _loaded_tensors(path: Path, engine: Any) -> int:
    names = ["model.weights", "model.bias", "step"]
    found = striate.load_tensors(path, names, engine=engine)
    assert list(found) == names
    whole = {
        "version": NEW,
        "model": {"weights": found["model.weights"], "bias": found["model.bias"]},
        "step": found["step"],
    }
    return version_of(whole)


READERS: dict[str, Callable[[Path, Any], int]] = {
    "load": lambda path, engine: version_of(striate.load(path, engine=engine)),
    "load_into": _loaded_into,
    "load_tensors": _loaded_tensors,
}


@pytest.mark.parametrize("code", ERRNOS, ids=[errno.errorcode[code] for code in ERRNOS])
@pytest.mark.parametrize("reader", READERS)
def test_a_load_whose_operations_fail_in_turn_raises_or_gives_the_right_data(
    tmp_path: Path, engine_name: str, reader: str, code: int
) -> None:
    path = tmp_path / NAME
    save(NEW, path)
    read = READERS[reader]
    io = faulty(engine_name)
    assert read(path, io) == NEW
    operations = [entry.op for entry in io.traces()]
    assert operations.count("read") >= 4
    raised = []
    for nth in range(len(operations)):
        io = faulty(engine_name, Fault("any", nth=nth, value=code))
        before = descriptors()
        error = None
        try:
            assert read(path, io) == NEW, f"operation {nth}"
        except striate.DriveError as e:
            error = e
        assert descriptors() == before, f"operation {nth}"
        if error is not None:
            failed = io.traces()[nth]
            check_error(error, path, code)
            assert (error.offset is not None) == (failed.op == "read")
            raised.append(failed.op)
    assert "close" not in raised
    assert "open" in raised
    assert raised.count("read") == (0 if code in RETRIED else operations.count("read"))


@pytest.mark.parametrize("reader", READERS)
def test_a_load_from_a_drive_that_dies_raises(tmp_path: Path, engine_name: str, reader: str) -> None:
    path = tmp_path / NAME
    save(NEW, path)
    io = faulty(engine_name)
    READERS[reader](path, io)
    count = sum(entry.op != "close" for entry in io.traces())
    for nth in range(count):
        before = descriptors()
        with pytest.raises(striate.DriveMedia) as caught:
            READERS[reader](path, faulty(engine_name, Fault("any", nth=nth, count=0)))
        check_error(caught.value, path, errno.EIO)
        assert descriptors() == before


@pytest.mark.parametrize("nth", range(3))
def test_a_read_that_ends_early_is_never_taken_for_data(tmp_path: Path, engine_name: str, nth: int) -> None:
    path = tmp_path / NAME
    save(NEW, path)
    with pytest.raises((striate.CorruptCheckpoint, striate.FormatError, striate.DriveError)) as caught:
        striate.load(path, engine=faulty(engine_name, Fault("read", "short", nth=nth, count=0, value=0)))
    assert str(path) in str(caught.value)


def test_verify_reports_the_chunks_that_cannot_be_read_and_goes_on(tmp_path: Path, engine_name: str) -> None:
    path = tmp_path / NAME
    save(NEW, path)
    io = faulty(engine_name)
    assert striate.verify(path, engine=io).ok
    reads = sum(entry.op == "read" for entry in io.traces())
    chunks = striate.info(path).chunks_count
    for nth in range(reads - chunks, reads):
        report = striate.verify(path, engine=faulty(engine_name, Fault("read", nth=nth, value=errno.EIO)))
        assert not report.ok
        (damage,) = report.damages
        assert "EIO" in damage.reason
        assert damage.tensors
        assert damage.offset >= 4096
