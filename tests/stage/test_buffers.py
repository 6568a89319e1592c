"""Buffers that forward writes to are written to once, though a checkpointed stage runs twice."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from splitpipe import SplitPipe
from tests.helpers.modules import module_of
from tests.helpers.twin import assert_same_tensors, twins

WAYS = [{"checkpoint": "always"}, {"checkpoint": "except_last"}, {"checkpoint": "always", "schedule": "1f1b"}]


def pair(*layers: nn.Module, **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    """A module and its pipeline, of which the last layer is the second stage."""
    if "schedule" in options:
        options["loss_fn"] = lambda y, _: y.square().mean()
    return twins(nn.Sequential(*layers), [len(layers) - 1, 1], **{"checkpoint": "always", "chunks": 2, **options})


def step(model: SplitPipe, x: Tensor) -> None:
    model.zero_grad()
    (model(x, target=torch.zeros(8)) if model.schedule.name != "gpipe" else model(x).square().mean()).backward()


def assert_step(plain: nn.Module, model: SplitPipe, given: Tensor | None = None) -> None:
    """A step of the model is that of the module on each of two microbatches."""
    x = torch.randn(8, 6) if given is None else given
    plain.zero_grad()
    torch.stack([plain(rows).square().mean() for rows in x.chunk(2)]).mean().backward()
    step(model, x)
    assert_same_tensors(model, plain)


def reads(self: Any, x: Tensor) -> Tensor:
    """Makes something of the output of a BatchNorm, and of its statistics."""
    y: Tensor = self.norm(x) * (1 + self.norm.running_mean)
    return y / (1.0 + self.norm.running_var.sum()) / float(self.norm.num_batches_tracked)


def codebook(self: Any, x: Tensor) -> Tensor:
    """Averages its inputs and counts its calls through ``.data``, which makes no new versions."""
    self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    self.calls.data.add_(1)
    return (x - self.mean.clone()) * int(self.calls)  # type: ignore[no-any-return]


def average(self: Any, x: Tensor) -> Tensor:
    """Divides by a buffer, an average of what passes, after it has replaced it."""
    self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean(0)
    return x / self.mean.clone()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(6),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6, momentum=None),
    "a layer that reads": lambda: module_of(reads, norm=nn.BatchNorm1d(6)),
    "written through .data": lambda: module_of(
        codebook, mean=nn.Buffer(torch.zeros(6)), calls=nn.Buffer(torch.tensor(0))),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)),
    "a replaced average": lambda: module_of(average, mean=nn.Buffer(torch.ones(6))),
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_buffers_of_every_kind_are_written_once_and_their_layers_recomputed(name: str, way: dict[str, Any]) -> None:
    plain, model = pair(nn.Linear(6, 6), LAYERS[name](), nn.Tanh(), nn.Linear(6, 6), **way)
    for _ in range(3):
        assert_step(plain, model)


def building(self: Any, x: Tensor) -> Tensor:
    """Builds a layer in its first forward."""
    if not hasattr(self, "layer"):
        self.layer = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(x.dtype)
    return self.layer(x)  # type: ignore[no-any-return]


def growing(self: Any, x: Tensor) -> Tensor:
    """Has a table that grows with its input, as rotary embeddings do; an attribute says how far it reaches."""
    if (needed := int(x.detach().abs().sum())) > self.reach:
        self.reach = needed
        self.table = torch.linspace(1, needed, 6)
    return x * self.table  # type: ignore[no-any-return]


def averaging(self: Any, x: Tensor) -> Tensor:
    """Has a buffer that is None at first."""
    mean = x.detach().abs().mean(0)
    self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
    return x / self.mean.clone()  # type: ignore[no-any-return]


@pytest.mark.draws
@pytest.mark.parametrize("way", WAYS[::2], ids=str)
@pytest.mark.parametrize("make", [nn.LazyBatchNorm1d, lambda: module_of(building),
                                  lambda: (layer := module_of(averaging), layer.register_buffer("mean", None))[0],
                                  lambda: module_of(growing, table=nn.Buffer(torch.ones(6)), reach=0)])
def test_a_layer_that_changes_itself_is_right_or_says_to_repeat_the_step(make, way):
    options = {"loss_fn": lambda y, _: y.square().mean()} if "schedule" in way else {}
    model = SplitPipe(nn.Sequential(nn.Linear(6, 6), make(), nn.Linear(6, 2)), [2, 1], devices=["cpu"] * 2, chunks=2,
                      **way, **options)
    for size in (1.0, 1.0, 5.0):
        x = torch.randn(8, 6) * size
        try:
            step(model, x)
        except RuntimeError as error:
            assert "Repeat the step" in str(error)
        assert_step(copy.deepcopy(nn.Sequential(*model)), model, x)


def test_a_layer_that_begins_to_write_to_a_buffer_is_an_error_once() -> None:
    def scaling(self: Any, x: Tensor) -> Tensor:
        if begun:
            self.scale.mul_(2)
        return x * self.scale.clone()

    begun: list[bool] = []
    plain, model = pair(nn.Linear(6, 6), module_of(scaling, scale=nn.Buffer(torch.ones(6))))
    assert_step(plain, model)
    begun.append(True)
    with pytest.raises(RuntimeError, match=r"buffer 'scale' of stage 1 \(cpu\) was changed.*Repeat the step"):
        step(model, torch.randn(8, 6))
    plain.load_state_dict(model.state_dict())
    assert_step(plain, model)
