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
from tests.helpers.world import both as in_both
from tests.promise.test_ddp import data, train
from tests.promise.test_ddp import loss_of as mean
from tests.promise.test_scheduled_ddp import loss_of, square

#: Schedule, checkpoint, options of the wrapper, and batches, of which all but the last go without sync.
WAYS: list[tuple[str | None, str, dict[str, Any], int]] = [
    (None, "never", {"gradient_as_bucket_view": True}, 2), ("zb-h1", "never", {}, 1),
    (None, "always", {"static_graph": True}, 1), ("1f1b", "always", {}, 1),
]
SOME = pytest.mark.parametrize("way", [
    pytest.param(way, marks=pytest.mark.thorough if number > 1 else []) for number, way in enumerate(WAYS)
], ids=["drop-in, without sync", "zb-h1", "drop-in, always, static", "1f1b, always"])


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


@SOME
def test_two_processes_train_as_one_on_the_data_of_both(
    world: World, way: tuple[str | None, str, dict[str, Any], int]
) -> None:
    world.run(plainly, *way)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", [None, "zb-h1"])
@in_both
def test_hooks_after_accumulation_are_called_once(rank: int, schedule: str | None) -> None:
    from torch.nn.parallel import DistributedDataParallel

    _, model, loss = both(schedule, "never")
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    loss(DistributedDataParallel(model), data(rank)).backward()
    assert calls == Counter(dict(model.named_parameters()).keys())
