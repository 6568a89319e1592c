"""Which convolutions a stage splits: on a CPU, those that are faster for it."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe
from splitpipe.deferral import convolution
from splitpipe.deferral.convolution import Convolution
from tests.helpers.deferring import deferred, left
from tests.helpers.twin import assert_transparent, step

WHY = "convolution: its gradients would take longer separately"


#: Whether weight gradients fill idle time, and whether they wait for other microbatches.
Store = tuple[bool, bool]
FILLS, GATHERS, NEITHER = (True, True), (False, True), (False, False)


def pays(layer: nn.Module, *shape: int, store: Store, device: str = "cpu") -> bool:
    """Whether the stage gains by splitting a convolution of an input of this shape."""
    layer = layer.to(device)
    transposed = isinstance(layer, nn.ConvTranspose2d)
    assert isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d))
    geometry = layer.stride, layer.padding, layer.dilation, transposed, layer.output_padding, layer.groups
    x = torch.empty(shape, device=device)
    return Convolution.pays(x, layer.weight, geometry, *store)


@pytest.mark.parametrize("store", [FILLS, GATHERS, NEITHER])
def test_any_pays_on_another_device(store: Store) -> None:
    assert pays(nn.Conv2d(1, 1, 1), 1, 1, 1, 1, store=store, device="meta")


@pytest.mark.parametrize(("layer", "shape", "where"), [
    (nn.Conv2d(64, 64, 3), (1, 64, 32, 32), {FILLS}),  # Many multiplications.
    (nn.Conv2d(64, 64, 3), (1, 64, 16, 16), set()),
    (nn.Conv2d(64, 64, 3, groups=64), (1, 64, 32, 32), set()),
    (nn.Conv2d(256, 256, 3), (1, 256, 4, 4), {GATHERS}),  # A large weight that few rows use.
    (nn.Conv2d(256, 256, 3), (32, 256, 4, 4), {FILLS}),
    (nn.Conv2d(256, 256, 1), (1, 256, 2, 2), set()),
])
def test_where_a_convolution_pays(layer: nn.Module, shape: tuple[int, ...], where: set[Store]) -> None:
    assert {store for store in (FILLS, GATHERS, NEITHER) if pays(layer, *shape, store=store)} == where


@pytest.mark.parametrize("store", [FILLS, GATHERS])
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_transposed_convolutions_pay_alike(size: int, store: Store) -> None:
    given = pays(nn.Conv2d(128, 256, 3, stride=2), 1, 128, 2 * size, 2 * size, store=store)
    assert pays(nn.ConvTranspose2d(256, 128, 3, stride=2), 1, 256, size, size, store=store) == given


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 256, 1, bias=False), nn.Tanh(), nn.Conv2d(256, 256, 3, bias=False), nn.Tanh())


def test_drop_in_splits_a_convolution_if_that_pays() -> None:
    model = assert_transparent(layers().double(), torch.randn(6, 3, 6, 6, dtype=torch.float64), [2, 2], chunks=3,
                               checkpoint="never")
    assert deferred(model) == {"2.weight": "Convolution"}
    assert left(model) == {"0.weight": WHY}


def test_a_drop_in_pipeline_on_the_cpu_fills_no_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_MANY", 2**18)
    convolutions = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh())
    assert pays(convolutions[0], 2, 8, 32, 32, store=FILLS)
    model = SplitPipe(convolutions, [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    step(model, torch.randn(4, 8, 32, 32))
    assert deferred(model) == {}


@pytest.mark.parametrize(("schedule", "deferring"), [("zb-h1", True), ("1f1b", False)])
def test_scheduled_splits_a_convolution_if_it_fills_idle_time(
    schedule: str, deferring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_MANY", 2**18)
    model = SplitPipe(layers(), [2, 2], devices=["cpu"] * 2, chunks=4, schedule=schedule,
                      loss_fn=lambda y, _: y.square().mean())
    for _ in range(2):
        model(torch.randn(8, 3, 6, 6), target=torch.zeros(8)).backward()
    assert deferred(model) == ({"2.weight": "Convolution"} if deferring else {})


@pytest.mark.thorough
def test_large_microbatches_are_not_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {}
    for limit in (2**19, 0):
        monkeypatch.setattr(convolution, "_LARGE", limit)
        model = SplitPipe(layers(), [2, 2], devices=["cpu"] * 2, chunks=4, checkpoint="never")
        with torch.autograd.profiler.profile() as profile:
            step(model, torch.randn(8, 3, 6, 6))
        counts = {event.key: event.count for event in profile.key_averages()}
        calls[limit] = counts["aten::convolution_backward"]
    assert calls == {2**19: 4 + 4 + 1, 0: 4 + 4 + 4}  # The first layer's, input gradients and weight gradients.
