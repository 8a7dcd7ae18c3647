"""Superblocks, labels and tombstones: what is encoded comes back, and every other block is refused in the right way."""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from striate import superblock
from striate.errors import CorruptCheckpoint, FormatError, UnsupportedFormat
from striate.groups import Shape
from striate.superblock import (
    Label,
    Superblock,
    Tombstone,
    check_name,
    decode_label,
    decode_tombstone,
    encode_label,
    encode_tombstone,
    is_member,
    tombstone_name,
)

SOME = Superblock(
    uuid=bytes(range(16)),
    sequence=(1 << 64) - 1,
    volume=bytes(range(16, 32)),
    drive=bytes(range(32, 48)),
    member=254,
    members=255,
    shape=Shape(5, 2),
    chunk_bytes=4 << 20,
    manifest_offset=(1 << 40),
    manifest_bytes=1 << 32,
    manifest_digest=bytes(range(48, 64)),
    whole=frozenset({0, 7, 8, 253}),
    name="runs/ch\u00e9ckpoint 7".encode(),
)
LABEL = Label(b"v" * 16, b"b" * 16, (1 << 64) - 1, tuple(bytes([n]) * 16 for n in (97, 98, 99)))
TOMBSTONE = Tombstone(b"step/100", b"u" * 16, 77)

KINDS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "superblock": (superblock.encode(SOME), lambda block: superblock.decode(block, path="/d/name")),
    "label": (encode_label(LABEL), lambda block: decode_label(block, path="/d/name")),
    "tombstone": (encode_tombstone(TOMBSTONE), lambda block: decode_tombstone(block, path="/d/name")),
}


def resealed(block: bytes, at: int = 0, patch: bytes = b"") -> bytes:
    """The block with a patch and a digest that fits: what a hostile writer makes."""
    changed = block[:at] + patch + block[at + len(patch) : 4080]
    return changed + xxhash.xxh3_128_digest(changed)


uuids = st.binary(min_size=16, max_size=16)
parts = st.binary(min_size=1, max_size=255).filter(
    lambda part: (
        b"/" not in part
        and b"\0" not in part
        and part not in (b".", b"..")
        and not part.startswith(b".striate")
    )
)
names = st.lists(parts, min_size=1, max_size=5).map(b"/".join).filter(lambda name: len(name) <= 1024)


@st.composite
def superblocks(draw: st.DrawFn) -> Superblock:
    members = draw(st.integers(1, 255))
    width = draw(st.integers(1, members))
    data = draw(st.integers(1, width))
    return Superblock(
        uuid=draw(uuids),
        sequence=draw(st.integers(0, (1 << 64) - 1)),
        volume=draw(uuids),
        drive=draw(uuids),
        member=draw(st.integers(0, members - 1)),
        members=members,
        shape=Shape(data, width - data),
        chunk_bytes=1 << draw(st.integers(12, 26)),
        manifest_offset=4096 * draw(st.integers(1, 1 << 45)),
        manifest_bytes=draw(st.integers(1, 1 << 32)),
        manifest_digest=draw(uuids),
        whole=frozenset(draw(st.sets(st.integers(0, members - 1), max_size=members))),
        name=draw(names),
    )


@given(superblocks())
def test_a_superblock_comes_back_as_it_was(some: Superblock) -> None:
    block = superblock.encode(some)
    assert len(block) == 4096 and is_member(block)
    assert superblock.decode(block, path="p") == some
    assert check_name(some.name) == some.name


@given(uuids, st.integers(0, (1 << 64) - 1), st.lists(uuids, min_size=1, max_size=240, unique=True))
def test_a_label_comes_back_as_it_was(volume: bytes, revision: int, drives: list[bytes]) -> None:
    label = Label(volume, drives[-1], revision, tuple(drives))
    block = encode_label(label)
    assert len(block) == 4096 and not is_member(block)
    assert decode_label(block, path="p") == label


