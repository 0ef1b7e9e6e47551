"""Samples and what is said of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and the tenth and ninetieth percentile of some repeats, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    num_samples: int


def spread(samples_us: Sequence[float]) -> Spread:
    """Median and percentiles of at least one sample, by linear interpolation between neighbours."""
    return Spread(
        statistics.median(samples_us), _percentile(samples_us, 10), _percentile(samples_us, 90), len(samples_us)
    )


def _percentile(samples: Sequence[float], percent: float) -> float:
    ordered = sorted(samples)
    position = percent / 100 * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
