"""Steps that ran become a timeline, of any Schedule at all; nothing is recorded where nobody asked."""
from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe, schedule
from splitpipe.schedule import Op, Schedule, Timeline
from tests.helpers.covering import graded
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import assert_transparent, mlp, twins


@graded({"name": schedule.names(), "backward": ["split", "autograd"], "checkpoint": ["always", "never"]},
        essence=[["backward"]], thorough=[["name"]])
def test_each_device_has_done_its_row_in_order(name: str, backward: str, checkpoint: str, tmp_path: Path) -> None:
    _, it = twins(mlp(9), name, loss_fn=nn.MSELoss(), chunks=4, backward=backward, checkpoint=checkpoint)
    x = torch.randn(8, 4)
    expected = it(x, target=x)
    with splitpipe.record(it) as timeline:
        assert torch.equal(it(x, target=x), expected)
    assert isinstance(timeline, Timeline) and timeline.steps == 1
    for spans, row in zip(timeline.spans, it.schedule.rows):
        assert sorted(span.op for span in spans) == sorted(row)
        # W that follow each other may be one kernel a stage, so only their order among the stages is another.
        assert [span.op for span in spans if span.op.kind != "W"] == [op for op in row if op.kind != "W"]
        assert all(before.end <= after.start + 1e-6 for before, after in itertools.pairwise(spans))
    timeline.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.index(f"{name}, recorded") < page.index(f"{name}, planned")
    assert "bottleneck" in str(timeline) and "cpu" in str(timeline)


def test_only_training_steps_that_completed_are_recorded() -> None:
    failing = [False]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if failing[0]:
            raise ZeroDivisionError
        return (output - target).square().mean()

    _, it = twins(mlp(2), "1f1b", loss_fn=loss_fn, chunks=2)
    x = torch.randn(4, 4)
    with splitpipe.record(it) as timeline:
        it(x, target=x).backward()
        it(x)
        with torch.no_grad():
            it(x, target=x)
        failing[0] = True
        with pytest.raises(ZeroDivisionError):
            it(x, target=x)
        failing[0] = False
        it(x[:1], target=x[:1]).backward()  # Fewer microbatches.
    assert timeline.steps == 2 and len(timeline.spans[0]) == 4
    it(x, target=x).backward()
    assert timeline.steps == 2


def test_record_without_a_loss_or_twice_is_an_error() -> None:
    plain = SplitPipe(nn.Sequential(nn.Linear(8, 8)), [1], devices=["cpu"])
    with pytest.raises(RuntimeError, match="loss_fn"), splitpipe.record(plain):
        pass
    _, it = twins(mlp(4), "zb-v")
    with splitpipe.record(it) as timeline:
        with pytest.raises(RuntimeError, match="already being recorded"), splitpipe.record(it):
            pass
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        print(timeline)


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
@pytest.mark.parametrize("by", ["balance", "cuts"])
@pytest.mark.parametrize("make", [handmade, turned])
def test_a_schedule_of_ones_own_runs_in_its_order(make: Any, by: str, backward: Any) -> None:
    plan = make()
    model = assert_transparent(mlp(4), torch.randn(7, 4), plan, plan.devices, chunks=plan.microbatches,
                               backward=backward, by=by)
    with splitpipe.record(model) as timeline:
        model(torch.randn(2 * plan.microbatches, 4), target=0.25)
    assert [[span.op for span in spans if span.op.kind != "W"] for spans in timeline.spans] == [
        [op for op in row if op.kind != "W"] for row in plan.rows]  # W that follow each other may be one.
