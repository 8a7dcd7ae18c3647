"""The public face: save, load, load_into, load_tensors, info, verify.

Signatures follow torch's. What decides where bytes go is in plain and
stream; what an object is made of, in graph.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import pickle
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from striate import _engine, graph, image, manifest, plain, repair, scrub, stream
from striate import member as member_file
from striate.drives import display, is_descriptor_path, resolve
from striate.engines import DriveUse, Engine, EngineChoice
from striate.errors import (
    CorruptCheckpoint,
    DriveError,
    FormatError,
    LoadMismatch,
    NotEnoughMemory,
    StriateError,
    UnsafePickle,
    VolumeWarning,
)
from striate.member import Readable
from striate.member_set import MemberSet
from striate.merge import Merge
from striate.notices import warn
from striate.opening import open_from_member
from striate.progress import ProgressChoice, shown
from striate.superblock import MAGIC, is_member
from striate.transaction import MemberReport

__all__ = [
    "CheckpointInfo",
    "LoadResult",
    "SaveResult",
    "TensorInfo",
    "info",
    "load",
    "load_into",
    "load_tensors",
    "save",
    "verify",
]

FileLike = str | bytes | os.PathLike[Any] | IO[bytes]

# Below this a huge page cannot lie inside, or saves less than the call costs.
_HUGE_FROM_BYTES = 4 << 20


@dataclass(frozen=True)
class SaveResult:
    """What a save did. Sizes in bytes, times in seconds.

    ``opaque_count``: tensors' storages that other safetensors tools cannot read (views, strides, exotic types).
    ``stats``: the engine's figures for the data, None for file objects and checkpoints without data.
    ``members``: of a volume, each drive's part. ``file_bytes`` is then that of all members together.
    ``drives``: how busy the data kept each drive.
    """

    path: str
    uuid: str
    sequence: int
    file_bytes: int
    data_bytes: int
    tensors_count: int
    opaque_count: int
    elapsed_s: float
    stats: _engine.Stats | None
    members: tuple[MemberReport, ...] = ()
    drives: tuple[DriveUse, ...] = ()

    @property
    def degraded(self) -> bool:
        """Did a drive of the volume not get its member?"""
        return any(member.trouble for member in self.members)


@dataclass(frozen=True)
class LoadResult:
    """What a load did, for ``on_loaded``. Sizes in bytes, times in seconds.

    ``data_bytes``: of the whole checkpoint. ``drives``: how busy the load kept each drive, copies and check blocks that
    were read included.
    """

    path: str
    uuid: str
    sequence: int
    data_bytes: int
    elapsed_s: float
    drives: tuple[DriveUse, ...]


OnLoaded = Callable[[LoadResult], object]


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the header. ``offset``: bytes from the start of the file, or, on several drives, of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


@dataclass(frozen=True)
class MemberInfo:
    """One drive's part of a checkpoint. ``trouble``: why it is not whole, as far as can be seen without its data."""

    drive: str
    file_bytes: int
    trouble: str = ""


@dataclass(frozen=True)
class CheckpointInfo:
    """What a file says of itself, without its data being read or its graph being run.

    ``kind``: "striate", "member" (on several drives) or "safetensors" (foreign). ``ties``: further name -> the name
    whose bytes it shares.
    ``opaque_count``: entries that other tools cannot read. ``created_s``: seconds since 1970, from the sequence.
    """

    path: str
    kind: str
    version: int
    uuid: str
    sequence: int
    created_s: float
    file_bytes: int
    data_bytes: int
    chunk_bytes: int
    chunks_count: int
    graph_bytes: int
    opaque_count: int
    tensors: tuple[TensorInfo, ...]
    ties: dict[str, str]
    metadata: dict[str, str]
    members: tuple[MemberInfo, ...] = ()
    data_blocks: int = 1
    check_blocks: int = 0


class Saves(Protocol):
    """What save wants of a striate.Volume."""

    def save(
        self,
        obj: object,
        name: str | bytes | os.PathLike[Any],
        *,
        pickle_module: Any = pickle,
        pickle_protocol: int = 2,
        engine: EngineChoice | None = None,
        frozen: bool = False,
        progress: ProgressChoice = False,
    ) -> SaveResult: ...


# ---- save ------------------------------------------------------------------