@given(names, uuids, st.integers(0, (1 << 64) - 1))
def test_a_tombstone_comes_back_as_it_was(name: bytes, uuid: bytes, sequence: int) -> None:
    tombstone = Tombstone(name, uuid, sequence)
    block = encode_tombstone(tombstone)
    assert len(block) == 4096 and not is_member(block)
    assert decode_tombstone(block, path="p") == tombstone


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_noticed(kind: str) -> None:
    block, decode = KINDS[kind]
    for at in [*range(1300), *range(1300, 4080, 97), *range(4080, 4096)]:
        for bit in (0, 7):
            changed = bytearray(block)
            changed[at] ^= 1 << bit
            with pytest.raises((CorruptCheckpoint, FormatError)) as caught:
                decode(bytes(changed))
            assert "/d/name" in str(caught.value)
            assert not isinstance(caught.value, UnsupportedFormat), "damaged is not newer"
            if isinstance(caught.value, CorruptCheckpoint):
                assert (caught.value.region, caught.value.path) == (kind, "/d/name")
            else:
                assert kind == "superblock" and at < 8, "only without its magic it is no member at all"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, 4080, 4095, 4097, 8192])
def test_a_block_of_another_length_is_refused(kind: str, length: int) -> None:
    block, decode = KINDS[kind]
    with pytest.raises((CorruptCheckpoint, FormatError)):
        decode(block.ljust(length, b"\0")[:length])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [2, 7, 1 << 31, (1 << 32) - 1])
def test_a_newer_version_is_newer_whatever_else_it_has(kind: str, version: int) -> None:
    block, decode = KINDS[kind]
    changed = resealed(block[:12] + b"\xff" * (4080 - 12), 8, struct.pack("<I", version))
    with pytest.raises(UnsupportedFormat, match=r"/d/name.*(?:\n|.)*Update striate"):
        decode(changed)


def test_an_unknown_flag_is_newer() -> None:
    for bit in range(32):
        with pytest.raises(UnsupportedFormat, match="flags"):
            superblock.decode(resealed(KINDS["superblock"][0], 12, struct.pack("<I", 1 << bit)), path="p")


@pytest.mark.parametrize("kind", KINDS)
def test_version_0_is_damage(kind: str) -> None:
    block, decode = KINDS[kind]
    with pytest.raises(CorruptCheckpoint, match="no version 0"):
        decode(resealed(block, 8, bytes(4)))


def test_each_kind_is_refused_as_another() -> None:
    for kind, (_, decode) in KINDS.items():
        for other, (block, _) in KINDS.items():
            if kind != other:
                with pytest.raises((FormatError, CorruptCheckpoint)):
                    decode(block)


def number(form: str, value: int) -> bytes:
    return struct.pack("<" + form, value)


def in_field(at: int, form: str, *values: int) -> list[tuple[int, bytes]]:
    return [(at, number(form, value)) for value in values]


