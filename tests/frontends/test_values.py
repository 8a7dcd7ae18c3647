"""Objects that broke other libraries, each with the value that must come back (shared cases 1, 4, 5, 6 and 21)."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import striate
from support.same import same


def total_of(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


class RebuiltFromValues:
    """What it becomes is computed from the tensor's values: they must be in memory when it is rebuilt."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return total_of, (self.tensor,)


class MakesTemporaries:
    """Each pickling makes a fresh tensor, whose memory is free for the next one's as soon as nobody holds it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return total_of, (torch.full((3000,), float(self.number)),)


def test_rebuild_functions_see_the_values(target: Path, engine: Any) -> None:
    state = {"a": RebuiltFromValues(torch.full((5000,), 2.0)), "b": RebuiltFromValues(torch.arange(4.0))}
    striate.save(state, target, engine=engine)
    assert striate.load(target, engine=engine, weights_only=False) == {"a": 10000.0, "b": 6.0}
    with torch.serialization.safe_globals([total_of]):
        assert striate.load(target, engine=engine) == {"a": 10000.0, "b": 6.0}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:Sparse CSR")
def test_sparse_tensors_with_their_invariants_checked(target: Path, engine: Any) -> None:
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.tensor([3.0, 4.0]), (2, 3))
    state = {
        "coo": coo.coalesce(),
        "csr": torch.eye(4).to_sparse_csr(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
    }
    striate.save(state, target, engine=engine)
    with torch.sparse.check_sparse_tensor_invariants():
        loaded = striate.load(target, engine=engine)
    for name, tensor in state.items():
        assert loaded[name].layout == tensor.layout and torch.equal(
            loaded[name].to_dense(), tensor.to_dense()
        )


def test_fifty_temporaries_of_reduce_are_fifty_tensors(target: Path, engine: Any) -> None:
    state = [MakesTemporaries(n) for n in range(50)]
    striate.save(state, target, engine=engine)
    assert striate.load(target, engine=engine, weights_only=False) == [3000.0 * n for n in range(50)]
    assert len(striate.info(target).tensors) == 50


@pytest.mark.parametrize("surroundings", ["context", "default device", "default dtype"])
def test_default_device_and_dtype_have_no_say(
    target: Path, flat: Any, nested: Any, engine: Any, surroundings: str
) -> None:
    flat["sparse"] = torch.eye(3).to_sparse()
    before = torch.get_default_dtype()
    for state in (flat, nested):
        try:
            if surroundings == "context":
                with torch.device("meta"):
                    striate.save(state, target, engine=engine)
                    loaded = striate.load(target, engine=engine)
                    name = "step" if state is flat else "model.norm"
                    single = striate.load_tensors(target, [name], engine=engine)[name]
            else:
                if surroundings == "default device":
                    torch.set_default_device("meta")
                else:
                    torch.set_default_dtype(torch.float64)
                striate.save(state, target, engine=engine)
                loaded = striate.load(target, engine=engine)
                name = "step" if state is flat else "model.norm"
                single = striate.load_tensors(target, [name], engine=engine)[name]
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(before)
        same(loaded, state)
        same(single, flat["step"] if state is flat else nested["model"]["norm"])
        assert striate.verify(target)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_each_loaded_tensor_is_freed_alone_and_saved_alone(target: Path, engine: Any) -> None:
    state = {"large": torch.ones(50 << 20)}  # 200 MiB
    state.update({f"small.{n}": torch.full((1000,), float(n)) for n in range(49)})
    striate.save(state, target, engine=engine)
    state.clear()
    loaded = striate.load(target, engine=engine)
    survivor = loaded["small.7"]
    gc.collect()
    before = _resident_bytes()
    loaded.clear()
    gc.collect()
    assert before - _resident_bytes() > 190 << 20
    result = striate.save({"survivor": survivor}, target, engine=engine)
    assert result.data_bytes == 4000 and target.stat().st_size < 10_000
    assert survivor.unique().tolist() == [7.0]


def test_views_of_one_storage_share_it_again(target: Path, engine: Any) -> None:
    base = torch.arange(1000.0)
    state = [base[:10], base[5:15], base.view(10, 100).t()]
    result = striate.save(state, target, engine=engine)
    assert result.data_bytes == 4000
    loaded = striate.load(target, engine=engine)
    same(loaded, state)
    loaded[0][5] = -1.0
    assert loaded[1][0] == -1.0 and loaded[2][5, 0] == -1.0


def test_expanded_tensor_takes_the_space_of_its_storage(target: Path, engine: Any) -> None:
    state = {"x": torch.ones(1, 1024).expand(4096, 1024)}
    assert striate.save(state, target, engine=engine).data_bytes == 4096
    same(striate.load(target, engine=engine), state)


def test_thousand_views_of_one_buffer_take_its_space_once(target: Path, engine: Any) -> None:
    buffer = torch.arange(16 << 20, dtype=torch.float32)  # 64 MiB
    state = [buffer[n * 16000 : n * 16000 + 16000] for n in range(1000)]
    result = striate.save(state, target, engine=engine)
    assert result.data_bytes == 64 << 20 and target.stat().st_size < (64 << 20) + (1 << 20)
    same(striate.load(target, engine=engine), state)


KEYS: dict[Any, Any] = {
    "": 1,
    "..": 2,
    "a/b": 3,
    "nul\0": 4,
    1: 5,
    "1": 6,
    None: 7,
    (1, 2): 8,
    True and "x": 9,
    2.5: 10,
}


@pytest.mark.parametrize("below", [False, True])
def test_keys_of_all_kinds_keep_type_and_order(target: Path, engine: Any, below: bool) -> None:
    state: Any = {key: torch.full((3,), float(value)) for key, value in KEYS.items()}
    state = {"outer": state} if below else state
    striate.save(state, target, engine=engine)
    same(striate.load(target, engine=engine), state)
    into = {key: torch.zeros(3) for key in KEYS}
    striate.load_into({"outer": into} if below else into, target, engine=engine)
    assert [tensor[0].item() for tensor in into.values()] == [float(value) for value in KEYS.values()]


def test_strange_str_keys_alone_stay_a_flat_dict(target: Path, engine: Any) -> None:
    names = [
        "",
        "..",
        "a/b",
        "/etc/passwd",
        "nul\0",
        "line\n",
        "1",
        "ü",
        "\U0001f40b",
        '"quoted"',
        "\\",
        "<!--",
        "é",
        "é",
    ]
    state = {name: torch.full((2,), float(n)) for n, name in enumerate(names)}
    striate.save(state, target, engine=engine)
    assert striate.info(target).graph_bytes == 0
    same(striate.load(target, engine=engine), state)
    same(striate.load_tensors(target, names, engine=engine), state)


def test_key_of_one_megabyte(target: Path, engine: Any) -> None:
    for state in ({"k" * (1 << 20): torch.ones(3)}, {"n": {"ü" * (1 << 19): torch.ones(3), "x": 1}}):
        striate.save(state, target, engine=engine)
        same(striate.load(target, engine=engine), state)


def test_deep_nesting_is_taken_as_far_as_torch_takes_it(target: Path, tmp_path: Path) -> None:
    state: Any = torch.ones(3)
    for n in range(150):
        state = [state] if n % 2 else {"k": state}
    torch.save(state, tmp_path / "by-torch")
    striate.save(state, target)
    same(striate.load(target), torch.load(tmp_path / "by-torch"))


def test_object_that_contains_itself(target: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(3)}
    state["self"] = [state]
    striate.save(state, target)
    loaded = striate.load(target)
    assert loaded["self"][0] is loaded and torch.equal(loaded["w"], torch.ones(3))
