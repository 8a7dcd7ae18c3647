"""info and verify: what a checkpoint says of itself, and whether it is still what was written."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import striate


def test_a_save_and_a_load_tell_what_the_drive_did(target: Path, flat: Any) -> None:
    result = striate.save(flat, target, chunk_bytes=4096)
    told: list[striate.LoadResult] = []
    striate.load(target, on_loaded=told.append)
    striate.load_into({name: torch.zeros_like(t) for name, t in flat.items()}, target, on_loaded=told.append)
    (use,) = result.drives
    assert use.drive == result.path and use.bytes >= result.data_bytes and use.busy_s > 0
    for load in told:
        assert (load.path, load.uuid, load.sequence) == (result.path, result.uuid, result.sequence)
        (read,) = load.drives
        assert read.bytes >= load.data_bytes == result.data_bytes
        assert 0 < read.busy_s <= load.elapsed_s and read.mib_per_s > 0


def test_info_lists_every_entry_with_its_place_in_the_file(target: Path, flat: Any) -> None:
    result = striate.save(flat, target, chunk_bytes=4096)
    found = striate.info(target)
    raw = target.read_bytes()
    assert [t.name for t in found.tensors] == list(flat)
    for entry in found.tensors:
        tensor = flat[entry.name]
        assert entry.shape == tuple(tensor.shape) and entry.nbytes == tensor.nbytes
        assert (
            raw[entry.offset : entry.offset + entry.nbytes]
            == tensor.view(-1).view(torch.uint8).numpy().tobytes()
        )
    assert {t.name: t.dtype for t in found.tensors} == {
        "embed.weight": "F32",
        "layer.0.weight": "BF16",
        "layer.0.bias": "F64",
        "mask": "BOOL",
        "step": "I64",
        "empty": "F32",
    }
    assert (found.kind, found.version, found.path) == ("striate", 1, str(target))
    assert (found.uuid, found.sequence) == (result.uuid, result.sequence)
    assert found.file_bytes == len(raw) and found.data_bytes == sum(t.nbytes for t in flat.values())
    assert found.chunks_count == -(-found.data_bytes // 4096)
    assert found.graph_bytes == 0 and found.opaque_count == 0 and found.ties == {}
    assert abs(found.created_s - time.time()) < 600


def test_info_reads_neither_data_nor_graph(target: Path, nested: Any) -> None:
    striate.save(nested, target)
    wanted = striate.info(target)
    os.truncate(target, wanted.file_bytes)
    with target.open("r+b") as f:
        f.seek(wanted.file_bytes - wanted.data_bytes)
        f.write(os.urandom(wanted.data_bytes))
    assert striate.info(target) == wanted
    assert wanted.graph_bytes > 0 and wanted.ties == {"model.decoder": "model.encoder"}


def test_info_of_an_object_without_tensors(target: Path) -> None:
    striate.save("hello", target)
    found = striate.info(target)
    assert found.tensors == () and found.data_bytes == 0 and found.chunks_count == 0 and found.graph_bytes > 0


def test_verify_says_that_a_whole_checkpoint_is_whole(
    target: Path, flat: Any, nested: Any, engine: Any
) -> None:
    for state in (flat, nested, {}, "hello"):
        result = striate.save(state, target, engine=engine, chunk_bytes=4096)
        report = striate.verify(target, engine=engine)
        assert report and report.ok and report.damages == ()
        assert (report.path, report.uuid, report.sequence) == (str(target), result.uuid, result.sequence)
        assert report.chunks_count == -(-result.data_bytes // 4096) and report.file_bytes == result.file_bytes
        report.raise_if_damaged()


def test_verify_lists_every_damaged_chunk_with_its_tensors(target: Path, engine: Any) -> None:
    state = {name: torch.zeros(2048) for name in "abcd"}  # two chunks each
    striate.save(state, target, engine=engine, chunk_bytes=4096)
    place = {t.name: t.offset for t in striate.info(target).tensors}
    with target.open("r+b") as f:
        for offset in (place["a"] + 5, place["c"] + 4096, place["d"] + 8191):
            f.seek(offset)
            f.write(b"\x40")
    report = striate.verify(target, engine=engine)
    assert not report and not report.ok
    assert [(d.region, d.offset, d.length, d.tensors, d.reason) for d in report.damages] == [
        ("data", place["a"], 4096, ("a",), "checksum"),
        ("data", place["c"] + 4096, 4096, ("c",), "checksum"),
        ("data", place["d"] + 4096, 4096, ("d",), "checksum"),
    ]
    assert [d.chunk for d in report.damages] == [0, 5, 7]
    assert all(
        d.wanted != d.found and len(d.wanted or "") == len(d.found or "") == 32 for d in report.damages
    )
    with pytest.raises(striate.CorruptCheckpoint, match="3 place") as caught:
        report.raise_if_damaged()
    assert caught.value.tensors == ("a", "c", "d") and caught.value.offset == place["a"]
    assert caught.value.path == str(target)


def test_verify_names_ties_and_the_graph_among_the_data(target: Path, engine: Any) -> None:
    tied = torch.zeros(1024)
    striate.save(
        {"a": tied, "b": tied, "blob": os.urandom(13 << 20)}, target, engine=engine, chunk_bytes=4096
    )
    place = {t.name: t.offset for t in striate.info(target).tensors}
    with target.open("r+b") as f:
        f.seek(place["a"])
        f.write(b"\x01")
        f.seek(-1, os.SEEK_END)
        last = f.read(1)[0]
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last ^ 1]))
    first, second = striate.verify(target, engine=engine).damages
    assert first.tensors == ("a", "b")
    assert second.tensors == ("__striate__.graph",)


def test_verify_keeps_nothing_in_memory(target: Path, engine: Any) -> None:
    striate.save({"w": torch.ones(64 << 20)}, target, engine=engine)  # 256 MiB
    before = _resident_bytes()
    peak = []
    assert striate.verify(target, engine=engine, progress=lambda done, total: peak.append(_resident_bytes()))
    assert max(peak) - before < 160 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
