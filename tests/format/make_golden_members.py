"""Makes the golden member files: ``python tests/format/make_golden_members.py [DIRECTORY]``.

A writer of its own, from docs/format.md ("Member files") and nothing of striate, like make_golden. The tables of a
manifest are lists of rows that a test may change before they become bytes, as a hostile writer would.
"""

from __future__ import annotations

import copy
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from format.make_golden import FILES, UUID, Golden, data_of, length_of, pickled, stored

GOLDEN_MEMBERS = Path(__file__).parent / "golden_members"
VOLUME = bytes(range(0x10, 0x20))
DTYPES = (
    "BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64", "C64", "F8_E4M3",
    "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0",
)  # fmt: skip

SUPERBLOCK = {
    "magic": "8s", "version": "I", "flags": "I", "uuid": "16s", "sequence": "Q", "volume": "16s", "drive": "16s",
    "member": "I", "members": "I", "k": "I", "m": "I", "chunk_bytes": "Q", "manifest_offset": "Q",
    "manifest_bytes": "Q", "manifest_digest": "16s", "whole": "32s", "name_length": "H", "name": "1024s",
}  # fmt: skip
HEAD = {
    "magic": "8s", "uuid": "16s", "data_bytes": "Q", "graph_bytes": "Q", "graph_length": "Q", "strings_length": "Q",
    "dimensions": "Q", "storages": "Q", "tensors": "Q", "chunks": "Q", "groups": "Q", "locations": "I", "ties": "I",
    "members": "I", "k": "I", "m": "I", "zero": "I", "chunk_bytes": "Q",
}  # fmt: skip
ROWS = {
    "drives": ("16s", "I"),
    "locations": ("Q", "I"),
    "storages": ("Q", "Q", "I", "I", "B", "B", "6s"),
    "tensors": ("Q", "I", "B", "3s"),
    "ties": ("I", "I"),
    "groups": ("I",),
    "blocks": ("Q", "Q", "I", "I", "Q", "16s"),
    "dimensions": ("Q",),
}


@dataclass(frozen=True)
class Generation:
    """A checkpoint on several drives: k data and m check blocks a group, over so many members."""

    golden: Golden
    k: int
    m: int
    members: int
    name: bytes = b"step-1"


GENERATIONS: dict[str, Generation] = {
    "example.mirror": Generation(FILES["example"], 1, 1, 2),
    # Three chunks in groups of two: the last group is short, and its data block is, too.
    "flat.parity": Generation(FILES["flat"], 2, 1, 3, b"runs/step-7"),
    "empty.stripe": Generation(FILES["empty"], 1, 0, 2),
}


@dataclass
class Manifest:
    """Its parts, in order. ``head`` by name, ``rows`` by table, each row a list of numbers and bytes."""

    head: dict[str, Any]
    rows: dict[str, list[list[Any]]]
    strings: bytes
    graph: bytes

    def pack(self) -> bytes:
        parts = [struct.pack("<" + "".join(HEAD.values()), *self.head.values())]
        for table, form in ROWS.items():
            parts += [struct.pack("<" + "".join(form), *row) for row in self.rows[table]]
        return b"".join((*parts, self.strings, self.graph))


@dataclass
class Members:
    """All of a generation before it becomes bytes."""

    generation: Generation
    manifest: Manifest
    blocks: list[bytes]
    ends: list[int]  # where the manifest begins in each member
    superblocks: list[dict[str, Any]] = field(default_factory=list)

    def pack(self) -> list[bytes]:
        """The files. The digest of the manifest, and that of the superblock, are right whatever was changed."""
        raw = self.manifest.pack()
        found = []
        for number, facts in enumerate(self.superblocks):
            content = bytearray(self.ends[number])
            for block, (offset, _, member, *_) in zip(self.blocks, self.manifest.rows["blocks"], strict=True):
                if member == number and offset < len(content):
                    content[offset : offset + len(block)] = block
            content[:4096] = pack_superblock(
                {"manifest_bytes": len(raw), "manifest_digest": digest(raw, (1 << 64) - 1)} | facts
            )
            found.append(bytes(content) + raw)
        return found

    def copy(self) -> Members:
        return copy.deepcopy(self)


def pack_superblock(facts: dict[str, Any]) -> bytes:
    head = struct.pack("<" + "".join(SUPERBLOCK.values()), *(facts[name] for name in SUPERBLOCK))
    block = head.ljust(4080, b"\0")
    return block + xxhash.xxh3_128_digest(block)


def digest(content: bytes, index: int) -> bytes:
    seed = xxhash.xxh3_64_intdigest(UUID + index.to_bytes(8, "little"))
    return xxhash.xxh3_128_digest(content, seed=seed)


def times(a: int, b: int) -> int:
    product = 0
    while b:
        if b & 1:
            product ^= a
        a, b = a << 1, b >> 1
        if a & 0x100:
            a ^= 0x11D
    return product


def inverse(a: int) -> int:
    return next(b for b in range(1, 256) if times(a, b) == 1)


def factor(k: int, m: int, j: int, i: int) -> int:
    def b(row: int, column: int) -> int:
        return inverse(row ^ (m + column))

    return times(times(b(j, i), b(0, 0)), inverse(times(b(0, i), b(j, 0))))


def check_blocks(k: int, m: int, data: Sequence[bytes]) -> list[bytes]:
    longest = max(map(len, data))
    found = []
    for j in range(m):
        total = bytearray(longest)
        for i, block in enumerate(data):
            scale = factor(k, m, j, i)
            product = bytes(times(scale, byte) for byte in range(256))
            for at, byte in enumerate(block):
                total[at] ^= product[byte]
        found.append(bytes(total))
    return found


