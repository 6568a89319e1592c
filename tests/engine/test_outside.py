"""Other threads, one tensor in two arguments, and iterators, with cuts."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.models import CHECKPOINTS, SCHEDULES, assert_same_step, batch, piped
from tests.helpers.covering import pairwise
from tests.helpers.modules import linears, module_of


def threaded(self: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Stage 0 computes something in a thread of its own."""
    x = self.first(x)
    with ThreadPoolExecutor(1) as pool:
        x = x + pool.submit(torch.tanh, x).result()
    return {"loss": (self.last(x) - labels).square().mean()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_another_thread_may_compute_in_the_first_stage(schedule: str) -> None:
    assert_same_step(module_of(threaded, **linears("first", "last")), batch(), cuts=["last"], schedule=schedule)


def asking(self: Any, a: Tensor, b: Tensor) -> Tensor:
    """Asks whether its arguments are one tensor, as attention does."""
    y: Tensor = self.other(self.one(a).tanh() * (2 if a is b else 1)) + b
    return y


def twice(self: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    x = self.first(x)
    for block in self.blocks:
        x = x + (block(x, x, x)[0] if isinstance(block, nn.MultiheadAttention) else block(x, x))
    return {"loss": (x - labels).square().mean()}


@pairwise(checkpoint=CHECKPOINTS, schedule=SCHEDULES, attention=[False, True])
def test_one_tensor_in_two_arguments_is_one_tensor(checkpoint: str, schedule: str, attention: bool) -> None:
    blocks = nn.ModuleList(
        nn.MultiheadAttention(4, 2, batch_first=True) if attention else module_of(asking, **linears("one", "other"))
        for _ in range(3)
    )
    assert_same_step(
        module_of(twice, first=nn.Linear(4, 4), blocks=blocks),
        {"x": torch.randn(6, 3, 4), "labels": torch.randn(6, 3, 4)}, cuts=["blocks.1", "blocks.2"],
        schedule=schedule, checkpoint=checkpoint,
    )


def consuming(self: Any, x: Tensor, others: Any) -> Tensor:
    y: Tensor = self.layer(sum(others, x)).tanh()
    return y


def iterating(self: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gives its blocks iterators, which are spent when a block runs again."""
    kept: list[Tensor] = []
    for block in self.blocks:
        kept.append(x)
        x = block(x, (2 * each for each in kept))
    return {"loss": (x - labels).square().mean()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_checkpointed_block_is_given_no_iterator(schedule: str) -> None:
    net = module_of(iterating, blocks=nn.ModuleList(module_of(consuming, **linears("layer")) for _ in range(3)))
    model = piped(net, ["blocks.1"], schedule=schedule, checkpoint="always")
    with pytest.raises(TypeError, match="is used up when the block is recomputed"):
        model(**batch())["loss"].backward()
    if schedule == "gpipe":
        assert_same_step(net, batch(), cuts=["blocks.1"], checkpoint="never")
