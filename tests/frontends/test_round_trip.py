"""What is saved under a path comes back from it, whatever the path looks like, and nothing is left beside it."""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import striate
from support.same import same


def beside(path: str | bytes | os.PathLike[Any]) -> list[bytes]:
    """What lies in the folder of a path."""
    return sorted(os.listdir(os.path.dirname(os.fsencode(path)) or b"."))


def test_flat_dict_comes_back_with_either_engine(
    target: Path, flat: dict[str, torch.Tensor], engine: Any
) -> None:
    striate.save(flat, target, engine=engine)
    same(striate.load(target, engine=engine), flat)
    assert beside(target) == [b"step-1.safetensors"]


def test_training_state_comes_back_with_either_engine(
    target: Path, nested: dict[Any, Any], engine: Any
) -> None:
    striate.save(nested, target, engine=engine)
    same(striate.load(target, engine=engine), nested)
    assert beside(target) == [b"step-1.safetensors"]


def test_engines_write_the_same_file_and_read_each_others(target: Path, nested: dict[Any, Any]) -> None:
    striate.save(nested, target, engine="posix", chunk_bytes=4096)
    same(striate.load(target), nested)
    other = target.with_name("other")
    striate.save(nested, other, chunk_bytes=4096)
    same(striate.load(other, engine="posix"), nested)
    offset = striate.info(target).file_bytes - striate.info(target).data_bytes
    assert target.read_bytes()[offset:] == other.read_bytes()[offset:]


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 16, 64 << 20])
def test_every_size_of_chunk_comes_back(
    target: Path, nested: dict[Any, Any], engine: Any, chunk_bytes: int
) -> None:
    result = striate.save(nested, target, engine=engine, chunk_bytes=chunk_bytes)
    info = striate.info(target)
    assert info.chunk_bytes == chunk_bytes
    assert info.chunks_count == -(-result.data_bytes // chunk_bytes)
    same(striate.load(target, engine=engine), nested)


@pytest.mark.parametrize("chunk_bytes", [0, -4096, 4095, 4096 * 3, 128 << 20, 4096.0, True])
def test_impossible_chunk_size_is_refused_before_anything_is_written(target: Path, chunk_bytes: Any) -> None:
    with pytest.raises(ValueError, match="power of two"):
        striate.save({"a": torch.ones(3)}, target, chunk_bytes=chunk_bytes)
    assert beside(target) == []


def test_result_tells_what_was_written(target: Path, nested: dict[Any, Any], engine: Any) -> None:
    result = striate.save(nested, target, engine=engine)
    found = striate.info(target)
    assert result.path == str(target)
    assert result.file_bytes == target.stat().st_size == found.file_bytes
    assert (result.uuid, result.sequence, result.data_bytes) == (found.uuid, found.sequence, found.data_bytes)
    # One opaque storage for the three views, one for complex128, one for the leaf that requires grad.
    assert result.opaque_count == found.opaque_count == 3
    assert result.tensors_count == len(found.tensors)
    assert result.stats is not None and result.stats.engine == engine
    assert result.stats.bytes >= result.data_bytes
    assert result.elapsed_s > 0


def test_frozen_save_writes_the_same_bytes(target: Path, engine: Any) -> None:
    state = {"w": torch.arange(3 << 20, dtype=torch.float32), "b": torch.arange(1000)}
    striate.save(state, target, engine=engine, frozen=True)
    same(striate.load(target, engine=engine), state)


def test_sequence_rises_from_save_to_save_even_if_the_clock_was_set_back(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = striate.save({"a": torch.ones(2)}, target)
    monkeypatch.setattr("time.time_ns", lambda: 17)
    second = striate.save({"a": torch.ones(2)}, target)
    assert second.sequence == first.sequence + 1
    assert second.uuid != first.uuid


def test_overwriting_replaces_whatever_stood_there(
    target: Path, flat: dict[str, torch.Tensor], engine: Any
) -> None:
    for junk in (b"", b"\0" * 5000, b"no checkpoint at all", os.urandom(9000)):
        target.write_bytes(junk)
        striate.save(flat, target, engine=engine)
        same(striate.load(target, engine=engine), flat)
        assert beside(target) == [b"step-1.safetensors"]


def test_smaller_checkpoint_over_a_larger_leaves_no_tail(target: Path, engine: Any) -> None:
    striate.save({"a": torch.zeros(1 << 20)}, target, engine=engine)
    result = striate.save({"a": torch.ones(3)}, target, engine=engine)
    assert target.stat().st_size == result.file_bytes < 5000
    same(striate.load(target, engine=engine), {"a": torch.ones(3)})


def test_load_and_save_over_itself_and_delete(target: Path, nested: dict[Any, Any], engine: Any) -> None:
    striate.save(nested, target, engine=engine)
    loaded = striate.load(target, engine=engine)
    striate.save(striate.load(target, engine=engine), target, engine=engine)
    os.unlink(target)
    same(loaded, nested)


# ---- paths -----------------------------------------------------------------

NAMES = [
    b"plain",
    b"with spaces and\ttabs",
    b"line\nbreak",
    b"-leading-dash",
    b".hidden",
    b"*?[a]{b}$HOME%s'\"\\",
    b"\xff\xfe not utf-8 \x80",
    "schön-検査-\U0001f40b".encode(),
    b"\x01\x1b[31mred",
    b"a" * 255,
    "é".encode() * 127,
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:12]))
def test_path_of_any_bytes_is_saved_to_and_loaded_from(
    tmp_path: Path, name: bytes, flat: Any, engine: Any
) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    for form in (path, os.fsdecode(path), Path(os.fsdecode(path))):
        result = striate.save(flat, form, engine=engine)
        same(striate.load(form, engine=engine), flat)
        assert striate.verify(form)
        assert striate.info(form).uuid == result.uuid
        result.path.encode("utf-8")  # can be printed
    assert beside(path) == [name]


