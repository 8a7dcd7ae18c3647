"""The drives of a volume: opened, told apart by their labels, locked, and asked in parallel.

A drive is known by the uuid in its label, not by its path. A directory without
a label, where a drive of the volume is missing, is a mount point with nothing
mounted, until somebody says that it is the replacement: nothing is written to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import signal
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from striate import _engine
from striate.drives import NO_LOCKS, display, temporary_name
from striate.engines import Engine
from striate.errors import (
    CorruptCheckpoint,
    DriveError,
    DriveHung,
    FormatError,
    VolumeMismatch,
    VolumeWarning,
    drive_error,
)
from striate.notices import warn
from striate.superblock import (
    DRIVES_MAX,
    LABEL_NAME,
    LOCK_NAME,
    SUPERBLOCK_BYTES,
    Label,
    decode_label,
    encode_label,
)

__all__ = [
    "Drive",
    "DriveSet",
    "Outcome",
    "each",
    "give_up",
    "locked",
    "open_beneath",
    "open_drives",
    "read_labels",
    "parent_of",
    "read_small",
    "take_place",
    "warn_of_devices",
    "write_labels",
    "write_small",
]

T = TypeVar("T")
R = TypeVar("R")

_LOCK_NAP_S = 0.02
_LOCK_TELL_S = 10


@dataclass(eq=False)
class Drive:
    """One directory of a volume. Owns its descriptor. ``trouble`` says why it is not used, "" if it is."""

    path: str
    directory: bytes
    dirfd: int = -1
    uuid: bytes = b""
    label: Label | None = None
    trouble: str = ""
    error: DriveError | None = None

    @property
    def usable(self) -> bool:
        return not self.trouble

    def fail(self, error: DriveError | str) -> None:
        """From now on this operation does without the drive."""
        if isinstance(error, DriveError):
            self.error = error
        self.trouble = str(error)

    def close(self) -> None:
        if self.dirfd >= 0 and self.directory not in _HUNG:
            os.close(self.dirfd)
        self.dirfd = -1


@dataclass(frozen=True, eq=False)
class Slot:
    """A place in a volume: the drive that has it, None if that is missing; where it is or should be; why it is not."""

    uuid: bytes
    drive: Drive | None
    path: str
    trouble: str = ""


@dataclass(eq=False)
class DriveSet:
    """The drives given, in order, and what their labels say of the volume.

    ``expected``: uuids of all drives of the volume; empty for a new one. ``missing``: those of them that no usable
    drive has. ``bare``: directories without a label while a drive is missing.
    """

    drives: list[Drive]
    volume: bytes = b""
    expected: tuple[bytes, ...] = ()
    revision: int = 0
    bare: list[Drive] = field(default_factory=list)

    @property
    def usable(self) -> list[Drive]:
        return [drive for drive in self.drives if drive.usable]

    @property
    def missing(self) -> list[bytes]:
        held = {drive.uuid for drive in self.usable}
        return [uuid for uuid in self.expected if uuid not in held]

    @property
    def complete(self) -> bool:
        return bool(self.expected) and not self.missing

    def by_uuid(self, uuid: bytes) -> Drive | None:
        return next((drive for drive in self.usable if drive.uuid == uuid), None)

    def slots(self) -> list[Slot]:
        """One for each drive of the volume; a missing one stands where its path was given, else at the end."""
        absent = [uuid for uuid in self.missing if uuid not in {d.uuid for d in self.drives}]
        found = []
        for drive in self.drives:
            if drive.usable:
                found.append(Slot(drive.uuid, drive, drive.path))
            elif drive.uuid in self.expected:
                found.append(Slot(drive.uuid, None, drive.path, drive.trouble))
            elif absent:
                found.append(Slot(absent.pop(0), None, drive.path, drive.trouble))
        unheard = "it is at none of the paths given"
        return found + [Slot(uuid, None, f"(drive {uuid.hex()[:8]})", unheard) for uuid in absent]

    @property
    def strangers(self) -> list[Drive]:
        """Drives given that cannot be used, and whose paths are not those of drives that the volume misses."""
        unknown = [drive for drive in self.drives if not drive.usable and drive.uuid not in self.expected]
        known = {drive.uuid for drive in self.drives}
        return unknown[sum(uuid not in known for uuid in self.missing) :]

    def troubles(self) -> list[str]:
        """What is wrong, a line for each drive that is not used."""
        lines = [f"{drive.path}: {drive.trouble}" for drive in self.drives if not drive.usable]
        unheard = len(self.missing) - len(lines)
        if unheard > 0:
            lines.append(f"{unheard} more drive(s) of the volume are at none of the paths given")
        return lines

    def close(self) -> None:
        for drive in self.drives:
            drive.close()

    def __enter__(self) -> DriveSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# ---- opening ---------------------------------------------------------------


def open_drives(
    paths: Sequence[str | bytes | os.PathLike[str]], engine: Engine, *, labels: bool = True
) -> DriveSet:
    """Opens every directory that is there and reads its label. What is not there is noted, not raised.

    ``labels=False``: just directories to look for members in; one that is given twice is taken once. Otherwise raises
    VolumeMismatch for a path given twice, and for labels of different volumes.
    """
    found = DriveSet([_open_drive(path) for path in paths])
    try:
        twice = _twice(found.drives)
        if not labels:
            for drive, _ in twice:
                drive.close()
                found.drives.remove(drive)
            return found
        for drive, other in twice:
            raise VolumeMismatch(
                f"{drive.path} and {other.path} are the same directory: a volume needs a drive for each member. "
                "Nothing was touched. Give each drive once."
            )
        read_labels(found, engine)
    except BaseException:
        found.close()
        raise
    return found


def _open_drive(path: str | bytes | os.PathLike[str]) -> Drive:
    raw = os.path.abspath(os.fsencode(path))
    drive = Drive(display(raw), raw)
    if raw in _HUNG:
        drive.trouble = "it did not answer earlier in this process, and is not touched again (DriveHung)"
        return drive
    try:
        drive.dirfd = os.open(raw, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        code = e.errno or errno.EIO
        advice = "There is no such directory: is the drive mounted?" if code == errno.ENOENT else None
        drive.fail(drive_error(code, "open of the drive", path=drive.path, advice=advice))
    return drive


def read_labels(found: DriveSet, engine: Engine) -> None:
    """What the labels say now. Under the locks it is what they will go on saying: another may just have made them."""
    for drive in found.usable:
        _read_label(drive, engine)
    _agree(found)


def _twice(drives: Sequence[Drive]) -> list[tuple[Drive, Drive]]:
    """The drives whose directory was given before, each with the first that has it."""
    seen: dict[tuple[int, int], Drive] = {}
    found = []
    for drive in drives:
        if drive.usable:
            status = os.fstat(drive.dirfd)
            other = seen.setdefault((status.st_dev, status.st_ino), drive)
            if other is not drive:
                found.append((drive, other))
    return found


def _read_label(drive: Drive, engine: Engine) -> None:
    try:
        block = read_small(drive, LABEL_NAME, engine)
        drive.label = (
            None if block is None else decode_label(block, path=f"{drive.path}/{display(LABEL_NAME)}")
        )
    except DriveError as e:
        drive.fail(e)
    except (CorruptCheckpoint, FormatError) as e:
        # What it was cannot be told: to take it for a new drive would be to guess.
        drive.trouble = (
            f"its label cannot be read ({e}) If the drive is sound, remove the label and give it its place back: "
            f"repair(replace={drive.path!r})"
        )
    if drive.label is not None:
        drive.uuid = drive.label.drive


def _agree(found: DriveSet) -> None:
    labelled = [drive for drive in found.usable if drive.label is not None]
    if not labelled:
        return
    newest = max((drive.label for drive in labelled if drive.label), key=lambda label: label.revision)
    for drive in labelled:
        assert drive.label is not None
        if drive.label.volume != newest.volume:
            other = next(d.path for d in labelled if d.label is newest)
            raise VolumeMismatch(
                f"{drive.path} and {other} belong to different volumes ({drive.label.volume.hex()[:8]} and "
                f"{newest.volume.hex()[:8]}). Nothing was touched. Give the drives of one volume; to use one anew, "
                f"empty it and remove its {display(LABEL_NAME)}."
            )
    found.volume, found.expected, found.revision = newest.volume, newest.drives, newest.revision
    seen: dict[bytes, Drive] = {}
    for drive in labelled:
        other_drive = seen.setdefault(drive.uuid, drive)
        if other_drive is not drive:
            raise VolumeMismatch(
                f"{drive.path} and {other_drive.path} bear the label of one and the same drive: one is a copy of the "
                f"other. Nothing was touched. Give only one of them, or remove {display(LABEL_NAME)} from the copy."
            )
        if drive.uuid not in found.expected:
            drive.trouble = "it was taken out of the volume: its place was given to another drive"
    if found.missing:
        for drive in found.usable:
            if drive.label is None:
                found.bare.append(drive)
        for drive in found.bare:
            drive.trouble = (
                "it has no label, while a drive of the volume is missing: nothing is mounted there, or the drive was "
                f"replaced. Mount it, or make it the replacement with repair(replace={drive.path!r})"
            )


def read_small(drive: Drive, name: bytes, engine: Engine) -> bytes | None:
    """The 4096 bytes of a label, tombstone or superblock; None if there is no such file. Raises DriveError."""
    path = f"{drive.path}/{display(name)}"
    try:
        fd = open_beneath(drive.dirfd, name, os.O_RDONLY, engine)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise drive_error(e.errno or errno.EIO, "open", path=path, drive=drive.path) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return b""
        return engine.io.read(fd, min(SUPERBLOCK_BYTES, os.fstat(fd).st_size), 0)
    except EOFError:
        return b""
    except OSError as e:
        raise drive_error(e.errno or errno.EIO, "read", path=path, drive=drive.path, offset=0) from None
    finally:
        with contextlib.suppress(OSError):
            engine.io.close(fd)


def open_beneath(dirfd: int, name: bytes, flags: int, engine: Engine) -> int:
    """Opens a name below a directory and follows no link on the way: names in superblocks come from files."""
    parent = parent_of(dirfd, name)
    try:
        return engine.io.open(parent, os.path.basename(name), flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    finally:
        os.close(parent)


def parent_of(dirfd: int, name: bytes) -> int:
    """A new descriptor of the directory that a name below ``dirfd`` stands in."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dirfd)
    for part in name.split(b"/")[:-1]:
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


