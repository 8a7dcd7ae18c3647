"""What torch.save takes and torch.load gives, the graph takes and gives: held against the installed torch."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from striate import graph
from support.graphs import copied_storages, through_graph, through_torch
from support.same import differences, raw_bytes, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

# --- objects to save ---------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass as users write them: it holds data and has attributes."""


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint64,
]


def filled(dtype: torch.dtype, shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """A tensor whose values tell where they are."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count, dtype=torch.int64) + start) % 101
    return values.to(torch.float32).to(dtype).reshape(shape).clone()


def views_of(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything that may look at one storage. ``base`` has 24 elements in a shape of (4, 6)."""
    return {
        "whole": base,
        "tied": base.detach(),
        "flat": base.view(24),
        "half": base[:2],
        "overlapping": base[1:3],
        "transposed": base.t(),
        "column": base[:, 2],
        "stepped": base.view(24)[::5],
        "one": base[3, 4],
        "none": base[:0],
        "expanded": base[0].expand(5, 6),
        "tail": base.view(24)[23:],
        "odd_strides": base.as_strided((1, 24), (7, 1)),
    }


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, pool: list[torch.Tensor], made: list[Any]) -> Any:
    kind = draw(st.sampled_from(["new", "view", "again", "special", "parameter", "grad", "attribute"]))
    if kind == "again" and made:
        return draw(st.sampled_from(made))
    if kind == "view":
        views = views_of(draw(st.sampled_from(pool)))
        tensor: Any = views[draw(st.sampled_from(sorted(views)))]
    elif kind == "special":
        tensor = special(draw(st.sampled_from(SPECIAL)))
    else:
        tensor = filled(draw(st.sampled_from(DTYPES)), draw(shapes), draw(st.integers(0, 9)))
        if kind == "parameter":
            requires_grad = tensor.is_floating_point() and tensor.element_size() > 1
            tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        elif kind == "grad" and tensor.dtype in (torch.float32, torch.float64, torch.complex64):
            tensor.requires_grad_()
        elif kind == "attribute":
            tensor.note = {"of": [1, 2]}
    made.append(tensor)
    return tensor


SPECIAL = [
    "coo",
    "coo uncoalesced",
    "csr",
    "csc",
    "bsr",
    "quantized",
    "quantized channels",
    "conj",
    "neg",
    "zero of conj",
    "meta",
    "channels last",
    "one-element strides",
    "imag",
    "empty at an offset",
]


def special(kind: str) -> torch.Tensor:
    dense = filled(torch.float32, (4, 6)) % 3
    channels = filled(torch.float32, (3, 4))
    return {
        "coo": dense.to_sparse,
        "coo uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2)),
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.5, 3, torch.quint8),
        "quantized channels": lambda: torch.quantize_per_channel(
            channels, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
        ),
        "conj": lambda: filled(torch.complex64, (2, 3)).conj(),
        "neg": lambda: torch._neg_view(filled(torch.float32, (2, 3))),
        "zero of conj": lambda: torch.empty(0, dtype=torch.complex64).conj(),
        "meta": lambda: torch.empty(3, 4, dtype=torch.bfloat16, device="meta"),
        "channels last": lambda: filled(torch.float32, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "one-element strides": lambda: filled(torch.float32, (6,)).as_strided((1, 6), (3, 1)),
        "imag": lambda: filled(torch.complex64, (3,)).imag,
        "empty at an offset": lambda: torch.empty(0).set_(torch.UntypedStorage(0), 5, (0,), (1,)),
    }[kind]()


keys = st.one_of(
    st.text(max_size=6),
    st.integers(-5, 5),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False, width=16),
    st.tuples(st.integers(0, 2), st.text(max_size=2)),
    st.sampled_from(["__metadata__", "__striate__.t.0", "a.b", "", "..", "a/b", "\0"]),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.float32, torch.float8_e5m2, torch.device("cpu"), torch.Size([2, 3])]),
    st.sets(st.integers(0, 9), max_size=3),
)


def with_metadata(pairs: list[tuple[Any, Any]]) -> OrderedDict[Any, Any]:
    result: Any = OrderedDict(pairs)
    result._metadata = OrderedDict({"": {"version": 1}})
    return result  # type: ignore[no-any-return]


