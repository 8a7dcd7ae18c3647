"""The image's arithmetic, against models that do it byte by byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from striate.graph import Plain, StorageEntry
from striate.image import GRAPH_NAME, Pieces, Table, chunks_of, gather, lay_out, names_in, storages_in

_SOURCE = torch.UntypedStorage(0)
_CHUNK = 64  # the arithmetic knows no smallest chunk, and small ones are crossed more often


def named(nbytes: int, name: str | None = None, location: str = "cpu") -> StorageEntry:
    return StorageEntry(nbytes, location, Plain("U8", (nbytes,)), name, True, _SOURCE)


def raw(nbytes: int, plain: Plain | None = None, location: str = "cpu") -> StorageEntry:
    return StorageEntry(nbytes, location, plain, None, False, _SOURCE)


def sized(*lengths: int, graph_length: int | None = None) -> Table:
    return lay_out([named(n, f"t{i}") for i, n in enumerate(lengths)], graph_length=graph_length)


lengths_lists = st.lists(
    st.one_of(st.sampled_from([0, 1, 2, 3, 63, 64, 65, 128, 192, 256, 320]), st.integers(0, 300)), max_size=30
)
maybe_graph = st.none() | st.integers(1, 200)


@given(lengths_lists, maybe_graph)
def test_entries_cover_the_data_without_gap_or_overlap(lengths: list[int], graph: int | None) -> None:
    table = sized(*lengths, graph_length=graph)
    spans = list(zip(table.offsets.tolist(), table.lengths.tolist(), strict=True))
    if table.graph is not None:
        spans.append(table.graph)
    reached = 0
    for offset, length in sorted(spans, key=lambda span: (span[0], span[0] + span[1])):
        assert offset == reached
        reached += length
    assert reached == table.data_bytes == sum(lengths) + (graph or 0)


@given(lengths_lists, maybe_graph)
def test_each_storage_begins_at_a_multiple_of_the_power_of_two_in_its_size(
    lengths: list[int], graph: int | None
) -> None:
    table = sized(*lengths, graph_length=graph)
    for offset, length in zip(table.offsets.tolist(), table.lengths.tolist(), strict=True):
        assert not length or offset % (length & -length) == 0


def test_equal_powers_keep_table_order_and_empty_storages_come_first() -> None:
    table = sized(3, 0, 8, 24, 0, 5, 4096, graph_length=7)
    in_order = sorted(range(7), key=lambda n: (table.offsets[n], table.lengths[n] > 0))
    assert in_order == [1, 4, 6, 2, 3, 0, 5]
    assert table.graph == (table.data_bytes - 7, 7)


def test_entries_are_named_by_their_table_index_where_they_have_no_name() -> None:
    table = lay_out([named(4, "a.b"), raw(8), named(2), raw(4, Plain("F32", (1,)))])
    assert table.names == ["a.b", "__striate__.s.1", "__striate__.t.2", "__striate__.s.3"]
    assert [table.is_named(n) for n in range(4)] == [True, False, True, False]
    assert (table.dtypes[1], table.shapes[1]) == ("U8", (8,))
    assert table.plains() == [Plain("U8", (4,)), None, Plain("U8", (2,)), Plain("F32", (1,))]
    assert [table.plain(n) for n in range(4)] == table.plains()


@given(st.lists(st.sampled_from(["cpu", "cuda:0", "meta"]), max_size=20))
def test_locations_are_maximal_runs_in_table_order(locations: list[str]) -> None:
    table = lay_out([named(1, f"t{n}", location) for n, location in enumerate(locations)])
    assert [table.location(n) for n in range(len(locations))] == locations
    assert table.locations_list() == locations
    runs = [location for location, _ in table.locations]
    assert all(left != right for left, right in pairwise(runs))
    assert all(count > 0 for _, count in table.locations)


# ---- gather: memory is modelled as a dict of address -> byte ------------------


def memory_of(table: Table, *, gap: int = 1000) -> tuple[np.ndarray, dict[int, int], bytes]:
    """Addresses for all entries, what lies there, and the data that it makes."""
    lengths = table.lengths.tolist()
    offsets = table.offsets.tolist()
    if table.graph is not None:
        offsets.append(table.graph[0])
        lengths.append(table.graph[1])
    memory: dict[int, int] = {}
    data = bytearray(table.data_bytes)
    addresses = []
    at = 1 << 40
    for n, length in enumerate(lengths):
        addresses.append(at)
        for i in range(length):
            memory[at + i] = data[offsets[n] + i] = (31 * n + i) % 251
        at += length + gap
    return np.array(addresses, np.uint64), memory, bytes(data)


def check_pieces(pieces: Pieces) -> None:
    assert pieces.first.dtype == np.uint64
    assert pieces.count.dtype == np.uint32
    assert pieces.addr.dtype == pieces.length.dtype == np.uint64
    assert pieces.offset.dtype == pieces.job_length.dtype == pieces.chunk.dtype == np.int64
    assert int(pieces.count.sum()) == len(pieces.addr) == len(pieces.length)
    expected_first = np.concatenate(([0], np.cumsum(pieces.count)[:-1])) if len(pieces.count) else []
    assert pieces.first.tolist() == list(expected_first)
    assert (pieces.length > 0).all()


def gathered(pieces: Pieces, memory: dict[int, int]) -> dict[int, bytes]:
    """chunk -> its bytes; what is not wanted reads as 255, which no storage holds."""
    found = {}
    for row in range(len(pieces.first)):
        block = bytearray()
        for piece in range(int(pieces.first[row]), int(pieces.first[row]) + int(pieces.count[row])):
            addr, length = int(pieces.addr[piece]), int(pieces.length[piece])
            block += bytes(memory[addr + i] for i in range(length)) if addr else b"\xff" * length
        assert len(block) == pieces.job_length[row]
        assert int(pieces.offset[row]) == int(pieces.chunk[row]) * _CHUNK
        found[int(pieces.chunk[row])] = bytes(block)
    return found


def in_chunks(data: bytes) -> dict[int, bytes]:
    return {i // _CHUNK: data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)}


@given(lengths_lists, maybe_graph, st.sampled_from([0, 1, 1000]))
def test_gathered_chunks_are_the_data(lengths: list[int], graph: int | None, gap: int) -> None:
    table = sized(*lengths, graph_length=graph)
    addresses, memory, data = memory_of(table, gap=gap)
    pieces = gather(table, addresses, _CHUNK)
    check_pieces(pieces)
    assert gathered(pieces, memory) == in_chunks(data)
    assert sorted(pieces.chunk.tolist()) == pieces.chunk.tolist()


@given(lengths_lists, maybe_graph, st.data())
def test_only_the_chunks_asked_for_are_gathered(
    lengths: list[int], graph: int | None, more: st.DataObject
) -> None:
    table = sized(*lengths, graph_length=graph)
    addresses, memory, data = memory_of(table)
    chunks = sorted(more.draw(st.sets(st.sampled_from(range(-(-table.data_bytes // _CHUNK) or 1)))))
    pieces = gather(table, addresses, _CHUNK, chunks=np.array(chunks, np.int64))
    check_pieces(pieces)
    whole = in_chunks(data)
    assert gathered(pieces, memory) == {chunk: whole[chunk] for chunk in chunks if chunk in whole}


@given(lengths_lists, maybe_graph, st.data())
def test_storages_that_are_not_wanted_have_address_zero(
    lengths: list[int], graph: int | None, more: st.DataObject
) -> None:
    table = sized(*lengths, graph_length=graph)
    addresses, memory, data = memory_of(table, gap=0)
    count = len(addresses)
    wanted = np.array(more.draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    pieces = gather(table, addresses, _CHUNK, wanted=wanted)
    check_pieces(pieces)
    dropped = bytearray(data)
    offsets = [*table.offsets.tolist(), *([table.graph[0]] if table.graph else [])]
    sizes = [*table.lengths.tolist(), *([table.graph[1]] if table.graph else [])]
    for n in np.flatnonzero(~wanted):
        dropped[offsets[n] : offsets[n] + sizes[n]] = b"\xff" * sizes[n]
    assert gathered(pieces, memory) == in_chunks(bytes(dropped))


def test_memory_that_lies_as_the_data_does_is_one_piece_a_chunk() -> None:
    table = sized(64, 32, 32, 16, 16, 8)
    arena = np.uint64(4096) + table.offsets.astype(np.uint64)
    pieces = gather(table, arena, _CHUNK)
    assert pieces.count.tolist() == [1, 1, 1]
    assert pieces.addr.tolist() == [4096, 4096 + 64, 4096 + 128]
    assert pieces.length.tolist() == [64, 64, 40]


def test_neighbours_that_are_dropped_are_one_piece_and_an_empty_one_is_none() -> None:
    table = sized(0, 16, 16, 16, 16)
    addresses = np.array([7, 0x1000, 0x2000, 0x3000, 0x4000], np.uint64)
    pieces = gather(table, addresses, _CHUNK, wanted=np.array([True, False, False, True, False]))
    assert pieces.addr.tolist() == [0, 0x3000, 0]
    assert pieces.length.tolist() == [32, 16, 16]


def test_no_data_makes_no_jobs() -> None:
    for table in (sized(), sized(0, 0)):
        pieces = gather(table, np.zeros(len(table), np.uint64), _CHUNK)
        check_pieces(pieces)
        assert len(pieces.first) == len(pieces.addr) == 0


def test_an_address_for_each_entry_is_demanded() -> None:
    with pytest.raises(AssertionError):
        gather(sized(8, 8, graph_length=5), np.zeros(2, np.uint64), _CHUNK)


@given(lengths_lists, maybe_graph, st.data())
def test_chunks_of_are_those_that_hold_a_byte(
    lengths: list[int], graph: int | None, more: st.DataObject
) -> None:
    table = sized(*lengths, graph_length=graph)
    entries = list(range(len(table) + (graph is not None)))
    chosen = more.draw(st.lists(st.sampled_from(entries))) if entries else []
    spans = [
        *zip(table.offsets.tolist(), table.lengths.tolist(), strict=True),
        *([table.graph] if table.graph else []),
    ]
    model = {at // _CHUNK for n in chosen for at in range(spans[n][0], spans[n][0] + spans[n][1])}
    assert chunks_of(table, chosen, _CHUNK).tolist() == sorted(model)


@given(lengths_lists, maybe_graph, st.integers(0, 3000), st.integers(0, 300))
def test_storages_in_a_range_are_those_with_a_byte_in_it(
    lengths: list[int], graph: int | None, start: int, length: int
) -> None:
    table = sized(*lengths, graph_length=graph)
    stop = start + length
    spans = list(zip(table.offsets.tolist(), table.lengths.tolist(), strict=True))
    model = [n for n, (at, size) in enumerate(spans) if any(start <= at + i < stop for i in range(size))]
    found = storages_in(table, start, stop)
    assert sorted(found) == model
    assert [spans[n][0] for n in found] == sorted(spans[n][0] for n in found)
    names = names_in(table, start, stop)
    assert [name for name in names if name != GRAPH_NAME] == [table.names[n] for n in found]
    touched = table.graph is not None and any(
        start <= table.graph[0] + i < stop for i in range(table.graph[1])
    )
    assert (GRAPH_NAME in names) == touched


def test_sizes_beyond_32_bits_are_counted_right() -> None:
    table = sized(5 << 40, 3, 1 << 33)
    assert table.offsets.tolist() == [0, (5 << 40) + (1 << 33), 5 << 40]
    chunk_bytes = 64 << 20
    pieces = gather(table, np.array([1 << 20, 1 << 50, 1 << 51], np.uint64), chunk_bytes)
    assert int(pieces.job_length.sum()) == table.data_bytes
    assert pieces.job_length[-1] == 3
    assert storages_in(table, (5 << 40) - 1, (5 << 40) + 1) == [0, 2]


def test_an_address_of_zero_is_dropped_wherever_a_chunk_begins_in_it() -> None:
    table = sized(128, 64)
    pieces = gather(table, np.array([0, 64], np.uint64), _CHUNK)
    # Address 64 lies where dropped bytes of length 64 from "address 0" would end: no neighbour all the same.
    assert pieces.addr.tolist() == [0, 0, 64]
    table = sized(32, 32)
    pieces = gather(table, np.array([0, 32], np.uint64), _CHUNK)
    assert pieces.addr.tolist() == [0, 32]
    assert pieces.length.tolist() == [32, 32]


def test_a_range_ends_where_the_next_storage_begins() -> None:
    table = sized(64, 64, 64)
    assert storages_in(table, 64, 128) == [1]
    assert storages_in(table, 63, 129) == [0, 1, 2]
    assert storages_in(table, 64, 64) == []
    assert storages_in(table, 192, 200) == []


def test_an_empty_storage_in_the_midst_of_a_foreign_file_lies_in_no_chunk() -> None:
    table = replace(sized(100, 0, 50), offsets=np.array([0, 100, 100]))
    assert chunks_of(table, [1], _CHUNK).tolist() == []
    assert chunks_of(table, [1, 2], _CHUNK).tolist() == [1, 2]
    assert storages_in(table, 0, 150) == [0, 2]