RULES: dict[str, list[tuple[int, bytes]]] = {
    "member 255 of 255": in_field(72, "I", 255),
    "member": in_field(72, "I", 256, 1 << 31, (1 << 32) - 1) + in_field(76, "I", 0, 1, 254, 256, (1 << 32) - 1),
    "groups of": in_field(80, "I", 0, 254, 1 << 31, (1 << 32) - 1) + in_field(84, "I", 251, 1 << 31, (1 << 32) - 1),
    "chunks of": in_field(88, "Q", 0, 1, 2048, 4095, 4097, 12288, 1 << 27, 1 << 63, (1 << 64) - 1),
    "manifest at offset": in_field(96, "Q", 0, 1, 4095, 4097, (1 << 64) - 4096, (1 << 64) - 1, 1 << 62),
    "manifest of": in_field(104, "Q", 0, (1 << 32) + 1, 1 << 63, (1 << 64) - 1),
    "list of members": [(159, b"\x80")],
    "name is longer": in_field(160, "H", 1025, 65535) + in_field(160, "H", 5),
    "empty": [(160, bytes(2 + 1024))],
    "absolute": [(162, b"/")],
    "NUL": in_field(160, "H", len(SOME.name) + 1),
    "part of it": [
        (160, number("H", len(name)) + name.ljust(1024, b"\0"))
        for name in (b".", b"..", b"a/..", b"../a", b"a//b", b"a/", b"a/./b", b"x" * 256, b"a/.striate-label")
    ],
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_superblock_that_breaks_a_rule_is_damaged_though_its_digest_fits(rule: str) -> None:
    block, decode = KINDS["superblock"]
    for at, patch in RULES[rule]:
        with pytest.raises(CorruptCheckpoint, match=rule) as caught:
            decode(resealed(block, at, patch))
        assert caught.value.region == "superblock", (rule, at, patch)


def test_what_is_reserved_is_ignored() -> None:
    block, decode = KINDS["superblock"]
    assert decode(resealed(block, 1186, b"\xa5" * (4080 - 1186))) == SOME


@pytest.mark.parametrize(
    ("at", "patch", "rule"),
    [
        (0, b"STRIATE\0", "does not begin"),
        (12, number("I", 0), "0 drives"),
        (12, number("I", 241), "241 drives"),
        (12, number("I", (1 << 32) - 1), "drives"),
        (56, b"b" * 16, "twice"),
    ],
)
def test_a_label_that_breaks_a_rule_is_damaged(at: int, patch: bytes, rule: str) -> None:
    block, decode = KINDS["label"]
    with pytest.raises(CorruptCheckpoint, match=rule):
        decode(resealed(block, at, patch))


@pytest.mark.parametrize(
    ("at", "patch", "rule"),
    [
        (0, b"STRLABL\0", "does not begin"),
        (12, number("H", 0), "empty"),
        (12, number("H", 1025), "longer"),
        (12, number("H", 9), "NUL"),
        (14, b"/etc/abc", "absolute"),
        (14, b"a/../bcd", "'..'"),
    ],
)
def test_a_tombstone_that_breaks_a_rule_is_damaged(at: int, patch: bytes, rule: str) -> None:
    block, decode = KINDS["tombstone"]
    with pytest.raises(CorruptCheckpoint, match=rule):
        decode(resealed(block, at, patch))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_bytes_under_a_right_digest_are_facts_or_the_right_error(kind: str, data: st.DataObject) -> None:
    block, decode = KINDS[kind]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(8, 200) | st.integers(8, 4000))
        block = resealed(block, at, data.draw(st.binary(min_size=1, max_size=8)))
    try:
        found = decode(block)
    except (CorruptCheckpoint, UnsupportedFormat):
        return
    # Facts that were believed are facts that can be written again, and are within the document's bounds.
    encode: Callable[[Any], bytes] = {
        "superblock": superblock.encode, "label": encode_label, "tombstone": encode_tombstone
    }[kind]  # fmt: skip
    assert decode(encode(found)) == found
    if isinstance(found, Superblock):
        assert found.member < found.members <= 255 and found.shape.width <= found.members
        assert not os.path.isabs(found.name) and b".." not in found.name.split(b"/")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("/a", "absolute"),
        ("a//b", "''"),
        ("a/", "''"),
        (".", "'.'"),
        ("a/./b", "'.'"),
        ("..", r"'\.\.'"),
        ("a/../b", r"'\.\.'"),
        ("a\0b", "NUL"),
        ("x" * 256, "256 bytes"),
        ("\u00e9" * 128, "256 bytes"),
        ("/".join(["x" * 200] * 6), "1205 bytes"),
        (".striate-label", ".striate"),
        ("a/.striate/b", ".striate"),
        (".striate.lock", ".striate"),
    ],
)
def test_a_name_that_breaks_a_rule_is_refused_by_that_rule(name: str, why: str) -> None:
    for form in (name, os.fsencode(name)):
        with pytest.raises(ValueError, match=why):
            check_name(form)


def test_names_of_all_kinds_are_taken_as_bytes() -> None:
    assert check_name("runs/step-100") == check_name(b"runs/step-100") == b"runs/step-100"
    assert check_name(PurePosixPath("runs") / "step-100") == b"runs/step-100"
    assert check_name("...") == b"..." and check_name("a.striate") == b"a.striate"
    assert check_name("x" * 255) == b"x" * 255
    assert check_name(b"\xff\xfe") == b"\xff\xfe", "a file name need not be UTF-8"
    longest = "/".join(["x" * 255, "x" * 255, "x" * 255, "x" * 254, "y"])
    assert len(check_name(longest)) == 1024
    with pytest.raises(ValueError, match="1025 bytes"):
        check_name(longest + "y")


def test_the_name_of_a_tombstone_is_the_digest_of_the_name() -> None:
    assert tombstone_name(b"a/b") == b".striate-gone-" + xxhash.xxh3_128_hexdigest(b"a/b").encode()
    with pytest.raises(ValueError, match="striate"):
        check_name(tombstone_name(b"a/b"))


def test_a_changed_fact_is_another_block() -> None:
    blocks = {superblock.encode(SOME)}
    for change in (
        {"member": 3}, {"sequence": 5}, {"whole": frozenset({1})}, {"name": b"n"}, {"drive": b"d" * 16},
        {"manifest_digest": b"m" * 16}, {"shape": Shape(2, 5)}, {"volume": b"v" * 16},
    ):  # fmt: skip
        blocks.add(superblock.encode(dataclasses.replace(SOME, **change)))  # type: ignore[arg-type]
    assert len(blocks) == 9
