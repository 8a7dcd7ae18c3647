"""Files of others: of torch.save, of safetensors, and what is no checkpoint at all."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import striate
from support.same import same


def foreign(
    entries: dict[str, Any], data: bytes, *, pad: int = 0, metadata: dict[str, str] | None = None
) -> bytes:
    """A safetensors file as any other program may write it: with any padding, and so with any data offset."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    text = json.dumps(header | entries).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + data


# ---- torch.save ------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_torch_save_files_load_as_torch_loads_them(
    target: Path, nested: Any, zipped: bool, engine: Any
) -> None:
    torch.save(nested, target, _use_new_zipfile_serialization=zipped)
    wanted = torch.load(io.BytesIO(target.read_bytes()))
    same(striate.load(target, engine=engine), wanted)
    same(striate.load(os.fsencode(target), engine=engine), wanted)
    same(striate.load(target, "cpu", weights_only=False, engine=engine), nested)
    stream = io.BytesIO(target.read_bytes())
    same(striate.load(stream), wanted)


def test_torch_save_file_obeys_mmap_and_weights_only(tmp_path: Path) -> None:
    # Mapped, torch opens the path itself, and takes one that ends in .safetensors for safetensors.
    target = tmp_path / "model.pt"
    state = {"a": torch.arange(5000), "b": torch.ones(3)}
    torch.save(state, target)
    same(striate.load(target, mmap=True), state)

    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.getcwd, ()

    torch.save(Runs(), target)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        striate.load(target)
    assert striate.load(target, weights_only=False) == os.getcwd()


def test_torch_save_file_loads_into_a_target(target: Path) -> None:
    state = {"a": torch.arange(5000), "b": [torch.ones(3)], "step": 4}
    torch.save(state, target)
    into = {"a": torch.zeros(5000, dtype=torch.int64), "b": [torch.zeros(3)], "step": 0}
    tensor = into["a"]
    striate.load_into(into, target)
    same(into, state)
    assert into["a"] is tensor


def test_torch_save_file_has_no_info_and_nothing_to_verify(target: Path) -> None:
    torch.save({"a": torch.ones(3)}, target)
    with pytest.raises(striate.FormatError, match=r"torch\.save"):
        striate.info(target)
    with pytest.raises(striate.FormatError, match=r"torch\.save"):
        striate.verify(target)
    with pytest.raises(striate.FormatError, match=r"torch\.save"):
        striate.load_tensors(target, ["a"])


def test_torch_save_file_from_a_pipe_says_what_to_do() -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(3)}, stream)
    into, out_of = os.pipe()
    with os.fdopen(out_of, "wb") as writer:
        writer.write(stream.getvalue())
    with os.fdopen(into, "rb") as reader, pytest.raises(striate.FormatError, match=r"torch\.save"):
        striate.load(reader)


def test_damaged_torch_save_file_is_torchs_own_error(target: Path) -> None:
    torch.save({"a": torch.ones(3000)}, target)
    target.write_bytes(target.read_bytes()[:2000])
    with pytest.raises((RuntimeError, EOFError, OSError)) as caught:
        striate.load(target)
    with pytest.raises(type(caught.value)):
        torch.load(io.BytesIO(target.read_bytes()))


# ---- safetensors -----------------------------------------------------------

DTYPES = sorted(safetensors.torch._TYPES)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES)
def test_foreign_tensor_of_every_dtype(target: Path, dtype: str, engine: Any) -> None:
    kind = safetensors.torch._TYPES[dtype]  # type: ignore[attr-defined]
    raw = torch.arange(96, dtype=torch.uint8).reshape(2, 48)
    tensor = (raw % 2).bool() if kind == torch.bool else raw.view(kind)
    safetensors.torch.save_file({"t": tensor}, target)
    if dtype not in striate_dtypes():
        with pytest.raises(striate.FormatError, match=dtype):
            striate.load(target, engine=engine)
        return
    for loaded in (striate.load(target, engine=engine), striate.load(io.BytesIO(target.read_bytes()))):
        same(loaded, {"t": tensor})
    same(striate.load_tensors(target, ["t"], engine=engine), {"t": tensor})


def striate_dtypes() -> set[str]:
    from striate.manifest import DTYPE_BYTES

    return set(DTYPE_BYTES)


def test_every_ordinary_dtype_of_safetensors_is_known() -> None:
    # F4 and the like pack several elements into a byte; torch has one type for
    # them, and nothing computes with it.
    assert set(DTYPES) - striate_dtypes() <= {"F4", "F6_E2M3", "F6_E3M2"}


