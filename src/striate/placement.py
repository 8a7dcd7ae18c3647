"""Placement: which member each block goes to, and where in it. A writer's policy; readers trust the manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from striate.groups import Shape
from striate.manifest import ALIGN

__all__ = ["Blocks", "place"]


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks of a generation: the C data blocks in the order of the chunks, then m check blocks for each group.

    ``offset`` and ``length`` in bytes, ``member`` its number. ``groups``: how many data blocks each group has.
    ``member_bytes``: where each member's last block ends, padding included (4096 for a member without any).
    """

    shape: Shape
    offset: NDArray[np.uint64]
    length: NDArray[np.uint64]
    member: NDArray[np.uint32]
    groups: NDArray[np.uint32]
    member_bytes: NDArray[np.uint64]

    @property
    def chunks_count(self) -> int:
        return len(self.offset) - len(self.groups) * self.shape.checks


def place(
    chunk_lengths: NDArray[np.int64], shape: Shape, members: int, *, weights: Sequence[float] | None = None
) -> Blocks:
    """Spreads chunks over members.

    Without weights groups rotate over the members, one step a group, so that data and check blocks are spread evenly.
    ``weights``: a member takes part in groups in proportion to its own, and never twice in a group. Raises ValueError
    for fewer members than a group has blocks, and for weights that differ where every member is in every group.
    """
    width = shape.width
    if members < width:
        raise ValueError(f"a group of {width} blocks needs {width} drives, and there are {members}")
    count = len(chunk_lengths)
    groups_count = -(-count // shape.data)
    if weights is None or len(set(weights)) == 1:
        first = np.arange(groups_count) % members
        chosen = (first[:, None] + np.arange(width)) % members
    else:
        chosen = _weighted(groups_count, shape, members, weights)
    lengths = np.zeros((groups_count, width), np.int64)
    data = lengths[:, : shape.data].reshape(-1)
    data[:count] = chunk_lengths
    lengths[:, : shape.data] = data.reshape(groups_count, shape.data)
    lengths[:, shape.data :] = lengths[:, : shape.data].max(axis=1, initial=0)[:, None]
    used = np.ones((groups_count, width), np.bool_)
    used[:, : shape.data] = (np.arange(groups_count * shape.data) < count).reshape(groups_count, shape.data)

    offsets, member_bytes = _offsets(chosen, lengths, used, members)
    full = np.full(groups_count, shape.data, np.uint32)
    if groups_count:
        full[-1] = count - (groups_count - 1) * shape.data

    def in_order(table: NDArray[np.int64]) -> NDArray[np.int64]:
        """Data blocks by chunk, then check blocks by group."""
        return np.concatenate(
            [table[:, : shape.data].reshape(-1)[:count], table[:, shape.data :].reshape(-1)]
        )

    return Blocks(
        shape=shape,
        offset=in_order(offsets).astype(np.uint64),
        length=in_order(lengths).astype(np.uint64),
        member=in_order(chosen).astype(np.uint32),
        groups=full,
        member_bytes=member_bytes.astype(np.uint64),
    )


def _offsets(
    chosen: NDArray[np.int64], lengths: NDArray[np.int64], used: NDArray[np.bool_], members: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each member's blocks end to end in the order of the groups, each padded."""
    offsets = np.zeros(chosen.shape, np.int64)
    ends = np.full(members, ALIGN, np.int64)  # the superblock
    padded = np.where(used, -(-lengths // ALIGN) * ALIGN, 0)
    for member in range(members):
        mine = (chosen == member) & used
        sizes = padded[mine]
        stops = ALIGN + np.cumsum(sizes)
        offsets[mine] = stops - sizes
        if len(stops):
            ends[member] = stops[-1]
    return offsets, ends


def _weighted(groups_count: int, shape: Shape, members: int, weights: Sequence[float]) -> NDArray[np.int64]:
    if len(weights) != members or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights are {members} positive numbers, one for each drive, not {list(weights)!r}")
    if shape.width == members:
        raise ValueError(
            f"groups of {shape.width} blocks over {members} drives put a block of each group on each drive: weights "
            "can only be equal. Use fewer copies or check blocks than there are drives, or drives alike."
        )
    # Relative to the heaviest, and never quite nothing, so that no sum below is infinite or zero.
    relative = np.maximum(np.array(weights, float) / max(weights), 1e-9)
    share = relative / relative.sum() * shape.width
    # A share above one group in one cannot be had: what a large drive cannot take, the others do.
    while (share > 1).any():
        over, under = share >= 1, share < 1
        spare = float((share[over] - 1).sum())
        share[over] = 1
        share[under] += spare * share[under] / share[under].sum()
    owed = np.zeros(members)
    checks_owed = np.zeros(members)
    chosen = np.zeros((groups_count, shape.width), np.int64)
    for group in range(groups_count):
        owed += share
        # Those to whom most is owed; and of them, check blocks for those who had the fewest among their own.
        best = np.sort(np.argsort(-owed, kind="stable")[: shape.width])
        owed[best] -= 1
        checks_owed[best] += shape.checks / shape.width
        best = best[np.argsort(checks_owed[best], kind="stable")]
        checks_owed[best[shape.data :]] -= 1
        chosen[group] = best
    return chosen
