"""A tensor with a graph that a block leaves in an attribute: used right after the block, or never, and by no other."""
from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from itertools import count
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.partition.stale import Stale
from tests.engine.models import CHECKPOINTS, SCHEDULES, assert_same_step, piped


class Experts(nn.Module):
    """A layer with a gate, which leaves the balance of its experts, and what it has computed it from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.weights = self.gate(x).softmax(1)
        self.gate.balance = self.weights.var(1).sum()
        self.history = {"weights": [self.weights]}
        return x + self.layer(x) * self.weights[:, :1]


class Mixture(nn.Module):
    """Experts; the loss includes what ``after`` computes right after a block, and what ``last`` computes at the end."""

    def __init__(self, after: Callable[[Any], Any] | None = None, last: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(4))
        self.head = nn.Linear(4, 4)
        self.after, self.last = after, last

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        more: list[Any] = []
        for block in self.blocks:
            x = block(x)
            more += [] if self.after is None else [self.after(block)]
        more += [] if self.last is None else map(self.last, self.blocks)
        y = self.head(x)
        return {"loss": F.mse_loss(y, labels) + 0.1 * sum(more), "y": y}


def batch(rows: int = 7) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 4), "labels": torch.randn(rows, 4)}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("after", [
    None, lambda block: block.gate.balance / len(block.weights), lambda block: block.history["weights"][0].mean(),
], ids=["unused", "number", "rows"])
def test_a_block_may_leave_tensors_for_the_code_right_after_it(after: Any, schedule: str, checkpoint: str) -> None:
    model = assert_same_step(Mixture(after), batch(), cuts=["blocks.2"], schedule=schedule, checkpoint=checkpoint)
    left = [vars(part)[own] for part in model.modules() for own in {"weights", "balance", "history"} & {*vars(part)}]
    assert len(left) == 12 and {type(value) for value in left} == {Stale}


USES: list[Callable[[Any], Any]] = [
    lambda x: x.mean(), lambda x: x + 1, lambda x: 1 + x, lambda x: torch.ones(2) * x, lambda x: x / torch.ones(2),
    lambda x: torch.stack([x]), lambda x: F.mse_loss(x, target=torch.ones(2)), lambda x: sum([x]), bool, float, len,
    list, lambda x: x[0], lambda x: x @ x, lambda x: x > 0, lambda x: hasattr(x, "grad_fn"), lambda x: -x,
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_later_stage_may_not_use_them_nor_what_comes_after_the_call(schedule: str) -> None:
    model, arguments = piped(Mixture(last=lambda block: block.gate.balance), ["blocks.2"], schedule=schedule), batch()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"gate.balance'.* is used by a later stage"):
            model(**arguments)
    model.last = None
    model(**arguments)["loss"].backward()
    for use in USES:
        with pytest.raises(RuntimeError, match="'blocks.0.weights'.* or after the call"):
            use(model.blocks[0].weights)
    assert isinstance(model.blocks[0].weights, Tensor) and not isinstance(model.blocks[0].history, Tensor)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_later_stage_that_gets_the_next_microbatchs_raises_in_the_last_one(schedule: str) -> None:
    calls, left, used = count(), Event(), Event()

    def second(block: nn.Module, args: Any, output: Any) -> None:
        if next(calls) == 1:
            left.set()
            assert used.wait(10)

    def use(block: Any) -> Any:
        if block is not model.blocks[0]:
            return 0
        assert left.wait(10)
        try:
            return block.gate.balance
        finally:
            used.set()

    model = piped(Mixture(), ["blocks.2"], schedule=schedule, reduction="mean")
    with torch.no_grad(), pytest.warns(UserWarning, match="left 'blocks.0.weights'"):
        model(**batch())  # The first call, in which ops run one after another.
    model.blocks[0].register_forward_hook(second)
    model.last = use
    for _ in range(2):
        with pytest.raises(RuntimeError, match="'blocks.0.gate.balance'.* is used by a later stage"):
            model(**batch())


def test_recomputation_leaves_none_either() -> None:
    model = piped(Mixture(), ["blocks.2"], checkpoint="always")
    for _ in range(2):
        model(**batch())["loss"].backward()
        with pytest.raises(RuntimeError, match="'blocks.3.weights'.* or after the call"):
            model.blocks[3].weights.sum()


def test_the_model_can_be_copied_and_saved_after_a_call() -> None:
    model = piped(Mixture(), ["blocks.2"])
    model(**batch())
    for again in (copy.deepcopy(model.inner), pickle.loads(pickle.dumps(model.inner.blocks[0]))):
        block = again.blocks[0] if isinstance(again, Mixture) else again
        assert "of one microbatch" in repr(block.weights)
        with pytest.raises(RuntimeError, match="'blocks.0.weights'"):
            block.weights.sum()


def test_without_gradients_they_are_those_of_the_microbatch_too() -> None:
    model, arguments = piped(Mixture(), ["blocks.2"]), batch()
    with torch.no_grad(), pytest.warns(UserWarning, match="left 'blocks.0.weights'"):
        model(**arguments)
    model(**arguments)
    model.last = lambda block: block.gate.balance
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="gate.balance'.* by a later stage"):
            model(**arguments)


def test_a_single_microbatch_is_the_batch() -> None:
    arguments = batch()
    model = piped(Mixture(), ["blocks.2"])
    model(**arguments)
    model(**{name: x[:1] for name, x in arguments.items()})
    assert len(model.blocks[0].weights) == 1


class Chain(nn.Module):
    """Blocks, one of which may come twice, and a loss."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.several = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.several:
            x = block(x)
        return {"loss": x.square().mean()}


class Recurrent(nn.Module):
    """Adds what it computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: Any = None
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if self.last is None else y + self.last.sum()


class Remembering(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Collecting(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        self.all.append(super().forward(x))
        return self.all[-1]


@pytest.mark.parametrize(("block", "names", "says"), [
    (Remembering, "abc", "'several.0.last', which was a tensor with a graph, is used by .*another microbatch"),
    (Collecting, "abc", "the forward left 'several.0.all.*, a tensor with a graph"),
    (Experts, "aba", "the forward left 'several.0.weights'.* a tensor with a graph"),
], ids=["read by the next microbatch", "added to a list", "called in two stages"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_microbatches_would_mix_is_an_error_each_time(
    block: Callable[[], nn.Module], names: str, says: str, schedule: str
) -> None:
    blocks = {name: block() for name in names}
    model = SplitPipe(
        Chain(blocks[name] for name in names), cuts=["several.1"], devices=["cpu"] * 2, chunks=2,
        schedule=schedule,
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            model(torch.randn(8, 4))


def test_an_error_of_the_forward_is_not_hidden() -> None:
    def failing(block: Any) -> Any:
        raise ZeroDivisionError("of the user's")

    with pytest.raises(ZeroDivisionError, match="of the user's"):
        piped(Mixture(failing), ["blocks.2"])(**batch())
