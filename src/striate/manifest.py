"""The manifest: the header of a checkpoint as bytes, and those bytes as facts again.

Pure: nothing is read or written here. docs/format.md is the specification;
rule numbers in comments are those of its "What a reader must reject".
"""

from __future__ import annotations

import base64
import binascii
import gc
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from json.encoder import encode_basestring as _quoted
from typing import Any, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from striate.errors import CorruptCheckpoint, FormatError, UnsupportedFormat
from striate.graph import Plain
from striate.image import GRAPH_NAME, Table

__all__ = [
    "ALIGN",
    "CHUNK_BYTES_DEFAULT",
    "CHUNK_BYTES_MAX",
    "CHUNK_BYTES_MIN",
    "DIGEST_BYTES",
    "DTYPE_BYTES",
    "GRAPH_BYTES_MAX",
    "GRAPH_TEXT_MAX",
    "HEADER_BYTES_MAX",
    "HEADER_BYTES_WRITE_MAX",
    "VERSION",
    "Manifest",
    "check_shape",
    "chunk_seed",
    "decode",
    "encode",
    "header_length",
    "in_utf8",
    "pack_graph",
    "seal",
    "unpack_graph",
]

VERSION = 1
ALIGN = 4096  # bytes
HEADER_BYTES_MAX = 100_000_000  # what safetensors takes
HEADER_BYTES_WRITE_MAX = 90_000_000
CHUNK_BYTES_MIN = 4096
CHUNK_BYTES_DEFAULT = 4 << 20
CHUNK_BYTES_MAX = 64 << 20
DIGEST_BYTES = 16
GRAPH_BYTES_MAX = 1 << 30
GRAPH_TEXT_MAX = 16 << 20

DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "U32": 4,
    "I32": 4,
    "U64": 8,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
}

# Known to safetensors, with elements that do not fill whole bytes.
_PACKED_DTYPES = ("F4", "F6_E2M3", "F6_E3M2")

_INT64_MAX = (1 << 63) - 1
_CHECKSUM_DIGITS = 2 * DIGEST_BYTES
_NO_CHECKSUM = b"0" * _CHECKSUM_DIGITS
# The keys of ours precede the tied names, so the first occurrence is the key
# itself: docs/format.md, "The header's checksum".
_CHECKSUM_KEY = b'"striate.checksum":"'
_CHUNKS_KEY = b'"striate.chunks":"'
_OURS = "striate."

# What marks other people's files, to word a refusal; none can be a length that we take.
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80\x02": "a pickle, as old versions of torch.save write",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"STRIATE\x00": "one member of a striate checkpoint on several drives",
}


@dataclass(frozen=True, eq=False)
class Manifest:
    """What the header of a checkpoint says.

    ``data_offset``: bytes from the start of the file to the data. ``digests``: 16 bytes for each chunk.
    ``ties``: other name -> name of the entry that has the bytes. ``graph``: the zlib bytes from the metadata,
    or None where there are none or (``graph_entry``) they stand in the data at ``table.graph``;
    ``graph_bytes``: their length when decompressed. ``foreign``: a safetensors file without anything of ours
    (or read as one): version 0, no digests, every entry named. ``metadata``: all of ``__metadata__``, as it
    stands.
    """

    version: int
    uuid: bytes
    sequence: int
    chunk_bytes: int
    table: Table
    ties: dict[str, str]
    graph: bytes | None
    graph_bytes: int | None
    graph_entry: bool
    digests: bytes
    data_offset: int
    foreign: bool
    metadata: dict[str, str]

    @property
    def flat(self) -> bool:
        """Is there no graph: just a dict of names to tensors?"""
        return self.graph is None and not self.graph_entry

    @property
    def file_bytes(self) -> int:
        """The length of the whole file that the header implies."""
        return self.data_offset + self.table.data_bytes


def chunk_seed(uuid: bytes, chunk: int) -> int:
    """The seed of a chunk's XXH3-128, which binds it to its generation and its place."""
    return xxhash.xxh3_64_intdigest(uuid + chunk.to_bytes(8, "little"))


