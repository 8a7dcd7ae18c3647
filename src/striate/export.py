"""A checkpoint as other programs want it: one safetensors file, or a file of torch.save.

Both are written a window at a time, so that their size needs no memory.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np
import torch

from striate import graph, torch_api
from striate.errors import FormatError, StriateWarning
from striate.member import Readable
from striate.notices import warn
from striate.output_file import OutputFile
from striate.streaming import parts_of

__all__ = ["Exported", "export_safetensors", "export_torch"]

Progress = Callable[[int], None]

# mmap(2), Linux: memory that is never touched is not counted against what the machine has.
_MAP_NORESERVE = 0x4000


@dataclass(frozen=True)
class Exported:
    """What an export wrote. Sizes in bytes.

    ``left_out``: what this form has no room for, in words; empty when everything is in the file.
    """

    path: str
    form: Literal["safetensors", "torch"]
    file_bytes: int
    tensors_count: int
    left_out: tuple[str, ...]


# ---- safetensors -----------------------------------------------------------


def export_safetensors(
    source: Readable,
    path: str | os.PathLike[str],
    *,
    ties: Literal["drop", "copy"] = "drop",
    overwrite: bool = False,
    inputs: Sequence[str] = (),
    verify: bool = True,
    progress: Progress | None = None,
) -> Exported:
    """Writes the tensors that have a name, a dtype and a shape of their own as one safetensors file.

    ties: further names of one tensor are left out ("drop", as safetensors.torch.load_model expects), or get copies.
    Raises what reading raises; StriateError and DriveError for the file to be. Nothing is left of a failed export.
    """
    held = source.manifest
    table = held.table
    rows = [int(n) for n in np.argsort(table.offsets, kind="stable") if table.is_named(int(n))]
    row_of = {table.names[n]: n for n in rows}
    named = [(table.names[n], n) for n in rows]
    tied = [(other, row_of[kept]) for other, kept in held.ties.items() if kept in row_of]
    passes = [named]
    if ties == "copy":
        passes += _passes(tied)
    metadata = {
        key: value
        for key, value in held.metadata.items()
        if not key.startswith("striate.") and key not in held.ties
    }
    if ties == "drop":
        # Further names of one tensor are told in the way that safetensors.torch.load_model understands.
        metadata.update((other, table.names[n]) for other, n in tied)
    header = _header([entry for one in passes for entry in one], metadata, source)
    total = len(header) + sum(int(table.lengths[n]) for one in passes for _, n in one)
    done = 0
    with OutputFile(path, overwrite=overwrite, inputs=[source.path, *inputs]) as out:
        out.reserve(total)
        out.write(header)
        for one in passes:
            for part in parts_of(source, [n for _, n in one], verify=verify):
                out.write(part.data.data)
                done += len(part.data)
                if progress is not None:
                    progress(done)
        out.commit()
    left_out = []
    opaque = [n for n in range(len(table.names)) if not table.is_named(n)]
    if opaque:
        left_out.append(
            f"{len(opaque)} storage(s) that are shared, strided or of a type that safetensors does not have"
        )
    if tied and ties == "drop":
        left_out.append(f"{len(tied)} further name(s) of tied tensors: {_few([other for other, _ in tied])}")
    if not held.flat and not held.foreign:
        left_out.append("the Python object around the tensors (numbers, strings, nesting)")
    return Exported(out.path, "safetensors", total, sum(map(len, passes)), tuple(left_out))


def _passes(tied: Sequence[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Each pass over the data writes a row once: the second copy of a row waits for the next pass."""
    passes: list[dict[int, str]] = []
    for name, row in tied:
        one = next((one for one in passes if row not in one), None)
        if one is None:
            passes.append(one := {})
        one[row] = name
    return [[(name, row) for row, name in one.items()] for one in passes]


