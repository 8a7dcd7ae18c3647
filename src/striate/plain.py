"""The plain file's transaction: how a checkpoint reaches one drive whole, or not at all.

A generation is committed when its file bears its final name. Before that it
is a temporary, ``.striate-<uuid>``, which its saver keeps locked for life: a
lock that is free tells the next saver that the owner died, and it sweeps.

Order of a save: space, temporary, preallocate, data, header, length, sync,
rename, sync of the directory. The old file is only ever replaced by rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from striate import _engine, image, manifest
from striate.drives import (
    NO_LOCKS,
    Place,
    display,
    file_maps,
    free_bytes,
    is_temporary_name,
    temporary_name,
)
from striate.engines import Engine
from striate.errors import StriateError, drive_error
from striate.graph import Graph
from striate.member import engine_file, fill_tables, open_direct, open_member
from striate.superblock import MAGIC, is_member

__all__ = [
    "Generation",
    "Source",
    "Temporary",
    "addresses_of",
    "memory_of",
    "check_target",
    "over_files",
    "padded",
    "prepare",
    "seen_sequence",
    "sweep",
    "write_plain",
]

Progress = Callable[[int], None]

# The header goes through the same slots as the data, in pieces of at most this.
_HEADER_BLOCK_BYTES = 4 << 20

# Near the start of every header of ours (docs/format.md): reading the whole
# table of an old checkpoint for one number would cost as much as writing it.
_SEQUENCE = re.compile(rb'"striate\.sequence":"([0-9]{20})"')
_SEQUENCE_MAX = 1 << 62  # nanoseconds: the year 2116


@dataclass(frozen=True)
class Generation:
    """One save to a name: 16 random bytes, and a number that grows from save to save."""

    uuid: bytes
    sequence: int

    @classmethod
    def next(cls, largest_seen: int) -> Generation:
        # The clock alone would repeat after it was set back; counting alone
        # would not order generations of drives that were never seen together.
        return cls(secrets.token_bytes(16), max(largest_seen + 1, time.time_ns()))


@dataclass
class Source:
    """A checkpoint that is ready to be written: header, gather list, and what keeps the memory alive."""

    table: image.Table
    generation: Generation
    chunk_bytes: int
    header: bytearray
    pieces: image.Pieces
    careful: NDArray[np.bool_]
    stable: bool
    tensors_count: int
    opaque_count: int
    keep: list[object]

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.table.data_bytes


def prepare(graph: Graph, *, generation: Generation, chunk_bytes: int, stable: bool = False) -> Source:
    """Lays a graph out. Touches no drive; raises if the checkpoint cannot be written in this form."""
    stored, in_entry = (None, False) if graph.pickle is None else manifest.pack_graph(graph.pickle)
    table = image.lay_out(
        graph.storages, graph_length=len(stored) if in_entry and stored is not None else None
    )
    header = manifest.encode(
        table,
        uuid=generation.uuid,
        sequence=generation.sequence,
        chunk_bytes=chunk_bytes,
        ties=graph.ties,
        graph=stored if not in_entry else None,
        graph_bytes=None if graph.pickle is None else len(graph.pickle),
        graph_entry=in_entry,
        digests=None,
    )
    keep = memory_of(graph)
    addresses = addresses_of(graph, keep)
    if in_entry:
        assert stored is not None
        entry = np.frombuffer(stored, np.uint8)
        keep.append(entry)
        addresses = np.append(addresses, np.uint64(entry.ctypes.data))
    pieces = image.gather(table, addresses, chunk_bytes)
    named = sum(entry.named for entry in graph.storages)
    return Source(
        table=table,
        generation=generation,
        chunk_bytes=chunk_bytes,
        header=bytearray(header),
        pieces=pieces,
        careful=over_files(pieces),
        stable=stable,
        tensors_count=len(graph.storages),
        opaque_count=len(graph.storages) - named,
        keep=keep,
    )


def memory_of(graph: Graph) -> list[object]:
    """What must live until the bytes are written: the storages too, which a tensor may give up meanwhile."""
    return [graph.keep, [entry.source for entry in graph.storages]]


def addresses_of(graph: Graph, keep: list[object]) -> NDArray[np.uint64]:
    found = np.fromiter((entry.address for entry in graph.storages), np.uint64, len(graph.storages))
    for n in np.flatnonzero(found == 0).tolist():
        entry = graph.storages[n]
        if not entry.nbytes:
            continue
        kind = entry.source.device.type
        if kind == "cpu":
            found[n] = entry.source.data_ptr()
        elif kind == "meta":
            # No bytes are there; torch.save writes zeros too. Untouched pages
            # of zeros cost no memory.
            zeros = np.zeros(entry.nbytes, np.uint8)
            keep.append(zeros)
            found[n] = zeros.ctypes.data
        else:
            copy = entry.source.cpu()
            keep.append(copy)
            found[n] = copy.data_ptr()
    return found


def over_files(pieces: image.Pieces) -> NDArray[np.bool_]:
    """For each job: does any of its memory map a file, which another process may truncate?"""
    if not len(pieces.first):
        return np.zeros(0, np.bool_)
    maps = file_maps()
    starts = np.array([m.start for m in maps], np.uint64)
    stops = np.array([m.stop for m in maps], np.uint64)
    # The first mapping that ends after the piece begins overlaps it, or none does.
    at = np.searchsorted(stops, pieces.addr, side="right")
    inside = np.zeros(len(pieces.addr), np.bool_)
    known = at < len(maps)
    inside[known] = starts[at[known]] < pieces.addr[known] + pieces.length[known]
    return np.logical_or.reduceat(inside, pieces.first.astype(np.intp))


# ---- looking before writing ------------------------------------------------


def check_target(place: Place) -> None:
    """Refuses, before anything is touched, what opening the file for writing would refuse."""
    state = "Nothing was written."
    target = os.path.join(place.directory, place.name)
    if place.existing is not None:
        if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            raise drive_error(
                _why_not_writable(target),
                "save",
                path=place.path,
                state=f"{state} The earlier {display(place.name)} is intact.",
            )
        _refuse_member(target, place)
        return
    limit = os.pathconf(place.directory, "PC_NAME_MAX")
    if len(place.name) > limit:
        raise drive_error(
            errno.ENAMETOOLONG,
            "save",
            path=place.path,
            state=state,
            advice=f"Use a name of at most {limit} bytes; this one has {len(place.name)}.",
        )


def _refuse_member(target: bytes, place: Place) -> None:
    """One drive's part of a checkpoint on several must not be replaced by a whole of its own."""
    try:
        fd = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # it cannot be read, and may be written
    try:
        prefix = os.read(fd, len(MAGIC)) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        prefix = b""
    finally:
        os.close(fd)
    if is_member(prefix):
        raise StriateError(
            f"save refused: {place.path} is one drive's part of a checkpoint on several drives, and replacing it would "
            "take that apart. Nothing was written. Save to the volume (volume=), or delete the checkpoint first."
        )


