"""Reads checkpoints of striate with nothing of striate: Python, its standard library and xxhash are enough.

Written from docs/format.md alone, as a second opinion on the format and for
the day when nothing can be built. This file may be copied and run by itself:

    python rescue.py FILE... -o out.safetensors

Of a checkpoint on several drives the FILEs are its members, as many as are
left. Memory is bounded by the header and one chunk (members: one group of chunks), whatever the checkpoint's size.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import os
import re
import secrets
import struct
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, BinaryIO, NoReturn

try:
    import xxhash
except ImportError as e:
    if __name__ == "__main__":
        sys.exit("rescue needs the Python package xxhash, for the checksums: pip install xxhash")
    raise ImportError("striate.rescue needs the Python package xxhash: pip install xxhash") from e

__all__ = ["Damage", "Damaged", "RescueError", "RescuedCheckpoint", "RescuedTensor", "main", "read"]

VERSION = 1
ALIGN = 4096
HEADER_BYTES_MAX = 100_000_000
CHUNK_BYTES_MIN = 4096
CHUNK_BYTES_MAX = 67_108_864
DIGEST_BYTES = 16
GRAPH_BYTES_MAX = 1_073_741_824
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
MEMBER_VERSION = 1
SUPERBLOCK_BYTES = 4096
MEMBERS_MAX = 255
NAME_BYTES_MAX = 1024
MANIFEST_BYTES_MAX = 4_294_967_296
PATH_BYTES_MAX = 4096
OFFSET_END = 1 << 62
DTYPES = (
    "BOOL",
    "U8",
    "I8",
    "U16",
    "I16",
    "U32",
    "I32",
    "U64",
    "I64",
    "F16",
    "BF16",
    "F32",
    "F64",
    "C64",
    "F8_E4M3",
    "F8_E4M3FNUZ",
    "F8_E5M2",
    "F8_E5M2FNUZ",
    "F8_E8M0",
)
GRAPH = "__striate__.graph"
CHECKSUM_KEY = b'"striate.checksum":"'

EXIT_FINE, EXIT_FAILED, EXIT_USAGE, EXIT_DAMAGED, EXIT_NOTHING = range(5)


class RescueError(Exception):
    """The file is not a checkpoint that can be read; the message says why."""


class _NotOurs(RescueError):
    """A safetensors file, but not one of striate's: there is nothing to check it by."""


class _Newer(RescueError):
    """A later version of the format: not damaged, but not known here."""


class _HeaderDamaged(RescueError):
    """The header's checksum does not fit."""


@dataclass(frozen=True)
class Damage:
    """A chunk that no file has whole. ``offset`` is in bytes from the start of the file."""

    chunk: int
    offset: int
    length: int
    reason: str
    tensors: tuple[str, ...]


class Damaged(RescueError):
    """Some chunks are damaged: ``damage`` says which, and which tensors lie in them."""

    def __init__(self, message: str, damage: Sequence[Damage]) -> None:
        super().__init__(message)
        self.damage = tuple(damage)


@dataclass(frozen=True)
class RescuedTensor:
    """One entry of the storage table, with its bytes.

    ``raw``: a storage that several tensors see, or one of an unusual kind; dtype is "U8" then, and ``plain``
    the (dtype, shape) of the plain tensor that it also is, if it is one.
    """

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: bool
    plain: tuple[str, tuple[int, ...]] | None
    location: str
    data: bytes


@dataclass(frozen=True)
class RescuedCheckpoint:
    """A whole and verified checkpoint. ``graph`` is the pickle of the object, None for a flat dict of
    tensors."""

    path: str
    uuid: bytes
    sequence: int
    chunk_bytes: int
    tensors: dict[str, RescuedTensor]
    ties: dict[str, str]
    graph: bytes | None
    metadata: dict[str, str]


# ---- the header ---------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass
class _Header:
    raw: bytes
    metadata: dict[str, str]
    entries: list[_Entry]  # in the order of the JSON, the graph entry included
    data_bytes: int
    uuid: bytes = b""
    sequence: int = 0
    chunk_bytes: int = 0
    digests: bytes = b""
    locations: list[str] = field(default_factory=list)
    plains: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    graph_bytes: int | None = None
    graph_entry: bool = False
    damaged: bool = False
    drives: list[bytes] = field(default_factory=list)  # of a member: where the members were

    @property
    def table(self) -> list[_Entry]:
        return self.entries[:-1] if self.graph_entry else self.entries

    @property
    def chunks_count(self) -> int:
        return -(-self.data_bytes // self.chunk_bytes)

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        begin = chunk * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.data_bytes)


def _refuse(why: str) -> NoReturn:
    raise RescueError(why)


def _read_header(file: BinaryIO, *, despite_damage: bool) -> _Header:
    prefix = _read_at(file, 0, 8)
    if len(prefix) < 8:
        _refuse(f"it has {len(prefix)} bytes, too few for a checkpoint")
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= HEADER_BYTES_MAX:
        _refuse(f"its first 8 bytes, {prefix.hex()}, are not the length of a header")
    raw = _read_at(file, 0, 8 + length)
    if len(raw) < 8 + length:
        _refuse(f"it ends at byte {len(raw)}, within its header of {8 + length} bytes")

    sealed = _checksum_fits(raw)
    try:
        header = _parse(raw)
        if any(key.startswith("striate.") for key in header.metadata):
            if not sealed and not despite_damage:
                raise _HeaderDamaged("the checksum of its header does not fit")
            _parse_ours(header)
            header.damaged = not sealed
            return header
    except _HeaderDamaged:
        raise
    except RescueError as e:
        if not sealed and b'"striate.' in raw:
            raise _HeaderDamaged(f"its header is damaged: {e}") from None
        raise
    raise _NotOurs("it is a safetensors file, but none of striate's: it has no checksums")


