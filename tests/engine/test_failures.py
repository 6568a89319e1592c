"""Errors in a forward or backward with cuts reach the caller with their place, and the model is usable afterwards."""
from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.engine.models import CHECKPOINTS, SCHEDULES, Stack, piped
from tests.helpers.covering import graded, pairwise
from tests.helpers.faults import ERRORS
from tests.helpers.twin import Failing, assert_same_tensors

CUTS = ["layers.1", "layers.3"]
ROWS = torch.arange(6)


class Meeting(nn.Module):
    """A block that calls what stands there for its first row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls: dict[int, Callable[[], None]] = {}

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        self.calls.pop(int(rows[0]), lambda: None)()
        return self.layer(x)


class Fragile(Stack):
    """Calls what stands in ``between`` before its last layer, and fails in backward if a failure stands in a list."""

    def __init__(self) -> None:
        super().__init__(block=Meeting)
        self.between: dict[int, Callable[[], None]] = {}
        self.failures: list[BaseException] = []
        self.failing = Failing(self.failures)

    def forward(self, x: Tensor, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, rows).tanh()
        self.between.pop(int(rows[0]), lambda: None)()
        y = self.last(self.failing(x))
        return {"loss": (y - labels).square().mean(), "y": y}


def throwing(error: BaseException) -> Callable[[], None]:
    def throw() -> None:
        raise error

    return throw


GIVEN = {"x": torch.linspace(-1, 1, 24).reshape(6, 4), "rows": ROWS, "labels": torch.linspace(0, 1, 24).reshape(6, 4)}


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(**GIVEN)["loss"].backward()


def pair(**options: Any) -> tuple[nn.Module, SplitPipe]:
    plain = Fragile()
    model = piped(plain, CUTS, **options)
    step(model)
    return plain, model


def assert_right(plain: nn.Module, model: nn.Module) -> None:
    for each in (plain, model):
        step(each)
    assert_same_tensors(model, plain)


#: A block, its stage, and the first row of a microbatch.
PLACES = [(0, 0, 4), (1, 1, 0), (2, 1, 2), (3, 2, 4), (3, 2, 0)]


@pairwise(schedule=SCHEDULES, checkpoint=CHECKPOINTS, first=[True, False], place=PLACES)
def test_an_error_in_a_block_names_block_stage_and_microbatch(
    schedule: str, checkpoint: str, first: bool, place: tuple[int, int, int]
) -> None:
    plain, (block, stage, row) = Fragile(), place
    model = piped(plain, CUTS, schedule=schedule, checkpoint=checkpoint)
    if not first:
        step(model)
    model.layers[block].calls[row] = throwing(ValueError("found"))
    with pytest.raises(ValueError, match="found") as info:
        step(model)
    where = f"block 'layers.{block}' (Meeting), stage {stage} (cpu), microbatch {row // 2} of 3"
    assert "\n".join(info.value.__notes__).count("in the forward of") == 1
    assert where in "\n".join(info.value.__notes__)
    assert_right(plain, model)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_code_between_blocks_raises_has_its_place(schedule: str) -> None:
    plain, model = pair(schedule=schedule)
    model.inner.between[2] = throwing(ValueError("found"))
    with pytest.raises(ValueError, match="found") as info:
        step(model)
    assert "stage 2 (cpu), microbatch 1 of 3" in "\n".join(info.value.__notes__)
    assert_right(plain, model)


AXES = {"schedule": SCHEDULES, "checkpoint": CHECKPOINTS, "error": ERRORS}


@graded(AXES, [["error"]], [["schedule", "checkpoint"], ["schedule", "error"]])
def test_after_an_error_of_any_kind_the_next_step_is_right(schedule: str, checkpoint: str, error: Any) -> None:
    plain, model = pair(schedule=schedule, checkpoint=checkpoint)
    for block, row in ((1, 2), (3, 4), (0, 0)):
        model.layers[block].calls[row] = throwing(error("found"))
        with pytest.raises(error):
            step(model)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_right(plain, model)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_after_an_error_in_backward_the_next_step_is_right(schedule: str, checkpoint: str) -> None:
    plain, model = pair(schedule=schedule, checkpoint=checkpoint)
    model.inner.failing.failures.append(ValueError("found"))
    with pytest.raises(ValueError, match="found"):
        step(model)
    assert_right(plain, model)
    handle = model.layers[0].layer.weight.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        step(model)
    handle.remove()
    assert_right(plain, model)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_error_in_a_recomputation_has_its_place(schedule: str) -> None:
    plain, model = pair(schedule=schedule, checkpoint="always")
    block = model.layers[2]
    block.calls[2] = lambda: block.calls.update({2: throwing(ValueError("again"))})
    with pytest.raises(ValueError, match="again") as info:
        step(model)
    assert "layers.2" in "\n".join(info.value.__notes__)
    assert_right(plain, model)
