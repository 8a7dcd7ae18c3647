"""The manifest of a member: graph, storage table and where every block lies, in fixed-width tables.

Pure: nothing is read or written here. docs/format.md, "Manifest of a member", is the specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from striate.errors import CorruptCheckpoint, FormatError
from striate.graph import Plain
from striate.groups import Shape
from striate.image import Table
from striate.manifest import (
    ALIGN,
    DIGEST_BYTES,
    DTYPE_BYTES,
    GRAPH_BYTES_MAX,
    Manifest,
    check_shape,
    chunk_seed,
    in_utf8,
    plain_bytes,
)
from striate.placement import Blocks
from striate.superblock import MANIFEST_BYTES_MAX, MEMBER_VERSION, SUPERBLOCK_BYTES, Superblock

__all__ = [
    "CHECK_INDEX_FIRST",
    "Draft",
    "MemberManifest",
    "check_seed",
    "decode",
    "encode",
    "manifest_digest",
]

# Seeds: chunks count from 0, check blocks from here, and the manifest has the last.
CHECK_INDEX_FIRST = 1 << 63
_MANIFEST_INDEX = (1 << 64) - 1

_MAGIC = b"STRMANI\0"
_PATH_BYTES_MAX = 4096
_INT64_MAX = (1 << 63) - 1

HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("uuid", "V16"),
        ("data_bytes", "<u8"),
        ("graph_bytes", "<u8"),
        ("graph_length", "<u8"),
        ("strings_length", "<u8"),
        ("dimensions", "<u8"),
        ("storages", "<u8"),
        ("tensors", "<u8"),
        ("chunks", "<u8"),
        ("groups", "<u8"),
        ("locations", "<u4"),
        ("ties", "<u4"),
        ("members", "<u4"),
        ("k", "<u4"),
        ("m", "<u4"),
        ("zero", "<u4"),
        ("chunk_bytes", "<u8"),
    ]
)
DRIVE = np.dtype([("uuid", "V16"), ("path_length", "<u4")])
LOCATION = np.dtype([("count", "<u8"), ("name_length", "<u4")])
STORAGE = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u8"),
        ("name_length", "<u4"),
        ("ndim", "<u4"),
        ("dtype", "u1"),
        ("named", "u1"),
        ("zero", "V6"),
    ]
)
TENSOR = np.dtype([("index", "<u8"), ("ndim", "<u4"), ("dtype", "u1"), ("zero", "V3")])
TIE = np.dtype([("name_length", "<u4"), ("kept_length", "<u4")])
BLOCK = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u8"),
        ("member", "<u4"),
        ("stored", "<u4"),
        ("zero", "<u8"),
        ("digest", "V16"),
    ]
)
_DTYPES = list(DTYPE_BYTES)
_DTYPE_CODES = {name: code for code, name in enumerate(_DTYPES)}
_RAW_DTYPE = "U8"


@dataclass(frozen=True, eq=False)
class MemberManifest(Manifest):
    """A Manifest whose data lies in blocks on several drives. ``data_offset`` is 0: offsets are those of the image.

    ``digests``: of the data blocks; ``check_digests``: of the check blocks, 16 bytes each. ``drives``: (uuid, path)
    of each member, as they were when it was written.
    """

    blocks: Blocks = field(kw_only=True)
    check_digests: bytes = field(kw_only=True)
    drives: tuple[tuple[bytes, bytes], ...] = field(kw_only=True)

    @property
    def all_digests(self) -> bytes:
        """Digests of all blocks, in the order of ``blocks``."""
        return self.digests + self.check_digests


def check_seed(uuid: bytes, group: int, m: int, j: int) -> int:
    """The seed of check block j of a group's XXH3-128 (for k above 1; copies have that of their chunk)."""
    return chunk_seed(uuid, CHECK_INDEX_FIRST + group * m + j)


def manifest_digest(raw: bytes, uuid: bytes) -> bytes:
    """XXH3-128 of a manifest, bound to its generation."""
    return xxhash.xxh3_128_digest(raw, seed=chunk_seed(uuid, _MANIFEST_INDEX))


# ---- writing ---------------------------------------------------------------


