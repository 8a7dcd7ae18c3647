"""Make files cold (out of the page cache) and look whether they are."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

PROBES_COUNT = 64
ATTEMPTS_MAX = 5


def files_of(path: Path) -> list[Path]:
    """The file itself, or every file of a directory (torch.distributed.checkpoint writes one)."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def evict(path: Path) -> tuple[str, float | None]:
    """Drop `path` from the page cache; returns how, and the share that is still cached (None: cannot be told).

    Clean pages only: the caller has synced. posix_fadvise always; as root the kernel's whole page cache too, which
    also reaches pages that others map. Repeated while anything is left: pages that a CPU holds back for a batch stay.
    """
    for attempt in range(ATTEMPTS_MAX):
        for file in files_of(path):
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
            how = "posix_fadvise and drop_caches"
        except OSError:
            how = "posix_fadvise"
        share = warm_share(files_of(path))
        if not share:
            break
        time.sleep(0.05 * (attempt + 1))
    return how, share


def warm_share(paths: Iterable[Path]) -> float | None:
    """The share of evenly spread 4 KiB probes that the page cache answers; None: the file system does not say."""
    warm = probes = 0
    buffer = bytearray(4096)
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Without this the first probe that misses would start read-ahead and warm the next ones.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            size = os.fstat(fd).st_size
            for index in range(PROBES_COUNT if size > 4096 * PROBES_COUNT else 1):
                try:
                    warm += (
                        os.preadv(fd, [buffer], index * (size // PROBES_COUNT) // 4096 * 4096, os.RWF_NOWAIT)
                        > 0
                    )
                except BlockingIOError:
                    pass
                except OSError:
                    return None
                probes += 1
        finally:
            os.close(fd)
    return warm / probes if probes else 0.0
