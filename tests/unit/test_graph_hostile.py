"""Graphs made to harm: refused by name before data is read, or found damaged; never a crash or a hang."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import pickletools
import struct
import sys
import time
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from striate import graph
from striate.errors import FormatError, StriateError, UnsafePickle
from support.graphs import copied_storages, through_graph, through_torch


class Runs:
    """Calls what it is told to when it is loaded."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


class Mine:
    """A class of the user's."""

    def __init__(self, value: int) -> None:
        self.value = value


def loaded(data: bytes, count: int = 1, **args: Any) -> Any:
    """Scan and rebuild around ``count`` storages of three float32 each."""
    graph.scan(data, weights_only=args.get("weights_only", True))
    storages = [torch.UntypedStorage(12) for _ in range(count)]
    return graph.loads(data, [], [graph.Plain("F32", (3,))] * count, storages, **args)


def with_id(*pid: Any) -> bytes:
    """A graph that is one persistent id."""
    return pickle.dumps(pid, protocol=2)[:-1] + b"Q."


# --- what runs code -----------------------------------------------------------------


@pytest.mark.parametrize("call", [(os.system, "true"), (eval, "1"), (Mine, 1), (print, "hello")])
def test_a_graph_that_runs_code_is_refused_by_the_scan(call: Any) -> None:
    held = graph.dumps({"a": torch.ones(2), "b": Runs(*call)})
    assert held.pickle is not None
    with pytest.raises(UnsafePickle) as ours:
        graph.scan(held.pickle)
    with pytest.raises(pickle.UnpicklingError) as torchs:
        through_torch({"a": torch.ones(2), "b": Runs(*call)})
    assert str(ours.value) == str(torchs.value)
    graph.scan(held.pickle, weights_only=False)


def test_the_refusal_says_how_to_allow_the_class() -> None:
    held = graph.dumps([Mine(3)])
    with pytest.raises(UnsafePickle, match=r"add_safe_globals\(\[.*Mine\]\)"):
        graph.scan(held.pickle or b"")
    with torch.serialization.safe_globals([Mine]):
        assert through_graph([Mine(3), torch.ones(1)])[0].value == 3
    assert through_graph([Mine(3), torch.ones(1)], weights_only=False)[0].value == 3


def test_what_is_allowed_under_another_name_is_found_by_that_name() -> None:
    data = b"\x80\x02celsewhere\nThing\nK\x05\x85R."
    with pytest.raises(UnsafePickle):
        graph.scan(data)
    with torch.serialization.safe_globals([(Mine, "elsewhere.Thing")]):
        assert loaded(data).value == 5


def test_what_cannot_be_called_is_refused_while_rebuilding() -> None:
    for data in (b"\x80\x02K\x01)R.", b"\x80\x02K\x01)\x81.", b"\x80\x02K\x01}b.", b"\x80\x02}K\x01a."):
        graph.scan(data)
        with pytest.raises(UnsafePickle, match="Weights only load failed"):
            loaded(data)


@pytest.mark.parametrize("op", sorted(set(range(256)) - {ord(o.code) for o in pickletools.opcodes}))
def test_bytes_that_are_no_opcode_are_found(op: int) -> None:
    with pytest.raises(FormatError, match="not a pickle opcode"):
        graph.scan(b"\x80\x02" + bytes((op,)) + b".")


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_the_scan_takes_the_opcodes_that_torch_takes(opcode: pickletools.OpcodeInfo) -> None:
    code = opcode.code.encode("latin-1")
    with pytest.raises(Exception) as torchs:
        torch._weights_only_unpickler.Unpickler(io.BytesIO(code)).load()
    refused = "Unsupported operand" in str(torchs.value)
    with pytest.raises(UnsafePickle if refused else FormatError) as ours:
        graph.scan(b"\x80\x02" + code)
    assert ("Unsupported operand" in str(ours.value)) == refused


