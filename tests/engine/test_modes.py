"""Which ops a pass runs: only F where nothing goes backward, those of given microbatches, of any Schedule at all."""
from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe, is_recomputing, schedule
from splitpipe.schedule import Op, Schedule
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import assert_transparent, mean, mlp
from tests.promise.layers import Apply


def handmade() -> Schedule:
    """Two stages on one device, one on another, in an order that no name has."""
    first = "0F0 1F0 0F1 1F1 1B1 1W1 0BW1 1BW0 0B0 0W0".split()
    second = "2F0 2F1 2B1 2B0 2W0 2W1".split()
    rows = [[Op(text[1:-1], int(text[0]), int(text[-1])) for text in row] for row in (first, second)]  # type: ignore[arg-type]
    return Schedule(rows, [0, 0, 1])


def turned() -> Schedule:
    """Its stages stand on the devices in another order."""
    rows = schedule.build("zb-h1", 3, 4).rows
    return Schedule([rows[1], rows[2], rows[0]], placement=[2, 0, 1])


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("make", [handmade, turned])
def test_a_schedule_of_ones_own_runs_in_its_order(make: Any, backward: Any) -> None:
    plan = make()
    model = assert_transparent(mlp(4), torch.randn(7, 4), plan, plan.devices, chunks=plan.microbatches,
                               backward=backward)
    with splitpipe.record(model) as timeline:
        model(torch.randn(2 * plan.microbatches, 4), target=0.25)
    assert [[span.op for span in spans if span.op.kind != "W"] for spans in timeline.spans] == [
        [op for op in row if op.kind != "W"] for row in plan.rows]  # W that follow each other may be one.


def test_a_stage_recomputes_before_its_gradient_arrives() -> None:
    again = threading.Event()

    def recomputed(x: Tensor) -> Tensor:
        if is_recomputing():
            again.set()
        return x * 1

    def waiting(x: Tensor) -> Tensor:
        x.register_hook(lambda _: None if again.wait(60) else pytest.fail("the stage before waits for this gradient"))
        return x * 1

    layers = nn.Sequential(Apply(recomputed), nn.Linear(4, 4), Apply(waiting), nn.Linear(4, 4))
    model = SplitPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=1, schedule="1f1b", loss_fn=mean, checkpoint="always")
    model(torch.randn(8, 4), target=0.25).backward()
    assert again.is_set()
