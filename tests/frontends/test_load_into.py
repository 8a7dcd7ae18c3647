"""Loading into tensors that exist: straight into their memory where it fits, and nothing changed where it does not."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import striate
from support.same import same


def zeros_like(state: Any) -> Any:
    """The same nesting with tensors of zeros, and other plain values."""
    if isinstance(state, torch.nn.Parameter):
        return torch.nn.Parameter(torch.zeros_like(state))
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return type(state)((key, zeros_like(value)) for key, value in state.items())
    if isinstance(state, (list, tuple)):
        return type(state)(zeros_like(value) for value in state)
    return "another" if isinstance(state, str) else None


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 1]))


def test_flat_dict_is_read_into_the_memory_that_is_there(target: Path, flat: Any, engine: Any) -> None:
    striate.save(flat, target, engine=engine, chunk_bytes=4096)
    into = zeros_like(flat)
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in into.items()}
    assert striate.load_into(into, target, engine=engine) is into
    for name, (tensor, address) in before.items():
        assert into[name] is tensor and tensor.data_ptr() == address
    same(into, flat)


def test_large_tensors_are_not_held_twice(target: Path) -> None:
    """What fits is read into its place: the memory that the process ever had shows no second copy."""
    import resource

    striate.save({"w": torch.ones(48 << 20), "small": torch.ones(3)}, target)
    into = {"w": torch.zeros(48 << 20), "small": torch.zeros(3)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    striate.load_into(into, target)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # 192 MiB of tensor; the slots of the engine may take some tens.
    assert after - max(before, held // 1024) < 130 << 10
    assert into["w"].sum() == 48 << 20


def test_nested_state_with_plain_values_set_in_their_containers(target: Path, engine: Any) -> None:
    torch.manual_seed(8)
    state = {
        "model": OrderedDict(w=torch.randn(30, 20), b=torch.randn(20)),
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "m": torch.randn(30, 20)}},
            "groups": [{"lr": 0.5}],
        },
        "list": [torch.randn(3), 5, "five"],
        "tuple": (torch.randn(3), 6),
        "step": 12,
        "note": None,
    }
    striate.save(state, target, engine=engine)
    into = zeros_like(state)
    tensors = (into["model"]["w"], into["optimizer"]["state"][0]["m"], into["list"][0], into["tuple"][0])
    striate.load_into(into, target, engine=engine)
    same(into, state)
    assert tensors[0] is into["model"]["w"] and tensors[1] is into["optimizer"]["state"][0]["m"]
    assert tensors[2] is into["list"][0] and tensors[3] is into["tuple"][0]


def test_plain_values_in_tuples_and_lists_are_the_loaded_ones(target: Path) -> None:
    """Adam keeps its betas in a tuple, a history of losses is a list that grows."""
    state = {"betas": (0.8, 0.99), "losses": [3, 2, 1], "milestones": {5, 7}, "pair": (1, torch.ones(2))}
    striate.save(state, target)
    losses, tensor = [9], torch.zeros(2)
    into = {"betas": (0.9, 0.999), "losses": losses, "milestones": None, "pair": (0, tensor)}
    striate.load_into(into, target)
    same(into, state)
    assert into["losses"] is losses and into["pair"][1] is tensor  # type: ignore[index]
    striate.save((5, torch.ones(2)), target)
    found = striate.load_into((0, tensor.zero_()), target)
    assert found[0] == 5 and found[1] is tensor and tensor.sum() == 2


def test_tensors_tied_under_keys_without_a_name(target: Path, engine: Any) -> None:
    """No path names the second one, and still it is the memory of the first."""
    tied = torch.arange(3000.0)
    state: dict[Any, torch.Tensor] = {"a": tied, (1, 2): tied.view(3000)}
    for _ in range(2):
        striate.save(state, target, engine=engine)
        into = zeros_like(state)
        striate.load_into(into, target, engine=engine)
        assert all(torch.equal(tensor, tied) for tensor in into.values())
        state["p"] = torch.nn.Parameter(tied)


def test_container_that_contains_itself(target: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(3)}
    state["self"] = state
    striate.save(state, target)
    into: dict[str, Any] = {"w": torch.zeros(3)}
    into["self"] = into
    striate.load_into(into, target)
    assert torch.equal(into["w"], torch.ones(3)) and into["self"] is into


def test_module_and_its_parameters(target: Path, engine: Any) -> None:
    torch.manual_seed(9)
    source = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    source[1].running_mean.normal_()
    other = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    striate.save(source.state_dict(), target, engine=engine)
    striate.load_into(other.state_dict(), target, engine=engine)
    same(dict(other.state_dict()), dict(source.state_dict()))
    into = dict(other.named_parameters())
    for parameter in into.values():
        parameter.data.zero_()
    striate.load_into(into, target, engine=engine, strict=False)
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in into.values())
    same(dict(other.state_dict()), dict(source.state_dict()))


def test_autograd_notices_that_a_tensor_was_overwritten(target: Path) -> None:
    striate.save({"w": torch.ones(3)}, target)
    weight = torch.zeros(3, requires_grad=True)
    result = (weight * weight).sum()
    striate.load_into({"w": weight}, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_targets_that_lie_otherwise_are_copied_to(target: Path, engine: Any) -> None:
    torch.manual_seed(10)
    state = {name: torch.randn(6, 4) for name in ("transposed", "strided", "wide", "conj", "sliced")}
    striate.save(state, target, engine=engine)
    buffer = torch.zeros(12, 8)
    into = {
        "transposed": torch.zeros(4, 6).t(),
        "strided": buffer[::2, ::2],
        "wide": torch.zeros(6, 4, dtype=torch.float64),
        "conj": torch.zeros(6, 4, dtype=torch.complex64).conj(),
        "sliced": torch.zeros(6, 5)[:, 1:],
    }
    before = dict(into)
    striate.load_into(into, target, engine=engine)
    for name, tensor in state.items():
        assert into[name] is before[name]
        assert torch.equal(into[name].resolve_conj().real.to(torch.float32), tensor), name
    assert not buffer[1::2].any() and not buffer[:, 1::2].any()


def test_views_into_one_flat_buffer(target: Path, engine: Any) -> None:
    """As optimizers and FSDP keep them: every parameter at an offset of one buffer, odd ones too."""
    torch.manual_seed(11)
    sizes = [1, 3, 1000, 7, 4096, 5]
    state = {f"p{n}": torch.randn(size) for n, size in enumerate(sizes)}
    striate.save(state, target, engine=engine, chunk_bytes=4096)
    buffer = torch.zeros(sum(sizes) + 2)
    into = dict(zip(state, buffer[1:-1].split(sizes), strict=True))
    striate.load_into(into, target, engine=engine)
    assert torch.equal(buffer[1:-1], torch.cat(list(state.values())))
    assert buffer[0] == 0 and buffer[-1] == 0
    narrow = torch.zeros(sum(sizes) * 4 + 1, dtype=torch.uint8)
    striate.save({"bytes": torch.arange(sum(sizes) * 4).to(torch.uint8)}, target, engine=engine)
    striate.load_into({"bytes": narrow[1:]}, target, engine=engine)
    assert torch.equal(narrow[1:], torch.arange(sum(sizes) * 4).to(torch.uint8))


WIDENING = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.int32, torch.int64),
    (torch.uint8, torch.int16),
    (torch.bool, torch.int64),
    (torch.int16, torch.float32),
    (torch.int32, torch.float64),
    (torch.uint8, torch.bfloat16),
    (torch.float32, torch.complex64),
    (torch.float8_e4m3fn, torch.float16),
    (torch.float8_e5m2, torch.bfloat16),
]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(("saved", "wanted"), WIDENING, ids=str)
def test_widening_is_allowed_and_narrowing_only_when_told(target: Path, saved: Any, wanted: Any) -> None:
    striate.save({"w": torch.arange(2).to(saved)}, target)
    into = {"w": torch.zeros(2, dtype=wanted)}
    striate.load_into(into, target)
    assert into["w"].dtype == wanted and into["w"].tolist() == [0, 1]

    striate.save({"w": torch.arange(2).to(wanted)}, target)
    into = {"w": torch.zeros(2, dtype=saved)}
    with pytest.raises(striate.LoadMismatch, match="lose precision") as caught:
        striate.load_into(into, target)
    assert len(caught.value.mismatched) == 1 and caught.value.mismatched[0].startswith("w ")
    assert not into["w"].to(torch.float32).any()
    striate.load_into(into, target, allow_narrowing=True)
    assert into["w"].dtype == saved and into["w"].to(torch.int64).tolist() == [0, 1]


NEITHER_HOLDS_THE_OTHER = [
    (torch.bfloat16, torch.float16),
    (torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.int8, torch.uint8),
    (torch.int32, torch.float32),
    (torch.int64, torch.float64),
    (torch.int16, torch.bfloat16),
]


@pytest.mark.parametrize("pair", NEITHER_HOLDS_THE_OTHER, ids=str)
def test_dtypes_of_which_neither_holds_the_other_are_refused_both_ways(target: Path, pair: Any) -> None:
    """torch's own promotion would put int64 into bfloat16 without a word."""
    for saved, wanted in (pair, pair[::-1]):
        striate.save({"w": torch.ones(2).to(saved)}, target)
        with pytest.raises(striate.LoadMismatch, match="lose precision"):
            striate.load_into({"w": torch.zeros(2).to(wanted)}, target)


