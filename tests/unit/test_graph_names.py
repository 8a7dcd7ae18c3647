"""The names that other tools see: dotted paths, ties, and what has none."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from striate import graph
from support.graphs import through_graph
from support.same import same


def names(obj: object) -> list[str | None]:
    return [entry.name for entry in graph.dumps(obj).storages]


def paths(obj: object) -> list[str]:
    return [path for path, _ in graph.tensor_paths(obj)]


def one() -> torch.Tensor:
    return torch.ones(2)


def test_a_path_joins_keys_and_positions_by_dots() -> None:
    state = {
        "model": OrderedDict(w=one()),
        "opt": {"state": {0: {"m": one()}, -1: one()}},
        "l": [1, (one(),)],
    }
    assert names(state) == ["model.w", "opt.state.0.m", "opt.state.-1", "l.1.0"]
    assert names([one(), {"a": one()}]) == ["0", "1.a"]


def test_empty_keys_stand_verbatim() -> None:
    assert names({"": one(), "a": {"": one()}, "n": 1}) == ["", "a."]
    assert paths({"": {"a": one(), "": one()}}) == [".a", "."]


def test_a_tensor_on_its_own_has_no_name() -> None:
    held = graph.dumps(one())
    assert held.pickle is not None
    assert (held.storages[0].name, held.storages[0].named) == (None, True)
    assert paths(one()) == []


@pytest.mark.parametrize("key", [None, (1, 2), True, 1.5, b"x"])
def test_below_any_other_key_there_are_no_names(key: Any) -> None:
    assert names({key: {"a": one()}, "b": one()}) == [None, "b"]


def test_the_first_of_two_equal_paths_wins() -> None:
    first, second = one(), torch.zeros(3)
    state = {"a": {"b": first}, "a.b": second}
    assert names(state) == ["a.b", None]
    assert dict(graph.tensor_paths(state))["a.b"] is first
    assert names({1: one(), "1": one()}) == ["1", None]
    assert all(entry.named for entry in graph.dumps(state).storages)


@pytest.mark.parametrize("key", ["__metadata__", "__striate__.s.0", "__striate__.", "\ud800"])
def test_names_that_no_entry_may_bear_are_not_given(key: str) -> None:
    held = graph.dumps({key: one(), "b": one()})
    assert held.pickle is not None
    assert [entry.name for entry in held.storages] == [None, "b"]
    same(through_graph({key: one(), "b": one()}), {key: one(), "b": one()})


def test_names_that_only_look_reserved_are_given() -> None:
    state = {
        "__metadata__x": one(),
        "__striate__": one(),
        "x": {"__metadata__": one()},
        "ü": one(),
        "a\0b": one(),
    }
    assert names(state) == ["__metadata__x", "__striate__", "x.__metadata__", "ü", "a\0b"]


def test_a_parameter_gives_its_path_to_its_storage() -> None:
    model = torch.nn.Linear(2, 3)
    assert names(dict(model.named_parameters())) == ["weight", "bias"]
    assert names(model.state_dict()) == ["weight", "bias"]


def test_of_tied_tensors_the_first_keeps_the_bytes() -> None:
    weight = one()
    held = graph.dumps({"a": weight, "b": weight.detach(), "c": weight, "d": torch.nn.Parameter(weight)})
    assert len(held.storages) == 1
    assert (held.storages[0].name, held.storages[0].named) == ("a", True)
    assert held.ties == {"b": "a", "c": "a", "d": "a"}


def test_a_tied_model_is_told_by_its_ties() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    held = graph.dumps(model.state_dict())
    assert held.ties == {"1.weight": "0.weight"}
    assert [(entry.name, entry.named) for entry in held.storages] == [("0.weight", True)]


def test_ties_leave_the_metadatas_own_keys_alone() -> None:
    weight = one()
    held = graph.dumps({"a": weight, "format": weight.detach(), "striate.graph": weight.detach()})
    assert held.ties == {}
    assert held.storages[0].named


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:1],
        lambda t: t.view(3, 2),
        lambda t: t.t(),
        lambda t: t.untyped_storage(),
        lambda t: torch.nn.Parameter(t.t(), requires_grad=False),
        lambda t: t.as_strided((2, 3), (1, 1)),
    ],
    ids=["slice", "reshaped", "transposed", "storage", "parameter", "strided"],
)
def test_another_view_of_a_storage_takes_its_name_away(view: Any) -> None:
    whole = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    for state in ({"a": whole, "t": whole.detach(), "b": view(whole)}, {"b": view(whole), "a": whole}):
        held = graph.dumps(state)
        assert [(entry.name, entry.named) for entry in held.storages] == [(None, False)]
        assert held.ties == {}
    held = graph.dumps({"a": whole, "b": view(whole)})
    assert held.storages[0].plain == graph.Plain("U8", (2, 3))  # ("storage", 0) still stands in the graph


def test_a_storage_that_a_view_showed_first_is_never_plain() -> None:
    whole = torch.ones(2, 3)
    held = graph.dumps({"b": whole[:1], "a": whole, "c": whole.detach()})
    assert [(entry.name, entry.named, entry.plain) for entry in held.storages] == [(None, False, None)]


def test_a_storage_that_follows_a_tied_tensor_met_twice_takes_the_name_away() -> None:
    whole = torch.ones(3, dtype=torch.uint8)
    tied = whole.detach()
    held = graph.dumps([whole, tied, tied, whole.untyped_storage()])
    assert [entry.named for entry in held.storages] == [False]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(2, dtype=torch.uint16),
        torch.ones(4)[1:],
        torch.ones(2, 3).t(),
        torch.ones(1).expand(3),
        torch._neg_view(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.arange(6.0).as_strided((1, 6), (3, 1)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_what_other_tools_would_misread_is_raw_and_has_no_name(tensor: torch.Tensor) -> None:
    held = graph.dumps({"a": tensor})
    assert [(entry.name, entry.named, entry.plain) for entry in held.storages] == [(None, False, None)]


def test_attributes_make_a_tensor_more_than_its_bytes() -> None:
    tensor = one()
    tensor.note = 1
    assert [entry.named for entry in graph.dumps({"a": tensor}).storages] == [False]


def test_plain_tensors_say_what_their_bytes_mean() -> None:
    state = {
        "b": torch.ones(2, 3, dtype=torch.bfloat16),
        "s": torch.tensor(1),
        "e": torch.empty(0, 4, dtype=torch.bool),
    }
    held = graph.dumps(state)
    assert [entry.plain for entry in held.storages] == [
        graph.Plain("BF16", (2, 3)),
        graph.Plain("I64", ()),
        graph.Plain("BOOL", (0, 4)),
    ]
    assert [entry.nbytes for entry in held.storages] == [12, 8, 0]
    assert {entry.location for entry in held.storages} == {"cpu"}


def test_many_empty_tensors_keep_apart() -> None:
    state = {f"e{n}": torch.empty(0, n) for n in range(5)}
    assert names(state) == list(state)
    same(through_graph(state), state)


@pytest.mark.parametrize(
    "obj",
    [
        OrderedDict(a=one()),
        {"a": one(), "b": 1},
        {1: one()},
        {"a": [one()]},
        {"a": torch.nn.Parameter(one())},
        {"__metadata__": one()},
        [one()],
        [],
        "hello",
    ],
    ids=repr,
)
def test_all_but_a_flat_dict_has_a_graph(obj: object) -> None:
    assert graph.dumps(obj).pickle is not None


def test_a_flat_dict_with_shared_storages_has_a_graph() -> None:
    tensor = one()
    for state in ({"a": tensor, "b": tensor}, {"a": tensor, "b": tensor.detach()}):
        assert graph.dumps(state).pickle is not None
        found = through_graph(state)
        assert found["a"].data_ptr() == found["b"].data_ptr()


def test_a_str_subclass_as_key_needs_a_graph() -> None:
    class Key(str):
        __slots__ = ()

    assert graph.dumps({"a": one()}).pickle is None
    with pytest.raises(AttributeError, match="local object"):  # it is a class, and pickled by name
        graph.dumps({Key("a"): one()})


# --- the walk -------------------------------------------------------------------------


def test_a_cycle_ends_the_walk() -> None:
    state: dict[str, Any] = {"a": one()}
    state["self"] = state
    state["list"] = [state, one()]
    assert paths(state) == ["a", "list.1"]
    assert through_graph(state)["self"]["a"].tolist() == [1, 1]


def test_a_shared_container_gives_its_tensors_every_path() -> None:
    shared = {"w": one()}
    held = graph.dumps({"model": shared, "ema": shared})
    assert held.storages[0].name == "model.w"
    assert held.ties == {"ema.w": "model.w"}


def test_twenty_levels_of_sharing_do_not_make_a_million_paths() -> None:
    tower: list[Any] = [one()]
    for _ in range(20):
        tower = [tower, tower]
    assert 1 <= len(paths(tower)) <= 32


def test_a_deep_tower_is_walked_no_deeper_than_it_is_named() -> None:
    tower: Any = {"a": one()}
    for _ in range(20_000):
        tower = [tower]
    assert paths([tower, one()]) == ["1"]
    while type(tower) is list:  # take it down by hand
        tower = tower[0]


def test_items_that_a_subclass_computes_are_not_walked() -> None:
    class Lazy(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise AssertionError("computed")

    assert paths({"a": Lazy(b=one())}) == ["a.b"]


# --- load_into's questions ---------------------------------------------------------------


def test_bytes_may_be_read_straight_into_contiguous_tensors_of_the_same_kind() -> None:
    plain = graph.Plain("F32", (2, 3))
    whole = torch.zeros(4, 3)
    assert graph.holds_plain(whole[1:3], plain)
    assert graph.holds_plain(torch.nn.Parameter(torch.zeros(2, 3)), plain)
    for other in (
        torch.zeros(3, 2),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 6)[:, ::2],
        torch.zeros(3).expand(2, 3),
        torch.empty(2, 3, device="meta"),
        torch._neg_view(torch.zeros(2, 3)),
        torch.zeros(2, 3).to_sparse(),
    ):
        assert not graph.holds_plain(other, plain)


def test_given_tensors_take_the_place_of_new_ones() -> None:
    state = {"a": one(), "b": torch.nn.Parameter(one())}
    held = graph.dumps(state)
    mine = torch.zeros(2)
    storages = [torch.UntypedStorage(entry.nbytes) for entry in held.storages]
    found = graph.loads(held.pickle, [], [e.plain for e in held.storages], storages, tensors={0: mine})
    assert found["a"] is mine
    assert type(found["b"]) is torch.nn.Parameter


@pytest.mark.parametrize(
    ("obj", "standard"),
    [
        ({"a": torch.nn.Parameter(torch.ones(2)), "b": torch.ones(3)[1:], "o": OrderedDict(x=1)}, True),
        (
            {"dtype": torch.float32, "size": torch.Size([1]), "set": {1}, "f8": one().to(torch.float8_e5m2)},
            True,
        ),
        ([torch.eye(2).to_sparse()], False),
        ([torch.nn.Linear(1, 1)], False),
    ],
    ids=["tensors", "values", "sparse", "module"],
)
def test_a_graph_is_standard_if_rebuilding_it_reads_no_values(obj: object, standard: bool) -> None:
    pickle = graph.dumps(obj).pickle
    assert pickle is not None
    assert graph.is_standard(pickle) is standard


def test_a_graph_of_protocol_4_that_names_a_class_is_not_standard() -> None:
    pickle = graph.dumps([torch.nn.Linear(1, 1)], pickle_protocol=4).pickle
    assert pickle is not None
    assert not graph.is_standard(pickle)
