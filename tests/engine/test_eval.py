"""In eval mode microbatches run, as in training; only with a cache, or another object, there is one."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.models import piped
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same


class Cache:
    """An object that pytree doesn't know."""


class Plain(nn.Module):
    """Notes the rows of its calls; returns what a function makes of its output."""

    def __init__(self, function: Any = lambda y: y) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Any:
        self.calls.append(len(x))
        return self.function(self.two(self.one(x)))


class Net(Plain):
    """Has a cache, as a language model has."""

    def forward(self, x: Tensor, labels: Tensor | None = None, use_cache: bool | None = None) -> Any:
        y = super().forward(x)
        cache = None if use_cache is False else Cache()
        return {"loss": None if labels is None else (y - labels).square().mean(), "y": y, "cache": cache}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_the_output_is_that_of_the_module_and_each_row_runs_once(mode: Any, backward: str) -> None:
    plain = Plain(lambda y: {"a": (y, [y * 2, None]), "b": "text", "n": (y > 0).sum()}).eval()
    model = piped(plain, ["two"], chunks=4, backward=backward).eval()
    x = torch.randn(8, 4)
    with mode():
        found, expected = model(x), plain(x)
        assert_same(found, expected, "output")
    assert model.calls == [2] * 4 and found["a"][0].requires_grad is expected["a"][0].requires_grad


@pytest.mark.parametrize("function", [lambda y: (y, y.argmax()), lambda y: (y, Cache())], ids=["an index", "an object"])
def test_what_cannot_be_joined_is_the_same_error_as_in_training(function: Any) -> None:
    model, x, errors = piped(Plain(function), ["two"], chunks=4), torch.randn(8, 4), []
    for training in (True, False):
        with pytest.raises(ValueError, match="output") as caught:
            model.train(training)(x)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and model.calls == [2] * 8


LABELS = torch.zeros(7, 4)


@pytest.mark.parametrize(("given", "training", "calls"), [
    ({}, False, [7]), ({"use_cache": True}, False, [7]), ({"use_cache": None}, False, [7]),
    ({"use_cache": False}, False, [3, 3, 1]), ({"use_cache": True, "labels": LABELS}, False, [7]),
    ({"labels": LABELS}, False, [3, 3, 1]), ({"labels": LABELS}, True, [3, 3, 1]), ({}, True, [3, 3, 1]),
])
def test_what_keeps_a_cache_runs_in_one_microbatch(given: Any, training: bool, calls: list[int]) -> None:
    plain = Net()
    model, x = piped(plain, ["two"]).train(training), torch.randn(7, 4)
    found, expected = model(x, **given), plain(x, **given)
    assert model.calls == calls and (found["cache"] is None) is (calls != [7])
    assert_same([found["y"], found["loss"]], [expected["y"], expected["loss"]], "output")


@pytest.mark.parametrize(("inside", "default", "expected"), [
    (False, True, [False, True, True, False]), (True, True, [True] * 4), (True, None, [False, True, None, False])])
def test_a_module_that_caches_by_default_or_may_choose_keeps_none_in_training_or_with_labels(inside, default, expected):
    def telling(self: Any, x: Tensor, use_cache: Any = default, labels: Any = None) -> tuple[Tensor, bool | None]:
        return self.two(self.one(x)), use_cache

    net, cuts = module_of(telling, **linears("one", "two")), ["two"]
    if inside:
        net, cuts = module_of(lambda self, x, *given, labels=None: self.model(x, *given), model=net), ["model.two"]
    model, x = piped(net, cuts, chunks=2), torch.randn(4, 4)
    assert [model(x)[1], model(x, True)[1], model.eval()(x)[1], model(x, labels=x)[1]] == expected


@pytest.mark.parametrize(("given", "batched", "calls"), [
    ({"cache": Cache()}, None, [6]), ({"cache": Cache()}, {"cache": False}, [2, 2, 2]),
    ({"function": torch.tanh}, None, [2, 2, 2])])
def test_an_object_that_microbatches_can_not_share(given: Any, batched: Any, calls: list[int]) -> None:
    seen: list[int] = []

    def noting(self: Any, x: Tensor, **named: Any) -> Tensor:
        seen.append(len(x))
        return self.two(self.one(x))  # type: ignore[no-any-return]

    piped(module_of(noting, **linears("one", "two")), ["two"], batched=batched)(torch.randn(6, 4), **given)
    assert seen == calls
