"""Checkpoints of others as objects whose tensors are mapped from their files: saved anew, they need no memory.

Files of torch.save, safetensors (one file, or shards with their index) and directories of
torch.distributed.checkpoint (DCP).
"""

from __future__ import annotations

import ctypes
import enum
import io
import json
import mmap
import os
import pickle
import re
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from striate import graph, manifest
from striate.drives import display
from striate.errors import FormatError, StriateWarning, UnsafePickle
from striate.notices import warn

__all__ = ["Foreign", "Kind", "kind_of", "opened_foreign"]

Kind = Literal["torch", "safetensors", "sharded safetensors", "dcp"]

_INDEX_SUFFIX = ".safetensors.index.json"
_INDEX_BYTES_MAX = 256 << 20
# At 4 GiB/s some 80 MiB are read meanwhile.
_LET_GO_EVERY_S = 0.02


@dataclass(frozen=True)
class Foreign:
    """An open checkpoint of somebody else's. ``obj``: what it holds; ``files``: where its bytes are mapped from."""

    kind: Kind
    obj: Any
    files: tuple[str, ...]


def kind_of(path: str | os.PathLike[str]) -> Kind | None:
    """What a path holds, by its first bytes or, of a directory, by its files. None: nothing known.

    Raises OSError if it cannot be looked at.
    """
    given = Path(path)
    if given.is_dir():
        if (given / ".metadata").is_file():
            return "dcp"
        return "sharded safetensors" if _index_in(given) else None
    if given.name.endswith(_INDEX_SUFFIX):
        return "sharded safetensors"
    with open(given, "rb") as opened:
        prefix = opened.read(512)
    if prefix[:4] == b"PK\x03\x04" or prefix[:2] == b"\x80\x02" or prefix[257:262] == b"ustar":
        return "torch"
    if len(prefix) > 8 and prefix[8:9] == b"{":
        return "safetensors"
    return None


@contextmanager
def opened_foreign(
    path: str | os.PathLike[str], *, weights_only: bool = True, scratch: str | os.PathLike[str] | None = None
) -> Iterator[Foreign]:
    """Opens a checkpoint that is not striate's. Its tensors are for reading, and until the end of the ``with``.

    weights_only: False runs code that a torch.save file or a DCP directory names.
    scratch: the directory for the one temporary file that a DCP directory needs, as large as its tensors; the
        system's temporary directory unless told.

    Raises OSError, FormatError for what is damaged or nothing known, UnsafePickle.
    """
    given = os.fspath(path)
    kind = kind_of(path)
    maps = _Maps()
    with maps.kept_small():
        if kind == "torch":
            yield Foreign(kind, _torch(given, weights_only, maps), (given,))
            return
        if kind == "safetensors" or kind == "sharded safetensors":
            files = [given] if kind == "safetensors" else _shards(given)
            yield Foreign(kind, _safetensors(files, maps), tuple(files))
            return
        if kind == "dcp":
            with tempfile.TemporaryFile(dir=scratch) as temporary:
                yield Foreign(kind, _dcp(given, weights_only, temporary.fileno(), maps), (given,))
            return
        raise FormatError(
            f"{display(given)} is no checkpoint that is known: neither a file of torch.save or safetensors, nor an "
            "index of shards, nor a directory of torch.distributed.checkpoint."
        )


# ---- memory ----------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)


class _Maps:
    """Memory that maps files, to be read and never written to.

    Pages that were read count as this process's memory until they are given back: they are the files', and come again
    when they are asked for. Without that a checkpoint would fill the memory as it is read.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add_file(self, path: str) -> None:
        """All places at which a file is mapped now."""
        wanted = os.fsencode(os.path.realpath(path))
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                fields = line.rstrip(b"\n").split(None, 5)
                if len(fields) == 6 and fields[5] == wanted:
                    start, _, stop = fields[0].partition(b"-")
                    self._ranges.append((int(start, 16), int(stop, 16) - int(start, 16)))

    def add(self, memory: np.ndarray[Any, Any]) -> None:
        self._ranges.append((memory.ctypes.data, memory.nbytes))

    @contextmanager
    def kept_small(self) -> Iterator[None]:
        """Gives pages back as fast as they are read, for as long as this lasts."""
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(_LET_GO_EVERY_S):
                self.let_go()

        thread = threading.Thread(target=work, name="striate-let-go", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def let_go(self) -> None:
        for address, length in list(self._ranges):
            first = address & ~(mmap.PAGESIZE - 1)
            _libc.madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(address + length - first), mmap.MADV_DONTNEED
            )


# ---- torch.save ------------------------------------------------------------


def _torch(path: str, weights_only: bool, maps: _Maps) -> Any:
    with open(path, "rb") as opened:
        maps_it = opened.read(4) == b"PK\x03\x04" and zipfile.is_zipfile(path)
    if not maps_it:
        warn(
            f"{display(path)} is of torch.save's old form, which cannot be mapped: all of it is loaded into memory "
            f"({os.path.getsize(path):,} bytes).",
            StriateWarning,
        )
    try:
        obj = torch.load(path, map_location="cpu", mmap=maps_it or None, weights_only=weights_only)
    except pickle.UnpicklingError as e:
        raise UnsafePickle(
            f"{display(path)}: {_refused(e)} Nothing was written. If you trust the file, let it run code "
            "(weights_only=False; --trust on the command line)."
        ) from None
    except (RuntimeError, EOFError, KeyError, ValueError, TypeError, AttributeError, IndexError) as e:
        raise FormatError(
            f"{display(path)} cannot be read by torch.load: {_first_line(e)} Nothing was written."
        ) from None
    # Code of the file's may have changed what is mapped: given back, its pages would come again as they were.
    if maps_it and weights_only:
        maps.add_file(path)
    return obj


def _refused(error: BaseException) -> str:
    """What of torch's page on weights_only says what was refused."""
    match = re.search(r"GLOBAL ([\w.]+)|Unsupported (?:operand|class) ([\w.]+)", str(error))
    name = "what" if match is None else match[1] or match[2]
    return f"its pickle names {name}{' that' if match is None else ', which'} could run code."


