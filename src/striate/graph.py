"""The object graph: a Python object minus the bytes of its tensors, as a pickle.

``dumps`` turns an object into a pickle and a table of storages, ``loads`` is its
inverse, ``scan`` refuses a hostile pickle before any data is read and ``Restore``
is torch's ``map_location``, resolved. The scheme is torch.save's own, with one
addition: a *plain* tensor is the persistent id ``("storage", n)``, n its row in
the storage table. Nothing here opens a file, and no other module touches torch's
private unpickler: what moves between versions of torch moves here.
"""

from __future__ import annotations

import functools
import gc
import io
import math
import pickle as _pickle
import pickletools
import re
import struct
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .errors import FormatError, StriateError, UnsafePickle

__all__ = [
    "DTYPES",
    "Graph",
    "Plain",
    "Restore",
    "StorageEntry",
    "dumps",
    "holds_plain",
    "is_standard",
    "loads",
    "plain_tensor",
    "scan",
    "storages_named",
    "tensor_paths",
]

# What safetensors readers have long known, and so what a plain tensor may be.
_PLAIN_CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}

# Files of other writers hold more than we write under a dotted path.
_FOREIGN_CODES = {
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}

DTYPES: dict[str, torch.dtype] = {code: dtype for dtype, code in _PLAIN_CODES.items()}
"""Every dtype code of safetensors that ``loads`` turns into a tensor with this torch."""
DTYPES.update({code: getattr(torch, name) for code, name in _FOREIGN_CODES.items() if hasattr(torch, name)})

_INT64_MAX = 2**63 - 1

# torch pickles tensors of these devices through a copy on the CPU or without a storage.
_DEVICES_NEVER_PLAIN = frozenset({"meta", "xla", "maia", "mtia"})

# Named tensors left torch in 2.13; until then torch.save refuses them, and so must we.
_has_names: Callable[[Tensor], bool] | None = getattr(Tensor, "has_names", None)

_RESERVED_PREFIX = "__striate__."
_RESERVED_NAME = "__metadata__"

# A container that is shared is walked once for each path to it, but no more often than
# this: twenty levels of [x, x] have a million paths.
_VISITS_MAX = 16

# Containers nested deeper than this have no paths, whose lengths would add up to a square. Pickling them fails
# unless sys.setrecursionlimit was raised.
_PATH_DEPTH_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Plain:
    """What the bytes of a plain tensor mean: a dtype code of safetensors and a shape, in default strides."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class StorageEntry:
    """Row n of the storage table, in the order in which the pickler met them.

    ``nbytes``: bytes of the storage. ``location``: torch's tag ("cpu", "cuda:0"). ``plain``: geometry if
    ``("storage", n)`` stands in the graph, kept when the storage is demoted. ``name``: dotted path for other
    tools, or None. ``named``: the storage is exactly one plain tensor (and its tied equals), so its entry may
    bear dtype and shape. ``source``: the storage itself; on the meta device it counts as zeros. ``address``: where its
    bytes lie if that is known already, else 0.
    """

    nbytes: int
    location: str
    plain: Plain | None
    name: str | None
    named: bool
    source: torch.UntypedStorage
    address: int = field(default=0, compare=False)


@dataclass(slots=True)
class Graph:
    """The result of ``dumps``.

    ``pickle`` is None for a flat ``dict`` of str to plain tensors: the table's order is the dict's. ``ties``
    maps the other dotted names of a tied plain tensor to the name that was kept. ``keep`` holds what must
    stay alive until the write has ended.
    """

    pickle: bytes | None
    storages: list[StorageEntry]
    ties: dict[str, str]
    keep: list[object]


# torch leaves these without types.
_UntypedStorage: Any = torch.UntypedStorage
_TypedStorage: Any = torch.storage.TypedStorage
_default_restore_location: Any = torch.serialization.default_restore_location


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: 100,000 new tensors, none of them garbage, cost more to look through
    again and again than to make."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- names -----------------------------------------------------------------------


def _is_valid_name(name: str) -> bool:
    if name.startswith(_RESERVED_PREFIX) or name == _RESERVED_NAME:
        return False
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


_ATOMS = frozenset({str, int, float, bool, type(None), bytes, complex})
_NEVER_STORAGE = _ATOMS | {dict, list, tuple, OrderedDict, torch.Size, torch.nn.Parameter, FunctionType}


def _children(container: object) -> Iterator[tuple[object, object]] | None:
    # The unbound methods: a subclass may compute its items afresh at each call,
    # and such temporaries are not what the pickler will meet.
    if isinstance(container, dict):
        return iter(dict.items(container))
    if isinstance(container, list):
        return enumerate(list.__iter__(container))
    if isinstance(container, tuple):
        return enumerate(tuple.__iter__(container))
    return None


def tensor_paths(obj: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors in dicts, lists and tuples (and their subclasses) with their dotted paths, depth first.

    str keys stand verbatim, int keys and positions in decimal; what lies below any other key has no path.
    Paths that cannot be an entry's name (``__metadata__``, ``__striate__.``..., not UTF-8) are left out, and of
    two tensors with the same path the first is given. A tensor that is ``obj`` itself has no path.
    """
    root = _children(obj)
    if root is None:
        return
    seen: set[str] = set()
    visits: dict[int, int] = {}
    open_ids = {id(obj)}
    stack: list[tuple[Iterator[tuple[object, object]], str, int]] = [(root, "", id(obj))]
    while stack:
        children, prefix, container_id = stack[-1]
        for key, value in children:
            kind = type(value)
            if kind in _ATOMS:
                continue
            if type(key) is str:
                path = prefix + key
            elif type(key) is int:
                path = f"{prefix}{key}"
            else:
                continue
            if kind is Tensor or isinstance(value, Tensor):
                if path not in seen and _is_valid_name(path):
                    seen.add(path)
                    yield path, value  # type: ignore[misc]
                continue
            inner = _children(value)
            if inner is None or id(value) in open_ids or len(stack) == _PATH_DEPTH_MAX:
                continue
            count = visits.get(id(value), 0)
            if count == _VISITS_MAX:
                continue
            visits[id(value)] = count + 1
            open_ids.add(id(value))
            stack.append((inner, path + ".", id(value)))
            break
        else:
            open_ids.discard(container_id)
            stack.pop()


def holds_plain(tensor: Tensor, plain: Plain) -> bool:
    """Can the bytes of ``plain`` be read straight into this tensor, to give it the same values?

    True for a CPU tensor (or parameter) of the same dtype and shape whose elements lie in order without gaps,
    wherever in its storage they start.
    """
    return (
        (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter)
        and tensor.dtype == DTYPES.get(plain.dtype)
        and tensor.shape == plain.shape
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
        and torch._C._has_storage(tensor)
    )


# --- saving ----------------------------------------------------------------------


