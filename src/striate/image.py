"""The image: where each storage lies in the data of a checkpoint, and which memory each chunk is made of.

Pure arithmetic over tables, vectorised because a checkpoint may have a
million storages. No bytes are moved here, and no header is written: that is
the manifest's. The rules are those of docs/format.md, "Order of the data".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from striate.graph import Plain, StorageEntry

__all__ = [
    "GRAPH_NAME",
    "Pieces",
    "Table",
    "chunks_of",
    "gather",
    "lay_out",
    "names_in",
    "storages_in",
]

GRAPH_NAME = "__striate__.graph"


@dataclass(frozen=True, eq=False)
class Table:
    """The storage table and where its bytes lie. Index n is the identity of a storage.

    ``offsets`` and ``lengths`` are in bytes, relative to the data, in table order. A raw storage has dtype
    "U8" and shape (length,); ``tensors`` has the plain tensor that it also is, if it is one. ``locations``
    are runs of (torch location, count). ``graph`` is (offset, length) of the graph entry, which is in the
    data but not in the table.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    named: NDArray[np.bool_]
    locations: list[tuple[str, int]]
    tensors: dict[int, Plain] = field(default_factory=dict)
    data_bytes: int = 0
    graph: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def is_named(self, n: int) -> bool:
        """Is storage n exactly one plain tensor, under a name of its own?"""
        return bool(self.named[n])

    def plain(self, n: int) -> Plain | None:
        """The plain tensor that storage n is, or also is."""
        return Plain(self.dtypes[n], self.shapes[n]) if self.named[n] else self.tensors.get(n)

    def plains(self) -> list[Plain | None]:
        """``plain`` of every storage, in table order."""
        kinds = {kind: Plain(*kind) for kind in set(zip(self.dtypes, self.shapes, strict=True))}
        found: list[Plain | None] = [kinds[kind] for kind in zip(self.dtypes, self.shapes, strict=True)]
        for n in np.flatnonzero(~self.named).tolist():
            found[n] = self.tensors.get(n)
        return found

    def location(self, n: int) -> str:
        """torch's location of storage n, such as "cpu" or "cuda:0"."""
        return self.locations[int(np.searchsorted(self._runs, n, side="right"))][0]

    def locations_list(self) -> list[str]:
        """``location`` of every storage, in table order."""
        return [location for location, count in self.locations for _ in range(count)]

    @cached_property
    def _runs(self) -> NDArray[np.int64]:
        return np.cumsum(np.array([count for _, count in self.locations], np.int64))

    @cached_property
    def in_data_order(self) -> _InDataOrder:
        """The entries that have bytes, graph entry included, as they follow each other in the data."""
        offsets, lengths = self.offsets, self.lengths
        if self.graph is not None:
            offsets = np.append(offsets, np.int64(self.graph[0]))
            lengths = np.append(lengths, np.int64(self.graph[1]))
        index = np.flatnonzero(lengths)
        index = index[np.argsort(offsets[index], kind="stable")]
        return _InDataOrder(index, offsets[index])


@dataclass(frozen=True, eq=False)
class _InDataOrder:
    index: NDArray[np.int64]  # table index; the graph entry counts as one past the last
    starts: NDArray[np.int64]  # bytes; begins with 0, rises strictly


@dataclass(frozen=True, eq=False)
class Pieces:
    """Jobs, one a chunk in rising order, and the pieces of memory that each is gathered from (or scattered
    to).

    Of job i the pieces are ``first[i]`` to ``first[i] + count[i]``; their lengths add up to
    ``job_length[i]``. ``offset`` is in bytes from the start of the data, ``chunk`` the index of the chunk. A
    piece with ``addr`` 0 is not wanted: on a read its bytes are checked and dropped.
    """

    first: NDArray[np.uint64]
    count: NDArray[np.uint32]
    offset: NDArray[np.int64]
    job_length: NDArray[np.int64]
    chunk: NDArray[np.int64]
    addr: NDArray[np.uint64]
    length: NDArray[np.uint64]


def lay_out(entries: Sequence[StorageEntry], *, graph_length: int | None = None) -> Table:
    """Gives every storage its entry's name and its place in the data.

    ``graph_length`` (bytes) reserves the graph entry. A table of a million entries takes about two seconds.
    """
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    tensors: dict[int, Plain] = {}
    for n, entry in enumerate(entries):
        plain = entry.plain
        if entry.named:
            assert plain is not None, "a named storage is a plain tensor"
            names.append(f"__striate__.t.{n}" if entry.name is None else entry.name)
            dtypes.append(plain.dtype)
            shapes.append(plain.shape)
        else:
            names.append(f"__striate__.s.{n}")
            dtypes.append("U8")
            shapes.append((entry.nbytes,))
            if plain is not None:
                tensors[n] = plain
    assert len(set(names)) == len(names), "names of entries are unique"

    count = len(names)
    lengths = np.fromiter((entry.nbytes for entry in entries), np.int64, count)
    assert not count or int(lengths.min()) >= 0
    with_graph = lengths if graph_length is None else np.append(lengths, np.int64(graph_length))
    offsets, data_bytes = _offsets(with_graph)
    return Table(
        names=names,
        dtypes=dtypes,
        shapes=shapes,
        offsets=offsets[:count],
        lengths=lengths,
        named=np.fromiter((entry.named for entry in entries), np.bool_, count),
        locations=_runs_of(entry.location for entry in entries),
        tensors=tensors,
        data_bytes=data_bytes,
        graph=None if graph_length is None else (int(offsets[count]), graph_length),
    )


