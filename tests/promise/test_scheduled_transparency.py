"""The promise with schedules: losses, gradients and buffers of the module, for all layers, sizes, modes and names."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from splitpipe import schedule
from tests.helpers.scheduled import assert_transparent, stages_of
from tests.promise.test_transparency import LAYERS


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """What differs in more than the last digits of a double is no rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("size", "chunks"), [(4, 1), (7, 3), (3, 8)])
@pytest.mark.parametrize(("scheduled", "devices"), [("1f1b", 2), ("zb-h1", 2), ("zb-v", 1)])
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.endswith("reentrant")])  # Those are refused.
def test_a_schedule_is_its_module(
    name: str, scheduled: str, devices: int, size: int, chunks: int, checkpoint: str, backward: str
) -> None:
    make, value = LAYERS[name]
    assert_transparent(
        nn.Sequential(*make()), value(size), scheduled, devices, chunks=chunks, checkpoint=checkpoint, backward=backward
    )


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("size", "chunks"), [(8, 8), (13, 8), (3, 8), (6, 3)])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", schedule.names())
def test_every_schedule(name: str, devices: int, size: int, chunks: int, checkpoint: str, backward: str) -> None:
    kinds = [nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)]
    layers = [kinds[k % 3] if k % 3 == 1 else type(kinds[k % 3])(*[6, 6][: 2 - k % 3 // 2]) for k in
              range(devices * stages_of(name) + 1)]
    assert_transparent(
        nn.Sequential(*layers), torch.randn(size, 6), name, devices, chunks=chunks, checkpoint=checkpoint,
        backward=backward, target=torch.randn(size, 6), steps=1,
    )
