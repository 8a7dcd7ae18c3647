"""Drives made of one: file systems on loop devices, each with its own sector size and, if asked, its own speed.

Needs root and lives in a mount namespace of the test process: when that ends, however it ends, mounts and devices go.
O_DIRECT on tmpfs, btrfs and FUSE takes any alignment and hides every alignment bug; ext4 and xfs here do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CLONE_NEWNS = 0x00020000
ATTACH_ATTEMPTS = 5
PROGRAMS = ("losetup", "mount", "umount", "mkfs.ext4", "mkfs.xfs")

_namespace_of: int | None = None


class CannotMakeDrives(Exception):
    """Says what is missing: root, a program, loop devices, a block cgroup."""


@dataclass(frozen=True)
class LoopDrive:
    path: Path  # where it is mounted
    device: str  # /dev/loopN


@contextlib.contextmanager
def loop_drives(
    folder: Path,
    count: int,
    *,
    size_bytes: int = 320 << 20,
    file_system: Literal["ext4", "xfs"] = "ext4",
    sector_bytes: int = 512,
) -> Iterator[list[LoopDrive]]:
    """``count`` drives with their images and mount points under ``folder``. xfs wants at least 300 MiB each."""
    if os.geteuid() != 0:
        raise CannotMakeDrives("loop devices and mounts need root")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise CannotMakeDrives(f"not installed: {', '.join(missing)}")
    _own_mount_namespace()
    with contextlib.ExitStack() as stack:
        drives = []
        for index in range(count):
            device = _attach(folder / f"drive{index}.img", size_bytes, sector_bytes)
            # A busy device is given back at its last close.
            stack.callback(subprocess.run, ["losetup", "--detach", device], check=False, capture_output=True)
            if file_system == "ext4":
                _call(
                    "mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", device
                )
            else:
                _call("mkfs.xfs", "-q", "-f", device)
            path = folder / f"drive{index}"
            path.mkdir()
            _call("mount", device, str(path))
            stack.callback(_call, "umount", str(path))
            drives.append(LoopDrive(path, device))
        yield drives


@contextlib.contextmanager
def capped(drives: Sequence[LoopDrive], bytes_per_s: int) -> Iterator[None]:
    """Within the block, this process and its children read and write each drive at ``bytes_per_s`` at most.

    Direct I/O and reads are charged to the process; with cgroup v1, written-back pages escape.
    """
    kind, root = _block_cgroup()
    numbers = [
        Path(f"/sys/class/block/{Path(drive.device).name}/dev").read_text().strip() for drive in drives
    ]
    group = root / f"striate-test-{os.getpid()}"
    group.mkdir()
    try:
        for number in numbers:
            if kind == "v1":
                for direction in ("read", "write"):
                    (group / f"blkio.throttle.{direction}_bps_device").write_text(f"{number} {bytes_per_s}")
            else:
                (group / "io.max").write_text(f"{number} rbps={bytes_per_s} wbps={bytes_per_s}")
        home = _group_of_process(kind, root)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (home / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        group.rmdir()


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMakeDrives(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _own_mount_namespace() -> None:
    global _namespace_of
    if _namespace_of == os.getpid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise CannotMakeDrives(f"unshare(CLONE_NEWNS): {os.strerror(ctypes.get_errno())}")
    # Otherwise our mounts would propagate to everybody.
    _call("mount", "--make-rprivate", "/")
    _namespace_of = os.getpid()


def _attach(image: Path, size_bytes: int, sector_bytes: int) -> str:
    with image.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    attach = ("losetup", "--find", "--show", "--direct-io=on", f"--sector-size={sector_bytes}", str(image))
    for attempt in range(ATTACH_ATTEMPTS):
        try:
            device = _call(*attach)
            break
        except CannotMakeDrives:
            # --find and the attach are two steps: another process may take the device in between.
            if attempt == ATTACH_ATTEMPTS - 1:
                raise
    # The loop device keeps the file; unlinked, it cannot outlive the device.
    image.unlink()
    return device


def _block_cgroup() -> tuple[Literal["v1", "v2"], Path]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        root, (kind, _, options) = Path(before.split()[4]), after.split()[:3]
        if kind == "cgroup" and "blkio" in options.split(","):
            return "v1", root
        if kind == "cgroup2":
            with contextlib.suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+io")
            with contextlib.suppress(OSError):
                if "io" in (root / "cgroup.subtree_control").read_text().split():
                    return "v2", root
    raise CannotMakeDrives("no block cgroup is mounted (v1 blkio or v2 io)")


def _group_of_process(kind: str, root: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (kind == "v2" and controllers == "") or (kind == "v1" and "blkio" in controllers.split(",")):
            return root / path.lstrip("/")
    return root
