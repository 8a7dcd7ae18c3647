"""The header: what is encoded comes back, what is damaged or hostile is refused."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from striate import manifest
from striate.errors import CorruptCheckpoint, FormatError, StriateError, UnsupportedFormat
from striate.graph import DTYPES, Plain, StorageEntry
from striate.image import Table, lay_out
from striate.manifest import Manifest, decode, encode, header_length, pack_graph, seal, unpack_graph

_SOURCE = torch.UntypedStorage(0)
UUID = bytes(range(16))


def entry(
    plain: Plain, name: str | None = None, *, named: bool = True, location: str = "cpu"
) -> StorageEntry:
    return StorageEntry(manifest.plain_bytes(plain.dtype, plain.shape), location, plain, name, named, _SOURCE)


def raw(nbytes: int, location: str = "cpu") -> StorageEntry:
    return StorageEntry(nbytes, location, None, None, False, _SOURCE)


def encoded(table: Table, digests: bytes | None = None, **options: Any) -> bytes:
    defaults: dict[str, Any] = {"uuid": UUID, "sequence": 7, "chunk_bytes": 4096, "ties": {}, "graph": None}
    defaults.update({"graph_bytes": None, "graph_entry": False})
    defaults.update(options)
    if digests is None:
        digests = bytes(range(16)) * manifest.chunks_count(table.data_bytes, defaults["chunk_bytes"])
    return encode(table, digests=digests, **defaults)


def small() -> tuple[Table, bytes]:
    """Named and raw storages, a graph, a tie: every key that a file without a graph entry can have."""
    table = lay_out(
        [entry(Plain("F32", (2, 2)), "w"), entry(Plain("BF16", (3,)), named=False), raw(5, "cuda:0")]
    )
    return table, encoded(table, ties={"v": "w"}, graph=zlib.compress(b"\x80\x02N."), graph_bytes=4)


def read(content: bytes, *, file_bytes: int | None = None, verify: bool = True) -> Manifest:
    """As a reader does, from the first bytes of a file."""
    length = header_length(content[:8], file_bytes=file_bytes)
    return decode(content[:length], file_bytes=file_bytes, verify=verify)


def resealed(header: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A header whose JSON was changed and whose checksum is right all the same: what a hostile writer makes."""
    members = json.loads(header[8:])
    change(members)
    return sealed_text(json.dumps(members, separators=(",", ":")).encode())


def sealed_text(text: bytes) -> bytes:
    text += b" " * (-(8 + len(text)) % 4096)
    made = bytearray(len(text).to_bytes(8, "little") + text)
    at = made.find(b'"striate.checksum":"') + 20
    if at >= 20:
        made[at : at + 32] = b"0" * 32
        made[at : at + 32] = xxhash.xxh3_128_hexdigest(bytes(made)).encode()
    return bytes(made)


def foreign(text: str | bytes, data_bytes: int = 0) -> tuple[bytes, int]:
    """A safetensors file that is not ours, and its length."""
    raw_text = text.encode() if isinstance(text, str) else text
    return len(raw_text).to_bytes(8, "little") + raw_text, 8 + len(raw_text) + data_bytes


# ---- what is encoded comes back ------------------------------------------------