class _Saver:
    """The storage table while the pickler runs."""

    def __init__(self) -> None:
        self.entries: list[StorageEntry] = []
        self.index: dict[int, int] = {}  # _cdata of a storage -> row
        self.rows: dict[int, int] = {}  # id of a plain tensor -> row
        self.tied: set[int] = set()  # id of a tied tensor that is in the pickle already
        self.keep: list[object] = []  # every object whose id or _cdata is a key above
        self.dtypes: dict[int, torch.dtype] = {}  # data_ptr -> dtype, torch.save's rule
        # By dtype and shape: what is written of it, its default strides, its bytes.
        self.forms: dict[tuple[torch.dtype, torch.Size], tuple[Plain, tuple[int, ...], int]] = {}
        self.locations: dict[torch.device, str] = {}
        self.cpu: str | None = None  # the location of tensors on the CPU, once asked for
        self.awaited = 0  # _cdata of the storage that the tied tensor being pickled will name

    def whole(self, tensor: Tensor) -> tuple[Plain, torch.UntypedStorage] | None:
        """Geometry and storage if the tensor's values are exactly its storage's bytes, else None."""
        dtype = tensor.dtype
        if dtype not in _PLAIN_CODES or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        if tensor.is_neg() or (_has_names is not None and _has_names(tensor)):
            return None
        if not tensor.is_cpu and (
            tensor.device.type in _DEVICES_NEVER_PLAIN or not torch._C._has_storage(tensor)
        ):
            return None
        shape = tensor.shape
        form = self.forms.get((dtype, shape))
        if form is None:
            plain = Plain(_PLAIN_CODES[dtype], tuple(shape))
            form = self.forms[dtype, shape] = (plain, _default_stride(shape), tensor.nbytes)
        # is_contiguous() is no substitute: it is true for other strides too, and those must come back.
        if tensor.stride() != form[1] or tensor.storage_offset() != 0:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # functorch's wrappers: torch words the refusal
            return None
        if storage.nbytes() != form[2]:
            return None
        return form[0], storage

    def plain(self, tensor: Tensor) -> tuple[Plain, torch.UntypedStorage] | None:
        """As ``whole``, if torch's rebuild has nothing to add: no grad, no hooks, no attributes."""
        if tensor.requires_grad or tensor.__dict__ or tensor._backward_hooks:
            return None
        return self.whole(tensor)

    def check_dtype(self, pointer: int, dtype: torch.dtype) -> None:
        if pointer and self.dtypes.setdefault(pointer, dtype) != dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as different types"
            )

    def location(self, tensor: Tensor, storage: torch.UntypedStorage) -> str:
        # Taggers are asked once a device: asking costs as much as all other checks of a tensor together.
        location = self.locations.get(tensor.device)
        if location is None:
            location = self.locations[tensor.device] = torch.serialization.location_tag(storage)
            if tensor.is_cpu:
                self.cpu = location
        return location

    def add_plain(self, tensor: Tensor, plain: Plain, storage: torch.UntypedStorage) -> int:
        pointer = tensor.data_ptr()
        if pointer and self.dtypes.setdefault(pointer, tensor.dtype) is not tensor.dtype:
            self.check_dtype(pointer, tensor.dtype)
        location = self.cpu if tensor.is_cpu else None
        if location is None:
            location = self.location(tensor, storage)
        entries = self.entries
        n = self.index[storage._cdata] = len(entries)
        entries.append(StorageEntry(tensor.nbytes, location, plain, None, True, storage))
        self.keep.append(tensor)
        return n

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        kind = type(obj)
        if kind is Tensor:
            n = self.rows.get(id(obj))
            return ("storage", n) if n is not None else self.first_seen(obj)
        if kind in _NEVER_STORAGE:
            return None
        if isinstance(obj, torch.storage.TypedStorage) or torch.is_storage(obj):
            return self.storage(obj)
        return None

    def first_seen(self, tensor: Tensor) -> tuple[Any, ...] | None:
        if id(tensor) in self.tied:  # in the pickler's memo: its storage will not be named again
            return None
        found = self.whole(tensor)
        if found is None:
            return None  # if its storage served as a plain tensor, naming the storage demotes that
        plain, storage = found
        n = self.index.get(storage._cdata)
        if n is not None:
            if self.entries[n].plain == plain:
                self.awaited = storage._cdata
                self.tied.add(id(tensor))
                self.keep.append(tensor)
            return None
        if tensor.requires_grad or tensor.__dict__ or tensor._backward_hooks:
            return None
        n = self.rows[id(tensor)] = self.add_plain(tensor, plain, storage)
        return ("storage", n)

    def storage(self, obj: Any) -> tuple[Any, ...]:
        """torch.save's persistent id of a storage; what it asks of the object, it asks here."""
        storage_type: Any
        dtype: torch.dtype
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj
            storage = typed._untyped_storage
            dtype = typed.dtype
            storage_type = getattr(torch, typed._pickle_storage_type())
            numel = typed._size()
        else:
            storage = obj
            dtype = torch.uint8
            storage_type = getattr(torch, type(obj).__name__)
            numel = storage.nbytes()
        if storage.device.type != "meta":
            self.check_dtype(storage.data_ptr(), dtype)
        fake = getattr(obj, "_fake_device", None)
        location = str(fake) if fake is not None else torch.serialization.location_tag(storage)
        cdata = storage._cdata
        n = self.index.get(cdata)
        if n is None:
            n = self.index[cdata] = len(self.entries)
            self.entries.append(StorageEntry(storage.nbytes(), location, None, None, False, storage))
        elif cdata != self.awaited:
            self.entries[n].named = False
        self.awaited = 0
        return ("storage", storage_type, str(n), location, numel)


def _default_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))


def dumps(obj: object, *, pickle_module: Any = _pickle, pickle_protocol: int = 2) -> Graph:
    """Pickle ``obj`` without its tensors' bytes. Takes what torch.save takes, and raises what it raises.

    No byte of a tensor is read or copied. ``pickle_protocol`` other than 2 makes a graph that
    ``weights_only=True`` may refuse, as with torch; 0 cannot name a storage: ValueError.
    """
    with collector_paused():
        graph = _dumps_flat(obj) if type(obj) is dict else None
        if graph is None and pickle_protocol == 2 and pickle_module is _pickle:
            graph = _dumps_simple(obj)
        return graph or _dumps(obj, pickle_module, pickle_protocol)


