"""devices: mounts and disks as the kernel describes them, here from a /proc and a /sys made for the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import striate
from striate import devices

Entry = Callable[..., Path]

# Numbers of mounts that no running kernel has given to a mount of the machine.
LINES = r"""
900001 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
900002 900001 259:1 / /made/with\040space rw,noatime - xfs /dev/nvme0n1p1 rw,attr2
900003 900001 259:2 / /made/ro rw,relatime - ext4 /dev/nvme1n1 ro,errors=remount-ro
900004 900001 259:3 / /made/bound ro,relatime - ext4 /dev/nvme2n1 rw
900005 900001 0:50 / /made/twice rw - tmpfs first rw
900006 900001 0:51 / /made/twice rw - xfs /dev/second rw
900007 900001 0:52 / /made/nfs rw shared:7 master:1 - nfs4 server:/export rw,vers=4.2
900008 900001 259:9 / /made/quick rw - ext4 /dev/nvme9n1 rw,nobarrier

cut short
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(LINES)
    monkeypatch.setattr(devices, "Path", lambda name: table if name == "/proc/self/mountinfo" else Path(name))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """Makes an entry of a made-up /sys: ``disk("devices/virtual/block/dm-0", {"size": "8"}, "253:0")``."""
    sys_ = tmp_path / "sys"
    (sys_ / "dev/block").mkdir(parents=True)
    monkeypatch.setattr(devices, "_SYS", sys_)

    def make(where: str, files: dict[str, str], number: str = "", slaves: tuple[Path, ...] = ()) -> Path:
        entry = sys_ / where
        entry.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (entry / name).parent.mkdir(parents=True, exist_ok=True)
            (entry / name).write_text(text + "\n")
        for slave in slaves:
            (entry / "slaves").mkdir(exist_ok=True)
            (entry / "slaves" / slave.name).symlink_to(slave)
        if number:
            (sys_ / "dev/block" / number).symlink_to(entry)
        return entry

    return make


@pytest.fixture
def lies_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def choose(major: int, minor: int) -> None:
        monkeypatch.setattr(devices, "_devices_of", lambda path: [(major, minor)])

    return choose


NVME = {
    "size": "2097152",
    "device/model": "ACME 9000  ",
    "queue/rotational": "0",
    "queue/write_cache": "write back",
    "queue/scheduler": "[none] mq-deadline",
    "queue/io_poll": "1",
    "queue/logical_block_size": "512",
    "queue/physical_block_size": "4096",
}


# ---- mounts ------------------------------------------------------------------


def test_a_path_belongs_to_the_longest_mount_above_it(mounts: None) -> None:
    for path, kind in (
        ("/made/with space/a/b", "xfs"),
        ("/made/with space", "xfs"),
        ("/made/without", "ext4"),
    ):
        mount = devices.mount_of(path)
        assert mount is not None and mount.kind == kind, path
    mount = devices.mount_of("/made/with space")
    assert mount == devices.Mount(
        "/made/with space", "xfs", "/dev/nvme0n1p1", ("rw", "noatime", "attr2"), (259, 1)
    )


def test_a_name_that_only_begins_like_a_mount_is_not_on_it(mounts: None) -> None:
    mount = devices.mount_of("/made/nfs-and-more")
    assert mount is not None and mount.point == "/"


def test_of_two_mounts_over_one_point_the_last_is_seen(mounts: None) -> None:
    mount = devices.mount_of("/made/twice/x")
    assert mount is not None and mount.source == "/dev/second"


def test_optional_fields_of_mountinfo_are_passed_over(mounts: None) -> None:
    mount = devices.mount_of("/made/nfs")
    assert mount is not None and (mount.kind, mount.source) == ("nfs4", "server:/export")
    assert mount.kind in devices.OVER_A_NETWORK


@pytest.mark.parametrize(
    ("point", "read_only"), [("/made/ro", True), ("/made/bound", True), ("/made/with space", False)]
)
def test_either_the_mount_or_its_file_system_can_be_read_only(
    mounts: None, point: str, read_only: bool
) -> None:
    mount = devices.mount_of(point)
    assert mount is not None and mount.read_only is read_only


def test_barriers_that_are_switched_off_are_seen(mounts: None) -> None:
    quick, safe = devices.mount_of("/made/quick"), devices.mount_of("/made/ro")
    assert quick is not None and not devices.writes_barriers(quick)
    assert safe is not None and devices.writes_barriers(safe)


