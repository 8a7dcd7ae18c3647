"""Checkpoints in file objects: pipes, sockets, BytesIO, open files. Sequential, the same bytes as on a drive.

No drive is touched here: the object moves the bytes, so there is no engine,
no durability and no transaction beyond what the object itself gives.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from striate import _engine, image, manifest
from striate.errors import CorruptCheckpoint, FormatError, StriateError
from striate.plain import Source

__all__ = ["StreamReader", "write"]

Progress = Callable[[int], None]


def write(source: Source, f: IO[bytes], *, progress: Progress | None = None) -> None:
    """Writes a checkpoint from the object's current position on.

    Seekable objects get the header last, so that what was cut short is no checkpoint; in others (pipes,
    sockets, files opened for appending) the checksums are taken in a first pass over the memory.
    """
    start = _position(f)
    if start is None:
        digests = b"".join(_digest(source, chunk, views) for chunk, views in _chunks(source))
        manifest.seal(source.header, digests)
        _write_all(f, source.header)
        for chunk, digest in enumerate(_written(source, f, progress)):
            if digest != digests[16 * chunk : 16 * chunk + 16]:
                raise StriateError(
                    f"save failed: tensors changed while they were written to {getattr(f, 'name', f)!s}, which cannot "
                    "go back to correct their checksums: what was written so far is no checkpoint. Keep other threads "
                    "from changing them meanwhile, save a copy, or save to a path."
                )
        return
    _write_all(f, bytes(len(source.header)))
    digests = b"".join(_written(source, f, progress))
    stop = f.tell()
    manifest.seal(source.header, digests)
    f.seek(start)
    _write_all(f, source.header)
    f.seek(stop)


def _position(f: IO[bytes]) -> int | None:
    """Where a seekable object stands, None where going back is impossible."""
    seekable = getattr(f, "seekable", None)
    if seekable is None or not seekable() or "a" in str(getattr(f, "mode", "")):
        return None
    if isinstance(f, gzip.GzipFile):
        return None  # calls itself seekable, and cannot go back while it writes
    with contextlib.suppress(OSError, AttributeError, TypeError, ValueError):
        if fcntl.fcntl(f.fileno(), fcntl.F_GETFL) & os.O_APPEND:
            return None
    try:
        return f.tell()
    except OSError:
        return None


def _chunks(source: Source) -> Iterator[tuple[int, list[memoryview]]]:
    pieces = source.pieces
    for row in range(len(pieces.first)):
        first, count = int(pieces.first[row]), int(pieces.count[row])
        views = [
            _engine.memory_view(int(pieces.addr[n]), int(pieces.length[n]), source.keep)
            for n in range(first, first + count)
        ]
        yield int(pieces.chunk[row]), views


def _digest(source: Source, chunk: int, views: list[memoryview]) -> bytes:
    seed = int(_engine.block_seeds(source.generation.uuid, chunk, 1)[0])
    return _engine.checksum(views[0] if len(views) == 1 else b"".join(views), seed)


def _written(source: Source, f: IO[bytes], progress: Progress | None) -> Iterator[bytes]:
    done = 0
    for chunk, views in _chunks(source):
        # One copy, so that the bytes that are checked are the bytes that are
        # written even if a thread still changes the tensors.
        block = b"".join(views)
        _write_all(f, block)
        done += len(block)
        if progress is not None:
            progress(done)
        yield _digest(source, chunk, [memoryview(block)])


def _write_all(f: IO[bytes], data: bytes | bytearray) -> None:
    left = memoryview(data)
    while len(left):
        count = f.write(left)
        if count is None:
            if isinstance(f, io.RawIOBase):
                raise BlockingIOError("the file object is non-blocking and full: give a blocking one")
            return  # a writer that does not count takes all or raises
        if not 0 < count <= len(left):
            raise OSError(f"the file object wrote {count} of {len(left)} bytes")
        left = left[count:]


class StreamReader:
    """Reads one checkpoint from an object's current position and leaves the position after it."""

    def __init__(self, f: IO[bytes], *, verify: bool, prefix: bytes = b"") -> None:
        self.f = f
        self.verify = verify
        self.name = str(getattr(f, "name", f))
        start = prefix + self._take(8 - len(prefix), "the header") if len(prefix) < 8 else prefix
        length = manifest.header_length(start[:8], file_bytes=None, path=self.name)
        header = start + self._take(length - len(start), "the header")
        self.manifest = manifest.decode(header, file_bytes=None, verify=verify, path=self.name)

    def _take(self, length: int, what: str) -> bytes:
        parts = []
        while length > 0:
            # Bounded steps: a hostile length must not allocate what never comes.
            part = self.f.read(min(length, 64 << 20))
            if not part:
                raise FormatError(
                    f"{self.name} ended in {what}, {length:,} bytes early: it holds no whole checkpoint. "
                    "Was it rewound (seek(0)) after writing?"
                )
            parts.append(bytes(part))
            length -= len(part)
        return b"".join(parts)

    def read_data(
        self, addresses: NDArray[np.uint64], owner: Any, *, progress: Progress | None = None
    ) -> None:
        """Reads all data into the storages (address 0: dropped). Raises CorruptCheckpoint at the first bad chunk."""
        held = self.manifest
        pieces = image.gather(held.table, addresses, held.chunk_bytes)
        done = 0
        for row in range(len(pieces.first)):
            chunk = int(pieces.chunk[row])
            block = memoryview(self._take(int(pieces.job_length[row]), f"chunk {chunk}"))
            if self.verify and not held.foreign:
                self._check(chunk, block)
            at = 0
            for n in range(int(pieces.first[row]), int(pieces.first[row]) + int(pieces.count[row])):
                length = int(pieces.length[n])
                if pieces.addr[n]:
                    _engine.memory_view(int(pieces.addr[n]), length, owner)[:] = block[at : at + length]
                at += length
            done += len(block)
            if progress is not None:
                progress(done)

    def _check(self, chunk: int, block: memoryview) -> None:
        held = self.manifest
        seed = int(_engine.block_seeds(held.uuid, chunk, 1)[0])
        wanted = held.digests[16 * chunk : 16 * chunk + 16]
        found = _engine.checksum(block, seed)
        if found != wanted:
            start = chunk * held.chunk_bytes
            names = [held.table.names[n] for n in image.storages_in(held.table, start, start + len(block))]
            raise CorruptCheckpoint(
                f"the checkpoint in {self.name} is damaged: chunk {chunk}, "
                f"{held.data_offset + start} bytes after its start, is not what was written "
                f"(checksum {wanted.hex()} expected, {found.hex()} found): it holds {', '.join(names[:4])}. "
                "Take it from its source again, or load an earlier one.",
                chunk=chunk,
                tensors=names,
                offset=held.data_offset + start,
                wanted=wanted.hex(),
                found=found.hex(),
            )
