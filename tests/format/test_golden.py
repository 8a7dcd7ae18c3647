"""The golden files: made by a writer of their own, they hold every reader and the code's writer to the format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format.make_golden import FILES, GOLDEN, UUID, Golden, build, data_of, length_of, pickled, stored
from safetensors import safe_open

from striate import graph, manifest, rescue
from striate.graph import Plain, StorageEntry
from striate.image import Table, lay_out

NAMES = sorted(FILES)
_SOURCE = torch.UntypedStorage(0)


def content_of(name: str) -> bytes:
    return (GOLDEN / f"{name}.safetensors").read_bytes()


def entries_of(golden: Golden) -> list[StorageEntry]:
    return [
        StorageEntry(
            length_of(s),
            s.location,
            None if s.dtype is None else Plain(s.dtype, s.shape),
            None if s.name is None or s.name.startswith("__striate__.") else s.name,
            s.name is not None,
            _SOURCE,
        )
        for s in golden.storages
    ]


def layout_of(golden: Golden) -> Table:
    return lay_out(entries_of(golden), graph_length=len(stored(golden.graph)) if golden.graph_entry else None)


def decoded(name: str) -> manifest.Manifest:
    content = content_of(name)
    length = manifest.header_length(content[:8], file_bytes=len(content))
    return manifest.decode(content[:length], file_bytes=len(content))


def test_every_golden_file_is_described() -> None:
    assert [path.stem for path in sorted(GOLDEN.iterdir())] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_file_is_what_its_script_makes(name: str) -> None:
    assert build(FILES[name]) == content_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_code_lays_out_and_encodes_the_same_bytes(name: str) -> None:
    golden, content = FILES[name], content_of(name)
    table = layout_of(golden)
    flat = golden.graph is None
    found = decoded(name)
    header = manifest.encode(
        table,
        uuid=UUID,
        sequence=golden.sequence,
        chunk_bytes=golden.chunk_bytes,
        ties=golden.ties,
        graph=None if flat or golden.graph_entry else stored(golden.graph),
        graph_bytes=None if flat else len(pickled(golden.graph)),
        graph_entry=golden.graph_entry,
        digests=found.digests,
    )
    assert header == content[: len(header)]
    data = bytearray(table.data_bytes)
    for n, (offset, length) in enumerate(zip(table.offsets.tolist(), table.lengths.tolist(), strict=True)):
        data[offset : offset + length] = data_of(n, length)
    if table.graph is not None:
        data[table.graph[0] : sum(table.graph)] = stored(golden.graph)
    assert header + data == content


@pytest.mark.parametrize("name", NAMES)
def test_the_code_reads_what_was_meant(name: str) -> None:
    golden, found = FILES[name], decoded(name)
    table = layout_of(golden)
    assert (found.uuid, found.sequence, found.chunk_bytes) == (UUID, golden.sequence, golden.chunk_bytes)
    assert (found.foreign, found.flat, found.ties) == (False, golden.graph is None, golden.ties)
    assert found.table.names == table.names
    assert found.table.plains() == table.plains()
    assert found.table.locations_list() == [s.location for s in golden.storages]
    np.testing.assert_array_equal(found.table.offsets, table.offsets)
    data = content_of(name)[found.data_offset :]
    if not found.flat:
        start, length = found.table.graph or (0, 0)
        zipped = data[start : start + length] if found.graph is None else found.graph
        assert manifest.unpack_graph(zipped, found.graph_bytes or 0) == pickled(golden.graph)
    assert len(found.digests) == 16 * manifest.chunks_count(len(data), found.chunk_bytes)


@pytest.mark.parametrize("name", NAMES)
def test_the_rescue_reader_reads_what_was_meant(name: str) -> None:
    golden = FILES[name]
    found = rescue.read(GOLDEN / f"{name}.safetensors")
    assert (found.uuid, found.sequence, found.chunk_bytes) == (UUID, golden.sequence, golden.chunk_bytes)
    assert found.ties == golden.ties
    assert found.graph == (None if golden.graph is None else pickled(golden.graph))
    assert len(found.tensors) == len(golden.storages)
    for n, (storage, tensor) in enumerate(zip(golden.storages, found.tensors.values(), strict=True)):
        assert tensor.index == n
        assert tensor.location == storage.location
        assert tensor.data == data_of(n, length_of(storage))
        assert tensor.raw == (storage.name is None)
        if storage.name is None:
            assert (tensor.name, tensor.dtype, tensor.shape) == (
                f"__striate__.s.{n}",
                "U8",
                (storage.nbytes,),
            )
            assert tensor.plain == (None if storage.dtype is None else (storage.dtype, storage.shape))
        else:
            assert (tensor.name, tensor.dtype, tensor.shape) == (storage.name, storage.dtype, storage.shape)


@pytest.mark.parametrize("name", NAMES)
def test_graph_and_storages_give_back_the_object(name: str) -> None:
    found = decoded(name)
    checkpoint = rescue.read(GOLDEN / f"{name}.safetensors")
    storages = []
    for tensor in checkpoint.tensors.values():
        storage = torch.UntypedStorage(len(tensor.data))
        storage.copy_(torch.tensor(list(tensor.data), dtype=torch.uint8).untyped_storage())
        storages.append(storage)
    restored = graph.loads(checkpoint.graph, found.table.names, found.table.plains(), storages)
    if name == "example":
        assert restored["v"] is restored["w"]
        assert restored["w"].shape == (2, 2)
        assert restored["x"].dtype == torch.bfloat16
        assert restored["x"].view(torch.uint8).tolist() == list(data_of(1, 6))
    elif name == "graph_entry":
        assert list(restored) == ["a", (1, 2)]
        assert [t.dtype for t in restored["a"]] == [torch.float32, torch.int8]
        assert restored[1, 2].shape == (3,)
    else:
        assert type(restored) is dict
        assert list(restored) == found.table.names
        assert [tuple(t.shape) for t in restored.values()] == found.table.shapes


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_itself_opens_it(name: str) -> None:
    golden = FILES[name]
    table = layout_of(golden)
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as opened:
        assert opened.metadata()["format"] == "pt"
        assert sorted(opened.keys()) == sorted(table.names + ["__striate__.graph"] * golden.graph_entry)
        for n, tensor_name in enumerate(table.names):
            tensor = opened.get_tensor(tensor_name)
            assert tuple(tensor.shape) == table.shapes[n]
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == data_of(n, int(table.lengths[n]))
