"""Layers that are more than functions of their input, by a schedule: skips, BatchNorm, dropout, buffers."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, schedule
from splitpipe.skip import Namespace
from tests.helpers.covering import graded, pairs, pairwise
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import assert_transparent, mean, mlp, stages_of, twins
from tests.helpers.skipping import popping, stashing
from tests.helpers.twin import assert_same, assert_same_tensors


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


def in_any_order() -> tuple[nn.Module, nn.Module]:
    return (stashing("a", "b", "c")(lambda x, layer: (layer(x), layer(x) * 2, layer(x).cos(), x.tanh())),
            popping("c", "a", "b")(lambda x, scale, c, a, b: x + 2 * a.sin() + 3 * b.cos() * c))


def without_gradient() -> tuple[nn.Module, nn.Module]:
    return (stashing("a", "b", "c")(lambda x, layer: (x.detach(), (x, None, 3), None, x * 2)),
            popping("a", "b", "c")(lambda x, scale, a, b, c: x + a * b[2] if c is None and b[1] is None else 0 * x))


def the_skip_alone() -> tuple[nn.Module, nn.Module]:
    return stashing("a")(lambda x, layer: (layer(x), x.detach())), popping("a")(lambda x, scale, a: x + a)


@pairwise(
    make=[in_any_order, without_gradient, the_skip_alone], between=[0, 1], name=["1f1b", "zb-h1"],
    checkpoint=["never", "always"],
)
def test_skips_of_all_kinds(make: Any, between: int, name: str, checkpoint: Any) -> None:
    give, take = make()
    layers = nn.Sequential(nn.Linear(4, 4), give, *[nn.Tanh()] * between, take, nn.Linear(4, 4))
    assert_transparent(layers, torch.randn(7, 4), name, len(layers), chunks=3, checkpoint=checkpoint)


# BatchNorm


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 4))


@graded(
    {"checkpoint": ["never", "always"], "name": schedule.names()}, essence=[["checkpoint"]], thorough=[["name"]]
)
def test_deferred_batch_norm_has_the_batchs_statistics(name: str, checkpoint: Any) -> None:
    """Of the first norm at least, whose input no norm has changed."""
    layers = nn.Sequential(nn.BatchNorm1d(4), *mlp(2 * stages_of(name)))
    plain = copy.deepcopy(layers)
    balance = [2] + [1] * (2 * stages_of(name) - 1)
    _, model = twins(layers, name, 2, balance, chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    for rows in (8, 11, 6):
        x = torch.randn(rows, 4) * 3 + 1
        plain(x)
        model(x, target=0.25).backward()
        assert_same(dict(model[0].named_buffers()), dict(plain[0].named_buffers()), "statistics")


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_deferred_batch_norm_is_that_of_drop_in(name: str) -> None:
    layers = normed()
    dropin = SplitPipe(copy.deepcopy(layers), [2, 3], devices=["cpu"] * 2, chunks=4, deferred_batch_norm=True)
    _, model = twins(layers, name, 2, chunks=4, deferred_batch_norm=True)
    for rows in (8, 11):
        x = torch.randn(rows, 4)
        mean(dropin(x), 0.25).backward()
        model(x, target=0.25).backward()
    assert_same(dict(model.named_buffers()), dict(dropin.named_buffers()), "statistics")
    assert_same_tensors(model, dropin)


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


class Both(nn.Module):
    """Its input, and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, (self.weight * 2).sin().expand_as(x)


class Over(nn.Module):
    """Works in place."""

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return given.relu_() if isinstance(given, Tensor) else given[0].relu_() + given[1]


@pytest.mark.parametrize("first", [nn.Identity(), nn.Flatten(), Both()])
def test_a_stage_may_write_to_what_the_one_before_hands_on(first: nn.Module) -> None:
    """On one device it is the memory of that one's own input, which is checkpointed."""
    module = nn.Sequential(nn.Linear(6, 6), first, Over(), nn.Linear(6, 6))
    # From the second step on it is known that the stage itself writes to nothing.
    assert_transparent(module, torch.randn(8, 6), "1f1b", devices=4, chunks=2, checkpoint="always")
