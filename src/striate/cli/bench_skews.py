"""What would make a benchmark of drives say something else than it seems to."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from striate.cli.output import bytes_text
from striate.devices import IN_MEMORY, OVER_A_NETWORK, Disk, disks_under, mount_of
from striate.drives import display

__all__ = ["skews"]

# Documentation/ABI/stable/sysfs-block, stat: milliseconds during which a device had I/O; read twice over this time.
_LOOK_S = 0.3
_BUSY_SHARE = 0.1
_CACHE_BYTES = 1 << 30


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
    disks: dict[str, Disk] = {}
    on: dict[str, list[str]] = {}
    for drive in drives:
        under = disks_under(drive)
        disks.update((disk.name, disk) for disk in under)
        for name in [disk.name for disk in under] or [f"device {os.stat(drive).st_dev}"]:
            on.setdefault(name, []).append(drive)
    for name, paths in on.items():
        if len(paths) > 1:
            names = " and ".join(map(display, paths))
            found.append(f"{names} are on one device, {name}: together they are no faster than one.")
    before = {name: _busy_ms(name) for name in disks}
    time.sleep(_LOOK_S)
    for name, disk in disks.items():
        busy = _busy_ms(name) - before[name]
        if busy > _BUSY_SHARE * _LOOK_S * 1e3:
            found.append(f"{display(on[name][0])}: {name} is busy already: somebody else reads or writes.")
        if disk.rotational:
            found.append(f"{display(on[name][0])}: {name} says that it is a rotating disk.")
    return found


def _busy_ms(disk: str) -> int:
    try:
        return int(Path(f"/sys/block/{disk}/stat").read_text().split()[9])
    except (OSError, IndexError, ValueError):
        return 0


def _of_file_systems(drives: Sequence[str]) -> list[str]:
    found = []
    for drive in drives:
        mount = mount_of(drive)
        kind = "" if mount is None else mount.kind
        if kind in IN_MEMORY:
            found.append(
                f"{display(drive)} is {kind}: memory is measured, not a drive, and nothing on it lasts."
            )
        elif kind in OVER_A_NETWORK or kind.startswith("fuse"):
            found.append(f"{display(drive)} is {kind}: what is measured is the way to it, and caches on it.")
        elif not _takes_direct(drive):
            found.append(f"{display(drive)} ({kind}) takes no O_DIRECT: the page cache is in the path.")
    return found


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
