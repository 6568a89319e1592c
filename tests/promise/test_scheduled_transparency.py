"""The promise with schedules: losses, gradients and buffers of the module, under all names and on all devices."""
from __future__ import annotations

import torch
from torch import nn

from splitpipe import schedule
from tests.helpers.covering import graded, pairs
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import assert_transparent, stages_of

AXES = {
    "name": schedule.names(),
    "by": ["balance", "cuts"],
    "devices": [1, 2, 4],
    "sizes": [(8, 8), (13, 8), (3, 8), (6, 3)],
    "checkpoint": ["always", "except_last", "never"],
    "backward": ["split", "autograd"],
}


@graded(AXES, pairs([*AXES]), [["name", "devices", "sizes"], ["name", "by", "checkpoint", "backward"]])
def test_every_schedule(
    name: str, by: str, devices: int, sizes: tuple[int, int], checkpoint: str, backward: str
) -> None:
    kinds = [lambda: nn.Linear(6, 6), nn.Tanh, lambda: nn.LayerNorm(6)]
    layers = [kinds[k % 3]() for k in range(devices * stages_of(name) + 1)]
    size, chunks = sizes
    assert_transparent(
        nn.Sequential(*layers), torch.randn(size, 6), name, devices, by=by, chunks=chunks,
        checkpoint=checkpoint, backward=backward, target=torch.randn(size, 6), steps=1,
    )
