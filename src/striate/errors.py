"""The exceptions that striate raises, and how their messages are put together.

A message has four parts: what failed, where (drive, path, offset), what state
the data is in, what to do. Errors that come from the operating system are also
``OSError`` with ``errno`` and ``filename`` set, so that code written for
``torch.save`` goes on working. No other module of striate is imported here.
"""

from __future__ import annotations

import errno as _errno
import os
import pickle
from collections.abc import Sequence
from typing import Any

__all__ = [
    "CorruptCheckpoint",
    "DataLost",
    "DriveAccess",
    "DriveError",
    "DriveFull",
    "DriveGone",
    "DriveHung",
    "DriveMedia",
    "EngineFallback",
    "EngineUnavailable",
    "FormatError",
    "LoadMismatch",
    "MissingMember",
    "NotEnoughMemory",
    "StriateError",
    "StriateWarning",
    "UnsafePickle",
    "UnsupportedFormat",
    "VolumeMismatch",
    "VolumeWarning",
    "drive_error",
]


class StriateError(Exception):
    """Root of everything that striate raises on purpose."""


class StriateWarning(UserWarning):
    """Root of the warnings."""


class EngineFallback(StriateWarning):
    """The engine asked for could not be used whole; the message says what was used instead and why."""


class VolumeWarning(StriateWarning):
    """A volume works, but not as it should: a drive is missing, failed, damaged, or shares a device with another."""


class FormatError(StriateError, ValueError):
    """The file is not a checkpoint that can be read: foreign, hostile or cut short."""


class UnsupportedFormat(FormatError):
    """A checkpoint of ours, of a version (or with a feature) that this striate does not read."""


class CorruptCheckpoint(StriateError):
    """Stored bytes are not the bytes that were written.

    Attributes: ``path``; ``region`` ("header", "graph" or "data"); ``chunk`` (index or None);
    ``tensors`` (names whose bytes lie in it); ``drive``; ``offset`` (bytes from the start of the file);
    ``wanted`` and ``found`` (hexadecimal XXH3-128, or None).
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        region: str = "data",
        chunk: int | None = None,
        tensors: Sequence[str] = (),
        drive: str = "",
        offset: int = 0,
        wanted: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.region = region
        self.chunk = chunk
        self.tensors = tuple(tensors)
        self.drive = drive
        self.offset = offset
        self.wanted = wanted
        self.found = found


class DataLost(StriateError):
    """More of a checkpoint is gone than its layout makes up for.

    ``tensors``: names of those that cannot be restored. ``drives``: what is wrong, drive by drive. ``path``: the
    checkpoint. ``partial=True`` loads the rest.
    """

    def __init__(
        self, message: str, *, path: str = "", tensors: Sequence[str] = (), drives: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.path = path
        self.tensors = tuple(tensors)
        self.drives = tuple(drives)


class MissingMember(DataLost):
    """DataLost because members were not found: they may be on drives that are not mounted, or not given."""


class VolumeMismatch(StriateError, ValueError):
    """The drives given are not those of one volume, or cannot bear the layout asked for."""


class LoadMismatch(StriateError, RuntimeError):
    """``load_into`` was refused: ``missing``, ``unexpected`` and ``mismatched`` name the entries."""

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)


class NotEnoughMemory(StriateError, MemoryError):
    """The tensors of a checkpoint do not fit into the memory that is left."""


class UnsafePickle(StriateError, pickle.UnpicklingError):
    """The object graph names something that ``weights_only=True`` does not allow."""


class EngineUnavailable(StriateError, RuntimeError):
    """The engine that was asked for cannot run here, and falling back was forbidden."""


class DriveError(StriateError, OSError):
    """A drive answered with an error. ``errno``, ``strerror`` and ``filename`` as in OSError.

    ``drive`` is the directory that stands for the drive, ``offset`` is in bytes from the start of the file, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        errno: int = _errno.EIO,
        path: str = "",
        drive: str = "",
        offset: int | None = None,
    ) -> None:
        super().__init__(errno, os.strerror(errno))
        self.message = message
        self.filename = path or None
        self.drive = drive
        self.offset = offset

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            _rebuild_drive_error,
            (type(self), self.message, dict(self.__dict__), self.errno, self.filename),
        )


def _rebuild_drive_error(
    cls: type[DriveError], message: str, state: dict[str, Any], errno: int, path: str | None
) -> DriveError:
    error = cls(message, errno=errno, path=path or "")
    error.__dict__.update(state)
    return error


class DriveFull(DriveError):
    """No space, or no quota, left. ``needed`` and ``free`` in bytes (None where not known)."""

    needed: int | None = None
    free: int | None = None


class DriveMedia(DriveError):
    """The medium failed: EIO, or ENODATA and EILSEQ, which the block layer uses for bad sectors."""