def _dumps(obj: object, pickle_module: Any, pickle_protocol: int) -> Graph:
    if pickle_protocol == 0:
        raise ValueError("pickle protocol 0 cannot name a storage; use 2, the default")

    saver = _Saver()
    names: dict[int, str] = {}
    others: list[tuple[str, int]] = []
    held: list[object] = saver.keep
    for name, tensor in tensor_paths(obj):
        if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
            continue  # a subclass decides itself what it pickles
        try:
            storage = tensor.untyped_storage()
        except Exception:  # sparse, functorch, uninitialized: no storage, so no name
            continue
        cdata = storage._cdata
        if cdata in names:
            others.append((name, cdata))
        else:
            names[cdata] = name
            held.append(storage)

    class Pickler(pickle_module.Pickler):  # type: ignore[misc]
        persistent_id = staticmethod(saver.persistent_id)

    buffer = io.BytesIO()
    try:
        Pickler(buffer, protocol=pickle_protocol).dump(obj)
    finally:
        # A class is a reference cycle: left in place, this would hold all tensors until a collection.
        del Pickler.persistent_id
    pickle = buffer.getvalue()
    if pickle_protocol == 2:
        pickle = _without_unused_puts(pickle)

    skip_data = getattr(_tls(), "skip_data", False)
    for entry in saver.entries:
        if entry.source.device.type == "meta" and entry.nbytes and not skip_data:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if entry.named:
            entry.name = names.get(entry.source._cdata)
    ties = {}
    for name, cdata in others:
        n = saver.index.get(cdata)
        if n is None:
            continue
        kept = saver.entries[n].name
        # A tie stands in the file's metadata, beside keys that are spoken for.
        if kept is not None and name != "format" and not name.startswith("striate"):
            ties[name] = kept
    return Graph(pickle, saver.entries, ties, held)


def _dumps_flat(obj: dict[Any, Any]) -> Graph | None:
    if not (set(map(type, obj)) <= {str} and set(map(type, obj.values())) <= {Tensor}):
        return None
    writer = _SimpleWriter()
    add, entries = writer.add, writer.saver.entries
    try:
        for name, tensor in obj.items():
            if entries[add(tensor, name)].name is None:
                return None
    except _NotSimple:
        return None
    return Graph(None, entries, {}, writer.saver.keep)


# --- simple objects, written in one walk ---------------------------------------------

# As the standard library's pickler has it: so many items for each SETITEMS and APPENDS.
_BATCH = 1_000
_STRIDED = torch.strided
_SIMPLE_DEPTH_MAX = 200


class _NotSimple(Exception):
    """Something that only a pickler can write."""


class _SimpleWriter:
    """Writes the graph of dicts, lists, tuples, plain values and plain tensors, of which most states consist.

    Names, the storage table and the pickle come out of one walk, in a third of the time that a pickler takes which asks
    for each object whether it is a storage. Whatever else it meets, a tie or an object of some class, raises
    _NotSimple, and a pickler does it all.
    """

    def __init__(self) -> None:
        self.out: list[bytes] = [b"\x80\x02"]
        self.saver = _Saver()
        self.paths: set[str] = set()
        self.rows: dict[int, bytes] = {}  # id of a tensor -> what stands for it
        self.first: dict[int, int] = {}  # id of a str or tuple -> where it ends in out
        self.gets: dict[int, bytes] = {}  # id of one that came twice -> its GET
        self.seen: set[int] = set()  # ids of dicts and lists, and of tuples with tensors
        self.globals: dict[bytes, bytes] = {}
        self.storage = b""  # the GET of the word
        self.puts = 0

    def memo(self) -> tuple[bytes, bytes]:
        """PUT and GET of a new memo entry."""
        number, self.puts = self.puts, self.puts + 1
        if number < 256:
            return b"q%c" % number, b"h%c" % number
        return b"r" + number.to_bytes(4, "little"), b"j" + number.to_bytes(4, "little")

    def again(self, identity: int) -> bytes | None:
        """The GET of something that came before; None the first time."""
        get = self.gets.get(identity)
        if get is None:
            at = self.first.get(identity)
            if at is None:
                return None
            put, get = self.memo()
            self.gets[identity] = get
            self.out[at] += put
        return get

    def text(self, value: str) -> None:
        identity = id(value)
        if identity in self.first:
            self.out.append(self.gets.get(identity) or self.again(identity))  # type: ignore[arg-type]
            return
        encoded = value.encode("utf-8", "surrogatepass")
        self.first[identity] = len(self.out)
        self.out.append(b"X" + len(encoded).to_bytes(4, "little") + encoded)

    def tensor(self, tensor: Tensor, path: str) -> None:
        stands = self.rows.get(id(tensor))
        if stands is None:
            n = self.add(tensor, path)
            if n == 0:
                put, self.storage = self.memo()
                stands = b"X\x07\0\0\0storage" + put + b"K\0\x86Q"
                self.rows[id(tensor)] = self.storage + b"K\0\x86Q"
            else:
                stands = self.rows[id(tensor)] = self.storage + _integer(n) + b"\x86Q"
        elif path not in self.paths:
            raise _NotSimple  # a further name of it: a tie
        self.out.append(stands)

    def add(self, tensor: Tensor, path: str) -> int:
        """The row of a new plain tensor. As _Saver.plain and add_plain, for memory on the CPU in one piece of code."""
        saver = self.saver
        if tensor.layout is not _STRIDED or tensor.is_nested:
            raise _NotSimple
        dtype, shape = tensor.dtype, tensor.shape
        form = saver.forms.get((dtype, shape))
        location = saver.cpu
        if form is None or location is None or not tensor.is_cpu:
            found = saver.plain(tensor)
            if found is None or found[1]._cdata in saver.index:
                raise _NotSimple
            n = saver.add_plain(tensor, *found)
            if path not in self.paths and _is_valid_name(path):
                self.paths.add(path)
                saver.entries[n].name = path
        else:
            if (
                tensor.stride() != form[1]
                or tensor.requires_grad
                or tensor.is_neg()
                or tensor._backward_hooks
                or tensor.__dict__
                or tensor.storage_offset()
                or (_has_names is not None and _has_names(tensor))
            ):
                raise _NotSimple
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                raise _NotSimple from None
            nbytes, cdata = storage.nbytes(), storage._cdata
            if nbytes != form[2] or cdata in saver.index:
                raise _NotSimple
            pointer = tensor.data_ptr()
            if pointer and saver.dtypes.setdefault(pointer, dtype) is not dtype:
                raise _NotSimple  # torch refuses it, and words that
            entries = saver.entries
            n = saver.index[cdata] = len(entries)
            # Of two tensors with one path the first has it.
            paths = self.paths
            name = None
            if path not in paths and ((path.isascii() and path[:2] != "__") or _is_valid_name(path)):
                paths.add(path)
                name = path
            entries.append(StorageEntry(nbytes, location, form[0], name, True, storage, pointer))
            saver.keep.append(tensor)
        return n

    def value(self, value: object, path: str, depth: int) -> None:
        kind = type(value)
        if kind is Tensor:
            self.tensor(value, path)  # type: ignore[arg-type]
        elif kind is str:
            self.text(value)  # type: ignore[arg-type]
        elif kind is int:
            self.out.append(_integer(value))  # type: ignore[arg-type]
        elif kind is float:
            self.out.append(b"G" + _float(value))
        elif value is None:
            self.out.append(b"N")
        elif kind is bool:
            self.out.append(b"\x88" if value else b"\x89")
        elif kind is dict or kind is OrderedDict:
            self.dict(value, path + "." if depth else "", depth)  # type: ignore[arg-type]
        elif kind is list:
            self.list(value, path + "." if depth else "", depth)  # type: ignore[arg-type]
        elif kind is tuple:
            self.tuple(value, path + "." if depth else "", depth)  # type: ignore[arg-type]
        else:
            raise _NotSimple

    def enter(self, container: object, depth: int) -> None:
        # One that is there twice has several paths, and its tensors ties.
        if id(container) in self.seen or depth == _SIMPLE_DEPTH_MAX:
            raise _NotSimple
        self.seen.add(id(container))

    def dict(self, value: dict[Any, Any], prefix: str, depth: int) -> None:
        self.enter(value, depth)
        out = self.out
        ordered = type(value) is OrderedDict
        if ordered:
            self.global_(b"collections\nOrderedDict")
            out.append(b")R")
        else:
            out.append(b"}")
        text, tensor = self.text, self.tensor
        left = 0
        for key, entry in value.items():
            if not left:
                out.append(b"(")
                left = _BATCH
            if type(key) is str:
                text(key)
                path = prefix + key
            elif type(key) is int:
                out.append(_integer(key))
                path = f"{prefix}{key}"
            else:
                raise _NotSimple
            if type(entry) is Tensor:
                tensor(entry, path)
            else:
                self.value(entry, path, depth + 1)
            left -= 1
            if not left:
                out.append(b"u")
        if left:
            out.append(b"u")
        if ordered and vars(value):
            # torch's state dicts keep their versions there. It has no paths: tensors in it are for a pickler.
            before = len(self.saver.entries)
            self.value(vars(value), "", depth + 1)
            if len(self.saver.entries) != before:
                raise _NotSimple
            out.append(b"b")

    def global_(self, name: bytes) -> None:
        """A class, by its name the first time."""
        get = self.globals.get(name)
        if get is not None:
            self.out.append(get)
            return
        put, self.globals[name] = self.memo()
        self.out.append(b"c" + name + b"\n" + put)

    def list(self, value: list[Any], prefix: str, depth: int) -> None:
        self.enter(value, depth)
        out = self.out
        out.append(b"]")
        for start in range(0, len(value), _BATCH):
            out.append(b"(")
            for n, entry in enumerate(value[start : start + _BATCH], start):
                self.value(entry, f"{prefix}{n}", depth + 1)
            out.append(b"e")

    def tuple(self, value: tuple[Any, ...], prefix: str, depth: int) -> None:
        get = self.again(id(value)) if value else None
        if get is not None:
            self.out.append(get)
            return
        if id(value) in self.seen or depth == _SIMPLE_DEPTH_MAX:
            raise _NotSimple
        out = self.out
        before = len(self.saver.entries)
        if value:
            self.seen.add(id(value))
        if len(value) > 3:
            out.append(b"(")
        for n, entry in enumerate(value):
            self.value(entry, f"{prefix}{n}", depth + 1)
        out.append(b"t" if len(value) > 3 else (b")", b"\x85", b"\x86", b"\x87")[len(value)])
        if value and len(self.saver.entries) == before:
            self.first[id(value)] = len(out) - 1


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    encoded = _pickle.encode_long(value)
    if len(encoded) > 255:
        raise _NotSimple
    return b"\x8a%c" % len(encoded) + encoded


