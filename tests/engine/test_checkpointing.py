"""Random numbers in recomputed blocks."""
from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.core.rng import RngMode
from tests.engine.models import CHECKPOINTS, SCHEDULES, piped
from tests.helpers.covering import pairwise
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import Looped


class Masked(nn.Module):
    """What it gives is linear in its weight, whatever the mask is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x * self.weight)


class Linear(nn.Module):
    """A loss that is linear in the weight of each block: its gradient, times the weight, is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.sum(1).mean(), "y": x}


class Between(Linear):
    """Draws between blocks, too."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.1)
        return {"loss": x.sum(1).mean(), "y": x}


@pairwise(kind=[Linear, Between], schedule=SCHEDULES, backward=["split", "autograd"])
def test_masks_are_the_same_in_every_step_checkpoint_mode_and_recomputation(
    kind: type[Linear], schedule: str, backward: str
) -> None:
    found, x = [], torch.rand(6, 4) + 0.5
    for mode in [*CHECKPOINTS, "except_last"]:
        torch.manual_seed(5)
        model = piped(kind(), ["layers.1", "layers.3"], schedule=schedule, checkpoint=mode, backward=backward)
        for _ in range(3):
            torch.manual_seed(3)
            model.zero_grad()
            out = model(x)
            out["loss"].backward()
            found.append(out["y"].detach())
            for layer in model.layers:
                torch.testing.assert_close((layer.weight * layer.weight.grad).sum(), out["loss"].detach())
    assert all(torch.equal(each, found[0]) for each in found[1:])
    assert (found[0] == 0).any()


class Seeded(nn.Module):
    """The same numbers every time, of a generator that it leaves as it was."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return x * torch.rand(4) * torch.rand(4)


@pytest.mark.parametrize("mode", [*CHECKPOINTS, "except_last"])
def test_a_stage_that_seeds_the_generator_for_itself_has_it_alone(mode: str) -> None:
    """Beside another one, each would restore a state that the other has set."""
    net = Looped(*[Seeded() for _ in range(3)])
    model = piped(net, ["1", "2"], checkpoint=mode, chunks=4)
    x, before = torch.ones(8, 4), torch.random.get_rng_state()
    for _ in range(3):
        torch.testing.assert_close(model(x), net(x))
        assert torch.equal(torch.random.get_rng_state(), before)
    modes = [facts.rng for cache in model._runtime._resources.caches for facts in cache.facts.values()]
    assert {*modes} == {RngMode.EXCLUSIVE}


def test_runs_that_find_out_how_outputs_are_joined_leave_a_modules_generator() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.two(self.one(x))
        return x * torch.rand(x.shape, generator=self.generator)

    net = module_of(forward, **linears("one", "two"), generator=torch.Generator().manual_seed(3))
    expected = torch.Generator().manual_seed(3)
    model = SplitPipe(net, cuts=["two"], devices=["cpu"] * 2, chunks=2)
    for _ in range(2):
        model(torch.ones(4, 4))
        for _ in range(2):
            torch.rand(2, 4, generator=expected)
        assert torch.equal(net.generator.get_state(), expected.get_state())


class Drawing(nn.Module):
    """Draws a mask by a function that may be changed."""

    def draw(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)


class Late(nn.Module):
    """Code between blocks begins to draw, beside a block that draws."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Masked(), nn.Identity()])
        self.layers[0].dropout = Drawing()
        self.begun = False
        self.stage = stage

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.layers[1](self.layers[0](x))
        if self.begun:
            self.stage()
            x = nn.functional.dropout(x, 0.1)
        return {"loss": x.sum(1).mean()}


def test_a_mask_drawn_while_another_stage_drew_is_an_error_in_recomputation() -> None:
    """The first block is halfway through its mask when code of the next stage draws."""
    halfway, drawn = threading.Event(), threading.Event()
    net = Late(lambda: None)
    model = SplitPipe(net, cuts=["layers.1"], devices=["cpu"] * 2, checkpoint="always", chunks=2)
    x = torch.rand(6, 4) + 0.5
    model(x)["loss"].backward()
    net.begun = True
    calls = [0]

    def dropped(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:  # Of the second microbatch, whose first run is beside stage 1 of the first one.
            halfway.set()
            drawn.wait(60)
        return F.dropout(x, 0.4)

    def waits() -> None:
        halfway.wait(60)

    net.layers[0].dropout.draw = dropped
    net.stage = waits
    real = F.dropout

    def dropout(*given: Any, **named: Any) -> Tensor:
        made = real(*given, **named)
        if 0.1 in (*given[1:], named.get("p")):
            drawn.set()
        return made

    with mock.patch.object(F, "dropout", dropout), pytest.raises(RuntimeError, match="drew other random numbers"):
        model(x)["loss"].backward()
    del net.layers[0].dropout.draw
    net.stage = lambda: None
    for _ in range(2):
        model.zero_grad()
        loss = model(x)["loss"]
        loss.backward()
        weight = model.layers[0].weight
        torch.testing.assert_close((weight * weight.grad).sum(), loss.detach())


def test_blocks_draw_different_masks() -> None:
    model = piped(Linear(), ["layers.1", "layers.3"], checkpoint="always")
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.fill_(1.0)
    masks = model(torch.ones(300, 4))["y"].sign()
    assert 0.08 < masks.mean() < 0.18  # All four of them, of which each leaves six of ten.
