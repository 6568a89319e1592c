"""Stages that begin to draw, draw now and then, or in one phase alone: masks agree, and seeded runs repeat."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, is_recomputing
from splitpipe.core.rng import RngMode
from tests.promise.layers import Apply

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


class Draws(nn.Module):
    """Has a mask of random numbers when told to."""

    def __init__(self, when: Callable[[], bool]) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x) if self.when() else x * 1


def piped(*layers: nn.Module, checkpoint: Any = "always", chunks: int = 3, **options: Any) -> SplitPipe:
    return SplitPipe(
        nn.Sequential(*layers), [1] * len(layers), devices=["cpu"] * len(layers), chunks=chunks, checkpoint=checkpoint,
        **options,
    )


def rng_modes(model: SplitPipe) -> list[RngMode]:
    return [facts.rng for cache in model._runtime._resources.caches for facts in cache.facts.values()]


def steps(model: SplitPipe, count: int, value: Tensor = torch.ones(6, 32)) -> list[Tensor]:  # noqa: B008
    """Outputs of some steps, each of which has the gradient that its own mask gives."""
    found = []
    for _ in range(count):
        x = value.clone().requires_grad_()
        y = model(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad * value, y.detach())  # type: ignore[operator]
        found.append(y.detach())
    return found


def assert_repeats(run: Callable[[], list[Any]]) -> None:
    """Two runs give the same from one seed, and leave the generator alike."""
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        runs.append([*run(), torch.rand(3)])
    assert all(map(torch.equal, *runs))


@modes
def test_a_stage_that_begins_to_draw_in_its_third_call(checkpoint: Any) -> None:
    begun = False
    layer = Draws(lambda: begun)

    def run() -> list[Tensor]:
        nonlocal begun
        model, found = piped(layer, nn.Identity(), checkpoint=checkpoint), []
        for call in range(5):
            begun = call >= 2
            found += steps(model, 1)
            assert bool((found[-1] != 1).any()) is begun
        assert rng_modes(model)[0] is RngMode.EXCLUSIVE
        return found

    assert_repeats(run)


@modes
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_one_of_two_workers_draws_and_both_recompute(schedule: Any, checkpoint: Any) -> None:
    options = {"schedule": schedule, "loss_fn": lambda y, _: y.mean()} if schedule != "gpipe" else {}

    def run() -> list[Any]:
        model, found = piped(nn.Dropout(0.5), nn.Tanh(), checkpoint=checkpoint, chunks=4, **options), []
        for _ in range(4):
            x = torch.ones(8, 16, requires_grad=True)
            (model(x, target=torch.zeros(8)) if options else model(x).mean()).backward()
            # 0 where the mask is, else the gradient of tanh(2).
            right = 2 * (1 - torch.tanh(torch.tensor(2.0)) ** 2) / x.numel()
            assert all(value == 0 or abs(value - right) < 1e-6 for value in x.grad.flatten().tolist())  # type: ignore
            found.append(x.grad)
        assert rng_modes(model) == [RngMode.EXCLUSIVE, RngMode.NONE]
        return found

    assert_repeats(run)


def test_one_of_two_workers_begins_to_draw() -> None:
    begun = False
    model = piped(nn.Dropout(0.5), Draws(lambda: begun), checkpoint="always", chunks=4)
    for call in range(4):
        begun = call >= 2
        x = torch.ones(8, 32, requires_grad=True)
        y = model(x)
        try:
            y.sum().backward()
        except RuntimeError as error:
            assert call == 2 and "Repeat the step" in str(error)
        else:
            torch.testing.assert_close(x.grad, y.detach())
    assert rng_modes(model) == [RngMode.EXCLUSIVE] * 2


def test_a_stage_that_draws_in_recomputation_alone() -> None:
    def logs(x: Tensor) -> Tensor:
        if is_recomputing():
            torch.rand(5)
        return x.exp()  # Its own derivative.

    def run() -> list[Tensor]:
        model = piped(Apply(logs), nn.Dropout(0.5), chunks=1)  # No stage draws beside another.
        found = steps(model, 4)
        assert rng_modes(model) == [RngMode.EXCLUSIVE] * 2
        return found

    assert_repeats(run)


def test_generators_of_a_layers_own_that_change() -> None:
    own = torch.Generator().manual_seed(7)

    class Late(nn.Module):
        """Has another generator from its second call on."""

        def forward(self, x: Tensor) -> Tensor:
            mask: Tensor = torch.rand(x.shape, generator=getattr(self, "generator", own))
            return x * mask

    model = piped(Late(), nn.Identity())
    for _ in range(3):
        steps(model, 2)
        model[0].generator = torch.Generator().manual_seed(9)
    assert rng_modes(model) == [RngMode.NONE] * 2


def test_a_stage_that_does_not_draw_is_not_watched() -> None:
    seen: list[int] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch._C._len_torch_function_stack())
            return x.exp()

    model = piped(Watched(), nn.Identity(), backward="autograd")
    steps(model, 2)
    assert seen == [1] + [0] * 11