_float = struct.Struct(">d").pack


def _dumps_simple(obj: object) -> Graph | None:
    """The graph of an object that _SimpleWriter can write, else None."""
    if type(obj) not in (dict, OrderedDict, list, tuple):
        return None
    writer = _SimpleWriter()
    try:
        writer.value(obj, "", 0)
    except (_NotSimple, RecursionError):  # the caller's own stack may be deep
        return None
    writer.out.append(b".")
    return Graph(b"".join(writer.out), writer.saver.entries, {}, [*writer.saver.keep, obj])


# --- the pickle as bytes ------------------------------------------------------------

# How many bytes of argument an opcode has: fixed, or a code of pickletools (negative).
_ARGUMENT: list[int | None] = [None] * 256
for _opcode in pickletools.opcodes:
    _ARGUMENT[ord(_opcode.code)] = _opcode.arg.n if _opcode.arg is not None else 0

# ("storage", n) of a plain tensor, whose tuple is never asked for again: get, int, TUPLE2, put, BINPERSID.
_ID = rb"(?:h.|j.{4})(?:K.|M..|J.{4})\x86"
_PUT = rb"(?:q.|r.{4})"
_id_match = re.compile(_ID + _PUT + rb"?Q", re.DOTALL).match
_put_and_id_match = re.compile(rb"(%b)?(?:(%b)(%b)Q)?" % (_PUT, _ID, _PUT), re.DOTALL).match

_GLOBAL, _INST, _STOP, _BINUNICODE, _BINGET, _LONG_BINGET, _BINPUT, _LONG_BINPUT = b"ci.Xhjqr"


def _argument_end(pickle: bytes, pos: int) -> int:
    """Where the opcode at ``pos`` ends. May lie past the end of a truncated pickle."""
    width = _ARGUMENT[pickle[pos]]
    pos += 1
    if width is None:
        raise FormatError(f"the object graph is damaged or hostile: byte {pos - 1} is not a pickle opcode")
    if width >= 0:
        return pos + width
    if width == pickletools.UP_TO_NEWLINE:
        lines = 2 if pickle[pos - 1] in (_GLOBAL, _INST) else 1
        for _ in range(lines):
            pos = pickle.index(b"\n", pos) + 1
        return pos
    if width == pickletools.TAKEN_FROM_ARGUMENT1:
        return pos + 1 + pickle[pos]
    if width == pickletools.TAKEN_FROM_ARGUMENT8U:
        return pos + 8 + int.from_bytes(pickle[pos : pos + 8], "little")
    return pos + 4 + int.from_bytes(pickle[pos : pos + 4], "little")


def _without_unused_puts(pickle: bytes) -> bytes:
    """The same pickle without the memo entries that nothing gets: a quarter smaller, a third faster to load.

    pickletools.optimize does this too, at ten times the cost.
    """
    puts: list[tuple[int, int]] = []
    gets: set[bytes] = set()
    pos = 0
    try:
        while True:
            match = _put_and_id_match(pickle, pos)
            assert match is not None
            if match.end() != pos:
                if match.start(1) >= 0:
                    puts.append(match.span(1))
                if match.start(2) >= 0:
                    first = pickle[match.start(2)]
                    start = match.start(2) + 1
                    gets.add(pickle[start : start + (1 if first == _BINGET else 4)])
                    puts.append(match.span(3))
                pos = match.end()
                continue
            op = pickle[pos]
            if op == _BINUNICODE:
                pos += 5 + int.from_bytes(pickle[pos + 1 : pos + 5], "little")
                continue
            end = _argument_end(pickle, pos)
            if op in (_BINGET, _LONG_BINGET):
                gets.add(pickle[pos + 1 : end])
            elif op == _STOP:
                break
            elif op in b"gp":  # GET and PUT in text: not of protocol 2
                return pickle
            pos = end
    except (FormatError, IndexError, ValueError):
        return pickle  # not a pickle as the standard library writes it: leave it alone
    pieces = []
    last = 0
    for start, end in puts:
        if pickle[start + 1 : end] not in gets:
            pieces.append(pickle[last:start])
            last = end
    pieces.append(pickle[last:])
    return b"".join(pieces)


