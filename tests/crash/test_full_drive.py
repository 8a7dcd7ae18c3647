"""Drives that are full, over quota or read-only, for real: file systems of a few megabytes on loop devices."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crash.checkpoints import NAME, require_alone, save, state, version_at

import striate
from striate._engine import Io
from support.loop_drives import LoopDrive

MakeDrives = Callable[..., list[LoopDrive]]

DRIVE_BYTES = 32 << 20


@pytest.fixture
def drive(make_loop_drives: MakeDrives) -> LoopDrive:
    (made,) = make_loop_drives(1, size_bytes=DRIVE_BYTES)
    return made


def reformat(drive: LoopDrive, *command: str) -> None:
    """Makes another file system on a drive: ``command`` and the device. Skips, saying why, where that does not go."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    subprocess.run(["umount", drive.path], check=True)
    made = subprocess.run([*command, drive.device], capture_output=True, text=True, check=False)
    mounted = subprocess.run(["mount", drive.device, drive.path], capture_output=True, text=True, check=False)
    if made.returncode or mounted.returncode:
        if mounted.returncode:
            subprocess.run(["mount", "-t", "tmpfs", "none", drive.path], check=True)  # for the teardown
        pytest.skip(f"{' '.join(command)}: {made.stderr.strip()} {mounted.stderr.strip()}")


def free_bytes(drive: LoopDrive) -> int:
    found = os.statvfs(drive.path)
    return found.f_bavail * found.f_frsize