@st.composite
def states(draw: st.DrawFn) -> Any:
    pool = [
        filled(dtype, (4, 6), 7) for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    ]
    made: list[Any] = []
    items = st.one_of(tensors(pool, made), tensors(pool, made), leaves)

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        pairs = st.lists(st.tuples(keys, inner), max_size=4)
        return st.one_of(
            pairs.map(dict),
            pairs.map(OrderedDict),
            pairs.map(with_metadata),
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
        )

    return draw(st.one_of(st.recursive(items, containers, max_leaves=12), containers(items)))


def outcome(function: Any, obj: object) -> tuple[Any, Exception | None]:
    try:
        return function(obj), None
    except Exception as error:
        return None, error


# --- properties ----------------------------------------------------------------------


@settings(max_examples=250)
@given(states())
def test_what_comes_back_is_what_torch_gives_back(state: Any) -> None:
    wanted, refused = outcome(through_torch, state)
    found, error = outcome(through_graph, state)
    if refused is not None:
        assert isinstance(error, type(refused))  # UnsafePickle is an UnpicklingError
        assert str(error) == str(refused)
    else:
        assert error is None, repr(error)
        same(found, wanted)


simple_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.sampled_from(["", "one", "two", "\ud800", "é" * 300]),
    st.sampled_from([(), (0.9, 0.999), ((1, "one"), [2])]),
    st.builds(filled, st.sampled_from(DTYPES[:10]), shapes, st.integers(0, 9)),
)


def simple_containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.one_of(
        st.sampled_from(["one", "two", "one.two", "__metadata__", "\ud800"]), st.integers(-3, 300)
    )
    pairs = st.lists(st.tuples(names, inner), max_size=5)
    return st.one_of(
        pairs.map(dict),
        pairs.map(OrderedDict),
        pairs.map(with_metadata),
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
    )


@settings(max_examples=250)
@given(simple_containers(st.recursive(simple_leaves, simple_containers, max_leaves=20)))
def test_what_is_written_in_one_walk_is_what_a_pickler_writes(state: Any) -> None:
    """The same storages under the same names, and a pickle that gives the same object."""
    wanted = graph._dumps(state, pickle, 2)
    found = graph._dumps_simple(state)
    if found is None:
        # A list that is there twice, or two tensors of one name: rare here, and the pickler's.
        return
    assert found.storages == wanted.storages and found.ties == wanted.ties == {}
    assert [entry.source for entry in found.storages] == [entry.source for entry in wanted.storages]
    same(through_graph(state), through_torch(state))


