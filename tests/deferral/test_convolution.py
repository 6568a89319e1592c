"""Convolutions of all kinds: the gradients of the module, deferred."""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitpipe.deferral.accumulator import Total
from splitpipe.deferral.convolution import Convolution
from splitpipe.deferral.function import Context
from tests.helpers.deferring import Call, deferred, drop_in, in_more_ways, trained, tried
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same_tensors, step, twins

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3), (7, 4, 9)),
    "2d": (lambda: nn.Conv2d(4, 6, (3, 2)), (7, 4, 6, 5)),
    "3d": (lambda: nn.Conv3d(2, 3, 2), (7, 2, 4, 3, 5)),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (7, 4, 5, 5)),
    "groups": (lambda: nn.Conv1d(4, 6, 3, groups=2), (7, 4, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (7, 4, 5, 5)),
    "dilation": (lambda: nn.Conv2d(4, 6, 2, dilation=(2, 3)), (7, 4, 6, 7)),
    "stride": (lambda: nn.Conv2d(4, 6, 3, stride=(2, 1)), (7, 4, 6, 5)),
    "stride, 3d": (lambda: nn.Conv3d(2, 3, 2, stride=2, padding=1), (7, 2, 4, 3, 5)),
    "padding, a tuple": (lambda: nn.Conv2d(4, 6, 3, padding=(2, 1)), (7, 4, 5, 4)),
    "padding, 'same'": (lambda: nn.Conv2d(4, 6, (3, 5), padding="same"), (7, 4, 5, 6)),
    "padding, 'same', dilation": (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=2), (7, 4, 9)),
    "padding, circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (7, 4, 5, 5)),
    "padding, reflect": (lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="reflect"), (7, 4, 9)),
    "padding, 'same', circular": (lambda: nn.Conv1d(4, 6, 4, padding="same", padding_mode="circular"), (7, 4, 9)),
    "transposed, 1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (7, 4, 5)),
    "transposed, 2d": (lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1), (7, 4, 4, 3)),
    "transposed, 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=(1, 2, 1)), (7, 2, 3, 2, 3)),
    "transposed, output padding": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=(1, 0)),
                                   (7, 4, 4, 3)),
    "transposed, groups": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), (7, 4, 4, 3)),
    "transposed, dilation": (lambda: nn.ConvTranspose1d(4, 6, 3, dilation=2, bias=False), (7, 4, 5)),
}

#: In the essence.
SOME = ("1d", "2d", "3d", "groups", "stride", "dilation", "padding, a tuple", "padding, 'same'", "padding, circular",
        "transposed, 2d", "transposed, output padding")
EVEN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 4, padding="same"), (7, 4, 9)),
    "2d, one odd": (lambda: nn.Conv2d(4, 6, (3, 2), padding="same", bias=False), (7, 4, 5, 6)),
}


@pytest.fixture
def no_warning_of_even_kernels() -> Iterator[None]:
    """The plain module's convolution warns, once a process, that it copies."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
        yield


def assert_deferred(layer: nn.Module, shape: tuple[int, ...], way: dict[str, Any]) -> None:
    model = trained(layer, torch.randn(shape), **way)
    assert deferred(model) == {row.parameter: "Convolution" for row in model.deferral_report()}


@tried(LAYERS, SOME)
def test_a_convolution_is_deferred(name: str, way: dict[str, Any]) -> None:
    make, shape = LAYERS[name]
    assert_deferred(make(), shape, way)


@in_more_ways
@pytest.mark.parametrize("name", EVEN)
def test_an_even_kernel_that_keeps_the_size_is_deferred(
    name: str, way: dict[str, Any], no_warning_of_even_kernels: None
) -> None:
    make, shape = EVEN[name]
    assert_deferred(make(), shape, way)


@drop_in
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_channels_last(kind: Callable[..., nn.Module], way: dict[str, Any]) -> None:
    layer = kind(4, 6, 3).to(memory_format=torch.channels_last)
    x = torch.randn(7, 4, 5, 5).to(memory_format=torch.channels_last)
    model = trained(layer, x, **way)
    assert set(deferred(model)) == {"1.weight", "1.bias"}
    assert model[1].weight.grad.is_contiguous(memory_format=torch.channels_last)


@in_more_ways
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_get_no_gradient(frozen: str, way: dict[str, Any]) -> None:
    layer = nn.Conv1d(4, 6, 3)
    layer.get_parameter(frozen).requires_grad_(False)
    model = trained(layer, torch.randn(7, 4, 9), **way)
    assert deferred(model) == ({} if frozen == "weight" else {"1.weight": "Convolution"})
    assert model[1].get_parameter(frozen).grad is None


#: Calls of one kernel that are put together where they can be, and apart where not.
CALLS: dict[str, Callable[..., Any]] = {
    # Of the same shapes, so that the microbatches of the one could be put together with those of the other.
    "geometries": lambda x, w: F.conv1d(x, w, padding=1) + F.conv1d(x, w, padding=2, dilation=2),
    "strides": lambda x, w: F.conv1d(x, w).sum(2) + F.conv1d(x, w, stride=2).sum(2),
    "sizes of inputs": lambda x, w: F.conv1d(x, w).sum(2) + F.conv1d(x[..., 1:], w).sum(2),
    "samples without a batch": lambda x, w: torch.stack([F.conv1d(sample, w) for sample in x]),
}


@tried(CALLS)
def test_one_kernel_used_in_several_ways_gets_all_gradients(name: str, way: dict[str, Any]) -> None:
    assert_deferred(Call(CALLS[name], w=torch.randn(6, 4, 3)), (7, 4, 9), way)


def test_many_microbatches_are_one_kernel() -> None:
    options = {"chunks": 8, "checkpoint": "never", "stash_limit": 2**20}
    plain, model = twins(nn.Sequential(nn.Conv1d(4, 6, 3), nn.Tanh()), **options)
    x = torch.randn(16, 4, 9)
    with torch.autograd.profiler.profile() as profile:
        step(model, x)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::convolution_backward"] == 8 + 1  # The input gradients, and the weight's.
    step(plain, x)
    assert_same_tensors(model, plain)


def test_a_convolution_computes_the_wanted_gradients_alone() -> None:
    ctx: Any = Context(True, (False, True))
    ctx.geometry = (1,), (0,), (1,), False, (0,), 1
    weight = torch.randn(6, 4, 3)
    ctx.save_for_weight(torch.randn(2, 4, 9), weight)
    grad, bias = torch.randn(2, 6, 7), Total(torch.float64)
    Convolution.accumulate([None, bias], [(ctx, grad)])
    torch.testing.assert_close(bias.value, grad.sum((0, 2)))