def _first_line(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return text if text.endswith(".") else f"{text}."


# ---- safetensors -----------------------------------------------------------


def _index_in(directory: Path) -> Path | None:
    found = sorted(directory.glob(f"*{_INDEX_SUFFIX}"))
    return found[0] if len(found) == 1 else None


def _shards(path: str) -> list[str]:
    """The files that an index names, each once. Only names beside it: an index leads nowhere else."""
    index = Path(path)
    if index.is_dir():
        found = _index_in(index)
        assert found is not None
        index = found
    shown = display(os.fspath(index))
    if index.stat().st_size > _INDEX_BYTES_MAX:
        raise FormatError(f"{shown} has {index.stat().st_size:,} bytes: that is no index of shards.")
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FormatError(
            f'{shown} is no index of shards: it has no "weight_map" of names to files.'
        ) from None
    files = list(dict.fromkeys(names.values()))
    for name in files:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise FormatError(f"{shown} names the file {name!r}, which does not lie beside it.")
    paths = [os.fspath(index.parent / name) for name in files]
    missing = [name for name, place in zip(files, paths, strict=True) if not os.path.isfile(place)]
    if missing:
        raise FormatError(
            f"{shown} names {len(missing)} file(s) that are not there, among them {missing[0]}."
        )
    return paths


def _safetensors(paths: Sequence[str], maps: _Maps) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        for name, tensor in _mapped_tensors(path, maps):
            if name in tensors:
                raise FormatError(f"{display(path)}: the tensor {name!r} is in another shard too.")
            tensors[name] = tensor
    return tensors


def _mapped_tensors(path: str, maps: _Maps) -> Iterator[tuple[str, torch.Tensor]]:
    shown = display(path)
    with open(path, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = manifest.header_length(opened.read(8), file_bytes=size, path=shown)
        opened.seek(0)
        held = manifest.decode(opened.read(length), file_bytes=size, verify=False, path=shown)
        if not held.foreign:
            raise FormatError(f"{shown} is a checkpoint of striate: nothing has to be converted.")
        data = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
    maps.add(np.frombuffer(data, np.uint8))
    table = held.table
    for n, name in enumerate(table.names):
        dtype, shape = graph.DTYPES[table.dtypes[n]], table.shapes[n]
        if not table.lengths[n]:
            yield name, torch.empty(shape, dtype=dtype)
            continue
        # Each a storage of its own: what lies side by side in the file is not shared.
        offset, count = held.data_offset + int(table.offsets[n]), int(table.lengths[n])
        flat = torch.frombuffer(data, dtype=torch.uint8, offset=offset, count=count)
        storage = flat.untyped_storage()
        yield name, graph.plain_tensor(graph.Plain(table.dtypes[n], shape), storage)


# ---- torch.distributed.checkpoint --------------------------------------------

# What the metadata of a checkpoint of tensors and plain values names; anything else could run code.
_DCP_NAMES = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.distributed.checkpoint._extension", "StreamTransformExtension"),
    ("torch.distributed.checkpoint.filesystem", "SerializationFormat"),
    ("builtins", "set"),
    ("__builtin__", "set"),
}


def _member_of(kind: Any, name: Any) -> Any:
    """In the place of getattr, by which Python 3.11.0 to 3.11.3 pickle the members of an enumeration."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str):
        return kind[name]
    raise UnsafePickle("the metadata calls getattr, which could run code")


class _DcpUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _member_of
        known = (module, name) in _DCP_NAMES or module == "torch.distributed.checkpoint.metadata"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (not known and not is_dtype) or "." in name:
            raise UnsafePickle(f"the metadata names {module}.{name}, which could run code")
        return super().find_class(module, name)


class _DcpReader(FileSystemReader):
    """Reads the metadata without running what it names, unless told."""

    def __init__(self, path: str, weights_only: bool) -> None:
        super().__init__(path)
        self._directory = path
        self._weights_only = weights_only

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        shown = display(self._directory)
        try:
            with open(os.path.join(self._directory, ".metadata"), "rb") as opened:
                found = (_DcpUnpickler if self._weights_only else pickle.Unpickler)(opened).load()
        except UnsafePickle as e:
            raise UnsafePickle(
                f"{shown}: {e}. Nothing was written. If you trust it, let it (weights_only=False; --trust on the "
                "command line)."
            ) from None
        except OSError:
            raise
        except Exception as e:
            raise FormatError(f"{shown}: its .metadata cannot be read: {_first_line(e)}") from None
        if not isinstance(found, dcp_metadata.Metadata):
            raise FormatError(f"{shown}: its .metadata is no metadata of torch.distributed.checkpoint.")
        # A file beside the metadata, and none elsewhere.
        for info in (found.storage_data or {}).values():
            name = str(getattr(info, "relative_path", ""))
            if os.path.isabs(name) or ".." in Path(name).parts:
                raise FormatError(
                    f"{shown}: its .metadata names the file {name!r}, which does not lie below it."
                )
        meta = getattr(found, "storage_meta", None) or dcp_metadata.StorageMeta()
        meta.load_id = self.load_id
        found.storage_meta = meta
        return found


class _DcpPlanner(DefaultLoadPlanner):
    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert read_item.type == LoadItemType.BYTE_IO
        try:
            loaded = torch.load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as e:
            raise UnsafePickle(
                f"the entry {read_item.dest_index.fqn!r}: {_refused(e)} Nothing was written. If you trust it, let "
                "it run code (weights_only=False; --trust on the command line)."
            ) from None
        self.state_dict[read_item.dest_index.fqn] = loaded


def _dcp(path: str, weights_only: bool, scratch_fd: int, maps: _Maps) -> Any:
    reader = _DcpReader(path, weights_only)
    found = reader.read_metadata()
    shown = display(path)
    sizes: dict[str, int] = {}
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, dcp_metadata.TensorStorageMetadata):
            sizes[name] = entry.size.numel() * entry.properties.dtype.itemsize
    memory = np.zeros(0, np.uint8)
    total = sum(-(-size // 64) * 64 for size in sizes.values())
    if total:
        os.posix_fallocate(scratch_fd, 0, total)
        memory = np.frombuffer(mmap.mmap(scratch_fd, total), np.uint8)
        maps.add(memory)
    flat: dict[str, Any] = {}
    at = 0
    for name, entry in found.state_dict_metadata.items():
        if name not in sizes:
            flat[name] = None
            continue
        dtype = entry.properties.dtype
        if sizes[name]:
            part = torch.frombuffer(memory, dtype=torch.uint8, offset=at, count=sizes[name])
            flat[name] = torch.empty(0, dtype=dtype).set_(part.untyped_storage(), 0, entry.size)  # type: ignore[call-overload]
        else:
            flat[name] = torch.empty(entry.size, dtype=dtype)
        at += -(-sizes[name] // 64) * 64
    try:
        _load_state_dict(flat, storage_reader=reader, planner=_DcpPlanner(weights_only), no_dist=True)
    except (Exception, CheckpointException) as e:
        for cause in _causes(e):
            if isinstance(cause, (UnsafePickle, OSError)):
                raise cause from None
        raise FormatError(
            f"{shown} cannot be read: {_first_line(_causes(e)[-1])} Nothing was written."
        ) from None
    return _nested(flat, found.planner_data, shown)


def _causes(error: BaseException) -> list[BaseException]:
    """The errors that DCP has wrapped, innermost last."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        first = next(iter(failures.values()))
        inner = first[0] if isinstance(first, tuple) else first
        if isinstance(inner, BaseException):
            return [error, *_causes(inner)]
    return [error]


def _nested(flat: dict[str, Any], paths: Any, shown: str) -> Any:
    """The nesting that DCP flattened: of each name the path of keys and positions that leads to it."""
    if not isinstance(paths, dict):
        return flat
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        steps = paths.get(name, (name,))
        if not isinstance(steps, tuple) or not steps or not all(type(s) in (str, int) for s in steps):
            raise FormatError(f"{shown}: its .metadata has no path for the entry {name!r}.")
        here = root
        for step in steps[:-1]:
            here = here.setdefault(step, {})
            if not isinstance(here, dict):
                raise FormatError(f"{shown}: the path of the entry {name!r} leads through another entry.")
        here[steps[-1]] = value
    return _with_lists(root)


def _with_lists(value: Any) -> Any:
    """Positions lead into lists: DCP turns the keys of dicts into text."""
    if not isinstance(value, dict):
        return value
    made = {key: _with_lists(entry) for key, entry in value.items()}
    if made and all(isinstance(key, int) for key in made) and sorted(made) == list(range(len(made))):
        return [made[position] for position in range(len(made))]
    return made
