"""The manifest of a member: what is encoded comes back, fast. tests/format holds it to the document, rule by rule."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from striate import extents
from striate.errors import CorruptCheckpoint, FormatError
from striate.extents import MemberManifest
from striate.graph import Plain, StorageEntry
from striate.groups import Shape
from striate.image import Table, lay_out
from striate.manifest import DTYPE_BYTES, plain_bytes
from striate.placement import Blocks, place
from striate.superblock import Superblock

UUID = bytes(range(16))
CHUNK = 4096
_SOURCE = torch.UntypedStorage(0)


def entry(plain: Plain, name: str | None, location: str = "cpu") -> StorageEntry:
    return StorageEntry(plain_bytes(plain.dtype, plain.shape), location, plain, name, True, _SOURCE)


def raw(nbytes: int, plain: Plain | None = None, location: str = "cpu") -> StorageEntry:
    return StorageEntry(nbytes, location, plain, None, False, _SOURCE)


def blocks_of(table: Table, shape: Shape, members: int, chunk_bytes: int = CHUNK) -> Blocks:
    starts = np.arange(0, table.data_bytes, chunk_bytes, dtype=np.int64)
    return place(np.minimum(chunk_bytes, table.data_bytes - starts), shape, members)


def drives_of(count: int) -> list[tuple[bytes, bytes]]:
    return [(bytes([n]) * 16, b"/mnt/drive %d/\xff" % n) for n in range(count)]


def encoded(
    table: Table, blocks: Blocks, members: int, **options: Any
) -> tuple[bytes, extents.Draft, bytes, bytes]:
    """The manifest, its draft, and digests that were put into it."""
    defaults: dict[str, Any] = {"ties": {}, "graph": None, "graph_bytes": None, "chunk_bytes": CHUNK}
    draft = extents.encode(table, uuid=UUID, blocks=blocks, drives=drives_of(members), **(defaults | options))
    noise = np.random.default_rng(1)
    data, checks = (
        noise.bytes(16 * blocks.chunks_count),
        noise.bytes(16 * (len(blocks.offset) - blocks.chunks_count)),
    )
    return draft.finish(data, checks), draft, data, checks


def superblock_for(manifest: bytes, blocks: Blocks, members: int, chunk_bytes: int = CHUNK) -> Superblock:
    return Superblock(
        uuid=UUID,
        sequence=5,
        volume=b"v" * 16,
        drive=bytes(16),
        member=0,
        members=members,
        shape=blocks.shape,
        chunk_bytes=chunk_bytes,
        manifest_offset=int(blocks.member_bytes[0]),
        manifest_bytes=len(manifest),
        manifest_digest=extents.manifest_digest(manifest, UUID),
        whole=frozenset(range(members)),
        name=b"name",
    )


def read_back(table: Table, shape: Shape, members: int, **options: Any) -> MemberManifest:
    blocks = blocks_of(table, shape, members)
    manifest, draft, data, checks = encoded(table, blocks, members, **options)
    assert draft.length == len(manifest), "the length is final before the digests are known"
    found = extents.decode(manifest, superblock_for(manifest, blocks, members), path="p")
    assert (found.digests, found.check_digests, found.all_digests) == (data, checks, data + checks)
    assert found.drives == tuple(drives_of(members))
    for ours, theirs in (
        (found.blocks.offset, blocks.offset), (found.blocks.length, blocks.length),
        (found.blocks.member, blocks.member), (found.blocks.groups, blocks.groups),
        (found.blocks.member_bytes, blocks.member_bytes),
    ):  # fmt: skip
        np.testing.assert_array_equal(ours, theirs)
    assert found.blocks.shape == shape and found.blocks.chunks_count == blocks.chunks_count
    check_same_table(found.table, table)
    return found


def check_same_table(found: Table, wanted: Table) -> None:
    assert (found.names, found.dtypes, found.shapes) == (wanted.names, wanted.dtypes, wanted.shapes)
    assert found.plains() == wanted.plains()
    assert found.tensors == wanted.tensors
    assert found.locations == wanted.locations
    assert (found.data_bytes, found.graph) == (wanted.data_bytes, None)
    for ours, theirs in (
        (found.offsets, wanted.offsets), (found.lengths, wanted.lengths), (found.named, wanted.named)
    ):  # fmt: skip
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


plains = st.builds(
    Plain, st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 40), max_size=3).map(tuple)
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: text != "__metadata__" and not text.startswith("__striate__.")
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, dict[str, str]]:
    names = draw(st.lists(texts, max_size=8, unique=True))
    cut = draw(st.integers(0, len(names)))
    places = st.sampled_from(["cpu", "cuda:0", "\u00fcber", ""])
    entries = [entry(draw(plains), name, draw(places)) for name in names[:cut]]
    for _ in range(draw(st.integers(0, 3))):
        plain = draw(plains)
        also = draw(st.booleans())
        entries.append(raw(plain_bytes(plain.dtype, plain.shape), plain if also else None, draw(places)))
    entries += [entry(draw(plains), None, draw(places)) for _ in range(draw(st.integers(0, 2)))]
    entries = draw(st.permutations(entries))
    ties = {other: draw(st.sampled_from(names[:cut])) for other in names[cut:]} if cut else {}
    return lay_out(entries), ties


@given(
    described=tables(), data=st.integers(1, 5), checks=st.integers(0, 3), spare=st.integers(0, 3),
    pickle=st.binary(min_size=1, max_size=300),
)  # fmt: skip
def test_every_table_comes_back_as_it_was(
    described: tuple[Table, dict[str, str]], data: int, checks: int, spare: int, pickle: bytes
) -> None:
    table, ties = described
    graph = zlib.compress(pickle)
    found = read_back(
        table, Shape(data, checks), data + checks + spare, ties=ties, graph=graph, graph_bytes=len(pickle)
    )
    assert found.ties == ties
    assert (found.graph, found.graph_bytes, found.flat) == (graph, len(pickle), False)
    assert (found.uuid, found.sequence, found.chunk_bytes) == (UUID, 5, CHUNK)
    assert (found.data_offset, found.foreign, found.graph_entry, found.metadata) == (0, False, False, {})


def test_a_flat_checkpoint_comes_back_flat() -> None:
    table = lay_out([entry(Plain("F32", (n, 7)), f"layer.{n}") for n in range(60)])
    found = read_back(table, Shape(3, 1), 4)
    assert found.flat and found.graph is None and found.graph_bytes is None


def test_a_name_that_is_not_utf8_is_left_to_the_graph() -> None:
    table = lay_out([entry(Plain("F32", (3,)), "w")])
    ties = {"\udc80": "w", "v": "w"}
    found = read_back(table, Shape(1, 1), 2, ties=ties, graph=b"zlib", graph_bytes=4)
    assert found.ties == {"v": "w"}


def test_a_shape_that_no_reader_could_take_is_refused_before_anything_is_written() -> None:
    table = lay_out([entry(Plain("F32", (0,)), "w")])
    table.shapes[0] = (0, 1 << 40, 1 << 40)
    with pytest.raises(FormatError, match="Nothing was written"):
        extents.encode(
            table, uuid=UUID, chunk_bytes=CHUNK, ties={}, graph=None, graph_bytes=None,
            blocks=blocks_of(table, Shape(1, 0), 1), drives=drives_of(1),
        )  # fmt: skip


def test_a_manifest_past_the_limit_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = lay_out([entry(Plain("U8", (9 * CHUNK,)), "w")])
    blocks = blocks_of(table, Shape(2, 1), 3)
    length = encoded(table, blocks, 3)[1].length
    monkeypatch.setattr(extents, "MANIFEST_BYTES_MAX", length)
    assert encoded(table, blocks, 3)[1].length == length
    monkeypatch.setattr(extents, "MANIFEST_BYTES_MAX", length - 1)
    with pytest.raises(FormatError, match=r"Nothing was written\. Use larger chunks"):
        encoded(table, blocks, 3)


def test_seeds_are_those_of_the_document() -> None:
    def seed(index: int) -> int:
        return xxhash.xxh3_64_intdigest(UUID + index.to_bytes(8, "little"))

    assert extents.check_seed(UUID, 7, 3, 2) == seed((1 << 63) + 7 * 3 + 2)
    assert extents.manifest_digest(b"abc", UUID) == xxhash.xxh3_128_digest(b"abc", seed=seed((1 << 64) - 1))
    assert extents.manifest_digest(b"abc", bytes(16)) != extents.manifest_digest(b"abc", UUID)


def test_a_manifest_of_another_generation_or_form_is_refused() -> None:
    table = lay_out([entry(Plain("F32", (3000,)), "w")])
    blocks = blocks_of(table, Shape(2, 1), 3)
    manifest = encoded(table, blocks, 3)[0]
    fits = superblock_for(manifest, blocks, 3)
    assert extents.decode(manifest, fits, path="p").uuid == UUID
    changes: Sequence[dict[str, Any]] = (
        {"uuid": bytes(16), "manifest_digest": extents.manifest_digest(manifest, bytes(16))},
        {"shape": Shape(1, 2)},
        {"members": 4},
        {"chunk_bytes": 8192},
        {"manifest_digest": bytes(16)},
        {"manifest_offset": 4096},
    )
    for change in changes:
        with pytest.raises(
            CorruptCheckpoint, match=r"p: the manifest is damaged: .*Another member"
        ) as caught:
            extents.decode(manifest, dataclasses.replace(fits, **change), path="p")
        assert (caught.value.region, caught.value.path) == ("manifest", "p")


def test_a_hundred_thousand_storages_take_a_fraction_of_a_second_each_way() -> None:
    count = 100_000
    table = lay_out([entry(Plain("F32", (n % 7, 8)), f"model.layers.{n}.weight") for n in range(count)])
    blocks = blocks_of(table, Shape(4, 2), 8)
    began = time.process_time()
    manifest, *_ = encoded(table, blocks, 8)
    wrote = time.process_time()
    found = extents.decode(manifest, superblock_for(manifest, blocks, 8), path="p")
    read = time.process_time()
    assert len(found.table) == count
    assert wrote - began < 1
    assert read - wrote < 1.5


def test_the_blocks_of_four_terabytes_take_seconds_at_most() -> None:
    chunk_bytes = 4 << 20
    table = lay_out([raw(1_000_000 * chunk_bytes - 5)])
    blocks = blocks_of(table, Shape(6, 2), 8, chunk_bytes)
    manifest, *_ = encoded(table, blocks, 8, graph=b"z", graph_bytes=1, chunk_bytes=chunk_bytes)
    facts = superblock_for(manifest, blocks, 8, chunk_bytes)
    began = time.process_time()
    found = extents.decode(manifest, facts, path="p")
    assert time.process_time() - began < 4
    assert found.blocks.chunks_count == 1_000_000
