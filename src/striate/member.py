"""A member: the one file that a checkpoint has on one drive, opened for reading.

Opens it with O_DIRECT where that goes, reads its manifest, and reads chunks
into memory that the caller names. What is read is checked, and what is wrong
is worded here, where path, offset and tensors are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from striate import _engine, image, manifest
from striate.drives import display
from striate.engines import Engine
from striate.errors import CorruptCheckpoint, FormatError, StriateError, drive_error

__all__ = [
    "READ_INTO_ADVICE",
    "Member",
    "Readable",
    "chunks_of",
    "corrupt_chunk",
    "engine_file",
    "fill_tables",
    "gather",
    "open_direct",
    "open_member",
    "read_chunks",
    "tensors_in_chunk",
]

Progress = Callable[[int], None]

READ_INTO_ADVICE = "The memory to read into cannot be written: is a target a read-only mapping?"
_READ_ADVICE = {errno.EFAULT: READ_INTO_ADVICE}

_AT_FDCWD = -100  # linux/fcntl.h


def open_direct(io: _engine.Io, dirfd: int, name: bytes, flags: int, mode: int = 0) -> tuple[int, bool]:
    """Opens with O_DIRECT, or without where the file system refuses it."""
    try:
        return io.open(dirfd, name, flags | os.O_DIRECT, mode), True
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    if flags & os.O_EXCL:
        # Some file systems make the file before they look at O_DIRECT
        # (open(2), BUGS): the name would then be taken by ourselves.
        with contextlib.suppress(OSError):
            io.unlink(dirfd, name)
    return io.open(dirfd, name, flags, mode), False


def engine_file(fd: int, direct: bool) -> _engine.File:
    alignment = _engine.direct_alignment(fd) if direct else None
    if alignment is None:
        return _engine.File(fd, direct)
    # 0/0 says that it will be refused: the engine sees that at the first transfer, and clears the flag.
    return _engine.File(fd, direct, *alignment)


def fill_tables(
    pieces: image.Pieces, uuid: bytes, *, data_offset: int
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Job and extent tables of the engine for pieces of an image; flags and digests are the caller's."""
    jobs = np.zeros(len(pieces.first), _engine.JOB_DTYPE)
    jobs["offset"] = pieces.offset + data_offset
    jobs["length"] = pieces.job_length
    jobs["extent_first"] = pieces.first
    jobs["extents_count"] = pieces.count
    if len(jobs):
        seeds = _engine.block_seeds(uuid, 0, int(pieces.chunk[-1]) + 1)
        jobs["seed"] = seeds[pieces.chunk]
    extents = np.zeros(len(pieces.addr), _engine.EXTENT_DTYPE)
    extents["addr"] = pieces.addr
    extents["length"] = pieces.length
    return jobs, extents


