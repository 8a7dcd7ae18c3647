"""Make files cold (out of the page cache) and look whether they are."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

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
    """The share of the files' pages that are in the page cache; None: the kernel does not say.

    By mincore: reading with RWF_NOWAIT would start the very reads that it asks about.
    """
    warm = pages = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not os.fstat(fd).st_size:
                continue
            # Private and writable only so that ctypes gives the address; nothing is written or even touched.
            with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
                resident = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
                anchor = ctypes.c_char.from_buffer(mapped)
                refused = ctypes.CDLL(None).mincore(
                    ctypes.c_void_p(ctypes.addressof(anchor)),
                    ctypes.c_size_t(len(mapped)),
                    ctypes.c_void_p(resident.ctypes.data),
                )
                # mmap refuses to close under it.
                del anchor
        finally:
            os.close(fd)
        if refused:
            return None
        warm += int((resident & 1).sum())
        pages += len(resident)
    return warm / pages if pages else 0.0
