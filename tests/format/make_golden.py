"""Makes the golden files: ``python tests/format/make_golden.py [DIRECTORY]``.

A writer of its own, from docs/format.md and nothing of striate, so that a
change of the code cannot change them. A change of the format changes them, the
document and the rescue reader in one commit.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

GOLDEN = Path(__file__).parent / "golden"
UUID = bytes(range(16))

ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "I16": 2, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """``name`` None: raw, of ``nbytes``; ``dtype`` and ``shape`` are then those of the plain tensor it also is."""

    name: str | None
    dtype: str | None
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    location: str = "cpu"


@dataclass(frozen=True)
class Tensor:
    """Stands in a graph for a plain tensor."""

    n: int


@dataclass(frozen=True)
class Golden:
    storages: list[Storage]
    graph: Any = None  # None: flat
    graph_entry: bool = False
    ties: dict[str, str] = field(default_factory=dict)
    chunk_bytes: int = 4096
    sequence: int = 1


FILES: dict[str, Golden] = {
    "example": Golden(
        [Storage("w", "F32", (2, 2)), Storage(None, "BF16", (3,), 6)],
        graph={"w": Tensor(0), "v": Tensor(0), "x": Tensor(1)},
        ties={"v": "w"},
    ),
    "empty": Golden([]),
    # Every size class of the order, an empty one, a scalar, a text that JSON escapes, and three chunks.
    "flat": Golden(
        [
            Storage("odd", "U8", (3,)),
            Storage("none", "F32", (0, 7)),
            Storage("page", "BF16", (2, 1024)),
            Storage("scalar", "I64"),
            Storage('quote " and backslash \\ and \x00 and \u00e9', "I16", (5,)),
            Storage("", "BOOL", (2,)),
            Storage("long", "F16", (3000,)),
            Storage("double", "F64", (2, 2, 2)),
        ],
        sequence=(1 << 64) - 1,
    ),
    # The graph among the data; locations in runs; names that had to be replaced; all data in one chunk.
    "graph_entry": Golden(
        [
            Storage("a.0", "F32", (4,)),
            Storage("__striate__.t.1", "I32", (3,), location="cuda:0"),
            Storage(None, None, nbytes=48, location="cuda:0"),
            Storage("a.1", "I8", (1, 1)),
        ],
        graph={"a": [Tensor(0), Tensor(3)], (1, 2): Tensor(1)},
        graph_entry=True,
        chunk_bytes=1 << 26,
    ),
}


def data_of(n: int, length: int) -> bytes:
    """Bytes that repeat with a prime period, and differ from storage to storage: what is misplaced shows."""
    return bytes((7 * n + i) % 251 for i in range(length))


def length_of(storage: Storage) -> int:
    if storage.name is None:
        return storage.nbytes
    assert storage.dtype is not None
    length = ELEMENT_BYTES[storage.dtype]
    for dimension in storage.shape:
        length *= dimension
    return length


def pickled(graph: Any) -> bytes:
    class Pickler(pickle._Pickler):  # the one in Python: its bytes do not depend on the version
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", obj.n) if isinstance(obj, Tensor) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(graph)
    return buffer.getvalue()


def stored(graph: Any) -> bytes:
    """The graph in zlib's form without compression, which every zlib writes alike."""
    return zlib.compress(pickled(graph), 0)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def build(golden: Golden) -> bytes:
    """The whole file."""
    lengths = [length_of(storage) for storage in golden.storages]
    blocks = [data_of(n, length) for n, length in enumerate(lengths)]
    if golden.graph_entry:
        blocks.append(stored(golden.graph))
    offsets = {}
    data = b""
    for n in sorted(range(len(blocks)), key=lambda n: -(len(blocks[n]) & -len(blocks[n]) or 1 << 63)):
        offsets[n] = [len(data), len(data) + len(blocks[n])]
        data += blocks[n]

    locations: list[list[Any]] = []
    for storage in golden.storages:
        if locations and locations[-1][0] == storage.location:
            locations[-1][1] += 1
        else:
            locations.append([storage.location, 1])
    tensors = {
        str(n): [storage.dtype, list(storage.shape)]
        for n, storage in enumerate(golden.storages)
        if storage.name is None and storage.dtype is not None
    }
    metadata = {
        "format": "pt",
        "striate.version": "1",
        "striate.uuid": UUID.hex(),
        "striate.sequence": f"{golden.sequence:020}",
        "striate.chunk_bytes": str(golden.chunk_bytes),
        "striate.storages": compact({"locations": locations, "tensors": tensors}),
    }
    if golden.graph_entry:
        metadata["striate.graph_entry"] = "1"
    elif golden.graph is not None:
        metadata["striate.graph"] = base64.b64encode(stored(golden.graph)).decode()
    if golden.graph is not None:
        metadata["striate.graph_bytes"] = str(len(pickled(golden.graph)))
    metadata["striate.checksum"] = "0" * 32
    digests = b""
    for i in range(-(-len(data) // golden.chunk_bytes)):
        seed = xxhash.xxh3_64_intdigest(UUID + i.to_bytes(8, "little"))
        chunk = data[i * golden.chunk_bytes : (i + 1) * golden.chunk_bytes]
        digests += xxhash.xxh3_128_digest(chunk, seed=seed)
    metadata["striate.chunks"] = base64.b64encode(digests).decode()

    members: dict[str, Any] = {"__metadata__": {**metadata, **golden.ties}}
    for n, storage in enumerate(golden.storages):
        raw = storage.name is None
        members[f"__striate__.s.{n}" if storage.name is None else storage.name] = {
            "dtype": "U8" if raw else storage.dtype,
            "shape": [storage.nbytes] if raw else list(storage.shape),
            "data_offsets": offsets[n],
        }
    if golden.graph_entry:
        n = len(golden.storages)
        members["__striate__.graph"] = {"dtype": "U8", "shape": [len(blocks[n])], "data_offsets": offsets[n]}
    text = compact(members).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    header = len(text).to_bytes(8, "little") + text
    checksum = xxhash.xxh3_128_hexdigest(header)
    key = b'"striate.checksum":"'
    return header.replace(key + b"0" * 32, key + checksum.encode(), 1) + data


def hexdump(content: bytes) -> str:
    """As ``hexdump -C``."""
    lines = []
    last = None
    for at in range(0, len(content), 16):
        row = content[at : at + 16]
        if row == last and len(row) == 16:
            if lines[-1] != "*":
                lines.append("*")
            continue
        last = row
        left, right = row[:8].hex(" "), row[8:].hex(" ")
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {left:<23}  {right:<23}  |{shown}|")
    return "\n".join([*lines, f"{len(content):08x}"])


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    directory.mkdir(parents=True, exist_ok=True)
    for name, golden in FILES.items():
        (directory / f"{name}.safetensors").write_bytes(build(golden))
