"""Whatever torch.save takes comes back as torch.load brings it: dtype, shape, stride, sharing, Parameter-ness.

torch itself, in the same environment, is what this is held against: not our idea of it.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import striate
from support.same import differences, same

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
]

SCALARS = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.text(max_size=6),
    st.binary(max_size=6),
)
KEYS = st.one_of(
    st.text(max_size=4),
    st.sampled_from(
        ["a", "a.b", "b", "", "__metadata__", "__striate__.t.0", "__striate__.s.1", "0", "format"]
    ),
    st.integers(-2, 12),
    st.none(),
    st.tuples(st.integers(0, 2), st.text(max_size=1)),
    st.floats(0, 4),
)


@st.composite
def a_storage(draw: st.DrawFn) -> torch.Tensor:
    """A one-dimensional tensor that owns its storage."""
    length = draw(st.sampled_from([0, 1, 2, 7, 24, 24, 24, 1023, 1024, 1025, 5000]))
    values = torch.arange(length) % 251 + draw(st.integers(0, 100))
    dtype = draw(st.sampled_from(DTYPES))
    return (values % 2).to(dtype) if dtype in (torch.bool, torch.float8_e4m3fn) else values.to(dtype)


@st.composite
def a_view(draw: st.DrawFn, base: torch.Tensor) -> Any:
    """One of the many ways to look at a storage."""
    length = base.numel()
    kind = draw(
        st.sampled_from(
            [
                "whole",
                "whole",
                "whole",
                "slice",
                "matrix",
                "transposed",
                "step",
                "expanded",
                "strided",
                "empty",
                "parameter",
                "frozen parameter",
                "grad",
                "conj",
                "neg",
                "bits",
                "storage",
                "attribute",
                "clone",
            ]
        )
    )
    if kind == "slice":
        start = draw(st.integers(0, length))
        return base[start : draw(st.integers(start, length))]
    if kind == "matrix" and length == 24:
        return base.view(draw(st.sampled_from([(4, 6), (2, 3, 4), (24, 1), (1, 24), (1, 1, 24)])))
    if kind == "transposed" and length == 24:
        return base.view(4, 6).t()
    if kind == "step" and length > 1:
        return base[:: draw(st.integers(2, 3))]
    if kind == "expanded" and length:
        return base[:1].expand(3, 4)
    if kind == "strided" and length == 24:
        return base.as_strided(
            (2, 3), (draw(st.integers(0, 6)), draw(st.integers(0, 3))), draw(st.integers(0, 10))
        )
    if kind == "empty":
        return base[:0].view(0, draw(st.integers(0, 3)))
    if kind in ("parameter", "frozen parameter"):
        moves = kind == "parameter" and (base.is_floating_point() or base.is_complex())
        return torch.nn.Parameter(base, requires_grad=moves)
    if kind == "grad" and (base.is_floating_point() or base.is_complex()):
        return base.detach().requires_grad_()
    if kind == "conj" and base.is_complex():
        return base.conj()
    if kind == "neg" and base.dtype == torch.complex64:
        return base.conj().imag
    if kind == "bits" and base.element_size() == 2:
        return base.view(torch.int16)  # torch refuses to save both
    if kind == "storage":
        return base.untyped_storage()
    if kind == "attribute":
        view = base.view(-1)
        view.note = draw(SCALARS)
        return view
    if kind == "clone":
        return base.clone()
    return base


@st.composite
def an_object(draw: st.DrawFn) -> Any:
    storages = draw(st.lists(a_storage(), min_size=1, max_size=4))
    leaves: list[Any] = draw(
        st.lists(st.one_of(*(a_view(base) for base in storages)), min_size=0, max_size=6)
    )
    # The same object at several places, too.
    leaf = st.one_of(SCALARS, *([st.sampled_from(leaves)] * 3 if leaves else []))

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(KEYS, inner, max_size=4),
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        )

    return draw(st.recursive(leaf, containers, max_leaves=14))


flat_dicts = st.dictionaries(st.text(max_size=5), a_storage(), max_size=8)


def outcome(call: Any) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except Exception as e:
        return None, e


@pytest.mark.filterwarnings("ignore")  # torch's own, about types that are new or old
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(state=st.one_of(an_object(), flat_dicts), chunk_bytes=st.sampled_from([4096, 1 << 22]))
def test_loads_as_torch_does(tmp_path: Path, state: Any, chunk_bytes: int) -> None:
    by_torch, path = io.BytesIO(), tmp_path / "checkpoint"
    _, refused = outcome(lambda: torch.save(state, by_torch))
    path.unlink(missing_ok=True)
    _, refused_here = outcome(lambda: striate.save(state, path, chunk_bytes=chunk_bytes))
    assert type(refused_here) is type(refused), (refused_here, refused)
    if refused is not None:
        assert not path.exists()
        return
    by_torch.seek(0)
    wanted, refused = outcome(lambda: torch.load(by_torch))
    if refused is not None:  # empty bytes, for one
        with pytest.raises(type(refused)):
            striate.load(path)
        return
    for engine in ("posix", "auto"):
        same(striate.load(path, engine=engine), wanted)  # type: ignore[arg-type]
    same(striate.load(path, weights_only=False), wanted)
    assert striate.verify(path)

    stream = io.BytesIO()
    striate.save(state, stream, chunk_bytes=chunk_bytes)
    stream.seek(0)
    same(striate.load(stream), wanted)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(state=an_object())
def test_loading_into_a_copy_of_what_was_saved_changes_nothing_and_into_zeros_restores_it(
    tmp_path: Path, state: Any
) -> None:
    path = tmp_path / "checkpoint"
    if (
        not isinstance(state, (dict, list, tuple))
        or outcome(lambda: striate.save(state, path))[1] is not None
    ):
        return
    into, refused = outcome(lambda: striate.load(path))
    if refused is not None:
        return
    for tensor in tensors_of(into):
        tensor.untyped_storage().fill_(0)
    filled = striate.load_into(into, path)
    for found, wanted in zip(tensors_of(filled), tensors_of(striate.load(path)), strict=True):
        assert not found.numel() or torch.equal(bits(found), bits(wanted))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of one value counts as contiguous whatever its stride. No copy: it would make any true byte a 1.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [tensor for member in value for tensor in tensors_of(member)]
        if isinstance(value, (list, tuple))
        else []
    )


def test_the_comparison_itself_sees_what_it_must() -> None:
    """A property that cannot fail proves nothing."""
    base = torch.arange(6.0)
    there = {"a": base, "b": base[1:3], "p": torch.nn.Parameter(torch.ones(2))}
    assert not list(differences(there, dict(there)))
    for changed in (
        {**there, "a": base.clone()},
        {**there, "a": base.to(torch.float64)},
        {**there, "a": base.view(2, 3)},
        {**there, "a": base + 1},
        {**there, "b": base[2:4]},
        {**there, "p": torch.ones(2)},
        {**there, "p": torch.nn.Parameter(torch.ones(2), requires_grad=False)},
        {**there, "c": 1},
        {"b": there["b"], "a": there["a"], "p": there["p"]},
        OrderedDict(there),
    ):
        assert list(differences(changed, there)), changed
    nan = torch.tensor([float("nan")])
    assert not list(differences({"n": nan, "f": float("nan")}, {"n": nan.clone(), "f": float("nan")}))
    assert list(differences(1, True)) and list(differences(0.0, 0)) and list(differences(-0.0, 0.0)) == []