def _why_not_writable(target: bytes) -> int:
    """access(2) only says no; a read-only file system and an immutable file want other remedies than a wrong mode."""
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as e:
        return e.errno or errno.EACCES
    return errno.EACCES


def seen_sequence(place: Place, engine: Engine) -> int:
    """The sequence of the generation that stands at a place, 0 if there is none that can be read."""
    if place.existing is None or not stat.S_ISREG(place.existing.st_mode):
        return 0
    path = os.path.join(place.directory, place.name)
    try:
        with open_member(path, engine, verify=False, header=False) as member:
            found = _SEQUENCE.search(member.first_bytes(_engine.ALIGN))
    except (StriateError, OSError):
        return 0  # what stands there cannot be read, and is about to be replaced
    sequence = int(found[1]) if found else 0
    # Unchecked bytes: nonsense must not push the numbers to their end.
    return sequence if sequence < _SEQUENCE_MAX else 0


# ---- writing ---------------------------------------------------------------


class Temporary:
    """The temporary file of one save; owns its descriptor, its lock and its name until commit or abort."""

    def __init__(self, engine: Engine, dirfd: int, place: Place, earlier: str) -> None:
        self.engine = engine
        self.dirfd = dirfd
        self.place = place
        self.earlier = earlier
        self.fd = -1
        self.direct = False
        self.name = b""
        self.pid = os.getpid()
        _OPEN.add(self)

    @property
    def path(self) -> str:
        return self.place.path

    def fail(self, code: int, doing: str, offset: int | None = None, **extra: Any) -> NoReturn:
        raise drive_error(
            code,
            doing,
            path=self.path,
            drive=display(self.place.directory),
            offset=offset,
            state=self.earlier,
            **extra,
        ) from None

    @contextlib.contextmanager
    def step(self, doing: str, advice: Mapping[int, str] | None = None) -> Iterator[None]:
        """What fails in it is worded as ``doing``, with the ``advice`` for an errno instead of the usual one."""
        try:
            yield
        except OSError as e:
            if isinstance(e, StriateError):
                raise
            code = e.errno or errno.EIO
            self.fail(code, doing, advice=(advice or {}).get(code))

    def create(self, uuid: bytes) -> None:
        """Makes and locks the file. Tries another name if a sweeper took this one before it was locked."""
        io = self.engine.io
        # What was private is private from the first moment; take_mode gives the rest.
        old = self.place.existing
        mode = 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o600
        for _ in range(16):
            self.name = temporary_name(uuid)
            with self.step("create"):
                self.fd, self.direct = open_direct(
                    io, self.dirfd, self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode
                )
            try:
                io.lock(self.fd)
                if os.fstat(self.fd).st_nlink:
                    return
            except BlockingIOError:
                pass
            except OSError as e:
                if e.errno in NO_LOCKS:
                    # No sweep there, which needs the lock, removes it: what a killed saver leaves
                    # stays until a person looks.
                    return
                self.fail(e.errno or errno.EIO, "lock")
            self.abort()
            uuid = secrets.token_bytes(16)
        self.fail(errno.EAGAIN, "create")

    def take_mode(self) -> None:
        """Overwriting keeps mode and owner, as opening the file for writing would."""
        old = self.place.existing
        if old is None:
            return
        io = self.engine.io
        new = os.fstat(self.fd)
        mode = stat.S_IMODE(old.st_mode)
        if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid) and not self._take_owner(old):
            # The saver's own group must not get what the old one had.
            mode = mode & ~stat.S_IRWXG & 0o777 | (mode & stat.S_IRWXO) << 3
        if stat.S_IMODE(new.st_mode) != mode:
            with self.step("chmod"), contextlib.suppress(PermissionError):
                io.chmod(self.fd, mode)

    def _take_owner(self, old: os.stat_result) -> bool:
        """Is the file now of the old one's group?"""
        # Only root may give files away; others may still give them to a group
        # of theirs, whose members went on with each other's checkpoints so far.
        for uid in (old.st_uid, -1):
            try:
                self.engine.io.chown(self.fd, uid, old.st_gid)
                return True
            except OSError as e:
                # EINVAL: the owner has no number in this user namespace.
                if e.errno not in (errno.EPERM, errno.EINVAL):
                    self.fail(e.errno or errno.EIO, "chown")
        return False

    def allocate(self, length: int) -> None:
        free = free_bytes(self.dirfd)
        if free is not None and free < length:
            self.fail(errno.ENOSPC, "save", needed=length, free=free, advice=_space_advice(length, free))
        try:
            self.engine.io.allocate(self.fd, length)
        except OSError as e:
            code = e.errno or errno.EIO
            if code == errno.ENOSPC:
                free = free_bytes(self.dirfd)
                self.fail(code, "preallocate", needed=length, free=free, advice=_space_advice(length, free))
            self.fail(code, "preallocate", needed=length)

    def file(self) -> _engine.File:
        return engine_file(self.fd, self.direct)

    def abort(self) -> None:
        """Removes what was begun. Best effort: what a dead drive keeps, the next save's sweep removes.

        Can be called again after a signal handler raised in it: nothing is forgotten before it is done.
        """
        if os.getpid() != self.pid:
            return  # a forked child must not remove its parent's work
        if self.name:
            with contextlib.suppress(OSError):
                self.engine.io.unlink(self.dirfd, self.name)
            self.name = b""
        self.close()

    def close(self) -> None:
        if self.fd < 0:
            return
        try:
            self.engine.io.close(self.fd)
        except OSError:
            pass
        finally:
            # Whatever it answered, and even if a signal handler raised after
            # it: the descriptor is gone, and closing again could hit another's.
            self.fd = -1