names = st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(
    lambda name: name != "__metadata__" and not name.startswith("__striate__.")
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
plains = st.builds(Plain, st.sampled_from(sorted(DTYPES)), shapes)
entries = st.one_of(
    st.builds(entry, plains, names, location=st.sampled_from(["cpu", "cuda:0", 'o"d\n'])),
    st.builds(entry, plains, named=st.just(False)),
    st.builds(raw, st.integers(0, 5000)),
)
tables = st.lists(entries, max_size=12, unique_by=lambda e: object() if e.name is None else e.name)


@given(
    tables,
    st.integers(0, 2**64 - 1),
    st.sampled_from([4096, 1 << 20, 1 << 26]),
    st.sampled_from("fie"),
    st.data(),
)
def test_what_is_encoded_comes_back(
    storages: list[StorageEntry], sequence: int, chunk_bytes: int, where: str, more: st.DataObject
) -> None:
    flat = where == "f" and all(e.named and e.name is not None for e in storages)
    in_entry = not flat and where == "e"
    graph = None if flat else zlib.compress(more.draw(st.binary(min_size=1, max_size=99)))
    table = lay_out(storages, graph_length=len(graph) if graph is not None and in_entry else None)
    named = [name for name, is_named in zip(table.names, table.named, strict=True) if is_named]
    others = st.text(max_size=5).filter(lambda name: name not in named)
    ties = more.draw(st.dictionaries(others, st.sampled_from(named))) if named and not flat else {}
    count = manifest.chunks_count(table.data_bytes, chunk_bytes)
    digests = more.draw(st.binary(min_size=16 * count, max_size=16 * count))
    header = encoded(
        table,
        digests,
        sequence=sequence,
        chunk_bytes=chunk_bytes,
        ties=ties,
        graph=None if in_entry else graph,
        graph_bytes=None if graph is None else 55,
        graph_entry=in_entry,
    )
    assert len(header) % 4096 == 0
    found = read(header, file_bytes=len(header) + table.data_bytes)
    assert (found.version, found.uuid, found.sequence, found.chunk_bytes) == (1, UUID, sequence, chunk_bytes)
    assert (found.foreign, found.flat, found.graph_entry) == (False, flat, in_entry)
    assert found.graph == (None if in_entry else graph)
    assert found.graph_bytes == (None if flat else 55)
    assert found.digests == digests
    assert found.ties == {k: v for k, v in ties.items() if k != "format" and not k.startswith("striate.")}
    assert (found.data_offset, found.file_bytes) == (len(header), len(header) + table.data_bytes)
    same_table(found.table, table)


def same_table(found: Table, wanted: Table) -> None:
    for column in ("names", "dtypes", "shapes", "locations", "tensors", "data_bytes", "graph"):
        assert getattr(found, column) == getattr(wanted, column), column
    for column in ("offsets", "lengths", "named"):
        assert getattr(found, column).dtype == getattr(wanted, column).dtype, column
        np.testing.assert_array_equal(getattr(found, column), getattr(wanted, column), column)


def test_sealing_fills_a_header_that_already_has_its_length() -> None:
    table = lay_out([entry(Plain("U8", (9000,)), "t")])
    options: dict[str, Any] = {"uuid": UUID, "sequence": 1, "chunk_bytes": 4096, "ties": {}, "graph": None}
    options.update({"graph_bytes": None, "graph_entry": False})
    unsealed = encode(table, digests=None, **options)
    with pytest.raises(CorruptCheckpoint):
        read(unsealed)
    digests = bytes(range(48))
    header = bytearray(unsealed)
    seal(header, digests)
    assert len(header) == len(unsealed)
    assert header == encode(table, digests=digests, **options)
    assert read(bytes(header)).digests == digests
    seal(header, digests)
    assert read(bytes(header)).digests == digests, "sealing twice is sealing once"


def test_keys_of_ours_do_not_give_way_to_tied_names() -> None:
    table = lay_out([entry(Plain("F32", (1,)), "w")])
    bad = {"format": "w", "striate.uuid": "w", "striate.new": "w", "\ud800": "w"}
    # This one ends like the key of the checksum, up to the quote.
    odd = {'a"striate.checksum': "w", 'b"striate.chunks': "w", "c": "w"}
    header = encoded(table, ties={**odd, **bad}, graph=b"g", graph_bytes=1)
    found = read(header)
    assert found.ties == odd
    assert found.metadata["format"] == "pt"
    assert found.uuid == UUID


def test_the_sequence_stands_in_the_first_page() -> None:
    # The next save reads it there, before it knows whether the file is whole.
    table = lay_out([entry(Plain("U8", (1,)), f"t{n}", location=f"cuda:{n}") for n in range(500)])
    assert b'"striate.sequence":"00000000000000000007"' in encoded(table)[:4096]


def test_a_header_over_the_limit_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifest.HEADER_BYTES_WRITE_MAX == 90_000_000
    monkeypatch.setattr(manifest, "HEADER_BYTES_WRITE_MAX", 10 * 4096 - 8)
    fits = lay_out([entry(Plain("F32", (1,)), "x" * 40_000)])
    assert len(encoded(fits)) == 10 * 4096
    too_long = lay_out([entry(Plain("F32", (1,)), "x" * 41_000)])
    with pytest.raises(FormatError, match=r"Nothing was written\. Save the object in several files"):
        encoded(too_long)


def test_a_shape_that_no_reader_takes_is_refused_before_it_is_written() -> None:
    storage = StorageEntry(0, "cpu", Plain("U8", (1 << 31, 1 << 31, 2, 0)), "t", True, _SOURCE)
    for named in (True, False):
        storage.named = named
        with pytest.raises(FormatError, match="Nothing was written"):
            encoded(lay_out([storage]), graph=b"g", graph_bytes=1)


# ---- the graph ---------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=2000))
def test_a_graph_is_unpacked_as_it_was_packed(pickle: bytes) -> None:
    stored, in_entry = pack_graph(pickle)
    assert not in_entry
    assert unpack_graph(stored, len(pickle)) == pickle


def test_a_graph_too_long_for_the_metadata_goes_into_an_entry() -> None:
    random = np.random.default_rng(1).bytes  # does not compress
    limit = manifest.GRAPH_TEXT_MAX // 4 * 3
    assert not pack_graph(random(limit - 16_384))[1]
    assert pack_graph(random(limit + 1))[1]


def test_a_graph_that_is_not_what_the_header_declares_is_damage() -> None:
    stored = zlib.compress(b"0123456789")
    for bad, length in [
        (stored, 9),
        (stored, 11),
        (stored, 0),
        (stored, manifest.GRAPH_BYTES_MAX + 1),
        (stored[:-1], 10),
        (stored + b"x", 10),
        (b"not zlib", 10),
        (b"", 10),
    ]:
        with pytest.raises(CorruptCheckpoint) as caught:
            unpack_graph(bad, length)
        assert caught.value.region == "graph"


def test_a_graph_that_would_grow_without_end_is_stopped_at_its_declared_length() -> None:
    import tracemalloc

    bomb = zlib.compress(bytes(64 << 20), 1)
    tracemalloc.start()
    with pytest.raises(CorruptCheckpoint):
        unpack_graph(bomb, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_pickle_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "GRAPH_BYTES_MAX", 100)
    with pytest.raises(FormatError, match="Nothing was written"):
        pack_graph(bytes(101))
    assert pack_graph(bytes(100))


# ---- damage ------------------------------------------------------------------------


def test_every_flipped_bit_of_a_header_is_an_error_and_never_a_foreign_file() -> None:
    table, header = small()
    whole = header + bytes(table.data_bytes)
    assert not read(whole, file_bytes=len(whole)).foreign
    for at in range(len(header)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            wanted = StriateError if at < 8 else CorruptCheckpoint
            with pytest.raises(wanted):
                read(bytes(flipped), file_bytes=len(whole))


def test_a_flipped_bit_in_the_length_is_an_error_in_a_stream_too() -> None:
    # There the length of the file is not known, and more bytes may follow.
    table, header = small()
    whole = header + bytes(table.data_bytes)
    for bit in range(64):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StriateError):
            read(bytes(flipped) + whole)


@given(st.binary(max_size=40), st.integers(0, 700), st.integers(0, 40))
def test_bytes_put_over_a_header_are_an_error(patch: bytes, at: int, removed: int) -> None:
    table, header = small()
    changed = (header[:at] + patch + header[at + removed :])[: len(header)].ljust(len(header))
    if changed == header:
        return
    with pytest.raises(StriateError):
        read(changed, file_bytes=len(header) + table.data_bytes)


def test_a_file_of_another_length_than_its_header_implies_is_damaged() -> None:
    table, header = small()
    right = len(header) + table.data_bytes
    assert read(header, file_bytes=right).table.data_bytes == table.data_bytes
    assert read(header, file_bytes=None).file_bytes == right
    for wrong, word in ((right - 1, "cut short"), (len(header), "cut short"), (right + 1, "too long")):
        with pytest.raises(CorruptCheckpoint, match=word) as caught:
            read(header, file_bytes=wrong)
        assert caught.value.offset == min(wrong, right)


def test_a_damaged_header_says_what_can_be_done() -> None:
    header = small()[1].replace(b'"w":{', b'"W":{')
    with pytest.raises(CorruptCheckpoint, match="verify=False reads it as plain safetensors") as caught:
        decode(header, file_bytes=None, path="/x/y.safetensors")
    assert caught.value.region == "header"
    assert caught.value.path == "/x/y.safetensors"
    assert "/x/y.safetensors" in str(caught.value)


def test_without_verification_a_changed_header_reads_as_plain_safetensors() -> None:
    _, header = small()
    found = read(header.replace(b'"w":{', b'"W":{'), verify=False)
    assert found.foreign
    assert found.table.names == ["W", "__striate__.s.1", "__striate__.s.2"]
    assert found.table.named.all()
    assert found.digests == b""
    assert not read(header, verify=False).foreign, "a header that fits is ours, verified or not"


def test_a_file_that_another_tool_rewrote_is_not_believed() -> None:
    def reorder(members: dict[str, Any]) -> None:
        members["__metadata__"] = dict(sorted(members["__metadata__"].items()))

    header = small()[1]
    members = json.loads(header[8:])
    reorder(members)
    text = json.dumps(members).encode()  # with spaces after colons, as many tools write
    with pytest.raises(CorruptCheckpoint, match="rewritten by another tool"):
        read(foreign(text)[0])


# ---- versions -----------------------------------------------------------------------


def test_a_newer_version_is_told_from_damage() -> None:
    def newer(members: dict[str, Any]) -> None:
        members["__metadata__"] = {
            "striate.version": "2",
            "striate.checksum": "0" * 32,
            "striate.only-in-2": "x",
        }

    header = resealed(small()[1], newer)
    for verify in (True, False):
        with pytest.raises(UnsupportedFormat, match="not damaged"):
            read(header, verify=verify)
    with pytest.raises(CorruptCheckpoint):
        read(header.replace(b"only-in-2", b"only-in-3"))


def test_a_key_that_only_later_writers_know_is_ignored() -> None:
    header = resealed(small()[1], lambda members: members["__metadata__"].update({"striate.later": "x"}))
    found = read(header)
    assert not found.foreign
    assert found.ties == {"v": "w"}


# ---- hostile files of ours: the checksum fits, so only the rules stand ---------------


def metadata(**changes: str | None) -> Callable[[dict[str, Any]], None]:
    def change(members: dict[str, Any]) -> None:
        for key, value in changes.items():
            if value is None:
                del members["__metadata__"][f"striate.{key}"]
            else:
                members["__metadata__"][f"striate.{key}"] = value

    return change


def storages(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(members: dict[str, Any]) -> None:
        value = json.loads(members["__metadata__"]["striate.storages"])
        value.update(changes)
        members["__metadata__"]["striate.storages"] = json.dumps(value)

    return change


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(members: dict[str, Any]) -> None:
        items = [(new if name == old else name, value) for name, value in members.items()]
        members.clear()
        members.update(items)
        if members["__metadata__"]["v"] == old:
            members["__metadata__"]["v"] = new

    return change


def tied(members: dict[str, Any]) -> None:
    members["__metadata__"]["v"] = "__striate__.s.1"


def not_flat(members: dict[str, Any]) -> None:
    for key in ("graph", "graph_bytes"):
        del members["__metadata__"][f"striate.{key}"]


def typed_raw(members: dict[str, Any]) -> None:
    members["__striate__.s.1"].update(dtype="F16", shape=[3])


def graph_entry(members: dict[str, Any]) -> None:
    """Turns the last storage into a graph entry: allowed, once the graph is not in the metadata as well."""
    renamed("__striate__.s.2", "__striate__.graph")(members)
    storages(locations=[["cpu", 2]])(members)
    metadata(graph_entry="1", graph=None)(members)


def two_graphs(members: dict[str, Any]) -> None:
    graph_entry(members)
    metadata(graph="QUJD")(members)


HOSTILE_OURS: dict[str, Callable[[dict[str, Any]], None]] = {
    "no version": metadata(version=None),
    "version 0": metadata(version="0"),
    "version 01": metadata(version="01"),
    "version in Arabic-Indic digits": metadata(version="\u0661"),
    "no uuid": metadata(uuid=None),
    "short uuid": metadata(uuid="00"),
    "uuid in capitals": metadata(uuid="AA" * 16),
    "no sequence": metadata(sequence=None),
    "sequence without its zeros": metadata(sequence="7"),
    "sequence past 64 bits": metadata(sequence="9" * 20),
    "no chunk_bytes": metadata(chunk_bytes=None),
    "chunk_bytes 0": metadata(chunk_bytes="0"),
    "chunk_bytes 1": metadata(chunk_bytes="1"),
    "chunk_bytes 6000": metadata(chunk_bytes="6000"),
    "chunk_bytes 128 MiB": metadata(chunk_bytes=str(128 << 20)),
    "chunk_bytes -4096": metadata(chunk_bytes="-4096"),
    "chunk_bytes of 5000 digits": metadata(chunk_bytes="1" * 5000),
    "no chunks": metadata(chunks=None),
    "too few chunks": metadata(chunks=""),
    "too many chunks": metadata(chunks="A" * 128),
    "chunks not base64": metadata(chunks="*" * 24),
    "chunks with a line break": metadata(chunks="A" * 12 + "\n" + "A" * 10 + "=="),
    "no graph_bytes": metadata(graph_bytes=None),
    "graph_bytes 0": metadata(graph_bytes="0"),
    "graph_bytes 2 GiB": metadata(graph_bytes=str(2 << 30)),
    "graph not base64": metadata(graph="%%%%"),
    "graph twice": two_graphs,
    "graph_entry without its entry": metadata(graph_entry="1"),
    "graph entry that is not there": metadata(graph_entry="1", graph=None),
    "graph_entry 2": metadata(graph_entry="2", graph=None),
    "no graph and not flat": not_flat,
    "no storages": metadata(storages=None),
    "storages not JSON": metadata(storages="{"),
    "storages a list": metadata(storages="[]"),
    "storages nested deeply": metadata(storages="[" * 200_000),
    "storages with NaN": metadata(storages='{"locations":[["cpu",NaN]],"tensors":{}}'),
    "locations too few": storages(locations=[["cpu", 2]]),
    "locations too many": storages(locations=[["cpu", 4]]),
    "locations that cancel": storages(locations=[["cpu", 5], ["cpu", -2]]),
    "locations with a bool": storages(locations=[["cpu", 2], ["cpu", True]]),
    "locations with a float": storages(locations=[["cpu", 3.0]]),
    "locations an object": storages(locations={"cpu": 3}),
    "locations without counts": storages(locations=["cpu", "cpu", "cpu"]),
    "locations of a number": storages(locations=[[0, 3]]),
    "tensors a list": storages(tensors=[]),
    "tensors of a named one": storages(tensors={"0": ["F32", [2, 2]]}),
    "tensors past the table": storages(tensors={"3": ["U8", [5]]}),
    "tensors at -1": storages(tensors={"-1": ["U8", [5]]}),
    "tensors at 01": storages(tensors={"01": ["BF16", [3]]}),
    "tensors of another length": storages(tensors={"1": ["BF16", [4]]}),
    "tensors of an unknown dtype": storages(tensors={"1": ["X6", [1]]}),
    "tensors that overflow": storages(tensors={"1": ["BF16", [1 << 62, 1 << 62, 0]]}),
    "tensors of a negative shape": storages(tensors={"1": ["BF16", [-3]]}),
    "tensors without a shape": storages(tensors={"1": ["BF16"]}),
    "tensors of a list dtype": storages(tensors={"1": [["BF16"], [3]]}),
    "raw of another index": renamed("__striate__.s.1", "__striate__.s.0"),
    "raw of index 01": renamed("__striate__.s.1", "__striate__.s.01"),
    "replaced name of another index": renamed("w", "__striate__.t.1"),
    "another name of ours": renamed("w", "__striate__.x"),
    "graph entry unasked for": renamed("__striate__.s.2", "__striate__.graph"),
    "raw with a dtype": typed_raw,
    "tied to a raw storage": tied,
}


@pytest.mark.parametrize("change", HOSTILE_OURS.values(), ids=HOSTILE_OURS.keys())
def test_hostile_files_of_ours_are_refused(change: Callable[[dict[str, Any]], None]) -> None:
    header = resealed(small()[1], change)
    with pytest.raises(FormatError):
        read(header)


def test_the_changes_that_make_hostile_files_are_refused_for_what_they_change_alone() -> None:
    assert read(resealed(small()[1], graph_entry)).graph_entry
    assert read(resealed(small()[1], renamed("w", "__striate__.t.0"))).ties == {"v": "__striate__.t.0"}
    assert read(resealed(small()[1], storages(locations=[["cpu", 1], ["cpu", 2]]))).table.location(2) == "cpu"


def test_a_tie_to_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(FormatError, match="tied name"):
        read(resealed(small()[1], lambda members: members["__metadata__"].update(v="x")))


def test_a_header_that_does_not_end_on_a_page_is_refused() -> None:
    text = small()[1][8:].rstrip() + b" "
    made = bytearray(len(text).to_bytes(8, "little") + text)
    at = made.find(b'"striate.checksum":"') + 20
    made[at : at + 32] = b"0" * 32
    made[at : at + 32] = xxhash.xxh3_128_hexdigest(bytes(made)).encode()
    with pytest.raises(FormatError, match="multiple of 4096"):
        read(bytes(made))


# ---- foreign and hostile safetensors --------------------------------------------------


def one(dtype: Any = '"U8"', shape: Any = "[4]", offsets: Any = "[0,4]") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


HOSTILE: dict[str, str | bytes] = {
    "not an object": "[1]",
    "a string": '"x"',
    "spaces first": f' {{"a":{one()}}}',
    "not JSON": "{a}",
    "two objects": "{}{}",
    "not UTF-8": b'{"\xff":1}',
    "a lone surrogate in UTF-8": b'{"\xed\xa0\x80":1}',
    "deep arrays": '{"a":' + "[" * 300_000,
    "deep objects": '{"a":' * 300_000,
    "deep and closed": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    "metadata a list": '{"__metadata__":[]}',
    "metadata a number": '{"__metadata__":{"a":1}}',
    "metadata null": '{"__metadata__":null}',
    "metadata an entry": f'{{"__metadata__":{one()}}}',
    "metadata with an entry": f'{{"__metadata__":{{"x":{one()}}},"a":{one()}}}',
    "metadata twice": '{"__metadata__":{},"__metadata__":{}}',
    "an entry twice": f'{{"a":{one()},"a":{one()}}}',
    "a member twice": '{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "a member twice of three": '{"a":{"dtype":"U8","shape":[4],"shape":[4]}}',
    "an entry that is a number": '{"a":4}',
    "an entry that is null": '{"a":null}',
    "an entry that is empty": '{"a":{}}',
    "an entry without dtype": '{"a":{"shape":[4],"data_offsets":[0,4]}}',
    "an entry with more": f'{{"a":{one()[:-1]},"x":1}}}}',
    "an entry in an entry": f'{{"a":{one(dtype=one())}}}',
    "an entry in a shape": f'{{"a":{one(shape=f"[{one()}]")}}}',
    "an entry in another member": f'{{"a":{one()[:-1]},"x":{one()}}}}}',
    "dtype null": f'{{"a":{one(dtype="null")}}}',
    "dtype a list": f'{{"a":{one(dtype="[]")}}}',
    "dtype unknown": f'{{"a":{one(dtype=chr(34) + "U9" + chr(34))}}}',
    "dtype in small letters": f'{{"a":{one(dtype=chr(34) + "u8" + chr(34))}}}',
    "shape a number": f'{{"a":{one(shape="4")}}}',
    "shape a string": f'{{"a":{one(shape=chr(34) + "4" + chr(34))}}}',
    "shape of floats": f'{{"a":{one(shape="[4.0]")}}}',
    "shape of bools": f'{{"a":{one(shape="[4,true]")}}}',
    "shape of null": f'{{"a":{one(shape="[null]")}}}',
    "shape negative": f'{{"a":{one(shape="[-2,-2]")}}}',
    "shape huge": f'{{"a":{one(shape="[18446744073709551620]")}}}',
    "shape that wraps to the length": f'{{"a":{one(shape="[4294967296,4294967296,4]", offsets="[0,0]")}}}',
    "shape that wraps past 64 bits": f'{{"a":{one(shape="[4611686018427387905,4]")}}}',
    "shape huge and empty": f'{{"a":{one(shape="[4611686018427387904,4611686018427387904,0]", offsets="[0,0]")}}}',
    "shape empty and huge": f'{{"a":{one(shape="[0,4611686018427387904,4]", offsets="[0,0]")}}}',
    "shape of 100000 large numbers": f'{{"a":{one(shape="[" + "9223372036854775807," * 100_000 + "1]")}}}',
    "shape of another length": f'{{"a":{one(shape="[5]")}}}',
    "offsets of floats": f'{{"a":{one(offsets="[0,4.0]")}}}',
    "offsets of exponents": f'{{"a":{one(offsets="[0,4e0]")}}}',
    "offsets of bools": f'{{"a":{one(shape="[1]", offsets="[false,true]")}}}',
    "offsets of strings": f'{{"a":{one(offsets="[" + chr(34) + "0" + chr(34) + ",4]")}}}',
    "offsets NaN": f'{{"a":{one(offsets="[NaN,4]")}}}',
    "offsets Infinity": f'{{"a":{one(offsets="[0,Infinity]")}}}',
    "offsets negative": f'{{"a":{one(offsets="[-4,0]")}}}',
    "offsets past 63 bits": f'{{"a":{one(offsets="[9223372036854775808,9223372036854775812]")}}}',
    "offsets past 64 bits": f'{{"a":{one(offsets="[18446744073709551616,18446744073709551620]")}}}',
    "offsets of 5000 digits": f'{{"a":{one(offsets="[0," + "4" * 5000 + "]")}}}',
    "offsets backwards": f'{{"a":{one(offsets="[4,0]")}}}',
    "offsets one": f'{{"a":{one(offsets="[4]")}}}',
    "offsets three": f'{{"a":{one(offsets="[0,4,4]")}}}',
    "offsets an object": f'{{"a":{one(offsets="{}")}}}',
    "a gap first": f'{{"a":{one(offsets="[4,8]")}}}',
    "a gap": f'{{"a":{one()},"b":{one(offsets="[5,9]")}}}',
    "an overlap": f'{{"a":{one()},"b":{one(offsets="[3,7]")}}}',
    "the same bytes twice": f'{{"a":{one()},"b":{one()}}}',
    "an empty entry in another": f'{{"a":{one()},"b":{one(shape="[0]", offsets="[2,2]")}}}',
    "an empty entry far away": f'{{"a":{one()},"b":{one(shape="[0]", offsets="[9,9]")}}}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_safetensors_are_refused(text: str | bytes) -> None:
    content, _ = foreign(text)
    with pytest.raises(FormatError):
        read(content)
    with pytest.raises(FormatError):
        read(content, verify=False)


@pytest.mark.parametrize("text", ['{"a":1' + "0" * 5000 + "}", '{"a":[1' + "0" * 200_000 + "]}"])
def test_a_number_without_end_is_refused_whatever_the_limit_of_python(text: str) -> None:
    old = sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else None
    try:
        for limit in (0, 4300) if old is not None else ():
            sys.set_int_max_str_digits(limit)
            with pytest.raises(FormatError, match="too long"):
                read(foreign(text)[0])
    finally:
        if old is not None:
            sys.set_int_max_str_digits(old)


def test_a_foreign_file_is_read_as_it_stands() -> None:
    text = (
        '{"b":{"dtype":"F32","shape":[],"data_offsets":[6,10]},'
        '"__metadata__":{"format":"pt","tied":"b","note":"hello","b":"b"},'
        '"e":{"shape":[0,3],"data_offsets":[6,6],"dtype":"I64"},'
        '"__striate__.s.9":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}} \n'
    )
    content, _ = foreign(text)
    found = read(content, file_bytes=len(content) + 10)
    assert found.foreign
    assert (found.version, found.uuid, found.sequence, found.digests) == (0, b"", 0, b"")
    assert found.table.names == ["b", "e", "__striate__.s.9"]
    assert found.table.plains() == [Plain("F32", ()), Plain("I64", (0, 3)), Plain("BF16", (3,))]
    assert found.table.locations_list() == ["cpu"] * 3
    assert found.ties == {"tied": "b"}
    assert found.metadata["note"] == "hello"
    assert found.data_offset == len(content)
    assert read(foreign("{}")[0], file_bytes=10).table.names == []


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_foreign_file_of_another_length_is_refused(extra: int) -> None:
    content, length = foreign(f'{{"a":{one()}}}', 4)
    with pytest.raises(FormatError, match=f"should have {length:,} bytes and has {length + extra:,}"):
        read(content, file_bytes=length + extra)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "F128"])
def test_a_dtype_without_a_counterpart_is_named(dtype: str) -> None:
    with pytest.raises(FormatError, match=rf"entry 'the\.one', '{dtype}'"):
        read(foreign(f'{{"the.one":{one(dtype=chr(34) + dtype + chr(34))}}}')[0])


def test_what_is_no_safetensors_file_at_all_is_told_apart() -> None:
    for content, words in [
        (b"", "is empty"),
        (b"\x10\x00", "has 2 bytes"),
        (bytes(4096), "a save into it did not finish"),
        (b"PK\x03\x04" + bytes(100), r"torch\.save"),
        (b"\x01" + bytes(20), "first 8 bytes"),
        (b"\xff" * 30, "first 8 bytes"),
        ((100_000_001).to_bytes(8, "little"), "first 8 bytes"),
        ((4088).to_bytes(8, "little") + b"{}", "cut short"),
    ]:
        with pytest.raises(FormatError, match=words):
            header_length(content[:8], file_bytes=len(content))
        with pytest.raises(FormatError, match="thing"):
            header_length(content[:8], file_bytes=len(content), path="thing")
    with pytest.raises(FormatError, match="load it by its path"):
        header_length(b"STRIATE\0", file_bytes=None)
    assert header_length((100_000_000).to_bytes(8, "little"), file_bytes=None) == 100_000_008


@given(st.binary(max_size=200))
def test_no_bytes_at_all_make_anything_but_an_error_of_ours(content: bytes) -> None:
    for made in (content, foreign(content)[0], foreign(b'{"a":' + content + b"}")[0]):
        try:
            found = read(made, file_bytes=len(made))
        except StriateError:
            continue
        assert found.foreign
        assert found.table.data_bytes == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__", "__striate__.graph"]),
        st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["U8", "F32"]) | json_values,
                "shape": st.lists(st.integers(-1, 9), max_size=3) | json_values,
                "data_offsets": st.lists(st.integers(-1, 9), min_size=2, max_size=2) | json_values,
                "striate.version": json_values,
            },
        )
        | json_values,
        max_size=3,
    )
)
def test_json_of_any_kind_is_an_error_of_ours_or_a_table_that_holds_together(members: dict[str, Any]) -> None:
    content, _ = foreign(json.dumps(members))
    try:
        found = read(content)
    except StriateError:
        return
    table = found.table
    assert int(table.lengths.sum()) == table.data_bytes
    for n in range(len(table)):
        plain = table.plain(n)
        assert plain is not None
        assert manifest.plain_bytes(plain.dtype, plain.shape) == table.lengths[n]
        assert type(table.names[n]) is str


def test_the_garbage_collector_is_left_as_it_was() -> None:
    import gc

    header = small()[1]
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            read(header)
            with pytest.raises(StriateError):
                read(header.replace(b'"w"', b'"x"'))
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def test_the_seed_of_a_chunk_is_bound_to_place_and_generation() -> None:
    assert manifest.chunk_seed(UUID, 3) == xxhash.xxh3_64_intdigest(UUID + b"\x03" + bytes(7))
    seeds = {manifest.chunk_seed(uuid, chunk) for uuid in (UUID, bytes(16)) for chunk in range(100)}
    assert len(seeds) == 200
