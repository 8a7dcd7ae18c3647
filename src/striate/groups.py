"""Groups: k data blocks and m check blocks, any k of which restore the rest.

Arithmetic in GF(2^8) with the polynomial 0x11d, as docs/format.md has it. The
matrices go to the engine as bytes; what is multiplied here is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["WIDTH_MAX", "Shape", "matrix", "multiply", "recovery"]

WIDTH_MAX = 255  # k + m; a Cauchy matrix over 256 elements
_POLYNOMIAL = 0x11D


@dataclass(frozen=True)
class Shape:
    """k data and m check blocks, in k + m different members. Stripe is (1, 0), a mirror of c copies (1, c - 1)."""

    data: int
    checks: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.checks < 0 or self.width > WIDTH_MAX:
            raise ValueError(
                f"a group has 1 or more data blocks, 0 or more check blocks, {WIDTH_MAX} in all at most: not "
                f"{self.data} and {self.checks}"
            )

    @property
    def width(self) -> int:
        """Members that a whole group lies in."""
        return self.data + self.checks

    @property
    def is_copies(self) -> bool:
        """Is every check block a copy of its data block?"""
        return self.data == 1 and self.checks > 0


def _tables() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    exp = np.zeros(510, np.uint8)
    log = np.zeros(256, np.int64)
    value = 1
    for power in range(255):
        exp[power] = exp[power + 255] = value
        log[value] = power
        value <<= 1
        if value & 0x100:
            value ^= _POLYNOMIAL
    return exp, log


_EXP, _LOG = _tables()


def _times(a: int, b: int) -> int:
    return int(_EXP[_LOG[a] + _LOG[b]]) if a and b else 0


def _inverse(a: int) -> int:
    assert a, "zero has no inverse"
    return int(_EXP[255 - _LOG[a]])


@lru_cache(maxsize=64)
def matrix(shape: Shape) -> NDArray[np.uint8]:
    """Check block j is the sum over i of ``matrix[j, i]`` times data block i. Shape (m, k), read-only."""
    k, m = shape.data, shape.checks
    cauchy = [[_inverse(j ^ (m + i)) for i in range(k)] for j in range(m)]
    found = np.zeros((m, k), np.uint8)
    for j in range(m):
        for i in range(k):
            scale = _times(cauchy[0][i], cauchy[j][0])
            found[j, i] = _times(_times(cauchy[j][i], cauchy[0][0]), _inverse(scale))
    found.flags.writeable = False
    return found


@lru_cache(maxsize=1024)
def _recovery(
    shape: Shape, present: tuple[int, ...], wanted: tuple[int, ...], data_count: int
) -> NDArray[np.uint8]:
    # Rows of the generator: identity over the code's matrix, cut to the data blocks that a short group has.
    generator = np.vstack([np.eye(data_count, dtype=np.uint8), matrix(shape)[:, :data_count]])

    def row(number: int) -> NDArray[np.uint8]:
        at = number if number < shape.data else data_count + number - shape.data
        picked: NDArray[np.uint8] = generator[at]
        return picked

    inverse = _invert(np.array([row(number) for number in present], np.uint8))
    found = _product(np.array([row(number) for number in wanted], np.uint8), inverse)
    found.flags.writeable = False
    return found


def recovery(
    shape: Shape, present: Sequence[int], wanted: Sequence[int], data_count: int
) -> NDArray[np.uint8]:
    """Coefficients (len(wanted), data_count) that give the ``wanted`` blocks of a group from the ``present`` ones.

    Blocks are numbered within the group: 0 to k - 1 data (a short group has the first ``data_count``), k to k + m - 1
    check. Exactly ``data_count`` different ones are present; any of them will do.
    """
    assert len(present) == len(set(present)) == data_count, "as many blocks as the group has data blocks"
    assert all(n < data_count or shape.data <= n < shape.width for n in (*present, *wanted))
    return _recovery(shape, tuple(present), tuple(wanted), data_count)


def _product(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.uint8]:
    found = np.zeros((len(a), b.shape[1]), np.uint8)
    for i, coefficients in enumerate(a):
        found[i] = np.bitwise_xor.reduce([_scaled(int(c), b[j]) for j, c in enumerate(coefficients)])
    return found


def _scaled(coefficient: int, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if coefficient == 0:
        return np.zeros_like(block)
    scaled: NDArray[np.uint8] = np.where(block == 0, 0, _EXP[_LOG[coefficient] + _LOG[block]]).astype(
        np.uint8
    )
    return scaled


def _invert(square: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Gauss-Jordan. Every matrix that comes here can be inverted: it is a square part of a Cauchy code."""
    size = len(square)
    work = np.hstack([square, np.eye(size, dtype=np.uint8)])
    for column in range(size):
        pivot = column + int(np.flatnonzero(work[column:, column])[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = _scaled(_inverse(int(work[column, column])), work[column])
        for other in range(size):
            if other != column and work[other, column]:
                work[other] ^= _scaled(int(work[other, column]), work[column])
    inverse: NDArray[np.uint8] = work[:, size:].copy()
    return inverse


def multiply(coefficients: NDArray[np.uint8], blocks: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """The sums that the rows of ``coefficients`` name, as long as the longest block; shorter ones count as padded."""
    longest = max((len(block) for block in blocks), default=0)
    padded = [np.pad(block, (0, longest - len(block))) for block in blocks]
    return [
        np.bitwise_xor.reduce([_scaled(int(c), block) for c, block in zip(row, padded, strict=True)])
        for row in coefficients
    ]