def save(
    obj: object,
    f: FileLike,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    *,
    engine: EngineChoice = "auto",
    chunk_bytes: int = manifest.CHUNK_BYTES_DEFAULT,
    frozen: bool = False,
    progress: ProgressChoice = False,
    volume: Saves | None = None,
) -> SaveResult:
    """Saves whatever torch.save takes. When this returns, the checkpoint is whole and durable: synced, renamed, synced.

    f: a path (overwritten silently, as torch does, but only by a finished checkpoint), or a binary file object,
        which is written from its current position and not synced.
    engine: "auto" (io_uring, or posix where that is refused), "uring", "posix".
    chunk_bytes: a power of two from 4096 to 64 MiB; default 4 MiB. One checksum for each chunk.
    frozen: nothing changes the tensors until this returns: allows to write from their memory without a copy.
    progress: True for a bar, or a callable (bytes done, bytes in all).
    volume: several drives; ``f`` is then a name in it. It has a chunk size of its own.

    Raises what pickling the object raises; DriveError and its kinds, which are OSErrors too; StriateError if the
    checkpoint cannot be written in this form. The earlier file is then untouched, and nothing is left beside it.
    KeyboardInterrupt ends it as soon as what is in flight has drained.
    """
    begun = time.monotonic()
    check_chunk_bytes(chunk_bytes)
    if volume is not None:
        if not callable(getattr(volume, "save", None)):
            raise TypeError(f"volume= takes a striate.Volume, not a {type(volume).__name__}")
        if not _is_path(f):
            raise TypeError(f"with volume=, f is a name in the volume, not a {type(f).__name__}")
        name = os.fspath(f)  # type: ignore[arg-type]
        return volume.save(
            obj,
            name,
            pickle_module=pickle_module,
            pickle_protocol=pickle_protocol,
            # Unless told otherwise, a volume uses the engine that it was made with.
            engine=None if isinstance(engine, str) and engine == "auto" else engine,
            frozen=frozen,
            progress=progress,
        )
    if not _is_path(f):
        return _save_stream(obj, f, pickle_module, pickle_protocol, chunk_bytes, progress, begun)  # type: ignore[arg-type]
    path = os.fspath(f)  # type: ignore[arg-type]
    if _is_special(path):
        with open(path, "wb") as special:
            return _save_stream(obj, special, pickle_module, pickle_protocol, chunk_bytes, progress, begun)
    place = resolve(path)
    plain.check_target(place)
    chosen = Engine(engine)
    with graph.collector_paused():
        held = graph.dumps(obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
        generation = plain.Generation.next(plain.seen_sequence(place, chosen))
        source = plain.prepare(held, generation=generation, chunk_bytes=chunk_bytes, stable=frozen)
        del held  # many small objects, and none of them the collector's business
    runs_before = len(chosen.stats)
    with shown(progress, f"saving {display(place.name)}", source.table.data_bytes) as report:
        plain.write_plain(source, place, chosen, progress=report)
    stats = chosen.stats[runs_before] if source.table.data_bytes else None
    return _save_result(source, place.path, begun, stats, tuple(chosen.uses.values()))


def _save_stream(
    obj: object,
    f: IO[bytes],
    pickle_module: Any,
    pickle_protocol: int,
    chunk_bytes: int,
    progress: ProgressChoice,
    begun: float,
) -> SaveResult:
    if not hasattr(f, "write"):
        raise AttributeError(
            f"save needs a path or a binary file object with write(), not {type(f).__name__}"
        )
    held = graph.dumps(obj, pickle_module=pickle_module, pickle_protocol=pickle_protocol)
    source = plain.prepare(held, generation=plain.Generation.next(0), chunk_bytes=chunk_bytes)
    name = str(getattr(f, "name", type(f).__name__))
    with shown(progress, f"saving {os.path.basename(name)}", source.table.data_bytes) as report:
        stream.write(source, f, progress=report)
    return _save_result(source, name, begun, None)


def _save_result(
    source: plain.Source,
    path: str,
    begun: float,
    stats: _engine.Stats | None,
    drives: tuple[DriveUse, ...] = (),
) -> SaveResult:
    return SaveResult(
        path=path,
        uuid=source.generation.uuid.hex(),
        sequence=source.generation.sequence,
        file_bytes=source.file_bytes,
        data_bytes=source.table.data_bytes,
        tensors_count=source.tensors_count,
        opaque_count=source.opaque_count,
        elapsed_s=time.monotonic() - begun,
        stats=stats,
        drives=drives,
    )


def check_chunk_bytes(chunk_bytes: int) -> None:
    low, high = manifest.CHUNK_BYTES_MIN, manifest.CHUNK_BYTES_MAX
    if not isinstance(chunk_bytes, int) or chunk_bytes & (chunk_bytes - 1) or not low <= chunk_bytes <= high:
        raise ValueError(f"chunk_bytes is a power of two from {low} to {high}, not {chunk_bytes!r}")


def _is_path(f: object) -> bool:
    return isinstance(f, (str, bytes, os.PathLike))


def _is_special(path: str | bytes) -> bool:
    """A pipe, a device, a socket, an open descriptor's own path: written to and read from as it is, never replaced."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False  # opening it will word the error
    if stat.S_ISDIR(mode):
        return False
    return not stat.S_ISREG(mode) or is_descriptor_path(path)


# ---- load ------------------------------------------------------------------


def load(
    f: FileLike,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool = True,
    mmap: bool | None = None,
    verify: bool = True,
    engine: EngineChoice = "auto",
    progress: ProgressChoice = False,
    partial: bool = False,
    drives: Sequence[str | bytes | os.PathLike[Any]] | None = None,
    generation: str | int | None = None,
    on_loaded: OnLoaded | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Loads a checkpoint of striate, of torch.save, or any safetensors file. Every chunk of ours is checked.

    map_location, pickle_module, weights_only, further keywords: as torch.load's. mmap: only for torch.save files.
    verify: False reads the bytes as they are, and a file of ours that another tool rewrote as plain safetensors.
    partial: True leaves out what is damaged beyond repair: those tensors come as ``meta`` tensors (shape and dtype
        without bytes), and a warning names them.
    drives, generation: of a checkpoint on several drives, whose path is that of any of its members: the directories
        in which to look for the others instead of those recorded; and which generation, by uuid or sequence number.
    on_loaded: is called with a LoadResult (figures of each drive) in the end; not for file objects and torch.save
        files, which pass no engine.

    Raises FileNotFoundError and other DriveErrors; FormatError if it is no checkpoint; UnsupportedFormat for a
    newer version; CorruptCheckpoint; DataLost if more of several drives is gone than their layout makes up for;
    UnsafePickle if the graph names what weights_only=True forbids, before any
    tensor is read.
    """
    begun = time.monotonic()
    options = LoadOptions(map_location, pickle_module, weights_only, mmap, verify, pickle_load_args, partial)
    if not _is_path(f):
        return _load_stream(f, options, progress)  # type: ignore[arg-type]
    path = os.fspath(f)  # type: ignore[arg-type]
    if _is_special(path):
        with open(path, "rb") as special:
            return _load_stream(special, options, progress)
    with opened(path, Engine(engine), verify, drives, generation) as source:
        if source is None:
            return _torch_load(path, options)
        loaded = load_from(source, options, progress)
        tell(on_loaded, source, begun)
    return loaded


def tell(on_loaded: OnLoaded | None, source: Readable, begun: float) -> None:
    """Hands out what a load did. begun: as of time.monotonic."""
    if on_loaded is None:
        return
    held = source.manifest
    on_loaded(
        LoadResult(
            source.path,
            held.uuid.hex(),
            held.sequence,
            held.table.data_bytes,
            time.monotonic() - begun,
            tuple(source.engine.uses.values()),
        )
    )


@contextlib.contextmanager
def opened(
    path: str | bytes,
    engine: Engine,
    verify: bool,
    drives: Sequence[str | bytes | os.PathLike[Any]] | None = None,
    generation: str | int | None = None,
) -> Iterator[Readable | None]:
    """The checkpoint at a path, one file or one member of several; None for a file of torch.save."""
    with member_file.open_member(path, engine, verify=verify, header=False) as member, about(member.path):
        prefix = member.first_bytes(_TORCH_PREFIX_BYTES)
        if is_member(prefix):
            member.close()
            with open_from_member(path, engine, drives=drives, generation=generation) as several:
                yield several
            return
        if _is_torch_file(prefix):
            yield None
            return
        member.read_header(verify=verify)
        yield member


@dataclass(frozen=True)
class LoadOptions:
    map_location: Any
    pickle_module: Any
    weights_only: bool
    mmap: bool | None
    verify: bool
    pickle_load_args: dict[str, Any]
    partial: bool = False


_TORCH_PREFIX_BYTES = 512
# torch/serialization.py: a zip archive, the legacy magic number as a pickle of
# protocol 2, or (before 0.4) a tar archive. As lengths of a safetensors header
# all three would pass its 100 MB cap.
_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def _is_torch_file(prefix: bytes) -> bool:
    return prefix.startswith((b"PK\x03\x04", _TORCH_MAGIC)) or (
        # A tar begins with a file's name, a header of safetensors, after its length, with a brace.
        prefix[257:262] == b"ustar" and prefix[8:9] != b"{"
    )


def _torch_load(f: Any, options: LoadOptions) -> Any:
    if _is_path(f) and not options.mmap:
        # By its name alone torch would take a path of bytes for a file object,
        # and one that ends in .safetensors for something else than it is.
        with open(f, "rb") as opened:
            return _torch_load(opened, options)
    extra = {} if options.mmap is None else {"mmap": options.mmap}
    return torch.load(
        os.fsdecode(f) if _is_path(f) else f,
        map_location=options.map_location,
        pickle_module=options.pickle_module,
        weights_only=options.weights_only,
        **extra,
        **options.pickle_load_args,
    )


def load_from(source: Readable, options: LoadOptions, progress: ProgressChoice) -> Any:
    """Loads an open checkpoint."""
    held = source.manifest
    pickled = graph_of(source, options.verify)
    restore = _admitted(held, pickled, options)
    storages, addresses = _allocate(held, restore)
    tensors: dict[int, torch.Tensor] = {}
    if restore.reads_data:
        pieces = source.gather(addresses)
        with shown(progress, f"loading {source.name}", held.table.data_bytes) as report:
            lost = source.read_chunks(
                pieces, verify=options.verify, keep_going=options.partial, progress=report
            )
        if len(lost):
            tensors = _leave_out(source, storages, lost)
    return _rebuild(held, pickled, storages, restore, options, tensors)


def _leave_out(
    source: Readable, storages: list[torch.UntypedStorage], lost: NDArray[np.int64]
) -> dict[int, torch.Tensor]:
    """Puts what was lost on the meta device: it has no bytes, and nobody can take other bytes for it."""
    held = source.manifest
    gone: set[int] = set()
    for chunk in lost.tolist():
        start = chunk * held.chunk_bytes - (held.data_offset if held.foreign else 0)
        gone.update(image.storages_in(held.table, max(start, 0), start + held.chunk_bytes))
    for n in gone:
        storages[n] = torch.UntypedStorage(int(held.table.lengths[n]), device="meta")
    names = source.tensors_in(lost.tolist())
    warn(
        f"{source.path}: {len(names)} tensor(s) are damaged beyond repair and come as meta tensors, without bytes: "
        f"{', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}.",
        VolumeWarning,
    )
    return {
        n: torch.empty(plain_of.shape, dtype=graph.DTYPES[plain_of.dtype], device="meta")
        for n in gone
        if (plain_of := held.table.plain(n)) is not None
    }


def _load_stream(f: IO[bytes], options: LoadOptions, progress: ProgressChoice) -> Any:
    if not hasattr(f, "read"):
        raise AttributeError(f"load needs a path or a binary file object with read(), not {type(f).__name__}")
    prefix = _peek(f)
    if prefix is not None and _is_torch_file(prefix):
        return _torch_load(f, options)
    reader = stream.StreamReader(f, verify=options.verify)
    held = reader.manifest
    with about(reader.name):
        if held.graph_entry:
            # The graph stands among the data, and a stream cannot be read twice:
            # tensors are read before the graph is admitted, but never rebuilt.
            return _load_stream_with_entry(reader, options, progress)
        pickled = None if held.graph is None else manifest.unpack_graph(held.graph, held.graph_bytes or 0)
        restore = _admitted(held, pickled, options)
        storages, addresses = _allocate(held, restore)
        with shown(progress, f"loading {os.path.basename(reader.name)}", held.table.data_bytes) as report:
            reader.read_data(addresses, storages, progress=report)
        return _rebuild(held, pickled, storages, restore, options)


@contextlib.contextmanager
def about(path: str) -> Iterator[None]:
    """The graph knows no paths: what it refuses is told here which file it speaks of, and what can be done."""
    try:
        yield
    except (CorruptCheckpoint, FormatError, UnsafePickle) as e:
        if path not in str(e):
            advice = ""
            if isinstance(e, FormatError):
                advice = (
                    ". Nothing was loaded. Tensors can still be read by name (striate.load_tensors), or load an "
                    "earlier checkpoint."
                )
            e.args = (f"{path}: {e}{advice}",)
        if isinstance(e, CorruptCheckpoint) and not e.path:
            e.path = path
        raise


def _load_stream_with_entry(
    reader: stream.StreamReader, options: LoadOptions, progress: ProgressChoice
) -> Any:
    held = reader.manifest
    restore = _admitted(held, None, options)
    storages, addresses = _allocate(held, restore)
    packed = _graph_memory(held)
    addresses[-1] = packed.ctypes.data
    with shown(progress, f"loading {os.path.basename(reader.name)}", held.table.data_bytes) as report:
        reader.read_data(addresses, [storages, packed], progress=report)
    pickled = manifest.unpack_graph(packed.tobytes(), held.graph_bytes or 0)
    graph.scan(pickled, weights_only=options.weights_only)
    return _rebuild(held, pickled, storages, restore, options)


def _peek(f: IO[bytes]) -> bytes | None:
    """The next bytes of a seekable object, whose position stays. None: it cannot go back, so it is no torch file."""
    seekable = getattr(f, "seekable", None)
    if seekable is None or not seekable():
        return None
    start = f.tell()
    prefix = f.read(_TORCH_PREFIX_BYTES)
    f.seek(start)
    if isinstance(prefix, str):
        raise TypeError(f"{getattr(f, 'name', f)!s} is open for text: open it for bytes (mode 'rb')")
    return bytes(prefix)


def _graph_memory(held: manifest.Manifest) -> NDArray[np.uint8]:
    assert held.table.graph is not None
    return np.empty(held.table.graph[1], np.uint8)


def graph_of(source: Readable, verify: bool) -> bytes | None:
    held = source.manifest
    if not held.graph_entry:
        return None if held.graph is None else manifest.unpack_graph(held.graph, held.graph_bytes or 0)
    memory = _graph_memory(held)
    last = len(held.table.names)
    addresses = np.zeros(last + 1, np.uint64)
    addresses[last] = memory.ctypes.data
    pieces = source.gather(addresses, chunks=source.chunks_of([last]))
    source.read_chunks(pieces, verify=verify)
    return manifest.unpack_graph(memory.tobytes(), held.graph_bytes or 0)


def _admitted(held: manifest.Manifest, pickled: bytes | None, options: LoadOptions) -> graph.Restore:
    """Refuses, before any tensor is read, what would be refused after."""
    if pickled is not None:
        graph.scan(pickled, weights_only=options.weights_only)
    restore = graph.Restore(options.map_location)
    restore.check({location for location, _ in held.table.locations})
    return restore


def _allocate(
    held: manifest.Manifest, restore: graph.Restore, wanted: NDArray[np.bool_] | None = None
) -> tuple[list[torch.UntypedStorage], NDArray[np.uint64]]:
    """Storages for the table (empty ones where not wanted) and where their bytes go (a last 0 for a graph entry)."""
    table = held.table
    lengths = table.lengths if wanted is None else np.where(wanted, table.lengths, 0)
    allocate = restore.allocate
    try:
        storages = [
            allocate(length, location)
            for length, location in zip(lengths.tolist(), table.locations_list(), strict=True)
        ]
    except (MemoryError, RuntimeError) as e:
        raise NotEnoughMemory(
            f"load failed: the tensors take {int(lengths.sum()):,} bytes, and there is no memory for them ({e}). "
            "Nothing was loaded. Free memory, take some tensors with load_tensors, or load_into tensors that exist."
        ) from None
    addresses = np.zeros(len(storages) + (table.graph is not None), np.uint64)
    if restore.reads_data:
        for n, (storage, length) in enumerate(zip(storages, lengths.tolist(), strict=True)):
            if length:
                addresses[n] = storage.data_ptr()
                if length >= _HUGE_FROM_BYTES:
                    _engine.advise_huge_pages(int(addresses[n]), length)
    return storages, addresses


def _rebuild(
    held: manifest.Manifest,
    pickled: bytes | None,
    storages: list[torch.UntypedStorage],
    restore: graph.Restore,
    options: LoadOptions,
    tensors: dict[int, torch.Tensor] | None = None,
) -> Any:
    apply = restore.apply
    placed = [apply(s, location) for s, location in zip(storages, held.table.locations_list(), strict=True)]
    return graph.loads(
        pickled,
        held.table.names,
        held.table.plains(),
        placed,
        weights_only=options.weights_only,
        map_location=options.map_location,
        pickle_module=options.pickle_module,
        tensors=tensors or {},
        **options.pickle_load_args,
    )


# ---- a few tensors ---------------------------------------------------------


def load_tensors(
    f: str | bytes | os.PathLike[Any],
    names: Iterable[str],
    map_location: Any = None,
    *,
    verify: bool = True,
    engine: EngineChoice = "auto",
    drives: Sequence[str | bytes | os.PathLike[Any]] | None = None,
) -> dict[str, torch.Tensor]:
    """Reads some tensors by their dotted names, and only the chunks that hold them. Nothing is unpickled.

    Works for entries that other safetensors tools can read, and for names tied to them (which share a storage here
    too). Raises LoadMismatch (``missing``) for names that are not there, else as load.
    """
    if isinstance(names, (str, bytes)):
        raise TypeError(f"names is a list of names, not one: [{names!r}]")
    with opened(os.fspath(f), Engine(engine), verify, drives) as source:
        if source is None:
            raise FormatError(
                f"{display(os.fspath(f))} is a torch.save file, whose tensors cannot be read alone: load it with "
                "striate.load."
            )
        return tensors_from(source, list(names), map_location, verify)


def tensors_from(
    source: Readable, wanted: Sequence[str], map_location: Any, verify: bool
) -> dict[str, torch.Tensor]:
    """Some tensors of an open checkpoint, by name."""
    held = source.manifest
    rows = _rows(source.path, held, wanted)
    restore = graph.Restore(map_location)
    mask = np.zeros(len(held.table.names), np.bool_)
    mask[list(rows.values())] = True
    restore.check({held.table.location(n) for n in set(rows.values())})
    storages, addresses = _allocate(held, restore, mask)
    if restore.reads_data and mask.any():
        chunks = source.chunks_of(sorted(set(rows.values())))
        source.read_chunks(source.gather(addresses, chunks=chunks), verify=verify)
    placed = {n: restore.apply(storages[n], held.table.location(n)) for n in set(rows.values())}
    return {name: graph.plain_tensor(held.table.plain(n), placed[n]) for name, n in rows.items()}


def _rows(path: str, held: manifest.Manifest, wanted: Sequence[str]) -> dict[str, int]:
    known = {name: n for n, name in enumerate(held.table.names) if held.table.is_named(n)}
    for other, kept in held.ties.items():
        if kept in known:
            known.setdefault(other, known[kept])
    missing = [name for name in wanted if name not in known]
    if missing:
        near = difflib.get_close_matches(str(missing[0]), known, n=3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise LoadMismatch(
            f"{path} holds no tensor {', '.join(map(repr, missing[:4]))} that can be read alone.{hint} "
            "striate.info lists the names; tensors that share or stride their storage come with load().",
            missing=missing,
        )
    return {name: known[name] for name in wanted}


# ---- into existing tensors -------------------------------------------------


def load_into(
    state: Any,
    f: FileLike,
    *,
    strict: bool = True,
    allow_narrowing: bool = False,
    weights_only: bool = True,
    verify: bool = True,
    verify_first: bool = False,
    engine: EngineChoice = "auto",
    progress: ProgressChoice = False,
    drives: Sequence[str | bytes | os.PathLike[Any]] | None = None,
    on_loaded: OnLoaded | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Loads straight into the tensors of ``state`` (nested dicts and lists), with no second copy where they fit.

    Tensors are matched by their place in the nesting; numbers, strings and so on are set in their containers. A
    tensor that lies on the CPU, contiguous, with the dtype saved, is read into directly; others are copied to.

    strict: False leaves missing and unexpected entries alone instead of refusing.
    allow_narrowing: True lets a dtype lose precision (float32 into bfloat16); widening is always allowed.
    verify_first: reads the checkpoint twice, so that nothing is overwritten by one that is damaged.
    on_loaded: as load's.

    Returns ``state``, or, if that is a tuple with plain values in it, the tuple in its place. Raises LoadMismatch
    (also RuntimeError) before anything is overwritten. A CorruptCheckpoint or DriveError says whether targets
    have been overwritten, and ``overwritten`` holds their names.
    """
    begun = time.monotonic()
    check_targets(state)
    options = LoadOptions("cpu", None, weights_only, None, verify, pickle_load_args)
    merge = Merge(state, strict=strict, allow_narrowing=allow_narrowing)
    if not _is_path(f) or _is_special(os.fspath(f)):  # type: ignore[arg-type]
        merge.plan(
            load(f, "cpu", weights_only=weights_only, verify=verify, progress=progress, **pickle_load_args)
        )
        return merge.apply()
    path = os.fspath(f)  # type: ignore[arg-type]
    chosen = Engine(engine)
    if verify_first:
        _verified(path, chosen, drives, False).raise_if_damaged()
    with opened(path, chosen, verify, drives) as source:
        if source is None:
            merge.plan(_torch_load(path, options))
            return merge.apply()
        filled = load_into_from(merge, source, options, progress)
        tell(on_loaded, source, begun)
    return filled


def check_targets(state: Any) -> None:
    """Raises TypeError for what load_into cannot fill."""
    if not isinstance(state, (dict, list, tuple)):
        hint = ""
        if callable(getattr(state, "state_dict", None)):
            hint = (
                ": pass its state_dict() (for a module, that is its own memory; for an optimizer, "
                "load_state_dict afterwards)"
            )
        raise TypeError(f"load_into fills dicts and lists of tensors, not a {type(state).__name__}{hint}")


def load_into_from(merge: Merge, source: Readable, options: LoadOptions, progress: ProgressChoice) -> Any:
    """Loads an open checkpoint into the tensors of a merge."""
    held = source.manifest
    pickled = graph_of(source, options.verify)
    restore = _admitted(held, pickled, options)
    direct = _direct_targets(merge, held, pickled)
    if not _read_into(merge, source, pickled, restore, direct, options, progress):
        # Names are paths joined by dots, and {"a.b": t} bears the name of
        # {"a": {"b": t}}: nothing is overwritten on the strength of a name.
        _read_into(merge, source, pickled, restore, {}, options, progress)
    return merge.apply()


def _read_into(
    merge: Merge,
    source: Readable,
    pickled: bytes | None,
    restore: graph.Restore,
    direct: dict[int, torch.Tensor],
    options: LoadOptions,
    progress: ProgressChoice,
) -> bool:
    """Reads what is copied, then, if the plan holds, what is not. False: ``direct`` does not fit; nothing changed."""
    held = source.manifest
    indirect = np.ones(len(held.table.names), np.bool_)
    indirect[list(direct)] = False
    storages, addresses = _allocate(held, restore, indirect)
    into = np.zeros(len(addresses), np.uint64)
    for n, target in direct.items():
        into[n] = target.data_ptr()
    # What cannot be read into its place comes first: then everything that can
    # be refused has been, before the first target is overwritten.
    first, second = (
        source.gather(where, chunks=source.chunks_of(rows))
        for where, rows in ((addresses, np.flatnonzero(indirect).tolist()), (into, sorted(direct)))
    )
    first_bytes = int(first.job_length.sum())
    with shown(progress, f"loading {source.name}", first_bytes + int(second.job_length.sum())) as report:
        source.read_chunks(first, verify=options.verify, progress=report)
        merge.plan(_rebuild(held, pickled, storages, restore, options, direct), direct.values())
        if not merge.in_place_fits:
            return False
        with _overwriting(held, direct):
            later = None if report is None else lambda done: report(first_bytes + done)
            source.read_chunks(second, verify=options.verify, progress=later)
    return True


def _direct_targets(merge: Merge, held: manifest.Manifest, pickled: bytes | None) -> dict[int, torch.Tensor]:
    """Table index -> target that the bytes can be read into as they are."""
    if pickled is not None and not graph.is_standard(pickled):
        # A rebuild function of the user's may look at values, and would see
        # those that are about to be overwritten.
        return {}
    # A storage that the graph names as such has to be one of its own.
    shared = graph.storages_named(pickled) if pickled is not None else set()
    found: dict[int, torch.Tensor] = {}
    for n, name in enumerate(held.table.names):
        target = merge.targets.get(name)
        if target is None or n in shared or not held.table.is_named(n) or not held.table.lengths[n]:
            continue
        plain = held.table.plain(n)
        if plain is not None and graph.holds_plain(target, plain):
            found[n] = target
    return _apart(found)


def _apart(targets: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Those whose memory no other one reaches into: two reads into one place would fail each other's checksums."""
    order = sorted(targets, key=lambda n: targets[n].data_ptr())
    apart = set()
    reach = 0
    for at, n in enumerate(order):
        start = targets[n].data_ptr()
        stop = start + targets[n].nbytes
        following = targets[order[at + 1]].data_ptr() if at + 1 < len(order) else stop
        if reach <= start and stop <= following:
            apart.add(n)
        reach = max(reach, stop)
    return {n: target for n, target in targets.items() if n in apart}


@contextlib.contextmanager
def _overwriting(held: manifest.Manifest, direct: dict[int, torch.Tensor]) -> Iterator[None]:
    """Around a read into targets: autograd learns of it, and an error says which they are."""
    names = [held.table.names[n] for n in direct]
    try:
        yield
    except Exception as e:
        if names:
            note = (
                f"{len(names)} target(s) may already be overwritten, among them {', '.join(names[:4])}: load another "
                "checkpoint into them before going on. verify_first=True would have noticed before."
            )
            e.overwritten = tuple(names)  # type: ignore[attr-defined]
            if isinstance(e, DriveError):
                e.message = f"{e.message} {note}"
            elif isinstance(e, StriateError):
                e.args = (f"{e} {note}",)
        raise
    finally:
        for target in direct.values():
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)


# ---- looking ---------------------------------------------------------------


def info(f: str | bytes | os.PathLike[Any], *, verify: bool = True) -> CheckpointInfo:
    """What a checkpoint holds, from its header alone: no tensor is read, no graph unpickled.

    Reads files of striate and foreign safetensors; for torch.save files it raises FormatError.
    """
    with opened(os.fspath(f), Engine("posix"), verify) as source:
        if source is None:
            raise FormatError(
                f"{display(os.fspath(f))} is a torch.save file, whose contents stand in a pickle: load it with "
                "striate.load."
            )
        return info_of(source)


def info_of(source: Readable) -> CheckpointInfo:
    """What an open checkpoint says of itself."""
    held, table = source.manifest, source.manifest.table
    tensors = tuple(
        TensorInfo(name, dtype, tuple(shape), int(length), held.data_offset + int(offset))
        for name, dtype, shape, length, offset in zip(
            table.names, table.dtypes, table.shapes, table.lengths, table.offsets, strict=True
        )
    )
    several = source if isinstance(source, MemberSet) else None
    kind = "member" if several else "safetensors" if held.foreign else "striate"
    return CheckpointInfo(
        path=source.path,
        kind=kind,
        version=held.version,
        uuid=held.uuid.hex(),
        sequence=held.sequence,
        created_s=held.sequence / 1e9,
        file_bytes=source.file_bytes,
        data_bytes=table.data_bytes,
        chunk_bytes=held.chunk_bytes,
        chunks_count=len(held.digests) // 16,
        graph_bytes=held.graph_bytes or 0,
        opaque_count=sum(not table.is_named(n) for n in range(len(table.names))),
        tensors=tensors,
        ties=dict(held.ties),
        metadata=dict(held.metadata),
        members=members_of(several) if several else (),
        data_blocks=several.manifest.blocks.shape.data if several else 1,
        check_blocks=several.manifest.blocks.shape.checks if several else 0,
    )


def members_of(several: MemberSet) -> tuple[MemberInfo, ...]:
    found = []
    for number in range(len(several.manifest.drives)):
        member, trouble = several.members.get(number), several.troubles.get(number)
        if member is not None:
            found.append(MemberInfo(member.found.drive.path, os.fstat(member.fd).st_size))
        else:
            assert trouble is not None
            found.append(MemberInfo(trouble.drive, 0, str(trouble)))
    return tuple(found)


def verify(
    f: str | bytes | os.PathLike[Any],
    *,
    engine: EngineChoice = "auto",
    progress: ProgressChoice = False,
    drives: Sequence[str | bytes | os.PathLike[Any]] | None = None,
) -> scrub.VerifyReport:
    """Reads a whole checkpoint and compares every checksum; keeps nothing in memory.

    The report lists each damaged chunk with its offset and the tensors in it; it is false if there is any. Of a
    checkpoint on several drives (the path of any member; ``drives`` as with load) every block of every member is read,
    and the report is a repair.VolumeReport, member by member.
    Raises DriveError if the file cannot be opened, FormatError if it is no checkpoint with checksums.
    """
    return _verified(os.fspath(f), Engine(engine), drives, progress)


def _verified(
    path: str | bytes,
    engine: Engine,
    drives: Sequence[str | bytes | os.PathLike[Any]] | None,
    progress: ProgressChoice,
) -> scrub.VerifyReport:
    with member_file.open_member(path, engine, verify=True, header=False) as member:
        several = is_member(member.first_bytes(len(MAGIC)))
    if not several:
        return scrub.verify_member(path, engine, progress=progress)
    with open_from_member(path, engine, drives=drives) as opened:
        total = int(opened.manifest.blocks.length.sum())
        with shown(progress, f"verifying {opened.name}", total) as report:
            return repair.verify_set(opened, progress=report)
