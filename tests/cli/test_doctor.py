"""doctor: ten faults are planted for real, each is named with a remedy, and where nothing is wrong nothing is said."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Cli, require_narrow

import striate
from striate import devices
from support.loop_drives import LoopDrive
from support.sandbox import NOBODY, run_python

Make = Callable[..., list[LoopDrive]]

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
PROGRAM = """
import sys
from striate.cli.app import main
import striate.cli.doctor
sys.argv = ["striate", "doctor", "--json", *sys.argv[1:]]
main()
"""

# After all imports, those that come late too: nobody may not be allowed to read the interpreter's own files.
AS_NOBODY = f"""
import contextlib, io, os, resource
arguments = sys.argv
for path in ("/dev/shm", "/nowhere"):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        sys.argv = ["striate", "doctor", path, "--json"]
        main()
sys.argv = arguments
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
main()
"""


def findings_of(ran: Any) -> list[dict[str, str]]:
    found: list[dict[str, str]] = ran.json["findings"]
    assert all(finding["what"] and finding["why"] and finding["do"] for finding in found)
    return found


def the_one(found: list[dict[str, str]], text: str) -> dict[str, str]:
    matching = [finding for finding in found if text in finding["what"]]
    assert len(matching) == 1, [finding["what"] for finding in found]
    return matching[0]


@contextlib.contextmanager
def mounted(point: Path, *words: object) -> Iterator[Path]:
    point.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *map(str, words), str(point)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mount {' '.join(map(str, words))}: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.fixture
def drive(make_loop_drives: Make) -> LoopDrive:
    return make_loop_drives(1, size_bytes=64 << 20)[0]


def test_a_good_drive_has_nothing_but_that_it_is_a_loop_device(cli: Cli, drive: LoopDrive) -> None:
    name = drive.device.removeprefix("/dev/")
    (Path("/sys/block") / name / "queue/rotational").write_text("0")
    ran = cli("doctor", drive.path)
    assert ran.code == 0 and "0 fault(s), 0 warning(s)" in ran.out
    require_narrow(ran.out)
    found = cli("doctor", drive.path, "--json").json
    facts = found["drives"][0]
    assert facts["mount"]["kind"] == "ext4" and facts["direct"] == "yes" and facts["writable"]
    assert facts["memory_alignment"] == facts["offset_alignment"] == 512
    assert facts["disks"][0]["name"] == name and facts["disks"][0]["backing_file"]
    assert [finding["severity"] for finding in found["findings"]] == ["note"]
    assert sorted(os.listdir(drive.path)) == ["lost+found"]  # nothing is left behind


# ---- the ten -----------------------------------------------------------------------


def test_io_uring_refused_by_seccomp(tmp_path: Path) -> None:
    done = run_python(PROGRAM, tmp_path, refuse={"io_uring_setup": "EPERM"}, check=False)
    one = the_one(json.loads(done.stdout)["findings"], "io_uring cannot be used")
    assert "seccomp" in one["what"] and "profile" in one["do"]


@ROOT
def test_io_uring_switched_off_by_sysctl(tmp_path: Path) -> None:
    """The sysctl as this process sees it: the kernel's own would switch it off for every test that runs beside."""
    value = tmp_path / "io_uring_disabled"
    value.write_text("2\n")
    there = Path("/proc/sys/kernel/io_uring_disabled")
    if not there.exists():
        pytest.skip("this kernel has no such sysctl")
    script = f"""
    import ctypes, subprocess
    assert ctypes.CDLL(None).unshare(0x20000) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", {str(value)!r}, {str(there)!r}], check=True)
    """
    done = run_python(
        textwrap.dedent(script) + PROGRAM, tmp_path, refuse={"io_uring_setup": "EPERM"}, check=False
    )
    one = the_one(json.loads(done.stdout)["findings"], "io_uring cannot be used")
    assert "kernel.io_uring_disabled=2" in one["what"] and "sysctl kernel.io_uring_disabled=0" in one["do"]


