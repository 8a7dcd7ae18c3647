"""Real file systems on loop devices: pulled, full, of other sector sizes and kinds."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drives.conftest import left_on
from drives.volumes import NAME, require_version, state, volume

import striate
from support.loop_drives import LoopDrive, capped

MIB = 1 << 20

Make = Callable[..., list[LoopDrive]]


def paths_of(drives: list[LoopDrive]) -> list[Path]:
    return [drive.path for drive in drives]


@pytest.mark.parametrize("file_system", ["ext4", "xfs"])
def test_every_layout_on_real_drives_and_one_unmounted(
    make_loop_drives: Make, quiet: list[Any], file_system: str
) -> None:
    drives = make_loop_drives(3, file_system=file_system)
    folders = paths_of(drives)
    for layout in ("stripe", "mirror", "parity"):
        used = volume(folders, layout, {}, engine="auto")
        used.save(state(1), layout)
        require_version(used.load(layout), 1)
        assert used.verify(layout).ok
    assert not quiet
    subprocess.run(["umount", str(folders[1])], check=True)
    try:
        require_version(volume(folders, "parity", {}).load("parity"), 1)
        require_version(volume(folders, "mirror", {}).load("mirror"), 1)
        with pytest.raises(striate.MissingMember, match="no label"):
            volume(folders, "stripe", {}).load("stripe")
        with pytest.raises(striate.DriveError):
            volume(folders, "stripe", {}).save(state(2), "stripe")
        assert volume(folders, "parity", {}).save(state(2), "parity").degraded
        assert os.listdir(folders[1]) == [], "nothing is written to the bare mount point"
    finally:
        subprocess.run(["mount", drives[1].device, str(folders[1])], check=True)
    quiet.clear()
    used = volume(folders, "parity", {})
    require_version(used.load("parity"), 2)
    assert str(folders[1]) in str(quiet[0].message)
    assert [done.name for done in used.repair()] == ["parity"]
    assert used.verify("parity").ok
    require_version(volume(folders, "stripe", {}).load("stripe"), 1)


@pytest.mark.parametrize("file_system", ["ext4", "xfs"])
def test_a_drive_that_goes_read_only_in_the_middle_of_a_save(
    make_loop_drives: Make, quiet: list[Any], file_system: str
) -> None:
    drives = make_loop_drives(3, file_system=file_system)
    folders = paths_of(drives)
    used = striate.Volume(folders, "parity")
    saved = {"t": state(1, data_bytes=48 * MIB)["model"]["weights"]}
    used.save(saved, NAME)
    new = {"t": saved["t"] ^ 0x55}
    failures: list[BaseException] = []

    def work() -> None:
        try:
            used.save(new, NAME)
        except BaseException as e:
            failures.append(e)

    with capped(drives, 30 * 1_000_000):
        saver = threading.Thread(target=work)
        saver.start()
        time.sleep(0.3)
        # As the kernel does after an I/O error of the journal.
        subprocess.run(["mount", "-o", "remount,abort", str(folders[2])], check=False, capture_output=True)
        if file_system == "xfs":
            subprocess.run(["xfs_io", "-x", "-c", "shutdown", str(folders[2])], check=True)
        saver.join()
    assert not failures, "parity goes on without the drive"
    loaded = used.load(NAME)
    assert loaded["t"].equal(new["t"])
    with pytest.raises(striate.StriateError):
        striate.Volume(folders, "parity", on_drive_failure="raise").save(new, NAME)
    assert used.load(NAME)["t"].equal(new["t"])


@pytest.mark.parametrize("work", ["load", "repair"])
def test_a_drive_that_dies_in_the_middle_of_a_load_or_a_repair(
    make_loop_drives: Make, quiet: list[Any], work: str
) -> None:
    drives = make_loop_drives(3, file_system="xfs")
    folders = paths_of(drives)
    used = striate.Volume(folders, "parity", parity=1)
    saved = {"t": state(1, data_bytes=144 * MIB)["model"]["weights"]}
    used.save(saved, NAME)
    if work == "repair":
        (folders[2] / NAME).unlink()
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(used.load(NAME) if work == "load" else used.repair())
        except striate.StriateError as e:
            outcome.append(e)

    # Far more than is in flight at once.
    with capped(drives, 60 * 1_000_000):
        runner = threading.Thread(target=run)
        runner.start()
        time.sleep(0.3)
        subprocess.run(["xfs_io", "-x", "-c", "shutdown", str(folders[2])], check=True)
        runner.join()
    if work == "load":
        assert outcome[0]["t"].equal(saved["t"])
        assert str(folders[2]) in str(quiet[0].message)
    else:
        assert isinstance(outcome[0], striate.DriveError) and str(folders[2]) in str(outcome[0])
    assert used.load(NAME)["t"].equal(saved["t"])
    subprocess.run(["umount", str(folders[2])], check=True)
    subprocess.run(["mount", drives[2].device, str(folders[2])], check=True)
    used.repair()
    assert used.verify(NAME).ok


def test_drives_of_other_sectors_and_kinds_work_together(make_loop_drives: Make, tmp_path: Path) -> None:
    coarse = make_loop_drives(1, sector_bytes=4096)[0].path
    shm = Path("/dev/shm") / f"striate-test-{os.getpid()}"
    shm.mkdir()
    plain = tmp_path / "plain"
    plain.mkdir()
    try:
        folders = [coarse, shm, plain]
        for layout in ("stripe", "parity"):
            used = volume(folders, layout, {}, engine="auto")
            used.save(state(1), NAME)
            require_version(used.load(NAME), 1)
            require_version(used.load_into(state(2), NAME), 1)
            used.save(state(2), NAME)
            require_version(used.load(NAME), 2)
    finally:
        subprocess.run(["rm", "-r", str(shm)], check=True)


def test_a_full_drive_is_found_before_the_first_byte_and_named(make_loop_drives: Make) -> None:
    drives = make_loop_drives(2, size_bytes=64 * MIB)
    folders = paths_of(drives)
    used = volume(folders, "mirror", {})
    used.save(state(1), NAME)
    with open(folders[1] / "ballast", "wb") as ballast:
        free = os.statvfs(folders[1])
        os.posix_fallocate(ballast.fileno(), 0, (free.f_bfree * free.f_bsize) - 2 * MIB)
    with pytest.raises(striate.DriveFull, match=str(folders[1])) as caught:
        used.save(state(2, data_bytes=8 * MIB), NAME)
    assert caught.value.needed and caught.value.free is not None
    assert left_on(folders[0]) == {NAME, "lost+found"}
    require_version(used.load(NAME), 1)
    (folders[1] / "ballast").unlink()
    used.save(state(2), NAME)
    require_version(used.load(NAME), 2)


def test_a_drive_read_only_from_the_start_is_done_without(make_loop_drives: Make, quiet: list[Any]) -> None:
    drives = make_loop_drives(2)
    folders = paths_of(drives)
    used = volume(folders, "mirror", {})
    used.save(state(1), NAME)
    subprocess.run(["mount", "-o", "remount,ro", str(folders[0])], check=True)
    result = used.save(state(2), NAME)
    assert result.degraded and "EROFS" in result.members[0].trouble + str(quiet[0].message)
    require_version(used.load(NAME), 2)
    subprocess.run(["mount", "-o", "remount,rw", str(folders[0])], check=True)
    used.repair()
    assert used.verify(NAME).ok


def test_the_slower_drive_of_a_mirror_gets_less_to_read(make_loop_drives: Make) -> None:
    drives = make_loop_drives(2)
    folders = paths_of(drives)
    used = striate.Volume(folders, "mirror")
    saved = {"t": state(1, data_bytes=192 * MIB)["model"]["weights"]}
    used.save(saved, NAME)
    told: list[striate.LoadResult] = []
    with capped(drives[:1], 20 * 1_000_000):
        loaded = used.load(NAME, on_loaded=told.append)
    assert loaded["t"].equal(saved["t"])
    slow, fast = told[0].drives
    assert (slow.drive, fast.drive) == tuple(map(str, folders))
    assert slow.bytes < fast.bytes / 2 and slow.bytes + fast.bytes >= 192 * MIB
    # Which of the two holds the load up can be seen.
    assert slow.mib_per_s < fast.mib_per_s and slow.busy_s > fast.busy_s
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert used.verify(NAME).ok
