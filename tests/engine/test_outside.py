"""Other threads, one tensor in two arguments, and iterators, with cuts."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.models import CHECKPOINTS, SCHEDULES, assert_same_step, piped


class Threaded(nn.Module):
    """Stage 0 computes something in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        with ThreadPoolExecutor(1) as pool:
            x = x + pool.submit(torch.tanh, x).result()
        return {"loss": (self.last(x) - labels).square().mean()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_another_thread_may_compute_in_the_first_stage(schedule: str) -> None:
    assert_same_step(
        Threaded(), {"x": torch.randn(6, 4), "labels": torch.randn(6, 4)}, cuts=["last"], schedule=schedule
    )


class Asking(nn.Module):
    """Asks whether its arguments are one tensor, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        y: Tensor = self.other(self.one(a).tanh() * (2 if a is b else 1)) + b
        return y


class Twice(nn.Module):
    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(4, 4), attention
        make = (lambda: nn.MultiheadAttention(4, 2, batch_first=True)) if attention else Asking
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = x + (block(x, x, x)[0] if self.attention else block(x, x))
        return {"loss": (x - labels).square().mean()}


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_one_tensor_in_two_arguments_is_one_tensor(checkpoint: str, schedule: str, attention: bool) -> None:
    assert_same_step(
        Twice(attention), {"x": torch.randn(6, 3, 4), "labels": torch.randn(6, 3, 4)}, cuts=["blocks.1", "blocks.2"],
        schedule=schedule, checkpoint=checkpoint,
    )


class Consuming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, others: Any) -> Tensor:
        y: Tensor = self.layer(sum(others, x)).tanh()
        return y


class Iterating(nn.Module):
    """Gives its blocks iterators, which are spent when a block runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Consuming() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kept: list[Tensor] = []
        for block in self.blocks:
            kept.append(x)
            x = block(x, (2 * each for each in kept))
        return {"loss": (x - labels).square().mean()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_checkpointed_block_is_given_no_iterator(schedule: str) -> None:
    arguments = {"x": torch.randn(6, 4), "labels": torch.randn(6, 4)}
    model = piped(Iterating(), ["blocks.1"], schedule=schedule, checkpoint="always")
    with pytest.raises(TypeError, match="is used up when the block is recomputed"):
        model(**arguments)["loss"].backward()
    if schedule == "gpipe":
        assert_same_step(Iterating(), arguments, cuts=["blocks.1"], checkpoint="never")