# A stack item weighs its nodes as a tree, and a tuple is as deep as its deepest item plus one. CPython hashes
# tuples by recursion with neither a guard nor a cache: deep ones overflow the C stack, and thirty levels of
# (x, x) take a minute. What the simulation below keeps of an item is `depth << _DEPTH_SHIFT | weight`.
_DEPTH_SHIFT = 48
_WEIGHT_MASK = (1 << _DEPTH_SHIFT) - 1
_DEPTH_MAX = 10_000
_TUPLE_WEIGHT_MAX = 100_000_000
_KEY_WEIGHT_MAX = 10_000

_PUSH, _POP_ONE, _POP_TWO, _POP_MARK, _NOTHING, _MARKS, _TUPLES, _MARK_TUPLE, _CALLS = range(9)
_EFFECTS = {
    _PUSH: b"N\x88\x89)]}\x8fKMJGXU\x8ac",
    _POP_ONE: b"ab",
    _POP_TWO: b"s",
    _POP_MARK: b"eu",
    _NOTHING: b"\x80Q",
    _MARKS: b"(",
    _TUPLES: b"\x85\x86\x87",
    _MARK_TUPLE: b"t",
    _CALLS: b"R\x81",
}
_EFFECT: dict[int, int] = {op: effect for effect, ops in _EFFECTS.items() for op in ops}


def _tuple_of(items: list[int]) -> int:
    depth = (max(items, default=0) >> _DEPTH_SHIFT) + 1
    weight = 1 + sum(item & _WEIGHT_MASK for item in items)
    if depth > _DEPTH_MAX or weight > _TUPLE_WEIGHT_MAX:
        raise FormatError(
            f"the object graph is hostile: tuples nested {depth} deep, {weight} nodes; "
            f"at most {_DEPTH_MAX} and {_TUPLE_WEIGHT_MAX} can be loaded safely"
        )
    return depth << _DEPTH_SHIFT | weight


def _check_keys(keys: list[int]) -> None:
    if keys and max(key & _WEIGHT_MASK for key in keys) > _KEY_WEIGHT_MAX:
        raise FormatError(f"the object graph is hostile: a dictionary key of over {_KEY_WEIGHT_MAX} nodes")


def _simulate(pickle: bytes) -> dict[bytes, int]:
    """Walk a pickle as the restricted unpickler would, building nothing: its globals, as written, with their place."""
    found: dict[bytes, int] = {}
    stack: list[int] = []
    marks: list[list[int]] = []
    memo: dict[bytes, int] = {}
    effects = _EFFECT
    argument = _ARGUMENT
    pos = 0
    while True:
        op = pickle[pos]
        if op == _BINUNICODE:
            stack.append(1)
            pos += 5 + int.from_bytes(pickle[pos + 1 : pos + 5], "little")
            continue
        if op in (_BINGET, _LONG_BINGET):
            match = _id_match(pickle, pos)
            if match is not None:
                stack.append(1)
                pos = match.end()
                continue
            end = pos + (2 if op == _BINGET else 5)
            stack.append(memo.get(_memo_key(pickle, pos + 1, end), 1))
            pos = end
            continue
        if op in (_BINPUT, _LONG_BINPUT):
            end = pos + (2 if op == _BINPUT else 5)
            memo[_memo_key(pickle, pos + 1, end)] = stack[-1]
            pos = end
            continue
        if op == _STOP:
            stack.pop()
            if pos + 1 != len(pickle):
                raise FormatError(f"the object graph is damaged: it ends at byte {pos + 1} of {len(pickle)}")
            return found
        effect = effects.get(op)
        if effect is None:
            _check_operand(pickle, pos)
            # A newer torch takes this opcode. Its effect is not known here, so neither are depths after it.
            return _walk(pickle, found, pos, restricted=True)
        width = argument[op]
        assert width is not None
        end = pos + 1 + width if width >= 0 else _argument_end(pickle, pos)
        if effect == _PUSH:
            stack.append(1)
            if op == _GLOBAL:
                found.setdefault(pickle[pos:end], pos)
        elif effect == _TUPLES:
            count = op - 0x84
            if len(stack) < count:
                raise IndexError
            stack[-count:] = [_tuple_of(stack[-count:])]
        elif effect == _MARKS:
            marks.append(stack)
            stack = []
        elif effect == _MARK_TUPLE:
            items = stack
            stack = marks.pop()
            stack.append(_tuple_of(items))
        elif effect == _POP_MARK:
            if op == 0x75:  # SETITEMS
                _check_keys(stack[::2])
            stack = marks.pop()
        elif effect == _POP_TWO:  # SETITEM
            stack.pop()
            _check_keys([stack.pop()])
        elif effect == _POP_ONE:
            stack.pop()
        elif effect == _CALLS:
            arguments = stack.pop()
            stack[-1] = arguments
        pos = end


def _memo_key(pickle: bytes, start: int, end: int) -> bytes:
    # BINGET of 5 and LONG_BINGET of 5 name the same entry.
    return pickle[start:end].rstrip(b"\0")


# The ways, besides GLOBAL, to name something to call: INST, OBJ, STACK_GLOBAL, EXT1, EXT2, EXT4.
_OTHER_CALLS = frozenset(b"io\x93\x82\x83\x84")
_MEMO_AND_STOP = frozenset(b"hjqr.")


def _walk(
    pickle: bytes, found: dict[bytes, int], pos: int, *, restricted: bool = False, all_calls: bool = False
) -> dict[bytes, int]:
    """Check that a pickle is whole, opcode by opcode, and gather its globals.

    ``restricted``: refuse what torch's restricted unpickler would; ``all_calls``: gather every spelling of a global.
    """
    argument = _ARGUMENT
    while True:
        op = pickle[pos]
        width = argument[op]
        end = pos + 1 + width if width is not None and width >= 0 else _argument_end(pickle, pos)
        if restricted and op not in _EFFECT and op not in _MEMO_AND_STOP:
            _check_operand(pickle, pos)
        if op == _GLOBAL or (all_calls and op in _OTHER_CALLS):
            found.setdefault(pickle[pos:end], pos)
        elif op == _STOP:
            if end != len(pickle):
                raise FormatError(f"the object graph is damaged: it ends at byte {end} of {len(pickle)}")
            return found
        pos = end


