"""The benchmarks' image models: published sizes, and trained alike by a pipeline, by torchgpipe and by themselves."""

from __future__ import annotations

import copy
import doctest
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe.skip
from splitpipe import SplitPipe
from tests.helpers import scheduled, twin

ROOT = Path(__file__).resolve().parents[2]
Load = Callable[[str], ModuleType]

#: What torchgpipe's docs/benchmarks.rst publishes, and what the balances in its benchmarks/*/main.py add up to.
UNETS = [
    (5, 64, None, 241), (6, 72, "362.2M", 285), (11, 128, "2.21B", 505), (24, 128, "4.99B", 1077),
    (24, 160, "7.80B", 1077), (48, 160, "15.82B", 2133),
]
AMOEBANETS = [
    (18, 208, "81.5M", 24), (18, 256, None, 24), (18, 416, "319.0M", 24), (18, 544, "542.7M", 24),
    (36, 544, "1.06B", 42), (72, 512, "1.84B", 78),
]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Gives a file of benchmarks/models as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(f"models.{name}")


def small(load: Load, name: str, skip: Any = splitpipe.skip) -> nn.Sequential:
    """A small model in double precision, the same weights every time, without dropout."""
    torch.manual_seed(0)
    if name == "resnet":
        model = load("resnet").resnet((1, 2, 1, 1), width=4, classes=5, skip=skip)
    elif name == "unet":
        model = load("unet").unet(2, 2, 4, dropout=0.0, skip=skip)
    else:
        model = load("amoebanet").amoebanetd(layers=3, filters=16, skip=skip)
    return model.double()


def images(rows: int = 6) -> Tensor:
    return torch.randn(rows, 3, 64, 64, dtype=torch.float64)


def fixed(model: nn.Sequential) -> nn.Sequential:
    """The model whose norms take the same statistics for any microbatch."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    return model


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def rounded(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


every = pytest.mark.parametrize("name", ["resnet", "unet", "amoebanet"])


def test_resnet101_has_the_published_parameters_and_children(load):
    with torch.device("meta"):
        model = load("resnet").resnet101()
    assert (size(model), len(model)) == (44_549_160, 370)


@pytest.mark.parametrize(("num_convs", "channels", "parameters", "children"), UNETS)
def test_unet_has_the_published_parameters_and_children(load, num_convs, channels, parameters, children):
    with torch.device("meta"):
        model = load("unet").unet(5, num_convs, channels)
    assert len(model) == children
    assert parameters in (rounded(size(model)), None)


@pytest.mark.parametrize(("layers", "filters", "parameters", "children"), AMOEBANETS)
def test_amoebanet_has_the_published_parameters_and_children(load, layers, filters, parameters, children):
    with torch.device("meta"):
        model = load("amoebanet").amoebanetd(layers=layers, filters=filters, classes=1000)
    assert len(model) == children
    assert parameters in (rounded(size(model)), None)


def test_resnet_takes_images_of_any_size(load):
    model = load("resnet").resnet((1, 1, 1, 1), width=4, classes=5)
    assert [model(torch.randn(2, 3, *sizes)).shape for sizes in ((64, 64), (37, 50))] == [(2, 5)] * 2


def test_unet_gives_an_image_of_the_size_it_takes(load):
    model = load("unet").unet(3, 1, 4, 2, 6)
    for sizes in ((16, 16), (27, 38)):
        assert model(torch.randn(2, 2, *sizes)).shape == (2, 6, *sizes)


def test_amoebanet_gives_a_row_of_classes(load):
    assert load("amoebanet").amoebanetd(layers=3, filters=8, classes=7)(torch.randn(2, 3, 64, 32)).shape == (2, 7)


@pytest.mark.parametrize("sizes", [(0, 1, 4), (1, 0, 4), (1, 1, 3)])
def test_a_unet_of_impossible_sizes_is_refused(load, sizes):
    with pytest.raises(ValueError, match="found depth {}, num_convs {}, base_channels {}: expected".format(*sizes)):
        load("unet").unet(*sizes)


@pytest.mark.parametrize(("layers", "filters"), [(4, 16), (0, 16), (3, 12), (3, 0)])
def test_an_amoebanet_of_impossible_sizes_is_refused(load, layers, filters):
    with pytest.raises(ValueError, match=f"found layers {layers}, filters {filters}: expected"):
        load("amoebanet").amoebanetd(layers=layers, filters=filters)


@every
def test_the_examples_run(load, name):
    assert doctest.testmod(load(name)).failed == 0


@every
@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_a_pipeline_trains_as_the_model_alone(load, name, backward):
    twin.assert_transparent(
        fixed(small(load, name)), images(), twin.even(len(small(load, name)), 3), chunks=3, backward=backward
    )


@every
def test_a_pipeline_of_one_microbatch_trains_as_the_model_alone_with_batch_norm(load, name):
    twin.assert_transparent(small(load, name), images(), chunks=1, checkpoint="never")


@every
@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_a_scheduled_pipeline_trains_as_the_model_alone(load, name, schedule):
    scheduled.assert_transparent(fixed(small(load, name)), images(), schedule, chunks=3)


@every
def test_copies_and_pickles_compute_the_same(load, name):
    model, x = small(load, name).eval(), images(2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        pipe = SplitPipe(other, twin.even(len(other)), devices=["cpu"] * 2, chunks=2)
        torch.testing.assert_close(pipe(x), model(x))


@every
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_torchgpipe_trains_the_same_model_alike(load, name, checkpoint):
    torchgpipe = pytest.importorskip("torchgpipe", reason="needs torchgpipe to compare with")
    skip = importlib.import_module("torchgpipe.skip")
    ours, theirs = small(load, name), small(load, name, skip)
    options = {"devices": ["cpu"] * 3, "chunks": 3, "checkpoint": checkpoint}
    balance, x = twin.even(len(ours), 3), images()
    found = twin.step(SplitPipe(ours, balance, **options), x)
    expected = twin.step(torchgpipe.GPipe(theirs, balance, **options), x)
    twin.assert_same(found, expected, "output, gradient of the input, loss")
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (ours, theirs)]
    twin.assert_same(*gradients, "gradients")
