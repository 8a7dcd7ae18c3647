"""``striate doctor``: what a node's drives, kernel and limits mean for checkpoints, and what to do about it."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import stat
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from striate import _engine
from striate.cli.output import ExitCode, Failure, JsonOption, bytes_text, emit, say, stop, table, with_codes
from striate.devices import (
    BUFFERS_SILENTLY,
    IN_MEMORY,
    OVER_A_NETWORK,
    Disk,
    Mount,
    disks_under,
    mount_of,
    nodes_of_process,
    writes_barriers,
)
from striate.drives import display
from striate.liburing import Features, available, features, liburing_version, limits

__all__ = ["doctor"]

_MEMLOCK_ENOUGH = 64 << 20
_TIGHT_SHARE = 0.05
_HEALTH_TIMEOUT_S = 10
_BLOCK = 4096

# Of O_DIRECT itself; any other error of the trial is the drive's or the file system's.
_DIRECT_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_ROOM = frozenset({"ENOSPC", "EDQUOT"})

Severity = Literal["fault", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be. ``what`` it is, ``why`` it matters, what to ``do``."""

    severity: Severity
    subject: str
    what: str
    why: str
    do: str


@dataclass(frozen=True)
class System:
    """The kernel and this process's limits. Sizes in bytes, None for no limit or not known.

    ``may_lock``: the limit on locked memory does not count for this process.
    """

    kernel: str
    container: bool
    io_uring: bool
    io_uring_why_not: str
    io_uring_features: tuple[str, ...]
    liburing: str
    memlock_bytes: int | None
    may_lock: bool
    open_files: int
    processors: int
    numa_nodes: tuple[int, ...]


@dataclass(frozen=True)
class DriveFacts:
    """One directory and what lies under it. ``direct``: "yes", "refused", "accepted, may be buffered", "not tried".

    ``error``: why a small file could not be written and read ("EIO", "ENOSPC", ...), or "". ``total_bytes`` is 0 where
    the file system does not tell its size.
    """

    path: str
    mount: Mount | None
    disks: tuple[Disk, ...]
    free_bytes: int
    total_bytes: int
    writable: bool
    error: str
    direct: str
    memory_alignment: int | None
    offset_alignment: int | None
    health: dict[str, Any] = field(default_factory=dict)


