"""The bytes of a checkpoint in the order in which they lie, a window at a time: for what must not need its memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from striate.member import Readable

__all__ = ["WINDOW_BYTES", "Part", "parts_of"]

WINDOW_BYTES = 64 << 20


class Part(NamedTuple):
    """Bytes of row ``row`` of the table, from byte ``offset`` of its storage on. Valid until the next one."""

    row: int
    offset: int
    data: NDArray[np.uint8]


def parts_of(source: Readable, rows: Sequence[int], *, verify: bool = True) -> Iterator[Part]:
    """The bytes of some rows of the table, as they follow each other in the data, reading only their chunks.

    Takes the memory of one window (64 MiB), or of one chunk if that is larger. Rows without bytes give no part.
    Raises as Readable.read_chunks does.
    """
    held = source.manifest
    table = held.table
    wanted = np.zeros(len(table.names), np.bool_)
    wanted[list(rows)] = True
    # A foreign file's chunks are counted from its first byte.
    shift = held.data_offset if held.foreign else 0
    chunks = source.chunks_of(sorted(int(row) for row in rows))
    per_window = max(1, WINDOW_BYTES // held.chunk_bytes)
    ends = table.offsets + table.lengths
    order = np.argsort(table.offsets, kind="stable")
    # Page by page, so that it can be read into directly; freed with the last view of it.
    buffer = np.frombuffer(mmap.mmap(-1, per_window * held.chunk_bytes), np.uint8)
    for mine in _windows(chunks, per_window):
        start = max(int(mine[0]) * held.chunk_bytes - shift, 0)
        stop = min((int(mine[-1]) + 1) * held.chunk_bytes - shift, table.data_bytes)
        inside = wanted & (table.offsets < stop) & (ends > start) & (table.lengths > 0)
        addresses = np.zeros(len(table.names) + (table.graph is not None), np.uint64)
        # Where a storage would begin if all of it were there: only the part within the window is read.
        with np.errstate(over="ignore"):
            place = table.offsets[inside].astype(np.uint64) - np.uint64(start)
            addresses[: len(inside)][inside] = place + np.uint64(buffer.ctypes.data)
        source.read_chunks(source.gather(addresses, chunks=mine), verify=verify)
        for row in order[inside[order]].tolist():
            first = max(int(table.offsets[row]), start)
            last = min(int(ends[row]), stop)
            yield Part(row, first - int(table.offsets[row]), buffer[first - start : last - start])


def _windows(chunks: NDArray[np.int64], most: int) -> Iterator[NDArray[np.int64]]:
    """Runs of chunks that follow each other, at most so many in one."""
    first = 0
    while first < len(chunks):
        last = first + 1
        while last < len(chunks) and last - first < most and chunks[last] == chunks[last - 1] + 1:
            last += 1
        yield chunks[first:last]
        first = last
