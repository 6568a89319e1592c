"""Layers with effects beside their output, with a schedule: skips, BatchNorm, dropout."""
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
from tests.helpers.scheduled import assert_transparent, mlp, stages_of, twins
from tests.helpers.skipping import popping, stashing
from tests.helpers.twin import assert_same


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


# BatchNorm


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


# Randomness


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 4))


def seeded(model: SplitPipe, steps: int = 2) -> list[Any]:
    torch.manual_seed(7)
    found = []
    for _ in range(steps):
        model.zero_grad()
        x = torch.randn(7, 4)
        loss = model(x, target=0.25)
        loss.backward()
        found.append((loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_all_schedules_and_checkpoints_draw_the_same(name: str) -> None:
    layers = dropping()
    models = [twins(copy.deepcopy(layers), each, 2, [2, 1, 1, 1] if each == "zb-v" else [2, 3], chunks=3,
                    checkpoint=checkpoint)[1] for each in ("gpipe", name)
              for checkpoint in ("never", "except_last", "always")]
    if name == "zb-v":  # Other stages draw other numbers.
        models = models[3:]
    first, *others = [seeded(model) for model in models]
    for other in others:
        assert_same(other, first, "steps")


def test_the_loss_function_draws_too_and_each_step_other_numbers() -> None:
    def loss_fn(output: Tensor, target: Any) -> Tensor:
        return F.dropout(output, 0.5).square().mean()

    _, model = twins(mlp(4), "zb-v", 2, loss_fn=loss_fn, chunks=3)
    assert_same(seeded(model), seeded(model), "steps")
    x = torch.randn(7, 4)
    assert model(x, target=0.25) != model(x, target=0.25)