def scan(pickle: bytes, *, weights_only: bool = True) -> None:
    """Refuse a graph before any data is read.

    Raises UnsafePickle if ``weights_only`` and the graph names a global, or has an opcode, that the installed
    torch refuses; FormatError if it is truncated or no pickle at all. ``add_safe_globals`` is honoured.
    """
    try:
        found = _simulate(pickle) if weights_only else _walk(pickle, {}, 0)
    except (IndexError, ValueError) as error:
        if isinstance(error, StriateError):
            raise
        raise FormatError(
            f"the object graph is damaged: truncated, or no pickle ({len(pickle)} bytes)"
        ) from None
    if weights_only:
        for instruction in found:
            probe = b"\x80\x02" + instruction + b"."
            try:
                _private().Unpickler(io.BytesIO(probe)).load()
            except _pickle.UnpicklingError as error:
                raise UnsafePickle(_torch_words(probe, error)) from None
            except UnicodeDecodeError:
                raise FormatError("the object graph is damaged: the name of a global is not text") from None


# Globals whose calls look at no tensor's values: those that torch.save itself writes for strided tensors, their
# containers and their types.
_STANDARD = re.compile(
    rb"c(?:"
    rb"collections\n(?:OrderedDict|Counter)"
    rb"|torch\._utils\n_rebuild_(?:tensor_v2|tensor_v3|parameter|meta_tensor_no_storage)"
    rb"|torch\n[A-Z]\w*Storage|torch\.storage\n\w+Storage"
    rb"|torch\n(?:u?int\d+|b?float\d\w*|complex\d+|bits\w+|bool|Size|device)"
    rb"|__builtin__\n(?:set|complex|bytearray)|_codecs\nencode"
    rb")\n"
).fullmatch


def is_standard(pickle: bytes) -> bool:
    """Does rebuilding this graph leave the values of its tensors unread?

    Then it may be rebuilt around tensors whose bytes come later. False for sparse tensors, whose invariants are
    checked, for quantized ones, whose scales are read, for subclasses and for every class of the user's.
    The graph must have passed ``scan``.
    """
    try:
        return all(_STANDARD(instruction) for instruction in _walk(pickle, {}, 0, all_calls=True))
    except (IndexError, ValueError):
        return False


_DECIMAL_TEXT = re.compile(rb"X([\x01-\x13])\0\0\0([0-9]+)|\x8c([\x01-\x13])([0-9]+)")


def storages_named(pickle: bytes) -> set[int]:
    """Rows that the graph may name as storages (of views, ties, parameters), not only as plain tensors.

    All rows whose number stands anywhere in the graph as text: a few too many, never one too few.
    """
    found: set[int] = set()
    for match in _DECIMAL_TEXT.finditer(pickle):
        length, digits = match[1] or match[3], match[2] or match[4]
        found.add(int(digits[: length[0]]))
    return found


@functools.cache
def _takes_operand(op: int) -> bool:
    """Does the installed torch's restricted unpickler know this opcode?"""
    try:
        _private().Unpickler(io.BytesIO(bytes((op,)))).load()
    except _pickle.UnpicklingError as error:
        return "Unsupported operand" not in str(error)
    except Exception:
        return True  # it knew it well enough to miss its argument
    return True


def _check_operand(pickle: bytes, pos: int) -> None:
    if _ARGUMENT[pickle[pos]] is None:
        raise FormatError(f"the object graph is damaged or hostile: byte {pos} is not a pickle opcode")
    if not _takes_operand(pickle[pos]):
        # With the graph's own protocol, so that torch warns of it as it does when it loads one.
        probe = (pickle[:2] if pickle[:1] == b"\x80" else b"\x80\x02") + pickle[pos : pos + 1]
        try:
            _private().Unpickler(io.BytesIO(probe)).load()
        except _pickle.UnpicklingError as error:
            raise UnsafePickle(_torch_words(probe, error)) from None
        raise AssertionError("torch took an opcode that it refused a moment ago")


# --- torch's privates -----------------------------------------------------------------

# Bound here so that whoever puts striate's load in the place of torch.load gets no circle.
_torch_load = torch.load


def _tls() -> Any:
    return getattr(torch.serialization, "_serialization_tls", None)


@functools.cache
def _private() -> Any:
    """torch's restricted unpickler's module, tested once: a private that moved is named with torch's version."""
    try:
        from torch import _weights_only_unpickler

        module: Any = _weights_only_unpickler

        marker = object()

        def persistent_load(pid: object) -> object:
            return marker if pid == ("storage", 0) else None

        data = b"\x80\x02}q\x00X\x01\x00\x00\x00aX\x07\x00\x00\x00storageK\x00\x86Qs."
        unpickler = module.Unpickler(io.BytesIO(data), encoding="utf-8")
        unpickler.persistent_load = persistent_load
        if unpickler.load() != {"a": marker}:
            raise TypeError("the restricted unpickler does not hand tuples to persistent_load")
        try:
            module.Unpickler(io.BytesIO(b"\x80\x02cposix\nsystem\n.")).load()
        except _pickle.UnpicklingError:
            pass
        else:
            raise TypeError("the restricted unpickler let posix.system through")
        for owner, name in (
            (torch._utils, "_sparse_tensors_to_validate"),
            (torch._utils, "_validate_loaded_sparse_tensors"),
            (torch._utils, "_rebuild_tensor_v2"),
            (torch._guards, "detect_fake_mode"),
            (torch.serialization, "default_restore_location"),
            (torch.serialization, "StorageType"),
        ):
            getattr(owner, name)
        torch._guards.detect_fake_mode(None)
        _TypedStorage(wrap_storage=_UntypedStorage(0, device="cpu"), dtype=torch.uint8, _internal=True)
    except Exception as error:
        raise StriateError(
            f"torch {torch.__version__} keeps its restricted unpickler otherwise than striate expects "
            f"({type(error).__name__}: {error}). Nothing was read. "
            "Use another version of torch, or a newer striate."
        ) from error
    return module