def _header(entries: list[tuple[str, int]], metadata: dict[str, str], source: Readable) -> bytes:
    table = source.manifest.table
    described: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, n in entries:
        end = at + int(table.lengths[n])
        described[name] = {
            "dtype": table.dtypes[n],
            "shape": list(table.shapes[n]),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-len(text) // 8) * 8
    if padded > 100_000_000:
        raise FormatError(
            f"{source.path}: the header would have {padded:,} bytes, and safetensors allows 100,000,000: export to a "
            "torch.save file."
        )
    return struct.pack("<Q", padded) + text.ljust(padded)


# ---- torch.save ------------------------------------------------------------


def export_torch(
    source: Readable,
    path: str | os.PathLike[str],
    *,
    weights_only: bool = True,
    overwrite: bool = False,
    inputs: Sequence[str] = (),
    verify: bool = True,
    progress: Progress | None = None,
) -> Exported:
    """Writes the whole object as torch.save does: torch.load, with no striate at hand, gives it back.

    weights_only: False rebuilds objects of any class, which runs code that the checkpoint names.
    An object whose rebuilding looks at its tensors' values (sparse and quantized ones, subclasses) is loaded whole,
    with a warning. Raises as export_safetensors does, and UnsafePickle.
    """
    held = source.manifest
    pickled = torch_api.graph_of(source, verify)
    if pickled is not None:
        graph.scan(pickled, weights_only=weights_only)
    with OutputFile(path, overwrite=overwrite, inputs=[source.path, *inputs]) as out:
        if pickled is not None and not graph.is_standard(pickled):
            _save_loaded(source, out, weights_only, verify)
        else:
            _save_streamed(source, pickled, out, weights_only, verify, progress)
        out.commit()
    return Exported(out.path, "torch", os.path.getsize(out.path), len(held.table.names), ())


def _save_loaded(source: Readable, out: OutputFile, weights_only: bool, verify: bool) -> None:
    warn(
        f"{source.path}: rebuilding its objects looks at their tensors' values, so that all of it is loaded into "
        f"memory ({source.manifest.table.data_bytes:,} bytes).",
        StriateWarning,
    )
    options = torch_api.LoadOptions("cpu", None, weights_only, None, verify, {})
    loaded = torch_api.load_from(source, options, False)
    out.reserve(source.manifest.table.data_bytes)
    torch.save(loaded, out.file)


def _save_streamed(
    source: Readable,
    pickled: bytes | None,
    out: OutputFile,
    weights_only: bool,
    verify: bool,
    progress: Progress | None,
) -> None:
    table = source.manifest.table
    out.reserve(table.data_bytes)
    lengths = table.lengths.tolist()
    begins = np.cumsum([0, *(-(-length // 64) * 64 for length in lengths)]).tolist()
    # Memory that nobody touches: torch asks where a storage lies and how long it is, and skip_data writes none of it.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(begins[-1], 1), flags=flags)
    storages = [
        torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=length).untyped_storage()
        if length
        else torch.UntypedStorage(0)
        for begin, length in zip(begins, lengths, strict=False)
    ]
    obj = graph.loads(pickled, table.names, table.plains(), storages, weights_only=weights_only)
    row_at = {storage.data_ptr(): n for n, storage in enumerate(storages) if lengths[n]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with torch.serialization.skip_data():
            torch.save(obj, out.file)
    out.file.flush()
    keys = _storage_order(obj)
    records = _records(out.file)
    place = {row_at[address]: records[f"data/{key}"] for key, address in enumerate(keys) if address in row_at}
    _fill(source, out, place, verify, progress)


class _OrderPickler(pickle.Pickler):
    """Meets storages in the order in which torch.save numbers them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.seen: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            obj = obj._untyped_storage
        if not isinstance(obj, torch.UntypedStorage):
            return None
        self.seen.setdefault(obj._cdata, obj.data_ptr())
        return "storage"


def _storage_order(obj: object) -> list[int]:
    """Address of each storage of an object; its place in the list is the number that torch.save gives it."""
    pickler = _OrderPickler(io.BytesIO())
    pickler.dump(obj)
    return list(pickler.seen.values())


@dataclass(frozen=True)
class _Record:
    """A record of the archive: where its bytes go, and the two places of its checksum (APPNOTE.TXT 4.3.9, 4.3.12)."""

    data_offset: int
    length: int
    descriptor_crc_offset: int
    directory_crc_offset: int


def _records(file: BinaryIO) -> dict[str, _Record]:
    """Of an archive of torch's: by name below its folder."""
    found = {}
    with zipfile.ZipFile(file) as archive:
        at = archive.start_dir
        for info in archive.infolist():
            file.seek(at)
            entry = file.read(46)
            name_bytes, extra_bytes, comment_bytes = struct.unpack("<HHH", entry[28:34])
            file.seek(info.header_offset + 26)
            local = sum(struct.unpack("<HH", file.read(4)))
            data = info.header_offset + 30 + local
            found[info.filename.partition("/")[2]] = _Record(
                data, info.file_size, data + info.file_size + 4, at + 16
            )
            at += 46 + name_bytes + extra_bytes + comment_bytes
    return found


def _fill(
    source: Readable, out: OutputFile, place: dict[int, _Record], verify: bool, progress: Progress | None
) -> None:
    """Writes the bytes that torch left out, and the checksums of the archive."""
    sums: dict[int, int] = {}
    done = 0
    for part in parts_of(source, sorted(place), verify=verify):
        record = place[part.row]
        out.file.seek(record.data_offset + part.offset)
        out.write(part.data.data)
        sums[part.row] = zlib.crc32(part.data.data, sums.get(part.row, 0))
        done += len(part.data)
        if progress is not None:
            progress(done)
    for row, crc in sums.items():
        for offset in (place[row].descriptor_crc_offset, place[row].directory_crc_offset):
            out.file.seek(offset)
            out.write(struct.pack("<I", crc))


def _few(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