class Readable(Protocol):
    """An open checkpoint, on one drive or on several, as those see it who want its tensors."""

    path: str
    engine: Engine

    @property
    def manifest(self) -> manifest.Manifest: ...
    @property
    def name(self) -> str: ...
    @property
    def file_bytes(self) -> int: ...
    def gather(
        self, addresses: NDArray[np.uint64], *, chunks: NDArray[np.int64] | None = None
    ) -> image.Pieces: ...
    def chunks_of(self, indices: Sequence[int]) -> NDArray[np.int64]: ...
    def read_chunks(
        self,
        pieces: image.Pieces,
        *,
        verify: bool,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> NDArray[np.int64]: ...
    def tensors_in(self, chunks: Iterable[int]) -> list[str]: ...


class Member:
    """An open checkpoint file. Owns its descriptor; a context manager."""

    def __init__(self, path: str, engine: Engine, fd: int, direct: bool, file_bytes: int) -> None:
        self.path = path
        self.engine = engine
        self.fd = fd
        self.direct = direct
        self.file_bytes = file_bytes
        self.header_bytes = 0
        self._manifest: manifest.Manifest | None = None

    @property
    def manifest(self) -> manifest.Manifest:
        assert self._manifest is not None
        return self._manifest

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with contextlib.suppress(OSError):
                self.engine.io.close(fd)

    def read(self, length: int, offset: int) -> bytes:
        try:
            return self.engine.io.read(self.fd, length, offset)
        except EOFError:
            raise _truncated(self.path, offset + length, self.file_bytes) from None
        except OSError as e:
            raise drive_error(
                e.errno or errno.EIO, "read", path=self.path, offset=offset, state="Nothing was loaded."
            ) from None

    def first_bytes(self, length: int) -> bytes:
        return self.read(min(length, self.file_bytes), 0)

    def gather(
        self, addresses: NDArray[np.uint64], *, chunks: NDArray[np.int64] | None = None
    ) -> image.Pieces:
        """The pieces of the data, for read_chunks. Address 0: checked and dropped."""
        return gather(self, addresses, chunks=chunks)

    def chunks_of(self, indices: Sequence[int]) -> NDArray[np.int64]:
        return chunks_of(self, indices)

    def read_chunks(
        self,
        pieces: image.Pieces,
        *,
        verify: bool,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> NDArray[np.int64]:
        """Reads chunks into the memory that the pieces name; those that are lost, which only ``keep_going`` returns."""
        results = read_chunks(self, pieces, verify=verify, keep_going=keep_going, progress=progress)
        lost: NDArray[np.int64] = pieces.chunk[results["code"] != 0]
        return lost

    def tensors_in(self, chunks: Iterable[int]) -> list[str]:
        return list(dict.fromkeys(name for n in chunks for name in tensors_in_chunk(self.manifest, int(n))))

    def read_header(self, *, verify: bool) -> None:
        prefix = self.first_bytes(8)
        self.header_bytes = manifest.header_length(prefix, file_bytes=self.file_bytes, path=self.path)
        header = self.read(self.header_bytes, 0)
        self._manifest = manifest.decode(header, file_bytes=self.file_bytes, verify=verify, path=self.path)


def _truncated(path: str, wanted: int, found: int) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{path} is cut short: {wanted:,} bytes are needed and it ended before (it has {found:,}). "
        "Nothing was loaded. Load an earlier checkpoint, or restore this file from a copy.",
        path=path,
        offset=found,
    )


def open_member(path: str | bytes, engine: Engine, *, verify: bool, header: bool = True) -> Member:
    """Opens a regular file for reading, with O_DIRECT where that goes, and (``header``) reads its manifest.

    Raises DriveError (also FileNotFoundError and so on), FormatError, UnsupportedFormat, CorruptCheckpoint.
    """
    raw = os.fsencode(path)
    shown = display(raw)
    try:
        fd, direct = open_direct(engine.io, _AT_FDCWD, raw, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as e:
        advice = "There is no such file." if e.errno == errno.ENOENT else None
        raise drive_error(e.errno or errno.EIO, "open", path=shown, advice=advice) from None
    found = os.fstat(fd)
    member = Member(shown, engine, fd, direct, found.st_size)
    try:
        if stat.S_ISDIR(found.st_mode):
            raise drive_error(errno.EISDIR, "open", path=shown)
        if not stat.S_ISREG(found.st_mode):
            raise FormatError(
                f"{shown} is a pipe or a device, not a regular file: it can only be read once, from its start. "
                "Load it whole with striate.load."
            )
        if header:
            member.read_header(verify=verify)
    except BaseException:
        member.close()
        raise
    return member


def gather(
    member: Member,
    addresses: NDArray[np.uint64],
    *,
    chunks: NDArray[np.int64] | None = None,
) -> image.Pieces:
    """The pieces of an open checkpoint's data, for read_chunks. Address 0: checked and dropped."""
    held = member.manifest
    return image.gather(_as_read(held), _lead(held, addresses), held.chunk_bytes, chunks=chunks)


def chunks_of(member: Member, indices: Sequence[int]) -> NDArray[np.int64]:
    held = member.manifest
    lead = 1 if held.foreign else 0
    return image.chunks_of(_as_read(held), [n + lead for n in indices], held.chunk_bytes)


def _as_read(held: manifest.Manifest) -> image.Table:
    """Foreign safetensors start their data anywhere, the engine reads at multiples of 4096: the header
    becomes a storage of its own that nobody wants, and offsets count from the start of the file."""
    if not held.foreign:
        return held.table
    table = held.table
    return dataclasses.replace(
        table,
        names=["__header__", *table.names],
        dtypes=["U8", *table.dtypes],
        shapes=[(held.data_offset,), *table.shapes],
        offsets=np.concatenate([[0], table.offsets + held.data_offset]),
        lengths=np.concatenate([[held.data_offset], table.lengths]),
        named=np.concatenate([[False], table.named]),
        data_bytes=table.data_bytes + held.data_offset,
    )


def _lead(held: manifest.Manifest, column: Any) -> Any:
    if not held.foreign or column is None:
        return column
    return np.concatenate([np.zeros(1, column.dtype), column])


def read_chunks(
    member: Member,
    pieces: image.Pieces,
    *,
    verify: bool,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> NDArray[np.void]:
    """Reads chunks into the memory that the pieces name, checking each unless told not to; the result table.

    With ``keep_going`` errors stand in the table (code), else the first one raises: CorruptCheckpoint with
    chunk, tensors and offset, or DriveError.
    """
    found = member.manifest
    check = verify and not found.foreign
    data_offset = 0 if found.foreign else found.data_offset
    jobs, extents = fill_tables(pieces, found.uuid if check else bytes(16), data_offset=data_offset)
    if check:
        digests = np.frombuffer(found.digests, np.uint8).reshape(-1, 16)
        jobs["digest"] = digests[pieces.chunk]
        jobs["flags"] = _engine.JOB_CHECKSUM
    if not len(jobs):
        return np.zeros(0, _engine.RESULT_DTYPE)
    try:
        return member.engine.run(
            "read",
            [engine_file(member.fd, member.direct)],
            jobs,
            extents,
            drives=[member.path],
            keep_going=keep_going,
            progress=progress,
        )
    except _engine.RunError as e:
        chunk = int(pieces.chunk[e.job]) if e.job < len(pieces.chunk) else 0
        raise _word_read_error(member, chunk, e.code, e.offset) from None


def _word_read_error(member: Member, chunk: int, code: int, offset: int) -> StriateError:
    names = tensors_in_chunk(member.manifest, chunk)
    if code == _engine.ECORRUPT:
        return corrupt_chunk(member, chunk, names)
    if code == _engine.ETRUNCATED:
        return _truncated(member.path, member.header_bytes + member.manifest.table.data_bytes, offset)
    if -4096 < code < 0:
        return drive_error(
            -code,
            "read",
            path=member.path,
            offset=offset,
            state=f"Chunk {chunk} could not be read: {_few(names)}.",
            advice=_READ_ADVICE.get(-code),
        )
    return StriateError(
        f"read failed: {member.path}, offset {offset}: engine code {code}. Please report this."
    )


def corrupt_chunk(
    member: Member, chunk: int, names: Sequence[str], found: bytes | None = None
) -> CorruptCheckpoint:
    held = member.manifest
    offset = held.data_offset + chunk * held.chunk_bytes
    wanted = held.digests[16 * chunk : 16 * chunk + 16].hex()
    return CorruptCheckpoint(
        f"{member.path} is damaged: chunk {chunk}, at offset {offset}, is not what was written "
        f"(checksum {wanted} expected{f', {found.hex()} found' if found else ''}): {_few(names)}. "
        "No other chunk is blamed. Load an earlier checkpoint or restore this file from a copy; "
        "striate.verify lists all damage, verify=False loads the bytes as they are.",
        path=member.path,
        chunk=chunk,
        tensors=names,
        drive=os.path.dirname(member.path),
        offset=offset,
        wanted=wanted,
        found=found.hex() if found else None,
    )


def tensors_in_chunk(held: manifest.Manifest, chunk: int) -> list[str]:
    start = chunk * held.chunk_bytes - (held.data_offset if held.foreign else 0)
    stop = min(start + held.chunk_bytes, held.table.data_bytes)
    names = image.names_in(held.table, max(start, 0), stop)
    kept = set(names)
    return names + [other for other, keeper in held.ties.items() if keeper in kept]


def _few(names: Sequence[str], most: int = 4) -> str:
    if not names:
        return "no tensor lies in it"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"it holds {', '.join(names[:most])}{more}"