# --- persistent ids ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "pid",
    [
        (),
        ("storage",),
        ("storage", 1),
        ("storage", -1),
        ("storage", 2**70),
        ("storage", "0"),
        ("storage", True),
        ("storage", 0.0),
        ("storage", None),
        ("storage", (0,)),
        ("storage", 0, 0),
        ("storage", torch.FloatStorage, "0", "cpu"),
        ("storage", torch.FloatStorage, "0", "cpu", 1, 1),
        ("storage", torch.FloatStorage, "1", "cpu", 1),
        ("storage", torch.FloatStorage, "-1", "cpu", 1),
        ("storage", torch.FloatStorage, "٣", "cpu", 1),
        ("storage", torch.FloatStorage, "9" * 5000, "cpu", 1),
        ("storage", torch.FloatStorage, 0, "cpu", 1),
        ("storage", torch.FloatStorage, None, "cpu", 1),
        ("storage", torch.FloatStorage, "0", None, 1),
        ("storage", torch.FloatStorage, "0", "cpu", 4),
        ("storage", torch.FloatStorage, "0", "cpu", -1),
        ("storage", torch.FloatStorage, "0", "cpu", 2**70),
        ("storage", torch.FloatStorage, "0", "cpu", True),
        ("storage", torch.FloatStorage, "0", "cpu", None),
        ("storage", torch.DoubleStorage, "0", "cpu", 2),
        ("storage", torch.UntypedStorage, "0", "cpu", 13),
        ("storage", torch.float32, "0", "cpu", 1),
        ("storage", OrderedDict, "0", "cpu", 1),
        ("storage", torch.Tensor, "0", "cpu", 1),
        ("storage", torch.storage.TypedStorage, "0", "cpu", 1),
        ("storage", None, "0", "cpu", 1),
    ],
    ids=lambda pid: repr(pid)[:60],
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_an_id_that_names_no_storage_is_found(pid: Any, weights_only: bool) -> None:
    with pytest.raises(FormatError, match="object graph is damaged"):
        loaded(with_id(*pid), weights_only=weights_only)


@pytest.mark.parametrize("pid", [0, "storage", ["storage", 0], None, ("module", 0), (b"storage", 0)])
def test_an_id_of_another_kind_is_refused(pid: Any) -> None:
    data = pickle.dumps(pid, protocol=2)[:-1] + b"Q."
    with pytest.raises((UnsafePickle, FormatError)):
        loaded(data)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_good_ids_are_taken() -> None:
    assert loaded(with_id("storage", 0)).shape == (3,)
    assert loaded(with_id("storage", torch.FloatStorage, "0", "cpu", 3)).dtype == torch.float32
    assert loaded(with_id("storage", torch.UntypedStorage, "0", "cpu", 12)).nbytes() == 12


@pytest.mark.parametrize(
    ("plain", "nbytes"),
    [
        (None, 12),
        (graph.Plain("F32", (3,)), 11),
        (graph.Plain("F32", (3,)), 16),
        (graph.Plain("F99", (3,)), 12),
        (graph.Plain("F32", (-3, -1)), 12),
        (graph.Plain("F32", (3.0,)), 12),  # type: ignore[arg-type]
        (graph.Plain("F32", (True, 3)), 12),
        (graph.Plain("F32", (2**40, 2**40, 0)), 0),
        (graph.Plain("F32", (2**70, 0)), 0),
    ],
    ids=repr,
)
def test_a_geometry_that_does_not_fit_its_storage_is_found(plain: graph.Plain | None, nbytes: int) -> None:
    storage = torch.UntypedStorage(nbytes)
    for data in (None, with_id("storage", 0)):
        with pytest.raises(FormatError):
            graph.loads(data, ["a"], [plain], [storage])
    with pytest.raises(FormatError):
        graph.plain_tensor(plain, storage)


def test_two_tensors_of_one_name_are_found() -> None:
    plains, storages = [graph.Plain("U8", (1,))] * 2, [torch.UntypedStorage(1) for _ in range(2)]
    with pytest.raises(FormatError, match="two tensors of one name"):
        graph.loads(None, ["a", "a"], plains, storages)


