"""A SplitPipe with a schedule as an nn.Module: its arguments, inside another model, in several threads."""
from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, attach, schedule
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mlp, stages_of, twins
from tests.helpers.twin import assert_same, assert_same_tensors

CPU = ["cpu"] * 2


def batch(rows: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randn(rows, 4)


def wrap(balance: Any = (1, 1, 1, 1), **options: Any) -> SplitPipe:
    return SplitPipe(mlp(4), balance, **{"devices": CPU, "chunks": 4, "loss_fn": F.mse_loss, **options})


# Arguments


@pytest.mark.parametrize(
    ("name", "balance", "text"),
    [
        ("zb-v", [2, 2], r"2 stages for 2 devices: schedule 'zb-v' expects 2 stages per device.*balance of 4"),
        ("1f1b", [1, 1, 1, 1], "4 stages for 2 devices: schedule '1f1b' expects one stage per device"),
        ("interleaved-1f1b", [2, 1, 1], "3 stages for 2 devices.*a multiple of the number of devices"),
        (schedule.build("1f1b", 3, 8), [2, 2],
         "3 stages: expected 2.*3 rows: expected 2.*8 microbatches: expected 4, the number of chunks"),
    ],
)
def test_a_schedule_for_other_sizes_is_an_error_that_names_the_right_ones(name: Any, balance: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){text}"):
        wrap(balance, schedule=name)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    rows = [[schedule.Op("F", 0, 0), schedule.Op("BW", 0, 0)], [schedule.Op("BW", 1, 0), schedule.Op("F", 1, 0)]]
    with pytest.raises(ValueError, match="1BW0"):
        wrap([2, 2], schedule=schedule.Schedule(rows, [0, 1]), chunks=1)


def test_devices_default_to_the_cpu_for_every_row(no_accelerator: None) -> None:
    model = wrap(schedule="zb-v", devices=None)
    assert model.devices == [torch.device("cpu")] * 4 and model.schedule.devices == 2


@pytest.mark.parametrize("name", schedule.names())
def test_options_can_be_read(name: str) -> None:
    model = twins(mlp(4), name, 4 // stages_of(name), chunks=4)[1]
    assert model.schedule == schedule.build(name, 4 // stages_of(name), 4)
    assert model.checkpoint == ("except_last" if name == "gpipe" else "never")
    assert f"schedule={name!r}" in repr(model)


# State


def replace_layer(module: Any) -> None:
    torch.manual_seed(1)
    setattr(module, "2", nn.Linear(4, 4))


def replace_parameter(module: Any) -> None:
    module[0].weight = nn.Parameter(torch.ones(4, 4) / 3)


def replace_data(module: Any) -> None:
    module[0].weight.data = torch.ones(4, 4) / 2


class Chain(nn.Module):
    """The layers of an nn.Sequential, called one by one."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self._modules.update(layers.named_children())

    def __getitem__(self, number: int) -> Any:
        return self._modules[str(number)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("way", ["balance", "cuts", "cuts, drop-in"])
def test_layers_and_parameters_may_be_replaced(way: str, mode: Any) -> None:
    plain: Any
    plain, model = twins(mlp(4), "zb-v", 2, loss_fn=F.mse_loss, chunks=3, checkpoint=mode)
    if way != "balance":
        plain = Chain(plain)
        how: Any = {} if way == "cuts, drop-in" else {"schedule": "1f1b", "loss_fn": F.mse_loss}
        model = attach(copy.deepcopy(plain), ["2"], devices=["cpu"] * 2, chunks=4, checkpoint=mode, **how)
    changes = (
        lambda module: None, lambda module: None, replace_layer, replace_parameter, replace_data,
        lambda module: module[0].weight.requires_grad_(False), lambda module: module[0].weight.requires_grad_(True),
        lambda module: module.to(torch.float32),
    )
    for change in changes:
        for module in (plain, model):
            change(module)
            module.zero_grad()
        x, y = (each.to(plain[0].weight.dtype) for each in batch())
        loss = F.mse_loss(model(x), y) if "drop-in" in way else model(x, target=y)
        loss.backward()
        F.mse_loss(plain(x), y).backward()
        assert_same_tensors(model, plain)


# What torch does to a model


class Inner(nn.Module):
    """Adds the loss, or the output, of a model."""

    def __init__(self, loss: bool) -> None:
        super().__init__()
        self.loss = loss
        self.model = SplitPipe(mlp(4), [2, 2], devices=CPU, chunks=2, schedule="1f1b", loss_fn=F.mse_loss)

    def forward(self, x: Tensor) -> Tensor:
        return (self.model(x, target=torch.ones_like(x)).expand_as(x) if self.loss else self.model(x)) + x


class Unwrapped(Inner):
    def forward(self, x: Tensor) -> Tensor:
        y = nn.Sequential(*self.model)(x)
        return (F.mse_loss(y, torch.ones_like(x)).expand_as(x) if self.loss else y) + x


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("loss", [True, False])
def test_a_model_with_a_schedule_is_a_layer_of_another(loss: bool, backward: Any) -> None:
    plain, model = twins(nn.Sequential(nn.Linear(4, 4), Inner(loss), nn.Linear(4, 4)), "zb-h1", 3, loss_fn=F.mse_loss,
                         chunks=1 if loss else 3, backward=backward)
    plain[1].__class__ = Unwrapped
    x, y = batch()
    for each in (model(x, target=y), F.mse_loss(plain(x), y)):
        each.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert_same_tensors(model, plain)


class Waiting(nn.Module):
    """Once told to, forward waits until the other has tried."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.tried, self.wait = threading.Event(), threading.Event(), False

    def forward(self, x: Tensor) -> Tensor:
        if self.wait:
            self.inside.set()
            assert self.tried.wait(60)
        return x

    def __deepcopy__(self, memo: object) -> Waiting:
        return Waiting()


def test_models_that_share_layers_may_be_called_at_once() -> None:
    gate = Waiting()
    module, x = nn.Sequential(nn.Linear(4, 4), gate), torch.randn(4, 4)
    one, other = (twins(module, "1f1b", 2, loss_fn=F.mse_loss, chunks=1)[1] for _ in range(2))
    for model in (one, other):
        model(x, target=x)  # A first run is made alone.
    weight, seen = module[0].weight, []
    weight.register_hook(seen.append)
    losses: list[Tensor] = []
    gate.wait = True
    thread = threading.Thread(target=lambda: losses.append(one(x, target=x)))
    thread.start()
    assert gate.inside.wait(60)
    gate.wait = False
    losses.append(other(x, target=x))  # From beginning to end during the one.
    gate.tried.set()
    thread.join(60)
    assert weight.grad is None and not seen
    (expected,) = torch.autograd.grad(F.mse_loss(module(x), x), [weight])
    seen.clear()
    for loss in losses:
        loss.backward()
    assert_same(seen, [expected, expected], "what the hook saw")
    assert_same(weight.grad, 2 * expected, "gradient")
