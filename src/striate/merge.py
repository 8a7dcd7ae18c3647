"""Putting a loaded object into one that exists: what fits where, and what is refused.

Two steps: ``plan`` compares and raises before anything changes, ``apply`` copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from striate import graph
from striate.errors import LoadMismatch

__all__ = ["Merge"]


class Merge:
    """A target (nested dicts, lists and tuples) and what is to be done to it."""

    def __init__(self, state: Any, *, strict: bool, allow_narrowing: bool) -> None:
        self.state = state
        self.strict = strict
        self.allow_narrowing = allow_narrowing
        self.targets: dict[str, torch.Tensor] = {}
        for name, tensor in graph.tensor_paths(state):
            self.targets.setdefault(name, tensor)
        self._result = state
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._settings: list[tuple[Any, Any, Any]] = []
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._mismatched: list[str] = []
        self._in_place: set[int] = set()
        self._met: set[int] = set()
        self._open: set[tuple[int, int]] = set()

    def plan(self, loaded: Any, in_place: Iterable[torch.Tensor] = ()) -> None:
        """Compares. ``in_place``: targets that stand in ``loaded`` themselves, their bytes still to come.

        Raises LoadMismatch.
        """
        self._in_place = {id(target) for target in in_place}
        self._met.clear()
        for rows in (self._copies, self._settings, self._missing, self._unexpected, self._mismatched):
            rows.clear()
        if isinstance(loaded, dict) == isinstance(self.state, dict) and isinstance(
            loaded, (dict, list, tuple)
        ):
            self._result = self._merged("", self.state, loaded)
        else:
            self._mismatched.append(_kinds("", self.state, loaded))
        refused = list(self._mismatched)
        if self.strict:
            refused += [f"{name} is missing in the checkpoint" for name in self._missing]
            refused += [f"{name} is in the checkpoint and not in the target" for name in self._unexpected]
        if refused:
            more = f" and {len(refused) - 6} more" if len(refused) > 6 else ""
            raise LoadMismatch(
                f"the checkpoint does not fit the target: {'; '.join(refused[:6])}{more}. Nothing was overwritten. "
                "strict=False ignores missing and unexpected entries, allow_narrowing=True allows narrower dtypes.",
                missing=self._missing,
                unexpected=self._unexpected,
                mismatched=self._mismatched,
            )

    @property
    def in_place_fits(self) -> bool:
        """After ``plan``: was each of ``in_place`` met at its own place, so that its bytes may come?"""
        return self._met == self._in_place

    def apply(self) -> Any:
        """Copies and sets. The target, or, if that is a tuple with plain values in it, the tuple in its place."""
        with torch.no_grad():
            for target, loaded in self._copies:
                target.copy_(loaded)
        for container, key, value in self._settings:
            container[key] = value
        return self._result

    def _merged(self, name: str, there: Any, here: Any) -> Any:
        """What is to stand in the place of ``there``: itself where it is filled, the loaded value where it is plain."""
        # Containers inside one another can be as deep as the pickle allows,
        # which is below Python's own recursion limit.
        if isinstance(there, torch.Tensor) and isinstance(here, torch.Tensor):
            self._merge_tensors(name, there, here)
            return there
        pair = (id(there), id(here))
        if pair in self._open:
            return there  # a container that contains itself
        self._open.add(pair)
        try:
            if isinstance(there, dict) and isinstance(here, dict):
                self._merge_dicts(name, there, here)
                return there
            if not _holds_tensors(there) and not _holds_tensors(here):
                if isinstance(there, list) and isinstance(here, list):
                    self._settings.append((there, slice(None), here))
                    return there
                return here
            if isinstance(there, (list, tuple)) and isinstance(here, (list, tuple)):
                return self._merged_sequence(name, there, here)
            self._mismatched.append(_kinds(name, there, here))
            return there
        finally:
            self._open.discard(pair)

    def _merge_dicts(self, name: str, there: dict[Any, Any], here: dict[Any, Any]) -> None:
        self._missing += [_joined(name, key) for key in there if key not in here]
        self._unexpected += [_joined(name, key) for key in here if key not in there]
        for key, value in there.items():
            if key in here:
                merged = self._merged(_joined(name, key), value, here[key])
                if merged is not value:
                    self._settings.append((there, key, merged))

    def _merged_sequence(self, name: str, there: Any, here: Any) -> Any:
        shorter = min(len(there), len(here))
        self._missing += [_joined(name, n) for n in range(shorter, len(there))]
        self._unexpected += [_joined(name, n) for n in range(shorter, len(here))]
        merged = [self._merged(_joined(name, n), there[n], here[n]) for n in range(shorter)]
        changed = [n for n in range(shorter) if merged[n] is not there[n]]
        if isinstance(there, list):
            self._settings += [(there, n, merged[n]) for n in changed]
            return there
        if not changed:
            return there
        merged += there[shorter:]
        return type(there)(*merged) if hasattr(there, "_fields") else type(there)(merged)

    def _merge_tensors(self, name: str, target: torch.Tensor, loaded: torch.Tensor) -> None:
        if target.device.type == "meta":
            self._mismatched.append(
                f"{name} is on the meta device here and has no memory (to_empty() gives it some)"
            )
        elif target.shape != loaded.shape:
            self._mismatched.append(
                f"{name} has shape {tuple(loaded.shape)} there, {tuple(target.shape)} here"
            )
        elif not self.allow_narrowing and _narrows(loaded.dtype, target.dtype):
            self._mismatched.append(
                f"{name} is {loaded.dtype} there, and {target.dtype} would lose precision"
            )
        elif target.layout != loaded.layout or target.is_quantized != loaded.is_quantized:
            self._mismatched.append(f"{name} is {_form(loaded)} there, {_form(target)} here")
        elif id(target) in self._in_place and _is_same_memory(target, loaded):
            self._met.add(id(target))
        elif target.layout is torch.strided:
            self._copy_strided(name, target, loaded)
        else:
            self._copies.append((target, loaded))

    def _copy_strided(self, name: str, target: torch.Tensor, loaded: torch.Tensor) -> None:
        # Of what was expanded to many places one is memory, and can be copied to
        # if the loaded one is expanded in the same way.
        for dimension, size in enumerate(target.shape):
            if size > 1 and target.stride(dimension) == 0:
                if loaded.stride(dimension) != 0:
                    self._mismatched.append(f"{name} has one place in memory for several elements here")
                    return
                target, loaded = target.narrow(dimension, 0, 1), loaded.narrow(dimension, 0, 1)
        self._copies.append((target, loaded))


def _kinds(name: str, there: Any, here: Any) -> str:
    return f"{name or 'the whole'} is a {type(here).__name__} there and a {type(there).__name__} here"


def _holds_tensors(value: Any) -> bool:
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            return True
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return False


def _is_same_memory(target: torch.Tensor, loaded: torch.Tensor) -> bool:
    # A Parameter is rebuilt around the target that was given for its data.
    return loaded is target or (
        loaded.layout is torch.strided
        and loaded.data_ptr() == target.data_ptr()
        and loaded.untyped_storage()._cdata == target.untyped_storage()._cdata
    )


def _form(tensor: torch.Tensor) -> str:
    return "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Are there values of ``source`` that ``target`` cannot hold? torch's promotion would let int64 into bfloat16."""
    if source == target:
        return False
    if _is_quantized(source) or _is_quantized(target) or target == torch.bool:
        return True
    if source == torch.bool:
        return False
    if source.is_complex:
        return not target.is_complex or _narrows(source.to_real(), target.to_real())
    if target.is_complex:
        target = target.to_real()
    try:
        if not target.is_floating_point:
            if source.is_floating_point:
                return True
            one, other = torch.iinfo(source), torch.iinfo(target)
            return one.min < other.min or one.max > other.max
        wide = torch.finfo(target)
        if not source.is_floating_point:
            return torch.iinfo(source).max > 2 / wide.eps
        narrow = torch.finfo(source)
        # The last: the smallest number of all, subnormal where the type has such.
        return (
            wide.eps > narrow.eps or wide.max < narrow.max or wide.tiny * wide.eps > narrow.tiny * narrow.eps
        )
    except TypeError:
        return True  # types of bits, that are no numbers


def _is_quantized(dtype: torch.dtype) -> bool:
    return str(dtype).startswith(("torch.qint", "torch.quint"))