def test_missing_and_unexpected_are_refused_by_name_before_anything_changes(
    target: Path, engine: Any
) -> None:
    striate.save({"both": torch.ones(9000), "more": {"deep": torch.ones(3)}, "n": 5}, target, engine=engine)
    into = {"both": torch.zeros(9000), "more": {"absent": torch.zeros(3)}, "n": 1, "m": 2}
    before = copy.deepcopy(into)
    with pytest.raises(striate.LoadMismatch) as caught:
        striate.load_into(into, target, engine=engine)
    assert caught.value.missing == ("m", "more.absent")
    assert caught.value.unexpected == ("more.deep",)
    assert isinstance(caught.value, RuntimeError)
    for words in ("m is missing", "more.absent", "more.deep", "Nothing was overwritten", "strict=False"):
        assert words in str(caught.value)
    same(into, before)
    striate.load_into(into, target, engine=engine, strict=False)
    same(into, {"both": torch.ones(9000), "more": {"absent": torch.zeros(3)}, "n": 5, "m": 2})


def test_other_shapes_and_kinds_are_refused_even_when_not_strict(target: Path) -> None:
    striate.save(
        {"first": torch.ones(5000), "w": torch.ones(2, 3), "x": 5, "y": [1], "z": torch.ones(2)}, target
    )
    into = {
        "first": torch.zeros(5000),
        "w": torch.zeros(3, 2),
        "x": torch.zeros(2),
        "y": {"a": torch.zeros(1)},
        "z": "text",
    }
    for strict in (True, False):
        with pytest.raises(striate.LoadMismatch) as caught:
            striate.load_into(into, target, strict=strict)
        assert {words.split()[0] for words in caught.value.mismatched} == {"w", "x", "y", "z"}
        assert not into["first"].any() and not into["w"].any()


