"""Checkpoints in file objects: the same bytes as on a drive, from the position where the object stands."""

from __future__ import annotations

import gzip
import io
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import striate
from support.same import same

# The generation differs from save to save, and with it the checksums that it seeds.
PER_GENERATION = ("striate.uuid", "striate.sequence", "striate.checksum", "striate.chunks")


def without_generation(file: bytes) -> bytes:
    """The bytes of a checkpoint with what differs between two saves of one object blanked out."""
    for key in PER_GENERATION:
        start = file.index(f'"{key}":"'.encode()) + len(key) + 4
        stop = file.index(b'"', start)
        file = file[:start] + b"x" * (stop - start) + file[stop:]
    return file


@pytest.fixture
def big_graph() -> list[Any]:
    """An object whose graph does not fit into the metadata and becomes an entry of the data."""
    return [torch.arange(5000), os.urandom(13 << 20), torch.ones(3)]


def test_stream_and_path_get_the_same_bytes(target: Path, flat: Any, nested: Any, engine: Any) -> None:
    for state in (flat, nested, {}, [1, 2], {"a": torch.zeros(100_000)}):
        for chunk_bytes in (4096, 4 << 20):
            stream = io.BytesIO()
            striate.save(state, stream, chunk_bytes=chunk_bytes)
            striate.save(state, target, chunk_bytes=chunk_bytes, engine=engine)
            on_path, in_stream = target.read_bytes(), stream.getvalue()
            assert len(on_path) == len(in_stream)
            assert without_generation(on_path) == without_generation(in_stream)


def test_what_a_stream_got_loads_from_a_path_and_the_other_way(target: Path, nested: Any) -> None:
    stream = io.BytesIO()
    striate.save(nested, stream)
    target.write_bytes(stream.getvalue())
    same(striate.load(target), nested)
    assert striate.verify(target)
    striate.save(nested, target)
    same(striate.load(io.BytesIO(target.read_bytes())), nested)


def test_graph_among_the_data_goes_both_ways(target: Path, big_graph: list[Any], engine: Any) -> None:
    stream = io.BytesIO()
    striate.save(big_graph, stream)
    stream.seek(0)
    same(striate.load(stream), big_graph)
    assert stream.read() == b""
    striate.save(big_graph, target, engine=engine)
    assert striate.info(target).graph_bytes > 13 << 20
    same(striate.load(target, engine=engine), big_graph)
    assert without_generation(target.read_bytes()) == without_generation(stream.getvalue())


def test_several_checkpoints_in_one_stream_each_leave_the_position_after_it(flat: Any, nested: Any) -> None:
    stream = io.BytesIO()
    stream.write(b"preface")
    states = [flat, nested, {}, "hello", {"a": torch.ones(3)}]
    positions = []
    for state in states:
        result = striate.save(state, stream, chunk_bytes=4096)
        positions.append(stream.tell())
        assert result.file_bytes == positions[-1] - (positions[-2] if len(positions) > 1 else len(b"preface"))
    stream.write(b"trailer")
    stream.seek(len(b"preface"))
    for state, position in zip(states, positions, strict=True):
        same(striate.load(stream), state)
        assert stream.tell() == position
    assert stream.read() == b"trailer"


def test_torchs_and_our_checkpoints_follow_each_other(flat: Any) -> None:
    stream = io.BytesIO()
    striate.save(flat, stream)
    at = stream.tell()
    torch.save(flat, stream)
    stream.seek(0)
    same(striate.load(stream), flat)
    assert stream.tell() == at
    same(striate.load(io.BytesIO(stream.getvalue()[at:])), flat)


def test_saving_into_the_middle_keeps_what_stands_around(flat: Any) -> None:
    stream = io.BytesIO(b"#" * 100_000)
    stream.seek(1000)
    result = striate.save({"a": torch.ones(1000)}, stream)
    assert stream.tell() == 1000 + result.file_bytes
    found = stream.getvalue()
    assert found[:1000] == b"#" * 1000
    assert found[1000 + result.file_bytes :] == b"#" * (100_000 - 1000 - result.file_bytes)


OPENERS: dict[str, Callable[[Path], Any]] = {
    "buffered": lambda path: path.open("w+b"),
    "unbuffered": lambda path: path.open("w+b", buffering=0),
    "temporary file": lambda path: tempfile.TemporaryFile(dir=path.parent),
    "named temporary file": lambda path: tempfile.NamedTemporaryFile(dir=path.parent),
    "spooled": lambda path: tempfile.SpooledTemporaryFile(max_size=1000),
}


