"""A module and its pipeline side by side: built from one seed, driven by one input, compared in everything."""
from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from splitpipe import SplitPipe


class Nothing(torch.autograd.Function):
    """The tensor, with no gradient to pass on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class _FailOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, failures: list[BaseException]) -> Tensor:
        ctx.failures = failures
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.failures:
            raise ctx.failures.pop()
        return grad, None


class Failing(nn.Module):
    """The tensor; backward raises what is in the list, and takes it out."""

    def __init__(self, failures: list[BaseException]) -> None:
        super().__init__()
        self.failures = failures

    def forward(self, x: Tensor) -> Tensor:
        return _FailOnce.apply(x, self.failures)


def even(layers: int, stages: int = 2) -> list[int]:
    """A balance of that many stages, the last ones larger by one where needed."""
    return [layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages)]


class Looped(nn.Sequential):
    """Layers that a loop calls: no plain Sequential, so that it is run by cuts as any module is."""

    def forward(self, value: Any) -> Any:
        for layer in self:
            value = layer(value)
        return value


def stages(module: nn.Sequential, balance: list[int], by: str = "balance") -> tuple[nn.Module, dict[str, Any]]:
    """What is wrapped, and the options that say where it is cut: by balance, or by cuts of the same layers."""
    if by == "balance":
        return module, {"balance": balance}
    starts = list(accumulate(balance))[:-1]
    return Looped(*module), {"cuts": [str(start) for start in starts]}


def twins(module: nn.Sequential, balance: list[int] | None = None, by: str = "balance",
          **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    """A copy of the module, and the module as a pipeline."""
    plain = copy.deepcopy(module)
    balance = balance or even(len(module), min(2, len(module)))
    wrapped, where = stages(module, balance, by)
    devices = len(balance) if "schedule" in options else 8
    return plain, SplitPipe(wrapped, devices=["cpu"] * devices, **where, **options)


def fresh(value: Any) -> Any:
    """A copy of an input whose float tensors require grad."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())

    return tree_map(leaf, value)


def mean(output: Any, target: Any = 0.25) -> Tensor:
    """A mean over the first dimension, of every differentiable tensor of an output, each weighted in its own way."""
    total = torch.zeros((), dtype=torch.float64)
    for number, x in enumerate(tree_leaves(output)):
        if isinstance(x, Tensor) and x.requires_grad:
            y = torch.view_as_real(x) if x.is_complex() else x
            weight = torch.linspace(0.5, 1.5, y[0].numel(), dtype=torch.float64).reshape(y[0].shape)
            total = total + (number + 1.5) * (y.double() * weight - target).square().mean()
    return total


def assert_same(value: Any, expected: Any, what: str) -> None:
    """Equal in nesting, values, dtypes and what is no tensor."""
    leaves, spec = tree_flatten(value)
    expected_leaves, expected_spec = tree_flatten(expected)
    assert spec == expected_spec, what
    for x, y in zip(leaves, expected_leaves):
        if isinstance(y, Tensor):
            torch.testing.assert_close(x, y, msg=lambda text: f"{what}: {text}")  # noqa: B023
        else:
            assert x == y, what


def assert_same_tensors(model: nn.Module, plain: nn.Module) -> None:
    """Equal parameters, gradients and buffers, under the same names."""
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    for name in expected:
        torch.testing.assert_close(state[name], expected[name], msg=lambda text: f"{name}: {text}")  # noqa: B023
    gradients = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        found, wanted = gradients[name].grad, parameter.grad
        assert (found is None) == (wanted is None), f"{name}.grad is {found}, expected {wanted}"
        if wanted is not None:
            torch.testing.assert_close(found, wanted, msg=lambda text: f"{name}.grad: {text}")  # noqa: B023


def descend(*models: nn.Module) -> None:
    """A step of gradient descent, after which there are no gradients."""
    for model in models:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        model.zero_grad()


def step(module: Callable[[Any], Any], value: Any, loss: Callable[[Any], Tensor] = mean) -> tuple[Any, Any, Tensor]:
    """Forward and backward: the output, the gradients of the input, the loss."""
    given = fresh(value)
    inputs = tree_leaves(given)
    output = module(tree_map(lambda x: x * 1 if isinstance(x, Tensor) and x.requires_grad else x, given))
    total = loss(output)
    if total.requires_grad:
        total.backward()
    gradients = [x.grad if isinstance(x, Tensor) else None for x in inputs]
    kept = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)
    return kept, gradients, total.detach()
