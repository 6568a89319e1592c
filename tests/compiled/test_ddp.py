"""DistributedDataParallel around a pipeline whose layers are compiled: two processes train as one would."""
from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe
from tests.compiled.test_layers import Block
from tests.helpers import scheduled, twin
from tests.helpers.compiling import EAGER
from tests.helpers.world import both
from tests.promise.test_ddp import data, loss_of, square, train


def twins(schedule: str | None, checkpoint: str) -> tuple[nn.Sequential, SplitPipe]:
    """The module and its pipeline."""
    torch._dynamo.reset()
    torch.set_num_threads(1)
    module = nn.Sequential(*[Block(6) for _ in range(4)]).double()
    options = {"chunks": 3, "checkpoint": checkpoint, "compile": EAGER}
    if schedule is None:
        return twin.twins(module, [2, 2], **options)
    return scheduled.twins(module, schedule, 2, loss_fn=square, **options)


@pytest.mark.parametrize(("schedule", "checkpoint", "wrap", "batches"), [
    (None, "never", {"gradient_as_bucket_view": True}, 2),
    ("zb-h1", "always", {"static_graph": True}, 1), ("1f1b", "never", {}, 1),
], ids=["drop-in, without sync", "zb-h1, always, static", "1f1b"])
@both
def test_two_processes_train_as_one_on_the_data_of_both(
    rank: int, schedule: str | None, checkpoint: str, wrap: dict[str, Any], batches: int
) -> None:
    plain, model = twins(schedule, checkpoint)
    train(rank, plain, model, wrap, batches)
    why = "the schedule has no W for it" if schedule == "1f1b" else "compiled"
    assert {row.why for row in model.deferral_report()} == {why}


@both
def test_hooks_after_accumulation_are_called_once(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = twins("zb-h1", "never")[1]
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    loss_of(DistributedDataParallel(model), data(rank)).backward()
    assert calls == Counter(dict(model.named_parameters()).keys())