def image_of(golden: Golden) -> tuple[list[int], bytes]:
    """Where each storage begins, and the data. The graph is no part of it."""
    contents = [data_of(n, length_of(storage)) for n, storage in enumerate(golden.storages)]
    offsets = [0] * len(contents)
    data = b""
    for n in sorted(range(len(contents)), key=lambda n: -(len(contents[n]) & -len(contents[n]) or 1 << 63)):
        offsets[n] = len(data)
        data += contents[n]
    return offsets, data


def describe(generation: Generation, where: Sequence[tuple[int, int]] | None = None) -> Members:
    """``where``: (member, offset) of each block, data blocks first; without it groups rotate over the members."""
    golden, k, m = generation.golden, generation.k, generation.m
    offsets, data = image_of(golden)
    chunks = [data[at : at + golden.chunk_bytes] for at in range(0, len(data), golden.chunk_bytes)]
    groups = [chunks[at : at + k] for at in range(0, len(chunks), k)]
    checks = [check_blocks(k, m, group) for group in groups]
    blocks = chunks + [block for group in checks for block in group]
    digests = [digest(chunk, i) for i, chunk in enumerate(chunks)]
    for g, group in enumerate(checks):
        digests += [
            digests[g] if k == 1 else digest(block, (1 << 63) + g * m + j) for j, block in enumerate(group)
        ]

    if where is None:
        free = [4096] * generation.members
        placed: dict[int, tuple[int, int]] = {}
        for g, group in enumerate(groups):
            numbers = [(i, g * k + i) for i in range(len(group))]
            numbers += [(k + j, len(chunks) + g * m + j) for j in range(m)]
            for position, row in numbers:
                member = (g + position) % generation.members
                placed[row] = (member, free[member])
                free[member] += -(-len(blocks[row]) // 4096) * 4096
        where = [placed[row] for row in range(len(blocks))]
    ends = [4096] * generation.members
    for (member, offset), block in zip(where, blocks, strict=True):
        ends[member] = max(ends[member], offset + -(-len(block) // 4096) * 4096)

    locations: list[list[Any]] = []
    for storage in golden.storages:
        if locations and locations[-1][0] == storage.location:
            locations[-1][1] += 1
        else:
            locations.append([storage.location, 1])
    names = [
        f"__striate__.s.{n}" if storage.name is None else storage.name
        for n, storage in enumerate(golden.storages)
    ]
    plains = [(n, s) for n, s in enumerate(golden.storages) if s.name is None and s.dtype is not None]
    paths = [b"/drive/%d" % n for n in range(generation.members)]
    rows: dict[str, list[list[Any]]] = {
        "drives": [[drive_uuid(n), len(path)] for n, path in enumerate(paths)],
        "locations": [[count, len(name.encode())] for name, count in locations],
        "storages": [
            [
                offsets[n],
                length_of(storage),
                len(names[n].encode()),
                1 if storage.name is None else len(storage.shape),
                DTYPES.index("U8" if storage.name is None else str(storage.dtype)),
                int(storage.name is not None),
                bytes(6),
            ]
            for n, storage in enumerate(golden.storages)
        ],
        "tensors": [[n, len(s.shape), DTYPES.index(str(s.dtype)), bytes(3)] for n, s in plains],
        "ties": [[len(other.encode()), len(kept.encode())] for other, kept in golden.ties.items()],
        "groups": [[len(group)] for group in groups],
        "blocks": [
            [offset, len(block), member, 0, 0, wanted]
            for (member, offset), block, wanted in zip(where, blocks, digests, strict=True)
        ],
        "dimensions": [
            [size]
            for shape in (
                *([s.nbytes] if s.name is None else s.shape for s in golden.storages),
                *(s.shape for _, s in plains),
            )
            for size in shape
        ],
    }
    texts = [
        *(name for name, _ in locations),
        *names,
        *(text for pair in golden.ties.items() for text in pair),
    ]
    strings = b"".join((*paths, *(text.encode() for text in texts)))
    graph = b"" if golden.graph is None else stored(golden.graph)
    head = {
        "magic": b"STRMANI\0",
        "uuid": UUID,
        "data_bytes": len(data),
        "graph_bytes": 0 if golden.graph is None else len(pickled(golden.graph)),
        "graph_length": len(graph),
        "strings_length": len(strings),
        "dimensions": len(rows["dimensions"]),
        "storages": len(rows["storages"]),
        "tensors": len(rows["tensors"]),
        "chunks": len(chunks),
        "groups": len(groups),
        "locations": len(locations),
        "ties": len(rows["ties"]),
        "members": generation.members,
        "k": k,
        "m": m,
        "zero": 0,
        "chunk_bytes": golden.chunk_bytes,
    }
    found = Members(generation, Manifest(head, rows, strings, graph), blocks, ends)
    whole = (1 << generation.members) - 1
    for number in range(generation.members):
        found.superblocks.append(
            {
                "magic": b"STRIATE\0",
                "version": 1,
                "flags": 0,
                "uuid": UUID,
                "sequence": golden.sequence,
                "volume": VOLUME,
                "drive": drive_uuid(number),
                "member": number,
                "members": generation.members,
                "k": k,
                "m": m,
                "chunk_bytes": golden.chunk_bytes,
                "manifest_offset": ends[number],
                "whole": whole.to_bytes(32, "little"),
                "name_length": len(generation.name),
                "name": generation.name,
            }
        )
    return found


def drive_uuid(number: int) -> bytes:
    return bytes([0xD0 + number]) * 16


def file_name(name: str, number: int) -> str:
    return f"{name}.{number}"


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN_MEMBERS
    directory.mkdir(parents=True, exist_ok=True)
    for name, generation in GENERATIONS.items():
        for number, content in enumerate(describe(generation).pack()):
            (directory / file_name(name, number)).write_bytes(content)
