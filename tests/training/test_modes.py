"""Which ops a pass runs: only F where nothing goes backward, those of given microbatches, of any Schedule at all."""
from __future__ import annotations

import threading
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, is_recomputing, schedule
from splitpipe.schedule import Op, Schedule
from tests.helpers.covering import graded
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import assert_transparent, mean, mlp, stages_of, twins
from tests.helpers.twin import Note, assert_same_tensors
from tests.promise.layers import Apply


def noted(self: Any, x: Tensor) -> Tensor:
    """A linear layer that writes each of its passes down."""
    self.log.append("F")
    return Note.apply(self.layer(x), self.log, "B")  # type: ignore[no-any-return]


def logged(name: str, **options: Any) -> tuple[SplitPipe, list[str]]:
    log: list[str] = []
    layers = nn.Sequential(*[module_of(noted, **linears("layer"), log=log) for _ in range(2 * stages_of(name))])
    return twins(layers, name, 2, loss_fn=F.mse_loss, chunks=3, **{"checkpoint": "never", **options})[1], log


@pytest.mark.parametrize(("name", "devices"), [("1f1b", 2), ("1f1b", 1), ("zb-v", 1)])
def test_saved_tensor_hooks_of_the_caller_have_one_worker(name: str, devices: int) -> None:
    threads: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        assert_transparent(mlp(4), torch.randn(7, 4), name, devices, chunks=3)
    assert len(threads - {threading.get_ident()}) == 1


@graded(
    {"mode": [torch.no_grad, torch.inference_mode], "training": [True, False], "name": schedule.names()},
    essence=[["mode", "training"]], thorough=[["name"]],
)
def test_without_grad_mode_only_f_run(mode: Any, training: bool, name: str) -> None:
    model, log = logged(name)
    expected = model(x := torch.randn(7, 4), target=(y := torch.randn(7, 4))).detach()
    log.clear()
    model.train(training)
    with mode():
        loss = model(x, target=y)
        assert not loss.requires_grad and loss.is_inference() == torch.is_inference_mode_enabled()
        torch.testing.assert_close(loss, expected)
    assert log == ["F"] * 3 * len(model)
    model.train()(x, target=y).backward()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_eval_mode_has_gradients_and_no_checkpoints(checkpoint: Any) -> None:
    model, log = logged("zb-v", checkpoint=checkpoint)
    model.eval()
    loss = model(torch.randn(7, 4), target=torch.randn(7, 4))
    assert log.count("F") == log.count("B") == 3 * len(model)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_sum_over_an_empty_batch_is_zero() -> None:
    plain, model = twins(mlp(4), "zb-v", 2, loss_fn=lambda y, target: (y - target).square().sum(), chunks=3)
    x = torch.randn(0, 4)
    loss = model(x, target=x)
    loss.backward()
    (plain(x) - x).square().sum().backward()
    assert loss == 0
    assert_same_tensors(model, plain)


# Schedules of one's own


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


def block() -> Schedule:
    passes = [schedule.BlockOp("F", i, i) for i in range(3)] + [schedule.BlockOp("BW", i, 7 - 2 * i) for i in range(3)]
    return schedule.BuildingBlock(passes, placement=[0, 1, 2], interval=3).repeat(6).squeeze().reorder()


def found() -> Schedule:
    return schedule.search(2, 3, schedule.Costs(copy=0.1), seconds=0.1)


def turned() -> Schedule:
    """Its stages stand on the devices in another order."""
    rows = schedule.build("zb-h1", 3, 4).rows
    return Schedule([rows[1], rows[2], rows[0]], placement=[2, 0, 1])


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("make", [handmade, read, block, found, turned])
def test_a_schedule_of_ones_own_runs_in_its_order(make: Any, backward: Any) -> None:
    plan = make()
    model = assert_transparent(mlp(4), torch.randn(7, 4), plan, plan.devices, chunks=plan.microbatches,
                               backward=backward)
    with model.record() as timeline:
        model(torch.randn(2 * plan.microbatches, 4), target=0.25)
    assert [[span.op for span in spans if span.op.kind != "W"] for spans in timeline.spans] == [
        [op for op in row if op.kind != "W"] for row in plan.rows]  # W that follow each other may be one.


@pytest.mark.parametrize("balance", [[3, 3], [1, 1, 2, 2], [1] * 6])
def test_interleaved_schedules_take_any_number_of_stages_a_device(balance: list[int]) -> None:
    model = assert_transparent(mlp(6), torch.randn(7, 4), "interleaved-1f1b", 2, balance=balance, chunks=3, steps=1)
    assert model.schedule.stages == len(balance)


class WaitInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, event: threading.Event) -> Tensor:
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.event.wait(60), "the stage before waits for this gradient before it recomputes"
        return grad, None


def test_a_stage_recomputes_before_its_gradient_arrives() -> None:
    again = threading.Event()

    def recomputed(x: Tensor) -> Tensor:
        if is_recomputing():
            again.set()
        return x * 1

    waits = Apply(lambda x: WaitInBackward.apply(x, again))
    layers = nn.Sequential(Apply(recomputed), nn.Linear(4, 4), waits, nn.Linear(4, 4))
    model = SplitPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=1, schedule="1f1b", loss_fn=mean, checkpoint="always")
    model(torch.randn(8, 4), target=0.25).backward()
    assert again.is_set()