def _checksum_fits(raw: bytes) -> bool:
    at = raw.find(CHECKSUM_KEY) + len(CHECKSUM_KEY)
    if at < len(CHECKSUM_KEY):
        return False
    zeroed = bytearray(raw)
    zeroed[at : at + 2 * DIGEST_BYTES] = b"0" * 2 * DIGEST_BYTES
    found = xxhash.xxh3_128_hexdigest(bytes(zeroed))
    return raw[at : at + 2 * DIGEST_BYTES] == found.encode("ascii")


def _parse(raw: bytes) -> _Header:
    """Rules 1 to 6 of the format: what holds for any safetensors file."""
    if raw[8:9] != b"{":
        _refuse("the header does not begin with {")
    parsed = _json(raw[8:])
    metadata = parsed.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        _refuse("__metadata__ is not an object of strings")
    entries = [_entry(name, value) for name, value in parsed.items()]
    reached = 0
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != reached:
            _refuse(f"the data has a gap or an overlap before {entry.name!r}")
        reached = entry.end
    return _Header(raw, metadata, entries, reached)


def _json(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            _refuse("a member of an object is there twice")
        return found

    def constant(name: str) -> NoReturn:
        _refuse(f"{name} is not a number of JSON")

    def integer(digits: str) -> int:
        return int(digits) if len(digits) <= 20 else _refuse("a number is too long")

    try:
        parsed = json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant, parse_int=integer
        )
    except UnicodeDecodeError:
        _refuse("a text is not UTF-8")
    except RecursionError:
        _refuse("the JSON is nested too deeply")
    except ValueError as e:
        _refuse(f"a text is not JSON: {e}")
    if type(parsed) is not dict:
        _refuse("the JSON is not an object")
    return parsed


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    if type(value) is not list or any(type(v) is not int or not 0 <= v < 1 << 63 for v in value):
        _refuse(f"{what} is not an array of integers from 0 to 2^63 - 1")
    return tuple(value)


def _plain_bytes(dtype: str, shape: tuple[int, ...], what: str) -> int:
    if dtype not in DTYPE_BYTES:
        _refuse(f"the dtype of {what}, {dtype!r}, is not known")
    total = DTYPE_BYTES[dtype]
    for dimension in shape:
        total *= dimension or 1
        if total >= 1 << 63:
            _refuse(f"{what} is of more than 2^63 - 1 bytes")
    return 0 if 0 in shape else total


