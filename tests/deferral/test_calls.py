"""What layers call: attention, functions without a rule, under modes and hooks, with wrong arguments."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from splitpipe import SplitPipe
from tests.helpers.deferring import Call, deferred, drop_in, in_more_ways, left, trained
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double
from tests.helpers.twin import step, twins


class Attention(nn.Module):
    """Attention of a value to itself, or to another."""

    def __init__(self, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.cross = cross
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        other = x[:, 1:] * 2
        keys, values = (other[..., : self.attention.kdim], other[..., : self.attention.vdim]) if self.cross else (x, x)
        y: Tensor = self.attention(x, keys, values)[0]
        return y


ATTENTION: dict[str, tuple[dict[str, Any], set[str]]] = {
    "self": ({}, set()),
    "self, no bias": ({"bias": False}, set()),
    "self, one more key": ({"add_bias_kv": True}, {"bias_k", "bias_v"}),
    "cross": ({"cross": True}, set()),
    "cross, keys and values of other widths": ({"cross": True, "kdim": 6, "vdim": 4}, {"in_proj_bias"}),  # It is added.
    "cross, one more key": ({"cross": True, "add_bias_kv": True}, {"bias_k", "bias_v"}),
}


@drop_in
@pytest.mark.parametrize("name", ATTENTION)
def test_the_projections_of_attention_are_deferred(name: str, way: dict[str, Any]) -> None:
    options, autograds = ATTENTION[name]
    model = trained(Attention(**options), torch.randn(7, 5, 8), **way)
    assert set(left(model)) == {f"1.attention.{name}" for name in autograds}
    assert all(how.startswith("Linear") for how in deferred(model).values())


UNKNOWN: dict[str, tuple[Callable[..., Tensor], str]] = {
    "sin": (lambda x, w: x + w.sin(), "sin has no rule"),
    "bilinear": (lambda x, w: F.bilinear(x, x, w[None, :, None].expand(1, 6, 6)), "trilinear has no rule"),
    "einsum": (lambda x, w: torch.einsum("ni,i->n", x, w)[:, None], "bmm has no rule"),
    "a function of the library's, by keyword": (lambda x, w: x + F.softplus(input=w), "softplus has no rule"),
    "in a list": (lambda x, w: torch.stack([w, w]).sum(0) * x, "stack has no rule"),
    "in two of them": (lambda x, w: w.exp() + w.sin() + x, "exp has no rule, sin has no rule"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_function_without_a_rule_is_named(name: str) -> None:
    function, why = UNKNOWN[name]
    model = trained(Call(function, w=torch.randn(6)), torch.randn(7, 6), checkpoint="never")
    assert left(model) == {"1.w": why}


def test_a_layer_of_several_modes_is_noted_in_each() -> None:
    def either(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return x + (w if layer.training else v).sin()

    layer = Call(either, w=torch.randn(6), v=torch.randn(6))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2)
    step(model, torch.randn(4, 6))
    model.eval()
    step(model, torch.randn(4, 6))
    assert left(model) == {"0.w": "sin has no rule", "0.v": "sin has no rule"}


class Seen(TorchFunctionMode):
    """Counts the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **kwargs or {})


def test_a_mode_of_the_users_sees_the_calls_once() -> None:
    layers = nn.Sequential(nn.Linear(6, 4), nn.Softmax(1), nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 1))
    _, model = twins(layers, chunks=3, checkpoint="never")
    for _ in range(2):
        with Seen() as seen:
            model(torch.randn(7, 6))
        assert {function: seen.calls[function] for function in (F.linear, F.softmax, F.conv1d)} == {
            F.linear: 3, F.softmax: 3, F.conv1d: 3,
        }
        assert not deferred(model)  # The mode sees no node of the engine's.
    model(torch.randn(7, 6))
    assert set(deferred(model)) == {"0.weight", "0.bias", "3.weight", "3.bias"}


class Adding(TorchFunctionMode):
    """Adds one to what tanh gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **kwargs or {})
        return y + 1 if func in (torch.tanh, Tensor.tanh) else y


class Leaving(nn.Module):
    """Leaves a mode on the stack, as torch.set_default_device does."""

    def forward(self, x: Tensor) -> Tensor:
        if not any(isinstance(mode, Adding) for mode in _get_current_function_mode_stack()):
            torch._C._push_on_torch_function_stack(Adding())
        return x


def test_a_mode_that_a_layer_leaves_stays() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Leaving(), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    model = SplitPipe(layers, [5], devices=["cpu"], chunks=3, checkpoint="never")
    x = torch.randn(6, 4)
    expected = layers[3](layers[0](x).tanh() + 1).tanh() + 1
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
    assert len(deferred(model)) == 4


@in_more_ways
def test_a_call_without_grad_mode_is_autograds(way: dict[str, Any]) -> None:
    def features(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.linear(x, w)
        assert not y.requires_grad
        return x + y

    model = trained(Call(features, w=torch.randn(6, 6)), torch.randn(7, 6), **way)
    assert deferred(model) == {}
    assert model[1].w.grad is None