def test_foreign_file_with_data_at_any_offset(target: Path, engine: Any) -> None:
    torch.manual_seed(7)
    big, small = torch.randn(300_000), torch.arange(5, dtype=torch.int16)
    data = big.numpy().tobytes() + small.numpy().tobytes()
    entries = {
        "big": {"dtype": "F32", "shape": [300_000], "data_offsets": [0, 1_200_000]},
        "small": {"dtype": "I16", "shape": [5], "data_offsets": [1_200_000, 1_200_010]},
    }
    offsets = set()
    for pad in (*range(9), 511, 512, 4000):
        target.write_bytes(foreign(entries, data, pad=pad))
        offsets.add(striate.info(target).tensors[0].offset % 512)
        wanted = {"big": big, "small": small}
        same(striate.load(target, engine=engine), wanted)
        same(striate.load_tensors(target, ["small"], engine=engine), {"small": small})
        into = {"big": torch.zeros(300_000), "small": torch.zeros(5, dtype=torch.int16)}
        same(striate.load_into(into, target, engine=engine), wanted)
        same(striate.load(io.BytesIO(target.read_bytes())), wanted)
    assert len(offsets) >= 9


def test_foreign_file_with_entries_in_any_order_and_empty_ones(target: Path, engine: Any) -> None:
    entries = {
        "last": {"dtype": "U8", "shape": [3], "data_offsets": [4, 7]},
        "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [4, 4]},
        "first": {"data_offsets": [0, 4], "shape": [], "dtype": "F32"},
    }
    target.write_bytes(
        foreign(entries, torch.tensor(1.5).numpy().tobytes() + b"abc", metadata={"made": "by hand"})
    )
    same(
        striate.load(target, engine=engine),
        {
            "last": torch.tensor([97, 98, 99], dtype=torch.uint8),
            "none": torch.empty(0, 7),
            "first": torch.tensor(1.5),
        },
    )
    assert striate.info(target).metadata == {"made": "by hand"}


def test_foreign_file_without_tensors(target: Path, engine: Any) -> None:
    for raw in (foreign({}, b""), foreign({}, b"", metadata={}), foreign({}, b"", pad=9000)):
        target.write_bytes(raw)
        assert striate.load(target, engine=engine) == {}


def test_foreign_file_has_info_and_nothing_to_verify(target: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(3)}, target, metadata={"format": "pt"})
    found = striate.info(target)
    assert (found.kind, found.version, found.uuid, found.chunks_count) == ("safetensors", 0, "", 0)
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in found.tensors] == [("a", "F32", (3,), 12)]
    with pytest.raises(striate.FormatError, match="no checksums"):
        striate.verify(target)


def test_foreign_file_goes_where_map_location_says(target: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(3)}, target)
    assert striate.load(target, "meta")["a"].device.type == "meta"


def test_our_file_rewritten_by_safetensors_is_foreign(target: Path, flat: Any) -> None:
    """safetensors drops the metadata that it is not given: what it writes is its own, whole and unverified."""
    striate.save(flat, target)
    safetensors.torch.save_file(safetensors.torch.load_file(target), target)
    assert striate.info(target).kind == "safetensors"
    loaded = striate.load(target)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in flat.items())


def test_our_file_rewritten_with_its_metadata_says_so(target: Path, flat: Any) -> None:
    striate.save(flat, target)
    with safetensors.safe_open(target, "pt") as f:
        metadata = f.metadata()
    changed = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in flat.items()}
    safetensors.torch.save_file(changed, target, metadata=metadata)
    with pytest.raises(striate.CorruptCheckpoint, match="rewritten by another tool.*verify=False"):
        striate.load(target)
    loaded = striate.load(target, verify=False)
    assert set(loaded) == set(flat)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in changed.items())


# ---- neither ---------------------------------------------------------------