def test_lists_of_other_lengths(target: Path) -> None:
    striate.save([torch.ones(2), torch.ones(2), torch.ones(2)], target)
    into = [torch.zeros(2), torch.zeros(2)]
    with pytest.raises(striate.LoadMismatch) as caught:
        striate.load_into(into, target)
    assert caught.value.unexpected == ("2",)
    striate.load_into(into, target, strict=False)
    assert all(t.sum() == 2 for t in into) and len(into) == 2
    with pytest.raises(striate.LoadMismatch) as caught:
        striate.load_into([*into, *into], target)
    assert caught.value.missing == ("3",)


def test_same_names_in_another_nesting_are_not_taken_for_each_other(target: Path) -> None:
    striate.save({"a.b": torch.ones(3)}, target)
    into = {"a": {"b": torch.zeros(3)}}
    with pytest.raises(striate.LoadMismatch):
        striate.load_into(into, target)
    striate.load_into(into, target, strict=False)
    assert not into["a"]["b"].any()


def test_expanded_and_sparse_targets_are_filled_or_refused_before_anything_changes(target: Path) -> None:
    expanded = torch.arange(4.0).view(1, 4).expand(3, 4)
    striate.save({"first": torch.ones(5000), "x": expanded}, target)
    into = {"first": torch.zeros(5000, dtype=torch.float64), "x": torch.zeros(1, 4).expand(3, 4)}
    striate.load_into(into, target)
    assert torch.equal(into["x"], expanded) and into["x"].stride() == (0, 1)
    into["first"].zero_()
    striate.save({"first": torch.ones(5000), "x": torch.ones(3, 4)}, target)
    for wrong in (torch.zeros(1, 4).expand(3, 4), torch.zeros(3, 4).to_sparse()):
        into["x"] = wrong
        with pytest.raises(striate.LoadMismatch, match="^.*x (has one place|is strided there)"):
            striate.load_into(into, target)
        assert not into["first"].any()
    sparse = torch.eye(3).to_sparse()
    striate.save({"x": sparse}, target)
    into = {"x": torch.zeros(3, 3).to_sparse()}
    striate.load_into(into, target)
    assert torch.equal(into["x"].to_dense(), torch.eye(3))