def test_a_view_beyond_its_storage_is_found() -> None:
    storage = with_id("storage", torch.FloatStorage, "0", "cpu", 3)[2:-1]
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage
    tail = b"\x89ccollections\nOrderedDict\n)RtR."

    def number(n: int) -> bytes:
        return pickle.dumps(n, protocol=2)[2:-1]

    assert loaded(head + number(1) + number(2) + b"\x85" + number(1) + b"\x85" + tail).shape == (2,)
    for offset, size, stride in (
        (-1, 1, 1),
        (0, -1, 1),
        (0, 3, -1),
        (0, 4, 1),
        (0, 2, 3),
        (3, 1, 1),
        (2**62, 1, 1),
        (2**70, 1, 1),
        (0, 2**31, 2**33),
        (0, 2**62, 2**62),
        (0, 2**40, 1),
    ):
        data = head + number(offset) + number(size) + b"\x85" + number(stride) + b"\x85" + tail
        with pytest.raises(FormatError, match="object graph is damaged"):
            loaded(data)


# --- garbage -----------------------------------------------------------------------------


def sample() -> bytes:
    state = {
        "a": torch.ones(3),
        "b": [torch.nn.Parameter(torch.ones(3)), 1.5, (1, 2, 3, 4), {"x"}],
        "n": 10**30,
    }
    held = graph.dumps(state)
    assert held.pickle is not None
    return held.pickle


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_truncated_graph_is_found_wherever_it_ends(weights_only: bool) -> None:
    data = sample()
    for length in range(len(data)):
        with pytest.raises(FormatError):
            graph.scan(data[:length], weights_only=weights_only)
    for more in (b".", b"\0", data):
        with pytest.raises(FormatError, match="ends at byte"):
            graph.scan(data + more, weights_only=weights_only)


def test_no_flipped_byte_crashes() -> None:
    data = sample()
    for place in range(len(data)):
        for flip in (1, 0x10, 0x80, 0xFF):
            broken = bytearray(data)
            broken[place] ^= flip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with contextlib.suppress(StriateError):
                    loaded(bytes(broken), count=2)


opcodes = st.sampled_from(
    [bytes((op,)) for op in b"N\x88]})(tua\x85\x86\x87seR\x81bQ\x8f0."]
    + [b"K\x01", b"M\x01\x01", b"q\x00", b"h\x00", b"X\x01\x00\x00\x00a", b"X\x07\x00\x00\x00storage"]
    + [b"\x8a\x01\x01", b"ctorch\nSize\n", b"c__builtin__\nset\n", b"ccollections\nOrderedDict\n"]
)


@settings(max_examples=300)
@given(st.lists(opcodes, max_size=30))
def test_no_sequence_of_opcodes_crashes(parts: list[bytes]) -> None:
    with contextlib.suppress(StriateError):
        loaded(b"\x80\x02" + b"".join(parts) + b".")


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_no_noise_crashes(noise: bytes) -> None:
    for data in (noise, b"\x80\x02" + noise):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for weights_only in (True, False):
                with contextlib.suppress(StriateError):
                    graph.scan(data, weights_only=weights_only)


def test_an_error_of_an_allowed_class_is_its_own() -> None:
    class Raises:
        def __reduce__(self) -> Any:
            return (raises_key_error, ())

    held = graph.dumps([Raises()])
    with torch.serialization.safe_globals([raises_key_error]), pytest.raises(KeyError, match="my own"):
        loaded(held.pickle or b"")


def raises_key_error() -> None:
    raise KeyError("my own")


# --- towers ---------------------------------------------------------------------------------


def test_a_tower_of_tuples_cannot_overflow_the_stack() -> None:
    tower = b"\x80\x02})" + b"\x85" * 1_000_000
    for data in (tower + b"Ns.", tower + b".", b"\x80\x02c__builtin__\nset\n](" + tower[3:] + b"e\x85R."):
        with pytest.raises(FormatError, match="hostile"):
            graph.scan(data)


