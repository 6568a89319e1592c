"""The modes see the random functions of torch that are theirs, and no others."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from splitpipe.core import catching
from splitpipe.core.catching import Catching, Swapping, Witness, moved
from splitpipe.core.generator import own_state

X = torch.linspace(0, 1, 12).view(3, 4)

DRAWS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: getattr(F, name)(X[None, None], training=True) for name in (
        "dropout", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu")},
    **{f"torch.{name}": lambda name=name: getattr(torch, name)(X[None].clone(), 0.5, True) for name in (
        "dropout", "dropout_", "native_dropout", "feature_dropout", "feature_dropout_", "alpha_dropout",
        "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_")},
    **{f"torch.{name}": lambda name=name: getattr(torch, name)(X) for name in (
        "rand_like", "randn_like", "bernoulli", "poisson")},
    **{f"Tensor.{name}": lambda name=name: getattr(X.clone(), name)() for name in (
        "bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_", "random_", "cauchy_", "log_normal_")},
    "dropout1d": lambda: F.dropout1d(X),
    "rrelu_": lambda: F.rrelu_(-X, training=True),
    "torch.rrelu": lambda: torch.rrelu(-X, training=True),
    "torch.rrelu_": lambda: torch.rrelu_(-X, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "torch.rand": lambda: torch.rand(3),
    "torch.randn": lambda: torch.randn(3),
    "torch.randint": lambda: torch.randint(9, (3,)),
    "torch.randint_like": lambda: torch.randint_like(X, 9),
    "torch.randperm": lambda: torch.randperm(9),
    "torch.multinomial": lambda: torch.multinomial(X, 2),
    "torch.normal": lambda: torch.normal(0.0, X + 1),
    "torch.binomial": lambda: torch.binomial(X * 10, X),
    "Tensor.multinomial": lambda: X.multinomial(2),
    "Tensor.geometric_": lambda: X.clone().geometric_(0.5),
}


def swapping() -> Swapping:
    return Swapping({}, 1)


@pytest.mark.parametrize("name", DRAWS)
def test_every_random_function_is_seen_and_draws_from_the_generator_given(name: str) -> None:
    mode = swapping()
    before = torch.default_generator.get_state()
    first = mode.watch(DRAWS[name])
    assert mode.called and mode.drew and not moved(before)
    same(first, swapping().watch(DRAWS[name]))


def same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_calls_draw_one_after_the_other_from_one_generator() -> None:
    numbers = swapping().watch(lambda: [torch.rand(2), torch.rand(2)])
    with own_state(torch.Generator().manual_seed(1).get_state()):
        same(numbers, [torch.rand(2), torch.rand(2)])


def test_what_is_called_and_draws_nothing_is_told_apart() -> None:
    mode = swapping()
    mode.watch(lambda: F.dropout(X, 0.0))
    assert mode.called and not mode.drew


def test_nothing_else_is_seen() -> None:
    mode = swapping()
    mode.watch(lambda: (X + 1, F.relu(X), torch.zeros(3), F.linear(X, X), X.softmax(0)))
    assert not mode.called and not mode.drew


def test_the_mode_is_outermost_and_gone_afterwards() -> None:
    mode = swapping()
    with TorchFunctionMode() as own:
        assert mode.watch(_get_current_function_mode_stack) == [mode, own]
        with pytest.raises(SystemExit):
            mode.watch(lambda: exit(3))
        assert _get_current_function_mode_stack() == [own]


def test_a_generator_given_as_argument_is_kept_with_its_state_before_its_first_draw() -> None:
    generators: dict[torch.Generator, Tensor] = {}
    own = torch.Generator().manual_seed(4)
    start = own.get_state()
    mode = Catching(generators)
    mode.watch(lambda: (torch.rand(3, generator=own), X.clone().normal_(generator=own)))
    assert list(generators) == [own] and torch.equal(generators[own], start) and not mode.called


def hooked() -> Tensor:
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        return F.dropout(X)


@torch.no_grad()
def without_grad() -> Tensor:
    return F.dropout(X)


@pytest.mark.parametrize("call", [hooked, without_grad, lambda: F.dropout(X.to("meta"))])
def test_draws_that_a_layer_hides_or_that_another_generator_makes_are_left_alone(call: Callable[[], Any]) -> None:
    mode = swapping()
    mode.watch(call)
    assert not mode.called and not mode.drew


def test_under_hooks_or_no_grad_from_the_start_draws_are_seen() -> None:
    for situation in (torch.no_grad(), saved_tensors_hooks(lambda x: x, lambda x: x)):
        with situation:
            mode = swapping()
            mode.watch(lambda: F.dropout(X))
        assert mode.called


def test_a_compiler_that_traces_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = swapping()
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    mode.watch(lambda: F.dropout(X))
    assert not mode.called


def test_attention_draws_inside_its_body_and_the_function_around_it_is_seen_once() -> None:
    attention = torch.nn.MultiheadAttention(4, 2, dropout=0.5)
    mode = swapping()
    mode.watch(lambda: attention(X, X, X))
    assert mode.called and mode.drew


@pytest.mark.parametrize(
    ("call", "all_seen"),
    [
        (lambda: F.relu(X), True),
        (lambda: F.dropout(X), True),
        (lambda: (torch.rand(3), F.dropout(X)), True),
        (lambda: torch.ops.aten.bernoulli(X), False),
        (lambda: (F.dropout(X), torch.ops.aten.bernoulli(X)), False),
        (lambda: (torch.ops.aten.bernoulli(X), F.dropout(X)), False),
        (lambda: (torch.manual_seed(5), F.dropout(X)), False),
    ],
)
def test_a_witness_tells_whether_it_saw_all_draws(call: Callable[[], Any], all_seen: bool) -> None:
    witness = Witness({}, torch.default_generator.get_state())
    witness.watch(call)
    assert witness.saw_all() is all_seen
    assert witness.saw_all() is all_seen


def test_attention_draws_the_same_where_its_body_cannot_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = torch.nn.MultiheadAttention(4, 2, dropout=0.5)
    x = torch.rand(3, 2, 4)
    outputs = []
    for into in (catching._INTO, None):
        monkeypatch.setattr(catching, "_INTO", into)
        mode = Swapping({}, 3)
        outputs.append(mode.watch(lambda: attention(x, x, x)[0]))
        assert mode.called
    assert torch.equal(*outputs)