def _torch_words(probe: bytes, error: Exception) -> str:
    """What the installed torch.load says of this pickle; its advice on add_safe_globals is not ours to reword."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", probe)
        file.writestr("archive/version", "3\n")
    archive.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _torch_load(archive, weights_only=True)
    except _pickle.UnpicklingError as said:
        return str(said)
    except Exception:
        pass
    return f"Weights only load failed. {error}"


# --- loading -------------------------------------------------------------------------


class Restore:
    """torch's ``map_location``, resolved once for a load.

    ``map_location`` is None, a str, a torch.device, a dict or a callable, as torch.load takes it. ``reads_data``
    is False where no bytes are wanted: the meta device, FakeTensorMode, ``torch.serialization.skip_data``.
    """

    def __init__(self, map_location: Any) -> None:
        _private()
        self._map: Any = map_location
        self._calls = False
        if isinstance(map_location, torch.device):
            self._map = str(map_location)
        elif map_location is not None and not isinstance(map_location, (dict, str, bytes)):
            if not callable(map_location):
                raise TypeError(
                    "map_location must be None, a string, a torch.device, a dict or a callable, "
                    f"not {type(map_location).__name__}"
                )
            self._calls = True
        self._meta = (map_location.type if isinstance(map_location, torch.device) else map_location) == "meta"
        self._fake = torch._guards.detect_fake_mode(None) is not None
        self.reads_data: bool = not (self._meta or self._fake or getattr(_tls(), "skip_data", False))

    def _target(self, location: str) -> Any:
        if self._map is None or self._calls:
            return location
        if isinstance(self._map, dict):
            return self._map.get(location, location)
        return self._map

    def check(self, locations: Iterable[str]) -> None:
        """Raise what torch raises if a device is absent or a tag unknown, before any data is read.

        Callables are not asked: each must see each storage once, when its bytes are there.
        """
        if self._calls or self._meta or self._fake:
            return
        empty = _UntypedStorage(0, device="cpu")
        for location in set(locations):
            _default_restore_location(empty, self._target(location))

    def allocate(self, nbytes: int, location: str) -> torch.UntypedStorage:
        """A storage of ``nbytes`` bytes to read into: on the CPU, or on meta where no data is read."""
        if self._meta:
            return cast(torch.UntypedStorage, _UntypedStorage(nbytes, device="meta"))
        if self._fake:
            storage: Any = _UntypedStorage(nbytes, device="meta")
            storage._fake_device = location
            return cast(torch.UntypedStorage, storage)
        return cast(torch.UntypedStorage, _UntypedStorage(nbytes, device="cpu"))

    def apply(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """The storage on the device where it belongs, its bytes with it."""
        if self._meta or self._fake:
            return storage
        if self._calls:
            result = self._map(storage, location)
            if result is not None:
                if not isinstance(result, torch.UntypedStorage):
                    # torch refuses this in its own words.
                    _TypedStorage(wrap_storage=result, dtype=torch.uint8, _internal=True)
                return cast(torch.UntypedStorage, result)
        restored: torch.UntypedStorage = _default_restore_location(storage, self._target(location))
        return restored


class _Loader:
    """Turns persistent ids back into tensors and storages; trusts nothing that an id says."""

    def __init__(
        self,
        plains: Sequence[Plain | None],
        storages: Sequence[torch.UntypedStorage],
        tensors: Mapping[int, Tensor],
    ) -> None:
        self.plains = plains
        self.storages = storages
        self.tensors: dict[int, Tensor] = dict(tensors)
        self.typed: dict[tuple[int, torch.dtype], Any] = {}
        self.forms: dict[tuple[str, tuple[int, ...]], tuple[int, torch.dtype]] = {}
        self.makers: dict[tuple[torch.dtype, torch.device], Callable[[], Tensor]] = {}
        self.sizes: dict[int, int] = {}  # bytes of the storages that torch's rebuild has been given
        self.fake = torch._guards.detect_fake_mode(None) is not None

    def form(self, plain: Plain) -> tuple[int, torch.dtype]:
        """Bytes and dtype of a geometry that may come from a hostile file."""
        shape = plain.shape
        dtype = DTYPES.get(plain.dtype)
        if dtype is None:
            raise FormatError(f"this torch ({torch.__version__}) has no dtype for {plain.dtype!r}")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise FormatError(f"{shape!r} is not the shape of a tensor")
        # The product with zeros as ones: it bounds the strides, which torch computes without a check.
        if math.prod(size or 1 for size in shape) * dtype.itemsize > _INT64_MAX:
            raise FormatError(f"{shape!r} is too large to be the shape of a tensor")
        found = self.forms[plain.dtype, shape] = (math.prod(shape) * dtype.itemsize, dtype)
        return found

    def maker(self, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
        # The device is given: default devices and `with torch.device(...)` have no say. Of the ways to an empty
        # tensor of a given dtype, Tensor.new() takes half the time of torch.empty().
        empty = functools.partial(torch.empty, (0,), dtype=dtype, device=device)
        make = empty().new if device.type in ("cpu", "cuda") else empty
        self.makers[dtype, device] = make
        return make

    def tensor(self, n: int) -> Tensor:
        """The plain tensor of row n, made once."""
        tensor = self.tensors.get(n)
        if tensor is not None:
            return tensor
        plain = self.plains[n]
        storage = self.storages[n]
        if plain is None:
            raise FormatError(
                f"the object graph is damaged: storage {n} is used as a tensor, but has no dtype and shape"
            )
        nbytes, dtype = self.forms.get((plain.dtype, plain.shape)) or self.form(plain)
        if nbytes != storage.nbytes():
            raise FormatError(
                f"storage {n} has {storage.nbytes()} bytes, {plain.dtype} of shape {plain.shape} needs {nbytes}"
            )
        if self.fake:
            # Through torch's rebuild, which gives the tensor the device that it pretends to be on.
            rebuild: Any = torch._utils._rebuild_tensor_v2
            stride = _default_stride(plain.shape)
            made: Tensor = rebuild(self.typed_storage(n, dtype), 0, plain.shape, stride, False, OrderedDict())
        else:
            device = storage.device
            make = self.makers.get((dtype, device)) or self.maker(dtype, device)
            made = make().set_(storage, 0, plain.shape)  # type: ignore[call-overload]
        self.tensors[n] = made
        return made

    def typed_storage(self, n: int, dtype: torch.dtype) -> Any:
        typed = self.typed.get((n, dtype))
        if typed is None:
            # As torch.load: rebuild functions and user code get TypedStorage, even for an untyped one.
            typed = self.typed[n, dtype] = _TypedStorage(
                wrap_storage=self.storages[n], dtype=dtype, _internal=True
            )
        return typed

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is tuple and len(pid) > 1 and type(pid[0]) is str and pid[0] == "storage":
            if len(pid) == 2:
                n = pid[1]
                if type(n) is int and 0 <= n < len(self.storages):
                    return self.tensor(n)
                raise FormatError(
                    f"the object graph is damaged: no storage {_brief(n)} of {len(self.storages)}"
                )
            if len(pid) == 5:
                return self.storage(*pid[1:])
        raise FormatError(f"the object graph is damaged: {_brief(pid)} does not name a storage")

    def storage(self, kind: Any, key: Any, location: Any, numel: Any) -> Any:
        if kind is torch.UntypedStorage:
            dtype: Any = torch.uint8
        elif isinstance(kind, (torch.serialization.StorageType, type)):
            dtype = getattr(kind, "dtype", None)
        else:
            dtype = None
        if not isinstance(dtype, torch.dtype):
            raise FormatError(f"the object graph is damaged: {_brief(kind)} is not a type of storage")
        if not (type(key) is str and len(key) < 20 and key.isascii() and key.isdigit()):
            raise FormatError(f"the object graph is damaged: {_brief(key)} is not the key of a storage")
        n = int(key)
        if n >= len(self.storages):
            raise FormatError(f"the object graph is damaged: no storage {n} of {len(self.storages)}")
        if type(location) is not str or type(numel) is not int or numel < 0:
            raise FormatError(
                f"the object graph is damaged: storage {n} of {_brief(numel)} items at {_brief(location)}"
            )
        nbytes = self.storages[n].nbytes()
        if numel * dtype.itemsize > nbytes:
            raise FormatError(
                f"the object graph is damaged: {_brief(numel)} items of {dtype} in the {nbytes} bytes of storage {n}"
            )
        self.sizes[n] = nbytes
        return self.typed_storage(n, dtype)

    def check_sizes(self) -> None:
        """A view that lies beyond its storage makes torch grow it, by whatever was in memory there."""
        for n, nbytes in self.sizes.items():
            if self.storages[n].nbytes() > nbytes:
                raise FormatError(
                    f"the object graph is damaged: a view lies beyond the {nbytes} bytes of storage {n}"
                )


def plain_tensor(plain: Plain | None, storage: torch.UntypedStorage) -> Tensor:
    """The plain tensor whose bytes are ``storage``. FormatError if they do not fit each other."""
    return _Loader([plain], [storage], {}).tensor(0)


def _brief(value: object) -> str:
    """At most 80 characters of a value that comes from a file: no repr of a tower of tuples."""
    if isinstance(value, (str, bytes)):
        return repr(value[:60])
    if isinstance(value, int):
        return repr(value) if value.bit_length() < 128 else "an int of many digits"
    return f"a {type(value).__name__}"


# Failures of the unpickler itself (an empty stack, a missing memo entry) and of the few functions of torch that it
# calls with whatever the graph says mean that the graph is damaged. The same exceptions out of a class that the user
# allowed are that class's own, and pass.
_GARBAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
    struct.error,
)


@functools.cache
def _rebuilding_files() -> frozenset[str]:
    modules = (
        torch._utils,
        torch._tensor,
        torch.nn.parameter,
        torch.serialization,
        torch.storage,
        _private(),
    )
    return frozenset(str(module.__file__) for module in modules)


def _is_garbage(error: Exception) -> bool:
    if not isinstance(error, _GARBAGE) and type(error) is not RuntimeError:
        return False
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    calls = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in _rebuilding_files():
            return False
        calls.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    if any(call.startswith("_rebuild_device_tensor") for call in calls):
        return False  # a tensor that goes to its device by itself fails if the device does
    # Of torch's functions, those that set a strided tensor's storage need memory only if its view lies beyond it.
    return "allocate" not in str(error) or any(call.startswith("_rebuild_tensor") for call in calls)


class _KeepDevices(TorchFunctionMode):
    """Sparse tensors stay on the device of their indices: torch's rebuild would ask the default device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.sparse_coo_tensor, torch.sparse_compressed_tensor) and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": args[0].device}
        return func(*args, **kwargs)