@dataclass(eq=False)
class Draft:
    """A manifest whose length is final and whose digests are still to come. ``length`` in bytes."""

    before: bytes
    blocks: NDArray[np.void]
    after: bytes
    chunks_count: int

    @property
    def length(self) -> int:
        return len(self.before) + self.blocks.nbytes + len(self.after)

    def finish(self, data_digests: bytes, check_digests: bytes) -> bytes:
        """The manifest, with the digests of all data and of all check blocks."""
        digests = data_digests + check_digests
        assert len(data_digests) == DIGEST_BYTES * self.chunks_count
        assert len(digests) == DIGEST_BYTES * len(self.blocks)
        self.blocks["digest"] = np.frombuffer(digests, "V16")
        return self.before + self.blocks.tobytes() + self.after


def encode(
    table: Table,
    *,
    uuid: bytes,
    chunk_bytes: int,
    ties: Mapping[str, str],
    graph: bytes | None,
    graph_bytes: int | None,
    blocks: Blocks,
    drives: Sequence[tuple[bytes, bytes]],
) -> Draft:
    """Everything but the digests. ``graph`` is compressed (manifest.pack_graph), ``graph_bytes`` its length before.

    Raises FormatError when it would pass MANIFEST_BYTES_MAX.
    """
    assert table.graph is None and (graph is None) == (graph_bytes is None)
    names = [name.encode("utf-8") for name in table.names]
    locations = [(count, name.encode("utf-8")) for name, count in table.locations]
    pairs = [
        (other.encode("utf-8"), kept.encode("utf-8"))
        for other, kept in ties.items()
        if in_utf8(other)  # the graph knows of it anyhow
    ]
    kinds = {kind: kind for kind in zip(table.dtypes, table.shapes, strict=True)}
    for dtype, shape in (*kinds, *((plain.dtype, plain.shape) for plain in table.tensors.values())):
        check_shape(dtype, shape)

    storages = np.zeros(len(names), STORAGE)
    storages["offset"], storages["length"] = table.offsets, table.lengths
    storages["name_length"] = np.fromiter(map(len, names), np.int64, len(names))
    storages["ndim"] = np.fromiter(map(len, table.shapes), np.int64, len(names))
    storages["dtype"] = np.fromiter(map(_DTYPE_CODES.__getitem__, table.dtypes), np.int64, len(names))
    storages["named"] = table.named
    tensors = np.zeros(len(table.tensors), TENSOR)
    plains = [table.tensors[n] for n in sorted(table.tensors)]
    tensors["index"] = sorted(table.tensors)
    tensors["ndim"] = [len(plain.shape) for plain in plains]
    tensors["dtype"] = [_DTYPE_CODES[plain.dtype] for plain in plains]
    dimensions = np.array(
        [size for shape in (*table.shapes, *(plain.shape for plain in plains)) for size in shape], "<u8"
    )
    strings = b"".join(
        (
            *(path for _, path in drives),
            *(name for _, name in locations),
            *names,
            *(text for pair in pairs for text in pair),
        )
    )
    rows = np.zeros(len(blocks.offset), BLOCK)
    rows["offset"], rows["length"], rows["member"] = blocks.offset, blocks.length, blocks.member

    head = np.zeros(1, HEAD)
    head["magic"], head["uuid"] = _MAGIC, np.frombuffer(uuid, "V16")
    head["data_bytes"], head["chunk_bytes"] = table.data_bytes, chunk_bytes
    head["graph_bytes"], head["graph_length"] = graph_bytes or 0, len(graph or b"")
    head["strings_length"], head["dimensions"] = len(strings), len(dimensions)
    head["storages"], head["tensors"] = len(storages), len(tensors)
    head["chunks"], head["groups"] = blocks.chunks_count, len(blocks.groups)
    head["locations"], head["ties"], head["members"] = len(locations), len(pairs), len(drives)
    head["k"], head["m"] = blocks.shape.data, blocks.shape.checks

    before = b"".join(
        (
            head.tobytes(),
            _rows(DRIVE, [(uuid, len(path)) for uuid, path in drives]),
            _rows(LOCATION, [(count, len(name)) for count, name in locations]),
            storages.tobytes(),
            tensors.tobytes(),
            _rows(TIE, [(len(other), len(kept)) for other, kept in pairs]),
            blocks.groups.astype("<u4").tobytes(),
        )
    )
    draft = Draft(before, rows, dimensions.tobytes() + strings + (graph or b""), blocks.chunks_count)
    if draft.length > MANIFEST_BYTES_MAX:
        raise FormatError(
            f"save refused: the manifest would take {draft.length:,} bytes for {len(names):,} tensors and "
            f"{len(rows):,} blocks, and it may have {MANIFEST_BYTES_MAX:,}. Nothing was written. Use larger chunks."
        )
    return draft