# A forked child shares the lock of every file that was open, and would hold it
# after its parent's death: data loaders' workers can live that long.
_OPEN: weakref.WeakSet[Temporary] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for temporary in list(_OPEN):
        if temporary.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(temporary.fd)
            temporary.fd = -1


os.register_at_fork(after_in_child=_let_go_in_child)


def _space_advice(needed: int, free: int | None) -> str | None:
    if free is None or free >= needed:
        return None
    return (
        f"{needed:,} bytes are needed and {free:,} are free: free {needed - free:,} more, or save elsewhere."
    )


_RENAME_ADVICE = {
    errno.ENOENT: "Something removed the temporary file, or its directory, while it was written: save again.",
    errno.EBUSY: "Something is mounted on this very name: save under another name beside it.",
    errno.EPERM: "The directory lets only a file's owner replace it (sticky), or nobody (lsattr): save elsewhere.",
}


def write_plain(source: Source, place: Place, engine: Engine, *, progress: Progress | None = None) -> None:
    """Writes one generation to a place: durable and whole when this returns, and the old file untouched when it raises.

    The one exception: an error of the directory's last sync comes after the rename, and its message says that
    the new generation is in place.
    """
    earlier = _earlier(place)
    dirfd = open_directory(place, earlier)
    try:
        some_locked = sweep(dirfd, engine)
        temporary = Temporary(engine, dirfd, place, earlier)
        try:
            temporary.create(source.generation.uuid)
            temporary.take_mode()
            temporary.allocate(padded(source.file_bytes))
            _write_data(source, temporary, progress)
            _write_header(source, temporary)
            with temporary.step("truncate"):
                if source.file_bytes != padded(source.file_bytes):
                    engine.io.truncate(temporary.fd, source.file_bytes)
            with temporary.step("sync"):
                engine.io.sync(temporary.fd)
            with temporary.step("rename", _RENAME_ADVICE):
                engine.io.rename(dirfd, temporary.name, place.name)
            temporary.name = b""
        finally:
            try:
                temporary.abort()
            except BaseException:
                # A second Ctrl-C, or a handler that raises: not at the price
                # of a locked file that stays as long as this process lives.
                temporary.abort()
                raise
        _sync_directory(dirfd, place, engine)
        if some_locked:
            # A ring keeps the files of its last transfers open, and so locked,
            # for some 50 ms after its process was killed.
            sweep(dirfd, engine)
    finally:
        os.close(dirfd)


