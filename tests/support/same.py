"""Are two objects the same, as far as a checkpoint can tell? Values, types, order of keys, and how tensors lie.

``torch.equal`` would not do: it takes a stride for another one, two NaN for two values, and a copy for a view.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["differences", "raw_bytes", "same"]

_OPAQUE_LAYOUTS = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_coo: ("_indices", "_values"),
}


def same(found: Any, wanted: Any) -> bool:
    """True, or an AssertionError that says where the two part."""
    apart = list(differences(found, wanted))
    assert not apart, "; ".join(apart[:8])
    return True


def raw_bytes(storage: torch.UntypedStorage) -> bytes:
    """The bytes of a CPU storage."""
    return _as_tensor(storage).numpy().tobytes() if len(storage) else b""


def differences(found: Any, wanted: Any) -> Iterator[str]:
    """Every place where the two part, in words."""
    return _compare("", found, wanted, _Sharing())


@dataclass
class _Sharing:
    """Which storage here stands for which there. Two that are one on one side only are a difference."""

    there: dict[int, int] = field(default_factory=dict)
    here: dict[int, int] = field(default_factory=dict)
    # An address names a storage only while the storage lives.
    alive: list[Any] = field(default_factory=list)

    # A thousand views of one storage need its bytes compared once.
    equal: set[tuple[int, int]] = field(default_factory=set)

    def differs(self, found: torch.UntypedStorage, wanted: torch.UntypedStorage) -> bool:
        self.alive += [found, wanted]
        one: int = found._cdata
        other: int = wanted._cdata
        return self.there.setdefault(one, other) != other or self.here.setdefault(other, one) != one

    def same_bytes(self, found: torch.UntypedStorage, wanted: torch.UntypedStorage) -> bool:
        pair = (found._cdata, wanted._cdata)
        if pair in self.equal:
            return True
        if len(found) == len(wanted) and (
            not len(wanted) or torch.equal(_as_tensor(found), _as_tensor(wanted))
        ):
            self.equal.add(pair)
        return pair in self.equal


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _compare(at: str, found: Any, wanted: Any, sharing: _Sharing) -> Iterator[str]:
    where = at or "the whole"
    if type(found) is not type(wanted):
        yield f"{where} is a {type(found).__name__}, not a {type(wanted).__name__}"
    elif isinstance(wanted, torch.Tensor):
        yield from _compare_tensors(where, found, wanted, sharing)
    elif isinstance(wanted, torch.storage.TypedStorage):
        if found.dtype != wanted.dtype:
            yield f"{where} has dtype {found.dtype}, not {wanted.dtype}"
        yield from _compare(at, found._untyped_storage, wanted._untyped_storage, sharing)
    elif isinstance(wanted, torch.UntypedStorage):
        if raw_bytes(found) != raw_bytes(wanted):
            yield f"{where} has other bytes"
        if sharing.differs(found, wanted):
            yield f"{where} is shared differently"
    elif isinstance(wanted, dict):
        keys, others = list(found), list(wanted)
        if keys != others or [*map(type, keys)] != [*map(type, others)]:
            yield f"{where} has the keys {keys[:6]!r}, not {others[:6]!r}"
        else:
            for key, value in wanted.items():
                yield from _compare(f"{at}[{_short(key)}]", found[key], value, sharing)
        if getattr(found, "_metadata", None) != getattr(wanted, "_metadata", None):
            yield f"{where} has another _metadata"
    elif isinstance(wanted, (list, tuple)):
        if len(found) != len(wanted):
            yield f"{where} has {len(found)} members, not {len(wanted)}"
        for n, (one, other) in enumerate(zip(found, wanted, strict=False)):
            yield from _compare(f"{at}[{n}]", one, other, sharing)
    elif found != wanted and not (found != found and wanted != wanted):
        yield f"{where} is {_short(found)}, not {_short(wanted)}"


def _compare_tensors(
    where: str, found: torch.Tensor, wanted: torch.Tensor, sharing: _Sharing
) -> Iterator[str]:
    for what in ("dtype", "shape", "layout", "device", "requires_grad", "is_quantized"):
        one, other = getattr(found, what), getattr(wanted, what)
        if one != other:
            yield f"{where} has {what} {one}, not {other}"
            return
    if wanted.layout in _OPAQUE_LAYOUTS:
        for part in _OPAQUE_LAYOUTS[wanted.layout]:
            one, other = getattr(found.detach(), part)(), getattr(wanted.detach(), part)()
            yield from _compare_tensors(f"{where}.{part}", one, other, _Sharing())
        return
    for what in ("stride", "storage_offset", "is_conj", "is_neg"):
        one, other = getattr(found, what)(), getattr(wanted, what)()
        if one != other:
            yield f"{where} has {what} {one}, not {other}"
    if wanted.device.type == "meta":
        return
    if wanted.is_quantized and found.qscheme() != wanted.qscheme():
        yield f"{where} is quantized differently"
    one, other = found.untyped_storage(), wanted.untyped_storage()
    if len(one) != len(other):
        yield f"{where} has a storage of {len(one)} bytes, not {len(other)}"
    elif len(wanted.untyped_storage()) and sharing.differs(
        one, other
    ):  # torch tears empty ones apart, now and then
        yield f"{where} shares its storage differently"
    elif not sharing.same_bytes(one, other):
        yield f"{where} has other bytes"
    for key, value in getattr(wanted, "__dict__", {}).items():
        yield from _compare(f"{where}.{key}", found.__dict__.get(key), value, sharing)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
