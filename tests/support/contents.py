"""Bytes that show when they were moved: they cycle with period 251.

251 is prime and near 256, so two places that are a block, a chunk or a page apart never hold the same bytes: swapped,
shifted and stale blocks all differ from what should be there.
"""

from __future__ import annotations

import numpy as np

PERIOD = 251


def cycling(length: int, *, start: int = 0) -> bytes:
    """``length`` bytes of the cycle, from its position ``start`` on."""
    first = start % PERIOD
    repeats = -(-(first + length) // PERIOD)
    cycle = np.arange(PERIOD, dtype=np.uint8)
    return np.tile(cycle, repeats)[first : first + length].tobytes()


def first_difference(found: bytes, wanted: bytes) -> int | None:
    """Where two byte strings part, or None if they are equal; a shorter one parts at its end."""
    if found == wanted:
        return None
    common = min(len(found), len(wanted))
    unequal = np.nonzero(np.frombuffer(found, np.uint8, common) != np.frombuffer(wanted, np.uint8, common))[0]
    return int(unequal[0]) if len(unequal) else common
