"""What is alive while a schedule runs: as many activations as it says, and nothing once their W is done."""
from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from splitpipe import SplitPipe, is_recomputing, schedule
from splitpipe.schedule import Schedule
from tests.helpers.covering import graded
from tests.helpers.scheduled import NAMES

DEVICES, CHUNKS = 4, 8
CUSTOM = pytest.mark.parametrize("custom", [False, True], ids=["linear", "function"])


class Census:
    """The memory that stages hold, by stage, and how much of it was alive at the beginning of each F."""

    def __init__(self) -> None:
        self.saved: dict[int, list[StorageWeakRef]] = defaultdict(list)
        self.given: dict[int, list[StorageWeakRef]] = defaultdict(list)
        #: By stage, at each F in turn: how many saved activations, and inputs, each stage has alive.
        self.seen: dict[int, list[tuple[dict[int, int], dict[int, int]]]] = defaultdict(list)

    def count(self) -> tuple[dict[int, int], dict[int, int]]:
        """How many are alive now, by stage. Right for the stages of the device whose worker asks."""
        return _alive(self.saved), _alive(self.given)


def _alive(kept: dict[int, list[StorageWeakRef]]) -> dict[int, int]:
    return {stage: sum(not each.expired() for each in list(held)) for stage, held in list(kept.items())}


class Scale(torch.autograd.Function):
    """x * weight by a function of one's own, which saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Counts(nn.Module):
    """A layer that saves a tensor of its own making, and counts those alive before it does."""

    def __init__(self, stage: int, census: Census, custom: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3) if custom else torch.randn(3, 3))
        self.stage, self.census, self.custom = stage, census, custom

    def forward(self, x: Tensor) -> Tensor:
        census = self.census
        if not is_recomputing():
            census.seen[self.stage].append(census.count())
            census.given[self.stage].append(StorageWeakRef(x.untyped_storage()))
        y = x * 1  # What saves nothing, in memory of its own.
        census.saved[self.stage].append(StorageWeakRef(y.untyped_storage()))
        return Scale.apply(y, self.weight) if self.custom else F.linear(y, self.weight)


def counted(name: str, custom: bool = False, alone: bool = False, **options: Any) -> tuple[SplitPipe, Census]:
    """A model that counts; alone: its stages share a buffer, and so one worker."""
    census = Census()
    plan = schedule.build(name, DEVICES, CHUNKS)
    layers = [Counts(stage, census, custom) for stage in range(plan.stages)]
    shared = torch.zeros(1)
    for layer in layers if alone else []:
        layer.register_buffer("shared", shared)
    model = SplitPipe(nn.Sequential(*layers), [1] * plan.stages, devices=["cpu"] * DEVICES, chunks=CHUNKS,
                      schedule=name, loss_fn=nn.MSELoss(), **{"checkpoint": "never", **options})
    return model, census


def run(model: SplitPipe) -> Tensor:
    loss: Tensor = model(torch.randn(CHUNKS, 3), target=torch.randn(CHUNKS, 3))
    return loss


def expected(plan: Schedule, begins: str, ends: tuple[str, ...]) -> dict[int, list[dict[int, int]]]:
    """By stage, at each of its F in turn: how many microbatches each stage of its device is to have alive."""
    found: dict[int, list[dict[int, int]]] = defaultdict(list)
    for row in plan.rows:
        alive: dict[int, int] = defaultdict(int)
        for op in row:
            if op.kind == "F":
                found[op.stage].append(dict(alive))
            alive[op.stage] += (op.kind == begins) - (op.kind in ends)
    return found


def assert_alive(census: Census, plan: Schedule, which: int, wanted: dict[int, list[dict[int, int]]]) -> None:
    for stage, moments in census.seen.items():
        mates = [other for other in range(plan.stages) if plan.placement[other] == plan.placement[stage]]
        found = [[moment[which].get(mate, 0) for mate in mates] for moment in moments]
        assert found == [[moment.get(mate, 0) for mate in mates] for moment in wanted[stage]], f"stage {stage}"


@NAMES
@CUSTOM
def test_activations_live_from_f_to_w_as_the_schedule_says(name: str, custom: bool) -> None:
    model, census = counted(name, custom)
    loss = run(model)
    ends = ("B", "BW") if custom else ("W", "BW")  # What has no rule is freed by autograd, with B.
    assert_alive(census, model.schedule, 0, expected(model.schedule, "F", ends))
    assert not any(census.count()[0].values()), "all are freed by the end"
    loss.backward()


@NAMES
def test_autograd_frees_activations_with_b(name: str) -> None:
    model, census = counted(name, backward="autograd")
    run(model)
    assert_alive(census, model.schedule, 0, expected(model.schedule, "F", ("B", "BW")))


def again(name: str, **options: Any) -> tuple[Schedule, Census]:
    """The second pass: whether a stage works in place shows in its first one, which keeps copies."""
    model, census = counted(name, **options)
    run(model)
    for log in (census.saved, census.given, census.seen):
        log.clear()
    run(model)
    return model.schedule, census


@graded(
    {"backward": ["split", "autograd"], "name": schedule.names()}, essence=[["backward"]], thorough=[["name"]]
)
def test_recomputed_activations_live_from_b_to_w(name: str, backward: Any) -> None:
    plan, census = again(name, backward=backward, checkpoint="always")
    assert_alive(census, plan, 0, expected(plan, "B", ("W",)) if backward == "split" else expected(plan, "", ()))
    assert not any(census.count()[0].values()), "what was computed again is freed by the end"


@graded(
    {"name": schedule.names(), "backward": ["split", "autograd"], "checkpoint": ["never", "always"]},
    essence=[["backward", "checkpoint"]], thorough=[["name", "backward"]],
)
def test_the_input_of_a_stage_is_freed_with_b(name: str, backward: Any, checkpoint: Any) -> None:
    # In a worker of its own, the stage that sent it might hold it for a moment more.
    plan, census = again(name, alone=True, backward=backward, checkpoint=checkpoint)
    wanted = expected(plan, "F", ("B", "BW"))
    # The first stage's input is the batch, which is the caller's.
    for moment in [each for found in wanted.values() for each in found]:
        moment[0] = 0
    for _, inputs in [each for found in census.seen.values() for each in found]:
        inputs[0] = 0
    assert_alive(census, plan, 1, wanted)
