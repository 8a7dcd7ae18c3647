"""Placement: where blocks go, and what holds of it whatever the shape."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from striate.groups import Shape
from striate.placement import Blocks, place

CHUNK = 8192
SHAPES = [(1, 0), (1, 1), (1, 2), (2, 1), (3, 1), (4, 2), (6, 2), (6, 3)]


def lengths_of(chunks: int, last: int = CHUNK) -> NDArray[np.int64]:
    lengths = np.full(chunks, CHUNK, np.int64)
    if chunks:
        lengths[-1] = last
    return lengths


def group_of_each(blocks: Blocks) -> NDArray[np.int64]:
    shape, chunks = blocks.shape, blocks.chunks_count
    return np.concatenate(
        [np.arange(chunks) // shape.data, np.repeat(np.arange(len(blocks.groups)), shape.checks)]
    )


def counts(members: NDArray[np.uint32], count: int) -> list[int]:
    return np.bincount(members, minlength=count).tolist()


def check_invariants(blocks: Blocks, lengths: NDArray[np.int64], members: int) -> None:
    shape, chunks = blocks.shape, len(lengths)
    groups = -(-chunks // shape.data)
    assert blocks.chunks_count == chunks
    assert len(blocks.offset) == len(blocks.length) == len(blocks.member) == chunks + groups * shape.checks
    assert [a.dtype.str for a in (blocks.offset, blocks.length, blocks.member, blocks.groups)] == [
        "<u8", "<u8", "<u4", "<u4",
    ]  # fmt: skip
    assert blocks.groups.tolist() == [min(shape.data, chunks - g * shape.data) for g in range(groups)]
    assert blocks.length[:chunks].tolist() == lengths.tolist()
    for g in range(groups):
        own = slice(chunks + g * shape.checks, chunks + (g + 1) * shape.checks)
        longest = lengths[g * shape.data : (g + 1) * shape.data].max()
        assert (blocks.length[own] == longest).all()
    assert not len(blocks.member) or blocks.member.max() < members
    pairs = list(zip(group_of_each(blocks).tolist(), blocks.member.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "two blocks of a group in one member"
    # A member's blocks follow each other from the superblock on, without a hole.
    assert len(blocks.member_bytes) == members
    for member in range(members):
        mine = blocks.member == member
        order = np.argsort(blocks.offset[mine])
        offset, length = blocks.offset[mine][order].tolist(), blocks.length[mine][order].tolist()
        assert (np.diff(group_of_each(blocks)[mine][order]) > 0).all(), "in the order of the groups"
        at = 4096
        for begin, size in zip(offset, length, strict=True):
            assert begin == at
            at += -(-size // 4096) * 4096
        assert blocks.member_bytes[member] == at


@given(
    data=st.integers(1, 6),
    checks=st.integers(0, 3),
    spare=st.integers(0, 4),
    chunks=st.integers(0, 60),
    last=st.integers(1, CHUNK),
    weights=st.lists(st.floats(0.01, 100), min_size=16, max_size=16) | st.none(),
)
def test_no_placement_puts_two_blocks_in_one_place_or_two_of_a_group_in_one_member(
    data: int, checks: int, spare: int, chunks: int, last: int, weights: list[float] | None
) -> None:
    shape = Shape(data, checks)
    members = shape.width + spare
    lengths = lengths_of(chunks, last)
    chosen = weights[:members] if weights is not None and spare else None
    check_invariants(place(lengths, shape, members, weights=chosen), lengths, members)


@pytest.mark.parametrize(("data", "checks"), SHAPES)
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_data_and_check_blocks_are_spread_over_all_members_evenly(data: int, checks: int, spare: int) -> None:
    shape = Shape(data, checks)
    members = shape.width + spare
    for groups in (members * 5, members * 5 + 2):
        blocks = place(lengths_of(groups * data), shape, members)
        chunks = blocks.chunks_count
        # Whole rounds leave no difference at all, and each group beyond them one block a member at most.
        beyond = groups % members
        for kind, per_group in (
            (blocks.member[:chunks], data),
            (blocks.member[chunks:], checks),
            (blocks.member, shape.width),
        ):
            found = counts(kind, members)
            assert max(found) - min(found) <= min(beyond, per_group), (groups, found)


def test_a_stripe_goes_round_robin() -> None:
    assert place(lengths_of(7), Shape(1, 0), 3).member.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_the_check_block_of_two_and_one_moves_by_one_drive_a_group() -> None:
    blocks = place(lengths_of(6), Shape(2, 1), 3)
    assert blocks.member.tolist() == [0, 1, 1, 2, 2, 0, 2, 0, 1]


def test_a_mirror_over_more_drives_than_copies_puts_each_pair_on_two_of_them() -> None:
    blocks = place(lengths_of(5), Shape(1, 1), 5)
    assert blocks.member.tolist() == [0, 1, 2, 3, 4, 1, 2, 3, 4, 0]
    assert (blocks.member_bytes == 4096 + 2 * CHUNK).all()


def test_nothing_to_place_is_a_placement() -> None:
    blocks = place(lengths_of(0), Shape(3, 2), 6)
    assert len(blocks.offset) == len(blocks.groups) == 0
    assert blocks.member_bytes.tolist() == [4096] * 6


def shares(weights: Sequence[float], shape: Shape, chunks: int) -> list[float]:
    blocks = place(lengths_of(chunks), shape, len(weights), weights=weights)
    found = counts(blocks.member, len(weights))
    return [count / sum(found) for count in found]


@pytest.mark.parametrize(
    ("weights", "shape"),
    [
        ([1, 2, 1], Shape(1, 0)),
        ([3, 1], Shape(1, 0)),
        ([0.7, 0.2, 0.1], Shape(1, 0)),
        ([1, 1, 2, 2], Shape(1, 1)),
        ([2, 3, 3, 4, 4], Shape(2, 1)),
    ],
    ids=str,
)
def test_each_member_takes_the_share_that_its_weight_says(weights: list[float], shape: Shape) -> None:
    found = shares(weights, shape, 1200)
    assert found == pytest.approx([weight / sum(weights) for weight in weights], abs=0.005)


def test_weights_hold_from_the_first_chunks_on() -> None:
    members = place(lengths_of(400), Shape(1, 0), 3, weights=[1, 4, 5]).member
    for first in range(0, 400, 10):
        found = counts(members[: first + 10], 3)
        for count, weight in zip(found, (0.1, 0.4, 0.5), strict=True):
            assert abs(count - weight * (first + 10)) <= 1, "a small checkpoint is balanced as well"


def test_a_member_is_in_each_group_at_most_once_however_heavy_it_is() -> None:
    found = shares([100, 1, 1, 1], Shape(1, 1), 600)
    assert found == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6], abs=0.005)
    # Once the heavy one is in all groups, what is left of them is shared by weight.
    assert shares([50, 2, 1, 1], Shape(1, 1), 600) == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 8], abs=0.005)


@pytest.mark.parametrize(
    ("weights", "shape"),
    [([2, 1, 1, 1], Shape(2, 1)), ([1, 2, 2, 2, 3], Shape(3, 1)), ([1, 1, 1, 3], Shape(1, 1))],
    ids=str,
)
def test_check_blocks_go_to_each_member_in_proportion_with_weights_too(
    weights: list[float], shape: Shape
) -> None:
    blocks = place(lengths_of(2400), shape, len(weights), weights=weights)
    every = np.bincount(blocks.member, minlength=len(weights))
    checks = np.bincount(blocks.member[blocks.chunks_count :], minlength=len(weights))
    # A degraded or partial load would otherwise meet one drive with nothing but check blocks.
    assert (checks / every).tolist() == pytest.approx([shape.checks / shape.width] * len(weights), abs=0.05)


def test_equal_weights_are_none() -> None:
    lengths = lengths_of(10)
    ours, plain = place(lengths, Shape(2, 1), 3, weights=[7, 7, 7]), place(lengths, Shape(2, 1), 3)
    assert ours.member.tolist() == plain.member.tolist()


@pytest.mark.parametrize(
    ("members", "weights", "why"),
    [
        (2, None, "3 blocks needs 3 drives, and there are 2"),
        (3, [1, 1, 2], "weights can only be equal"),
        (4, [1, 1, 2], "4 positive numbers"),
        (4, [1, 1, 1, 0], "4 positive numbers"),
        (4, [1, 1, 1, -1], "4 positive numbers"),
        (4, [1, 1, 1, float("nan")], "4 positive numbers"),
        (4, [1, 1, 1, float("inf")], "4 positive numbers"),
    ],
)
def test_what_cannot_be_placed_is_refused(members: int, weights: list[float] | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        place(lengths_of(4), Shape(2, 1), members, weights=weights)


@pytest.mark.parametrize("weights", [[1e-300, 1, 1e300], [5e-324, 5e-324, 1.0]])
def test_weights_of_any_size_are_weights(weights: list[float]) -> None:
    lengths = lengths_of(50)
    check_invariants(place(lengths, Shape(1, 1), 3, weights=weights), lengths, 3)


def test_a_million_chunks_take_well_under_a_second() -> None:
    began = time.process_time()
    blocks = place(np.full(1_000_000, 4 << 20, np.int64), Shape(6, 2), 8)
    assert time.process_time() - began < 1
    assert len(np.unique(blocks.member_bytes)) <= 2