def test_whole_of_another_kind_is_refused(target: Path) -> None:
    for saved, into in (
        ([torch.ones(2)], {"a": torch.ones(2)}),
        (torch.ones(2), {"a": torch.ones(2)}),
        ("x", [1]),
    ):
        striate.save(saved, target)
        with pytest.raises(striate.LoadMismatch, match="the whole"):
            striate.load_into(into, target)


def test_what_is_no_container_is_a_type_error_that_says_what_to_pass(target: Path) -> None:
    striate.save({"a": torch.ones(2)}, target)
    module = torch.nn.Linear(2, 2)
    for thing in (module, torch.optim.SGD(module.parameters()), torch.zeros(2), 5, None):
        with pytest.raises(TypeError, match="dicts and lists"):
            striate.load_into(thing, target)


def test_tied_tensors_in_checkpoint_and_target(target: Path, engine: Any) -> None:
    tied = torch.arange(5000.0)
    striate.save({"a": tied, "b": tied, "c": torch.ones(3)}, target, engine=engine)
    memory = torch.zeros(5000)
    into = {"a": memory, "b": memory, "c": torch.zeros(3)}
    striate.load_into(into, target, engine=engine)
    assert into["a"] is into["b"] is memory and torch.equal(memory, tied)
    apart = {"a": torch.zeros(5000), "b": torch.zeros(5000), "c": torch.zeros(3)}
    striate.load_into(apart, target, engine=engine)
    assert (
        torch.equal(apart["a"], tied)
        and torch.equal(apart["b"], tied)
        and torch.equal(apart["c"], torch.ones(3))
    )
    striate.save({"a": tied, "b": tied + 1}, target, engine=engine)
    one = torch.zeros(5000)
    striate.load_into({"a": one, "b": one}, target, engine=engine)
    assert torch.equal(one, tied + 1)  # as a loop of copies would leave it


