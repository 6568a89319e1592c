"""The static facts of a model are found again when the model has changed."""
from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitpipe import SplitPipe
from splitpipe.core.stream import Place
from splitpipe.partition.blocks import Blocks
from splitpipe.partition.homes import Homes
from splitpipe.stage.layers import code_layers
from tests.helpers.twin import assert_same_tensors

CPU = ["cpu"] * 2


def trained(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = module(x).square().mean()
    loss.backward()
    return loss


def add_layer(first: Any) -> None:
    first.add_module("more", nn.Linear(4, 4, bias=False))
    nn.init.ones_(first.more.weight)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a parameter": lambda first: setattr(first[0], "weight", nn.Parameter(torch.full((4, 4), 0.5))),
    "a module": lambda first: first.__setitem__(1, nn.Softplus()),
    "a further one": add_layer,
    "a mode": lambda first: first.eval(),
    "a flag": lambda first: first[0].weight.requires_grad_(False),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_changes_between_two_steps_counts_in_the_second(how: str, checkpoint: Any) -> None:
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.0)), nn.Linear(4, 2))
    model = SplitPipe(copy.deepcopy(plain), [1, 1], devices=CPU, chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 4)
    for each in (plain, model):
        trained(each, x)
        CHANGES[how](list(each.children())[0])
        each.zero_grad()
    torch.testing.assert_close(trained(model, x), trained(plain, x))
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_computed_parameters_of_one_call_are_not_kept_after_it(schedule: Any) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = SplitPipe(layers, [1, 1], devices=CPU, chunks=2, schedule=schedule, loss_fn=nn.MSELoss())
    computed = model[1].weight * 2  # type: ignore[operator]
    gone = weakref.ref(computed)
    functional_call(model, {"1.weight": computed}, (torch.randn(4, 4),), {"target": torch.zeros(4, 2)}).backward()
    del computed
    gc.collect()
    assert gone() is None


class Keeping(nn.Module):
    """Keeps a tensor in an attribute, or one per call in a list."""

    def __init__(self, kept: Callable[[Tensor], Any], listed: bool = False) -> None:
        super().__init__()
        self.layer, self.kept, self.last, self.all = nn.Linear(4, 4), kept, torch.zeros(4), list[Any]()
        self.listed = listed

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.listed:
            self.all.append(self.kept(y))
        else:
            self.last = self.kept(y)
        return y


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kept", [lambda y: y.square().mean(), lambda y: y.detach()])
def test_a_layer_attribute_with_one_microbatch_is_logged_once(
    kept: Callable[[Tensor], Any], schedule: str, said: list[str]
) -> None:
    model = SplitPipe(nn.Sequential(nn.Sequential(Keeping(kept)), nn.Linear(4, 4)), [1, 1], devices=CPU, chunks=3,
                      schedule=schedule, loss_fn=None if schedule == "gpipe" else nn.MSELoss())
    more = {} if schedule == "gpipe" else {"target": torch.randn(6, 4)}
    for _ in range(2):
        model(torch.randn(6, 4), **more)
    [only] = said
    assert "a layer left '0.0.last', a tensor of one microbatch" in only


class Averaging(nn.Module):
    """Keeps an average in a buffer, which it writes to or replaces: a codebook, or the centre of a teacher's output."""

    average: Tensor
    ready: Tensor

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.replaces = nn.Linear(4, 4), nn.InstanceNorm1d(4, track_running_stats=True), replaces
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("ready", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(x)[..., None] * torch.arange(3.0))[..., 1] - self.average * self.ready
        mean = y.detach().mean(0)
        if self.replaces:
            self.average = 0.9 * self.average + 0.1 * mean
        else:
            self.average.lerp_(mean, 0.1)
        return y


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_a_buffer_that_a_forward_changes_is_logged_once(by: str, replaces: bool, said: list[str]) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Averaging(replaces))
    where: dict[str, Any] = {"balance": [1, 1]} if by == "balance" else {"cuts": ["1"]}
    model = SplitPipe(module, devices=["cpu"] * 2, chunks=3, **where)
    for rows in (1, 6, 6):
        model(torch.randn(rows, 4))
    [only] = said
    assert "the forward changes the buffer '1.average'," in only


@dataclass
class Timed:
    """Its field is read by a property, which fails."""

    spans: int = 0


Timed.spans = property(lambda self: 1 // 0, lambda self, value: None)  # type: ignore[assignment, method-assign]


class Holding(nn.Module):
    """Keeps an object whose attributes can't be read."""

    def forward(self, x: Tensor) -> Tensor:
        self.held = Timed()
        return x


@pytest.mark.parametrize("layer", [
    Keeping(lambda y: y.square().mean(), listed=True), Keeping(lambda y: y.detach().mean()), Keeping(len), Holding(),
    nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
])
def test_lists_and_recomputed_attributes_are_not_logged(layer: nn.Module, said: list[str]) -> None:
    SplitPipe(nn.Sequential(layer, nn.Linear(4, 4)), [1, 1], devices=CPU, chunks=3)(torch.randn(6, 4))
    assert said == []


def test_a_compiled_module_counts_as_compiled_around_its_blocks() -> None:
    module = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), backend="eager")
    blocks, places = Blocks(module, []), [Place(torch.device("cpu"))]
    assert code_layers(blocks, Homes(places, module), places).compiled