def test_relative_paths_and_a_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flat: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for path in ("bare", "./dotted", "sub/../up", "sub//double"):
        striate.save(flat, path)
        same(striate.load(path), flat)
    assert sorted(os.listdir(tmp_path)) == ["bare", "dotted", "sub", "up"]


def test_pathlike_of_ones_own_is_taken_including_one_of_bytes(tmp_path: Path, flat: Any) -> None:
    class Where:
        def __init__(self, path: str | bytes) -> None:
            self.path = path

        def __fspath__(self) -> str | bytes:
            return self.path

    for path in (str(tmp_path / "text"), os.fsencode(tmp_path / "bytes")):
        striate.save(flat, Where(path))  # type: ignore[arg-type]
        same(striate.load(Where(path)), flat)  # type: ignore[arg-type]
        same(striate.load_tensors(Where(path), ["step"]), {"step": flat["step"]})  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["a\0b", b"a\0b"])
def test_nul_byte_in_a_path_is_a_value_error(path: Any, flat: Any) -> None:
    for call in (
        lambda: striate.save(flat, path),
        lambda: striate.load(path),
        lambda: striate.info(path),
        lambda: striate.verify(path),
        lambda: striate.load_into(flat, path),
        lambda: striate.load_tensors(path, ["step"]),
    ):
        with pytest.raises(ValueError, match=r"(?i)nul"):
            call()


@pytest.mark.parametrize("length", [256, 300, 5000])
def test_too_long_name_is_refused_before_anything_is_written(tmp_path: Path, length: int, flat: Any) -> None:
    path = tmp_path / ("n" * length)
    with pytest.raises(OSError) as caught:
        striate.save(flat, path)
    assert isinstance(caught.value, striate.DriveAccess)
    assert caught.value.errno == errno.ENAMETOOLONG
    assert "Nothing was written" in str(caught.value)
    assert os.listdir(tmp_path) == []
    with pytest.raises(striate.DriveAccess) as caught:
        striate.load(path)
    assert caught.value.errno == errno.ENAMETOOLONG


def test_longest_path_that_the_kernel_takes(tmp_path: Path, flat: Any) -> None:
    deep = os.fsencode(tmp_path)
    while len(deep) + 240 < os.pathconf(tmp_path, "PC_PATH_MAX") - 20:
        deep = os.path.join(deep, b"d" * 200)
        os.mkdir(deep)
    # The temporary's name is longer than this one: it must not matter.
    path = os.path.join(deep, b"x")
    striate.save(flat, path)
    same(striate.load(path), flat)


# ---- special files ---------------------------------------------------------


def test_dev_null_is_written_to_and_never_replaced(flat: Any, nested: Any) -> None:
    before = os.lstat("/dev/null")
    for state in (flat, nested):
        result = striate.save(state, "/dev/null")
        assert result.stats is None
    after = os.lstat("/dev/null")
    assert stat.S_ISCHR(after.st_mode)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    with pytest.raises(striate.FormatError, match="ended|empty"):
        striate.load("/dev/null")


def test_fifo_carries_a_checkpoint_and_is_never_replaced(tmp_path: Path, nested: Any) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(striate.load(fifo)))
    reader.start()
    striate.save(nested, fifo)
    reader.join(30)
    assert not reader.is_alive()
    same(found[0], nested)
    assert stat.S_ISFIFO(os.lstat(fifo).st_mode)
    assert os.listdir(tmp_path) == ["fifo"]


def test_link_stays_and_its_target_gets_the_data(tmp_path: Path, flat: Any, engine: Any) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to("far/real")
    for _ in range(2):  # dangling, then not
        striate.save(flat, link, engine=engine)
        assert os.readlink(link) == "far/real"
        assert not (tmp_path / "far" / "real").is_symlink()
        same(striate.load(link, engine=engine), flat)
    assert os.listdir(tmp_path / "far") == ["real"]


# ---- what save takes -------------------------------------------------------


