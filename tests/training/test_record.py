"""What really happened: steps that ran become a timeline, and nothing is noted where nobody records."""
from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from splitpipe import SplitPipe, schedule
from splitpipe.schedule import Timeline
from splitpipe.training import record
from tests.helpers.covering import graded

CPU = ["cpu", "cpu"]


def model(name: str = "zb-v", chunks: int = 4, **options: Any) -> SplitPipe:
    stages = 2 * schedule.build(name, 1, 1).stages
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(stages)]
    return SplitPipe(nn.Sequential(*layers), [1] * stages, devices=CPU, chunks=chunks, schedule=name,
                     loss_fn=nn.MSELoss(), **options)


def step(it: SplitPipe, rows: int = 8) -> Tensor:
    x = torch.randn(rows, 8)
    loss = it(x, target=x)
    loss.backward()
    return loss


@graded(
    {"name": schedule.names(), "backward": ["split", "autograd"], "checkpoint": ["always", "never"]},
    essence=[["backward"]], thorough=[["name"]],
)
def test_each_device_has_done_its_row_in_order(name: str, backward: str, checkpoint: str, tmp_path: Path) -> None:
    it = model(name, backward=backward, checkpoint=checkpoint)
    x = torch.randn(8, 8)
    expected = it(x, target=x)
    with it.record() as timeline:
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


def test_its_costs_plan_a_schedule() -> None:
    it = model("zb-h1")
    with it.record() as timeline:
        for _ in range(3):
            step(it)
    assert timeline.steps == 3
    assert schedule.simulate(it.schedule, timeline.costs()).makespan == timeline.plan.makespan > 0
    schedule.search(devices=2, chunks=4, costs=timeline.costs(), memory=2, seconds=0.1)


@pytest.mark.parametrize(("name", "options", "lengths"), [
    (schedule.build("gpipe", 1, 3, split=True), {"chunks": 3}, {"F": 1000, "B": 1000, "W": 1000 / 3}),
    # A recomputation is a part of its B: computed twice for a second each, the weight gradient once.
    ("1f1b", {"chunks": 2, "checkpoint": "always", "backward": "autograd"}, {"F": 1000, "BW": 3000}),
])
def test_lengths_of_ops(name: Any, options: Any, lengths: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of W is shared among them."""
    clock = itertools.count()
    monkeypatch.setattr(record, "perf_counter", lambda: float(next(clock)))
    it = SplitPipe(nn.Sequential(nn.Linear(8, 8)), [1], devices=["cpu"], schedule=name, loss_fn=nn.MSELoss(), **options)
    with it.record() as timeline:
        step(it)
    assert {span.op.kind: span.end - span.start for span in timeline.spans[0]} == pytest.approx(lengths)


def test_what_a_microbatch_saves_is_counted() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh())
    it = SplitPipe(layers, [1, 2], devices=CPU, chunks=4, schedule="zb-h1", loss_fn=lambda y, t: y.mean())
    with it.record() as timeline:
        step(it)
        step(it)
    assert timeline.held is not None
    # Rows of 32 bytes, two a microbatch; the input of the first stage is the batch's, which lives on anyway.
    assert tuple(timeline.held.forward)[1] == 2 * 64  # The linear layer's input, the tanh's output.
    assert tuple(timeline.held.backward_weight)[1] == 2 * 64  # The linear layer's input and output gradient.
    assert timeline.peak_bytes is not None and max(timeline.peak_bytes) > 0


def test_what_a_loss_saves_of_the_target_is_not_counted() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    it = SplitPipe(layers, [1, 1], devices=CPU, chunks=4, schedule="1f1b", loss_fn=nn.functional.mse_loss)
    with it.record() as timeline:
        it(torch.randn(8, 4), target=torch.randn(8, 4)).backward()
    assert timeline.held is not None
    assert tuple(timeline.held.forward)[1] == 2 * 2 * 4 * 4  # Of two rows: the layer's input, and its output.


def test_only_training_steps_that_completed_are_recorded() -> None:
    failing = [False]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if failing[0]:
            raise ZeroDivisionError
        return (output - target).square().mean()

    it = SplitPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), [1, 1], devices=CPU, chunks=2, schedule="1f1b",
                   loss_fn=loss_fn)
    x = torch.randn(4, 8)
    with it.record() as timeline:
        step(it)
        it(x)
        with torch.no_grad():
            it(x, target=x)
        failing[0] = True
        with pytest.raises(ZeroDivisionError):
            it(x, target=x)
        failing[0] = False
        step(it, 1)  # Fewer microbatches.
    assert timeline.steps == 2 and len(timeline.spans[0]) == 4
    step(it)
    assert timeline.steps == 2


def test_an_error_in_the_block_keeps_what_was_recorded() -> None:
    it = model()
    with pytest.raises(KeyError), it.record() as timeline:
        step(it)
        raise KeyError
    assert timeline.steps == 1
    with it.record() as other:
        step(it)
    assert other.steps == 1


def test_recording_hides_nothing_from_saved_tensor_hooks() -> None:
    it = model(checkpoint="never")
    packed: list[Tensor] = []
    counts = []
    for number in range(6):
        packed.clear()
        with saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
            if number % 2:
                step(it)
            else:
                with it.record() as timeline:
                    step(it)
                assert timeline.steps == 1 and timeline.held is None  # Their owner alone sees what layers save.
        counts.append(len(packed))
    assert counts[0] > 0 and len(set(counts)) == 1


def test_record_says_what_it_needs() -> None:
    plain = SplitPipe(nn.Sequential(nn.Linear(8, 8)), [1], devices=["cpu"])
    with pytest.raises(RuntimeError, match="loss_fn"), plain.record():
        pass
    it = model()
    with it.record() as timeline:
        with pytest.raises(RuntimeError, match="already being recorded"), it.record():
            pass
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        print(timeline)


def test_a_device_that_has_nothing_to_do_is_recorded_idle() -> None:
    rows = [[schedule.Op(kind, stage, 0) for kind in ("F", "B", "W")] for stage in range(2)]
    idle = schedule.Schedule([rows[0], [], rows[1]], [0, 2])
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    it = SplitPipe(layers, [1, 1], devices=["cpu"] * 3, chunks=1, schedule=idle, loss_fn=nn.MSELoss())
    with it.record() as timeline:
        step(it)
    assert [len(row) for row in timeline.spans] == [3, 0, 3] and "device 1" in str(timeline)


def test_a_step_is_of_the_recording_that_it_began_in() -> None:
    class Ends(nn.Module):
        """Ends the recording, and begins another one, in the midst of a step."""

        blocks: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            if self.blocks:
                self.blocks.pop().__exit__(None, None, None)
                self.other = it.record()
                self.timeline = self.other.__enter__()
            return x * 1

    layers = nn.Sequential(nn.Linear(8, 8), Ends())
    it = SplitPipe(layers, [1, 1], devices=CPU, chunks=2, schedule="1f1b", loss_fn=nn.MSELoss())
    first = it.record()
    first.__enter__()
    Ends.blocks.append(first)
    step(it)
    step(it)
    layers[1].other.__exit__(None, None, None)
    assert layers[1].timeline.steps == 1
    assert str(layers[1].timeline)
