"""Medians with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.harness.measure import Row


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, then the 25th and the 75th percentile.

    Example:
        >>> quartiles([1.0, 2.0, 3.0, 4.0, 9.0])
        (3.0, 2.0, 4.0)
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
    return middle, low, high


def spread(name: str, values: Sequence[float]) -> Row:
    """Three cells: the median under that name, and the percentiles."""
    return dict(zip((name, f"{name}: 25%", f"{name}: 75%"), quartiles(values)))