def fill(drive: LoopDrive) -> None:
    """Another writer takes all space."""
    other = os.open(drive.path / "other", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while free_bytes(drive) >= size:
                    assert os.write(other, bytes(size)) == size
                    os.fsync(other)
    finally:
        os.close(other)


class FillsBefore(Io):
    """An engine on a drive that another writer fills just before the space is asked for."""

    drive: LoopDrive

    def allocate(self, fd: int, length: int) -> None:
        fill(self.drive)
        super().allocate(fd, length)


class FillsAfter(Io):
    """An engine on a drive that another writer fills once the space was asked for."""

    drive: LoopDrive

    def allocate(self, fd: int, length: int) -> None:
        super().allocate(fd, length)
        fill(self.drive)


def check_full(error: striate.DriveFull, path: Path, old: int) -> None:
    assert error.errno == errno.ENOSPC
    assert error.filename == str(path)
    assert f"the earlier {NAME} is intact" in str(error)
    assert version_at(path) == old


def test_a_full_drive_is_found_before_the_first_byte(drive: LoopDrive, engine_name: str) -> None:
    path = drive.path / "run" / NAME
    path.parent.mkdir()
    save(1, path)
    io = Io(engine_name, trace=True)  # type: ignore[arg-type]
    too_much = {"weights": torch.zeros(DRIVE_BYTES // 4)}
    with pytest.raises(striate.DriveFull) as caught:
        striate.save(too_much, path, engine=io)
    error = caught.value
    check_full(error, path, 1)
    assert error.needed is not None
    assert error.free is not None
    assert DRIVE_BYTES < error.needed < DRIVE_BYTES + (1 << 20)
    assert 0 < error.free < DRIVE_BYTES
    assert f"{error.needed:,}" in str(error)
    assert f"{error.free:,}" in str(error)
    assert not {"write", "allocate", "rename"} & {entry.op for entry in io.traces()}
    require_alone(path)
    save(2, path, engine=engine_name)
    assert version_at(path) == 2


def test_a_drive_that_another_fills_before_the_space_is_taken_fails_the_save(
    drive: LoopDrive, engine_name: str
) -> None:
    path = drive.path / "run" / NAME
    path.parent.mkdir()
    save(1, path)
    io = FillsBefore(engine_name)  # type: ignore[arg-type]
    io.drive = drive
    with pytest.raises(striate.DriveFull) as caught:
        striate.save(state(2, data_bytes=4 << 20), path, engine=io)
    check_full(caught.value, path, 1)
    assert "preallocate" in str(caught.value)
    require_alone(path)


def test_space_once_taken_cannot_be_taken_by_others(drive: LoopDrive, engine_name: str) -> None:
    """Preallocation: a save that has begun ends, whatever else is written meanwhile."""
    path = drive.path / "run" / NAME
    path.parent.mkdir()
    save(1, path)
    io = FillsAfter(engine_name)  # type: ignore[arg-type]
    io.drive = drive
    striate.save(state(2, data_bytes=4 << 20), path, engine=io)
    assert version_at(path, data_bytes=4 << 20) == 2
    require_alone(path)


def test_a_drive_that_fills_during_the_write_fails_the_save_at_an_offset(
    drive: LoopDrive, engine_name: str
) -> None:
    """A file system that cannot preallocate: files without extents."""
    reformat(drive, "mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^extent,^64bit")
    path = drive.path / "run" / NAME
    path.parent.mkdir()
    save(1, path)
    io = FillsAfter(engine_name)  # type: ignore[arg-type]
    io.drive = drive
    with pytest.raises(striate.DriveFull) as caught:
        striate.save(state(2, data_bytes=4 << 20), path, engine=io, chunk_bytes=65536)
    check_full(caught.value, path, 1)
    assert "write failed" in str(caught.value)
    assert caught.value.offset is not None
    assert caught.value.free == 0
    require_alone(path)
    (drive.path / "other").unlink()
    striate.save(state(2, data_bytes=4 << 20), path, engine=engine_name)  # type: ignore[arg-type]
    assert version_at(path, data_bytes=4 << 20) == 2


def test_a_quota_that_is_used_up_is_named_as_such_and_leaves_the_old_checkpoint(
    make_loop_drives: MakeDrives, engine_name: str
) -> None:
    """btrfs's quota groups: the kernel's other quotas need formats that not every kernel is built with."""
    if shutil.which("btrfs") is None:
        pytest.skip("btrfs is not installed (btrfs-progs)")
    (drive,) = make_loop_drives(1, size_bytes=160 << 20)
    reformat(drive, "mkfs.btrfs", "-q", "-f")
    folder = drive.path / "run"
    subprocess.run(["btrfs", "subvolume", "create", folder], check=True, capture_output=True)
    subprocess.run(["btrfs", "quota", "enable", drive.path], check=True, capture_output=True)
    subprocess.run(["btrfs", "qgroup", "limit", "2M", folder], check=True, capture_output=True)
    path = folder / NAME
    save(1, path)
    with pytest.raises(striate.DriveFull) as caught:
        striate.save(state(2, data_bytes=4 << 20), path, engine=engine_name)  # type: ignore[arg-type]
    assert caught.value.errno == errno.EDQUOT
    assert caught.value.filename == str(path)
    assert "quota" in str(caught.value)
    assert f"the earlier {NAME} is intact" in str(caught.value)
    assert version_at(path) == 1
    require_alone(path)
    # The failed try gives back what it had taken.
    subprocess.run(["btrfs", "filesystem", "sync", drive.path], check=True)
    save(3, path, engine=engine_name)
    assert version_at(path) == 3


def test_a_read_only_file_system_is_a_clear_error_and_still_loads(drive: LoopDrive, engine_name: str) -> None:
    path = drive.path / NAME
    save(1, path)
    subprocess.run(["mount", "-o", "remount,ro", drive.path], check=True)
    with pytest.raises(striate.DriveAccess) as caught:
        save(2, path, engine=engine_name)
    assert caught.value.errno == errno.EROFS
    assert caught.value.filename == str(path)
    assert "read-only" in str(caught.value)
    assert "intact" in str(caught.value)
    assert version_at(path) == 1
    with pytest.raises(striate.DriveAccess) as caught:
        save(2, drive.path / "new", engine=engine_name)
    assert caught.value.errno == errno.EROFS