def test_most_states_are_written_in_one_walk() -> None:
    """Otherwise the fast way would be there for nobody."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    betas = (0.9, 0.999)
    plain = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "both": [betas, betas],
        "rng": torch.get_rng_state(),
    }
    assert graph._dumps_simple(plain) is not None
    same(through_graph(plain), through_torch(plain))
    tied = torch.nn.Linear(3, 3)
    shared = [torch.ones(2)]
    one = torch.ones(3)
    for state in (
        {"a": tied.weight},
        {"a": one, "b": one},
        {"a": one, "b": one[1:]},
        {"a": one.view(3), "b": one.view(3)},
        {"a": shared, "b": shared},
        {"a": {1, 2}},
        {"a": torch.float32},
        {(1, 2): one},
        {True: one},
        torch.ones(2),
        with_metadata([("a", one)]) | {"more": object},
    ):
        assert graph._dumps_simple(state) is None, state
    recursive: list[Any] = [one]
    recursive.append(recursive)
    assert graph._dumps_simple(recursive) is None


@settings(max_examples=60)
@given(st.dictionaries(st.text(), st.sampled_from(DTYPES[:10]), max_size=6))
def test_a_flat_dict_needs_no_graph_and_keeps_its_order(dtypes: dict[str, torch.dtype]) -> None:
    state = {key: filled(dtype, (n, 2)) for n, (key, dtype) in enumerate(dtypes.items())}
    if any(key.startswith("__") for key in state):
        return
    held = graph.dumps(state)
    assert held.pickle is None
    assert [entry.name for entry in held.storages] == list(state)
    same(through_graph(state), state)


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5, -1])
def test_every_protocol_loads_without_weights_only(protocol: int) -> None:
    state = [{"a": filled(torch.float32, (2, 3)), "b": {1, 2}}, filled(torch.float64, (4, 6)).t()]
    found = through_graph(state, weights_only=False, pickle_protocol=protocol)
    same(found, through_torch(state, weights_only=False, pickle_protocol=protocol))


def test_protocol_0_which_cannot_name_a_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="protocol 0"):
        graph.dumps([torch.ones(1)], pickle_protocol=0)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_another_protocol_under_weights_only_fares_as_with_torch(protocol: int) -> None:
    for state in ([torch.ones(2)], {"a": [1, "two", b"three"]}):
        with pytest.warns(UserWarning, match="pickle protocol"):
            wanted, refused = outcome(lambda obj: through_torch(obj, pickle_protocol=protocol), state)
        with pytest.warns(UserWarning, match="pickle protocol"):
            found, error = outcome(lambda obj: through_graph(obj, pickle_protocol=protocol), state)
        assert (error is None) == (refused is None)
        assert isinstance(error, pickle.UnpicklingError) == isinstance(refused, pickle.UnpicklingError)
        if refused is not None:
            assert str(error) == str(refused)
        else:
            same(found, wanted)


def test_other_pickle_modules_are_honoured() -> None:
    class Module:
        """Says that it was used."""

        Unpickler = pickle.Unpickler
        dumped = 0

        class Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
            def dump(self, obj: object) -> None:
                Module.dumped += 1
                super().dump(obj)

    state = [filled(torch.float32, (2, 2)), filled(torch.float32, (4, 6))[1:]]
    same(through_graph(state, pickle_module=Module), through_torch(state))
    assert Module.dumped == 1


# --- what the same object means --------------------------------------------------------


def test_one_tensor_met_twice_comes_back_as_one() -> None:
    tensor = filled(torch.float32, (3,))
    one, two = through_graph([tensor, tensor])
    assert one is two


def test_one_parameter_met_twice_comes_back_as_one() -> None:
    parameter = torch.nn.Parameter(filled(torch.float32, (3,)))
    found = through_graph({"a": parameter, "b": [parameter]})
    assert found["a"] is found["b"][0]
    assert type(found["a"]) is torch.nn.Parameter
    assert found["a"].requires_grad


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("view", sorted(views_of(torch.zeros(4, 6))))
def test_a_view_before_or_after_its_base_shares_with_it(view: str, order: int) -> None:
    views = views_of(filled(torch.float32, (4, 6)))
    state = [views["whole"], views[view], views["tied"]][::order]
    same(through_graph(state), through_torch(state))


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tensors_come_back(kind: str) -> None:
    tensor = special(kind)
    for state in (tensor, {"a": tensor}, [tensor, tensor]):
        same(through_graph(state), through_torch(state))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3, 0, 2), (4, 6)):
        state = {"t": filled(dtype, shape), "more": 1}
        same(through_graph(state), through_torch(state))
        same(through_graph(state), state)


def test_a_subclass_with_attributes_comes_back_once_it_is_allowed() -> None:
    tensor = filled(torch.float32, (2, 3)).as_subclass(Tagged)
    tensor.note = "kept"
    with torch.serialization.safe_globals([Tagged]):
        found, wanted = through_graph([tensor]), through_torch([tensor])
    same(found, wanted)
    assert type(found[0]) is Tagged
    assert found[0].note == "kept"


def test_nested_tensors_come_back() -> None:
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    found = through_graph([tensor])[0]
    assert found.is_nested
    assert [part.tolist() for part in found.unbind()] == [[1, 1], [0, 0, 0]]


def test_storages_themselves_come_back_as_torch_gives_them() -> None:
    tensor = filled(torch.float32, (3,))
    state = [tensor.untyped_storage(), tensor.untyped_storage()]
    found, wanted = through_graph(state), through_torch(state)
    assert [type(one) for one in found] == [type(one) for one in wanted]
    assert found[0] is found[1]
    assert raw_bytes(found[0]._untyped_storage) == raw_bytes(tensor.untyped_storage())


def test_a_storage_whose_size_is_no_multiple_of_its_items_comes_back() -> None:
    storage = torch.UntypedStorage(11)
    storage.copy_(torch.arange(11, dtype=torch.uint8).untyped_storage())
    tensor = torch.empty(0, dtype=torch.float32).set_(storage, 0, (2,))
    found = through_graph([tensor])[0]
    assert found.shape == (2,)
    assert torch.equal(found.view(torch.uint8), torch.arange(8, dtype=torch.uint8))


def test_two_storages_at_one_address_are_held_to_torchs_rule() -> None:
    memory = bytearray(16)
    one = torch.frombuffer(memory, dtype=torch.float32)
    other = torch.frombuffer(memory, dtype=torch.int32)
    one_storage = {"a": one[1:], "b": one.view(torch.int32)}
    for state in ({"a": one, "b": other}, [one, other], [one, other[1:], other], one_storage):
        _, refused = outcome(through_torch, state)
        _, error = outcome(through_graph, state)
        assert type(error) is type(refused)
        assert str(error) == str(refused)
    _, refused = outcome(through_torch, {"a": one, "b": other})
    assert isinstance(refused, RuntimeError)
    same(through_graph([one, torch.frombuffer(memory, dtype=torch.float32)]), [one, one.clone()])


# --- rebuild functions and temporaries (case 1) ------------------------------------------


class SumsItself:
    """Its rebuild function reads the tensor's values."""

    def __init__(self, tensor: torch.Tensor, total: float | None = None) -> None:
        self.tensor, self.total = tensor, total

    def __reduce__(self) -> tuple[Any, ...]:
        return (rebuilt_with_sum, (self.tensor,))