# ---- asking all of them ----------------------------------------------------

# Directories of drives that did not answer. Their descriptors stay open, because closing waits too.
_HUNG: set[bytes] = set()


def give_up(drive: Drive, doing: str, timeout_s: float) -> DriveHung:
    """Nothing of this process touches the drive again; the error that says so."""
    _HUNG.add(drive.directory)
    error = DriveHung(
        f"{doing} failed: drive {drive.path} did not answer for {timeout_s:g} s (ETIMEDOUT). It was given up: this "
        "process does not touch it again. Look at the kernel log (dmesg) and at the drive's health; a longer "
        "hang_timeout_s waits longer.",
        errno=errno.ETIMEDOUT,
        path=drive.path,
        drive=drive.path,
    )
    drive.fail(error)
    return error


@dataclass
class Outcome(Generic[T, R]):
    """What became of one of the things that ``each`` was to do."""

    item: T
    value: R | None = None
    error: Exception | None = None
    hung: bool = False


def each(items: Sequence[T], do: Callable[[T], R], timeout_s: float | None) -> list[Outcome[T, R]]:
    """Does the same for all at once, a thread for each, so that one slow drive is waited for once and not in turn.

    OSErrors, ours among them, stand in the outcomes; anything else is raised when all have ended. With a time-out
    the thread of a drive that does not answer is left behind.
    """
    outcomes: list[Outcome[T, R]] = [Outcome(item) for item in items]
    if timeout_s is None and len(items) == 1:
        _attempt(outcomes[0], do)
    else:
        threads = [
            threading.Thread(target=_attempt_aside, args=(outcome, do), daemon=True, name="striate-drive")
            for outcome in outcomes
        ]
        for thread in threads:
            thread.start()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            _join(threads, deadline)
        except BaseException:
            # The first interrupt does not leave threads at work on descriptors that are about to be closed.
            _join(threads, deadline)
            raise
        for outcome, thread in zip(outcomes, threads, strict=True):
            outcome.hung = thread.is_alive()
    for outcome in outcomes:
        if outcome.error is not None and not isinstance(outcome.error, OSError):
            raise outcome.error
    return outcomes


