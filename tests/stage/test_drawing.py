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


def steps(model: SplitPipe, count: int) -> list[Tensor]:
    """Outputs of some steps, each of which has the gradient that its own mask gives."""
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        x = torch.ones(6, 32, requires_grad=True)
        y = model(x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, y.detach())
        found.append(y.detach())
    return [*found, torch.rand(3)]


@modes
def test_a_stage_that_begins_to_draw_in_its_third_call_has_the_masks_of_its_forward(checkpoint: Any) -> None:
    runs, begun = [], False
    layer = Draws(lambda: begun)
    for _ in range(2):
        model = piped(layer, nn.Identity(), checkpoint=checkpoint)
        torch.manual_seed(1)
        found = []
        for call in range(5):
            begun = call >= 2
            x = torch.ones(6, 32, requires_grad=True)
            y = model(x)
            y.sum().backward()
            torch.testing.assert_close(x.grad, y.detach())
            assert bool((y != 1).any()) is begun
            found.append(y.detach())
        assert rng_modes(model)[0] is RngMode.EXCLUSIVE
        runs.append([*found, torch.rand(3)])
    assert all(map(torch.equal, *runs))


@modes
def test_a_stage_that_draws_in_some_microbatches_only(checkpoint: Any) -> None:
    class Some(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x) if x[0, 0] == 1 else x * 1

    runs = []
    for _ in range(2):
        model = piped(Some(), nn.Identity(), checkpoint=checkpoint)
        model(torch.full((6, 32), 2.0))  # No stage is unknown beside one that begins to draw.
        torch.manual_seed(1)
        found = []
        for _ in range(3):
            x = torch.ones(6, 32)
            x[[0, 4]] = 2.0  # The first and the last microbatch draw nothing.
            x.requires_grad_()
            y = model(x)
            y.sum().backward()
            torch.testing.assert_close(x.grad * x.detach(), y.detach())  # type: ignore[operator]
            found.append(y.detach())
        assert rng_modes(model) == [RngMode.EXCLUSIVE, RngMode.NONE]
        runs.append([*found, torch.rand(3)])
    assert all(map(torch.equal, *runs))


@modes
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_one_of_two_workers_draws_and_both_recompute(schedule: Any, checkpoint: Any) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        options: dict[str, Any] = {}
        if schedule != "gpipe":
            options = {"schedule": schedule, "loss_fn": lambda y, _: y.mean()}
        model = piped(nn.Dropout(0.5), nn.Tanh(), checkpoint=checkpoint, chunks=4, **options)
        found = []
        for _ in range(4):
            x = torch.ones(8, 16, requires_grad=True)
            (model(x, target=torch.zeros(8)) if options else model(x).mean()).backward()
            # 0 where the mask is, else the gradient of tanh(2).
            right = 2 * (1 - torch.tanh(torch.tensor(2.0)) ** 2) / x.numel()
            assert all(value == 0 or abs(value - right) < 1e-6 for value in x.grad.flatten().tolist())  # type: ignore
            found.append(x.grad)
        runs.append([*found, torch.rand(3)])
        assert rng_modes(model) == [RngMode.EXCLUSIVE, RngMode.NONE]
    assert all(map(torch.equal, *runs))  # type: ignore[arg-type]


def test_two_workers_one_drawing_and_one_beginning_to_are_right_or_say_that_they_are_not() -> None:
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


def test_a_stage_that_draws_in_recomputation_alone_leaves_gradients_and_later_runs() -> None:
    class Logs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                torch.rand(5)
            return x.exp()  # Its own derivative.

    runs = []
    for _ in range(2):
        model = piped(Logs(), nn.Dropout(0.5), chunks=1)  # No stage draws beside another.
        runs.append(steps(model, 4))
    assert all(map(torch.equal, *runs))
    assert rng_modes(model) == [RngMode.EXCLUSIVE] * 2


def test_generators_given_explicitly_though_nothing_is_watched_after_the_first_microbatch() -> None:
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


def test_nothing_watches_the_functions_of_a_stage_that_does_not_draw() -> None:
    seen: list[int] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch._C._len_torch_function_stack())
            return x.exp()

    model = piped(Watched(), nn.Identity(), backward="autograd")
    steps(model, 2)
    assert seen == [1] + [0] * 11
