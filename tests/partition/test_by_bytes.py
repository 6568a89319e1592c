"""Where a module is cut that nobody has measured."""
from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch
from torch import nn

from splitpipe.partition.by_bytes import cuts_of_map, divide

A, B, C = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


class Model(nn.Module):
    """An embedding, four layers, and a head that is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def ways(count: int, stages: int) -> list[list[int]]:
    """All ways to cut so many parts into stages."""
    found = [(0, *inner, count) for inner in combinations(range(1, count), stages - 1)]
    return [[end - start for start, end in zip(each, each[1:])] for each in found]


def fills(sizes: list[float], rooms: list[float], numbers: list[int]) -> list[float]:
    """How full each stage is, of its room."""
    rest = iter(sizes)
    return [sum(next(rest) for _ in range(number)) / room for number, room in zip(numbers, rooms)]


@pytest.mark.parametrize("seed", range(30))
def test_the_fullest_stage_is_as_empty_as_can_be_then_the_next_one(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [float(draw.randint(0, 9)) for _ in range(draw.randint(1, 8))]
    rooms = [float(draw.randint(1, 4)) for _ in range(draw.randint(1, len(sizes)))]

    def cost(numbers: list[int]) -> list[float]:
        return sorted(fills(sizes, rooms, numbers), reverse=True)

    numbers = divide(sizes, rooms)
    assert sum(numbers) == len(sizes) and min(numbers) > 0
    assert cost(numbers) == pytest.approx(min(map(cost, ways(len(sizes), len(rooms)))))


@pytest.mark.parametrize(
    ("devices", "cuts", "found"),
    [
        ({"embed": A, "layers.0": A, "layers.1": A, "layers.2": B, "layers.3": B, "norm": B, "head": B},
         ["layers.2"], [A, B]),
        ({"embed": A, "layers.0": A, "layers.1": B, "layers.2": B, "layers.3": C, "norm": C, "head": A},
         ["layers.1", "layers.3"], [A, B, C]),  # A head that is tied goes back to the embedding.
        ({"embed": A, "layers": B, "norm": B, "head": B}, ["layers.0"], [A, B]),  # A list is never called.
        ({"layers.2": B, "embed.weight": B, "embed": A}, ["layers.2"], [A, B]),
        ({"": A}, [], []),
    ],
    ids=["halves", "back", "list", "order", "one"],
)
def test_a_stage_begins_where_the_map_has_a_new_device(
    devices: dict[str, torch.device], cuts: list[str], found: list[torch.device]
) -> None:
    model = Model()
    model.hf_device_map = devices  # type: ignore[assignment]
    assert cuts_of_map(model) == (cuts, found)
