"""What lies under a directory: mount, file system, devices down to the disks. Reads /proc and /sys and changes nothing.

Where something cannot be told, in a container for one, the value is None or empty. Field meanings:
Documentation/ABI/stable/sysfs-block and proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "BUFFERS_SILENTLY",
    "IN_MEMORY",
    "OVER_A_NETWORK",
    "Disk",
    "Mount",
    "disks_under",
    "mount_of",
    "nodes_of_process",
    "writes_barriers",
]

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
OVER_A_NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ceph",
        "9p",
        "lustre",
        "glusterfs",
        "gpfs",
        "beegfs",
        "virtiofs",
        "afs",
    }
)
# They take O_DIRECT, and copy the data all the same: for checksums, compression, or because they know no better.
BUFFERS_SILENTLY = frozenset({"btrfs", "zfs", "bcachefs", "fuseblk", "tmpfs"})

_SYS = Path("/sys")


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo. ``device``: major and minor number as the file system tells them."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]
    device: tuple[int, int]

    @property
    def read_only(self) -> bool:
        # After an error ext4 refuses writes from Linux 6.15 on while it still calls itself rw.
        return not {"ro", "emergency_ro"}.isdisjoint(self.options)


@dataclass(frozen=True)
class Disk:
    """A whole disk, as its driver describes it. Sizes in bytes. ``numa_node``: None where there is one only."""

    name: str
    model: str
    size_bytes: int
    rotational: bool | None
    write_cache: str
    scheduler: str
    poll: bool | None
    numa_node: int | None
    logical_bytes: int | None
    physical_bytes: int | None
    backing_file: str


# ---- mounts ------------------------------------------------------------------


def mount_of(path: str | os.PathLike[str]) -> Mount | None:
    """The mount that holds a path: by the kernel's number of it, or by its name where that is not told."""
    mounts = list(_mounts())
    number = _mount_number(path)
    for mount_number, mount in mounts:
        if mount_number == number:
            return mount
    # Of several over one point the last hides the others.
    real = os.path.realpath(path)
    best: Mount | None = None
    for _, mount in mounts:
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _mount_number(path: str | os.PathLike[str]) -> int | None:
    """The mount's number in mountinfo. Names do not tell it: a mount may be hidden by one above it."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for line in _text(Path(f"/proc/self/fdinfo/{descriptor}")).splitlines():
            if line.startswith("mnt_id:"):
                return int(line.split()[1])
    finally:
        os.close(descriptor)
    return None


def _mounts() -> Iterator[tuple[int, Mount]]:
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(b" - ")
        fields, rest = before.split(b" "), after.split(b" ")
        if len(fields) < 6 or len(rest) < 2:
            continue
        major, _, minor = fields[2].partition(b":")
        super_options = rest[2].split(b",") if len(rest) > 2 else []
        options = dict.fromkeys(os.fsdecode(o) for o in [*fields[5].split(b","), *super_options])
        # The mount's own word on ro and rw counts, not the file system's.
        if b"rw" in fields[5].split(b",") and "ro" in options and b"ro" not in super_options:
            del options["ro"]
        mount = Mount(
            _unescaped(fields[4]),
            os.fsdecode(rest[0]),
            _unescaped(rest[1]),
            tuple(options),
            (int(major), int(minor)),
        )
        yield int(fields[0]), mount


def _unescaped(field: bytes) -> str:
    for code, character in (
        (b"\\040", b" "),
        (b"\\011", b"\t"),
        (b"\\012", b"\n"),
        (b"\\043", b"#"),
        (b"\\134", b"\\"),
    ):
        field = field.replace(code, character)
    return os.fsdecode(field)


def writes_barriers(mount: Mount) -> bool:
    """Does a sync reach the medium? Not with barriers switched off."""
    return not {"nobarrier", "barrier=0", "barrier=none"} & set(mount.options)


# ---- disks -------------------------------------------------------------------


def disks_under(path: str | os.PathLike[str]) -> list[Disk]:
    """The whole disks that hold a path: partitions, device mapper and RAID are looked through. Empty where none is."""
    found: dict[str, Disk] = {}
    for number in _devices_of(path):
        entry = _SYS / "dev/block" / f"{number[0]}:{number[1]}"
        if entry.exists():
            for disk in _leaves(entry.resolve()):
                found.setdefault(disk.name, _described(disk))
    return list(found.values())


def _devices_of(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    device = os.stat(path).st_dev
    if os.major(device):
        return [(os.major(device), os.minor(device))]
    # btrfs, overlay and others have a number of their own: what they are mounted from tells more.
    mount = mount_of(path)
    if mount is None or not mount.source.startswith("/dev/"):
        return []
    try:
        source = os.stat(mount.source).st_rdev
    except OSError:
        return []
    return [(os.major(source), os.minor(source))]


def _leaves(entry: Path) -> Iterator[Path]:
    if (entry / "partition").exists():
        entry = entry.parent
    slaves = sorted((entry / "slaves").iterdir()) if (entry / "slaves").is_dir() else []
    if not slaves:
        yield entry
    for slave in slaves:
        yield from _leaves(slave.resolve())


def _described(entry: Path) -> Disk:
    queue = entry / "queue"
    sectors = _text(entry / "size")
    return Disk(
        name=entry.name,
        model=_text(entry / "device/model"),
        size_bytes=int(sectors) * 512 if sectors.isdigit() else 0,
        rotational=_flag(queue / "rotational"),
        write_cache=_text(queue / "write_cache"),
        scheduler=_chosen(_text(queue / "scheduler")),
        poll=_flag(queue / "io_poll"),
        numa_node=_numa_node(entry),
        logical_bytes=_number(queue / "logical_block_size"),
        physical_bytes=_number(queue / "physical_block_size"),
        backing_file=_text(entry / "loop/backing_file"),
    )


def _numa_node(entry: Path) -> int | None:
    """Of the nearest device above that has one; -1 means that the platform does not tell."""
    for above in (entry, *entry.parents):
        node = _number(above / "numa_node")
        if node is not None:
            return node if node >= 0 else None
        if above == _SYS:
            return None
    return None


def _chosen(text: str) -> str:
    """``[none] mq-deadline`` -> ``none``."""
    start, end = text.find("["), text.find("]")
    return text[start + 1 : end] if 0 <= start < end else text


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _flag(path: Path) -> bool | None:
    text = _text(path)
    return text == "1" if text in ("0", "1") else None


# ---- the process -------------------------------------------------------------


def nodes_of_process() -> set[int]:
    """NUMA nodes whose processors this process may use. Empty where it cannot be told."""
    cpus = os.sched_getaffinity(0)
    found = set()
    for entry in (_SYS / "devices/system/node").glob("node[0-9]*"):
        if cpus & set(_listed(_text(entry / "cpulist"))):
            found.add(int(entry.name.removeprefix("node")))
    return found


def _listed(text: str) -> Iterator[int]:
    """``0-3,8`` -> 0 1 2 3 8."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
