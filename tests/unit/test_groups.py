"""Groups: any k' blocks give back the rest, by the document's matrix."""

from __future__ import annotations

import itertools
import random
from functools import cache, reduce

import numpy as np
import pytest
from numpy.typing import NDArray

from striate.groups import WIDTH_MAX, Shape, matrix, multiply, recovery

SHAPES = [Shape(k, m) for k in range(1, 7) for m in range(4)]


@cache
def times(a: int, b: int) -> int:
    """In GF(2^8) with 0x11d, bit by bit: nothing in common with the code's tables."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


@cache
def inverse(a: int) -> int:
    return next(b for b in range(256) if times(a, b) == 1)


def documented(shape: Shape) -> list[list[int]]:
    """A of docs/format.md, "Groups and check blocks"."""
    m = shape.checks

    def b(j: int, i: int) -> int:
        return inverse(j ^ (m + i))

    return [
        [times(times(b(j, i), b(0, 0)), inverse(times(b(0, i), b(j, 0)))) for i in range(shape.data)]
        for j in range(m)
    ]


def blocks_of(shape: Shape, data_count: int, lengths: list[int], seed: int) -> dict[int, NDArray[np.uint8]]:
    """A whole group by its numbers; the check blocks are multiplied by the matrix of this file."""
    noise = np.random.default_rng(seed)
    data = [noise.integers(0, 256, length, np.uint8) for length in lengths[:data_count]]
    longest = max(map(len, data))
    found = dict(enumerate(data))
    for j, row in enumerate(documented(shape)):
        check = np.zeros(longest, np.uint8)
        for factor, block in zip(row, data, strict=False):
            for at, byte in enumerate(block.tolist()):
                check[at] ^= times(factor, byte)
        found[shape.data + j] = check
    return found


@pytest.mark.parametrize(("data", "checks"), [(0, 1), (-1, 0), (1, -1), (255, 1), (1, 255), (200, 56)])
def test_a_shape_that_cannot_be_is_refused(data: int, checks: int) -> None:
    with pytest.raises(ValueError, match=f"not {data} and {checks}"):
        Shape(data, checks)


def test_a_shape_knows_its_width_and_whether_it_copies() -> None:
    assert [Shape(k, m).width for k, m in ((1, 0), (1, 2), (4, 2), (254, 1))] == [1, 3, 6, WIDTH_MAX]
    assert [Shape(k, m).is_copies for k, m in ((1, 0), (1, 1), (1, 4), (2, 1))] == [False, True, True, False]


@pytest.mark.parametrize("shape", [*SHAPES, Shape(20, 5)], ids=str)
def test_the_matrix_is_that_of_the_document(shape: Shape) -> None:
    found = matrix(shape)
    assert found.dtype == np.uint8 and found.shape == (shape.checks, shape.data)
    assert found.tolist() == documented(shape)
    assert (found[:1] == 1).all(), "one check block is the XOR"
    assert (found[:, :1] == 1).all(), "with k = 1 check blocks are copies"


@pytest.mark.parametrize("shape", [Shape(254, 1), Shape(128, 127), Shape(2, 253), Shape(1, 254)], ids=str)
def test_the_widest_matrices_have_no_zero(shape: Shape) -> None:
    assert matrix(shape).all(), "a zero would leave a data block out of a check block"


def test_nobody_can_write_into_a_matrix_that_is_kept() -> None:
    for kept in (matrix(Shape(3, 2)), recovery(Shape(3, 2), [0, 1, 3], [2], 3)):
        with pytest.raises(ValueError, match="read-only"):
            kept[0, 0] = 7


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_group_is_restored_from_any_set_of_its_blocks_that_is_enough(shape: Shape) -> None:
    lengths = [19, 23, 1, 40, 7, 40]
    for data_count in range(1, shape.data + 1):
        whole = blocks_of(shape, data_count, lengths, seed=data_count)
        for present in itertools.combinations(whole, data_count):
            wanted = [number for number in whole if number not in present]
            coefficients = recovery(shape, present, wanted, data_count)
            assert coefficients.shape == (len(wanted), data_count)
            found = multiply(coefficients, [whole[number] for number in present])
            for number, block in zip(wanted, found, strict=True):
                length = len(whole[number])
                assert (block[:length] == whole[number]).all(), (data_count, present, number)
                assert not block[length:].any(), "what is past a shorter block is its padding"


def test_the_order_of_the_present_and_of_the_wanted_is_the_callers() -> None:
    shape = Shape(3, 2)
    whole = blocks_of(shape, 3, [5, 5, 5], seed=9)
    for present in itertools.permutations([4, 1, 3]):
        for wanted in itertools.permutations([0, 2]):
            found = multiply(recovery(shape, present, wanted, 3), [whole[n] for n in present])
            for number, block in zip(wanted, found, strict=True):
                assert (block == whole[number]).all()


def test_a_block_that_is_present_may_be_wanted_too() -> None:
    assert recovery(Shape(2, 1), [1, 2], [1, 2], 2).tolist() == [[1, 0], [0, 1]]


def test_wide_groups_are_restored_from_random_sets() -> None:
    chooser = random.Random(5)
    for shape in (Shape(200, 55), Shape(31, 33)):
        generator = [[int(i == n) for i in range(shape.data)] for n in range(shape.data)] + documented(shape)
        present = chooser.sample(range(shape.width), shape.data)
        wanted = [n for n in range(shape.width) if n not in present][:3]
        # The coefficients times the rows of the present blocks are the rows of the wanted ones.
        found = recovery(shape, present, wanted, shape.data)
        column = [chooser.randrange(256) for _ in range(shape.data)]

        def block(number: int, rows: list[list[int]] = generator, values: list[int] = column) -> int:
            return reduce(lambda a, b: a ^ b, map(times, rows[number], values))

        for row, number in zip(found.tolist(), wanted, strict=True):
            assert reduce(lambda a, b: a ^ b, map(times, row, map(block, present))) == block(number)


def test_too_few_blocks_are_a_mistake_of_the_caller() -> None:
    for present in ([0], [0, 0], [0, 1, 2]):
        with pytest.raises(AssertionError):
            recovery(Shape(2, 1), present, [1], 2)
    with pytest.raises(AssertionError):
        recovery(Shape(3, 1), [0, 2], [1], 2)  # a short group has no block 2


def test_multiplying_agrees_with_arithmetic_bit_by_bit() -> None:
    every = np.arange(256, dtype=np.uint8)
    for factor in (0, 1, 2, 3, 0x1D, 0x80, 0xFF):
        found = multiply(np.array([[factor]], np.uint8), [every])[0]
        assert found.tolist() == [times(factor, byte) for byte in range(256)]