def test_views_saved_load_into_their_targets(target: Path, nested: Any, engine: Any) -> None:
    striate.save(nested, target, engine=engine)
    into = zeros_like(nested)
    striate.load_into(into, target, engine=engine)
    for found, wanted in zip(into["views"], nested["views"], strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(into["complex"], nested["complex"]) and torch.equal(into["leaf"], nested["leaf"])
    assert into["step"] == 12 and into[(1, 2)][2] == b"raw"


def test_target_on_the_meta_device_is_refused_and_not_silently_left_empty(target: Path) -> None:
    striate.save({"w": torch.ones(3)}, target)
    with pytest.raises(striate.LoadMismatch, match="meta"):
        striate.load_into({"w": torch.zeros(3, device="meta")}, target)


def test_rebuild_function_that_reads_values_sees_the_saved_ones(target: Path) -> None:
    """A tensor that such a function may look at is not read into its target first, nor after."""
    weight = torch.full((2000,), 2.0)
    striate.save({"w": weight, "seen": _Summed(weight)}, target)
    into = {"w": torch.zeros(2000), "seen": None}
    striate.load_into(into, target, weights_only=False)
    assert into["seen"].total == 4000.0 and torch.equal(into["w"], weight)  # type: ignore[attr-defined]


class _Summed:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.total = float(tensor.sum())

    def __reduce__(self) -> Any:
        return _Summed, (self.tensor,)


@pytest.mark.parametrize("verify_first", [False, True])
def test_corrupt_chunk_says_which_targets_may_be_overwritten(
    target: Path, engine: Any, verify_first: bool
) -> None:
    state = {"a": torch.ones(50_000), "b": torch.ones(50_000)}
    result = striate.save(state, target, engine=engine, chunk_bytes=4096)
    flip(target, result.file_bytes - 5)
    into = zeros_like(state)
    with pytest.raises(striate.CorruptCheckpoint) as caught:
        striate.load_into(into, target, engine=engine, verify_first=verify_first)
    assert caught.value.tensors == ("b",)
    if verify_first:
        assert not hasattr(caught.value, "overwritten")
        assert not into["a"].any() and not into["b"].any()
    else:
        assert caught.value.overwritten == ("a", "b")  # type: ignore[attr-defined]
        assert "may already be overwritten" in str(caught.value) and "verify_first" in str(caught.value)
    flip(target, result.file_bytes - 5)
    striate.load_into(into, target, engine=engine, verify_first=verify_first)
    same(into, state)


def test_damage_outside_the_targets_is_noticed_before_any_is_overwritten(target: Path, engine: Any) -> None:
    """What is copied is read first, so an error there finds every target as it was."""
    state = {"direct": torch.ones(50_000), "wide": torch.ones(50_000, dtype=torch.bfloat16)}
    result = striate.save(state, target, engine=engine, chunk_bytes=4096)
    place = {t.name: t.offset for t in striate.info(target).tensors}
    assert result.data_bytes == 300_000
    flip(target, place["wide"] + 5)
    into = {"direct": torch.zeros(50_000), "wide": torch.zeros(50_000)}
    with pytest.raises(striate.CorruptCheckpoint) as caught:
        striate.load_into(into, target, engine=engine)
    assert "wide" in caught.value.tensors
    assert not into["direct"].any() and not into["wide"].any()


def test_from_a_stream_and_from_foreign_files(target: Path, flat: Any, nested: Any) -> None:
    stream = io.BytesIO()
    striate.save(flat, stream)
    stream.seek(0)
    into = zeros_like(flat)
    tensors = dict(into)
    striate.load_into(into, stream)
    same(into, flat)
    assert all(into[name] is tensor for name, tensor in tensors.items())


def test_hostile_graph_is_refused_before_anything_is_overwritten(target: Path) -> None:
    striate.save({"w": torch.ones(3), "bad": _Summed(torch.ones(2))}, target)
    into = {"w": torch.zeros(3), "bad": None}
    with pytest.raises(striate.UnsafePickle):
        striate.load_into(into, target)
    assert not into["w"].any() and into["bad"] is None


def test_whole_training_state_resumes_in_place(target: Path, engine: Any) -> None:
    torch.manual_seed(12)

    def build() -> tuple[Any, Any]:
        model = torch.nn.Linear(8, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()

    model, optimizer = build()
    for _ in range(3):
        step(model, optimizer)
    striate.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, target, engine=engine)
    step(model, optimizer)
    other, its = build()
    step(other, its)  # so that its moments exist
    state = {"model": other.state_dict(), "optimizer": its.state_dict()}
    striate.load_into(state, target, engine=engine)
    its.load_state_dict(state["optimizer"])
    step(other, its)
    same(dict(other.state_dict()), dict(model.state_dict()))