def rebuilt_with_sum(tensor: torch.Tensor) -> SumsItself:
    return SumsItself(tensor, float(tensor.sum()))


class MakesTemporaries:
    """Pickles a tensor that nobody else holds."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return (MakesTemporaries.back, (torch.full((5,), self.value),))

    @staticmethod
    def back(tensor: torch.Tensor) -> MakesTemporaries:
        assert tensor.unique().numel() == 1
        return MakesTemporaries(int(tensor[0]))


def test_rebuild_functions_see_the_values() -> None:
    found = through_graph({"a": SumsItself(torch.arange(5.0))}, weights_only=False)
    assert found["a"].total == 10.0


def test_temporaries_made_while_pickling_do_not_take_each_others_place() -> None:
    found = through_graph([MakesTemporaries(n) for n in range(50)], weights_only=False)
    assert [one.value for one in found] == list(range(50))


class YieldsTemporaries(list):  # type: ignore[type-arg]
    """Gives its items one by one, and holds none of them: not even the pickler's memo does."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (YieldsTemporaries, (), None, (torch.full((5,), n) for n in range(50)))


def test_temporaries_that_nobody_holds_do_not_take_each_others_place() -> None:
    found = through_graph(YieldsTemporaries(), weights_only=False)
    assert [one.tolist() for one in found] == [[n] * 5 for n in range(50)]


def test_sparse_tensors_are_checked_when_torch_checks_them() -> None:
    coo, csr = special("coo"), special("csr")
    with torch.sparse.check_sparse_tensor_invariants():
        found = through_graph([coo, csr])
    assert torch.equal(found[0].to_dense(), coo.to_dense())
    assert torch.equal(found[1].to_dense(), csr.to_dense())
    broken = torch.sparse_coo_tensor(torch.tensor([[9]]), torch.tensor([1.0]), (2,), check_invariants=False)
    with (
        torch.sparse.check_sparse_tensor_invariants(),
        pytest.raises(RuntimeError, match="size is inconsistent"),
    ):
        through_graph([broken])
    assert not torch._utils._sparse_tensors_to_validate


# --- refusals while pickling (case 3) -----------------------------------------------------


def test_what_cannot_be_pickled_raises_what_torch_raises() -> None:
    for state in ({"t": torch.ones(2), "f": lambda: 0}, [torch.ones(2), open(__file__)]):
        _, refused = outcome(through_torch, state)
        _, error = outcome(through_graph, state)
        assert refused is not None
        assert type(error) is type(refused)
        assert str(error) == str(refused)


def test_an_error_of_a_subclass_half_way_comes_through() -> None:
    class Fails(torch.Tensor):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise OSError("half-way")

    with pytest.raises(OSError, match="half-way"):
        graph.dumps([torch.ones(2), torch.ones(3).as_subclass(Fails)])


def test_a_tower_of_lists_raises_what_torch_raises() -> None:
    tower: list[Any] = []
    for _ in range(100_000):
        tower = [tower]
    with pytest.raises(RecursionError):
        graph.dumps(tower)


