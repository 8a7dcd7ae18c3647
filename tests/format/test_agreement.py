"""What striate saves, through its engine, is what the format says: the rescue reader and safetensors agree with it."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from format.make_golden import GOLDEN
from safetensors.torch import load_file

import striate
from striate import rescue

CHUNK = 4096


def training_state() -> dict[str, Any]:
    """Weights, Adam's moments, odd sizes, views, tied and raw storages, several chunks."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(61, 33), torch.nn.ReLU(), torch.nn.Linear(33, 7))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 61)).sum().backward()
    optimizer.step()
    base = torch.arange(3000, dtype=torch.int16)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [base[:10], base[5:15]],
        "tied": model[0].weight,
        "complex": torch.randn(9, dtype=torch.complex128),
        "empty": torch.empty(0, 3),
        "bytes": torch.arange(4097, dtype=torch.int64).to(torch.uint8),
        1: torch.ones(3, dtype=torch.bool),
        "step": 4,
    }


def flat_state() -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.randn(n, 7) for n in range(60)}


def large_graph() -> dict[str, Any]:
    """A graph that does not compress into the metadata, so it becomes an entry."""
    noise = torch.randint(256, (13 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return {"text": noise.numpy().tobytes().decode("latin-1"), "t": torch.arange(5)}


STATES = {
    "training": training_state,
    "flat": flat_state,
    "empty": dict,
    "number": lambda: 7,
    "large graph": large_graph,
}


def plain_tensors(obj: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        return {path: obj.detach()}
    items = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, (list, tuple)) else ()
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        found.update(plain_tensors(value, f"{path}.{key}" if path else str(key)))
    return found


@pytest.mark.parametrize("name", STATES)
def test_rescue_restores_what_was_saved_byte_for_byte(name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    path, out = tmp_path / "a.safetensors", tmp_path / "out.safetensors"
    striate.save(state, path, chunk_bytes=CHUNK)
    assert rescue.main([str(path), "-o", str(out)]) == 0
    assert out.read_bytes() == path.read_bytes()
    found = rescue.read(path)
    assert found.chunk_bytes == CHUNK
    assert (found.graph is None) == (name in ("flat", "empty"))
    assert ("striate.graph_entry" in found.metadata) == (name == "large graph")
    assert striate.info(path).uuid == found.uuid.hex()
    assert striate.info(path).sequence == found.sequence
    wanted = plain_tensors(state)
    seen = collections.Counter[str]()
    for tensor_name, tensor in found.tensors.items():
        seen["raw" if tensor.raw else "named"] += 1
        if not tensor.raw:
            original = wanted[tensor_name].contiguous().reshape(-1).view(torch.uint8)
            assert tensor.data == original.numpy().tobytes(), tensor_name
            assert tensor.shape == tuple(wanted[tensor_name].shape)
    if name == "training":
        assert seen == {"raw": 2, "named": len(wanted) - 2 - 2}, "two raw storages, one of two views; one tie"
        assert found.ties == {"tied": "model.0.weight"}


@pytest.mark.parametrize("name", ["training", "flat"])
def test_safetensors_loads_what_was_saved(name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    path = tmp_path / "a.safetensors"
    striate.save(state, path, chunk_bytes=CHUNK)
    loaded = load_file(path)
    wanted = plain_tensors(state)
    named = {key: value for key, value in loaded.items() if not key.startswith("__striate__.")}
    for key, value in named.items():
        assert value.dtype == wanted[key].dtype
        assert torch.equal(value, wanted[key]), key
    if name == "flat":
        assert sorted(loaded) == sorted(state)


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_the_golden_files_load_and_verify(path: Path) -> None:
    assert not striate.verify(path).damages
    found = striate.load(path, map_location="cpu")
    by_name = rescue.read(path)
    if path.stem == "example":
        assert found["w"] is found["v"]
    for name, tensor in plain_tensors(found).items():
        kept = by_name.ties.get(name, name)
        if kept in by_name.tensors:
            assert (
                by_name.tensors[kept].data
                == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
