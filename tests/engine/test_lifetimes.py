"""A module with cuts, its batches and its threads go when nobody has them any more, without the garbage collector."""
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, attach


class Net(nn.Module):
    """Keeps hidden states for later, and computes with a parameter between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = [x]
        for layer in self.layers:
            kept.append(torch.tanh(layer(kept[-1])) * self.scale)
        y = kept[0] + kept[1] + kept[3]
        return {"loss": y.square().mean(), "y": y}


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


OPTIONS = [{}, {"checkpoint": "always"}, {"schedule": "1f1b"}, {"schedule": "zb-h1", "checkpoint": "always"}]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_nothing_stays(options: dict[str, Any], in_place: bool) -> None:
    others = {*threading.enumerate()}
    net = Net()
    parts = [weakref.ref(net), weakref.ref(net.layers[1]), weakref.ref(net.scale)]
    make: Any = attach if in_place else SplitPipe
    model = make(net, cuts=["layers.1", "layers.2"], devices=["cpu"] * 3, chunks=2, **options)
    x = torch.randn(4, 4)
    model(x)["loss"].backward()
    batch, started = weakref.ref(x), {*threading.enumerate()} - others
    output = model(x)
    output["loss"].backward()
    del output, x
    assert batch() is None, "the batch is kept by the model, or by a cycle"
    assert {*threading.enumerate()} - others == started, "threads are not kept from call to call"
    assert len(started) <= 2 + 3, "more than one thread a microbatch and one a stage"
    del model, net
    assert [part() for part in parts] == [None] * 3, "the module is kept, by a cycle"
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started), "threads are left behind"


class Losing(nn.Module):
    """Computes its own loss, and notes which of those before are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.losses: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def noted(self, y: Tensor, labels: Tensor) -> Tensor:
        self.alive.append(sum(loss() is not None for loss in self.losses))
        loss = (y - labels).square().mean()
        self.losses.append(weakref.ref(loss))
        return loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.layers(x)
        return y if labels is None else {"loss": self.noted(y, labels)}


@pytest.mark.parametrize("own", [False, True])
def test_a_microbatchs_loss_goes_with_its_backward(own: bool) -> None:
    net = Losing()
    more: dict[str, Any] = {} if own else {"loss_fn": net.noted}
    model = SplitPipe(net, cuts=["layers.1"], devices=["cpu"] * 2, chunks=6, schedule="1f1b", **more)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for _ in range(2):
        loss = model(x, labels=y)["loss"] if own else model(x, target=y)
        loss.backward()
        net.losses, net.alive, alive = [], [], net.alive
    assert alive == [0] * 6
