"""One tensor or a few, read alone: only the chunks that hold them are touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import striate
from striate._engine import Io
from support.same import same

CHUNK = 1 << 16


@pytest.fixture
def many(target: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(13)
    state = {f"block.{n}.weight": torch.randn(1 << 16) for n in range(8)}
    state["tiny"] = torch.randn(3)
    state["empty"] = torch.empty(0, 3)
    striate.save(state, target, chunk_bytes=CHUNK)
    return state


def reads(io: Io) -> list[tuple[int, int]]:
    """(offset, length) of the reads of a traced interface."""
    return [(t.offset, t.length) for t in io.traces() if t.op == "read"]


@pytest.mark.parametrize("kind", ["uring", "posix"])
def test_only_the_chunks_of_the_tensor_are_read(target: Path, many: Any, kind: Any) -> None:
    place = {t.name: t for t in striate.info(target).tensors}
    wanted = place["block.3.weight"]
    header = striate.info(target).file_bytes - striate.info(target).data_bytes
    io = Io(kind, trace=True)
    found = striate.load_tensors(target, ["block.3.weight"], engine=io)
    same(found, {"block.3.weight": many["block.3.weight"]})
    data = [(offset, length) for offset, length in reads(io) if offset >= header]
    assert data, "the trace shows the reads of the data"
    assert all(wanted.offset <= offset < wanted.offset + wanted.nbytes for offset, _ in data)
    assert sum(length for _, length in data) == wanted.nbytes == 4 * CHUNK


@pytest.mark.parametrize("kind", ["uring", "posix"])
def test_tensor_without_bytes_reads_no_data(target: Path, many: Any, kind: Any) -> None:
    header = striate.info(target).file_bytes - striate.info(target).data_bytes
    io = Io(kind, trace=True)
    same(striate.load_tensors(target, ["empty"], engine=io), {"empty": many["empty"]})
    assert all(offset < header for offset, _ in reads(io))


def test_several_come_in_the_order_asked_for(target: Path, many: Any, engine: Any) -> None:
    names = ["tiny", "block.7.weight", "empty", "block.0.weight"]
    found = striate.load_tensors(target, iter(names), engine=engine)
    same(found, {name: many[name] for name in names})
    assert striate.load_tensors(target, [], engine=engine) == {}
    same(striate.load_tensors(target, ["tiny", "tiny"], engine=engine), {"tiny": many["tiny"]})


def test_names_of_nested_state_and_its_ties(target: Path, nested: Any, engine: Any) -> None:
    striate.save(nested, target, engine=engine)
    found = striate.load_tensors(
        target, ["model.decoder", "model.encoder", "optimizer.state.0.exp_avg", "parameter"], engine=engine
    )
    assert torch.equal(found["model.encoder"], nested["model"]["encoder"])
    assert (
        found["model.decoder"].untyped_storage().data_ptr()
        == found["model.encoder"].untyped_storage().data_ptr()
    )
    assert torch.equal(found["optimizer.state.0.exp_avg"], nested["optimizer"]["state"][0]["exp_avg"])
    assert torch.equal(found["parameter"], nested["parameter"])
    alone = striate.load_tensors(target, ["model.decoder"], engine=engine)
    assert torch.equal(alone["model.decoder"], nested["model"]["decoder"])


def test_unknown_name_is_refused_with_a_hint(target: Path, many: Any) -> None:
    with pytest.raises(striate.LoadMismatch) as caught:
        striate.load_tensors(target, ["tiny", "block.3.wieght", "nonsense"])
    assert caught.value.missing == ("block.3.wieght", "nonsense")
    assert "Did you mean block.3.weight" in str(caught.value)
    assert str(target) in str(caught.value) and "striate.info" in str(caught.value)


def test_views_are_not_readable_alone_and_it_says_so(target: Path, nested: Any) -> None:
    striate.save(nested, target)
    for name in ("views.0", "__striate__.s.4", "complex", 5):
        with pytest.raises(striate.LoadMismatch, match="share or stride"):
            striate.load_tensors(target, [name])  # type: ignore[list-item]


def test_one_string_in_place_of_a_list_is_a_type_error(target: Path, many: Any) -> None:
    with pytest.raises(TypeError, match="list"):
        striate.load_tensors(target, "tiny")


def test_nothing_is_unpickled(target: Path) -> None:
    striate.save({"w": torch.ones(3), "bad": _Refused()}, target)
    same(striate.load_tensors(target, ["w"]), {"w": torch.ones(3)})


class _Refused:
    def __reduce__(self) -> Any:
        return _never, ()


def _never() -> None:
    raise AssertionError("the graph was unpickled")


def test_damage_elsewhere_does_not_matter_and_damage_here_does(target: Path, many: Any, engine: Any) -> None:
    place = {t.name: t for t in striate.info(target).tensors}
    with target.open("r+b") as f:
        f.seek(place["block.5.weight"].offset + 77)
        f.write(b"!")
    same(
        striate.load_tensors(target, ["block.4.weight"], engine=engine),
        {"block.4.weight": many["block.4.weight"]},
    )
    with pytest.raises(striate.CorruptCheckpoint) as caught:
        striate.load_tensors(target, ["block.5.weight"], engine=engine)
    assert caught.value.tensors == ("block.5.weight",)
    found = striate.load_tensors(target, ["block.5.weight"], engine=engine, verify=False)["block.5.weight"]
    assert (found != many["block.5.weight"]).sum() == 1


def test_map_location_applies(target: Path, many: Any) -> None:
    assert striate.load_tensors(target, ["tiny"], "meta")["tiny"].device.type == "meta"
    seen = []
    striate.load_tensors(target, ["tiny"], lambda storage, location: seen.append(location))
    assert seen == ["cpu"]
