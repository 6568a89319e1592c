"""Steps that ran become a timeline, and nothing is recorded where nobody asked."""
from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe, schedule
from splitpipe.schedule import Timeline
from tests.helpers.covering import graded
from tests.helpers.scheduled import mlp, twins


@graded(
    {"name": schedule.names(), "backward": ["split", "autograd"], "checkpoint": ["always", "never"]},
    essence=[["backward"]], thorough=[["name"]],
)
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
