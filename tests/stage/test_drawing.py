"""Stages that draw random numbers: masks agree with recomputation, and seeded runs repeat."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.core.rng import RngMode

modes = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


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


def test_a_stage_that_does_not_draw_is_not_watched() -> None:
    seen: list[int] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch._C._len_torch_function_stack())
            return x.exp()

    model = piped(Watched(), nn.Identity(), backward="autograd")
    steps(model, 2)
    assert seen == [1] + [0] * 11