def test_a_failed_or_finished_dump_holds_no_tensor() -> None:
    gc.collect()
    gc.disable()
    try:
        tensor = torch.ones(3)
        gone = weakref.ref(tensor)
        held = graph.dumps([tensor, torch.ones(2)])
        del tensor, held
        assert gone() is None
    finally:
        gc.enable()


# --- contexts (case 4) ----------------------------------------------------------------------


def awkward_state() -> dict[str, Any]:
    return {
        "flat": filled(torch.bfloat16, (2, 3)),
        "view": filled(torch.float32, (4, 6))[1:],
        "parameter": torch.nn.Parameter(filled(torch.float32, (2,))),
        "conj": special("conj"),
        "coo": special("coo"),
    }


def test_a_default_device_of_meta_does_not_reach_what_is_loaded() -> None:
    for state in (awkward_state(), {"a": filled(torch.float32, (3,))}):
        with torch.device("meta"):
            found = through_graph(state)
        same(found, through_torch(state))
        torch.set_default_device("meta")
        try:
            found = through_graph(state)
        finally:
            torch.set_default_device(None)
        same(found, through_torch(state))


def test_a_default_dtype_does_not_reach_what_is_loaded() -> None:
    state = awkward_state()
    torch.set_default_dtype(torch.float64)
    try:
        found = through_graph(state)
    finally:
        torch.set_default_dtype(torch.float32)
    same(found, state | {"coo": found["coo"]})
    assert found["coo"].dtype == torch.float32


def test_loaded_tensors_are_leaves_that_can_be_resized_and_trained() -> None:
    for found in (through_graph({"a": torch.ones(3)}), through_graph({"a": torch.ones(3), "n": 1})):
        tensor = found["a"]
        tensor.resize_(100, 100)
        tensor.t_()
        tensor.set_(torch.zeros(2))
        tensor.requires_grad_()
        assert tensor.is_leaf
        tensor.sum().backward()
        assert tensor.grad is not None


# --- sizes (cases 6, 21) ------------------------------------------------------------------------


def test_views_are_stored_once() -> None:
    base = torch.arange(1000.0)
    state = [base[:10], base[5:15], base.view(10, 100).t()]
    held = graph.dumps(state)
    assert [entry.nbytes for entry in held.storages] == [4000]
    same(through_graph(state), through_torch(state))

    held = graph.dumps(torch.ones(1, 1024).expand(4096, 1024))
    assert [entry.nbytes for entry in held.storages] == [4096]

    held = graph.dumps([base[n : n + 1] for n in range(1000)])
    assert len(held.storages) == 1


@pytest.mark.parametrize(
    "obj",
    [
        {},
        [],
        "hello",
        {1: 2},
        None,
        (),
        torch.tensor(3),
        {"k" * 1_000_000: torch.ones(1)},
        {key: torch.full((1,), n) for n, key in enumerate(["", "..", "a/b", "\0", 1, "1", None, (1, 2)])},
        {"": torch.ones(1), "a": {"": torch.zeros(1)}},
        {"\ud800": torch.ones(1)},
        Counter("abca"),
        bytearray(b"abc"),
        {True: torch.zeros(1), "True": torch.ones(1), 0: torch.ones(2)},
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_odd_objects_come_back(obj: Any) -> None:
    same(through_graph(obj), through_torch(obj))


def test_100_000_tensors_work_flat_and_nested() -> None:
    flat = {f"layer.{n}": torch.full((1,), n, dtype=torch.int32) for n in range(100_000)}
    held = graph.dumps(flat)
    assert held.pickle is None
    for state in (flat, {"model": flat, "step": 3}):
        found = through_graph(state)
        found = found if state is flat else found["model"]
        assert list(found) == list(flat)
        assert torch.cat(list(found.values())).tolist() == list(range(100_000))


# --- the comparison itself ------------------------------------------------------------------------


def test_the_comparison_sees_a_broken_share() -> None:
    base = torch.ones(4)
    assert list(differences([base[:2], base[2:]], [base[:2], base[2:].clone()]))


def test_storages_of_the_table_are_the_callers_own() -> None:
    tensor = torch.ones(3)
    held = graph.dumps({"a": tensor, "n": 1})
    assert held.storages[0].source.data_ptr() == tensor.data_ptr()
    copies = copied_storages(held, graph.Restore(None))
    assert copies[0].data_ptr() != tensor.data_ptr()
