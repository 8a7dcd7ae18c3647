"""Graphs that run code or make no sense: refused before a single byte of the tensors is read."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged.museum import Specimen, readers, reads_of_data, refusal, with_graph

import striate
from striate import graph, manifest
from striate._engine import Io


class Calls:
    """A pickle that calls what it is told to."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def named(module: str, name: str, argument: str) -> bytes:
    """A pickle of protocol 2 that calls module.name(argument)."""
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + pickle.dumps((argument,), 2)[2:-1] + b"R."


HOSTILE = {
    "os.system": lambda mark: named("os", "system", f"touch {mark}"),
    "posix.system": lambda mark: named("posix", "system", f"touch {mark}"),
    "eval": lambda mark: named("__builtin__", "eval", f"open({str(mark)!r}, 'w')"),
    "builtins.exec": lambda mark: named("builtins", "exec", f"open({str(mark)!r}, 'w')"),
    "getattr of torch": lambda mark: named("torch", "load", str(mark)),
    "subprocess": lambda mark: named("subprocess", "check_output", f"touch {mark}"),
    "an object of os": lambda mark: pickle.dumps(Calls(os.mkdir, str(mark)), 2),
    "inst": lambda mark: b"\x80\x02(" + pickle.dumps(str(mark), 2)[2:-1] + b"ios\nmkdir\n.",
    "reduce of a name with dots": lambda mark: named("torch", "serialization.os.mkdir", str(mark)),
    "build on a function": lambda mark: b"\x80\x02cos\nmkdir\n}X\x01\x00\x00\x00aK\x01sb.",
    "extension": lambda mark: b"\x80\x02\x82\x01.",
    "deep in a tuple": lambda mark: b"\x80\x02" + b"N" + b"\x85" * 500 + named("os", "mkdir", str(mark))[2:],
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("engine", ["uring", "posix"])
def test_graph_that_runs_code_is_refused_before_any_data_is_read(
    broken: Path, nested: Specimen, kind: str, engine: Any, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    broken.write_bytes(with_graph(nested, HOSTILE[kind](mark)))
    io_ = Io(engine, trace=True)
    error = refusal(lambda: striate.load(broken, engine=io_))
    assert isinstance(error, (striate.UnsafePickle, striate.FormatError))
    assert str(broken) in str(error)
    assert list(reads_of_data(io_, nested.header_bytes)) == []
    into = {"model": {"d": torch.zeros(3)}}
    io_ = Io(engine, trace=True)
    refusal(lambda: striate.load_into(into, broken, engine=io_))
    assert list(reads_of_data(io_, nested.header_bytes)) == [] and not into["model"]["d"].any()
    refusal(lambda: striate.load(io.BytesIO(broken.read_bytes())))
    # What does not unpickle works on.
    assert striate.verify(broken) and striate.info(broken).graph_bytes
    assert striate.load_tensors(broken, ["model.d"])["model.d"].sum() == 3
    assert not mark.exists()


def test_refusal_is_torchs_own_with_its_advice_and_the_name(broken: Path, nested: Specimen) -> None:
    broken.write_bytes(with_graph(nested, named("os", "system", "true")))
    error = refusal(lambda: striate.load(broken))
    assert isinstance(error, striate.UnsafePickle) and isinstance(error, pickle.UnpicklingError)
    assert "os.system" in str(error) and "weights_only" in str(error)


def test_only_weights_only_false_runs_it(broken: Path, nested: Specimen, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    broken.write_bytes(with_graph(nested, pickle.dumps([Calls(os.mkdir, str(mark))], 2)))
    refusal(lambda: striate.load(broken))
    assert not mark.exists()
    assert striate.load(broken, weights_only=False) == [None]
    assert mark.is_dir()


def test_hostile_graph_among_the_data_is_read_alone_and_refused(
    shelf: Path, broken: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(manifest, "GRAPH_TEXT_MAX", 0)
    state = {"a": torch.zeros(8192), "b": torch.ones(8192), "bad": Calls(os.mkdir, str(tmp_path / "mark"))}
    striate.save(state, broken, chunk_bytes=4096)
    raw = broken.read_bytes()
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    io_ = Io("posix", trace=True)
    assert isinstance(refusal(lambda: striate.load(broken, engine=io_)), striate.UnsafePickle)
    # The graph is small and stands last.
    assert {offset for offset, _ in reads_of_data(io_, header_bytes)} == {header_bytes + 65536}
    assert isinstance(refusal(lambda: striate.load(io.BytesIO(raw))), striate.UnsafePickle)
    assert not (tmp_path / "mark").exists()


SENSELESS = {
    "one byte": b"\x80",
    "no stop": b"\x80\x02N",
    "stop alone": b".",
    "stop on an empty stack": b"\x80\x02.",
    "something after the end": b"\x80\x02N.N.",
    "text": b"this is no pickle",
    "zeros": bytes(1000),
    "unknown opcode": b"\x80\x02\xff.",
    "memo that is not there": b"\x80\x02h\x05.",
    "string longer than the graph": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "long of a gigabyte": b"\x80\x02\x8b\x00\x00\x00\x40.",
    "tuple of nothing": b"\x80\x02\x86.",
    "append to an int": b"\x80\x02K\x01K\x02a.",
    "set items of a list": b"\x80\x02](K\x01K\x02u.",
    "deep tuples": b"\x80\x02N" + b"\x85" * 300_000 + b".",
    "persistent id of text": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "persistent id of nothing": b"\x80\x02)Q.",
    "storage beyond the table": b"\x80\x02X\x07\x00\x00\x00storageK\x63\x86Q.",
    "storage negative": b"\x80\x02X\x07\x00\x00\x00storageJ\xff\xff\xff\xff\x86Q.",
    "storage as text": b"\x80\x02X\x07\x00\x00\x00storageX\x01\x00\x00\x000\x86Q.",
    "storage that is no plain tensor": b"\x80\x02X\x07\x00\x00\x00storageK\x05\x86Q.",
    "storage as a list": b"\x80\x02]X\x07\x00\x00\x00storageaK\x00aQ.",
    "unhashable key": b"\x80\x02}]K\x01s.",
}


@pytest.mark.parametrize("kind", SENSELESS)
def test_graph_without_sense_is_refused_and_crashes_nothing(
    broken: Path, nested: Specimen, kind: str
) -> None:
    pickled = SENSELESS[kind]
    broken.write_bytes(with_graph(nested, pickled))
    for name, call in readers(broken, nested.state).items():
        if name != "verify":
            assert refusal(call), name
    assert striate.verify(broken)
    # Unrestricted, Python's own unpickler may take more (deep tuples, for one); what it must not do is crash.
    with contextlib.suppress(Exception):
        striate.load(broken, weights_only=False)


def test_lists_within_lists_are_taken_or_refused_and_crash_nothing(broken: Path, nested: Specimen) -> None:
    broken.write_bytes(with_graph(nested, b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."))
    depth, found = 0, striate.load(broken)
    while found:
        depth, found = depth + 1, found[0]
    assert depth == 99_999
    with pytest.raises(striate.LoadMismatch):
        striate.load_into({"a": torch.zeros(3)}, broken)


def rebuilt(offset: int, size: tuple[int, ...], stride: tuple[int, ...], numel: int = 1500) -> bytes:
    """A tensor that looks at storage 0 of 6000 bytes in a way of the forger's choice."""
    pid = ("storage", torch.FloatStorage, "0", "cpu", numel)
    stream = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return pid if obj == "the storage" else None

    arguments = ("the storage", offset, size, stride, False, collections.OrderedDict())
    Pickler(stream, 2).dump(Calls(torch._utils._rebuild_tensor_v2, *arguments))
    return stream.getvalue()


def test_tensor_within_its_storage_is_what_the_forgery_below_leaves_behind(
    broken: Path, nested: Specimen
) -> None:
    broken.write_bytes(with_graph(nested, rebuilt(10, (5, 4), (4, 1))))
    assert torch.equal(striate.load(broken), torch.arange(10.0, 30.0).view(5, 4))


@pytest.mark.parametrize(
    ("offset", "size", "stride", "numel"),
    [
        (1490, (20,), (1,), 1500),
        (0, (1501,), (1,), 1500),
        (0, (2,), (1 << 40,), 1500),
        (1 << 40, (1,), (1,), 1500),
        (-1, (1,), (1,), 1500),
        (0, (-1,), (1,), 1500),
        (0, (2,), (-1,), 1500),
        (0, (1 << 62, 8), (1, 1), 1500),
        (0, (1 << 31, 1 << 31, 4), (0, 0, 1 << 61), 1500),
        (0, (4,), (1,), 1501),
        (0, (4,), (1,), 1 << 62),
        (0, (4,), (1,), -1),
    ],
)
def test_tensor_that_looks_outside_its_storage_is_refused(
    broken: Path, nested: Specimen, offset: int, size: Any, stride: Any, numel: int
) -> None:
    broken.write_bytes(with_graph(nested, rebuilt(offset, size, stride, numel)))
    for weights_only in (True, False):
        try:
            loaded = striate.load(broken, weights_only=weights_only)
        except (striate.StriateError, RuntimeError, ValueError, OverflowError, TypeError):
            continue
        # torch resizes a storage that it owns to fit; then every element is inside.
        storage = loaded.untyped_storage().nbytes()
        last = loaded.storage_offset() + sum(
            (n - 1) * s for n, s in zip(loaded.shape, loaded.stride(), strict=True)
        )
        assert storage <= 1 << 30 and 0 <= last * 4 < storage


def test_graph_of_ours_names_nothing_but_what_torch_allows(nested: Specimen) -> None:
    held = manifest.decode(nested.raw[: nested.header_bytes], file_bytes=len(nested.raw))
    assert held.graph is not None and held.graph_bytes is not None
    graph.scan(manifest.unpack_graph(held.graph, held.graph_bytes))
