"""Checkpoints to break, ways to forge them, and what every reader must say of them. Nothing here tests anything."""

from __future__ import annotations

import base64
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import striate
from striate import manifest, rescue
from striate._engine import Io
from support.sanitizer import UNDER_ASAN

CHUNK = 4096

KINDS = ("flat", "nested", "entry")


@dataclass(frozen=True)
class Specimen:
    """A whole checkpoint, as it was written. ``header_bytes``: where the data begins."""

    kind: str
    state: Any
    raw: bytes
    header_bytes: int
    text_bytes: int  # of the header, without its padding


def specimen(kind: str, folder: Path) -> Specimen:
    """Small, and yet with several chunks, shared chunks, ties, views, and a graph where ``kind`` says."""
    a = torch.arange(1500, dtype=torch.float32)
    state: Any = {
        "a": a,
        "b.c": torch.arange(900, dtype=torch.int16),
        "d": torch.ones(3),
        "e": torch.empty(0),
    }
    if kind != "flat":
        state = {
            "model": state,
            "tied": a,
            "views": [a[:10], torch.arange(20)[3:9]],
            "step": 7,
            "note": "x" * 300,
        }
        state["model"]["p"] = torch.nn.Parameter(torch.arange(40.0))
    path = folder / f"whole-{kind}"
    with pytest.MonkeyPatch.context() as patch:
        if kind == "entry":
            # As if the graph were too long for the metadata.
            patch.setattr(manifest, "GRAPH_TEXT_MAX", 0)
        striate.save(state, path, chunk_bytes=CHUNK)
    raw = path.read_bytes()
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    assert (b"__striate__.graph" in raw[:header_bytes]) == (kind == "entry")
    return Specimen(kind, state, raw, header_bytes, len(raw[:header_bytes].rstrip(b" ")))


# ---- reading in every way --------------------------------------------------


def readers(path: Path, state: Any, engine: Any = "posix") -> dict[str, Callable[[], Any]]:
    """Every way to read a checkpoint whole. Each must refuse a broken one."""
    return {
        "load": lambda: striate.load(path, engine=engine),
        "load from a stream": lambda: striate.load(io.BytesIO(path.read_bytes())),
        "load_into": lambda: striate.load_into(zeros_like(state), path, engine=engine),
        "verify": lambda: striate.verify(path, engine=engine).raise_if_damaged(),
    }


def zeros_like(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return [zeros_like(value) for value in state] if isinstance(state, list) else state


def refusal(call: Callable[[], Any]) -> striate.StriateError:
    """The StriateError that a call raises, whose message must say where and what to do."""
    with pytest.raises(striate.StriateError) as caught:
        call()
    error = caught.value
    assert len(str(error)) > 40, "a message has what, where, in what state, and what to do"
    assert ". " in str(error), f"no advice: {error}"
    return error


def rescue_refuses(path: Path) -> rescue.RescueError:
    with pytest.raises(rescue.RescueError) as caught:
        rescue.read(path)
    return caught.value


def reads_of_data(io_: Io, header_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what a traced interface read behind the header."""
    return ((t.offset, t.length) for t in io_.traces() if t.op == "read" and t.offset >= header_bytes)


# ---- forging ---------------------------------------------------------------


def plain_file(header: Any, data: bytes = b"", *, pad: int = 0) -> bytes:
    """A foreign safetensors file with any header: an object to encode, or the text itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def forged(whole: Specimen, change: Callable[[dict[str, Any]], Any], data: bytes | None = None) -> bytes:
    """The checkpoint with a changed header whose checksum fits again, as somebody who means harm would make it.

    ``change`` gets the parsed header and changes it in place. Chunk digests are left as they are.
    """
    header = json.loads(whole.raw[8 : whole.header_bytes])
    change(header)
    return sealed(header, whole.raw[whole.header_bytes :] if data is None else data)


def sealed(header: dict[str, Any], data: bytes) -> bytes:
    metadata = header["__metadata__"]
    metadata["striate.checksum"] = "0" * 32
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // 4096) * 4096 - 8
    raw = length.to_bytes(8, "little") + text.ljust(length)
    digits = xxhash.xxh3_128_hexdigest(raw).encode()
    return raw.replace(b'"striate.checksum":"' + b"0" * 32, b'"striate.checksum":"' + digits, 1) + data


def with_graph(
    whole: Specimen, pickled: bytes, *, graph_bytes: int | None = None, stored: bytes | None = None
) -> bytes:
    """The checkpoint with another graph in its metadata."""

    def change(header: dict[str, Any]) -> None:
        packed = zlib.compress(pickled) if stored is None else stored
        header["__metadata__"]["striate.graph"] = base64.b64encode(packed).decode()
        header["__metadata__"]["striate.graph_bytes"] = str(
            len(pickled) if graph_bytes is None else graph_bytes
        )

    return forged(whole, change)


def resident_bytes() -> int:
    """Memory that this process holds; 0 under AddressSanitizer, which keeps what was freed."""
    if UNDER_ASAN:
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
