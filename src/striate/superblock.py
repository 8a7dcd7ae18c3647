"""The small records on a drive: superblock, label, tombstone. 4096 bytes each, with a digest over all before it.

Pure: nothing is read or written here. docs/format.md, "Member files", is the specification.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from striate.errors import CorruptCheckpoint, FormatError, UnsupportedFormat
from striate.groups import WIDTH_MAX, Shape
from striate.manifest import ALIGN, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, DIGEST_BYTES

__all__ = [
    "DRIVES_MAX",
    "LABEL_NAME",
    "LOCK_NAME",
    "MAGIC",
    "MANIFEST_BYTES_MAX",
    "MEMBERS_MAX",
    "MEMBER_VERSION",
    "NAME_BYTES_MAX",
    "SUPERBLOCK_BYTES",
    "TOMBSTONE_PREFIX",
    "Label",
    "Superblock",
    "Tombstone",
    "check_name",
    "decode",
    "decode_label",
    "decode_tombstone",
    "encode",
    "encode_label",
    "encode_tombstone",
    "is_member",
    "tombstone_name",
]

MEMBER_VERSION = 1
SUPERBLOCK_BYTES = 4096
MEMBERS_MAX = 255
DRIVES_MAX = 240
NAME_BYTES_MAX = 1024
MANIFEST_BYTES_MAX = 1 << 32

MAGIC = b"STRIATE\0"
LABEL_NAME = b".striate-label"
LOCK_NAME = b".striate.lock"
TOMBSTONE_PREFIX = b".striate-gone-"

_PART_BYTES_MAX = 255
_OWN_PREFIX = b".striate"
_DIGEST_AT = SUPERBLOCK_BYTES - DIGEST_BYTES
_SUPERBLOCK = struct.Struct("<8sII16sQ16s16sIIIIQQQ16s32sH1024s")
_LABEL = struct.Struct("<8sII16s16sQ")
_TOMBSTONE = struct.Struct("<8sIH1024s2x16sQ")
_LABEL_MAGIC = b"STRLABL\0"
_TOMBSTONE_MAGIC = b"STRGONE\0"


@dataclass(frozen=True)
class Superblock:
    """What the first 4096 bytes of a member say. Offsets and lengths in bytes; ``whole``: numbers of members."""

    uuid: bytes
    sequence: int
    volume: bytes
    drive: bytes
    member: int
    members: int
    shape: Shape
    chunk_bytes: int
    manifest_offset: int
    manifest_bytes: int
    manifest_digest: bytes
    whole: frozenset[int]
    name: bytes


@dataclass(frozen=True)
class Label:
    """Which drive of which volume a directory is."""

    volume: bytes
    drive: bytes
    revision: int
    drives: tuple[bytes, ...]


@dataclass(frozen=True)
class Tombstone:
    """Generations of a name that were deleted: up to this sequence number."""

    name: bytes
    uuid: bytes
    sequence: int


def check_name(name: str | bytes | os.PathLike[Any]) -> bytes:
    """A name in a volume as bytes. Raises ValueError that says which rule of docs/format.md it breaks."""
    raw = os.fsencode(name)
    problem = _name_problem(raw)
    if problem:
        raise ValueError(f"{os.fsdecode(raw)!r} cannot be a name in a volume: {problem}.")
    return raw


def _name_problem(raw: bytes) -> str:
    if not raw:
        return "it is empty"
    if raw.startswith(b"/"):
        return "it is an absolute path; a name is relative to each drive of the volume"
    if len(raw) > NAME_BYTES_MAX:
        return f"it has {len(raw)} bytes, and {NAME_BYTES_MAX} are allowed"
    if b"\0" in raw:
        return "it holds a NUL byte"
    for part in raw.split(b"/"):
        if part in (b"", b".", b".."):
            return f"a part of it is {os.fsdecode(part)!r}"
        if len(part) > _PART_BYTES_MAX:
            return f"a part of it has {len(part)} bytes, and {_PART_BYTES_MAX} are allowed"
        if part.startswith(_OWN_PREFIX):
            return f"a part of it begins with {_OWN_PREFIX.decode()!r}, as files of our own do"
    return ""


def _sealed(head: bytes) -> bytes:
    block = head.ljust(_DIGEST_AT, b"\0")
    return block + xxhash.xxh3_128_digest(block)


def is_member(prefix: bytes) -> bool:
    """Does a file begin as a member does?"""
    return prefix.startswith(MAGIC)


def encode(superblock: Superblock) -> bytes:
    """The 4096 bytes."""
    s = superblock
    bits = sum(1 << number for number in s.whole)
    return _sealed(
        _SUPERBLOCK.pack(
            MAGIC,
            MEMBER_VERSION,
            0,
            s.uuid,
            s.sequence,
            s.volume,
            s.drive,
            s.member,
            s.members,
            s.shape.data,
            s.shape.checks,
            s.chunk_bytes,
            s.manifest_offset,
            s.manifest_bytes,
            s.manifest_digest,
            bits.to_bytes(32, "little"),
            len(s.name),
            s.name,
        )
    )


def decode(block: bytes, *, path: str) -> Superblock:
    """The facts of a superblock.

    Raises FormatError if it is none, UnsupportedFormat if it is newer, CorruptCheckpoint (region "superblock") if it
    is damaged.
    """
    if not is_member(block):
        raise FormatError(f"{path} is no member of a striate checkpoint: it does not begin as one.")
    _check_seal(block, path, "superblock")
    fields = _SUPERBLOCK.unpack_from(block)
    (_, version, flags, uuid, sequence, volume, drive, member, members, k, m) = fields[:11]
    (chunk_bytes, manifest_offset, manifest_bytes, digest, bits, name_length, name) = fields[11:]
    if version > MEMBER_VERSION or flags:
        raise UnsupportedFormat(
            f"{path} is a member of a checkpoint of version {version} (flags {flags:#x}), and this striate reads "
            f"version {MEMBER_VERSION}. Update striate, then load it."
        )
    whole = frozenset(number for number in range(256) if bits[number // 8] >> number % 8 & 1)
    problem = ""
    if version != MEMBER_VERSION:
        problem = f"there is no version {version}"
    elif not 1 <= members <= MEMBERS_MAX or member >= members:
        problem = f"member {member} of {members} is not possible"
    elif k < 1 or k + m > min(members, WIDTH_MAX):
        problem = f"groups of {k} data and {m} check blocks over {members} members are not possible"
    elif not CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX or chunk_bytes & (chunk_bytes - 1):
        problem = f"chunks of {chunk_bytes:,} bytes are not possible"
    elif manifest_offset % ALIGN or not SUPERBLOCK_BYTES <= manifest_offset < 1 << 62:
        problem = f"a manifest at offset {manifest_offset:,} is not possible"
    elif not 0 < manifest_bytes <= MANIFEST_BYTES_MAX:
        problem = f"a manifest of {manifest_bytes:,} bytes is not possible"
    elif any(number >= members for number in whole):
        problem = "its list of members names one that is not possible"
    elif name_length > NAME_BYTES_MAX or name[name_length:].strip(b"\0"):
        problem = "its name is longer than it may be"
    else:
        problem = _name_problem(name[:name_length])
    if problem:
        raise _damaged(path, "superblock", problem)
    return Superblock(
        uuid,
        sequence,
        volume,
        drive,
        member,
        members,
        Shape(k, m),
        chunk_bytes,
        manifest_offset,
        manifest_bytes,
        digest,
        whole,
        name[:name_length],
    )


def _check_seal(block: bytes, path: str, what: str) -> None:
    if len(block) != SUPERBLOCK_BYTES:
        raise _damaged(path, what, f"it has {len(block)} bytes of {SUPERBLOCK_BYTES}")
    if xxhash.xxh3_128_digest(block[:_DIGEST_AT]) != block[_DIGEST_AT:]:
        raise _damaged(path, what, "its checksum does not fit")


def _damaged(path: str, what: str, problem: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path}: the {what} is damaged: {problem}.", path=path, region=what)


# ---- labels and tombstones -------------------------------------------------


def encode_label(label: Label) -> bytes:
    assert 1 <= len(label.drives) <= DRIVES_MAX
    head = _LABEL.pack(
        _LABEL_MAGIC, MEMBER_VERSION, len(label.drives), label.volume, label.drive, label.revision
    )
    return _sealed(head + b"".join(label.drives))


def decode_label(block: bytes, *, path: str) -> Label:
    """Raises CorruptCheckpoint (region "label") if it is damaged, UnsupportedFormat if it is newer."""
    _check_seal(block, path, "label")
    magic, version, count, volume, drive, revision = _LABEL.unpack_from(block)
    if magic != _LABEL_MAGIC:
        raise _damaged(path, "label", "it does not begin as one")
    _refuse_newer(version, path, "label")
    if not 1 <= count <= DRIVES_MAX:
        raise _damaged(path, "label", f"a volume of {count} drives is not possible")
    raw = block[_LABEL.size : _LABEL.size + 16 * count]
    drives = tuple(raw[at : at + 16] for at in range(0, len(raw), 16))
    if len(set(drives)) != count:
        raise _damaged(path, "label", "it names a drive twice")
    return Label(volume, drive, revision, drives)


def tombstone_name(name: bytes) -> bytes:
    """The file that says that a name was deleted."""
    return TOMBSTONE_PREFIX + xxhash.xxh3_128_hexdigest(name).encode("ascii")


def encode_tombstone(tombstone: Tombstone) -> bytes:
    return _sealed(
        _TOMBSTONE.pack(
            _TOMBSTONE_MAGIC,
            MEMBER_VERSION,
            len(tombstone.name),
            tombstone.name,
            tombstone.uuid,
            tombstone.sequence,
        )
    )


def decode_tombstone(block: bytes, *, path: str) -> Tombstone:
    """Raises CorruptCheckpoint (region "tombstone") if it is damaged, UnsupportedFormat if it is newer."""
    _check_seal(block, path, "tombstone")
    magic, version, length, name, uuid, sequence = _TOMBSTONE.unpack_from(block)
    if magic != _TOMBSTONE_MAGIC:
        raise _damaged(path, "tombstone", "it does not begin as one")
    _refuse_newer(version, path, "tombstone")
    problem = "its name is longer than it may be" if length > NAME_BYTES_MAX else _name_problem(name[:length])
    if problem:
        raise _damaged(path, "tombstone", problem)
    return Tombstone(name[:length], uuid, sequence)


def _refuse_newer(version: int, path: str, what: str) -> None:
    if version > MEMBER_VERSION:
        raise UnsupportedFormat(f"{path}: the {what} is of version {version}. Update striate.")
    if version < 1:
        raise _damaged(path, what, f"there is no version {version}")