def test_objects_without_tensors_come_back(target: Path, engine: Any) -> None:
    for value in (
        {},
        [],
        (),
        "hello",
        "",
        7,
        -1.5,
        None,
        True,
        {"a": 1, "b": [2, 3]},
        b"bytes",
        {"x": {}},
        range(4),
    ):
        result = striate.save(value, target, engine=engine)
        assert result.stats is None and result.data_bytes == 0
        # range is nothing that the restricted unpickler takes, in torch.load either.
        same(striate.load(target, engine=engine, weights_only=not isinstance(value, range)), value)
        assert striate.verify(target)


def test_bare_tensor_and_bare_list_come_back(target: Path) -> None:
    for value in (
        torch.arange(7),
        [torch.ones(2)] * 3,
        torch.nn.Parameter(torch.ones(2)),
        (torch.ones(2).t(),),
    ):
        striate.save(value, target)
        same(striate.load(target), value)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_comes_back(target: Path, engine: Any) -> None:
    dtypes = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
    state: dict[str, torch.Tensor] = {}
    for dtype in dtypes:
        if "q" in str(dtype).split(".")[1][:2] or "bits" in str(dtype):
            continue  # quantized ones have a test of their own
        raw = torch.arange(64, dtype=torch.uint8)
        try:
            tensor = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
            torch.save(tensor, io.BytesIO())
        except (RuntimeError, TypeError, KeyError):
            continue  # int1 to uint7: torch has the names, and cannot save tensors of them
        state[str(dtype)] = tensor
    assert len(state) >= 19
    striate.save(state, target, engine=engine)
    loaded = striate.load(target, engine=engine)
    assert list(loaded) == list(state)
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].untyped_storage().tolist() == tensor.untyped_storage().tolist(), name


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:TypedStorage is")
def test_exotic_tensors_come_back_as_torch_brings_them(target: Path, tmp_path: Path, engine: Any) -> None:
    indices, values = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0])
    with_attribute = torch.ones(3)
    with_attribute.note = "seen"  # type: ignore[attr-defined]
    state = {
        "coo": torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True),
        "csr": torch.eye(3).to_sparse_csr(),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "neg": torch._neg_view(torch.randn(3)),
        "expanded": torch.ones(1, 1024).expand(64, 1024),
        "scalar": torch.tensor(2.5),
        "transposed": torch.arange(6).view(2, 3).t(),
        "channels_last": torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "noted": with_attribute,
        "zero_stride": torch.empty(0).expand(3, 0),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 2, torch.qint8),
        "storage": torch.arange(4, dtype=torch.uint8).untyped_storage(),
    }
    torch.save(state, tmp_path / "by-torch")
    striate.save(state, target, engine=engine)
    same(striate.load(target, engine=engine), torch.load(tmp_path / "by-torch"))


def test_module_whole_comes_back_without_weights_only(target: Path, engine: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    striate.save(module, target, engine=engine)
    with pytest.raises(striate.UnsafePickle):
        striate.load(target, engine=engine)
    loaded = striate.load(target, engine=engine, weights_only=False)
    same(loaded.state_dict(), module.state_dict())


def test_numpy_values_come_back_as_torch_brings_them(target: Path) -> None:
    state = {"array": np.arange(5, dtype=np.float32), "number": np.float64(2.5)}
    striate.save(state, target)
    loaded = striate.load(target, weights_only=False)
    assert loaded["number"] == 2.5 and type(loaded["number"]) is np.float64
    assert np.array_equal(loaded["array"], state["array"]) and loaded["array"].dtype == np.float32


def test_ordered_dict_with_metadata_comes_back(target: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    state = module.state_dict()
    striate.save(state, target)
    loaded = striate.load(target)
    assert type(loaded) is OrderedDict
    assert loaded._metadata == state._metadata and loaded._metadata  # type: ignore[attr-defined]
    same(loaded, state)


def test_pickle_module_and_protocol_are_passed_on(target: Path) -> None:
    state = {"a": torch.ones(3), "note": "x"}
    striate.save(state, target, pickle, 4)
    same(striate.load(target, pickle_module=pickle, weights_only=False), state)


def test_map_location_in_all_its_forms(target: Path, nested: Any) -> None:
    striate.save(nested, target)
    for location in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, location: storage):
        same(striate.load(target, location), nested)
    on_meta = striate.load(target, "meta")
    assert on_meta["model"]["encoder"].device.type == "meta"
    assert on_meta["model"]["encoder"].shape == (40, 30)


def test_loaded_storages_are_torchs_own(target: Path) -> None:
    striate.save({"a": torch.ones(3 << 20), "b": torch.ones(5)}, target)
    loaded = striate.load(target)
    for tensor in loaded.values():
        assert tensor.untyped_storage().resizable()
        tensor.untyped_storage().resize_(0)
    loaded = striate.load(target)
    torch.add(torch.ones(4 << 20), 1, out=loaded["a"].resize_(0))
    assert loaded["a"].shape == (4 << 20,)
    loaded["b"].share_memory_()
    loaded["b"].add_(1)
    assert loaded["b"].sum() == 10