@pytest.mark.parametrize("opened", OPENERS)
def test_open_files_of_all_kinds(target: Path, nested: Any, opened: str) -> None:
    with OPENERS[opened](target) as f:
        striate.save(nested, f)
        f.seek(0)
        same(striate.load(f), nested)
        assert f.read(1) == b""


@pytest.mark.parametrize("buffering", [-1, 0])
def test_appending_file_gets_whole_checkpoints_one_after_the_other(
    target: Path, flat: Any, nested: Any, buffering: int
) -> None:
    target.write_bytes(b"kept")
    for state in (flat, nested):
        with target.open("ab", buffering=buffering) as f:
            striate.save(state, f)
    with target.open("rb") as f:
        assert f.read(4) == b"kept"
        same(striate.load(f), flat)
        same(striate.load(f), nested)
        assert f.read() == b""


def test_file_that_appends_only_by_its_flag(target: Path, flat: Any) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "wb") as f:
        striate.save(flat, f)
        striate.save(flat, f)
    with target.open("rb") as f:
        same(striate.load(f), flat)
        same(striate.load(f), flat)


def test_object_that_appends_and_has_no_descriptor_to_ask(flat: Any) -> None:
    class Appending(io.BytesIO):
        mode = "ab"

        def write(self, data: Any) -> int:
            self.seek(0, io.SEEK_END)
            return super().write(data)

    stream = Appending(b"kept")
    striate.save(flat, stream)
    stream.seek(4)
    same(striate.load(stream), flat)


def test_compressed_stream(target: Path, nested: Any) -> None:
    with gzip.open(target, "wb") as f:
        striate.save(nested, f)
    with gzip.open(target, "rb") as f:
        same(striate.load(f), nested)


def _through(writer: Any, reader: Any, states: list[Any]) -> list[Any]:
    """Saves in a thread, loads here; both ends are closed after."""
    failed: list[BaseException] = []

    def write() -> None:
        try:
            with writer:
                for state in states:
                    striate.save(state, writer)
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=write)
    thread.start()
    with reader:
        found = [striate.load(reader) for _ in states]
        assert reader.read(1) in (b"", None)
    thread.join(30)
    assert not thread.is_alive() and not failed
    return found


def test_pipe_carries_several_checkpoints(flat: Any, nested: Any, big_graph: list[Any]) -> None:
    into, out_of = os.pipe()
    states = [nested, flat, big_graph, {"big": torch.arange(1 << 20)}]
    same(_through(os.fdopen(out_of, "wb"), os.fdopen(into, "rb"), states), states)


def test_unbuffered_pipe_with_short_transfers(nested: Any) -> None:
    into, out_of = os.pipe()
    states = [nested, {"big": torch.arange(1 << 20)}]
    same(_through(os.fdopen(out_of, "wb", buffering=0), os.fdopen(into, "rb", buffering=0), states), states)


def test_socket_carries_several_checkpoints(flat: Any, nested: Any) -> None:
    one, other = socket.socketpair()
    with one, other:
        writer, reader = one.makefile("wb"), other.makefile("rb")
        one.shutdown(socket.SHUT_RD)
        # The socket itself must close too for the reader to see an end.
        one.close()
        same(_through(writer, reader, [flat, nested]), [flat, nested])


def test_object_with_nothing_but_write_and_read(nested: Any) -> None:
    class Bare:
        def __init__(self) -> None:
            self.data = bytearray()

        def write(self, data: Any) -> int:
            self.data += bytes(data)
            return len(data)

        def read(self, size: int) -> bytes:
            head = bytes(self.data[: min(size, 1009)])  # never what was asked for
            del self.data[: len(head)]
            return head

    bare = Bare()
    striate.save(nested, bare)  # type: ignore[arg-type]
    same(striate.load(bare), nested)  # type: ignore[arg-type]


def test_writer_that_does_not_count_is_taken_at_its_word(flat: Any) -> None:
    class Uncounting(io.BytesIO):
        def write(self, data: Any) -> None:  # type: ignore[override]
            super().write(data)

    stream = Uncounting()
    striate.save(flat, stream)
    stream.seek(0)
    same(striate.load(stream), flat)


def test_writer_that_takes_little_at_a_time(flat: Any) -> None:
    class Short(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[:777])

    stream = Short()
    striate.save(flat, stream)
    stream.seek(0)
    same(striate.load(stream), flat)


