"""Checkpointed blocks in chains, which are recomputed together in backward."""
from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, is_recomputing
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import assert_steps, inside, loss_of
from tests.helpers.twin import Looped

EACH = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])


class Block(nn.Module):
    """A weight, and a function of it and the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def chain(schedule: str, count: int, function: Callable[[Tensor, Tensor], Tensor], chunks: int = 3) -> Any:
    """Checkpointed blocks between two layers, of which the last is a stage; a copy, and its pipeline."""
    plain = Looped(nn.Linear(4, 4), *[Block(function) for _ in range(count)], nn.Linear(4, 4))
    return plain, SplitPipe(copy.deepcopy(plain), cuts=[str(count + 1)], devices=["cpu"] * 2,
                            **inside({"schedule": schedule, "checkpoint": "always", "chunks": chunks}))


def rows() -> Tensor:
    return torch.randn(6, 4)


@EACH
def test_what_a_block_saves_is_gone_after_it(schedule: str) -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def inside(x: Tensor, weight: Tensor) -> Tensor:
        gc.collect()
        if not is_recomputing():  # A recomputation has the graphs of a whole chain.
            alive.append(sum(ref() is not None for ref in seen))
        hidden = (x @ weight).exp()
        seen.append(weakref.ref(hidden))
        return hidden.sin()

    _, model = chain(schedule, 2, inside)
    for _ in range(2):
        seen.clear()
        loss_of(model, rows()).backward()
    assert {*alive} == {0}


@EACH
def test_other_outputs_in_the_recomputation_are_an_error(schedule: str) -> None:
    armed: list[int] = []

    def more(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight)[:1] if armed and is_recomputing() else x @ weight

    plain, model = chain(schedule, 1, more)
    for _ in range(2):
        assert_steps(plain, model, rows, 1)
        armed.append(1)
        with pytest.raises(RuntimeError, match="returned other outputs in its recomputation"):
            loss_of(model, rows()).backward()
        armed.clear()