def _offsets(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    # n & -n is the largest power of two that divides n, and 0 for 0. What
    # stands before an entry is then a sum of multiples of its own power.
    power = lengths & -lengths
    power[lengths == 0] = np.iinfo(np.int64).max
    order = np.argsort(-power, kind="stable")
    ends = np.cumsum(lengths[order])
    offsets = np.empty_like(lengths)
    offsets[order] = ends - lengths[order]
    return offsets, int(ends[-1]) if len(ends) else 0


def _runs_of(locations: Iterable[str]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    last, count = "", 0
    for location in locations:
        if location == last:
            count += 1
            continue
        if count:
            runs.append((last, count))
        last, count = location, 1
    if count:
        runs.append((last, count))
    return runs


def gather(
    table: Table,
    addresses: NDArray[np.uint64],
    chunk_bytes: int,
    *,
    chunks: NDArray[np.int64] | None = None,
    wanted: NDArray[np.bool_] | None = None,
) -> Pieces:
    """Maps chunks of the data onto the memory of the storages.

    ``addresses`` has one for each storage, in table order, and one more for the graph entry where the table
    has one. ``chunks`` (rising indices) restricts the jobs to those; ``wanted``, of the length of
    ``addresses``, gives the others address 0. Neighbours in the data that are neighbours in memory become one
    piece.
    """
    data = table.in_data_order
    expected = len(table) + (table.graph is not None)
    assert len(addresses) == expected and (wanted is None or len(wanted) == expected)
    if not len(data.index):
        return _no_pieces()

    every_chunk = np.arange(0, table.data_bytes, chunk_bytes, dtype=np.int64)
    starts = _distinct(np.concatenate((data.starts, every_chunk)))
    lengths = np.diff(starts, append=table.data_bytes)
    chunk = starts // chunk_bytes
    if chunks is not None:
        mine = np.isin(chunk, chunks)
        starts, lengths, chunk = starts[mine], lengths[mine], chunk[mine]
        if not len(starts):
            return _no_pieces()

    at = np.searchsorted(data.starts, starts, side="right") - 1
    entry = data.index[at]
    inside = (starts - data.starts[at]).astype(np.uint64)
    addr = addresses.astype(np.uint64, copy=False)[entry]
    addr = np.where(addr == 0, np.uint64(0), addr + inside)
    if wanted is not None:
        addr[~wanted[entry]] = 0

    # A snapshot lies in memory as it does in the data: one piece a chunk then,
    # not one a storage. What is dropped on a read needs no telling apart either.
    new_chunk = np.ones(len(starts), np.bool_)
    new_chunk[1:] = chunk[1:] != chunk[:-1]
    both_dropped = (addr[1:] == 0) & (addr[:-1] == 0)
    adjoining = (addr[:-1] != 0) & (addr[1:] == addr[:-1] + lengths[:-1].astype(np.uint64))
    new_piece = new_chunk.copy()
    new_piece[1:] |= ~(both_dropped | adjoining)

    piece_first = np.flatnonzero(new_piece)
    job_first = np.flatnonzero(new_chunk)
    first = np.searchsorted(piece_first, job_first)
    return Pieces(
        first=first.astype(np.uint64),
        count=np.diff(first, append=len(piece_first)).astype(np.uint32),
        offset=starts[job_first],
        job_length=np.add.reduceat(lengths, job_first),
        chunk=chunk[job_first],
        addr=addr[piece_first],
        length=np.add.reduceat(lengths, piece_first).astype(np.uint64),
    )


def _no_pieces() -> Pieces:
    return Pieces(
        first=np.zeros(0, np.uint64),
        count=np.zeros(0, np.uint32),
        offset=np.zeros(0, np.int64),
        job_length=np.zeros(0, np.int64),
        chunk=np.zeros(0, np.int64),
        addr=np.zeros(0, np.uint64),
        length=np.zeros(0, np.uint64),
    )


def chunks_of(table: Table, indices: Iterable[int], chunk_bytes: int) -> NDArray[np.int64]:
    """The chunks, rising, that hold bytes of these storages; index ``len(table)`` means the graph entry."""
    index = np.fromiter(indices, np.int64)
    offsets, lengths = table.offsets, table.lengths
    if table.graph is not None:
        offsets, lengths = np.append(offsets, table.graph[0]), np.append(lengths, table.graph[1])
    index = index[lengths[index] > 0]
    if not len(index):
        return np.zeros(0, np.int64)
    first = offsets[index] // chunk_bytes
    counts = (offsets[index] + lengths[index] - 1) // chunk_bytes - first + 1
    # All ranges end to end: each one's first chunk, and the distance from it.
    distance = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return _distinct(np.repeat(first, counts) + distance)


def _distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values (none negative) in rising order, each once."""
    # np.unique hashes: a second for a million, where runs that are sorted
    # already merge in 6 ms.
    values.sort(kind="stable")
    distinct: NDArray[np.int64] = values[np.diff(values, prepend=np.int64(-1)) != 0]
    return distinct


def storages_in(table: Table, start: int, stop: int) -> list[int]:
    """Table indices of the storages with bytes in [start, stop) of the data, as they follow each other
    there."""
    return [n for n in _entries_in(table, start, stop) if n < len(table)]


def names_in(table: Table, start: int, stop: int) -> list[str]:
    """Names of the entries with bytes in [start, stop) of the data, the graph entry included."""
    return [table.names[n] if n < len(table) else GRAPH_NAME for n in _entries_in(table, start, stop)]


def _entries_in(table: Table, start: int, stop: int) -> list[int]:
    data = table.in_data_order
    if start >= stop or not len(data.index):
        return []
    first = max(int(np.searchsorted(data.starts, start, side="right")) - 1, 0)
    last = int(np.searchsorted(data.starts, stop, side="left"))
    found: list[int] = data.index[first:last].tolist()
    return found if start < table.data_bytes else []
