"""DistributedDataParallel around a pipeline whose layers are compiled: two processes train as one would."""
from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.compiled.test_layers import Block
from tests.helpers import scheduled, twin
from tests.helpers.compiling import EAGER
from tests.helpers.world import World
from tests.promise.test_ddp import data, train
from tests.promise.test_ddp import loss_of as mean
from tests.promise.test_scheduled_ddp import loss_of, square

WAYS = pytest.mark.parametrize("schedule, checkpoint", [
    (None, "never"), ("zb-h1", "never"), pytest.param(None, "always", marks=pytest.mark.thorough),
    pytest.param("1f1b", "always", marks=pytest.mark.thorough),
])
WRAPS: list[tuple[dict[str, Any], int]] = [({}, 1), ({"gradient_as_bucket_view": True}, 2), ({"static_graph": True}, 1)]


def both(schedule: str | None, checkpoint: str) -> tuple[Any, Any, Any]:
    """The module, its pipeline, and their loss."""
    torch._dynamo.reset()
    torch.set_num_threads(1)
    module = nn.Sequential(*[Block(6) for _ in range(4)]).double()
    options = {"chunks": 3, "checkpoint": checkpoint, "compile": EAGER}
    if schedule is None:
        return *twin.twins(module, [2, 2], **options), mean
    return *scheduled.twins(module, schedule, 2, loss_fn=square, **options), loss_of


def plainly(rank: int, schedule: str | None, checkpoint: str, wrap: dict[str, Any], batches: int) -> None:
    plain, model, loss = both(schedule, checkpoint)
    train(rank, plain, model, wrap, batches, loss)
    why = "the schedule has no W for it" if schedule == "1f1b" else "compiled"
    assert {row.why for row in model.deferral_report()} == {why}


@WAYS
@pytest.mark.parametrize("wrap, batches", WRAPS, ids=["plainly", "without sync", "static"])
def test_two_processes_train_as_one_on_the_data_of_both(
    world: World, schedule: str | None, checkpoint: str, wrap: dict[str, Any], batches: int
) -> None:
    world.run(plainly, schedule, checkpoint, wrap, batches)


def hooked(rank: int, schedule: str | None, checkpoint: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    _, model, loss = both(schedule, checkpoint)
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    loss(DistributedDataParallel(model), data(rank)).backward()
    assert calls == Counter(dict(model.named_parameters()).keys())


@pytest.mark.thorough
@WAYS
def test_hooks_after_accumulation_are_called_once(world: World, schedule: str | None, checkpoint: str) -> None:
    world.run(hooked, schedule, checkpoint)
