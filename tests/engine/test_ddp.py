"""DistributedDataParallel around a module with cuts: two processes train as one would on the data of both."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe import attach
from tests.engine.models import Stack, piped
from tests.helpers.twin import assert_same_tensors
from tests.helpers.world import SIZE, World

CUTS = ["layers.1", "layers.3"]


def data(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    shape = 5 + 2 * rank, 4
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("x", "labels")}


def trained(rank: int, options: dict[str, Any], in_place: bool) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    plain = Stack().double()
    model: Any = piped(plain, CUTS, **options)
    if in_place:
        model = Stack().double()
        model.load_state_dict(plain.state_dict())
        attach(model, CUTS, devices=["cpu"] * 3, chunks=3, **options)
    parallel = DistributedDataParallel(model)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
        for process in range(SIZE):
            (plain(**data(process, step))["loss"] / SIZE).backward()
        parallel(**data(rank, step))["loss"].backward()
        assert_same_tensors(model, plain)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"schedule": "1f1b"}, {"schedule": "zb-h1"}])
@pytest.mark.thorough
def test_gradients_are_those_of_the_data_of_both(options: dict[str, Any], in_place: bool, world: World) -> None:
    world.run(trained, options, in_place)
