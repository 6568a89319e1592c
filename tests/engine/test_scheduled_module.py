"""A SplitPipe with a schedule: its arguments, inside another model, skips and BatchNorm."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, schedule
from splitpipe.skip import Namespace
from tests.helpers.covering import graded, pairs
from tests.helpers.deferring import double as double
from tests.helpers.modules import module_of
from tests.helpers.scheduled import assert_transparent, mlp, stages_of, twins
from tests.helpers.skipping import popping, stashing
from tests.helpers.twin import assert_same

CPU = ["cpu"] * 2


def wrap(balance: Any = (1, 1, 1, 1), **options: Any) -> SplitPipe:
    return SplitPipe(mlp(4), balance, **{"devices": CPU, "chunks": 4, "loss_fn": F.mse_loss, **options})


@pytest.mark.parametrize(
    ("name", "balance", "text"),
    [
        ("zb-v", [2, 2], r"2 stages for 2 devices: schedule 'zb-v' expects 2 stages per device.*balance of 4"),
        ("1f1b", [1, 1, 1, 1], "4 stages for 2 devices: schedule '1f1b' expects 1 stage per device"),
        ("interleaved-1f1b", [2, 1, 1], "3 stages for 2 devices.*a multiple of the number of devices"),
        (schedule.build("1f1b", 3, 8), [2, 2],
         "3 stages, 3 rows and 8 microbatches: expected 2, .* 2, one per device, and 4, as chunks is"),
    ],
)
def test_a_schedule_for_other_sizes_is_an_error_that_names_the_right_ones(name: Any, balance: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){text}"):
        wrap(balance, schedule=name)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    rows = [[schedule.Op("F", 0, 0), schedule.Op("BW", 0, 0)], [schedule.Op("BW", 1, 0), schedule.Op("F", 1, 0)]]
    with pytest.raises(ValueError, match="1BW0"):
        wrap([2, 2], schedule=schedule.Schedule(rows, [0, 1]), chunks=1)


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("loss", [True, False])
def test_a_model_with_a_schedule_is_a_layer_of_another(loss: bool, backward: Any) -> None:
    """Which adds its loss, or its output."""
    def adding(self: Any, x: Tensor) -> Tensor:
        if not loss:
            return self.model(x) + x  # type: ignore[no-any-return]
        y = F.mse_loss(self.model(x), x) if isinstance(self.model, nn.Sequential) else self.model(x, target=x)
        return y.expand_as(x) + x  # type: ignore[no-any-return]

    plain = nn.Sequential(nn.Linear(4, 4), module_of(adding, model=mlp(4)), nn.Linear(4, 4))
    layers = copy.deepcopy(plain)
    layers[1].model = SplitPipe(layers[1].model, [2, 2], devices=CPU, chunks=2, schedule="1f1b", loss_fn=F.mse_loss)
    model = SplitPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=1 if loss else 3, schedule="zb-h1",
                      loss_fn=F.mse_loss, backward=backward)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    for each in (model(x, target=y), F.mse_loss(plain(x), y)):
        each.backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], "gradients")


def test_a_loss_that_was_dropped_without_a_backward_is_warned_of_once() -> None:
    _, model = twins(mlp(5), "1f1b", 2, chunks=2)
    x = torch.randn(4, 4)
    kept = model(x, target=0.25) + model(x, target=0.25)  # The first one is dropped, its graph is not.
    with torch.no_grad():
        model(x, target=0.25)
    kept.backward()
    model(x, target=0.25)
    with pytest.warns(UserWarning, match=r"last call was dropped without a backward: .* Expected loss.backward\(\)"):
        model(x, target=0.25)
    model(x, target=0.25).backward()


def skipping(stages: int, spans: list[tuple[int, int]]) -> nn.Sequential:
    """A layer a stage, and skips between some of them."""
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(stages)]
    for source, target in spans:
        space = Namespace()
        layers[source] = nn.Sequential(layers[source], stashing("skip")().isolate(space))  # type: ignore[attr-defined]
        layers[target] = nn.Sequential(popping("skip")().isolate(space), layers[target])  # type: ignore[attr-defined]
    return nn.Sequential(*layers)


#: On a V of four devices: to the next device and back, down, up, to the other stage of the same one, over all.
SPANS = [[(0, 7)], [(3, 4)], [(1, 2)], [(5, 6)], [(0, 3)], [(2, 6)], [(1, 6), (0, 7), (3, 5)], [(0, 2), (2, 4), (4, 7)]]
SKIPS: dict[str, list[Any]] = {
    "name": ["zb-v", "v-min", "1f1b-v"], "spans": SPANS, "backward": ["split", "autograd"],
    "checkpoint": ["never", "always"],
}


@graded(SKIPS, essence=[["name"]], thorough=pairs([*SKIPS]))
def test_skips_go_down_and_up_a_v(name: str, spans: list[tuple[int, int]], backward: Any, checkpoint: Any) -> None:
    assert_transparent(skipping(8, spans), torch.randn(7, 4), name, 4, chunks=3, backward=backward,
                       checkpoint=checkpoint, steps=1)


@graded(
    {"by": ["balance", "cuts"], "checkpoint": ["never", "always"], "name": schedule.names()},
    essence=[["by"], ["checkpoint"]], thorough=[["by", "name"]],
)
def test_deferred_batch_norm_has_the_batchs_statistics(by: str, name: str, checkpoint: Any) -> None:
    """Of the first norm at least, whose input no norm has changed."""
    layers = nn.Sequential(nn.BatchNorm1d(4), *mlp(2 * stages_of(name)))
    plain = copy.deepcopy(layers)
    balance = [2] + [1] * (2 * stages_of(name) - 1)
    _, model = twins(layers, name, 2, balance, by=by, chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    for rows in (8, 11, 6):
        x = torch.randn(rows, 4) * 3 + 1
        plain(x)
        model(x, target=0.25).backward()
        assert_same(dict(model[0].named_buffers()), dict(plain[0].named_buffers()), "statistics")