class DriveGone(DriveError):
    """The device or its file system went away."""


class DriveHung(DriveGone):
    """The drive did not answer in time. It was given up: this process does not touch it again."""


class DriveAccess(DriveError):
    """No permission, a read-only file system, a missing or wrong kind of path, a limit of the process."""


_FULL = {_errno.ENOSPC, _errno.EDQUOT}
_MEDIA = {_errno.EIO, _errno.ENODATA, _errno.EILSEQ}
_GONE = {_errno.ENODEV, _errno.ENXIO, _errno.ESHUTDOWN, _errno.EREMOTEIO, _errno.ESTALE, _errno.ENOTCONN}

# POSIX names that Python maps to subclasses of OSError: whoever catches
# FileNotFoundError around torch.save must still catch it here.
_STANDARD: dict[int, type[OSError]] = {
    _errno.ENOENT: FileNotFoundError,
    _errno.EACCES: PermissionError,
    _errno.EPERM: PermissionError,
    _errno.EISDIR: IsADirectoryError,
    _errno.ENOTDIR: NotADirectoryError,
    _errno.EEXIST: FileExistsError,
    _errno.EINTR: InterruptedError,
}
_COMBINED: dict[tuple[type[DriveError], type[OSError]], type[DriveError]] = {}


def _combined(cls: type[DriveError], standard: type[OSError]) -> type[DriveError]:
    key = (cls, standard)
    if key not in _COMBINED:
        _COMBINED[key] = type(
            cls.__name__, (cls, standard), {"__module__": cls.__module__, "__doc__": cls.__doc__}
        )
    return _COMBINED[key]


def _family(errno: int) -> type[DriveError]:
    if errno in _FULL:
        return DriveFull
    if errno in _MEDIA:
        return DriveMedia
    if errno in _GONE:
        return DriveGone
    return DriveAccess


_ADVICE = {
    _errno.ENOSPC: "Free space on the drive, or save elsewhere.",
    _errno.EDQUOT: "The user's quota on this file system is used up: remove files or raise the quota.",
    _errno.EIO: "The drive reported an I/O error: look at the kernel log (dmesg) and at the drive's health.",
    _errno.ENODATA: "The drive reported a medium error: look at the kernel log (dmesg) and replace the drive.",
    _errno.EILSEQ: "The drive reported a checksum error: look at the kernel log (dmesg) and at the drive's health.",
    _errno.ENOENT: "Create the directory first.",
    _errno.EACCES: "Check the owner and the mode of the directory and of the file.",
    _errno.EPERM: "Check the owner, the mode and the attributes (lsattr) of the directory and of the file.",
    _errno.EROFS: "The file system is mounted read-only: remount it, or look at the kernel log for why it became so.",
    _errno.EISDIR: "Give the name of a file.",
    _errno.ENOTDIR: "A part of the path is a file: give a path through directories.",
    _errno.ELOOP: "The path is a loop of symbolic links: remove one of them.",
    _errno.ENAMETOOLONG: "Use a shorter name.",
    _errno.EFBIG: "The file would pass a size limit: raise it (ulimit -f), or use another file system.",
    _errno.EMFILE: "The process has too many files open: raise the limit (ulimit -n).",
    _errno.ENFILE: "The system has too many files open: raise fs.file-max.",
    _errno.ENOMEM: "Not enough memory, or not enough may be locked or mapped: free some, or raise the limits (ulimit).",
    _errno.EFAULT: "The memory of a tensor went away while it was written: is its mapped file truncated?",
}


def drive_error(
    errno: int,
    doing: str,
    *,
    path: str,
    drive: str = "",
    offset: int | None = None,
    state: str = "",
    advice: str | None = None,
    needed: int | None = None,
    free: int | None = None,
) -> DriveError:
    """The right subclass of DriveError for an errno, with a message of four parts.

    ``doing`` names what failed ("write"), ``state`` says how the data stands ("Nothing was committed; ...").
    The class is also the standard library's for that errno (FileNotFoundError, PermissionError, ...).
    """
    name = _errno.errorcode.get(errno, str(errno))
    where = f"{path}, offset {offset}" if offset is not None else path
    if drive:
        where = f"drive {drive}, {where}"
    todo = _ADVICE.get(errno, "") if advice is None else advice
    message = " ".join(
        p for p in (f"{doing} failed: {where}: {os.strerror(errno)} ({name}).", state, todo) if p
    )
    cls = _family(errno)
    standard = _STANDARD.get(errno)
    if standard is not None:
        cls = _combined(cls, standard)
    error = cls(message, errno=errno, path=path, drive=drive, offset=offset)
    if isinstance(error, DriveFull):
        error.needed, error.free = needed, free
    return error