def _entry(name: str, value: Any) -> _Entry:
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(f"entry {name!r} is not dtype, shape and data_offsets")
    if type(value["dtype"]) is not str:
        _refuse(f"the dtype of {name!r} is not a string")
    shape = _sizes(value["shape"], f"the shape of {name!r}")
    offsets = _sizes(value["data_offsets"], f"data_offsets of {name!r}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != _plain_bytes(value["dtype"], shape, repr(name)):
        _refuse(f"data_offsets of {name!r} do not fit its dtype and shape")
    return _Entry(name, value["dtype"], shape, *offsets)


def _text(metadata: dict[str, str], key: str, pattern: str) -> str:
    if key not in metadata:
        _refuse(f"{key} is missing")
    if not re.fullmatch(pattern, metadata[key]):
        _refuse(f"{key} has the wrong form")
    return metadata[key]


def _parse_ours(header: _Header) -> None:
    """Rules 7 to 11: what holds for files of striate."""
    metadata = header.metadata
    decimal = "0|[1-9][0-9]{0,18}"
    version = int(_text(metadata, "striate.version", decimal))
    if version > VERSION:
        raise _Newer(
            f"it has version {version} of the format, and this program knows {VERSION}: take a newer one"
        )
    if version == 0 or len(header.raw) % ALIGN:
        _refuse("its version is 0, or its header has a wrong length")
    header.uuid = bytes.fromhex(_text(metadata, "striate.uuid", "[0-9a-f]{32}"))
    header.sequence = int(_text(metadata, "striate.sequence", "[0-9]{20}"))
    header.chunk_bytes = int(_text(metadata, "striate.chunk_bytes", decimal))
    if header.sequence >= 1 << 64:
        _refuse("striate.sequence does not fit 64 bits")
    if header.chunk_bytes not in {1 << n for n in range(12, 27)}:
        _refuse("striate.chunk_bytes is not a power of two from 4096 to 67108864")
    header.digests = _base64(metadata, "striate.chunks")
    if len(header.digests) != DIGEST_BYTES * header.chunks_count:
        _refuse("striate.chunks does not have one digest for each chunk")

    inline, header.graph_entry = "striate.graph" in metadata, "striate.graph_entry" in metadata
    if inline and header.graph_entry:
        _refuse("the graph is in two places")
    if inline or header.graph_entry:
        header.graph_bytes = int(_text(metadata, "striate.graph_bytes", decimal))
        if not 1 <= header.graph_bytes <= GRAPH_BYTES_MAX:
            _refuse("striate.graph_bytes is out of range")
    if inline:
        _base64(metadata, "striate.graph")
    if header.graph_entry:
        _text(metadata, "striate.graph_entry", "1")
        last = header.entries[-1] if header.entries else None
        if last is None or last.name != GRAPH or last.dtype != "U8" or len(last.shape) != 1:
            _refuse(f"{GRAPH} is not the last entry")

    named: set[str] = set()
    for n, entry in enumerate(header.table):
        if entry.name == f"__striate__.s.{n}":
            if entry.dtype != "U8" or len(entry.shape) != 1:
                _refuse(f"{entry.name} is not U8 in one dimension")
        elif entry.name.startswith("__striate__.") and entry.name != f"__striate__.t.{n}":
            _refuse(f"{entry.name!r} is not a name for entry {n}")
        else:
            named.add(entry.name)
    _parse_storages(header, named)
    header.ties = {
        other: kept
        for other, kept in metadata.items()
        if other != "format" and not other.startswith("striate.")
    }
    if not set(header.ties.values()) <= named:
        _refuse("a tied name leads to no entry")
    flat = not header.ties and len(named) == len(header.table)
    flat = flat and not any(name.startswith("__striate__.") for name in named)
    if header.graph_bytes is None and not flat:
        _refuse("it has no graph, and is not a flat dict of tensors")


def _base64(metadata: dict[str, str], key: str) -> bytes:
    try:
        return base64.b64decode(_text(metadata, key, "[A-Za-z0-9+/=]*"), validate=True)
    except (binascii.Error, ValueError):
        _refuse(f"{key} is not base64")


def _parse_storages(header: _Header, named: set[str]) -> None:
    storages = _json(_text(header.metadata, "striate.storages", "(?s:.*)").encode("utf-8", "surrogatepass"))
    locations, tensors = storages.get("locations"), storages.get("tensors")
    if type(locations) is not list or type(tensors) is not dict:
        _refuse("striate.storages lacks locations or tensors")
    for run in locations:
        if type(run) is not list or len(run) != 2 or type(run[0]) is not str or type(run[1]) is not int:
            _refuse("a location is not a string and a count")
        if not 1 <= run[1] <= len(header.table) - len(header.locations):
            _refuse("the locations do not cover the table")
        header.locations += [run[0]] * run[1]
    if len(header.locations) != len(header.table):
        _refuse("the locations do not cover the table")
    for key, tensor in tensors.items():
        if not re.fullmatch("0|[1-9][0-9]{0,18}", key) or int(key) >= len(header.table):
            _refuse(f"{key!r} is not a table index")
        entry = header.table[int(key)]
        if entry.name in named or type(tensor) is not list or len(tensor) != 2 or type(tensor[0]) is not str:
            _refuse(f"tensor {key} of striate.storages is not a dtype and a shape of a raw storage")
        shape = _sizes(tensor[1], f"the shape of tensor {key}")
        if _plain_bytes(tensor[0], shape, f"tensor {key}") != entry.end - entry.begin:
            _refuse(f"tensor {key} has another length than its storage")
        header.plains[int(key)] = (tensor[0], shape)


# ---- the data -----------------------------------------------------------------


def _read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Up to ``length`` bytes; fewer only at the end of the file."""
    file.seek(offset)
    parts = []
    while length > 0:
        # A length that a damaged file claims must not allocate what is not there.
        part = file.read(min(length, 1 << 24))
        if not part:
            break
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class _Source:
    """The files, of which each may have what the others lack. A digest fits its place and its generation
    only, so that a chunk may be tried from any of them."""

    def __init__(self, header: _Header, files: Sequence[BinaryIO]) -> None:
        self.header = header
        self.files = files
        self._last: tuple[int, bytes] | None = None
        self._in_order = sorted((e for e in header.entries if e.begin < e.end), key=lambda e: e.begin)
        self._begins = [entry.begin for entry in self._in_order]

    def chunk(self, chunk: int) -> bytes | str:
        """The verified bytes of a chunk, or why no file has them."""
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        header = self.header
        begin, end = header.chunk_span(chunk)
        wanted = header.digests[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)]
        seed = xxhash.xxh3_64_intdigest(header.uuid + chunk.to_bytes(8, "little"))
        reasons = []
        for file in self.files:
            try:
                block = _read_at(file, len(header.raw) + begin, end - begin)
            except OSError as e:
                reasons.append(f"read error: {e.strerror}")
                continue
            found = xxhash.xxh3_128_digest(block, seed=seed)
            if len(block) == end - begin and found == wanted:
                self._last = (chunk, block)
                return block
            short = len(block) < end - begin
            reasons.append("the file ends before" if short else f"digest {wanted.hex()}, found {found.hex()}")
        return reasons[0] if len(reasons) == 1 else f"in no file ({'; '.join(dict.fromkeys(reasons))})"

    def damage(self) -> Iterator[Damage]:
        """Looks at every chunk."""
        for chunk in range(self.header.chunks_count):
            block = self.chunk(chunk)
            if isinstance(block, str):
                yield self.describe(chunk, block)

    def describe(self, chunk: int, reason: str) -> Damage:
        header = self.header
        begin, end = header.chunk_span(chunk)
        first = max(bisect_right(self._begins, begin) - 1, 0)
        last = bisect_left(self._begins, end)
        names = [entry.name for entry in self._in_order[first:last]]
        inside = set(names)
        names += [other for other, kept in header.ties.items() if kept in inside]
        return Damage(chunk, len(header.raw) + begin, end - begin, reason, tuple(names))

    def pieces(self, entry: _Entry) -> Iterator[bytes]:
        """The bytes of an entry, each verified as it is read."""
        at = entry.begin
        while at < entry.end:
            chunk = at // self.header.chunk_bytes
            block = self.chunk(chunk)
            if isinstance(block, str):
                lost = self.describe(chunk, block)
                raise Damaged(f"chunk {chunk} cannot be read: {block}", [lost])
            begin = chunk * self.header.chunk_bytes
            part = block[at - begin : entry.end - begin]
            yield part
            at += len(part)


# ---- members: a checkpoint on several drives ------------------------------------

_MAGIC = b"STRIATE\0"
_MANIFEST_MAGIC = b"STRMANI\0"
_SUPERBLOCK = struct.Struct("<8sII16sQ16s16sIIIIQQQ16s32sH1024s")
_HEAD = struct.Struct("<8s16s9Q6IQ")
_BLOCK = struct.Struct("<QQIIQ16s")
_CHECK_INDEX = 1 << 63
_MANIFEST_INDEX = (1 << 64) - 1


def _seed(uuid: bytes, index: int) -> int:
    return int(xxhash.xxh3_64_intdigest(uuid + index.to_bytes(8, "little")))


@dataclass(frozen=True)
class _Member:
    """A file whose superblock is whole."""

    path: str
    file: BinaryIO
    uuid: bytes
    sequence: int
    number: int
    members: int
    k: int
    m: int
    chunk_bytes: int
    manifest_offset: int
    manifest_bytes: int
    manifest_digest: bytes
    name: bytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What the members of a generation agree on."""
        return self.members, self.k, self.m, self.chunk_bytes


def _begins_as_member(file: BinaryIO) -> bool:
    try:
        return _read_at(file, 0, len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _superblock(path: str, file: BinaryIO) -> _Member:
    block = _read_at(file, 0, SUPERBLOCK_BYTES)
    if block[:8] != _MAGIC:
        _refuse("it is no member")
    if len(block) < SUPERBLOCK_BYTES or xxhash.xxh3_128_digest(block[:4080]) != block[4080:]:
        _refuse("its superblock is damaged")
    fields = _SUPERBLOCK.unpack_from(block)
    _, version, flags, uuid, sequence, _, _, number, members, k, m, chunk_bytes = fields[:12]
    offset, length, digest, whole, name_length, name = fields[12:]
    if version > MEMBER_VERSION or flags:
        raise _Newer(
            f"{path} has version {version} of the member form, and this program knows {MEMBER_VERSION}: "
            "take a newer one"
        )
    if version < 1 or not 1 <= members <= MEMBERS_MAX or number >= members or k < 1 or k + m > members:
        _refuse("its superblock has numbers that are not possible")
    if chunk_bytes not in {1 << n for n in range(12, 27)} or offset % ALIGN:
        _refuse("its superblock has sizes that are not possible")
    if not SUPERBLOCK_BYTES <= offset < OFFSET_END or not 0 < length <= MANIFEST_BYTES_MAX:
        _refuse("its superblock puts the manifest where it cannot be")
    if int.from_bytes(whole, "little") >> members:
        _refuse("its superblock lists members that there are not")
    if not 1 <= name_length <= NAME_BYTES_MAX or name[name_length:].strip(b"\0"):
        _refuse("the name in its superblock has a wrong length")
    name = name[:name_length]
    for part in name.split(b"/"):
        if part in (b"", b".", b"..") or b"\0" in part or len(part) > 255 or part.startswith(b".striate"):
            _refuse("the name in its superblock is not one")
    return _Member(
        path, file, uuid, sequence, number, members, k, m, chunk_bytes, offset, length, digest, name
    )


class _Tables:
    """Takes fixed-width rows off a manifest, never more than there is."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def bytes(self, length: int) -> bytes:
        if length > len(self.raw) - self.at:
            _refuse("a table of the manifest is longer than the manifest")
        self.at += length
        return self.raw[self.at - length : self.at]

    def rows(self, layout: str, count: int) -> list[tuple[Any, ...]]:
        return list(struct.iter_unpack(layout, self.bytes(struct.calcsize(layout) * count)))

    def text(self, length: int) -> str:
        try:
            return self.bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            _refuse("a name in the manifest is not UTF-8")

    def end(self) -> None:
        if self.at != len(self.raw):
            _refuse("the manifest does not end where its head says")


class _MemberSource(_Source):
    """Members of one generation. A block that is missing or wrong is computed from the rest of its group."""

    def __init__(
        self, header: _Header, like: _Member, blocks: list[tuple[Any, ...]], members: Sequence[_Member]
    ) -> None:
        super().__init__(header, [member.file for member in members])
        self.k, self.m = like.k, like.m
        self.blocks = blocks
        self.members = members
        self._group: tuple[int, dict[int, bytes | str]] = (-1, {})

    def chunk(self, chunk: int) -> bytes | str:
        group, number = divmod(chunk, self.k)
        block = self._block(group, number)
        if isinstance(block, bytes):
            return block
        recovered = self._recover(group, number)
        if recovered is None:
            return f"{block}, and too little is left of its group"
        self._group[1][number] = recovered
        return recovered

    def _size(self, group: int) -> int:
        return min(self.k, self.header.chunks_count - group * self.k)

    def _row(self, group: int, number: int) -> int:
        """Row of a block: numbers 0 to k - 1 are data, from k on check blocks."""
        if number < self.k:
            return group * self.k + number
        return self.header.chunks_count + group * self.m + number - self.k

    def _block(self, group: int, number: int) -> bytes | str:
        """A verified block, or why there is none. Those of the group that was last asked for are kept."""
        if self._group[0] != group:
            self._group = (group, {})
        known = self._group[1]
        if number not in known:
            known[number] = self._read(group, number)
        return known[number]

    def _read(self, group: int, number: int) -> bytes | str:
        offset, length, at, _, _, wanted = self.blocks[self._row(group, number)]
        index = _CHECK_INDEX + group * self.m + number - self.k
        if number < self.k or self.k == 1:
            index = group * self.k + (number if number < self.k else 0)
        seed = _seed(self.header.uuid, index)
        reasons = []
        for member in self.members:  # one may be there twice, as a copy that somebody made in time
            if member.number != at:
                continue
            try:
                block = _read_at(member.file, offset, length)
            except OSError as e:
                reasons.append(f"{member.path}: read error: {e.strerror}")
                continue
            if len(block) == length and xxhash.xxh3_128_digest(block, seed=seed) == wanted:
                return block
            reasons.append(f"{member.path}, offset {offset}: the block is damaged")
        return "; ".join(reasons) or f"member {at} is missing"

    def _recover(self, group: int, wanted: int) -> bytes | None:
        size = self._size(group)
        found: dict[int, bytes] = {}
        for number in (*range(size), *range(self.k, self.k + self.m)):
            if number != wanted and len(found) < size:
                block = self._block(group, number)
                if isinstance(block, bytes):
                    found[number] = block
        if len(found) < size:
            return None
        chunk = group * self.k + wanted
        length, digest = self.blocks[chunk][1], self.blocks[chunk][5]
        longest = max(map(len, found.values()))
        factors = _solve(self.k, self.m, size, list(found), wanted)
        total = 0
        for factor, block in zip(factors, found.values(), strict=True):
            scaled = block.ljust(longest, b"\0").translate(_TIMES[factor])
            total ^= int.from_bytes(scaled, "little")
        recovered = total.to_bytes(longest, "little")[:length]
        fits = xxhash.xxh3_128_digest(recovered, seed=_seed(self.header.uuid, chunk)) == digest
        return recovered if fits else None


def _times(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a, b = a << 1 ^ (0x11D if a & 0x80 else 0), b >> 1
    return product


_TIMES = [bytes(_times(a, b) for b in range(256)) for a in range(256)]
_INVERSE = [0, *(_TIMES[a].index(1) for a in range(1, 256))]


def _factor(k: int, m: int, j: int, i: int) -> int:
    """A[j][i] of docs/format.md."""

    def b(row: int, column: int) -> int:
        return _INVERSE[row ^ (m + column)]

    return _times(_times(b(j, i), b(0, 0)), _INVERSE[_times(b(0, i), b(j, 0))])


def _solve(k: int, m: int, size: int, present: list[int], wanted: int) -> list[int]:
    """Factors of the present blocks that add up to a wanted data block."""
    rows = []
    for at, number in enumerate(present):
        equation = [int(number == i) if number < k else _factor(k, m, number - k, i) for i in range(size)]
        rows.append(equation + [int(at == other) for other in range(size)])
    for column in range(size):
        pivot = next(r for r in range(column, size) if rows[r][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = _INVERSE[rows[column][column]]
        rows[column] = [_times(scale, value) for value in rows[column]]
        for other in range(size):
            factor = rows[other][column]
            if other != column and factor:
                rows[other] = [v ^ _times(factor, w) for v, w in zip(rows[other], rows[column], strict=True)]
    return rows[wanted][size:]


def _members(paths: Sequence[str], files: Sequence[BinaryIO]) -> tuple[_MemberSource, list[str]]:
    """The newest generation among the files, and what is to be said of the others."""
    remarks: list[str] = []
    found: list[_Member] = []
    for path, file in zip(paths, files, strict=True):
        try:
            found.append(_superblock(path, file))
        except _Newer:
            raise
        except RescueError as e:
            remarks.append(f"{path} is left out: {e}")
        except OSError as e:
            remarks.append(f"{path} is left out: read error: {e.strerror}")
    if not found:
        raise RescueError("no member has a whole superblock: " + "; ".join(remarks))
    newest = max(found, key=lambda member: member.sequence)
    for member in found:
        if member.uuid != newest.uuid:
            age = "an older" if member.sequence < newest.sequence else "another"
            remarks.append(
                f"{member.path} is left out: it belongs to {age} generation (its members alone would give that one)"
            )
    members = [member for member in found if member.uuid == newest.uuid]
    header, blocks, like = _first_manifest(members, remarks)
    for member in [member for member in members if member.shape != like.shape]:
        remarks.append(f"{member.path} is left out: its superblock disagrees with the manifest")
        members.remove(member)
    for number in range(like.members):
        if all(member.number != number for member in members):
            place = os.path.join(os.fsdecode(header.drives[number]), os.fsdecode(like.name))
            remarks.append(
                f"member {number} of {like.members} is not among the files; it was written as {place}"
            )
    return _MemberSource(header, like, blocks, members), remarks


def _first_manifest(
    members: Sequence[_Member], remarks: list[str]
) -> tuple[_Header, list[tuple[Any, ...]], _Member]:
    """All members have the same manifest: the first that is whole counts, the others are looked at all the same."""
    first = None
    for member in members:
        try:
            raw = _read_at(member.file, member.manifest_offset, member.manifest_bytes)
            if (
                xxhash.xxh3_128_digest(raw, seed=_seed(member.uuid, _MANIFEST_INDEX))
                != member.manifest_digest
            ):
                _refuse("its checksum does not fit")
            if first is None:
                first = (*_member_manifest(raw, member), member)
        except RescueError as e:
            remarks.append(
                f"{member.path}: its manifest is damaged, and that of another member is needed: {e}"
            )
        except OSError as e:
            remarks.append(f"{member.path}: its manifest cannot be read: {e.strerror}")
    if first is None:
        raise RescueError("no member of the newest generation has a whole manifest: " + "; ".join(remarks))
    return first


def _member_manifest(raw: bytes, member: _Member) -> tuple[_Header, list[tuple[Any, ...]]]:
    tables = _Tables(raw)
    head = _HEAD.unpack(tables.bytes(_HEAD.size))
    magic, uuid, data_bytes, graph_bytes, graph_length, strings_length, dimensions_count = head[:7]
    storages_count, tensors_count, chunks, groups = head[7:11]
    locations_count, ties_count, members, k, m, zero, chunk_bytes = head[11:]
    if (
        magic != _MANIFEST_MAGIC
        or uuid != member.uuid
        or (members, k, m, chunk_bytes) != member.shape
        or zero
    ):
        _refuse("the manifest disagrees with the superblock")
    if data_bytes >= 1 << 63 or chunks != -(-data_bytes // chunk_bytes) or groups != -(-chunks // k):
        _refuse("the manifest has numbers that do not fit each other")
    if graph_bytes > GRAPH_BYTES_MAX or (graph_bytes > 0) != (graph_length > 0):
        _refuse("the length of the graph is not possible")
    drives = tables.rows("<16sI", members)
    locations = tables.rows("<QI", locations_count)
    storages = tables.rows("<QQIIBB6x", storages_count)
    tensors = tables.rows("<QIB3x", tensors_count)
    ties = tables.rows("<II", ties_count)
    sizes = [row[0] for row in tables.rows("<I", groups)]
    blocks = tables.rows(_BLOCK.format, chunks + groups * m)
    dimensions = [row[0] for row in tables.rows("<Q", dimensions_count)]
    strings = _Tables(tables.bytes(strings_length))
    graph = tables.bytes(graph_length)
    tables.end()

    header = _Header(b"", {}, [], data_bytes, uuid, member.sequence, chunk_bytes)
    if any(length > PATH_BYTES_MAX for _, length in drives):
        _refuse("the path of a drive is too long")
    header.drives = [strings.bytes(length) for _, length in drives]
    for count, length in locations:
        name = strings.text(length)
        if not 1 <= count <= storages_count - len(header.locations):
            _refuse("the locations do not cover the storages")
        header.locations += [name] * count
    if len(header.locations) != storages_count:
        _refuse("the locations do not cover the storages")
    shapes = _member_shapes([row[3] for row in storages] + [row[1] for row in tensors], dimensions)
    named = _member_storages(header, storages, shapes, strings)
    _member_tensors(header, tensors, shapes[storages_count:], named)
    for name_length, kept_length in ties:
        other, kept = strings.text(name_length), strings.text(kept_length)
        if kept not in named or other in named or other in header.ties:
            _refuse("a tied name leads to no storage, or is that of one")
        header.ties[other] = kept
    strings.end()
    flat = not header.ties and len(named) == storages_count
    if not graph_bytes and not (flat and not any(name.startswith("__striate__.") for name in named)):
        _refuse("it has no graph, and is not a flat dict of tensors")
    _check_blocks(member, header, sizes, blocks)
    header.digests = b"".join(row[5] for row in blocks[:chunks])
    header.graph_bytes = graph_bytes or None
    header.metadata = _plain_metadata(header, graph)
    header.raw = _plain_header(header)
    return header, blocks


def _member_shapes(counts: list[int], dimensions: list[int]) -> list[tuple[int, ...]]:
    if sum(counts) != len(dimensions):
        _refuse("the dimensions do not fit the storages and tensors")
    ends = list(accumulate(counts, initial=0))
    return [tuple(dimensions[begin:end]) for begin, end in pairwise(ends)]


def _member_storages(
    header: _Header, storages: list[tuple[Any, ...]], shapes: list[tuple[int, ...]], strings: _Tables
) -> set[str]:
    """Fills in the entries; the names of those that are named storages."""
    named: set[str] = set()
    every: set[str] = set()
    for n, (offset, length, name_length, _, dtype, is_named) in enumerate(storages):
        name, shape = strings.text(name_length), shapes[n]
        if dtype >= len(DTYPES) or is_named > 1:
            _refuse(f"storage {n} is of a kind that is not known")
        if _plain_bytes(DTYPES[dtype], shape, repr(name)) != length:
            _refuse(f"{name!r} is not as long as its shape")
        if name in every or name == "__metadata__":
            _refuse(f"{name!r} is not a name that storage {n} can have")
        every.add(name)
        if is_named:
            named.add(name)
            if name.startswith("__striate__.") and name != f"__striate__.t.{n}":
                _refuse(f"{name!r} is not a name for storage {n}")
        elif name != f"__striate__.s.{n}" or DTYPES[dtype] != "U8" or len(shape) != 1:
            _refuse(f"raw storage {n} is not U8 in one dimension under its own name")
        header.entries.append(_Entry(name, DTYPES[dtype], shape, offset, offset + length))
    reached = 0
    for entry in sorted(header.entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != reached:
            _refuse(f"the data has a gap or an overlap before {entry.name!r}")
        reached = entry.end
    if reached != header.data_bytes:
        _refuse("the storages do not cover the data")
    return named


def _member_tensors(
    header: _Header, tensors: list[tuple[Any, ...]], shapes: list[tuple[int, ...]], named: set[str]
) -> None:
    last = -1
    for (index, _, dtype), shape in zip(tensors, shapes, strict=True):
        if not last < index < len(header.entries) or dtype >= len(DTYPES):
            _refuse("a tensor belongs to no storage")
        last = index
        entry = header.entries[index]
        length = _plain_bytes(DTYPES[dtype], shape, f"tensor {index}")
        if entry.name in named or length != entry.end - entry.begin:
            _refuse(f"tensor {index} is not that of a raw storage of its length")
        header.plains[index] = (DTYPES[dtype], shape)


def _check_blocks(member: _Member, header: _Header, sizes: list[int], blocks: list[tuple[Any, ...]]) -> None:
    k, m, chunks = member.k, member.m, header.chunks_count
    if any(size != min(k, chunks - g * k) for g, size in enumerate(sizes)):
        _refuse("a group has another number of blocks than it should")
    reached: dict[int, int] = {}
    seen: set[tuple[int, int]] = set()
    for row, (offset, length, at, stored, zero, _) in enumerate(blocks):
        group = row // k if row < chunks else (row - chunks) // m
        begin, end = header.chunk_span(row if row < chunks else group * k)
        if at >= member.members or stored or zero or length != end - begin:
            _refuse("a block is stored in a way that is not known, or is not as long as it should be")
        if offset % ALIGN or not SUPERBLOCK_BYTES <= offset < OFFSET_END:
            _refuse("a block lies where none can be")
        if (group, at) in seen:
            _refuse("two blocks of a group lie in one member")
        seen.add((group, at))
    for offset, length, at, *_ in sorted(blocks, key=lambda row: row[0]):
        if offset < reached.get(at, 0):
            _refuse("two blocks overlap")
        reached[at] = -(-(offset + length) // ALIGN) * ALIGN
    if reached.get(member.number, 0) > member.manifest_offset:
        _refuse("a block overlaps the manifest")


def _plain_metadata(header: _Header, graph: bytes) -> dict[str, str]:
    """The metadata of the plain file that has the same image."""
    runs: list[list[Any]] = []
    for location in header.locations:
        if runs and runs[-1][0] == location:
            runs[-1][1] += 1
        else:
            runs.append([location, 1])
    tensors = {str(n): [dtype, list(shape)] for n, (dtype, shape) in header.plains.items()}
    metadata = {
        "format": "pt",
        "striate.version": str(VERSION),
        "striate.uuid": header.uuid.hex(),
        "striate.sequence": f"{header.sequence:020d}",
        "striate.chunk_bytes": str(header.chunk_bytes),
        "striate.storages": json.dumps(
            {"locations": runs, "tensors": tensors}, separators=(",", ":"), ensure_ascii=False
        ),
    }
    if header.graph_bytes is not None:
        metadata["striate.graph"] = base64.b64encode(graph).decode("ascii")
        metadata["striate.graph_bytes"] = str(header.graph_bytes)
    metadata["striate.checksum"] = "0" * 2 * DIGEST_BYTES
    metadata["striate.chunks"] = base64.b64encode(header.digests).decode("ascii")
    own = {
        other: kept
        for other, kept in header.ties.items()
        if other != "format" and not other.startswith("striate.")
    }
    return metadata | own


def _plain_header(header: _Header) -> bytes:
    members: dict[str, Any] = {"__metadata__": header.metadata}
    for entry in header.entries:
        offsets = [entry.begin, entry.end]
        members[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    length = -(-(8 + len(text)) // ALIGN) * ALIGN - 8
    if length > HEADER_BYTES_MAX:
        _refuse("there are too many tensors for one safetensors file")
    raw = length.to_bytes(8, "little") + text.ljust(length)
    at = raw.index(CHECKSUM_KEY) + len(CHECKSUM_KEY)
    digits = xxhash.xxh3_128_hexdigest(raw).encode("ascii")
    header.metadata["striate.checksum"] = digits.decode("ascii")
    return raw[:at] + digits + raw[at + len(digits) :]


# ---- whole checkpoints ------------------------------------------------------------


def _graph(source: _Source) -> bytes | None:
    header = source.header
    if header.graph_bytes is None:
        return None
    if header.graph_entry:
        stored = b"".join(source.pieces(header.entries[-1]))
    else:
        stored = _base64(header.metadata, "striate.graph")
    stream = zlib.decompressobj()
    try:
        graph = stream.decompress(stored, header.graph_bytes + 1)
    except zlib.error as e:
        _refuse(f"the graph cannot be decompressed: {e}")
    if len(graph) != header.graph_bytes or not stream.eof or stream.unused_data:
        _refuse("the graph does not have the length that the header declares")
    return graph


def read(path: str | os.PathLike[str], *copies: str | os.PathLike[str]) -> RescuedCheckpoint:
    """A whole checkpoint in memory, verified. ``copies`` are further files to take damaged chunks from.

    Raises RescueError (no checkpoint), Damaged (with the list of what is damaged), OSError.
    """
    paths = [os.fspath(p) for p in (path, *copies)]
    with _Files(paths) as files:
        if any(map(_begins_as_member, files)):
            source: _Source = _members(paths, files)[0]
        else:
            source = _Source(_first_header(paths, files, despite_damage=False)[0], files)
        header = source.header
        damage = list(source.damage())
        if damage:
            raise Damaged(f"{paths[0]}: {len(damage)} of {header.chunks_count} chunks are damaged", damage)
        tensors = {
            entry.name: RescuedTensor(
                index=n,
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                raw=entry.name == f"__striate__.s.{n}",
                plain=header.plains.get(n),
                location=header.locations[n],
                data=b"".join(source.pieces(entry)),
            )
            for n, entry in enumerate(header.table)
        }
        return RescuedCheckpoint(
            path=paths[0],
            uuid=header.uuid,
            sequence=header.sequence,
            chunk_bytes=header.chunk_bytes,
            tensors=tensors,
            ties=header.ties,
            graph=_graph(source),
            metadata=header.metadata,
        )


class _Files:
    """The input files, open together."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self.files: list[BinaryIO] = []

    def __enter__(self) -> list[BinaryIO]:
        try:
            for path in self.paths:
                self.files.append(open(path, "rb", buffering=0))
        except BaseException:
            self.__exit__()
            raise
        return self.files

    def __exit__(self, *exc: object) -> None:
        for file in self.files:
            file.close()


def _first_header(
    paths: Sequence[str], files: Sequence[BinaryIO], *, despite_damage: bool
) -> tuple[_Header, list[str]]:
    """The header of the first file that has a good one (or, as the last resort, a readable one), and
    remarks."""
    remarks = []
    errors: list[RescueError] = []
    for resort in (False, True) if despite_damage else (False,):
        for path, file in zip(paths, files, strict=True):
            try:
                header = _read_header(file, despite_damage=resort)
            except RescueError as e:
                if not resort:
                    errors.append(type(e)(f"{path}: {e}"))
                    remarks.append(str(errors[-1]))
                continue
            _check_same_checkpoint(path, header, paths, files)
            return header, remarks
    raise errors[0] if len(errors) == 1 else RescueError("; ".join(map(str, errors)))


def _check_same_checkpoint(
    path: str, header: _Header, paths: Sequence[str], files: Sequence[BinaryIO]
) -> None:
    """Copies may be damaged, but not of something else: mixed up by hand, they would hide each other's damage."""
    for other, file in zip(paths, files, strict=True):
        try:
            found = _read_header(file, despite_damage=False)
        except RescueError:
            continue
        if found.uuid != header.uuid:
            raise _NotOurs(f"{other} is another checkpoint than {path}: give copies of one checkpoint only")


# ---- the command --------------------------------------------------------------


class _Output:
    """A file that appears under its name whole and durable, or not at all."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.directory = os.path.dirname(path) or "."
        self.temporary = os.path.join(self.directory, f".rescue-{secrets.token_hex(8)}")
        self.file: BinaryIO | None = None

    def __enter__(self) -> BinaryIO:
        self.file = open(self.temporary, "xb")
        return self.file

    def commit(self) -> None:
        assert self.file is not None
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def __exit__(self, *exc: object) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
            with suppress(FileNotFoundError):
                os.unlink(self.temporary)


def _few(names: Sequence[str], most: int) -> str:
    if not names:
        return "no tensor"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _say(text: str) -> None:
    # Names come from a file: a terminal must get none of its control characters.
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    print(shown, file=sys.stderr)


def _partial_header(entries: list[_Entry], ties: dict[str, str]) -> bytes:
    kept = {entry.name for entry in entries}
    members: dict[str, Any] = {
        "__metadata__": {"format": "pt", **{other: name for other, name in ties.items() if name in kept}}
    }
    at = 0
    for entry in entries:
        length = entry.end - entry.begin
        members[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    length = -(-(8 + len(text)) // ALIGN) * ALIGN - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _write_whole(source: _Source, output: str) -> list[Damage]:
    """Copies the image. With damage nothing is written, and all of it is returned."""
    header = source.header
    with (out := _Output(output)) as file:
        file.write(header.raw)
        for chunk in range(header.chunks_count):
            block = source.chunk(chunk)
            if isinstance(block, str):
                return list(source.damage())
            file.write(block)
        out.commit()
    return []


def _write_partial(source: _Source, damage: Sequence[Damage], output: str) -> int:
    """Writes a plain safetensors file of what is not damaged; the number of tensors in it."""
    header = source.header
    lost = {name for d in damage for name in d.tensors}
    entries = sorted((e for e in header.table if e.name not in lost), key=lambda e: (e.begin, e.end))
    if not entries:
        return 0
    with (out := _Output(output)) as file:
        file.write(_partial_header(entries, header.ties))
        for entry in entries:
            for part in source.pieces(entry):
                file.write(part)
        out.commit()
    return len(entries)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m striate.rescue",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Checks a checkpoint of striate and writes it anew, with nothing of striate but this program.",
        epilog=(
            "Several FILEs are copies of one checkpoint, and what is damaged in one is taken from another; or they\n"
            "are the members of a checkpoint on several drives: give all that are left.\n"
            "Without -o the checkpoint is only checked.\n\n"
            "exit codes:\n"
            "  0  whole; OUT, if asked for, is the checkpoint, byte for byte\n"
            "  1  failed: a file cannot be read or written, OUT exists, FILE is no checkpoint of striate\n"
            "  2  usage\n"
            "  3  damaged: OUT is written only with --partial, and has the tensors that are whole\n"
            "  4  nothing can be restored"
        ),
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="the checkpoint, and copies of it")
    parser.add_argument("-o", "--output", metavar="OUT", help="write a safetensors file")
    parser.add_argument(
        "--partial",
        action="store_true",
        help="if damaged, write the tensors that are whole as a plain safetensors file (without the Python object "
        "around them); also tries to go on when the header is damaged",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists (never one of FILEs)")
    return parser


def _check_output(paths: Sequence[str], output: str, *, force: bool) -> None:
    if os.path.isdir(output):
        raise RescueError(f"{output} is a directory: give the name of a file")
    if not os.path.lexists(output):
        return
    if any(os.path.exists(output) and os.path.samefile(path, output) for path in paths):
        raise RescueError(
            f"{output} is one of the input files: a rescue never writes to them. Give another name"
        )
    if not force:
        raise RescueError(f"{output} exists: give another name, or --force to replace it")


def _rescue(paths: Sequence[str], output: str | None, *, partial: bool, force: bool) -> int:
    with _Files(paths) as files:
        if output is not None:
            _check_output(paths, output, force=force)
        several = any(map(_begins_as_member, files))
        source: _Source
        try:
            if several:
                source, remarks = _members(paths, files)
                header = source.header
            else:
                header, remarks = _first_header(paths, files, despite_damage=partial)
        except (_NotOurs, _Newer) as e:
            _say(f"error: {e}")
            return EXIT_FAILED
        except RescueError as e:
            _say(f"error: {e}. Nothing can be restored from this; try another copy of the file.")
            return EXIT_NOTHING
        for remark in remarks:
            _say(f"warning: {remark}")
        if header.damaged:
            _say(
                "warning: the header is damaged: names, dtypes and shapes may be wrong. Each chunk is checked."
            )
        if not several:
            source = _Source(header, files)
        whole = len(header.raw) + header.data_bytes
        for path, file in zip(paths, files, strict=True):
            if not several and os.fstat(file.fileno()).st_size > whole:
                _say(f"warning: {path} has bytes after the end of the checkpoint; they are left out")

        if output is None or header.damaged:
            damage = list(source.damage())
        else:
            damage = _write_whole(source, output)
        for d in damage:
            _say(
                f"{paths[0]}: chunk {d.chunk}, offset {d.offset}, {d.length} bytes: {d.reason}: "
                f"{_few(d.tensors, 8)}"
            )
        return _conclude(source, damage, output, partial=partial)


def _conclude(source: _Source, damage: Sequence[Damage], output: str | None, *, partial: bool) -> int:
    header = source.header
    count = len(header.table)
    if not damage and not header.damaged:
        _graph(source)  # its bytes are right; is it what they declare?
        what = f"written to {output}" if output is not None else "whole"
        _say(f"{count} tensors, {header.data_bytes} bytes in {header.chunks_count} chunks: {what}")
        return EXIT_FINE
    lost = {name for d in damage for name in d.tensors}
    left = sum(entry.name not in lost for entry in header.table)
    _say(
        f"damaged: {len(damage)} of {header.chunks_count} chunks; {left} of {count} tensors are whole"
        + (", the Python object around them is lost" if GRAPH in lost else "")
    )
    if not left:
        return EXIT_NOTHING
    if output is not None and partial:
        _say(f"{_write_partial(source, damage, output)} tensors written to {output}, as plain safetensors")
    elif output is not None:
        _say("nothing was written; --partial writes the tensors that are whole")
    return EXIT_DAMAGED


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code that its help explains."""
    options = _parser().parse_args(arguments)
    try:
        return _rescue(options.files, options.output, partial=options.partial, force=options.force)
    except (OSError, RescueError) as e:
        _say(f"error: {e}")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
