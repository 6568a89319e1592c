"""Divides a list of costs into consecutive runs that are as even as possible.

The largest sum of a run is minimised first, since it sets the pace of a pipeline. Ties are broken by the sum of the
squared sums, and remaining ties by the squared lengths: layers that cost nothing are spread evenly.
"""
from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

#: The sum of squares of the best runs up to some cost, and their lengths.
Best = tuple[int, list[int]]


def solve(costs: Sequence[float | Fraction], parts: int) -> list[int]:
    """Lengths of the ``parts`` most even non-empty runs, in order. Exact: sums aren't rounded."""
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    sums = [0, *accumulate(int(cost * unit) for cost in exact)]
    limit = _least_limit(sums, parts)
    weight = len(costs) ** 2 + 1  # Exceeds any sum of squared lengths, which therefore only break ties.

    def extended(start: int, end: int) -> Best:
        price, lengths = best[start]
        return price + (sums[end] - sums[start]) ** 2 * weight + (end - start) ** 2, [*lengths, end - start]

    best: dict[int, Best] = {0: (0, [])}
    for _ in range(parts):
        following = {}
        for end in range(min(best) + 1, len(sums)):
            first = bisect_left(sums, sums[end] - limit)
            if starts := [start for start in range(first, end) if start in best]:
                following[end] = min(extended(start, end) for start in starts)
        best = following
    return best[len(costs)][1]


def _least_limit(sums: list[int], parts: int) -> int:
    """The smallest limit that no run's sum has to exceed."""
    low, high = -1, sums[-1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(sums, parts, middle) else (middle, high)
    return high


def _fits(sums: list[int], parts: int, limit: int) -> bool:
    """True if that many runs, each as long as the limit allows, cover all costs."""
    end = 0
    for _ in range(parts):
        end = bisect_right(sums, sums[end] + limit) - 1
    return end == len(sums) - 1
