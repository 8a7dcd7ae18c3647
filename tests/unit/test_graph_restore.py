"""map_location in all its forms, meta, fake and skipped data: as the installed torch does it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from striate import graph
from support.graphs import copied_storages, through_graph, through_torch
from support.same import same


def state() -> dict[str, Any]:
    base = torch.arange(6.0)
    return {
        "a": torch.ones(2, 3, dtype=torch.float16),
        "v": base[1:3],
        "p": torch.nn.Parameter(torch.ones(2)),
    }


def flat() -> dict[str, Any]:
    return {"a": torch.ones(2, 3), "b": torch.tensor(3)}


@pytest.mark.parametrize("obj", [state(), flat()], ids=["graph", "flat"])
@pytest.mark.parametrize(
    "map_location",
    [
        None,
        "cpu",
        torch.device("cpu"),
        {"cpu": "cpu"},
        {"cuda:0": "cpu"},
        lambda storage, location: storage,
        lambda storage, location: None,
        "meta",
        torch.device("meta"),
        {"cpu": "meta"},
    ],
    ids=[
        "none",
        "str",
        "device",
        "dict",
        "other dict",
        "callable",
        "none callable",
        "meta",
        "meta device",
        "dict meta",
    ],
)
def test_each_form_of_map_location_gives_what_torch_gives(obj: Any, map_location: Any) -> None:
    same(through_graph(obj, map_location=map_location), through_torch(obj, map_location=map_location))


@pytest.mark.parametrize("map_location", ["meta", torch.device("meta")])
def test_meta_reads_no_data(map_location: Any) -> None:
    restore = graph.Restore(map_location)
    assert not restore.reads_data
    storage = restore.allocate(10**15, "cpu")
    assert storage.device.type == "meta"
    assert storage.nbytes() == 10**15
    assert restore.apply(storage, "cpu") is storage
    restore.check(["cuda:0", "no such place"])


def test_everything_else_reads_data() -> None:
    for map_location in (
        None,
        "cpu",
        torch.device("cpu"),
        {"cpu": "meta"},
        lambda storage, location: storage,
    ):
        assert graph.Restore(map_location).reads_data


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without the device")
@pytest.mark.parametrize(
    "map_location", ["cuda", "cuda:0", torch.device("cuda:1"), {"cpu": "cuda:0"}, "xpu", "nowhere"]
)
def test_an_absent_device_is_refused_before_data_is_read_in_torchs_words(map_location: Any) -> None:
    with pytest.raises(Exception) as torchs:
        through_torch([torch.ones(2)], map_location=map_location)
    with pytest.raises(type(torchs.value)) as ours:
        graph.Restore(map_location).check(["cpu"])
    assert str(ours.value) == str(torchs.value)


def test_a_location_of_the_file_that_is_absent_is_refused_unless_it_is_mapped() -> None:
    for location in ("nowhere", "cuda:99"):
        with pytest.raises(RuntimeError, match=r"don't know how|CUDA"):
            graph.Restore(None).check(["cpu", location])
        graph.Restore("cpu").check([location])
        graph.Restore({location: "cpu"}).check([location])
        graph.Restore(lambda storage, location: storage).check([location])


def test_a_callable_sees_each_storage_once_with_its_bytes() -> None:
    seen: list[tuple[list[int], str]] = []

    def look(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append((storage.tolist(), location))
        return storage

    base = torch.arange(4, dtype=torch.uint8)
    through_graph([base[1:], base[2:], torch.tensor([9], dtype=torch.uint8)], map_location=look)
    assert seen == [([0, 1, 2, 3], "cpu"), ([9], "cpu")]


def test_a_callable_may_replace_the_storage() -> None:
    other = torch.UntypedStorage(2).fill_(7)
    found = through_graph(
        {"a": torch.ones(2, dtype=torch.uint8)}, map_location=lambda storage, location: other
    )
    assert found["a"].tolist() == [7, 7]
    assert found["a"].untyped_storage()._cdata == other._cdata


@pytest.mark.parametrize("answer", [3, "cpu", torch.ones(2)])
def test_a_callable_that_gives_something_else_is_refused_as_by_torch(answer: Any) -> None:
    with pytest.raises(Exception) as torchs:
        through_torch([torch.ones(2)], map_location=lambda storage, location: answer)
    with pytest.raises(type(torchs.value)) as ours:
        through_graph([torch.ones(2)], map_location=lambda storage, location: answer)
    assert str(ours.value) == str(torchs.value)


def test_what_is_no_map_location_is_refused() -> None:
    with pytest.raises(TypeError, match="map_location must be"):
        graph.Restore(3)


def test_storages_are_on_the_cpu_whatever_the_default_device() -> None:
    restore = graph.Restore(None)
    with torch.device("meta"):
        assert restore.allocate(5, "cpu").device.type == "cpu"
        assert restore.reads_data
    torch.set_default_device("meta")
    try:
        assert graph.Restore(None).allocate(5, "cpu").device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_loaded_storages_can_be_resized() -> None:
    storage = graph.Restore(None).allocate(5, "cpu")
    assert storage.resizable()


# --- fake tensors ------------------------------------------------------------------------


@pytest.mark.parametrize("obj", [state(), flat()], ids=["graph", "flat"])
@pytest.mark.parametrize("map_location", [None, "cpu", "cuda:0", "meta"])
def test_under_fake_tensor_mode_fake_tensors_come_back_without_data(obj: Any, map_location: Any) -> None:
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    held = graph.dumps(obj)
    with FakeTensorMode():
        try:
            wanted = torch.load(file, map_location=map_location)
        except RuntimeError as error:  # torch 2.6, which looks for the device itself
            pytest.skip(f"this torch pretends no device that is absent: {error}")
        restore = graph.Restore(map_location)
        assert not restore.reads_data
        found = graph.loads(
            held.pickle,
            [entry.name or "" for entry in held.storages],
            [entry.plain for entry in held.storages],
            copied_storages(held, restore),
            map_location=map_location,
        )
    for key in obj:
        assert isinstance(found[key], FakeTensor) == isinstance(wanted[key], FakeTensor)
        for what in ("dtype", "shape", "device", "requires_grad"):
            assert getattr(found[key], what) == getattr(wanted[key], what)
        assert found[key].stride() == wanted[key].stride()


def test_fake_tensors_are_refused_or_taken_as_by_torch() -> None:
    with FakeTensorMode():
        fake = torch.empty(3, 2)
    with pytest.raises(Exception) as torchs:
        torch.save({"a": fake}, io.BytesIO())
    with pytest.raises(type(torchs.value)):
        graph.dumps({"a": fake})
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        held = graph.dumps({"a": fake})
    assert [(entry.nbytes, entry.location, entry.named) for entry in held.storages] == [(24, "cpu", False)]
    assert held.storages[0].source.device.type == "meta"
    zeros = [torch.UntypedStorage(24).fill_(0)]
    same(graph.loads(held.pickle, [""], [None], zeros), {"a": torch.zeros(3, 2)})


def test_skip_data_loads_storages_unfilled() -> None:
    with torch.serialization.skip_data():
        restore = graph.Restore(None)
        assert not restore.reads_data
        assert restore.allocate(4, "cpu").device.type == "cpu"


def test_a_storage_on_meta_has_no_data_to_save() -> None:
    storage = torch.empty(3, device="meta").untyped_storage()
    with pytest.raises(NotImplementedError) as torchs:
        torch.save([storage], io.BytesIO())
    with pytest.raises(NotImplementedError) as ours:
        graph.dumps([storage])
    assert str(ours.value) == str(torchs.value)


def test_saving_works_inside_any_device_context() -> None:
    obj = state()
    wanted = graph.dumps(obj)
    with torch.device("meta"):
        found = graph.dumps(obj)
    assert found.pickle == wanted.pickle
    assert [entry.plain for entry in found.storages] == [entry.plain for entry in wanted.storages]