def test_a_tower_through_the_memo_is_seen_too() -> None:
    data = b"\x80\x02)" + b"".join(
        b"r" + struct.pack("<I", n) + b"j" + struct.pack("<I", n) + b"\x86" for n in range(20_000)
    )
    with pytest.raises(FormatError, match="hostile"):
        graph.scan(data + b".")


def test_doubled_tuples_as_a_key_cannot_hang() -> None:
    doubled = b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 60
    started = time.monotonic()
    with pytest.raises(FormatError, match="hostile"):
        graph.scan(doubled + b"Ns.")
    assert time.monotonic() - started < 5
    with pytest.raises(FormatError, match="dictionary key"):
        graph.scan(b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 15 + b"Ns.")


def test_a_tower_of_lists_loads_as_it_does_with_torch() -> None:
    depth = 200_000
    found = loaded(b"\x80\x02" + b"]" * (depth + 1) + b"a" * depth + b".")
    for _ in range(depth):
        (found,) = found
    assert found == []


def test_long_tuples_are_taken() -> None:
    state = {"t": tuple(range(200_000)), (1, (2, (3,))): 1, "n": tuple([(n, (n,))] for n in range(1000))}
    assert through_graph(state) == state


def test_a_light_key_is_not_taken_for_the_heavy_tuple_beside_it() -> None:
    light, heavy = ("a",), tuple(range(20_000))
    state = [light, heavy, heavy, {light: 1}]
    assert through_graph(state) == state


# --- torch's own state -----------------------------------------------------------------------


def test_a_failed_load_leaves_nothing_behind_in_torch() -> None:
    tls: Any = torch.serialization._serialization_tls
    sparse = graph.dumps([torch.eye(2).to_sparse()])
    assert sparse.pickle is not None
    broken = sparse.pickle[:-1] + b"K\x01)R."
    storages = copied_storages(sparse, graph.Restore(None))
    plains = [entry.plain for entry in sparse.storages]
    with pytest.raises(UnsafePickle):
        graph.loads(broken, [], plains, storages, map_location="cpu")
    assert tls.map_location is None
    assert torch._utils._sparse_tensors_to_validate == []
    graph.loads(sparse.pickle, [], plains, storages, map_location="cpu")
    assert tls.map_location is None
    assert torch._utils._sparse_tensors_to_validate == []


def test_rebuilding_sees_the_map_location_as_torch_shows_it() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(torch.serialization._serialization_tls.map_location)

    data = graph.dumps([Runs(look_at, 0)]).pickle or b""
    _hook.append(look)
    try:
        loaded(data, weights_only=False, map_location="cpu")
    finally:
        _hook.clear()
    assert seen == ["cpu"]


_hook: list[Any] = []


def look_at(_: int) -> None:
    for hook in _hook:
        hook()


def test_pickle_arguments_are_treated_as_by_torch() -> None:
    data = graph.dumps([1]).pickle or b""
    with pytest.raises(RuntimeError, match="explicit pickle_module"):
        loaded(data, pickle_module=pickle)
    with pytest.warns(UserWarning, match="pickle_load_args only works"):
        assert loaded(data, encoding="latin-1") == [1]
    assert loaded(data, weights_only=False, pickle_module=pickle, encoding="latin-1") == [1]


def test_old_module_names_are_mapped_as_by_torch() -> None:
    data = b"\x80\x02ctorch.tensor\n_rebuild_from_type_v2\n."
    assert loaded(data, weights_only=False) is torch._tensor._rebuild_from_type_v2


def test_a_private_that_moved_is_named_with_torchs_version(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch._weights_only_unpickler"]
    data = graph.dumps([1]).pickle or b""
    monkeypatch.delattr(module, "Unpickler")
    graph._private.cache_clear()
    try:
        with pytest.raises(StriateError, match=rf"torch {torch.__version__.split('+')[0]}.*Unpickler"):
            graph.loads(data, [], [], [])
    finally:
        monkeypatch.undo()
        graph._private.cache_clear()
    assert graph.loads(data, [], [], []) == [1]
