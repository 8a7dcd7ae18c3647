"""Putting a loaded object into one that exists: what fits where, and what is refused.

Two steps: ``plan`` compares and raises before anything changes, ``apply`` copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from striate import graph
from striate.errors import LoadMismatch

__all__ = ["Merge"]


class Merge:
    """A target (nested dicts and lists) and what is to be done to it."""

    def __init__(self, state: Any, *, strict: bool, allow_narrowing: bool) -> None:
        self.state = state
        self.strict = strict
        self.allow_narrowing = allow_narrowing
        self.targets: dict[str, torch.Tensor] = {}
        for name, tensor in graph.tensor_paths(state):
            self.targets.setdefault(name, tensor)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._settings: list[tuple[Any, Any, Any]] = []
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._mismatched: list[str] = []
        self._in_place: set[int] = set()

    def plan(self, loaded: Any, in_place: Mapping[str, torch.Tensor]) -> None:
        """Compares; ``in_place`` are targets whose bytes come by themselves. Raises LoadMismatch."""
        self._in_place = {id(target) for target in in_place.values()}
        self._compare("", self.state, loaded)
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

    def apply(self) -> None:
        with torch.no_grad():
            for target, loaded in self._copies:
                target.copy_(loaded)
        for container, key, value in self._settings:
            container[key] = value

    def _compare(self, path: str, target: Any, loaded: Any) -> None:
        # Containers inside one another can be as deep as the pickle allows,
        # which is below Python's own recursion limit.
        for key, there, here, name in self._pairs(path, target, loaded):
            if isinstance(there, torch.Tensor) and isinstance(here, torch.Tensor):
                self._compare_tensors(name, there, here)
            elif isinstance(there, torch.Tensor) != isinstance(here, torch.Tensor):
                self._mismatched.append(f"{name} is a tensor on one side only")
            elif _both(dict, there, here) or _both((list, tuple), there, here):
                self._compare(name, there, here)
            elif isinstance(target, (dict, list)):
                self._settings.append((target, key, here))

    def _pairs(self, path: str, target: Any, loaded: Any) -> Iterator[tuple[Any, Any, Any, str]]:
        if isinstance(target, dict) and isinstance(loaded, dict):
            self._missing += [_joined(path, key) for key in target if key not in loaded]
            self._unexpected += [_joined(path, key) for key in loaded if key not in target]
            for key, there in target.items():
                if key in loaded:
                    yield key, there, loaded[key], _joined(path, key)
        elif isinstance(target, (list, tuple)) and isinstance(loaded, (list, tuple)):
            shorter = min(len(target), len(loaded))
            self._missing += [_joined(path, n) for n in range(shorter, len(target))]
            self._unexpected += [_joined(path, n) for n in range(shorter, len(loaded))]
            for n in range(shorter):
                yield n, target[n], loaded[n], _joined(path, n)
        else:
            self._mismatched.append(
                f"{path or 'the whole'} is a {type(loaded).__name__} there and a {type(target).__name__} here"
            )

    def _compare_tensors(self, name: str, target: torch.Tensor, loaded: torch.Tensor) -> None:
        if target.shape != loaded.shape:
            self._mismatched.append(
                f"{name} has shape {tuple(loaded.shape)} there, {tuple(target.shape)} here"
            )
        elif not self.allow_narrowing and _narrows(loaded.dtype, target.dtype):
            self._mismatched.append(
                f"{name} is {loaded.dtype} there, and {target.dtype} would lose precision"
            )
        elif id(target) not in self._in_place:
            self._copies.append((target, loaded))


def _both(kind: type | tuple[type, ...], there: Any, here: Any) -> bool:
    return isinstance(there, kind) and isinstance(here, kind)


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _narrows(source: torch.dtype, target: torch.dtype) -> bool:
    if source == target:
        return False
    try:
        return torch.promote_types(source, target) != target
    except RuntimeError:
        return True  # types that do not promote (float8, quantized) never widen into one another