def _devices_kept() -> AbstractContextManager[object]:
    # A mode makes every call of torch slower: only where a default device is set. (torch.get_default_device()
    # would do, but in torch 2.6 it fails after set_default_device(None).)
    return nullcontext() if torch.empty(0).device.type == "cpu" else _KeepDevices()


def loads(
    pickle: bytes | None,
    names: Sequence[str],
    plains: Sequence[Plain | None],
    storages: Sequence[torch.UntypedStorage],
    *,
    weights_only: bool = True,
    map_location: Any = None,
    pickle_module: Any = None,
    tensors: Mapping[int, Tensor] | None = None,
    **pickle_load_args: Any,
) -> Any:
    """The object again, from its graph and from storages that hold their bytes on their devices already.

    ``names`` matter only without a graph (``pickle=None``): then the result is a dict of names to plain tensors,
    in the order given. ``tensors`` gives tensors of the caller's for some rows, in place of new ones.
    Accepts what the installed torch.load accepts. UnsafePickle: ``weights_only`` forbids it; FormatError: the
    graph is damaged or does not fit the table. Run ``scan`` first: it refuses before data is read.
    """
    if not len(plains) == len(storages) or (pickle is None and len(names) != len(plains)):
        raise ValueError(f"{len(names)} names, {len(plains)} geometries, {len(storages)} storages")
    if weights_only and pickle_module is not None:
        raise RuntimeError("Can not safely load weights when explicit pickle_module is specified")
    if weights_only and pickle_load_args:
        warnings.warn("pickle_load_args only works if `weights_only=False`.", stacklevel=2)
    pickle_load_args.setdefault("encoding", "utf-8")
    module = _private()
    loader = _Loader(plains, storages, tensors or {})
    tls = _tls()
    before = getattr(tls, "map_location", None)
    if tls is not None:
        tls.map_location = map_location  # for wrapper subclasses, which place themselves
    try:
        with collector_paused(), _devices_kept():
            if pickle is None:
                tensor = loader.tensor
                result: Any = {name: tensor(n) for n, name in enumerate(names)}
                if len(result) != len(names):
                    raise FormatError("the checkpoint has two tensors of one name")
            elif weights_only:
                result = _loads_restricted(pickle, loader, module, pickle_load_args)
            else:
                result = _loads_unrestricted(pickle, loader, pickle_module or _pickle, pickle_load_args)
        torch._utils._validate_loaded_sparse_tensors()
        return result
    finally:
        if tls is not None:
            tls.map_location = before
        # torch leaves them behind when a load fails, for the next load in the process to trip over.
        torch._utils._sparse_tensors_to_validate.clear()


def _loads_restricted(pickle: bytes, loader: _Loader, module: Any, load_args: dict[str, Any]) -> Any:
    unpickler = module.Unpickler(io.BytesIO(pickle), **load_args)
    unpickler.persistent_load = loader.persistent_load
    try:
        result = unpickler.load()
    except _pickle.UnpicklingError as error:
        raise UnsafePickle(f"Weights only load failed. {error}") from None
    except StriateError:
        raise
    except Exception as error:
        if _is_garbage(error):
            raise FormatError(f"the object graph is damaged: {type(error).__name__}: {error}") from error
        raise
    loader.check_sizes()
    return result


def _loads_unrestricted(pickle: bytes, loader: _Loader, pickle_module: Any, load_args: dict[str, Any]) -> Any:
    class Unpickler(pickle_module.Unpickler):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            if "Storage" in name:
                try:
                    return torch.serialization.StorageType(name)
                except KeyError:
                    pass
            return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)

    unpickler = Unpickler(io.BytesIO(pickle), **load_args)
    unpickler.persistent_load = loader.persistent_load
    return unpickler.load()


assert sys.byteorder == "little", "safetensors is little-endian, and so is striate"
