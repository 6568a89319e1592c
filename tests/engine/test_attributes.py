"""A tensor with a graph that a forward leaves in an attribute: there for the code right after it, not later."""
from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import weight_norm

from splitpipe import SplitPipe
from tests.engine.models import CHECKPOINTS, SCHEDULES, batch, piped
from tests.helpers.covering import pairwise
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import inside, loss_of
from tests.helpers.twin import assert_same, assert_same_tensors, descend

NONE = "ignore:the forward left .*, a tensor with a graph:UserWarning"


def weighing(self: Any, x: Tensor) -> Tensor:
    """Leaves the balance of its experts, and what it has computed it from."""
    self.weights = self.gate(x).softmax(1)
    self.gate.balance = self.weights.var(1).sum()
    self.history = {"weights": [self.weights], "steps": 1}
    return x + self.layer(x) * self.weights[:, :1]  # type: ignore[no-any-return]


def experts() -> nn.Module:
    """A layer with a gate."""
    return module_of(weighing, layer=nn.Linear(4, 4), gate=nn.Linear(4, 2))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Experts; the loss includes what ``after`` computes right after a block."""

    def __init__(self, after: Callable[[Any], Any] = lambda block: 0, block: Callable[[], nn.Module] = experts) -> None:
        super().__init__()
        self.blocks, self.head, self.after = nn.ModuleList(block() for _ in range(4)), nn.Linear(4, 4), after

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        more: Any = 0
        for block in self.blocks:
            x = block(x)
            more = more + self.after(block)
        y = self.head(x)
        return {"loss": F.mse_loss(y, labels) + 0.1 * more, "y": y}


#: What the code right after a block computes from what it has left.
AFTER: dict[str, Any] = {"unused": lambda block: 0,
                         "number": lambda block: block.gate.balance / len(block.weights),
                         "rows": lambda block: block.history["weights"][0].mean()}


@pytest.mark.filterwarnings(NONE, "ignore:the loss, or another number:UserWarning")
@pairwise(after=[*AFTER], schedule=SCHEDULES, checkpoint=CHECKPOINTS)
def test_a_block_may_leave_tensors_for_the_code_right_after_it(after: str, schedule: str, checkpoint: str) -> None:
    plain, given = Mixture(AFTER[after]), batch(6 if after == "rows" else 7)
    model = piped(plain, ["blocks.2"], schedule=schedule, checkpoint=checkpoint,
                  reduction="mean" if after == "rows" else None)
    for _ in range(2):
        found, expected = model(**given), plain(**given)
        for output in (found, expected):
            output["loss"].backward()
        assert_same(found, expected, "output")
        assert_same_tensors(model, plain)
        descend(model, plain)
    for block in model.blocks:
        assert block.weights is None and block.gate.balance is None and block.history == {"weights": [None], "steps": 1}
    model(**batch(1))  # A single microbatch is the batch.
    assert len(model.blocks[0].weights) == 1


def condition(net: Any, x: Tensor) -> Tensor:
    """Sets a condition for the layers, and takes it away afterwards."""
    net.condition = net.a.layer(x).tanh()
    y: Tensor = net.c(net.b(x)) * net.condition
    net.condition = None
    return y


def states(net: Any, x: Tensor) -> Tensor:
    h = net.a.layer(x)
    net.states = [(h, h.tanh())]
    return net.c(net.b(h)) * net.states[0][1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("forward", "name"), [
    (lambda net, x: net.c(net.b(net.a(x))) + net.a.weights.sum(1, keepdim=True), "a.weights"),
    (condition, "condition"), (states, "states")])
def test_it_is_none_on_a_later_stage_with_one_warning(forward: Any, name: str, schedule: str) -> None:
    net = module_of(forward, a=experts(), **linears("b", "c"))
    model = SplitPipe(net, cuts=["b", "c"], devices=["cpu"] * 3, chunks=2, **inside({"schedule": schedule}))
    with torch.no_grad():
        loss_of(model, torch.randn(8, 4))  # Shows none.
    for count in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises((TypeError, AttributeError), match="None"):
                loss_of(model, torch.randn(8, 4))
        told = [str(each.message) for each in caught]
        assert len(told) == count and all(repr(name) in each and "a tensor with a graph" in each for each in told)


def test_a_block_that_takes_anothers_place_is_looked_at_too() -> None:
    net = module_of(lambda net, x: net.c(net.b(net.a(x))), **linears("a", "b", "c"))
    model = SplitPipe(net, cuts=["b", "c"], devices=["cpu"] * 3, chunks=2)
    model(torch.randn(8, 4))
    net.a = experts()
    with pytest.warns(UserWarning, match="the forward left 'a.gate.balance'"):
        model(torch.randn(8, 4))
    assert net.a.weights is None


def keeping(self: Any, x: Tensor) -> Tensor:
    """Keeps a constant, a number and a count, which have no graph."""
    if self.scale is None:
        self.scale = torch.arange(4.0).to(x).cos()
    self.width, self.count = x.shape[1], (x[:, 0] > 0).sum() + 1
    return x + self.layer(x) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_what_has_no_graph_or_is_computed_before_each_forward_is_none_of_them(checkpoint: str) -> None:
    module = Mixture(lambda block: block.scale.sum(), lambda: module_of(keeping, scale=None, **linears("layer")))
    with pytest.warns(FutureWarning):
        weight_norm(module.blocks[0].layer)  # A hook computes its weight before each forward.
    model = SplitPipe(module, cuts=["blocks.2"], devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint)
    model(**batch(7))["loss"].backward()
    assert model.blocks[0].scale.shape == (4,) and model.blocks[0].layer.weight.shape == (4, 4)
