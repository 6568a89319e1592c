"""DistributedDataParallel around a pipeline whose layers are compiled: two processes train as one would."""
from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import SplitPipe
from tests.compiled.test_layers import Block
from tests.helpers import scheduled, twin
from tests.helpers.compiling import EAGER
from tests.helpers.world import both
from tests.promise.test_ddp import square, train


def twins(schedule: str | None, checkpoint: str) -> tuple[nn.Sequential, SplitPipe]:
    """The module and its pipeline."""
    warnings.filterwarnings("ignore", "The .grad attribute")  # Torch's, which it hides from users.
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
    assert {row.why for row in splitpipe.deferral_report(model)} == {"compiled"}
