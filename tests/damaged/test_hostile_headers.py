"""Headers that somebody made to do harm: refused fast, in little memory, with the rule that they break."""

from __future__ import annotations

import base64
import io
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaged.museum import (
    Specimen,
    forged,
    plain_file,
    readers,
    refusal,
    rescue_refuses,
    resident_bytes,
    sealed,
    with_graph,
)

import striate

MAX = (1 << 63) - 1


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def one(**wrong: Any) -> bytes:
    return plain_file({"t": entry(**wrong)}, b"abcd")


FOREIGN: dict[str, bytes] = {
    "length 0": bytes(8) + b"{}",
    "length 1": (1).to_bytes(8, "little") + b"{}",
    "length of all bits": b"\xff" * 8 + b"{}",
    "length of 2^63": (1 << 63).to_bytes(8, "little") + b"{}",
    "length past the limit": (100_000_001).to_bytes(8, "little") + b"{}",
    "length past the end": (99_999_999).to_bytes(8, "little") + b"{}",
    "not utf-8": plain_file(b'{"\xff":1}'),
    "not json": plain_file(b"{nonsense}"),
    "json that does not begin with a brace": plain_file(b" {}"),
    "a list": plain_file([1, 2]),
    "a number": plain_file(b"7 "),
    "two objects": plain_file(b"{}{}"),
    "cut json": plain_file(b'{"t":{"dtype":"U8","shape":[4],"data_offs'),
    "trailing garbage": plain_file(b"{}garbage"),
    "deep lists": plain_file(b'{"t":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "deep objects": plain_file(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "deep and never closed": plain_file(b"{" + b'"a":[' * 500_000),
    "nan": plain_file(b'{"t":NaN}'),
    "infinity in offsets": plain_file(
        b'{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,Infinity]}}', b"abcd"
    ),
    "a number of a million digits": plain_file(
        b'{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,' + b"9" * 1_000_000 + b"]}}", b"abcd"
    ),
    "a name twice": plain_file(
        b'{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"t":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}}',
        b"abcd",
    ),
    "a member twice": plain_file(
        b'{"t":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"abcd"
    ),
    "metadata is a list": plain_file({"__metadata__": []}),
    "metadata of numbers": plain_file({"__metadata__": {"a": 1}}),
    "metadata of objects": plain_file({"__metadata__": {"a": {}}}),
    "entry is a number": plain_file({"t": 5}),
    "entry is null": plain_file({"t": None}),
    "entry is a list": plain_file({"t": ["U8", [4], [0, 4]]}, b"abcd"),
    "entry is empty": plain_file({"t": {}}),
    "entry lacks a member": plain_file({"t": {"dtype": "U8", "shape": [4]}}, b"abcd"),
    "entry has one too many": one(more=1),
    "dtype unknown": one(dtype="F99"),
    "dtype is a number": one(dtype=5),
    "dtype is null": one(dtype=None),
    "dtype is a list": one(dtype=["U8"]),
    "dtype in lower case": one(dtype="u8"),
    "dtype that packs": plain_file({"t": entry("F4", (8,))}, b"abcd"),
    "shape is a number": one(shape=4),
    "shape is null": one(shape=None),
    "shape of text": one(shape=["4"]),
    "shape of floats": one(shape=[4.0]),
    "shape of booleans": plain_file({"t": entry(shape=[True], offsets=(0, 1))}, b"a"),
    "shape negative": one(shape=[-4]),
    "shape twice negative": one(shape=[-2, -2]),
    "shape too large": one(shape=[1 << 64]),
    "shape that overflows to the length": one(shape=[1 << 32, 1 << 32, 4]),
    "shape that overflows around zero": one(shape=[MAX, MAX, 0, 4], offsets=(0, 0)),
    "shape of a million dimensions": one(shape=[2] * 1_000_000),
    "shape of other length": one(shape=[5]),
    "shape nested": one(shape=[[4]]),
    "offsets is a number": one(offsets=4),
    "offsets of one": one(offsets=[4]),
    "offsets of three": one(offsets=[0, 2, 4]),
    "offsets of text": one(offsets=["0", "4"]),
    "offsets of floats": one(offsets=[0.0, 4.0]),
    "offsets of booleans": plain_file({"t": entry(shape=[1], offsets=[False, True])}, b"a"),
    "offsets negative": one(offsets=[-4, 0]),
    "offsets backwards": one(offsets=[4, 0]),
    "offsets past the end": one(offsets=[4, 8]),
    "offsets at the end of everything": one(offsets=[MAX - 4, MAX]),
    "offsets beyond 63 bits": one(offsets=[1 << 64, (1 << 64) + 4]),
    "a hole at the start": plain_file({"t": entry(offsets=[1, 5])}, b"abcde"),
    "a hole between": plain_file({"t": entry(), "u": entry(offsets=[5, 9])}, b"abcdefghi"),
    "an overlap": plain_file({"t": entry(), "u": entry(offsets=[3, 7])}, b"abcdefg"),
    "the same place twice": plain_file({"t": entry(), "u": entry()}, b"abcd"),
    "one within another": plain_file(
        {"t": entry(shape=(8,), offsets=(0, 8)), "u": entry(offsets=[2, 6])}, b"abcdefgh"
    ),
    "an empty one within another": plain_file(
        {"t": entry(), "u": entry(shape=(0,), offsets=[2, 2])}, b"abcd"
    ),
    "data missing": plain_file({"t": entry()}, b"abc"),
    "data too long": plain_file({"t": entry()}, b"abcde"),
    "all data missing": plain_file({"t": entry("F32", (1 << 40,), (0, 1 << 42))}),
    "eight exabytes": plain_file({"t": entry("U8", (MAX,), (0, MAX))}, b"abcd"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_hostile_header_of_a_foreign_file_is_refused(broken: Path, kind: str) -> None:
    broken.write_bytes(FOREIGN[kind])
    before, begun = resident_bytes(), time.process_time()
    calls = readers(broken, {}) | {
        "load without verification": lambda: striate.load(broken, verify=False),
        "info": lambda: striate.info(broken),
        "load_tensors": lambda: striate.load_tensors(broken, ["t"]),
    }
    del calls["load from a stream"]
    for name, call in calls.items():
        error = refusal(call)
        assert isinstance(error, striate.FormatError), name
        assert str(broken) in str(error), name
        assert len(str(error)) < 1500, "a hostile name or number fills no screen"
    rescue_refuses(broken)
    # A stream has no length to compare with: what declares more data than there is ends early.
    if kind not in ("data too long", "eight exabytes", "all data missing"):
        with pytest.raises(striate.FormatError):
            striate.load(io.BytesIO(FOREIGN[kind]))
    assert time.process_time() - begun < 20
    assert resident_bytes() - before < 200 << 20


@pytest.mark.parametrize("kind", ["eight exabytes", "all data missing"])
def test_stream_that_promises_more_than_memory_is_an_error(kind: str) -> None:
    with pytest.raises((striate.StriateError, RuntimeError, MemoryError)):
        striate.load(io.BytesIO(FOREIGN[kind]))


# ---- of ours, with a checksum that fits --------------------------------------


def metadata(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        if value is None:
            del header["__metadata__"][key]
        else:
            header["__metadata__"][key] = value

    return change


def storages(**wrong: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        found = json.loads(header["__metadata__"]["striate.storages"])
        header["__metadata__"]["striate.storages"] = json.dumps(found | wrong)

    return change


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        moved = {new if key == old else key: value for key, value in header.items()}
        header.clear()
        header.update(moved)

    return change


OURS: dict[str, Callable[[dict[str, Any]], None]] = {
    **{
        f"no {key}": metadata(f"striate.{key}", None)
        for key in ("version", "uuid", "sequence", "chunk_bytes")
    },
    **{
        f"no {key}": metadata(f"striate.{key}", None)
        for key in ("storages", "chunks", "graph", "graph_bytes")
    },
    "version 0": metadata("striate.version", "0"),
    "version of text": metadata("striate.version", "one"),
    "version negative": metadata("striate.version", "-1"),
    "version with a zero before": metadata("striate.version", "01"),
    "uuid short": metadata("striate.uuid", "00"),
    "uuid in capitals": metadata("striate.uuid", "AB" * 16),
    "uuid of text": metadata("striate.uuid", "x" * 32),
    "sequence short": metadata("striate.sequence", "1"),
    "sequence beyond 64 bits": metadata("striate.sequence", "9" * 20),
    "sequence in other digits": metadata("striate.sequence", "\u0663" * 20),
    "chunk 0": metadata("striate.chunk_bytes", "0"),
    "chunk small": metadata("striate.chunk_bytes", "512"),
    "chunk odd": metadata("striate.chunk_bytes", "4097"),
    "chunk large": metadata("striate.chunk_bytes", str(1 << 40)),
    "chunks of another count": metadata("striate.chunks", base64.b64encode(bytes(16)).decode()),
    "chunks of half a digest": metadata("striate.chunks", base64.b64encode(bytes(15)).decode()),
    "chunks no base64": metadata("striate.chunks", "!" * 44),
    "storages no json": metadata("striate.storages", "{"),
    "storages a list": metadata("striate.storages", "[]"),
    "storages deep": metadata("striate.storages", "[" * 100_000),
    "storages without members": metadata("striate.storages", "{}"),
    "locations too few": storages(locations=[["cpu", 1]]),
    "locations too many": storages(locations=[["cpu", 1 << 40]]),
    "locations negative": storages(locations=[["cpu", -1], ["cpu", 9]]),
    "locations of nothing": storages(locations=[["cpu", 0], ["cpu", 8]]),
    "locations of numbers": storages(locations=[[5, 8]]),
    "locations a number": storages(locations=8),
    "tensors a list": storages(tensors=[]),
    "tensors beyond the table": storages(tensors={"99": ["F32", [1]]}),
    "tensors of a named one": storages(tensors={"1": ["I16", [900]]}),
    "tensors with a key that is no number": storages(tensors={"x": ["F32", [1]]}),
    "tie to nothing": metadata("other", "nowhere"),
    "tie to a raw storage": metadata("other", "__striate__.s.4"),
    "graph no base64": metadata("striate.graph", "####"),
    "graph in two places": metadata("striate.graph_entry", "1"),
    "graph bytes 0": metadata("striate.graph_bytes", "0"),
    "graph bytes beyond the limit": metadata("striate.graph_bytes", str((1 << 30) + 1)),
    "raw storage with another number": renamed("__striate__.s.5", "__striate__.s.99"),
    "reserved name": renamed("model.d", "__striate__.x"),
    "temporary name with another number": renamed("model.d", "__striate__.t.77"),
    "graph entry that is not declared": renamed("model.d", "__striate__.graph"),
}


@pytest.mark.parametrize("kind", OURS)
def test_hostile_header_of_ours_is_refused_although_its_checksum_fits(
    broken: Path, nested: Specimen, kind: str
) -> None:
    raw = forged(nested, OURS[kind])
    assert raw != nested.raw, "the forgery changed something"
    broken.write_bytes(raw)
    for name, call in readers(broken, nested.state).items():
        error = refusal(call)
        assert isinstance(error, (striate.FormatError, striate.CorruptCheckpoint)), name
        assert not isinstance(error, striate.UnsupportedFormat), name
    rescue_refuses(broken)


def test_forging_nothing_gives_a_checkpoint_that_loads(broken: Path, nested: Specimen) -> None:
    """Otherwise the tests above would only see a checksum that does not fit."""
    broken.write_bytes(forged(nested, lambda header: None))
    assert striate.load(broken)["step"] == 7 and striate.verify(broken)


def test_newer_version_is_unsupported_whatever_else_it_has(broken: Path, nested: Specimen) -> None:
    def newer(header: dict[str, Any]) -> None:
        header["__metadata__"] = {"striate.version": "2", "striate.checksum": "", "striate.secret": "sauce"}

    for raw in (forged(nested, metadata("striate.version", "2")), forged(nested, newer)):
        broken.write_bytes(raw)
        for name, call in (readers(broken, nested.state) | {"info": lambda: striate.info(broken)}).items():
            error = refusal(call)
            assert isinstance(error, striate.UnsupportedFormat), name
            assert (
                "version 2" in str(error) and "Update striate" in str(error) and "not damaged" in str(error)
            )
        assert "version 2" in str(rescue_refuses(broken))


def test_unknown_key_of_ours_is_ignored(broken: Path, nested: Specimen) -> None:
    broken.write_bytes(forged(nested, metadata("striate.later", "something")))
    assert striate.load(broken)["step"] == 7


def whole_path(path: Path, whole: Specimen) -> Path:
    path.write_bytes(whole.raw)
    return path


def test_location_that_nobody_knows_is_torchs_own_error_before_any_data_is_read(
    broken: Path, nested: Specimen
) -> None:
    count = len(striate.info(whole_path(broken, nested)).tensors)
    for location in ("nowhere", "cuda:99", "", "../../etc"):
        broken.write_bytes(forged(nested, storages(locations=[[location, count]])))
        with pytest.raises(RuntimeError):
            striate.load(broken)
        assert striate.load(broken, "cpu")["step"] == 7


def test_one_damaged_key_does_not_make_it_a_foreign_file(broken: Path, nested: Specimen) -> None:
    """Renaming any key of ours leaves a header whose checksum cannot fit, and that says so."""
    for key in ("striate.version", "striate.checksum", "striate.chunks", "striate.storages"):
        broken.write_bytes(nested.raw.replace(key.encode(), key.upper().encode(), 1))
        assert isinstance(refusal(lambda: striate.load(broken)), striate.CorruptCheckpoint)


# ---- the graph's packing -----------------------------------------------------


def test_zlib_bomb_is_not_unpacked(broken: Path, nested: Specimen) -> None:
    bomb = zlib.compress(bytes(256 << 20), 1)
    for declared in (1, 100, 1 << 20):
        broken.write_bytes(with_graph(nested, b"", graph_bytes=declared, stored=bomb))
        before = resident_bytes()
        error = refusal(lambda: striate.load(broken))
        assert isinstance(error, striate.CorruptCheckpoint) and error.region == "graph"
        assert str(declared) in str(error) or f"{declared:,}" in str(error)
        assert resident_bytes() - before < 100 << 20


@pytest.mark.parametrize(
    ("stored", "graph_bytes"),
    [
        (b"", 10),
        (b"not zlib", 10),
        (zlib.compress(b"N.")[:-1], 2),
        (zlib.compress(b"N.") + b"more", 2),
        (zlib.compress(b"N."), 3),
        (zlib.compress(b"N."), 1),
    ],
)
def test_graph_that_cannot_be_unpacked_is_damage_of_the_graph(
    broken: Path, nested: Specimen, stored: bytes, graph_bytes: int
) -> None:
    broken.write_bytes(with_graph(nested, b"", graph_bytes=graph_bytes, stored=stored))
    error = refusal(lambda: striate.load(broken))
    assert (
        isinstance(error, striate.CorruptCheckpoint) and error.region == "graph" and error.path == str(broken)
    )
    assert str(broken) in str(error) and "load_tensors" in str(error)
    # The tensors are whole, and can be had.
    assert striate.load_tensors(broken, ["model.d"])["model.d"].tolist() == [1, 1, 1]


def test_sealed_header_without_data_chunks_is_consistent(broken: Path) -> None:
    """The smallest forgery of all loads or is refused, and nothing in between."""
    header = {
        "__metadata__": {
            "format": "pt",
            "striate.version": "1",
            "striate.uuid": "00" * 16,
            "striate.sequence": "0" * 20,
            "striate.chunk_bytes": "4096",
            "striate.storages": '{"locations":[],"tensors":{}}',
            "striate.checksum": "",
            "striate.chunks": "",
        }
    }
    broken.write_bytes(sealed(header, b""))
    assert striate.load(broken) == {} and striate.verify(broken)