@ROOT
def test_a_file_system_in_memory(cli: Cli, tmp_path: Path) -> None:
    with mounted(tmp_path / "t", "-t", "tmpfs", "-o", "size=64m", "tmpfs") as point:
        ran = cli("doctor", point, "--json")
        one = the_one(findings_of(ran), "tmpfs")
        assert ran.code == 1 and one["severity"] == "fault" and "drive" in one["do"]


def test_two_directories_on_one_device(cli: Cli, drive: LoopDrive) -> None:
    for name in ("a", "b"):
        (drive.path / name).mkdir()
    ran = cli("doctor", drive.path / "a", drive.path / "b", "--json")
    one = the_one(findings_of(ran), "on one device")
    assert ran.code == 1 and drive.device.removeprefix("/dev/") in one["what"] and "each drive" in one["do"]
    assert str(drive.path / "a") in one["subject"] and str(drive.path / "b") in one["subject"]


@pytest.mark.parametrize("flag", ["0", "1"])
def test_the_rotating_flag(cli: Cli, drive: LoopDrive, flag: str) -> None:
    path = Path("/sys/block") / drive.device.removeprefix("/dev/") / "queue/rotational"
    before = path.read_text()
    path.write_text(flag)
    try:
        found = findings_of(cli("doctor", drive.path, "--json"))
    finally:
        path.write_text(before)
    if flag == "0":
        assert not [finding for finding in found if "rotating disk" in finding["what"]]
        return
    assert "queue/rotational" in the_one(found, "rotating disk")["do"]


def test_a_full_drive_and_one_that_is_nearly_full(cli: Cli, drive: LoopDrive) -> None:
    with open(drive.path / "filler", "wb") as file:
        room = os.statvfs(drive.path)
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - (2 << 20))
    ran = cli("doctor", drive.path, "--json")
    one = the_one(findings_of(ran), "full: ")
    assert ran.code == 1 and one["severity"] == "fault" and "delete" in one["do"]


def test_a_drive_that_is_mounted_read_only(cli: Cli, drive: LoopDrive) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(drive.path)], check=True)
    ran = cli("doctor", drive.path, "--json")
    one = the_one(findings_of(ran), "read-only")
    assert ran.code == 1 and "remount,rw" in one["do"]


@ROOT
def test_little_memory_may_be_locked(tmp_path: Path) -> None:
    done = run_python(PROGRAM.replace("main()", AS_NOBODY), "/tmp", check=False)
    one = the_one(json.loads(done.stdout)["findings"], "may be locked")
    assert "64.0 KiB" in one["what"] and "ulimit -l" in one["do"]
    # Whoever may lock what he likes is not told to raise a limit that does not count.
    done = run_python(PROGRAM, "/tmp", limits={"memlock": 64 << 10}, check=False)
    assert "may be locked" not in done.stdout