def chunks_count(data_bytes: int, chunk_bytes: int) -> int:
    """How many chunks the data has; the last one may be shorter."""
    return -(-data_bytes // chunk_bytes)


# ---- writing ----------------------------------------------------------------


def pack_graph(pickle: bytes) -> tuple[bytes, bool]:
    """Compresses a graph: (zlib bytes, are they too long for the metadata and must be an entry of the data).

    Raises FormatError for a graph of more than GRAPH_BYTES_MAX bytes.
    """
    if len(pickle) > GRAPH_BYTES_MAX:
        raise FormatError(
            f"save refused: the object without its tensors is a pickle of {len(pickle):,} bytes, and the "
            f"format allows {GRAPH_BYTES_MAX:,}. Nothing was written. Keep large strings, lists of numbers "
            "and the like in tensors, or in files of their own."
        )
    # Level 1: the graph of 133,000 tensors (2.7 MB) becomes 487 kB in 10 ms; at
    # level 6 it is 485 kB in 67 ms, and a save waits for this.
    stored = zlib.compress(pickle, 1)
    return stored, _base64_length(len(stored)) > GRAPH_TEXT_MAX


def encode(
    table: Table,
    *,
    uuid: bytes,
    sequence: int,
    chunk_bytes: int,
    ties: Mapping[str, str],
    graph: bytes | None,
    graph_bytes: int | None,
    graph_entry: bool,
    digests: bytes | None,
) -> bytes:
    """The whole header region: 8 bytes of length, JSON, spaces up to a multiple of 4096.

    Without ``digests`` it has its final length, zero digests and a zero checksum, for ``seal`` to fill in.
    ``graph`` is compressed (``pack_graph``), ``graph_bytes`` its length before that. Raises FormatError when
    the header would pass HEADER_BYTES_WRITE_MAX.
    """
    assert len(uuid) == 16 and 0 <= sequence < 1 << 64
    assert CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX and chunk_bytes & (chunk_bytes - 1) == 0
    assert not (graph is not None and graph_entry) and graph_entry == (table.graph is not None)
    assert (graph_bytes is not None) == (graph is not None or graph_entry)
    digests_length = DIGEST_BYTES * chunks_count(table.data_bytes, chunk_bytes)
    assert digests is None or len(digests) == digests_length

    pairs = {
        "format": "pt",
        "striate.version": str(VERSION),
        "striate.uuid": uuid.hex(),
        "striate.sequence": f"{sequence:020d}",
        "striate.chunk_bytes": str(chunk_bytes),
        "striate.storages": _storages_text(table),
    }
    if graph is not None:
        pairs["striate.graph"] = base64.b64encode(graph).decode("ascii")
    if graph_entry:
        pairs["striate.graph_entry"] = "1"
    if graph_bytes is not None:
        pairs["striate.graph_bytes"] = str(graph_bytes)
    pairs["striate.checksum"] = "0" * _CHECKSUM_DIGITS
    pairs["striate.chunks"] = base64.b64encode(bytes(digests_length)).decode("ascii")
    for other, kept in ties.items():
        # Other tools lose these names; the graph has them all.
        if other != "format" and not other.startswith(_OURS) and in_utf8(other):
            pairs[other] = kept

    metadata = ",".join(f"{_quoted(key)}:{_quoted(value)}" for key, value in pairs.items())
    text = "".join(('{"__metadata__":{', metadata, "}", *_entries_text(table), "}")).encode("utf-8")
    length = -(-(8 + len(text)) // ALIGN) * ALIGN - 8
    if length > HEADER_BYTES_WRITE_MAX:
        raise FormatError(
            f"save refused: the header would take {length:,} bytes for {len(table):,} tensors, and a "
            f"safetensors header may have {HEADER_BYTES_WRITE_MAX:,}. Nothing was written. Save the object "
            "in several files (the model in one, the optimizer in another), to a volume (striate.Volume, of "
            "one drive if need be: its files have no such limit), or keep small tensors as views of a few large ones."
        )
    header = bytearray(length.to_bytes(8, "little") + text.ljust(length))
    if digests is not None:
        seal(header, digests)
    return bytes(header)


def seal(header: bytearray, digests: bytes) -> None:
    """Puts the digests of all chunks and then the header's own checksum into an encoded header, in place."""
    text = base64.b64encode(digests)
    at = header.index(_CHUNKS_KEY) + len(_CHUNKS_KEY)
    assert header[at + len(text) : at + len(text) + 1] == b'"', "as many digests as the header has space for"
    header[at : at + len(text)] = text
    at = header.index(_CHECKSUM_KEY) + len(_CHECKSUM_KEY)
    header[at : at + _CHECKSUM_DIGITS] = _NO_CHECKSUM
    header[at : at + _CHECKSUM_DIGITS] = xxhash.xxh3_128_hexdigest(header).encode("ascii")


def _base64_length(length: int) -> int:
    return 4 * -(-length // 3)


def in_utf8(text: str) -> bool:
    """Can the text be stored? Lone surrogates cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _storages_text(table: Table) -> str:
    tensors = {str(n): [plain.dtype, list(plain.shape)] for n, plain in table.tensors.items()}
    return json.dumps(
        {"locations": table.locations, "tensors": tensors}, separators=(",", ":"), ensure_ascii=False
    )


def _entries_text(table: Table) -> Iterator[str]:
    # A million entries have a few hundred different kinds.
    kinds: dict[tuple[str, tuple[int, ...]], str] = {}
    for plain in table.tensors.values():
        check_shape(plain.dtype, plain.shape)
    for name, dtype, shape, start, end in zip(
        table.names,
        table.dtypes,
        table.shapes,
        table.offsets.tolist(),
        (table.offsets + table.lengths).tolist(),
        strict=True,
    ):
        kind = kinds.get((dtype, shape))
        if kind is None:
            check_shape(dtype, shape)
            dimensions = ",".join(map(str, shape))
            kind = kinds[dtype, shape] = f':{{"dtype":"{dtype}","shape":[{dimensions}],"data_offsets":['
        yield f",{_quoted(name)}{kind}{start},{end}]}}"
    if table.graph is not None:
        start, length = table.graph
        yield f',"{GRAPH_NAME}":{{"dtype":"U8","shape":[{length}],"data_offsets":[{start},{start + length}]}}'


def check_shape(dtype: str, shape: tuple[int, ...]) -> None:
    """Raises FormatError for a shape that no reader could take."""
    # torch makes some tensors without elements that no reader could take.
    try:
        plain_bytes(dtype, shape)
    except OverflowError as e:
        raise FormatError(
            f"save refused: {e}, even if it has no elements. Nothing was written. Leave that tensor out."
        ) from None


# ---- reading ----------------------------------------------------------------


class _Refused(Exception):
    """A rule of the format that does not hold; ``decode`` says of which file, and what to do."""


def header_length(prefix8: bytes, *, file_bytes: int | None, path: str = "") -> int:
    """The length of the header region, 8 + N, from the first 8 bytes of the file.

    ``file_bytes`` is the length of the file, None where it is not known (a stream). Raises FormatError.
    """
    where = path or "the file"
    if not prefix8:
        raise FormatError(
            f"{where} is empty: it is not a checkpoint. Load another one, or restore it from a copy."
        )
    for magic, what in _OTHER_FORMATS.items():
        if prefix8.startswith(magic):
            if magic.startswith(b"STRIATE"):
                raise FormatError(f"{where} is {what}. It cannot be read from a stream: load it by its path.")
            raise FormatError(
                f"{where} is {what}, not a safetensors file. Load it with the tool it belongs to."
            )
    if len(prefix8) < 8:
        raise FormatError(
            f"{where} has {len(prefix8)} bytes, and a safetensors file at least 10: it is foreign, or was "
            "cut short. Load another checkpoint, or restore it from a copy."
        )
    length = int.from_bytes(prefix8[:8], "little")
    if length == 0:
        raise FormatError(
            f"{where} begins with zeros: its header was never written, so a save into it did not finish. "
            "Load an earlier checkpoint."
        )
    if length < 2 or length > HEADER_BYTES_MAX:
        raise FormatError(
            f"{where} is not a safetensors file: its first 8 bytes, as the length of a header, are "
            f"{length:,}, and 2 to {HEADER_BYTES_MAX:,} is possible. Load it with the tool it belongs to, "
            "or, if it was a checkpoint, restore it from a copy."
        )
    if file_bytes is not None and 8 + length > file_bytes:
        raise FormatError(
            f"{where} is cut short, or not a safetensors file: its header should end at byte "
            f"{8 + length:,}, and the file has {file_bytes:,}. Load another checkpoint, or restore it from "
            "a copy."
        )
    return 8 + length


def decode(header: bytes, *, file_bytes: int | None, verify: bool = True, path: str = "") -> Manifest:
    """The facts in a header region (the ``header_length`` first bytes of the file).

    ``file_bytes`` is the length of the file, None for a stream. ``verify=False`` reads a file of ours whose
    checksum does not fit as a foreign one. Raises FormatError, UnsupportedFormat (newer), CorruptCheckpoint
    (damaged, cut short).
    """
    where = path or "the file"
    if len(header) < 8 or len(header) != header_length(header[:8], file_bytes=file_bytes, path=path):
        raise FormatError(
            f"{where} ended inside its header. Load another checkpoint, or restore it from a copy."
        )
    sealed = _checksum_fits(header)
    try:
        with _no_collector():
            entries = _Parser()
            entries.parse(header)
            ours = any(key.startswith(_OURS) for key in entries.metadata)
            if ours and not sealed and verify:
                raise _damaged_header(header, path)
            if ours and sealed:
                return _ours(header, entries, file_bytes, path)
            return _foreign(header, entries, file_bytes)
    except _Refused as e:
        # One flipped bit may have taken the very keys that make a file ours.
        if verify and not sealed and b'"' + _OURS.encode() in header:
            raise _damaged_header(header, path) from None
        raise FormatError(
            f"{where} cannot be read as safetensors: {e}. It is damaged, or was made by a faulty or hostile "
            "program. Load another checkpoint, or restore it from a copy."
        ) from None


def unpack_graph(stored: bytes, graph_bytes: int) -> bytes:
    """Decompresses a graph, never to more than ``graph_bytes``. Raises CorruptCheckpoint (region "graph")."""
    problem = ""
    if not 0 < graph_bytes <= GRAPH_BYTES_MAX:
        problem = f"a graph of {graph_bytes:,} bytes is not possible"
    else:
        stream = zlib.decompressobj()
        try:
            # With one byte to spare the end of the stream is seen in this call.
            pickle = stream.decompress(stored, graph_bytes + 1)
        except zlib.error as e:
            problem = f"zlib: {e}"
        else:
            if len(pickle) == graph_bytes and stream.eof and not stream.unused_data:
                return pickle
            problem = f"it does not have the {graph_bytes:,} bytes that the header declares"
    raise CorruptCheckpoint(
        f"the graph of the checkpoint cannot be unpacked: {problem}. Nothing was loaded. Its tensors can "
        "still be read by name (striate.load_tensors), or load an earlier checkpoint.",
        region="graph",
    )


def _checksum_fits(header: bytes) -> bool:
    at = header.find(_CHECKSUM_KEY)
    if at < 0:
        return False
    at += len(_CHECKSUM_KEY)
    view = memoryview(header)
    digits = header[at : at + _CHECKSUM_DIGITS]
    state = xxhash.xxh3_128(view[:at])
    state.update(_NO_CHECKSUM)
    state.update(view[at + _CHECKSUM_DIGITS :])
    return len(digits) == _CHECKSUM_DIGITS and state.hexdigest().encode("ascii") == digits


def _damaged_header(header: bytes, path: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{path or 'the checkpoint'}: the checksum of the header (bytes 0 to {len(header)}) does not fit: "
        "the file is damaged, or was rewritten by another tool. Nothing was loaded. Load an earlier "
        "checkpoint or restore this one from a copy; if another tool wrote it, verify=False reads it as "
        "plain safetensors.",
        path=path,
        region="header",
        offset=0,
    )


class _Parser:
    """The header's JSON as metadata and columns, without three million containers for a million entries."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.metadata: dict[str, str] = {}
        self.dtypes: list[Any] = []
        self.shapes: list[tuple[Any, ...]] = []
        self.offsets: list[Any] = []  # begin, end, begin, end, ...

    def parse(self, header: bytes) -> None:
        """Rules 2 and 3, and the outer form of 4."""
        if header[8:9] != b"{":
            raise _Refused("the header does not begin with {")
        try:
            text = header[8:].decode("utf-8")
        except UnicodeDecodeError as e:
            raise _Refused(f"the header is not UTF-8 at byte {8 + e.start}") from None
        try:
            parsed = json.loads(
                text, object_pairs_hook=self._object, parse_constant=_no_constant, parse_int=_integer_parser()
            )
        except json.JSONDecodeError as e:
            raise _Refused(f"the header is not JSON at character {8 + e.pos}: {e.msg}") from None
        except RecursionError:
            raise _Refused("the header's JSON is nested too deeply") from None
        except ValueError:
            # Python's own limit on the digits of an integer.
            raise _Refused("a number in the header is too long") from None
        if type(parsed) is not dict:
            raise _Refused("the header is not an object of entries")
        metadata = parsed.pop("__metadata__", {})
        if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
            raise _Refused("__metadata__ is not an object of strings")
        for name, value in parsed.items():
            if value is not _ENTRY:
                raise _Refused(f"entry {_short(name)} is not dtype, shape and data_offsets")
        if len(parsed) != len(self.dtypes):
            raise _Refused("there is an entry within another member")
        self.metadata = metadata
        self.names = list(parsed)

    def _object(self, pairs: list[tuple[str, Any]]) -> Any:
        # Called for each object when it ends, so entries come in the order of
        # the text. Each of them is in the columns then, and only a mark remains.
        if len(pairs) == 3:
            (key0, dtype), (key1, shape), (key2, offsets) = pairs
            if key0 != "dtype" or key1 != "shape" or key2 != "data_offsets":
                members = dict(pairs)
                dtype, shape, offsets = map(members.get, ("dtype", "shape", "data_offsets"))
            if type(shape) is list and type(offsets) is list and len(offsets) == 2:
                self.dtypes.append(dtype)
                self.shapes.append(tuple(shape))
                self.offsets += offsets
                return _ENTRY
        found = dict(pairs)
        if len(found) != len(pairs):
            raise _Refused("the header names a member twice")
        return found


_ENTRY = object()


def _no_constant(text: str) -> NoReturn:
    raise _Refused(f"the header has {text}")


def _integer_parser() -> Callable[[str], int] | None:
    # Before 3.10.7, or with the limit lifted, int() of a long text takes time
    # that grows with its square.
    limited = getattr(sys, "get_int_max_str_digits", lambda: 0)() > 0
    return None if limited else _short_integer


def _short_integer(text: str) -> int:
    if len(text) > 4300:
        raise ValueError
    return int(text)


@contextmanager
def _no_collector() -> Iterator[None]:
    # A header becomes containers by the million and no cycle: each time the
    # collector walks them all is wasted, and together that is three quarters of the time.
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


@dataclass(frozen=True)
class _Columns:
    """The entries as columns, in the order of the JSON. Rules 4 to 6 hold."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    data_bytes: int


def _columns(entries: _Parser) -> _Columns:
    names, dtypes, shapes = entries.names, entries.dtypes, entries.shapes
    if not _are_sizes(entries.offsets):
        n = next(at for at, value in enumerate(entries.offsets) if not _are_sizes([value])) // 2
        raise _Refused(f"the data_offsets of entry {_short(names[n])} are not integers from 0 to 2^63 - 1")
    spans = np.array(entries.offsets, np.int64).reshape(-1, 2)
    starts, ends = spans[:, 0].copy(), spans[:, 1].copy()
    lengths = ends - starts

    if set(map(type, dtypes)) - {str} or set(dtypes) - DTYPE_BYTES.keys():
        n = next(n for n, dtype in enumerate(dtypes) if type(dtype) is not str or dtype not in DTYPE_BYTES)
        why = "packs several elements into a byte" if dtypes[n] in _PACKED_DTYPES else "is not known here"
        raise _Refused(f"the dtype of entry {_short(names[n])}, {_short(str(dtypes[n]))}, {why}")
    sizes = _sizes(names, dtypes, shapes)
    wrong = np.flatnonzero(sizes != lengths)
    if len(wrong):
        n = int(wrong[0])
        raise _Refused(
            f"entry {_short(names[n])}, {dtypes[n]} of shape {list(shapes[n])[:8]}, takes {sizes[n]:,} "
            f"bytes, and its data_offsets are {starts[n]:,} to {ends[n]:,}"
        )

    # By begin, then by end: an entry of size 0 may stand between two others.
    order = np.lexsort((ends, starts))
    reached = np.concatenate((np.zeros(1, np.int64), ends[order]))
    broken = np.flatnonzero(starts[order] != reached[:-1])
    if len(broken):
        n, at = int(order[broken[0]]), int(reached[broken[0]])
        what = "overlaps the one before it" if starts[n] < at else "leaves a gap before it"
        raise _Refused(f"entry {_short(names[n])}, which begins at {starts[n]:,}, {what} (it ends at {at:,})")
    return _Columns(names, dtypes, shapes, starts, lengths, int(reached[-1]))


def _are_sizes(values: Sequence[Any]) -> bool:
    # Not isinstance: a bool is an int there. numpy would take floats as well.
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= _INT64_MAX)


def _sizes(names: list[str], dtypes: list[str], shapes: list[tuple[int, ...]]) -> NDArray[np.int64]:
    """The bytes that each entry's dtype and shape take."""
    if not _are_sizes(list(chain.from_iterable(shapes))):
        n = next(n for n, shape in enumerate(shapes) if not _are_sizes(shape))
        raise _Refused(f"the shape of entry {_short(names[n])} is not of integers from 0 to 2^63 - 1")
    try:
        # Few shapes are different from all others, so each is multiplied once.
        bytes_of = {kind: plain_bytes(*kind) for kind in set(zip(dtypes, shapes, strict=True))}
    except OverflowError as e:
        raise _Refused(str(e)) from None
    return np.fromiter(map(bytes_of.__getitem__, zip(dtypes, shapes, strict=True)), np.int64, len(names))


def plain_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of a known dtype. Raises OverflowError if 63 bits cannot count them, 0 taken as 1."""
    total = DTYPE_BYTES[dtype]
    for dimension in shape:
        # The product is looked at after each step, so hostile ones stay short.
        total *= dimension or 1
        if total > _INT64_MAX:
            raise OverflowError(f"shape {list(shape)[:8]} is of more than 2^63 - 1 bytes")
    return 0 if 0 in shape else total


def _foreign(header: bytes, entries: _Parser, file_bytes: int | None) -> Manifest:
    columns = _columns(entries)
    count = len(columns.names)
    wanted = len(header) + columns.data_bytes
    if file_bytes is not None and file_bytes != wanted:
        raise _Refused(f"it should have {wanted:,} bytes and has {file_bytes:,}")
    table = Table(
        names=columns.names,
        dtypes=columns.dtypes,
        shapes=columns.shapes,
        offsets=columns.offsets,
        lengths=columns.lengths,
        named=np.ones(count, np.bool_),
        locations=[("cpu", count)] if count else [],
        data_bytes=columns.data_bytes,
    )
    return Manifest(
        version=0,
        uuid=b"",
        sequence=0,
        chunk_bytes=CHUNK_BYTES_DEFAULT,
        table=table,
        ties=_ties(entries.metadata, table),
        graph=None,
        graph_bytes=None,
        graph_entry=False,
        digests=b"",
        data_offset=len(header),
        foreign=True,
        metadata=entries.metadata,
    )


def _ties(metadata: dict[str, str], table: Table) -> dict[str, str]:
    # safetensors' save_model writes them among whatever else a tool puts here:
    # in a foreign file only a value that is a name, under a key that is none, is a tie.
    names = set(table.names)
    return {key: value for key, value in metadata.items() if value in names and key not in names}


def _ours(header: bytes, entries: _Parser, file_bytes: int | None, path: str) -> Manifest:
    metadata = entries.metadata
    # Rule 7 comes before all others: of a newer file nothing else is known.
    version = _decimal(metadata, "striate.version", most=_INT64_MAX)
    if version > VERSION:
        raise UnsupportedFormat(
            f"{path or 'the checkpoint'} has version {version} of the format, and this striate reads "
            f"version {VERSION}. The file is not damaged. Update striate, then load it."
        )
    if version < 1 or len(header) % ALIGN:
        raise _Refused(
            "version 0 does not exist" if version < 1 else f"its header does not end at a multiple of {ALIGN}"
        )
    uuid = bytes.fromhex(_matching(metadata, "striate.uuid", r"[0-9a-f]{32}"))
    sequence = int(_matching(metadata, "striate.sequence", r"[0-9]{20}"))
    chunk_bytes = _decimal(metadata, "striate.chunk_bytes", most=CHUNK_BYTES_MAX)
    if sequence >= 1 << 64 or chunk_bytes < CHUNK_BYTES_MIN or chunk_bytes & (chunk_bytes - 1):
        raise _Refused("striate.sequence or striate.chunk_bytes is out of range")

    graph, graph_bytes, graph_entry = _graph(metadata)
    columns = _columns(entries)
    table = _table(columns, metadata, graph_entry)
    digests = _base64(metadata, "striate.chunks")
    if len(digests) != DIGEST_BYTES * chunks_count(table.data_bytes, chunk_bytes):
        raise _Refused("striate.chunks does not have one digest for each chunk")
    ties = {key: value for key, value in metadata.items() if key != "format" and not key.startswith(_OURS)}
    if ties and not set(ties.values()) <= {
        name for name, named in zip(table.names, table.named, strict=True) if named
    }:
        raise _Refused("a tied name leads to no entry")
    if graph is None and not graph_entry and not _is_flat(table, ties):
        raise _Refused("it has no graph, and is not a flat dict of tensors")
    wanted = len(header) + table.data_bytes
    if file_bytes is not None and file_bytes != wanted:
        raise _wrong_length(path, wanted, file_bytes)
    return Manifest(
        version=version,
        uuid=uuid,
        sequence=sequence,
        chunk_bytes=chunk_bytes,
        table=table,
        ties=ties,
        graph=graph,
        graph_bytes=graph_bytes,
        graph_entry=graph_entry,
        digests=digests,
        data_offset=len(header),
        foreign=False,
        metadata=metadata,
    )


def _wrong_length(path: str, wanted: int, found: int) -> CorruptCheckpoint:
    what = "is cut short" if found < wanted else "is too long"
    return CorruptCheckpoint(
        f"{path or 'the checkpoint'} {what}: {wanted:,} bytes were written and it has {found:,}. Nothing "
        "was loaded. Load an earlier checkpoint, or restore this file from a copy.",
        path=path,
        region="data",
        offset=min(wanted, found),
    )


def _value(metadata: dict[str, str], key: str) -> str:
    value = metadata.get(key)
    if value is None:
        raise _Refused(f"{key} is missing")
    return value


def _matching(metadata: dict[str, str], key: str, pattern: str) -> str:
    value = _value(metadata, key)
    if re.fullmatch(pattern, value) is None:
        raise _Refused(f"{key} is {_short(value)}")
    return value


def _decimal(metadata: dict[str, str], key: str, *, most: int) -> int:
    value = int(_matching(metadata, key, r"0|[1-9][0-9]{0,18}"))
    if value > most:
        raise _Refused(f"{key} is {value:,}, more than {most:,}")
    return value


def _base64(metadata: dict[str, str], key: str) -> bytes:
    try:
        return base64.b64decode(_value(metadata, key), validate=True)
    except (binascii.Error, ValueError):
        raise _Refused(f"{key} is not base64") from None


def _graph(metadata: dict[str, str]) -> tuple[bytes | None, int | None, bool]:
    inline, entry = "striate.graph" in metadata, "striate.graph_entry" in metadata
    if inline and entry:
        raise _Refused("the graph stands in two places")
    if not inline and not entry:
        return None, None, False
    if entry and metadata["striate.graph_entry"] != "1":
        raise _Refused("striate.graph_entry is not 1")
    graph_bytes = _decimal(metadata, "striate.graph_bytes", most=GRAPH_BYTES_MAX)
    if graph_bytes == 0:
        raise _Refused("striate.graph_bytes is 0")
    return (_base64(metadata, "striate.graph") if inline else None), graph_bytes, entry


def _table(columns: _Columns, metadata: dict[str, str], graph_entry: bool) -> Table:
    """The storage table: entries but for the graph's, and what ``striate.storages`` adds. Rules 9 and 10."""
    names, dtypes, shapes = columns.names, columns.dtypes, columns.shapes
    count = len(names) - graph_entry
    graph = None
    if graph_entry:
        if count < 0 or names[count] != GRAPH_NAME or dtypes[count] != "U8" or len(shapes[count]) != 1:
            raise _Refused(f"{GRAPH_NAME} is not the last entry, in U8")
        graph = (int(columns.offsets[count]), int(columns.lengths[count]))

    named = np.ones(count, np.bool_)
    for n in [n for n, name in enumerate(names[:count]) if name.startswith("__striate__.")]:
        name = names[n]
        if name == f"__striate__.s.{n}":
            named[n] = False
            if dtypes[n] != "U8" or len(shapes[n]) != 1:
                raise _Refused(f"the raw storage {name} is not bytes in one dimension")
        elif name != f"__striate__.t.{n}":
            raise _Refused(f"{_short(name)} is not a name for entry {n}")

    locations, tensors = _storages(_value(metadata, "striate.storages"))
    if sum(length for _, length in locations) != count:
        raise _Refused("the locations in striate.storages do not cover the table")
    for n, plain in tensors.items():
        if n >= count or named[n]:
            raise _Refused(f"striate.storages calls entry {n} a raw storage, and it is not")
        try:
            fits = plain_bytes(plain.dtype, plain.shape) == columns.lengths[n]
        except (KeyError, OverflowError):
            fits = False
        if not fits:
            raise _Refused(f"the tensor that raw storage {n} is in striate.storages has another length")
    return Table(
        names=names[:count],
        dtypes=dtypes[:count],
        shapes=shapes[:count],
        offsets=columns.offsets[:count],
        lengths=columns.lengths[:count],
        named=named,
        locations=locations,
        tensors=tensors,
        data_bytes=columns.data_bytes,
        graph=graph,
    )


def _storages(text: str) -> tuple[list[tuple[str, int]], dict[int, Plain]]:
    try:
        parsed = json.loads(text, parse_constant=_no_constant, parse_int=_integer_parser())
    except (ValueError, RecursionError):
        raise _Refused("striate.storages is not JSON") from None
    if type(parsed) is not dict or not parsed.keys() >= {"locations", "tensors"}:
        raise _Refused("striate.storages lacks a member")
    locations, tensors = parsed["locations"], parsed["tensors"]
    if type(locations) is not list or type(tensors) is not dict:
        raise _Refused("striate.storages has a member of the wrong type")
    for run in locations:
        if (
            type(run) is not list
            or len(run) != 2
            or type(run[0]) is not str
            or type(run[1]) is not int
            or run[1] < 1
        ):
            raise _Refused("a location in striate.storages is not a string and a count")
    found: dict[int, Plain] = {}
    for key, tensor in tensors.items():
        if re.fullmatch(r"0|[1-9][0-9]{0,18}", key) is None:
            raise _Refused(f"{_short(key)} in striate.storages is not a table index")
        if (
            type(tensor) is not list
            or len(tensor) != 2
            or type(tensor[0]) is not str
            or type(tensor[1]) is not list
        ):
            raise _Refused(f"tensor {key} in striate.storages is not a dtype and a shape")
        if not _are_sizes(tensor[1]):
            raise _Refused(
                f"the shape of tensor {key} in striate.storages is not of integers from 0 to 2^63 - 1"
            )
        found[int(key)] = Plain(tensor[0], tuple(tensor[1]))
    return [(location, length) for location, length in locations], found


def _is_flat(table: Table, ties: dict[str, str]) -> bool:
    return (
        not ties
        and bool(table.named.all())
        and not any(name.startswith("__striate__.") for name in table.names)
    )
