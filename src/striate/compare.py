"""Two checkpoints, tensor by tensor: which differ, and by how much. Holds some tensors of each at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from striate import torch_api
from striate.member import Readable
from striate.streaming import parts_of

__all__ = ["Comparison", "TensorDifference", "compare"]

_BATCH_BYTES = 32 << 20
# Converted for the arithmetic so many values at a time.
_SLICE_VALUES = 4 << 20


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not the same in both.

    ``max_abs``, ``mean_abs``: of the differences of its values, None where dtypes or shapes do not allow it;
    ``max_relative``: largest |a - b| / max(|a|, |b|). ``values_differing``: how many; NaN equals NaN, and 0.0 is -0.0.
    """

    name: str
    a: str
    b: str
    values_count: int
    values_differing: int | None = None
    max_abs: float | None = None
    mean_abs: float | None = None
    max_relative: float | None = None


@dataclass(frozen=True)
class Comparison:
    """``object_differs``: what stands around the tensors is not the same; None if only one of the two has such."""

    a: str
    b: str
    same: int
    differing: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    not_compared: tuple[str, ...]
    object_differs: bool | None

    @property
    def equal(self) -> bool:
        return not (self.differing or self.only_a or self.only_b or self.object_differs or self.not_compared)


def compare(
    a: Readable, b: Readable, *, verify: bool = True, progress: Callable[[int], None] | None = None
) -> Comparison:
    """Compares all tensors that can be read by name, and the pickles around them byte for byte.

    Storages that cannot be read alone (of views, of exotic types) are compared as bytes if the pickles are the same,
    and so the storages correspond; otherwise they stand in ``not_compared``. progress: bytes of ``a`` done.
    Raises what reading raises.
    """
    in_a, in_b = _named(a), _named(b)
    both = [name for name in in_a if name in in_b]
    differing = []
    same = done = 0
    for batch in _batches(both, in_a):
        left = torch_api.tensors_from(a, batch, "cpu", verify)
        right = torch_api.tensors_from(b, batch, "cpu", verify)
        for name in batch:
            found = _difference(name, left[name], right[name])
            if found is None:
                same += 1
            else:
                differing.append(found)
            done += in_a[name]
        del left, right  # before the next are allocated
        if progress is not None:
            progress(done)
    object_differs: bool | None = None
    if not a.manifest.foreign and not b.manifest.foreign:
        object_differs = torch_api.graph_of(a, verify) != torch_api.graph_of(b, verify)
    opaque = {name for source in (a, b) for name, _ in _opaque(source)}
    if opaque and object_differs is False:
        one, other = _sums(a, verify), _sums(b, verify)
        for name in sorted(opaque & one.keys() & other.keys()):
            opaque.discard(name)
            if one[name] == other[name]:
                same += 1
            else:
                here, there = (f"{count:,} bytes of storage" for _, count in (one[name], other[name]))
                differing.append(TensorDifference(name, here, there, one[name][1]))
    return Comparison(
        a.path,
        b.path,
        same,
        tuple(differing),
        tuple(name for name in in_a if name not in in_b),
        tuple(name for name in in_b if name not in in_a),
        tuple(sorted(opaque)),
        object_differs,
    )


def _named(source: Readable) -> dict[str, int]:
    """Bytes of each tensor that can be read by its name, ties included."""
    table = source.manifest.table
    found = {name: int(table.lengths[n]) for n, name in enumerate(table.names) if table.is_named(n)}
    found.update({other: found[kept] for other, kept in source.manifest.ties.items() if kept in found})
    return found


def _opaque(source: Readable) -> Iterator[tuple[str, int]]:
    """Name and row of each storage that is not just one tensor."""
    table = source.manifest.table
    return ((name, n) for n, name in enumerate(table.names) if not table.is_named(n))


def _sums(source: Readable, verify: bool) -> dict[str, tuple[str, int]]:
    """Of each such storage a digest of its bytes, and how many they are."""
    rows = {row: name for name, row in _opaque(source)}
    hashes = {row: xxhash.xxh3_128() for row in rows}
    for part in parts_of(source, list(rows), verify=verify):
        hashes[part.row].update(part.data.data)
    lengths = source.manifest.table.lengths
    return {name: (hashes[row].hexdigest(), int(lengths[row])) for row, name in rows.items()}


def _batches(names: Sequence[str], nbytes: dict[str, int]) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for name in names:
        if batch and held + nbytes[name] > _BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += nbytes[name]
    if batch:
        yield batch


def _form(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def _difference(name: str, a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    count = a.numel()
    if a.shape != b.shape:
        return TensorDifference(name, _form(a), _form(b), count)
    if a.dtype == b.dtype and _same_bytes(a, b):
        return None
    if not (_counts(a) and _counts(b)):
        return TensorDifference(name, _form(a), _form(b), count)
    differing = 0
    total = largest = relative = 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    for x, y in zip(a.reshape(-1).split(_SLICE_VALUES), b.reshape(-1).split(_SLICE_VALUES), strict=True):
        x, y = x.to(wide), y.to(wide)
        apart = (x - y).abs()
        # Where both are NaN, or both the same infinity, they are equal and their difference is NaN.
        apart = torch.where((x == y) | (x.isnan() & y.isnan()), torch.zeros_like(apart), apart)
        apart = torch.where(apart.isnan(), torch.full_like(apart, torch.inf), apart)
        differing += int((apart != 0).sum())
        total += float(apart.sum())
        largest = max(largest, float(apart.max()))
        size = torch.maximum(x.abs(), y.abs())
        relative = max(
            relative, float(torch.where(apart == 0, apart, apart / size).nan_to_num(torch.inf).max())
        )
    if a.dtype == b.dtype and not differing:
        return None  # only signs of zero, or payloads of NaN
    return TensorDifference(name, _form(a), _form(b), count, differing, largest, total / count, relative)


def _counts(tensor: torch.Tensor) -> bool:
    """Can it be calculated with? Not so packed types, such as float4_e2m1fn_x2."""
    try:
        tensor.reshape(-1)[:1].to(torch.complex128 if tensor.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel():
        return True
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
