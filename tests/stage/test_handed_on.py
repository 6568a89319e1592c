"""A tensor of its own that a stage hands on as it is: a parameter, a buffer, its input."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.covering import graded, pairs
from tests.helpers.skipping import popping, stashing
from tests.helpers.twin import assert_same, assert_same_tensors


class Apply(nn.Module):
    """A function of what a layer is given and what it has."""

    def __init__(self, function: Callable[..., Any], *has: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        self.count = len(has)
        for number, each in enumerate(has):
            if type(each) is Tensor:
                self.register_buffer(f"own{number}", each)
            else:
                setattr(self, f"own{number}", each)

    def forward(self, x: Any) -> Any:
        return self.function(x, *[getattr(self, f"own{number}") for number in range(self.count)])


def owned(*shape: int, grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.rand(*shape), requires_grad=grad)


def mixed(given: Any) -> Tensor:
    x, token = given["x"], given["nested"][0]
    return (x * token).sin() * token


def both(layer: nn.Module) -> Apply:
    return Apply(lambda given, inner: (inner(given[0]), given[1].sin() * given[1]), layer)


def frozen_in_two() -> list[nn.Module]:
    frozen = owned(4, grad=False)
    take = Apply(lambda p, own, other: p[0] * p[1] * own * other, frozen, owned(4))
    return [Apply(lambda x, own: (x * own, own), frozen), take, nn.Linear(4, 4)]


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "queries in place of the input": lambda: [
        Apply(lambda x, queries: queries, owned(3, 4)), nn.Linear(4, 4), nn.Tanh()],
    "a token beside the input": lambda: [
        Apply(lambda x, token: (x, token), owned(4)), both(nn.Linear(4, 4)), Apply(lambda p: p[0] * p[1])],
    "a token in a nesting": lambda: [
        Apply(lambda x, token: {"x": x, "nested": [token, None]}, owned(4)), Apply(mixed), nn.Linear(4, 4)],
    "a weight for tying, through a stage": lambda: [
        Apply(lambda x, layer: (layer(x), layer.weight), nn.Linear(4, 4)),
        Apply(lambda p, layer: (layer(p[0]).tanh(), p[1]), nn.Linear(4, 4)),
        Apply(lambda p: F.linear(p[0], p[1]).tanh())],
    "a token over a skip": lambda: [
        stashing("token")(lambda x, layer: (layer.bias, x * layer.bias)), nn.Linear(4, 4),
        popping("token")(lambda x, scale, token: (x * token).sin())],
    "the input beside a token": lambda: [
        Apply(lambda x, token: (x, token, x), owned(4)), Apply(lambda p: (p[0] * p[1] * p[2], p[1])),
        Apply(lambda p, layer: layer(p[0]) * p[1].exp(), nn.Linear(4, 4))],
    "a buffer": lambda: [
        Apply(lambda x, own: (x, own), torch.rand(4)), Apply(lambda p, own: (p[0] * p[1] * own, p[1]), owned(4)),
        Apply(lambda p, own: p[0] * p[1] * own, owned(4))],
    "a frozen parameter": lambda: [
        Apply(lambda x, own: (x, own), owned(4, grad=False)), Apply(lambda p, own: p[0] * p[1] * own, owned(4)),
        nn.Linear(4, 4)],
    "a frozen parameter that the next stage has as well": frozen_in_two,
    "a leaf made on the way": lambda: [
        nn.Linear(4, 4), Apply(lambda x: x.detach().requires_grad_()), nn.Linear(4, 4)],
}
AXES: dict[str, list[Any]] = {
    "name": [*LAYERS], "schedule": ["gpipe", "1f1b", "zb-h1"], "checkpoint": ["always", "except_last", "never"],
    "backward": ["split", "autograd"],
}


@graded(AXES, essence=[[axis] for axis in AXES], thorough=pairs([*AXES]))
def test_what_is_handed_on_gets_its_gradient(name: str, schedule: Any, checkpoint: Any, backward: Any) -> None:
    module = nn.Sequential(*LAYERS[name]())
    plain = copy.deepcopy(module)
    options: dict[str, Any] = {}
    if schedule != "gpipe":
        options = {"schedule": schedule, "loss_fn": lambda y, _: y.square().mean()}
    model = SplitPipe(module, [1, 1, 1], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint, backward=backward,
                      **options)
    for _ in range(2):
        x, x2 = (torch.rand(6, 4).requires_grad_() for _ in range(2))
        x2.data.copy_(x.data)
        expected = torch.stack([plain(rows).square().mean() for rows in x2.chunk(3)]).mean()
        loss = model(x, target=torch.zeros(6)) if options else model(x).square().mean()
        for each in (expected, loss):
            each.backward()
        torch.testing.assert_close(loss, expected)
        assert_same(x.grad, x2.grad, "input gradient")
        assert_same_tensors(model, plain)