def _attempt_aside(outcome: Outcome[T, R], do: Callable[[T], R]) -> None:
    # As the engine's workers: signals stay with the threads that expect them.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _attempt(outcome, do)


def _attempt(outcome: Outcome[T, R], do: Callable[[T], R]) -> None:
    try:
        outcome.value = do(outcome.item)
    except Exception as e:  # handed to the thread that waits
        outcome.error = e


def _join(threads: Sequence[threading.Thread], deadline: float | None) -> None:
    for thread in threads:
        # In short waits: a signal's handler runs between them.
        while thread.is_alive() and (deadline is None or time.monotonic() < deadline):
            thread.join(0.1)


# ---- locking ---------------------------------------------------------------


class _Lock:
    """One locked file; owns its descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _LOCKS.add(self)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


# A forked child shares the locks, and would hold them after its parent's death.
_LOCKS: weakref.WeakSet[_Lock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_LOCKS):
        with contextlib.suppress(OSError):
            lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)


@contextlib.contextmanager
def locked(found: DriveSet, engine: Engine) -> Iterator[None]:
    """An exclusive flock on every usable drive of the set. A drive that cannot be locked becomes unusable."""
    order = sorted(found.usable, key=lambda drive: drive.uuid or drive.directory)
    begun, told = time.monotonic(), False
    while True:
        locks = _try_all(order, engine)
        if locks is not None:
            break
        if not told and time.monotonic() - begun > _LOCK_TELL_S:
            told = True
            warn(
                f"another process has held the lock of {order[0].path} ({display(LOCK_NAME)}), or of another drive of "
                f"the volume, for {_LOCK_TELL_S} s: this one waits for it. A save holds it for a moment: is that "
                "process stopped, or its drive stuck?",
                VolumeWarning,
            )
        # All or nothing: two savers that see different labels would take them in different orders.
        time.sleep(_LOCK_NAP_S * (0.5 + random.random()))
    try:
        yield
    finally:
        for lock in locks:
            lock.close()


def _try_all(order: Sequence[Drive], engine: Engine) -> list[_Lock] | None:
    locks: list[_Lock] = []
    try:
        for drive in order:
            if not drive.usable:
                continue
            try:
                fd = engine.io.open(
                    drive.dirfd, LOCK_NAME, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
                )
            except OSError as e:
                drive.fail(
                    drive_error(e.errno or errno.EIO, "lock", path=drive.path, drive=drive.path, state="")
                )
                continue
            locks.append(_Lock(fd))
            try:
                engine.io.lock(fd)
            except OSError as e:
                if e.errno in NO_LOCKS:
                    continue
                if isinstance(e, BlockingIOError):
                    for lock in locks:
                        lock.close()
                    return None
                drive.fail(drive_error(e.errno or errno.EIO, "lock", path=drive.path, drive=drive.path))
    except BaseException:
        for lock in locks:
            lock.close()
        raise
    return locks


# ---- small files: labels and tombstones ------------------------------------


def write_small(drive: Drive, name: bytes, content: bytes, engine: Engine) -> None:
    """Puts a small file in place as a whole, durably. Raises OSError, and leaves what was there."""
    io = engine.io
    temporary = temporary_name(secrets.token_bytes(16))
    fd = io.open(drive.dirfd, temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        try:
            with contextlib.suppress(OSError):
                io.lock(fd)  # or a save of a plain file beside it might sweep it
            memory = np.frombuffer(content, np.uint8)
            extents = np.zeros(1, _engine.EXTENT_DTYPE)
            extents["addr"], extents["length"] = memory.ctypes.data, len(content)
            jobs = np.zeros(1, _engine.JOB_DTYPE)
            jobs["length"], jobs["extents_count"] = len(content), 1
            try:
                engine.run("write", [_engine.File(fd)], jobs, extents)
            except _engine.RunError as e:
                raise OSError(-e.code if -4096 < e.code < 0 else errno.EIO, "write") from None
            io.sync(fd)
            io.rename(drive.dirfd, temporary, name)
        finally:
            io.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            io.unlink(drive.dirfd, temporary)
        raise
    io.sync_directory(drive.dirfd)


def write_labels(found: DriveSet, engine: Engine) -> None:
    """Labels the drives that have none: all of a new volume, or those that were added to one that is complete.

    One after the other, each label naming the drives that have one already: whenever power goes, the newest label names
    no drive that was not reached. The labels of the others follow. The locks are held. Raises VolumeMismatch for
    more drives than a volume can have; a drive whose label cannot be written becomes unusable.
    """
    unlabelled = [drive for drive in found.usable if drive.label is None]
    if len(found.expected) + len(unlabelled) > DRIVES_MAX:
        raise VolumeMismatch(
            f"a volume has at most {DRIVES_MAX} drives, and these are {len(found.expected) + len(unlabelled)}."
        )
    if found.volume == b"":
        found.volume = secrets.token_bytes(16)
    for drive in unlabelled:
        uuid = secrets.token_bytes(16)
        label = Label(found.volume, uuid, found.revision + 1, (*found.expected, uuid))
        if _write_label(drive, label, engine):
            drive.uuid = uuid
            found.expected, found.revision = label.drives, label.revision
    for drive in found.usable:
        if drive.label is not None and drive.label.revision < found.revision:
            _write_label(drive, Label(found.volume, drive.uuid, found.revision, found.expected), engine)


def _write_label(drive: Drive, label: Label, engine: Engine) -> bool:
    try:
        write_small(drive, LABEL_NAME, encode_label(label), engine)
    except OSError as e:
        path = f"{drive.path}/{display(LABEL_NAME)}"
        drive.fail(drive_error(e.errno or errno.EIO, "write of the label", path=path, drive=drive.path))
        return False
    drive.label = label
    return True


def take_place(found: DriveSet, drive: Drive, engine: Engine) -> bytes:
    """Gives a bare directory the label of a drive that is missing; its uuid. The locks are held. Raises OSError."""
    claimed = {other.uuid for other in found.drives if other.label is not None}
    free = [uuid for uuid in found.missing if uuid not in claimed] or found.missing
    if not free:
        raise VolumeMismatch(f"no drive of the volume is missing: {drive.path} has no place to take.")
    found.revision += 1
    label = Label(found.volume, free[0], found.revision, found.expected)
    write_small(drive, LABEL_NAME, encode_label(label), engine)
    drive.uuid, drive.label, drive.trouble, drive.error = free[0], label, "", None
    found.bare.remove(drive)
    return free[0]


# ---- what is odd about them ------------------------------------------------

_told: set[tuple[str, ...]] = set()


def warn_of_devices(found: DriveSet) -> None:
    """One warning for drives that share a device, and one for rotating disks; once a process for each set."""
    key = tuple(drive.path for drive in found.drives)
    if key in _told:
        return
    _told.add(key)
    devices: dict[int, list[str]] = {}
    for drive in found.usable:
        devices.setdefault(os.fstat(drive.dirfd).st_dev, []).append(drive.path)
    for paths in devices.values():
        if len(paths) > 1:
            warn(
                f"{' and '.join(paths)} are on one device: they are no faster together than one of them, and are "
                "lost together. Give one directory of each drive.",
                VolumeWarning,
            )
    turning = [paths[0] for device, paths in devices.items() if _rotates(device)]
    if turning:
        warn(
            f"{', '.join(turning)}: the device says that it is a rotating disk. It works, and will be the one "
            "that the others wait for.",
            VolumeWarning,
        )


def _rotates(device: int) -> bool:
    entry = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in (f"{entry}/queue", f"{entry}/../queue"):
        try:
            with open(f"{queue}/rotational") as answer:
                return answer.read().strip() == "1"
        except OSError:
            continue
    return False