def _rows(dtype: np.dtype[np.void], rows: Sequence[tuple[Any, ...]]) -> bytes:
    return np.array(list(rows), dtype).tobytes() if rows else b""


# ---- reading ---------------------------------------------------------------


class _Broken(Exception):
    """A rule of the format that does not hold."""


class _Reader:
    """Takes tables off the front of a manifest; never more than there is."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def bytes(self, length: int, what: str) -> bytes:
        if length > len(self.raw) - self.at:
            raise _Broken(f"{what} would take {length:,} bytes, and {len(self.raw) - self.at:,} are left")
        self.at += length
        return self.raw[self.at - length : self.at]

    def rows(self, dtype: np.dtype[Any], count: int, what: str) -> NDArray[Any]:
        return np.frombuffer(self.bytes(count * dtype.itemsize, what), dtype)


def decode(raw: bytes, superblock: Superblock, *, path: str) -> MemberManifest:
    """The facts in a manifest, after its digest was compared. Raises CorruptCheckpoint (region "manifest")."""
    try:
        if manifest_digest(raw, superblock.uuid) != superblock.manifest_digest:
            raise _Broken("its checksum does not fit")
        return _decode(_Reader(raw), superblock)
    except (_Broken, OverflowError, UnicodeDecodeError) as e:
        raise CorruptCheckpoint(
            f"{path}: the manifest is damaged: {e}. Another member may have a whole one.",
            path=path,
            region="manifest",
            offset=superblock.manifest_offset,
        ) from None


def _require(holds: object, problem: str) -> None:
    if not holds:
        raise _Broken(problem)


def _decode(reader: _Reader, superblock: Superblock) -> MemberManifest:
    head = reader.rows(HEAD, 1, "the head")[0]
    number = {name: int(head[name]) for name in HEAD.names or () if name not in ("magic", "uuid")}
    shape = superblock.shape
    _require(bytes(reader.raw[:8]) == _MAGIC, "it does not begin as one")
    _require(head["uuid"].tobytes() == superblock.uuid, "it belongs to another generation")
    _require(
        (number["members"], number["k"], number["m"], number["chunk_bytes"], number["zero"])
        == (superblock.members, shape.data, shape.checks, superblock.chunk_bytes, 0),
        "its head disagrees with the superblock",
    )
    _require(number["data_bytes"] <= _INT64_MAX, "its data would be too long")
    chunks = -(-number["data_bytes"] // superblock.chunk_bytes)
    _require(number["chunks"] == chunks, f"{number['chunks']:,} chunks do not fit its data")
    _require(number["groups"] == -(-chunks // shape.data), "the number of groups does not fit")
    has_graph = number["graph_bytes"] > 0
    _require(
        has_graph == (number["graph_length"] > 0) and number["graph_bytes"] <= GRAPH_BYTES_MAX,
        "the length of its graph is not possible",
    )

    drives = reader.rows(DRIVE, number["members"], "the drives")
    locations = reader.rows(LOCATION, number["locations"], "the locations")
    storages = reader.rows(STORAGE, number["storages"], "the storages")
    tensors = reader.rows(TENSOR, number["tensors"], "the tensors")
    ties = reader.rows(TIE, number["ties"], "the ties")
    group_sizes = reader.rows(np.dtype("<u4"), number["groups"], "the groups")
    rows = reader.rows(BLOCK, chunks + number["groups"] * shape.checks, "the blocks")
    dimensions = reader.rows(np.dtype("<u8"), number["dimensions"], "the dimensions")
    strings = _Reader(reader.bytes(number["strings_length"], "the strings"))
    graph = reader.bytes(number["graph_length"], "the graph")
    _require(reader.at == len(reader.raw), "it does not end where it should")

    paths = [strings.bytes(int(row["path_length"]), "a path") for row in drives]
    _require(all(len(path) <= _PATH_BYTES_MAX for path in paths), "a path is too long")
    table = _table(number["data_bytes"], locations, storages, tensors, dimensions, strings)
    pairs = {}
    known = {name for name, named in zip(table.names, table.named.tolist(), strict=True) if named}
    for row in ties:
        other = strings.bytes(int(row["name_length"]), "a name").decode("utf-8")
        kept = strings.bytes(int(row["kept_length"]), "a name").decode("utf-8")
        _require(kept in known and other not in known and other not in pairs, "a tied name leads nowhere")
        pairs[other] = kept
    _require(strings.at == len(strings.raw), "its strings do not end where they should")
    if not has_graph:
        _require(
            table.named.all() and not pairs and not any(map(_is_ours, table.names)),
            "a storage without a name cannot be had without a graph",
        )
    blocks = _blocks(rows, group_sizes, number, shape, superblock)
    digests = rows["digest"].tobytes()
    return MemberManifest(
        version=MEMBER_VERSION,
        uuid=superblock.uuid,
        sequence=superblock.sequence,
        chunk_bytes=superblock.chunk_bytes,
        table=table,
        ties=pairs,
        graph=graph if has_graph else None,
        graph_bytes=number["graph_bytes"] if has_graph else None,
        graph_entry=False,
        digests=digests[: DIGEST_BYTES * chunks],
        data_offset=0,
        foreign=False,
        metadata={},
        blocks=blocks,
        check_digests=digests[DIGEST_BYTES * chunks :],
        drives=tuple((row["uuid"].tobytes(), path) for row, path in zip(drives, paths, strict=True)),
    )


def _is_ours(name: str) -> bool:
    return name.startswith("__striate__.")


def _table(
    data_bytes: int,
    locations: NDArray[Any],
    storages: NDArray[Any],
    tensors: NDArray[Any],
    dimensions: NDArray[Any],
    strings: _Reader,
) -> Table:
    count = len(storages)
    runs = [
        (strings.bytes(int(row["name_length"]), "a location").decode("utf-8"), int(row["count"]))
        for row in locations
    ]
    _require(all(run for _, run in runs), "a location has no storage")
    _require(sum(run for _, run in runs) == count, "its locations do not cover the storages")
    offsets, lengths = storages["offset"], storages["length"]
    _require(not count or int(offsets.max()) <= data_bytes, "a storage begins past the data")
    _require(not count or int(lengths.max()) <= data_bytes, "a storage is longer than the data")
    order = np.lexsort((lengths, offsets))
    ends = (offsets + lengths)[order]
    begins = np.concatenate([np.zeros(1, np.uint64), ends[:-1]]) if count else ends
    _require(np.array_equal(offsets[order], begins), "its storages leave gaps, or overlap")
    _require((int(ends[-1]) if count else 0) == data_bytes, "its storages do not cover the data")
    _require((storages["named"] <= 1).all(), "a storage is neither named nor raw")
    _require((storages["dtype"] < len(_DTYPES)).all(), "a dtype is not known")
    _require(
        int(storages["ndim"].sum(dtype=np.int64)) + int(tensors["ndim"].sum(dtype=np.int64))
        == len(dimensions),
        "its dimensions do not fit",
    )
    sizes = dimensions.tolist()
    shapes, at = [], 0
    for ndim in storages["ndim"].tolist():
        shapes.append(tuple(sizes[at : at + ndim]))
        at += ndim
    names = _texts(strings, storages["name_length"])
    _require(len(set(names)) == count, "two storages have one name")
    dtypes = [_DTYPES[code] for code in storages["dtype"].tolist()]
    named = storages["named"].astype(np.bool_)
    _check_storages(names, dtypes, shapes, lengths.tolist(), named.tolist())
    return Table(
        names=names,
        dtypes=dtypes,
        shapes=shapes,
        offsets=offsets.astype(np.int64),
        lengths=lengths.astype(np.int64),
        named=named,
        locations=runs,
        tensors=_plain_tensors(tensors, sizes[at:], lengths, named),
        data_bytes=data_bytes,
    )


def _texts(strings: _Reader, lengths: NDArray[Any]) -> list[str]:
    total = int(lengths.sum(dtype=np.int64))
    raw = strings.bytes(total, "the names")
    stops = np.cumsum(lengths, dtype=np.int64).tolist()
    found, start = [], 0
    for stop in stops:
        found.append(raw[start:stop].decode("utf-8"))
        start = stop
    return found


def _check_storages(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    named: Sequence[bool],
) -> None:
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    for n, (name, dtype, shape, length, is_named) in enumerate(
        zip(names, dtypes, shapes, lengths, named, strict=True)
    ):
        kind = (dtype, shape)
        if kind not in kinds:
            kinds[kind] = plain_bytes(dtype, shape)
        _require(kinds[kind] == length, f"storage {n} has {length:,} bytes and a shape of {kinds[kind]:,}")
        if not is_named:
            _require(
                name == f"__striate__.s.{n}" and dtype == _RAW_DTYPE and len(shape) == 1,
                f"raw storage {n} is not one row of bytes",
            )
        elif _is_ours(name):
            _require(name == f"__striate__.t.{n}", f"storage {n} has a name that is not its own")
        _require(name != "__metadata__", "a storage is called __metadata__")


def _plain_tensors(
    tensors: NDArray[Any], sizes: Sequence[int], lengths: NDArray[Any], named: NDArray[np.bool_]
) -> dict[int, Plain]:
    found: dict[int, Plain] = {}
    at, last = 0, -1
    for row in tensors.tolist():
        index, ndim, code = row[0], row[1], row[2]
        _require(last < index < len(lengths), "a tensor belongs to no storage")
        _require(code < len(_DTYPES) and not named[index], "a tensor is not of a raw storage")
        plain = Plain(_DTYPES[code], tuple(sizes[at : at + ndim]))
        _require(
            plain_bytes(plain.dtype, plain.shape) == int(lengths[index]),
            "a tensor is not as long as its storage",
        )
        found[index] = plain
        at, last = at + ndim, index
    return found


def _blocks(
    rows: NDArray[Any],
    group_sizes: NDArray[Any],
    number: dict[str, int],
    shape: Shape,
    superblock: Superblock,
) -> Blocks:
    chunks, k, m = number["chunks"], shape.data, shape.checks
    offset, length, member = rows["offset"], rows["length"], rows["member"]
    sizes = np.full(len(group_sizes), k, np.uint32)
    if chunks:
        sizes[-1] = chunks - (len(sizes) - 1) * k
    _require(np.array_equal(group_sizes, sizes), "a group has another number of blocks than it should")
    _require(
        not rows["stored"].any() and not rows["zero"].any(), "a block is stored in a way that is not known"
    )
    _require((member < superblock.members).all(), "a block lies in a member that there is not")
    _require(not (offset % ALIGN).any(), "a block does not begin at a multiple of 4096")
    _require(not len(offset) or int(offset.min()) >= SUPERBLOCK_BYTES, "a block overlaps the superblock")
    _require(not len(offset) or int(offset.max()) < 1 << 62, "a block lies too far out")
    expected = np.full(chunks, superblock.chunk_bytes, np.uint64)
    if chunks:
        expected[-1] = number["data_bytes"] - (chunks - 1) * superblock.chunk_bytes
    _require(np.array_equal(length[:chunks], expected), "a block is not as long as its chunk")
    # Only the last chunk is shorter, so the first of a group is the longest.
    longest = np.repeat(expected[::k], m)
    _require(np.array_equal(length[chunks:], longest), "a check block is not as long as its group")

    group = np.concatenate([np.arange(chunks) // k, np.repeat(np.arange(len(sizes)), m)])
    pairs = np.sort(group * 256 + member.astype(np.int64))  # np.unique hashes, at half a second a million
    _require((np.diff(pairs) > 0).all(), "two blocks of a group lie in one member")
    order = np.lexsort((offset, member))
    ends = -(-(offset + length).astype(np.int64) // ALIGN) * ALIGN
    same = member[order][1:] == member[order][:-1]
    _require(not (same & (offset[order][1:].astype(np.int64) < ends[order][:-1])).any(), "two blocks overlap")
    member_bytes = np.full(superblock.members, SUPERBLOCK_BYTES, np.uint64)
    np.maximum.at(member_bytes, member, ends.astype(np.uint64))
    _require(
        int(member_bytes[superblock.member]) <= superblock.manifest_offset, "a block overlaps the manifest"
    )
    return Blocks(shape, offset, length, member, sizes, member_bytes)