GARBAGE = {
    "empty": b"",
    "one byte": b"\x01",
    "seven bytes": b"1234567",
    "eight zeros": bytes(8),
    "a page of zeros": bytes(4096),
    "text": b"this is a text file, and not a checkpoint of anything\n" * 100,
    "random": bytes(range(256)) * 64,
    "ones": b"\xff" * 9000,
    "huge length": (1 << 63).to_bytes(8, "little") + b"{}",
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "gguf": b"GGUF\x03\x00\x00\x00" + bytes(100),
    "plain pickle": pickle.dumps({"a": 1}, 2),
    "new pickle": pickle.dumps({"a": 1}, 4),
    "json": b'{"a": [1, 2, 3]}',
    "length without header": (2).to_bytes(8, "little"),
    "length past the end": (100).to_bytes(8, "little") + b"{}",
    "not json": (16).to_bytes(8, "little") + b"{" + b"x" * 15,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_no_checkpoint_for_every_way_of_reading(target: Path, kind: str, engine: Any) -> None:
    target.write_bytes(GARBAGE[kind])
    into = {"a": torch.zeros(3)}
    for call in (
        lambda: striate.load(target, engine=engine),
        lambda: striate.load(target, engine=engine, verify=False),
        lambda: striate.load_tensors(target, ["a"], engine=engine),
        lambda: striate.load_into(into, target, engine=engine),
        lambda: striate.info(target),
        lambda: striate.verify(target, engine=engine),
    ):
        with pytest.raises(striate.FormatError) as caught:
            call()
        assert str(target) in str(caught.value)
    assert not into["a"].any()
    with pytest.raises(striate.FormatError):
        striate.load(io.BytesIO(GARBAGE[kind]))
    with pytest.raises(striate.FormatError):
        striate.load_into(into, io.BytesIO(GARBAGE[kind]))


def test_what_begins_as_a_member_and_is_none_is_called_damaged(target: Path, engine: Any) -> None:
    target.write_bytes(b"STRIATE\0" + bytes(8184))
    for call in (
        lambda: striate.load(target, engine=engine),
        lambda: striate.load_tensors(target, ["a"], engine=engine),
        lambda: striate.load_into({"a": torch.zeros(3)}, target, engine=engine),
        lambda: striate.info(target),
        lambda: striate.verify(target, engine=engine),
    ):
        with pytest.raises(striate.CorruptCheckpoint, match="superblock is damaged") as caught:
            call()
        assert str(target) in str(caught.value)
    with pytest.raises(striate.FormatError, match="load it by its path"):
        striate.load(io.BytesIO(target.read_bytes()))


def test_directory_is_an_error_for_every_way_of_reading(tmp_path: Path, engine: Any) -> None:
    for call in (
        lambda: striate.load(tmp_path, engine=engine),
        lambda: striate.load_tensors(tmp_path, ["a"], engine=engine),
        lambda: striate.load_into({}, tmp_path, engine=engine),
        lambda: striate.info(tmp_path),
        lambda: striate.verify(tmp_path, engine=engine),
    ):
        with pytest.raises(IsADirectoryError) as caught:
            call()
        assert isinstance(caught.value, striate.DriveAccess)
        assert str(tmp_path) in str(caught.value) and caught.value.filename == str(tmp_path)


def test_missing_file_is_file_not_found_for_every_way_of_reading(tmp_path: Path, engine: Any) -> None:
    for path in (tmp_path / "missing", tmp_path / "no" / "folder" / "missing"):
        for call in (
            lambda: striate.load(path, engine=engine),  # noqa: B023
            lambda: striate.load_tensors(path, ["a"], engine=engine),  # noqa: B023
            lambda: striate.load_into({}, path, engine=engine),  # noqa: B023
            lambda: striate.info(path),  # noqa: B023
            lambda: striate.verify(path, engine=engine),  # noqa: B023
        ):
            with pytest.raises(FileNotFoundError) as caught:
                call()
            assert isinstance(caught.value, striate.DriveError)
            assert caught.value.errno == errno.ENOENT and str(path) in str(caught.value)
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file").touch()
        striate.load(tmp_path / "file" / "below")


def test_loop_of_links_is_eloop(tmp_path: Path, flat: Any) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    for call in (lambda: striate.load(tmp_path / "one"), lambda: striate.save(flat, tmp_path / "one")):
        with pytest.raises(striate.DriveAccess) as caught:
            call()
        assert caught.value.errno == errno.ELOOP
    assert sorted(os.listdir(tmp_path)) == ["one", "other"]


def test_fifo_with_garbage_is_no_checkpoint(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(b"garbage and more of it"))
    writer.start()
    with pytest.raises(striate.FormatError):
        striate.load(fifo)
    writer.join(30)
    assert not writer.is_alive()


def test_looking_into_a_fifo_or_a_device_never_waits(tmp_path: Path) -> None:
    """Nobody will ever write into this one: info and verify, which want a regular file, say so at once."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/null"), Path("/dev/zero")):
        for call in (
            lambda: striate.info(path),  # noqa: B023
            lambda: striate.verify(path),  # noqa: B023
            lambda: striate.load_tensors(path, ["a"]),  # noqa: B023
        ):
            with pytest.raises(
                (striate.FormatError, striate.DriveError), match="(?i)regular file|not a file"
            ):
                call()
