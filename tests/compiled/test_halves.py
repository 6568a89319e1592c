"""A backward graph in two halves: together they give what it gives, and as few bytes as may be live in between."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from splitpipe.compiled.halves import Halves, halved
from tests.helpers.compiling import nothing_compiled as nothing_compiled

aten = torch.ops.aten


def traced(call: Callable[..., tuple[Tensor | None, ...]], *given: Tensor) -> GraphModule:
    """The graph of a function of what a forward has saved and of output gradients, which come last."""
    graph: GraphModule = make_fx(call, tracing_mode="fake")(*given)
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node in placeholders:
        node.target = node.name = node.target.replace("_1", "")
    last = placeholders[-1]
    last.target = last.name = "tangents_1"
    graph.recompile()
    return graph


def apart(found: Halves, given: list[Tensor]) -> dict[int, Tensor]:
    """All gradients, by way of both halves."""
    gradients: dict[int, Tensor] = {}
    rest: list[Any] = given
    if found.first is not None:
        made = list(found.first(*given))
        gradients.update(zip(found.inputs, made))
        rest = made[len(found.inputs):]
    gradients.update(zip(found.weights, found.second(*rest)))
    return gradients


def bytes_given(graph: GraphModule) -> int:
    """The bytes of a graph's arguments: of the second half, what lives from B to W."""
    return sum([node.meta["val"].nbytes for node in graph.graph.find_nodes(op="placeholder")])


def linear(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return grad @ weight, grad.t() @ x, grad.sum(0)


def convolution(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = aten.convolution_backward(grad, x, weight, [4], [1, 1], [1, 1], [1, 1], False, [0, 0],
                                                          1, [True, True, True])
    return found


X, W, G = torch.randn(5, 3), torch.randn(4, 3), torch.randn(5, 4)


@pytest.mark.parametrize(("call", "given", "product"), [
    (linear, [X, W, G], aten.mm.default),
    (convolution, [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 5, 5)],
     aten.convolution_backward.default),
], ids=["linear", "convolution"])
def test_the_two_halves_give_what_the_whole_gives_each_with_a_product(call, given, product):
    found = halved(traced(call, *given), [1, 2])
    assert found is not None and found.first is not None and (found.inputs, found.weights) == ((0,), (1, 2))
    gradients = apart(found, given)
    for number, expected in enumerate(call(*given)):
        torch.testing.assert_close(gradients[number], expected)
    (first,), (second,) = (half.graph.find_nodes(op="call_function", target=product) for half in found[:2])
    if call is convolution:  # Which of its gradients it computes.
        assert (list(first.args[-1]), list(second.args[-1])) == ([True, False, False], [False, True, True])


@pytest.mark.parametrize("weights", [[], [1]])
def test_without_a_weight_that_needs_one_it_stays_whole(weights: list[int]) -> None:
    def call(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ weight, None

    assert halved(traced(call, X, W, G), weights) is None


def test_what_is_cheap_is_computed_again_and_few_bytes_are_live() -> None:
    def call(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        inner = grad * x.tanh().exp().sin()  # Of as many elements as what it is made of.
        return inner @ weight, (inner * 2).sum(0)

    x, weight = torch.randn(64, 32), torch.randn(32, 32)
    found = halved(traced(call, x, weight, torch.randn(64, 32)), [1])
    assert found is not None
    assert bytes_given(found.second) <= 64 * 32 * 4  # One of them, or the sum itself.
    torch.testing.assert_close(apart(found, [x, weight, x])[1], call(x, weight, x)[1])
