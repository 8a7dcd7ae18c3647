"""The last steps of a member's file: manifest, superblock, sync, and the rename to its final name."""

from __future__ import annotations

import errno
import os

import numpy as np
from numpy.typing import NDArray

from striate import _engine
from striate.drive_set import Drive, parent_of
from striate.engines import Engine
from striate.plain import Temporary
from striate.superblock import Superblock, encode

__all__ = [
    "make_parents",
    "rename_into_place",
    "sync_name",
    "write_manifest",
    "write_superblock",
    "write_blocks",
]

_PIECE_BYTES = 4 << 20  # manifests go through the engine in pieces of this


def write_manifest(temporary: Temporary, raw: bytes, offset: int, engine: Engine) -> None:
    """The manifest of a member whose blocks are written, and the file's final length. Not synced."""
    memory = np.frombuffer(raw, np.uint8)
    starts = np.arange(0, len(raw), _PIECE_BYTES, dtype=np.uint64)
    lengths = np.minimum(np.uint64(len(raw)) - starts, np.uint64(_PIECE_BYTES))
    addresses = np.uint64(memory.ctypes.data) + starts
    write_blocks(temporary, np.uint64(offset) + starts, addresses, lengths, engine)
    with temporary.step("truncate"):
        engine.io.truncate(temporary.fd, offset + len(raw))


def write_superblock(temporary: Temporary, block: Superblock, engine: Engine) -> None:
    """What makes the file a member. Durable, with its temporary name, when this returns."""
    head = np.frombuffer(encode(block), np.uint8)
    address = np.array([head.ctypes.data], np.uint64)
    write_blocks(temporary, np.zeros(1, np.uint64), address, np.array([len(head)], np.uint64), engine)
    with temporary.step("sync"):
        engine.io.sync(temporary.fd)
    with temporary.step("sync of the directory"):
        engine.io.sync_directory(temporary.dirfd)


def write_blocks(
    temporary: Temporary,
    offsets: NDArray[np.uint64],
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    engine: Engine,
) -> None:
    """Memory to places in the file. Raises DriveError."""
    jobs = np.zeros(len(offsets), _engine.JOB_DTYPE)
    table = np.zeros(len(offsets), _engine.EXTENT_DTYPE)
    table["addr"], table["length"] = addresses, lengths
    jobs["offset"], jobs["length"] = offsets, lengths
    jobs["extent_first"], jobs["extents_count"] = np.arange(len(jobs)), 1
    try:
        engine.run("write", [temporary.file()], jobs, table)
    except _engine.RunError as e:
        temporary.fail(-e.code if -4096 < e.code < 0 else errno.EIO, "write", e.offset)


def make_parents(drive: Drive, name: bytes, engine: Engine) -> None:
    """Makes the directories that a name stands in, durably. Raises OSError."""
    parts = name.split(b"/")[:-1]
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=drive.dirfd)
    try:
        for part in parts:
            try:
                engine.io.mkdir(fd, part)
                engine.io.sync_directory(fd)
            except FileExistsError:
                pass
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)


def rename_into_place(drive: Drive, temporary: bytes, name: bytes, engine: Engine) -> None:
    parent = parent_of(drive.dirfd, name)
    try:
        engine.io.rename(drive.dirfd, temporary, os.path.basename(name), to_dirfd=parent)
    finally:
        os.close(parent)


def sync_name(drive: Drive, name: bytes, engine: Engine) -> None:
    """The directory of the final name and that of the temporaries."""
    parent = parent_of(drive.dirfd, name)
    try:
        engine.io.sync_directory(parent)
    finally:
        os.close(parent)
    if b"/" in name:
        engine.io.sync_directory(drive.dirfd)
