"""The solver's cuts are the most even of all."""
from __future__ import annotations

import random
from itertools import combinations, pairwise, product

import pytest

from splitpipe.balance.solver import solve
from tests.helpers.covering import few


def sums(costs: list[float], lengths: list[int]) -> list[float]:
    ends = [sum(lengths[: part + 1]) for part in range(len(lengths))]
    return [sum(costs[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def evenness(costs: list[float], lengths: list[int]) -> tuple[float, float, int]:
    found = sums(costs, lengths)
    return max(found), sum(value**2 for value in found), sum(length**2 for length in lengths)


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


def test_longer_lists_of_any_shape_are_cut_as_evenly_as_the_best_of_all_cuts() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        layers = draw.randint(7, 11)
        top = draw.choice([1, 3, 10, 1000])
        costs = [draw.choice([0, draw.randint(0, top), draw.randint(0, top)]) for _ in range(layers)]
        parts = draw.randint(2, layers - 1)
        best = min(evenness(costs, cut) for cut in all_cuts(layers, parts))
        assert evenness(costs, solve(costs, parts)) == best, (costs, parts)


def test_sums_are_exact_where_floats_would_round() -> None:
    costs = [0.0, 0.0, 0.0, 1e16, 1.0, 1.0, 1.0, 1e16, 1.0]
    assert costs[3] + 1.0 == costs[3]
    assert solve(costs, 2) == [6, 3]


def test_numbers_of_any_kind_and_size_are_taken() -> None:
    assert solve([True, 2, 3.0], 2) == [2, 1]
    assert solve([0.25, 0.5, 0.75], 2) == [2, 1]
    assert solve([1e-300, 1e300, 1e-300], 3) == [1, 1, 1]


def test_the_costs_are_left_alone() -> None:
    costs = [3.0, 1.0, 2.0]
    solve(costs, 2)
    assert costs == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("shape", ["random", "equal", "one large", "zeros", "growing"])
@pytest.mark.thorough
def test_two_thousand_layers_are_cut_into_sixty_four_parts_without_searching_all(shape: str) -> None:
    draw = random.Random(0)
    costs = {
        "equal": [1.0] * 2000,
        "random": [draw.random() for _ in range(2000)],
        "one large": [0.5] * 1000 + [1e6] + [0.25] * 999,
        "zeros": [0.0] * 2000,
        "growing": [float(layer) for layer in range(2000)],
    }[shape]
    found = solve(costs, 64)
    assert len(found) == 64 and min(found) > 0 and sum(found) == 2000
    assert max(sums(costs, found)) >= max(max(costs), sum(costs) / 64)