@ROOT
def test_a_file_system_that_refuses_o_direct(cli: Cli, tmp_path: Path) -> None:
    with mounted(tmp_path / "r", "-t", "ramfs", "ramfs") as point:
        try:
            os.close(os.open(point / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
            refuses = False
        except OSError:
            refuses = True
        found = findings_of(cli("doctor", point, "--json"))
        if not refuses:
            pytest.skip("ramfs takes O_DIRECT on this kernel")
        assert "xfs or ext4" in the_one(found, "O_DIRECT is refused")["do"]
        # It does not tell its size, which is not the same as having none.
        assert not [finding for finding in found if "full" in finding["what"]]


@ROOT
def test_the_layer_of_a_container(cli: Cli, tmp_path: Path, drive: LoopDrive) -> None:
    for name in ("lower", "upper", "work"):
        (drive.path / name).mkdir()
    layers = f"lowerdir={drive.path}/lower,upperdir={drive.path}/upper,workdir={drive.path}/work"
    with mounted(tmp_path / "o", "-t", "overlay", "-o", layers, "overlay") as point:
        assert "volume" in the_one(findings_of(cli("doctor", point, "--json")), "overlay")["do"]


# ---- and more ----------------------------------------------------------------------


def test_mount_options_that_cost_or_endanger(cli: Cli, drive: LoopDrive) -> None:
    subprocess.run(["mount", "-o", "remount,sync,nobarrier", str(drive.path)], check=True)
    ran = cli("doctor", drive.path, "--json")
    assert ran.code == 1
    assert "remount,barrier" in the_one(findings_of(ran), "without write barriers")["do"]
    the_one(findings_of(ran), "mounted with sync")


def test_the_data_set_on_the_same_device(
    cli: Cli, drive: LoopDrive, make_loop_drives: Make, tmp_path: Path
) -> None:
    (drive.path / "data").mkdir()
    found = findings_of(cli("doctor", drive.path, "--dataset", drive.path / "data", "--json"))
    assert "idle_priority" in the_one(found, "the data set")["do"]
    found = findings_of(cli("doctor", drive.path, "--dataset", tmp_path, "--json"))
    assert not [finding for finding in found if "the data set" in finding["what"]]


@ROOT
def test_an_ordinary_user_in_a_directory_of_somebody_else(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and str(above).startswith("/tmp/"):
            above.chmod(0o755)
    done = run_python(PROGRAM.replace("main()", AS_NOBODY), closed, check=False)
    one = the_one(json.loads(done.stdout)["findings"], "cannot write here")
    assert done.returncode == 1 and one["severity"] == "fault"


def test_a_drive_that_is_full_to_its_last_block_still_takes_o_direct(cli: Cli, drive: LoopDrive) -> None:
    with open(drive.path / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    found = findings_of(cli("doctor", drive.path, "--json"))
    the_one(found, "full: ")
    assert not [finding for finding in found if "O_DIRECT" in finding["what"]]


@ROOT
def test_a_file_system_out_of_inodes(cli: Cli, tmp_path: Path) -> None:
    with mounted(tmp_path / "t", "-t", "tmpfs", "-o", "size=64m,nr_inodes=2", "tmpfs") as point:
        (point / "last").touch()
        found = findings_of(cli("doctor", point, "--json"))
        assert "df -i" in the_one(found, "does not fit")["why"]
        assert not [finding for finding in found if "cannot write" in finding["what"]]


def test_a_file_system_that_refuses_writes_after_an_error(cli: Cli, drive: LoopDrive) -> None:
    """From Linux 6.15 on ext4 says emergency_ro in such a case, and goes on calling itself rw."""
    trigger = Path("/sys/fs/ext4") / drive.device.removeprefix("/dev/") / "trigger_fs_error"
    if not trigger.exists():
        pytest.skip("this kernel cannot be asked for an ext4 error")
    subprocess.run(["mount", "-o", "remount,errors=remount-ro", str(drive.path)], check=True)
    trigger.write_text("1")
    ran = cli("doctor", drive.path, "--json")
    one = the_one(findings_of(ran), "read-only")
    assert ran.code == 1 and "dmesg" in one["do"] and "fsck" in one["do"]


@pytest.mark.parametrize(("code", "refused"), [(errno.EIO, False), (errno.EINVAL, True)])
def test_a_write_that_fails_is_no_refusal_of_o_direct(
    cli: Cli, drive: LoopDrive, monkeypatch: pytest.MonkeyPatch, code: int, refused: bool
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    ran = cli("doctor", drive.path, "--json")
    if refused:
        the_one(findings_of(ran), "O_DIRECT is refused")
    else:
        one = the_one(findings_of(ran), "(EIO)")
        assert ran.code == 1 and one["severity"] == "fault" and "dmesg" in one["do"]
    assert sorted(os.listdir(drive.path)) == ["lost+found"]


def test_ext4_that_buffers_o_direct_is_not_said_to_take_it(cli: Cli, drive: LoopDrive) -> None:
    subprocess.run(["umount", str(drive.path)], check=True)
    subprocess.run(["mount", "-o", "data=journal", drive.device, str(drive.path)], check=True)
    found = cli("doctor", drive.path, "--json").json
    assert found["drives"][0]["direct"] == "accepted, may be buffered"
    assert "data=journal" in the_one(found["findings"], "O_DIRECT")["do"]


@ROOT
def test_a_mount_that_another_hides_is_not_looked_at(cli: Cli, tmp_path: Path, drive: LoopDrive) -> None:
    (drive.path / "sub").mkdir()
    above = tmp_path / "above"
    (above / "sub").mkdir(parents=True)
    with mounted(above / "sub", "-t", "tmpfs", "tmpfs"), mounted(above, "--bind", drive.path):
        found = cli("doctor", above / "sub", "--json").json
    assert found["drives"][0]["mount"]["kind"] == "ext4"
    assert not [finding for finding in found["findings"] if "tmpfs" in finding["what"]]


@ROOT
def test_the_data_set_on_a_file_system_without_a_device(cli: Cli, tmp_path: Path) -> None:
    with mounted(tmp_path / "t", "-t", "tmpfs", "-o", "size=64m", "tmpfs") as point:
        (point / "data").mkdir()
        the_one(findings_of(cli("doctor", point, "--dataset", point / "data", "--json")), "the data set")


@ROOT
def test_a_directory_that_may_not_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "closed/inner").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and str(above).startswith("/tmp/"):
            above.chmod(0o755)
    done = run_python(PROGRAM.replace("main()", AS_NOBODY), tmp_path / "closed/inner", check=False)
    assert done.returncode == 1 and "Permission denied" in json.loads(done.stdout)["error"]


def test_a_name_that_is_no_text_is_shown_escaped(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff\n"
    os.mkdir(odd)
    program = PROGRAM.replace('"--json", ', "")
    done = subprocess.run(
        [sys.executable, "-c", program, odd],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(striate.__file__).parents[1]),
            "PYTHONIOENCODING": "utf-8:strict",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "\\xff" in done.stdout and "Error" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [(("nowhere",), 1, "does not exist"), (("file",), 1, "is no directory"), ((), 2, "DRIVE")],
)
def test_bad_input(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any, code: int, said: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    ran = cli("doctor", *words)
    assert ran.code == code and said in ran.err


def test_health_is_taken_from_whichever_program_tells(
    cli: Cli, drive: LoopDrive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in the place of smartctl that answers as it does for a worn NVMe drive (smartctl -j, 7.3)."""
    told = {
        "smart_status": {"passed": False},
        "nvme_smart_health_information_log": {
            "critical_warning": 4,
            "available_spare": 3,
            "percentage_used": 97,
            "media_errors": 12,
        },
    }
    program = tmp_path / "bin/smartctl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    disk = devices.Disk("sdz", "", 0, False, "", "none", None, None, 512, 512, "")
    monkeypatch.setattr("striate.cli.doctor.disks_under", lambda path: [disk])
    ran = cli("doctor", drive.path, "--json")
    found = findings_of(ran)
    assert ran.code == 1
    assert the_one(found, "is failing")["severity"] == "fault"
    assert "97 %" in the_one(found, "of its endurance")["what"]
    assert "12" in the_one(found, "media errors")["what"]
    assert "3 % spare" in cli("doctor", drive.path).out
    program.write_text("#!/bin/sh\necho 'no permission'; exit 2\n")
    assert "not known" in " ".join(cli("doctor", drive.path).out.split())


def test_disks_are_found_through_partitions_and_mappings(make_loop_drives: Make, tmp_path: Path) -> None:
    first, second = make_loop_drives(2, size_bytes=32 << 20)
    assert [d.name for d in devices.disks_under(first.path)] == [first.device.removeprefix("/dev/")]
    assert [d.name for d in devices.disks_under(second.path / "lost+found")] == [
        second.device.removeprefix("/dev/")
    ]
    mount = devices.mount_of(first.path / "lost+found")
    assert (
        mount is not None and (mount.point, mount.kind) == (str(first.path), "ext4") and not mount.read_only
    )


def test_it_needs_no_torch(tmp_path: Path) -> None:
    program = PROGRAM.replace("main()", "assert 'torch' not in sys.modules\nmain()")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(striate.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1) and "AssertionError" not in done.stderr
    assert json.loads(done.stdout)["drives"][0]["path"] == str(tmp_path)
