"""Divides a list of costs into consecutive runs that are as even as possible.

The largest sum of a run is minimised first, since it sets the pace of a pipeline. Ties are broken by the sum of the
squared sums, and remaining ties by the squared lengths: layers that cost nothing are spread evenly.

The squares obey the quadrangle inequality: when the end of a list moves right, the best place for its last cut never
moves left. So each search halves the range of those that follow, O(parts * n * log n) in all.
"""
from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate


def solve(costs: Sequence[float], parts: int) -> list[int]:
    """Lengths of the ``parts`` most even non-empty runs, in order. Exact: sums aren't rounded."""
    sums = [0, *accumulate(_integers(costs))]
    limit = _least_limit(sums, parts)
    weight = len(costs) ** 2 + 1  # Exceeds any sum of squared lengths, which therefore only break ties.

    def price(start: int, end: int) -> int:
        return (sums[end] - sums[start]) ** 2 * weight + (end - start) ** 2

    # For each end, the first cost that its run may start from; the last end that this many runs can reach.
    first = [bisect_left(sums, end_sum - limit) for end_sum in sums]
    best = {0: 0}
    cuts: list[dict[int, int]] = []
    reach = 0
    for part in range(1, parts + 1):
        reach = min(bisect_right(sums, sums[reach] + limit) - 1, len(costs))
        chosen = _choose(best, range(part, reach + 1), first, price)
        best = {end: best[start] + price(start, end) for end, start in chosen.items()}
        cuts.append(chosen)
    return _lengths(cuts, len(costs))


def _integers(costs: Sequence[float]) -> list[int]:
    """The costs as multiples of a common unit."""
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _least_limit(sums: list[int], parts: int) -> int:
    """The smallest limit that no run's sum has to exceed."""
    low, high = -1, sums[-1]
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(sums, parts, middle):
            high = middle
        else:
            low = middle
    return high


def _fits(sums: list[int], parts: int, limit: int) -> bool:
    """True if that many runs, each as long as the limit allows, cover all costs."""
    end = 0
    for _ in range(parts):
        end = bisect_right(sums, sums[end] + limit) - 1
    return end == len(sums) - 1


def _choose(
    best: dict[int, int], ends: range, first: list[int], price: Callable[[int, int], int]
) -> dict[int, int]:
    """For each end, the best start of its run; ``best`` is the cost of all runs before that start."""
    chosen: dict[int, int] = {}
    todo = [(ends, min(best), max(best))]
    while todo:
        ends, low, high = todo.pop()
        if not ends:
            continue
        middle = len(ends) // 2
        end = ends[middle]
        starts = range(max(low, first[end]), min(high, end - 1) + 1)
        start = min(starts, key=lambda start: best[start] + price(start, end))
        chosen[end] = start
        todo += [(ends[:middle], low, start), (ends[middle + 1 :], start, high)]
    return chosen


def _lengths(cuts: list[dict[int, int]], end: int) -> list[int]:
    lengths = []
    for chosen in reversed(cuts):
        lengths.append(end - chosen[end])
        end = chosen[end]
    return lengths[::-1]
