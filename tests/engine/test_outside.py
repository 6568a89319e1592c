"""What a module's code takes from outside of its call, or computes in other threads."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.models import CHECKPOINTS, SCHEDULES, assert_same_step, piped
from tests.helpers.covering import pairwise
from tests.helpers.twin import assert_same, assert_same_tensors


class Scaled(nn.Module):
    """Code between blocks uses a tensor with a graph that was there before the call."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.stage = stage
        self.taken: list[Any] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.stage:
                x = x * self.taken[0]
        return {"loss": (x - labels).square().mean()}


@pairwise(computed=[lambda x: x * 2, torch.exp], stage=[0, 1, 2], schedule=SCHEDULES, checkpoint=CHECKPOINTS)
def test_a_graph_from_before_the_call_is_gone_back_through(
    checkpoint: str, schedule: str, stage: int, computed: Callable[[Tensor], Tensor]
) -> None:
    plain, x, labels = Scaled(stage), torch.randn(6, 4), torch.randn(6, 4)
    model = piped(plain, ["layers.1", "layers.2"], schedule=schedule, checkpoint=checkpoint)
    leaves = [torch.ones(4, requires_grad=True) for _ in range(2)]
    for leaf, each in zip(leaves, (plain, model)):
        each.taken[:] = [computed(leaf)]  # type: ignore[index, operator]
    try:
        model(x, labels)["loss"].backward()
    except RuntimeError as error:
        # What the graph has saved is freed by the first microbatch's B, as by any second backward.
        assert schedule != "gpipe" and computed is torch.exp
        assert "backward through the graph a second time" in str(error)
        return
    plain(x, labels)["loss"].backward()
    assert_same(leaves[1].grad, leaves[0].grad, "the leaf's gradient")
    assert_same_tensors(model, plain)


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
