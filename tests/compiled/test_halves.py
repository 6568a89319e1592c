"""A backward graph in two halves: together they give what it gives, and as few bytes as may be live in between."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.compiled.backend import Made
from splitpipe.compiled.halves import Halves, bytes_given, halved, only_views
from tests.helpers.compiling import EAGER
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
    made = list(found.second(*rest))
    for number, places in found.weights:
        left, *right = [made[place] for place in places]
        gradients[number] = left.t().mm(right[0]) if right else left
    return gradients


def linear(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return grad @ weight, grad.t() @ x, grad.sum(0)


X, W, G = torch.randn(5, 3), torch.randn(4, 3), torch.randn(5, 4)


def test_a_product_is_left_as_its_two_factors() -> None:
    found = halved(traced(linear, X, W, G), [1, 2])
    assert found is not None and found.inputs == (0,) and [len(places) for _, places in found.weights] == [2, 1]
    gradients = apart(found, [X, W, G])
    for number, expected in enumerate(linear(X, W, G)):
        torch.testing.assert_close(gradients[number], expected)
    assert not [node for node in found.second.graph.nodes if node.target is aten.mm.default]


def test_a_transposed_product_is_too() -> None:
    def call(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ weight, (x.t() @ grad).t()

    found = halved(traced(call, X, W, G), [1])
    assert found is not None and len(found.weights[0][1]) == 2
    torch.testing.assert_close(apart(found, [X, W, G])[1], G.t() @ X)


def test_without_an_input_that_needs_a_gradient_all_is_the_weights() -> None:
    def call(x: Tensor, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.t() @ x

    found = halved(traced(call, X, G), [1])
    assert found is not None and found.first is None and only_views(found.second)
    torch.testing.assert_close(apart(found, [X, G])[1], G.t() @ X)


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


def test_a_convolution_gives_its_two_gradients_in_two_halves() -> None:
    def call(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = aten.convolution_backward(
            grad, x, weight, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )
        return found

    x, weight, grad = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 5, 5)
    found = halved(traced(call, x, weight, grad), [1, 2])
    assert found is not None and found.first is not None
    for half, mask in ((found.first, [True, False, False]), (found.second, [False, True, True])):
        [node] = half.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
        assert list(node.args[-1]) == mask
    gradients = apart(found, [x, weight, grad])
    for number, expected in enumerate(call(x, weight, grad)):
        torch.testing.assert_close(gradients[number], expected)


def test_the_graph_that_is_given_stays_as_it_was() -> None:
    graph = traced(linear, X, W, G)
    before = graph.print_readable(print_output=False)
    halved(graph, [1, 2])
    assert graph.print_readable(print_output=False) == before


@pytest.mark.thorough
def test_as_many_bytes_as_the_eager_engine_holds_or_fewer(nothing_compiled: None) -> None:
    """Between B and W a layer norm, two linear layers and a gelu keep no more than those two layers' pairs, eagerly."""
    held: list[int] = []
    backward = Made.backward

    def noted(self: Made, whole: GraphModule, *given: Any) -> Any:
        found = halved(whole, self._weights)
        if found is not None:
            held.append(bytes_given(found.second))
        return backward(self, whole, *given)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    model = SplitPipe(nn.Sequential(Block(), Block()), [1, 1], devices=["cpu"] * 2, chunks=1, compile=EAGER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Made, "backward", noted)
        model(torch.randn(16, 8, requires_grad=True)).sum().backward()
    pairs = 16 * (8 + 32 + 32 + 8) * 4  # Inputs and output gradients of both.
    assert held and max(held) <= pairs + 16 * 2 * 4 + 8 * 4 * 2