def test_without_proc_no_mount_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "Path", lambda name: tmp_path / "nowhere")
    assert devices.mount_of("/") is None


def test_the_running_kernels_own_mounts_are_understood() -> None:
    mount = devices.mount_of("/proc/self")
    assert mount is not None and (mount.point, mount.kind) == ("/proc", "proc")


# ---- disks -------------------------------------------------------------------


def test_a_disk_is_described_as_its_driver_does(disk: Entry, lies_on: Callable[[int, int], None]) -> None:
    disk("devices/pci0/nvme0", {"numa_node": "1"})
    disk("devices/pci0/nvme0/nvme0n1", NVME, "259:0")
    lies_on(259, 0)
    assert devices.disks_under("/") == [
        devices.Disk(
            name="nvme0n1",
            model="ACME 9000",
            size_bytes=1 << 30,
            rotational=False,
            write_cache="write back",
            scheduler="none",
            poll=True,
            numa_node=1,
            logical_bytes=512,
            physical_bytes=4096,
            backing_file="",
        )
    ]


def test_a_partition_leads_to_its_disk(disk: Entry, lies_on: Callable[[int, int], None]) -> None:
    disk("devices/nvme0n1", NVME)
    disk("devices/nvme0n1/nvme0n1p1", {"partition": "1"}, "259:1")
    lies_on(259, 1)
    assert [found.name for found in devices.disks_under("/")] == ["nvme0n1"]


def test_encryption_over_raid_over_partitions_leads_to_all_disks(
    disk: Entry, lies_on: Callable[[int, int], None]
) -> None:
    parts = []
    for name in ("sda", "sdb"):
        disk(f"devices/{name}", {"queue/rotational": "1"})
        parts.append(disk(f"devices/{name}/{name}1", {"partition": "1"}))
    raid = disk("devices/virtual/md0", {}, slaves=tuple(parts))
    disk("devices/virtual/dm-0", {}, "253:0", slaves=(raid,))
    lies_on(253, 0)
    found = devices.disks_under("/")
    assert [(one.name, one.rotational) for one in found] == [("sda", True), ("sdb", True)]


def test_two_partitions_of_one_disk_in_a_mapping_count_once(
    disk: Entry, lies_on: Callable[[int, int], None]
) -> None:
    disk("devices/sda", {})
    parts = tuple(disk(f"devices/sda/sda{n}", {"partition": str(n)}) for n in (1, 2))
    disk("devices/virtual/dm-1", {}, "253:1", slaves=parts)
    lies_on(253, 1)
    assert [found.name for found in devices.disks_under("/")] == ["sda"]


def test_a_loop_device_names_its_file(disk: Entry, lies_on: Callable[[int, int], None]) -> None:
    disk("devices/virtual/loop7", {"loop/backing_file": "/images/a.img"}, "7:7")
    lies_on(7, 7)
    assert [found.backing_file for found in devices.disks_under("/")] == ["/images/a.img"]


def test_what_is_not_told_is_none_or_empty(disk: Entry, lies_on: Callable[[int, int], None]) -> None:
    disk("devices/bare", {"queue/rotational": "", "numa_node": "-1", "queue/io_poll": "maybe"}, "8:0")
    lies_on(8, 0)
    (found,) = devices.disks_under("/")
    assert (found.rotational, found.numa_node, found.poll, found.logical_bytes) == (None, None, None, None)
    assert (found.model, found.scheduler, found.size_bytes) == ("", "", 0)


def test_a_device_that_sysfs_does_not_show_has_no_disks(
    disk: Entry, lies_on: Callable[[int, int], None]
) -> None:
    lies_on(99, 99)
    assert devices.disks_under("/") == []


def test_a_file_system_without_a_device_has_no_disks() -> None:
    assert devices.disks_under("/proc") == []


# ---- the process -------------------------------------------------------------


def test_the_process_is_on_the_nodes_of_the_processors_it_may_use(
    disk: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cpus in enumerate(("0-3,8", "4-7", "")):  # a node of memory alone has no processor
        disk(f"devices/system/node/node{node}", {"cpulist": cpus})
    for allowed, nodes in (({2}, {0}), ({8}, {0}), ({5}, {1}), ({3, 4}, {0, 1}), ({99}, set())):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert devices.nodes_of_process() == nodes


def test_it_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, striate.devices; sys.exit('torch' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(Path(striate.__file__).parents[1])},
        check=False,
    )
    assert done.returncode == 0
