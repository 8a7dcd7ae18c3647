"""Drives and places on them: what the operating system says, without changing anything.

A *place* is where a member stands: a directory and a name in it, links
followed. Nothing here writes, and nothing here knows the format or the engine.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
from dataclasses import dataclass

from striate.errors import drive_error

__all__ = [
    "NO_LOCKS",
    "FileMap",
    "Place",
    "display",
    "file_maps",
    "free_bytes",
    "is_descriptor_path",
    "is_temporary_name",
    "memlock_limit_bytes",
    "resolve",
    "temporary_name",
]

# Answers to flock of file systems without locks (Lustre without -o flock, NFS with nolock).
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})

_LINKS_MAX = 40  # as the kernel's own limit on following links (path_resolution(7))
_DESCRIPTORS = re.compile(rb"/proc/[0-9]+/(task/[0-9]+/)?fd\Z")
_TEMPORARY = re.compile(rb"\.striate-[0-9a-f]{32}\Z")


@dataclass(frozen=True)
class Place:
    """Where a file stands or will stand: ``name`` in ``directory``, with no link left to follow."""

    directory: bytes
    name: bytes
    existing: os.stat_result | None

    @property
    def path(self) -> str:
        return display(os.path.join(self.directory, self.name))


def display(path: str | bytes) -> str:
    """A path for people: what is no UTF-8 or would move the cursor is shown escaped, so that it can be printed."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def temporary_name(uuid: bytes) -> bytes:
    return b".striate-" + uuid.hex().encode("ascii")


def is_temporary_name(name: bytes) -> bool:
    return _TEMPORARY.match(name) is not None


def resolve(path: str | bytes, *, doing: str = "save", state: str = "Nothing was written.") -> Place:
    """The place that a path names, following links at its end, dangling ones too.

    Raises DriveAccess (also FileNotFoundError, NotADirectoryError, IsADirectoryError or PermissionError
    where they apply) if the directory is missing or the path is a directory or a loop of links.
    """
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise ValueError(f"a path cannot hold a NUL byte: {display(raw)!r}")
    given = display(raw)
    for _ in range(_LINKS_MAX):
        directory, name = os.path.split(raw)
        directory = directory or b"."
        _require_directory(directory, given, doing, state)
        if name in (b"", b".", b".."):
            raise drive_error(errno.EISDIR, doing, path=given, state=state)
        try:
            found = os.lstat(raw)
        except FileNotFoundError:
            return Place(directory, name, None)
        except OSError as e:
            raise drive_error(e.errno or errno.EIO, doing, path=given, state=state) from None
        if stat.S_ISLNK(found.st_mode):
            raw = os.path.join(directory, os.readlink(raw))
            continue
        if stat.S_ISDIR(found.st_mode):
            raise drive_error(errno.EISDIR, doing, path=given, state=state)
        return Place(directory, name, found)
    raise drive_error(errno.ELOOP, doing, path=given, state=state)


def _require_directory(directory: bytes, given: str, doing: str, state: str) -> None:
    try:
        found = os.stat(directory)
    except OSError as e:
        advice = None
        if e.errno == errno.ENOENT:
            advice = f"There is no directory {display(directory)}: create it first."
        raise drive_error(e.errno or errno.EIO, doing, path=given, state=state, advice=advice) from None
    if not stat.S_ISDIR(found.st_mode):
        raise drive_error(errno.ENOTDIR, doing, path=given, state=state)


def is_descriptor_path(path: str | bytes) -> bool:
    """Does it name an open descriptor (/dev/fd/3, /proc/self/fd/3)? What such a link shows may be no path at all."""
    directory = os.path.realpath(os.path.dirname(os.fsencode(path)))
    return _DESCRIPTORS.match(directory) is not None


def free_bytes(dirfd: int) -> int | None:
    """Bytes that this user may still write to the file system of a directory (statvfs).

    None where it does not say: some FUSE file systems report a size of nothing at all.
    """
    found = os.fstatvfs(dirfd)
    if not found.f_blocks:
        return None
    blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return blocks * found.f_frsize


def memlock_limit_bytes() -> int | None:
    """RLIMIT_MEMLOCK (soft) in bytes, None if unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class FileMap:
    """Memory of this process that maps a file: [start, stop)."""

    start: int
    stop: int


def file_maps() -> list[FileMap]:
    """File-backed mappings in address order. Another process may cut such a file: reading past its end is SIGBUS."""
    found = []
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            fields = line.split(None, 5)
            if fields[4] == b"0" or len(fields) < 6 or fields[5].startswith(b"/dev/zero"):
                continue
            start, _, stop = fields[0].partition(b"-")
            found.append(FileMap(int(start, 16), int(stop, 16)))
    return found
