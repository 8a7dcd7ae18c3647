"""Medians, and ratios of paired measurements with a bootstrap interval."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES_COUNT = 10_000
# Fixed: the same samples give the same interval on every machine.
SEED = 20_240_229


@dataclass(frozen=True)
class Ratio:
    """Median of the per-round ratios and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Ratio round by round: what slows a whole round slows both and cancels. Percentile bootstrap of the median.

    Raises ValueError when the two are not of one length or there is nothing to pair.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"cannot pair {len(numerators)} with {len(denominators)} measurements")
    ratios = np.asarray(numerators, dtype=float) / np.asarray(denominators, dtype=float)
    draws = np.random.default_rng(SEED).integers(0, len(ratios), size=(RESAMPLES_COUNT, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))
