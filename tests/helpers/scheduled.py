"""A module and its pipeline with a schedule side by side: one takes its loss outside, the other inside."""
from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from splitpipe import SplitPipe, schedule
from tests.helpers import twin
from tests.helpers.twin import assert_same, assert_same_tensors, descend, even, stages, step
from tests.helpers.twin import mean as mean

#: Names with which the essence shows what all schedules do alike: rows of stages, and a V whose W are apart.
FEW = ("1f1b", "zb-v")
#: Every schedule; more than those few are thorough.
NAMES = pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in FEW else pytest.mark.thorough) for name in schedule.names()
])

LossFn = Callable[[Any, Any], Any]


def stages_of(name: str) -> int:
    """How many stages a device has in a schedule."""
    return schedule.build(name, 1, 1).stages


def twins(module: nn.Sequential, name: str | schedule.Schedule | None, devices: int = 2,
          balance: list[int] | None = None, loss_fn: Any = mean, by: str = "balance",
          **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    """A copy of the module, and the module with a schedule, or, without a name, as drop-in."""
    if name is None:
        return twin.twins(module, balance, by, **options)
    plain = copy.deepcopy(module)
    count = name.stages if isinstance(name, schedule.Schedule) else devices * stages_of(name)
    wrapped, where = stages(module, balance or even(len(module), count), by)
    return plain, SplitPipe(wrapped, devices=["cpu"] * devices, schedule=name, loss_fn=loss_fn, **where, **options)


def inside(options: dict[str, Any]) -> dict[str, Any]:
    """Options, with that loss function if there is a schedule."""
    return options if options.get("schedule") in (None, "gpipe") else {**options, "loss_fn": mean}


def loss_of(module: nn.Module, x: Any, target: Any = 0.25, loss_fn: LossFn = mean) -> Tensor:
    """The loss of a module, or of what is around it, where a pipeline with a schedule has it inside."""
    inside = any(isinstance(part, SplitPipe) and part.schedule.name != "gpipe" for part in module.modules())
    loss: Tensor = module(x, target=target) if inside else loss_fn(module(x), target)
    return loss


def assert_steps(plain: nn.Module, model: nn.Module, value: Any, steps: int = 3,
                 loss_of: Callable[[Any, Any], Tensor] = loss_of, grad: bool = True) -> None:
    """Takes steps with both, and compares the loss, the gradients of the input and all tensors after each.

    ``value`` is the input, which requires grad or not, or makes one for each step.
    """
    for _ in range(steps):
        x, found = value() if callable(value) else value, []
        for each in (plain, model):
            each.zero_grad()
            if grad:
                _, gradients, loss = step(partial(loss_of, each), x, lambda loss: loss)
                found.append((loss, gradients))
            else:
                loss = loss_of(each, tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, x))
                loss.backward()
                found.append((loss.detach(), []))
        assert_same(found[1], found[0], "loss and gradients of the input")
        assert_same_tensors(model, plain)


def assert_transparent(module: nn.Sequential, value: Any, name: str | schedule.Schedule | None = None, devices: int = 2,
                       steps: int = 2, target: Any = 0.25, loss_fn: LossFn = mean, factor: float = 1.0,
                       **options: Any) -> SplitPipe:
    """Trains both for some steps, drop-in or by a schedule, and compares all there is after each."""
    plain, model = twins(module, name, devices, loss_fn=loss_fn, **options)
    for _ in range(steps):
        descend(plain, model)  # The gradients of the last step stay.
        expected, gradients, loss = step(plain, value, lambda output: loss_fn(output, target) * factor)
        if name is None:
            found, own, its = step(model, value, lambda output: loss_fn(output, target) * factor)
            assert_same(found, expected, "output")
        else:
            _, own, its = step(lambda x: model(x, target=target) * factor, value, lambda loss: loss)
        assert_same((its, own), (loss, gradients), "loss and gradients of the input")
        assert_same_tensors(model, plain)
    return model


def mlp(layers: int, width: int = 4) -> nn.Sequential:
    """Linear layers, with a norm and an activation in between."""
    kinds: list[Callable[[], nn.Module]] = [lambda: nn.Linear(width, width), nn.Tanh, lambda: nn.Linear(width, width),
                                            lambda: nn.LayerNorm(width)]
    return nn.Sequential(*[kinds[k % 4]() for k in range(layers)])
