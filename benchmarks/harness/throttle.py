"""A drive of a known speed: ext4 on a loop device, capped in bytes/s by the block cgroup. Needs root.

What blkio (cgroup v1) charges to the process is its direct I/O and its reads through the page cache. Written-back pages
are charged to whoever flushes them, mostly kernel threads outside the cgroup, so buffered writes escape the cap: on
such a drive only direct writers can be compared. cgroup v2 charges write-back too, where the io and memory controllers
are both on.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "striate-bench-"
CLONE_NEWNS = 0x00020000
LOOP_ATTEMPTS = 5
# Journal, tables and room for the file system's own reserve.
OVERHEAD_BYTES = 192 << 20


class CannotThrottle(Exception):
    """What is missing for a throttled drive: root, a program, or a block cgroup."""


@dataclass(frozen=True)
class ThrottledDrive:
    path: Path
    cgroup: Path
    rate_bytes_s: int
    charges_writeback: bool
    backing: str

    def enter(self) -> None:
        """Put this process under the cap; its threads and children follow."""
        (self.cgroup / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def throttled_drive(
    size_bytes: int, rate_bytes_s: int, *, on_disk: Path | None = None
) -> Iterator[ThrottledDrive]:
    """One of `throttled_drives`."""
    with throttled_drives(1, size_bytes, rate_bytes_s, on_disk=on_disk) as drives:
        yield drives[0]


@contextlib.contextmanager
def throttled_drives(
    count: int, size_bytes: int, rate_bytes_s: int, *, on_disk: Path | None = None
) -> Iterator[list[ThrottledDrive]]:
    """ext4 drives that hold `size_bytes` each, backed by RAM or by files in `on_disk`, each capped for reads and for
    writes; all in one cgroup, so that entering that of one is entering that of all.

    The calling process moves into a mount namespace of its own: the mounts, the loop devices and the RAM go when the
    last process in it ends, even by SIGKILL; only an empty cgroup can stay, and the next run removes that.
    Raises CannotThrottle.
    """
    if os.geteuid() != 0:
        raise CannotThrottle("a throttled drive needs root (loop device, mount, cgroup)")
    missing = [name for name in ("losetup", "mkfs.ext4", "mount", "umount") if shutil.which(name) is None]
    if missing:
        raise CannotThrottle(f"not installed: {', '.join(missing)} (Debian: util-linux, e2fsprogs)")
    _own_mount_namespace()
    with contextlib.ExitStack() as stack:
        base = Path(tempfile.mkdtemp(prefix=PREFIX))
        stack.callback(_remove_empty, base)
        image_bytes = size_bytes + OVERHEAD_BYTES
        store = on_disk or _ram(base, count * image_bytes + (16 << 20), stack)
        made = [_drive(base / f"drive{n}", store, image_bytes, on_disk, stack) for n in range(count)]
        cgroup, charges_writeback = _capped_cgroup([device for _, device in made], rate_bytes_s, stack)
        backing = "RAM" if on_disk is None else "a file"
        yield [ThrottledDrive(point, cgroup, rate_bytes_s, charges_writeback, backing) for point, _ in made]


def _ram(base: Path, size_bytes: int, stack: contextlib.ExitStack) -> Path:
    store = base / "ram"
    store.mkdir()
    _call("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "striate-bench", str(store))
    stack.callback(_call, "umount", str(store))
    return store


def _drive(
    point: Path, store: Path, image_bytes: int, on_disk: Path | None, stack: contextlib.ExitStack
) -> tuple[Path, str]:
    device = _attach(store, image_bytes, direct=on_disk is not None, stack=stack)
    point.mkdir()
    # discard off: a trim between two runs would hand the RAM back and make the next write pay for it again.
    options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
    _call("mkfs.ext4", "-q", "-F", "-m", "0", "-E", options, device)
    _call("mount", device, str(point))
    stack.callback(_call, "umount", str(point))
    return point, device


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotThrottle(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _own_mount_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise CannotThrottle(f"unshare(CLONE_NEWNS): {os.strerror(ctypes.get_errno())}")
    # Otherwise our mounts would propagate to everybody.
    _call("mount", "--make-rprivate", "/")


def _attach(store: Path, image_bytes: int, *, direct: bool, stack: contextlib.ExitStack) -> str:
    fd, image = tempfile.mkstemp(prefix=PREFIX, suffix=".img", dir=store)
    try:
        if direct:
            os.posix_fallocate(fd, 0, image_bytes)
        else:
            os.ftruncate(fd, image_bytes)
        for attempt in range(LOOP_ATTEMPTS):
            try:
                device = _call(
                    "losetup", "--find", "--show", f"--direct-io={'on' if direct else 'off'}", image
                )
                break
            except CannotThrottle:
                # --find and the attach are two steps: another process may take the device in between.
                if attempt == LOOP_ATTEMPTS - 1:
                    raise
        stack.callback(_detach, device)
    finally:
        os.close(fd)
        # The loop device keeps the file; unlinked, it cannot outlive the device.
        os.unlink(image)
    return device


def _detach(device: str) -> None:
    # --detach on a busy device is remembered and done at its last close.
    subprocess.run(["losetup", "--detach", device], capture_output=True, check=False)


def _capped_cgroup(
    devices: Sequence[str], rate_bytes_s: int, stack: contextlib.ExitStack
) -> tuple[Path, bool]:
    numbers = [Path(f"/sys/class/block/{Path(device).name}/dev").read_text().strip() for device in devices]
    kind, root = _block_cgroup()
    for leftover in root.glob(PREFIX + "*"):
        if not Path("/proc", leftover.name.removeprefix(PREFIX)).exists():
            with contextlib.suppress(OSError):
                leftover.rmdir()
    cgroup = root / f"{PREFIX}{os.getpid()}"
    cgroup.mkdir()
    stack.callback(cgroup.rmdir)
    if kind == "v1":
        for number in numbers:
            for direction in ("read", "write"):
                (cgroup / f"blkio.throttle.{direction}_bps_device").write_text(f"{number} {rate_bytes_s}")
        return cgroup, False
    for number in numbers:
        (cgroup / "io.max").write_text(f"{number} rbps={rate_bytes_s} wbps={rate_bytes_s}")
    return cgroup, "memory" in (cgroup / "cgroup.controllers").read_text().split()


def _block_cgroup() -> tuple[str, Path]:
    """("v1" or "v2", the root under which a cgroup with block limits can be made)."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        root, (kind, _, options) = Path(before.split()[4]), after.split()[:3]
        if kind == "cgroup" and "blkio" in options.split(","):
            return "v1", root
        if kind == "cgroup2" and "io" in (root / "cgroup.controllers").read_text().split():
            for controller in ("+io", "+memory"):
                with contextlib.suppress(OSError):
                    (root / "cgroup.subtree_control").write_text(controller)
            if "io" in (root / "cgroup.subtree_control").read_text().split():
                return "v2", root
    raise CannotThrottle("no block cgroup is mounted (v1 blkio or v2 io)")


def _remove_empty(base: Path) -> None:
    for path in [*base.glob("*"), base]:
        with contextlib.suppress(OSError):
            path.rmdir()
