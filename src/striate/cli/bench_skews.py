"""What would make a benchmark of drives say something else than it seems to."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from striate.cli.output import bytes_text
from striate.drive_set import rotates
from striate.drives import display

__all__ = ["skews"]

# Documentation/ABI/stable/sysfs-block: milliseconds during which a device had I/O; twice over this time.
_LOOK_S = 0.3
_BUSY_SHARE = 0.1
_CACHE_BYTES = 1 << 30
_IN_MEMORY = {"tmpfs", "ramfs"}
_OVER_A_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "glusterfs", "virtiofs"}


def skews(drives: Sequence[str], size_bytes: int) -> list[str]:
    """One sentence for each thing that skews a measurement of these drives, size_bytes for each."""
    found = [*_of_devices(drives), *_of_file_systems(drives), *_of_the_machine()]
    if size_bytes < _CACHE_BYTES:
        found.append(
            f"{bytes_text(size_bytes)} for each drive may fit its cache, and a long save can be slower: give 8GiB or "
            "more to be sure."
        )
    return found


def _of_devices(drives: Sequence[str]) -> list[str]:
    found = []
    by_device: dict[int, list[str]] = {}
    for drive in drives:
        by_device.setdefault(os.stat(drive).st_dev, []).append(drive)
    for paths in by_device.values():
        if len(paths) > 1:
            names = " and ".join(map(display, paths))
            found.append(f"{names} are on one device: together they are no faster than one.")
    busy_before = {device: _busy_ms(device) for device in by_device}
    time.sleep(_LOOK_S)
    for device, paths in by_device.items():
        before, after = busy_before[device], _busy_ms(device)
        if before is not None and after is not None and after - before > _BUSY_SHARE * _LOOK_S * 1e3:
            found.append(f"{display(paths[0])}: the device is busy already: somebody else reads or writes.")
        if rotates(device):
            found.append(f"{display(paths[0])}: the device says that it is a rotating disk.")
    return found


def _busy_ms(device: int) -> int | None:
    try:
        with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat") as stat:
            return int(stat.read().split()[9])
    except (OSError, IndexError, ValueError):
        return None


def _of_file_systems(drives: Sequence[str]) -> list[str]:
    found = []
    for drive in drives:
        kind = _kind_of(drive)
        if kind in _IN_MEMORY:
            found.append(
                f"{display(drive)} is {kind}: memory is measured, not a drive, and nothing on it lasts."
            )
        elif kind in _OVER_A_NETWORK or kind.startswith("fuse"):
            found.append(f"{display(drive)} is {kind}: what is measured is the way to it, and caches on it.")
        elif not _takes_direct(drive):
            found.append(f"{display(drive)} ({kind}) takes no O_DIRECT: the page cache is in the path.")
    return found


def _kind_of(path: str) -> str:
    """The type of the file system that holds a path, "" if it cannot be told."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, type_, *_ = line.split(" ")
        point = point.encode().decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # A later mount over the same point hides the earlier one.
        if inside and len(point) >= len(best):
            best, kind = point, type_
    return kind


def _takes_direct(directory: str) -> bool:
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def _of_the_machine() -> list[str]:
    found = []
    governors = {
        _text(path) for path in Path("/sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_governor")
    }
    if "powersave" in governors:
        found.append("the processors' governor is powersave: the CPU figures, and fast drives, suffer.")
    policy = _text(Path("/sys/module/pcie_aspm/parameters/policy"))
    if "[powersave]" in policy or "[powersupersave]" in policy:
        found.append("PCIe saves power (pcie_aspm): drives take longer to wake.")
    load = os.getloadavg()[0]
    cpus = len(os.sched_getaffinity(0))
    if load > cpus / 2:
        found.append(f"the machine is busy: a load of {load:.1f} on {cpus} processor(s).")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