@pytest.mark.parametrize("count", [0, -1, 1 << 40])
def test_writer_that_lies_about_its_count_is_an_error(flat: Any, count: int) -> None:
    class Lying(io.BytesIO):
        def write(self, data: Any) -> int:
            return count

    with pytest.raises(OSError, match="wrote"):
        striate.save(flat, Lying())


def test_full_nonblocking_pipe_is_an_error_and_no_hang() -> None:
    into, out_of = os.pipe()
    os.set_blocking(out_of, False)
    with os.fdopen(into, "rb", buffering=0), os.fdopen(out_of, "wb", buffering=0) as writer:
        with pytest.raises(BlockingIOError):
            striate.save({"big": torch.arange(1 << 20)}, writer)


def test_error_of_the_file_object_comes_through(flat: Any) -> None:
    class Broken(io.BytesIO):
        def write(self, data: Any) -> int:
            raise ConnectionResetError("the other end went away")

    with pytest.raises(ConnectionResetError, match="went away"):
        striate.save(flat, Broken())


def test_seekable_stream_that_was_cut_short_holds_no_checkpoint() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > 300_000:
                raise OSError(28, "No space left on device")
            return super().write(data)

    stream = Full()
    with pytest.raises(OSError, match="No space"):
        striate.save({"a": torch.zeros(200_000)}, stream, chunk_bytes=4096)
    stream.seek(0)
    with pytest.raises(striate.FormatError, match="did not finish"):
        striate.load(stream)


def test_stream_that_ends_early_is_named(nested: Any) -> None:
    stream = io.BytesIO()
    result = striate.save(nested, stream)
    whole = stream.getvalue()
    for length in (0, 1, 7, 8, 9, 4095, 4096, result.file_bytes - result.data_bytes, result.file_bytes - 1):
        with pytest.raises(striate.StriateError):
            striate.load(io.BytesIO(whole[:length]))
    stream.seek(0, io.SEEK_END)
    with pytest.raises(striate.FormatError, match="rewound"):
        striate.load(stream)


def test_stream_with_a_flipped_bit_names_chunk_and_tensor() -> None:
    stream = io.BytesIO()
    result = striate.save({"a": torch.zeros(5000), "b": torch.ones(5000)}, stream, chunk_bytes=4096)
    damaged = bytearray(stream.getvalue())
    damaged[-1] ^= 4
    with pytest.raises(striate.CorruptCheckpoint) as caught:
        striate.load(io.BytesIO(damaged))
    assert caught.value.tensors == ("b",)
    assert caught.value.chunk == 9 and caught.value.offset == result.file_bytes - result.data_bytes + 9 * 4096
    loaded = striate.load(io.BytesIO(damaged), verify=False)
    assert torch.equal(loaded["a"], torch.zeros(5000)) and not torch.equal(loaded["b"], torch.ones(5000))


def test_hostile_graph_in_a_stream_is_refused() -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("echo never >&2",)

    for filler in (b"", os.urandom(13 << 20)):
        stream = io.BytesIO()
        striate.save([Runs(), filler, torch.ones(3)], stream)
        stream.seek(0)
        with pytest.raises(striate.UnsafePickle, match="system"):
            striate.load(stream)


def test_text_file_and_things_that_are_no_file_are_refused(target: Path, flat: Any) -> None:
    with target.open("w") as f, pytest.raises(TypeError):
        striate.save(flat, f)  # type: ignore[arg-type]
    for thing in (7, None, object(), ["path"]):
        with pytest.raises((AttributeError, TypeError)):
            striate.save(flat, thing)  # type: ignore[arg-type]
        with pytest.raises((AttributeError, TypeError)):
            striate.load(thing)  # type: ignore[arg-type]


def test_file_not_opened_for_writing_is_an_error(target: Path, flat: Any) -> None:
    target.touch()
    with target.open("rb") as f, pytest.raises(io.UnsupportedOperation):
        striate.save(flat, f)


def test_stdout_takes_a_checkpoint(flat: Any, nested: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream))
    striate.save(nested, sys.stdout.buffer)
    stream.seek(0)
    same(striate.load(stream), nested)


def test_thread_that_trains_during_a_save_into_a_stream_makes_no_corrupt_checkpoint() -> None:
    tensor = torch.zeros(4 << 20)
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            tensor.add_(1)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        stream = io.BytesIO()
        striate.save({"w": tensor}, stream)
    finally:
        stop.set()
        trainer.join()
    stream.seek(0)
    assert striate.load(stream)["w"].shape == tensor.shape