def _earlier(place: Place) -> str:
    name = display(place.name)
    if place.existing is None:
        return "Nothing was committed."
    return f"Nothing was committed; the earlier {name} is intact."


def open_directory(place: Place, earlier: str) -> int:
    try:
        return os.open(place.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        advice = None
        if e.errno == errno.EACCES:
            advice = "A save must read the directory too, to sync it: give it the mode for that (chmod u+r)."
        raise drive_error(
            e.errno or errno.EIO, "open of the directory", path=place.path, state=earlier, advice=advice
        ) from None


def _sync_directory(dirfd: int, place: Place, engine: Engine) -> None:
    try:
        engine.io.sync_directory(dirfd)
    except OSError as e:
        raise drive_error(
            e.errno or errno.EIO,
            "sync of the directory",
            path=place.path,
            drive=display(place.directory),
            state="The new checkpoint is whole and bears its name, but that name may not survive a power cut.",
        ) from None


def padded(length: int) -> int:
    return -(-length // _engine.ALIGN) * _engine.ALIGN


def _write_data(source: Source, temporary: Temporary, progress: Progress | None) -> None:
    pieces = source.pieces
    digests = b""
    if len(pieces.first):
        jobs, extents = fill_tables(pieces, source.generation.uuid, data_offset=len(source.header))
        jobs["flags"] = _engine.JOB_CHECKSUM | (_engine.JOB_STABLE if source.stable else 0)
        jobs["flags"] |= np.where(source.careful, _engine.JOB_CAREFUL, 0).astype(np.uint32)
        results = _run_write(temporary, jobs, extents, progress, drives=[temporary.path])
        digests = results["digest"].tobytes()
    manifest.seal(source.header, digests)


def _write_header(source: Source, temporary: Temporary) -> None:
    memory = np.frombuffer(source.header, np.uint8)
    count = -(-len(memory) // _HEADER_BLOCK_BYTES)
    starts = np.arange(count, dtype=np.uint64) * np.uint64(_HEADER_BLOCK_BYTES)
    extents = np.zeros(count, _engine.EXTENT_DTYPE)
    extents["addr"] = np.uint64(memory.ctypes.data) + starts
    extents["length"] = np.minimum(np.uint64(len(memory)) - starts, np.uint64(_HEADER_BLOCK_BYTES))
    jobs = np.zeros(count, _engine.JOB_DTYPE)
    jobs["offset"] = starts
    jobs["length"] = extents["length"]
    jobs["extent_first"] = np.arange(count)
    jobs["extents_count"] = 1
    _run_write(temporary, jobs, extents, None)


def _run_write(
    temporary: Temporary,
    jobs: NDArray[np.void],
    extents: NDArray[np.void],
    progress: Progress | None,
    *,
    drives: Sequence[str] = (),
) -> NDArray[np.void]:
    try:
        return temporary.engine.run(
            "write", [temporary.file()], jobs, extents, drives=drives, progress=progress
        )
    except _engine.RunError as e:
        if e.code in (-errno.ENOSPC, -errno.EDQUOT):
            temporary.fail(-e.code, "write", e.offset, free=free_bytes(temporary.dirfd))
        if -4096 < e.code < 0:
            temporary.fail(-e.code, "write", e.offset)
        raise StriateError(
            f"write failed: {temporary.path}, offset {e.offset}: engine code {e.code}. {temporary.earlier} "
            "Please report this."
        ) from e


def sweep(dirfd: int, engine: Engine) -> bool:
    """Removes temporaries whose owner died: their lock is free. True if there are others, whose lock is held.

    Never fails a save: what cannot be removed stays.
    """
    try:
        names = [os.fsencode(name) for name in os.listdir(dirfd)]
    except OSError:
        return False
    some_locked = False
    for name in filter(is_temporary_name, names):
        try:
            _sweep_one(dirfd, name, engine)
        except BlockingIOError:
            some_locked = True
        except OSError:
            continue
    return some_locked


def _sweep_one(dirfd: int, name: bytes, engine: Engine) -> None:
    io = engine.io
    fd = io.open(dirfd, name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return
        io.lock(fd)
        # A member whose rename is still to come may be needed: only the
        # volume, which sees the other drives, can tell.
        if not _is_member(fd, engine):
            io.unlink(dirfd, name)
    finally:
        io.close(fd)


def _is_member(fd: int, engine: Engine) -> bool:
    try:
        return is_member(engine.io.read(fd, len(MAGIC), 0))
    except EOFError:
        return False
