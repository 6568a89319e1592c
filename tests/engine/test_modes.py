"""Which ops a pass runs: only F where nothing goes backward, those of given microbatches, of any Schedule at all."""
from __future__ import annotations

import threading
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe, is_recomputing, schedule
from splitpipe.schedule import Op, Schedule
from tests.helpers.covering import graded
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import assert_transparent, mean, mlp, stages_of, twins
from tests.helpers.twin import Note
from tests.promise.layers import Apply


def noted(self: Any, x: Tensor) -> Tensor:
    """A linear layer that writes each of its passes down."""
    self.log.append("F")
    return Note.apply(self.layer(x), self.log, "B")  # type: ignore[no-any-return]


@graded(
    {"mode": [torch.no_grad, torch.inference_mode], "training": [True, False], "name": schedule.names()},
    essence=[["mode", "training"]], thorough=[["name"]],
)
def test_without_grad_mode_only_f_run_and_in_eval_mode_there_are_no_checkpoints(
    mode: Any, training: bool, name: str
) -> None:
    log: list[str] = []
    layers = nn.Sequential(*[module_of(noted, **linears("layer"), log=log) for _ in range(2 * stages_of(name))])
    model = twins(layers, name, 2, loss_fn=F.mse_loss, chunks=3, checkpoint="always")[1].train(training)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    expected = model(x, target=y)
    ops = 3 * len(model)
    assert log.count("F") == (2 * ops if training else ops) and log.count("B") == ops
    log.clear()
    with mode():
        loss = model(x, target=y)
        assert not loss.requires_grad and loss.is_inference() == torch.is_inference_mode_enabled()
        torch.testing.assert_close(loss, expected.detach())
    assert log == ["F"] * ops
    expected.backward()


def handmade() -> Schedule:
    """Two stages on one device, one on another, in an order that no name has."""
    first = "0F0 1F0 0F1 1F1 1B1 1W1 0BW1 1BW0 0B0 0W0".split()
    second = "2F0 2F1 2B1 2B0 2W0 2W1".split()
    rows = [[Op(text[1:-1], int(text[0]), int(text[-1])) for text in row] for row in (first, second)]  # type: ignore[arg-type]
    return Schedule(rows, [0, 0, 1])


def read() -> Schedule:
    """Of a file."""
    with TemporaryDirectory() as folder:
        schedule.build("v-half", 2, 4).to_csv(path := f"{folder}/plan.csv")
        return schedule.from_csv(path)


def turned() -> Schedule:
    """Its stages stand on the devices in another order."""
    rows = schedule.build("zb-h1", 3, 4).rows
    return Schedule([rows[1], rows[2], rows[0]], placement=[2, 0, 1])


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("make", [handmade, read, turned])
def test_a_schedule_of_ones_own_runs_in_its_order(make: Any, backward: Any) -> None:
    plan = make()
    model = assert_transparent(mlp(4), torch.randn(7, 4), plan, plan.devices, chunks=plan.microbatches,
                               backward=backward)
    with splitpipe.record(model) as timeline:
        model(torch.randn(2 * plan.microbatches, 4), target=0.25)
    assert [[span.op for span in spans if span.op.kind != "W"] for spans in timeline.spans] == [
        [op for op in row if op.kind != "W"] for row in plan.rows]  # W that follow each other may be one.


@pytest.mark.parametrize("balance", [[3, 3], [1, 1, 2, 2], [1] * 6])
def test_interleaved_schedules_take_any_number_of_stages_a_device(balance: list[int]) -> None:
    model = assert_transparent(mlp(6), torch.randn(7, 4), "interleaved-1f1b", 2, balance=balance, chunks=3, steps=1)
    assert model.schedule.stages == len(balance)


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