def doctor(
    drives: Annotated[
        list[str],
        typer.Argument(
            metavar="DRIVE", help="The directories that checkpoints are to go to.", show_default=False
        ),
    ],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset", metavar="DIR", help="Where the training data is read from.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Looks at what checkpoints depend on: io_uring, O_DIRECT, limits, file systems, devices, room, health.

    Needs no privileges; what it may not look at it says. Writes one small file on each drive, which is gone afterwards.
    Exit status 1 if something will lose data or fail.
    """
    for path in [*drives, *(dataset or [])]:
        _require_directory(path)
    system = look_at_system()
    facts = [look_at_drive(drive) for drive in drives]
    findings = [
        *judge_system(system),
        *(finding for drive in facts for finding in judge_drive(drive, system)),
        *judge_together(facts, dataset or []),
    ]
    found = {"system": system, "drives": facts, "findings": findings}
    emit(as_json, found, lambda console: _draw(console, system, facts, findings))
    if any(finding.severity == "fault" for finding in findings):
        stop(ExitCode.FAILED)


doctor.__doc__ = with_codes(doctor.__doc__)


def _require_directory(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise Failure(f"{display(path)} does not exist: give a directory on each drive.") from None
    except OSError as e:
        raise Failure(f"{display(path)} cannot be looked at: {e.strerror}.") from None
    if not stat.S_ISDIR(mode):
        raise Failure(f"{display(path)} is no directory: give a directory on each drive.")


# ---- looking -----------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    direct: str
    memory: int | None = None
    offset: int | None = None
    writable: bool = True
    error: str = ""


def look_at_system() -> System:
    usable, why_not = available()
    told = limits()
    names: tuple[str, ...] = ()
    if usable:
        given = features()
        names = tuple(flag.name or "" for flag in Features if flag in given)
    version = liburing_version()
    return System(
        kernel=told.kernel_release,
        container=_in_container(),
        io_uring=usable,
        io_uring_why_not=why_not,
        io_uring_features=names,
        liburing="" if version is None else f"{version[0]}.{version[1]}",
        memlock_bytes=told.memlock_soft_bytes,
        may_lock=_may_lock(),
        open_files=_open_files(),
        processors=len(os.sched_getaffinity(0)),
        numa_nodes=tuple(sorted(nodes_of_process())),
    )


def _in_container() -> bool:
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv") or "container" in os.environ


def _may_lock() -> bool:
    """CAP_IPC_LOCK, bit 14 (capabilities(7)): the limit does not count then."""
    with open("/proc/self/status") as lines:
        capabilities = next((line for line in lines if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(capabilities.split()[1], 16) >> 14 & 1)


def _open_files() -> int:
    with open("/proc/self/limits") as lines:
        for line in lines:
            if line.startswith("Max open files"):
                text = line.split()[3]
                return int(text) if text.isdigit() else 1 << 30
    return 0


def look_at_drive(path: str) -> DriveFacts:
    room = os.statvfs(path)
    disks = tuple(disks_under(path))
    trial = _try_direct(path)
    return DriveFacts(
        path=path,
        mount=mount_of(path),
        disks=disks,
        free_bytes=room.f_bavail * room.f_frsize,
        total_bytes=room.f_blocks * room.f_frsize,
        writable=trial.writable,
        error=trial.error,
        direct=trial.direct,
        memory_alignment=trial.memory,
        offset_alignment=trial.offset,
        health={disk.name: health for disk in disks if (health := _health(disk))},
    )


def _try_direct(path: str) -> _Trial:
    """Whether O_DIRECT goes, by a file that is written and read; its alignments; whether anything can be written."""
    name = os.path.join(path, f".striate-doctor-{uuid.uuid4().hex}")
    try:
        plain = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as e:
        return _Trial("not tried", writable=False, error=_name_of(e))
    try:
        os.close(plain)
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as e:
            return _failed(e, None, None)
        try:
            return _transfer(path, descriptor)
        finally:
            os.close(descriptor)
    finally:
        os.unlink(name)


def _name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def _failed(error: OSError, memory: int | None, offset: int | None) -> _Trial:
    if error.errno in _DIRECT_REFUSED:
        return _Trial("refused", memory, offset)
    return _Trial("not tried", memory, offset, error=_name_of(error))


def _transfer(path: str, descriptor: int) -> _Trial:
    alignment = _engine.direct_alignment(descriptor)
    memory, offset = alignment if alignment is not None else (None, None)
    with mmap.mmap(-1, _BLOCK) as block:
        block[:] = b"striate " * (_BLOCK // 8)
        try:
            if os.pwritev(descriptor, [block], 0) != _BLOCK:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if os.preadv(descriptor, [block], 0) != _BLOCK:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        except OSError as e:
            return _failed(e, memory, offset)
    if alignment == (0, 0):
        # ext4 takes the flag on data=journal and on encrypted files, and says here that it has no direct I/O for them.
        return _Trial("accepted, may be buffered")
    mount = mount_of(path)
    kind = mount.kind if mount is not None else ""
    if kind in BUFFERS_SILENTLY or kind.startswith("fuse"):
        return _Trial("accepted, may be buffered", memory, offset)
    return _Trial("yes", memory, offset)


def _health(disk: Disk) -> dict[str, Any]:
    """What the drive says of itself, where a program to ask it is there and may. Empty otherwise."""
    device = f"/dev/{disk.name}"
    if disk.name.startswith("nvme") and shutil.which("nvme"):
        told = _asked(["nvme", "smart-log", "-o", "json", device])
        if told:
            used = told.get("percent_used", told.get("percentage_used"))
            spare = told.get("avail_spare", told.get("available_spare"))
            return _health_of(told.get("critical_warning"), used, spare, told.get("media_errors"))
    if not disk.backing_file and shutil.which("smartctl"):
        told = _asked(["smartctl", "-j", "-H", "-A", device])
        log = told.get("nvme_smart_health_information_log", {})
        passed = told.get("smart_status", {}).get("passed")
        if log or passed is not None:
            warning = log.get("critical_warning", 0 if passed else 1)
            return _health_of(
                warning, log.get("percentage_used"), log.get("available_spare"), log.get("media_errors")
            )
    return {}


def _health_of(warning: Any, used: Any, spare: Any, errors: Any) -> dict[str, Any]:
    return {
        "critical_warning": warning,
        "percentage_used": used,
        "available_spare": spare,
        "media_errors": errors,
    }


def _asked(command: list[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_HEALTH_TIMEOUT_S, check=False
        )
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return told if isinstance(told, dict) else {}


# ---- judging -----------------------------------------------------------------


def judge_system(system: System) -> list[Finding]:
    found = []
    if not system.io_uring:
        found.append(
            Finding(
                "warning",
                "io_uring",
                f"io_uring cannot be used: {system.io_uring_why_not}",
                "striate falls back to the posix engine: as safe, at more threads and somewhat more CPU.",
                _io_uring_remedy(system.io_uring_why_not),
            )
        )
    if system.memlock_bytes is not None and system.memlock_bytes < _MEMLOCK_ENOUGH and not system.may_lock:
        found.append(
            Finding(
                "warning",
                "memlock",
                f"only {bytes_text(system.memlock_bytes)} of memory may be locked (RLIMIT_MEMLOCK)",
                "io_uring cannot register its buffers then, and before Linux 5.12 not even make its rings.",
                "raise it: ulimit -l unlimited, LimitMEMLOCK= of the systemd unit, --ulimit memlock=-1 of docker run.",
            )
        )
    if 0 < system.open_files < 1024:
        found.append(
            Finding(
                "warning",
                "open files",
                f"only {system.open_files} files may be open at a time (RLIMIT_NOFILE)",
                "a save holds a few for each drive, and data loaders many.",
                "raise it: ulimit -n 65536.",
            )
        )
    return found


def _io_uring_remedy(why_not: str) -> str:
    if "io_uring_disabled" in why_not:
        return "sysctl kernel.io_uring_disabled=0 (or 1, and this user's group in kernel.io_uring_group)."
    if "seccomp" in why_not:
        return "allow the io_uring_* calls in the container's seccomp profile, or run with --security-opt seccomp=..."
    if "ENOSYS" in why_not:
        return "use a kernel from 5.10 on, outside a sandbox such as gVisor."
    return "see what is named above; engine='posix' silences the warning."


def judge_drive(drive: DriveFacts, system: System) -> list[Finding]:
    return [
        *_judge_file_system(drive),
        *_judge_writing(drive),
        *_judge_room(drive),
        *_judge_direct(drive),
        *(finding for disk in drive.disks for finding in _judge_disk(drive, disk, system)),
    ]


def _judge_file_system(drive: DriveFacts) -> list[Finding]:
    mount, path = drive.mount, drive.path
    if mount is None:
        return []
    found = []
    kind = mount.kind
    if kind in IN_MEMORY:
        found.append(Finding(
            "fault", path, f"{kind}: it lies in memory",
            "a checkpoint there is gone with the power, and takes memory from training.",
            "mount a drive there, or give a directory on one.",
        ))  # fmt: skip
    elif kind in OVER_A_NETWORK or kind.startswith("fuse."):
        found.append(Finding(
            "warning", path, f"{kind}: a network or user-space file system",
            "its speed is that of the way to it, its syncs and locks are only as good as its server's, and O_DIRECT "
            "may be buffered.",
            "save to local drives, and copy from there; or test what it promises.",
        ))  # fmt: skip
    elif kind in ("overlay", "overlayfs", "aufs"):
        found.append(Finding(
            "warning", path, f"{kind}: the layer of a container",
            "what is written there goes with the container, and pays for the layer.",
            "mount a volume or a host directory into the container, and give that.",
        ))  # fmt: skip
    elif kind in BUFFERS_SILENTLY:
        found.append(Finding(
            "note", path, f"{kind} takes O_DIRECT and may copy the data through the page cache all the same",
            "saves cost more CPU and memory traffic than on ext4 or xfs.",
            "xfs or ext4 for checkpoints; with btrfs, chattr +C on the directory avoids some of it.",
        ))  # fmt: skip
    if not writes_barriers(mount):
        found.append(Finding(
            "fault", path, "mounted without write barriers",
            "a power cut can lose or tear what was synced, unless every cache on the way has a battery.",
            f"mount -o remount,barrier {mount.point}.",
        ))  # fmt: skip
    for option, why in (
        ("sync", "every write waits for the medium: saves are many times slower, and no safer."),
        ("data=journal", "everything is written twice."),
    ):
        if option in mount.options:
            found.append(Finding(
                "warning", path, f"mounted with {option}", why, f"mount {mount.point} without it.",
            ))  # fmt: skip
    return found


def _read_only(drive: DriveFacts) -> bool:
    return drive.error == "EROFS" or (drive.mount is not None and drive.mount.read_only)


def _judge_writing(drive: DriveFacts) -> list[Finding]:
    path = drive.path
    if _read_only(drive):
        point = drive.mount.point if drive.mount is not None else path
        return [Finding(
            "fault", path, "mounted read-only",
            "nothing can be saved; file systems also become so after errors.",
            f"look at the kernel log (dmesg), then mount -o remount,rw {point}; after an error, unmount it and run "
            "fsck first.",
        )]  # fmt: skip
    if drive.error in ("", *_NO_ROOM):
        return []
    if drive.error in ("EACCES", "EPERM"):
        return [Finding(
            "fault", path, f"this user cannot write here ({drive.error})",
            "nothing can be saved.",
            "change the directory's owner or mode; lsattr shows whether it is immutable.",
        )]  # fmt: skip
    return [Finding(
        "fault", path, f"a small file cannot be written and read back ({drive.error})",
        "a save here fails the same way; an I/O error is often the first sign of a failing drive.",
        "look at the kernel log (dmesg) and the drive's health; replace the drive if they say so.",
    )]  # fmt: skip


def _judge_room(drive: DriveFacts) -> list[Finding]:
    if _read_only(drive):
        return []
    if drive.error in _NO_ROOM and drive.free_bytes >= 16 << 20:
        return [Finding(
            "fault", drive.path, f"full: {bytes_text(drive.free_bytes)} are free, and a file of 4 KiB does not fit "
            f"({drive.error})",
            "the file system is out of inodes (df -i), or this user's quota is used up: nothing can be saved.",
            "delete files, or raise the quota; mkfs with more inodes.",
        )]  # fmt: skip
    # ramfs and some network file systems do not tell their size.
    if drive.total_bytes == 0:
        return []
    room = f"{bytes_text(drive.free_bytes)} of {bytes_text(drive.total_bytes)} are free"
    if drive.free_bytes < 16 << 20:
        return [Finding(
            "fault", drive.path, f"full: {room}",
            "a save needs room for the new checkpoint while the old one is still there.",
            "delete old checkpoints (striate ls lists them), or take a larger drive.",
        )]  # fmt: skip
    if drive.free_bytes < _TIGHT_SHARE * drive.total_bytes:
        return [Finding(
            "warning", drive.path, f"nearly full: {room}",
            "file systems and flash slow down when they are full, and a save needs room beside the old checkpoint.",
            "delete old checkpoints (striate ls lists them), or take a larger drive.",
        )]  # fmt: skip
    return []


def _judge_direct(drive: DriveFacts) -> list[Finding]:
    if drive.direct == "accepted, may be buffered" and not _told_by_kind(drive.mount):
        return [Finding(
            "note", drive.path, "O_DIRECT is accepted here, and the data may be buffered all the same",
            "saves cost more CPU and memory traffic than they look.",
            "use xfs or ext4 on a local drive, without data=journal and encryption.",
        )]  # fmt: skip
    if drive.direct != "refused":
        return []
    return [Finding(
        "warning", drive.path, "O_DIRECT is refused",
        "saves go through the page cache: more CPU, the data loader's pages pushed out, and late at the drive.",
        "use xfs or ext4 on a local drive.",
    )]  # fmt: skip


def _told_by_kind(mount: Mount | None) -> bool:
    """Does another finding say already that such a file system buffers?"""
    kind = mount.kind if mount is not None else ""
    return kind in BUFFERS_SILENTLY | OVER_A_NETWORK or kind.startswith("fuse.")


def _judge_disk(drive: DriveFacts, disk: Disk, system: System) -> list[Finding]:
    found = []
    if disk.rotational:
        found.append(Finding(
            "warning", drive.path, f"{disk.name} says that it is a rotating disk",
            "it is slower than flash, and the one that the others wait for. Virtual disks say so by mistake.",
            f"take another drive; if it is flash, echo 0 > /sys/block/{disk.name}/queue/rotational.",
        ))  # fmt: skip
    if disk.scheduler not in ("", "none") and disk.name.startswith("nvme"):
        found.append(Finding(
            "note", drive.path, f"{disk.name} has the I/O scheduler {disk.scheduler}",
            "fast drives need none, and it costs CPU; but idle_priority=True works only with mq-deadline or bfq.",
            f"echo none > /sys/block/{disk.name}/queue/scheduler, unless saves are to give way to a data loader.",
        ))  # fmt: skip
    if disk.numa_node is not None and system.numa_nodes and disk.numa_node not in system.numa_nodes:
        found.append(Finding(
            "warning", drive.path, f"{disk.name} is at NUMA node {disk.numa_node}, this process at "
            f"{', '.join(map(str, system.numa_nodes))}",
            "every byte crosses the link between the sockets.",
            f"numactl --cpunodebind={disk.numa_node} --membind={disk.numa_node}, or another drive.",
        ))  # fmt: skip
    if disk.backing_file:
        found.append(Finding(
            "note", drive.path, f"{disk.name} is a loop device over {disk.backing_file}",
            "it is a file and no drive of its own: fine for tests.",
            "give real drives for what matters.",
        ))  # fmt: skip
    health = drive.health.get(disk.name, {})
    if health.get("critical_warning"):
        found.append(Finding(
            "fault", drive.path, f"{disk.name} reports that it is failing (SMART)",
            "checkpoints on it may be lost.",
            "take what is on it elsewhere, replace it, then striate repair --replace.",
        ))  # fmt: skip
    if _at_least(health.get("percentage_used"), 90):
        found.append(Finding(
            "warning", drive.path, f"{disk.name} has used {health['percentage_used']} % of its endurance",
            "flash wears out by being written, and a drive may become read-only at its end.",
            "plan for a replacement (striate plan tells the rate of wear).",
        ))  # fmt: skip
    if _at_least(health.get("media_errors"), 1):
        found.append(Finding(
            "warning", drive.path, f"{disk.name} counts {health['media_errors']} media errors",
            "it could not read back what was written, that many times.",
            "striate verify what is on it; consider replacing it.",
        ))  # fmt: skip
    return found


def _at_least(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


def judge_together(drives: Sequence[DriveFacts], datasets: Sequence[str]) -> list[Finding]:
    found = []
    by_disk: dict[str, list[str]] = {}
    for drive in drives:
        for name in _names(drive.path, drive.disks):
            by_disk.setdefault(name, []).append(drive.path)
    for name, paths in by_disk.items():
        if len(paths) > 1:
            found.append(Finding(
                "fault", " and ".join(paths), f"they are on one device, {name}",
                "together they are no faster than one, and are lost together: parity and mirrors protect nothing.",
                "give one directory of each drive.",
            ))  # fmt: skip
    for dataset in datasets:
        for name in _names(dataset, disks_under(dataset)):
            if name in by_disk:
                found.append(Finding(
                    "warning", by_disk[name][0], f"the data set {dataset} is on the same device, {name}",
                    "a save and the data loader slow each other down.",
                    "another drive for one of them; or Volume(idle_priority=True) or max_bandwidth=.",
                ))  # fmt: skip
    return found


def _names(path: str, disks: Sequence[Disk]) -> list[str]:
    """Of the disks below, or of the file system where none can be seen."""
    return [disk.name for disk in disks] or [f"device {os.stat(path).st_dev}"]


# ---- text --------------------------------------------------------------------


def _draw(
    console: Console, system: System, drives: Sequence[DriveFacts], findings: Sequence[Finding]
) -> None:
    lines = table("", "")
    lines.show_header = False
    lines.add_row("kernel", f"{system.kernel}{', in a container' if system.container else ''}")
    lines.add_row("io_uring", "yes" if system.io_uring else f"no: {system.io_uring_why_not}")
    if system.io_uring_features:
        lines.add_row("features", ", ".join(name.lower() for name in system.io_uring_features))
    memlock = "unlimited" if system.memlock_bytes is None else bytes_text(system.memlock_bytes)
    memlock += (
        ", which does not count for this user" if system.may_lock and system.memlock_bytes is not None else ""
    )
    lines.add_row("memlock", memlock)
    nodes = f", NUMA node {', '.join(map(str, system.numa_nodes))}" if system.numa_nodes else ""
    lines.add_row("processors", f"{system.processors}{nodes}")
    console.print(lines)
    for drive in drives:
        console.print()
        console.print(display(drive.path), soft_wrap=True)
        _draw_drive(console, drive)
    console.print()
    if not findings:
        console.print("All is well: nothing found that stands in the way.")
        return
    for severity in ("fault", "warning", "note"):
        for finding in findings:
            if finding.severity == severity:
                say(console, display(f"{severity.upper()}  {finding.subject}: {finding.what}"))
                say(console, f"why: {finding.why}", indent="  ")
                say(console, display(f"do:  {finding.do}"), indent="  ")
    counts = {s: sum(f.severity == s for f in findings) for s in ("fault", "warning", "note")}
    console.print(f"\n{counts['fault']} fault(s), {counts['warning']} warning(s), {counts['note']} note(s)")


def _draw_drive(console: Console, drive: DriveFacts) -> None:
    lines = table("", "")
    lines.show_header = False
    if drive.mount is not None:
        options = ",".join(drive.mount.options)
        lines.add_row("  file system", display(f"{drive.mount.kind} from {drive.mount.source}, {options}"))
    room = f"{bytes_text(drive.free_bytes)} of {bytes_text(drive.total_bytes)} free"
    lines.add_row("  room", room if drive.total_bytes else "not known")
    aligned = ""
    if drive.memory_alignment is not None:
        aligned = f", memory by {drive.memory_alignment}, offsets by {drive.offset_alignment} bytes"
    lines.add_row("  O_DIRECT", f"{drive.direct}{aligned}")
    if not drive.disks:
        lines.add_row("  device", "none that this process can see")
    for disk in drive.disks:
        parts = [disk.model, bytes_text(disk.size_bytes) if disk.size_bytes else ""]
        parts.append({True: "rotating", False: "flash", None: ""}[disk.rotational])
        parts.append(f"write cache {disk.write_cache}" if disk.write_cache else "")
        parts.append(f"scheduler {disk.scheduler}" if disk.scheduler else "")
        parts.append("polling" if disk.poll else "")
        parts.append(f"NUMA node {disk.numa_node}" if disk.numa_node is not None else "")
        if disk.logical_bytes:
            parts.append(f"sectors of {disk.logical_bytes}/{disk.physical_bytes}")
        lines.add_row(f"  {disk.name}", ", ".join(filter(None, parts)))
        health = drive.health.get(disk.name)
        lines.add_row("  health", _health_text(health))
    console.print(lines)


def _health_text(health: dict[str, Any] | None) -> str:
    if not health:
        return "not known (needs nvme-cli or smartctl, and the right to ask)"
    parts = [
        f"{health['percentage_used']} % of endurance used"
        if health.get("percentage_used") is not None
        else ""
    ]
    parts.append(f"{health['available_spare']} % spare" if health.get("available_spare") is not None else "")
    parts.append(f"{health['media_errors']} media errors" if health.get("media_errors") is not None else "")
    return ", ".join(filter(None, parts)) or ("failing" if health.get("critical_warning") else "passed")
