"""The solver's cuts are the most even of all."""
from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest

from splitpipe.balance.solver import solve
from tests.helpers.covering import few


def evenness(costs: list[float], lengths: list[int]) -> tuple[float, float, int]:
    ends = [sum(lengths[: part + 1]) for part in range(len(lengths))]
    sums = [sum(costs[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    return max(sums), sum(value**2 for value in sums), sum(length**2 for length in lengths)


def all_cuts(layers: int, parts: int) -> list[list[int]]:
    ends = [(0, *inner, layers) for inner in combinations(range(1, layers), parts - 1)]
    return [[stop - start for start, stop in pairwise(cut)] for cut in ends]


@pytest.mark.parametrize("layers", few(4, [1, 2, 3, 4, 5]))
def test_every_small_list_is_cut_as_evenly_as_the_best_of_all_cuts(layers: int) -> None:
    for costs in product([0, 1, 2, 5], repeat=layers):
        for parts in range(1, layers + 1):
            found = solve(costs, parts)
            assert len(found) == parts and min(found) > 0 and sum(found) == layers
            best = min(evenness(list(costs), cut) for cut in all_cuts(layers, parts))
            assert evenness(list(costs), found) == best, (costs, parts, found)


@pytest.mark.parametrize(("costs", "parts", "lengths"), [
    ([0.0, 0.0, 0.0, 1e16, 1.0, 1.0, 1.0, 1e16, 1.0], 2, [6, 3]),  # Floats would round the sums.
    ([True, 2, 3.0], 2, [2, 1]),
    ([0.25, 0.5, 0.75], 2, [2, 1]),
    ([1e-300, 1e300, 1e-300], 3, [1, 1, 1]),
])
def test_sums_are_exact_for_numbers_of_any_kind_and_size(costs: list[float], parts: int, lengths: list[int]) -> None:
    assert solve(costs, parts) == lengths
