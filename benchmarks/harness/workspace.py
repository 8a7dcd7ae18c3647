"""The directory that a benchmark works in: on a real drive, never filling it, gone afterwards."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "striate-bench-"
# What stays free for everyone else on the drive.
SPARE_BYTES = 2 << 30
RAM_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


class NoRoom(Exception):
    """The drive has too little free space for the run; nothing was written."""


@contextlib.contextmanager
def workspace(parent: Path, needed_bytes: int) -> Iterator[Path]:
    """A fresh directory under `parent`, removed with all it holds; leftovers of killed runs are swept first.

    Raises NoRoom unless `needed_bytes` and SPARE_BYTES are free. A run holds a flock on its directory for life, which
    is how the next one tells a leftover from a neighbour.
    """
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent)
    check_room(parent, needed_bytes)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def sweep(parent: Path) -> None:
    for leftover in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            fd = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(leftover)
            finally:
                os.close(fd)


def check_room(path: Path, needed_bytes: int, spare_bytes: int = SPARE_BYTES) -> None:
    facts = os.statvfs(path)
    free_bytes = facts.f_bavail * facts.f_frsize
    if free_bytes < needed_bytes + spare_bytes:
        raise NoRoom(
            f"{path} has {free_bytes / 2**30:.1f} GiB free; the run needs {needed_bytes / 2**30:.1f} GiB and leaves "
            f"{spare_bytes / 2**30:.1f} GiB. Nothing was written: choose a smaller --size or another --dir"
        )


def remove(path: Path) -> None:
    """Remove a file or directory and let the file system finish with it, so that no freeing runs into the next save."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def file_system(path: Path) -> tuple[str, str]:
    """Type and source device of the file system that holds `path`, from this process's mount table."""
    path = path.resolve()
    best, answer = -1, ("unknown", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        point = before.split()[4].encode().decode("unicode_escape")
        kind, source = after.split()[:2]
        # A later mount on the same point hides the earlier one.
        if path.is_relative_to(point) and len(point) >= best:
            best, answer = len(point), (kind, source)
    return answer


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_and_directory(path: Path) -> None:
    """Make a finished write durable: fsync the file (or each file of a directory) and the directories."""
    targets = [*path.rglob("*"), path, path.parent] if path.is_dir() else [path, path.parent]
    for target in targets:
        fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
