"""Rules for nodes of a graph: by a schedule the gradients are those of the module, and W computes them."""
from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.deferral import rules
from splitpipe.training import capture
from tests.helpers.deferring import Call, Scale, deferred, left, trained
from tests.helpers.deferring import apart as apart
from tests.helpers.deferring import double as double


def squares(x: Tensor, target: Any) -> Tensor:
    return x.square().flatten(1).mean(1).mean()


def test_a_node_of_another_name_loses_deferral_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.RULES, "AddmmBackward99", rules.RULES.pop("AddmmBackward0"))
    try:
        model = trained(nn.Linear(6, 4), torch.randn(7, 6), schedule="zb-h1")
        assert left(model) == {"1.weight": "addmm has no rule", "1.bias": "addmm has no rule"}
    finally:
        rules.RULES["AddmmBackward0"] = rules.RULES["AddmmBackward99"]


def test_a_node_that_saves_under_another_name_loses_deferral_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "AddmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0":
        rule: Any = rules.RULES[name]
        monkeypatch.setattr(rule, "_names", (*rule._names, "_saved_under_another_name"))
    for layer, value in (
        (nn.Linear(6, 4), torch.randn(7, 6)), (nn.Conv1d(4, 6, 3), torch.randn(7, 4, 9)),
        (nn.Embedding(11, 6), torch.randint(0, 11, (7, 5))),
    ):
        why = left(trained(layer, value, schedule="zb-h1"))["1.weight"]
        assert why.endswith("this version of torch saves other things for it")


def test_attributes_set_in_backward_input_reach_backward_weight() -> None:
    halves: list[str] = []

    class Noted(Scale):
        @staticmethod
        def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
            halves.append("input")
            ctx.own = 3
            return Scale.backward_input(ctx, grad_output)

        @staticmethod
        def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
            halves.append("weight")
            assert ctx.own == 3
            return Scale.backward_weight(ctx, grad_output)

    layer = Call(lambda x, w: Noted.apply(x, w), w=torch.randn(6))
    model = trained(layer, torch.randn(6, 6), schedule="zb-h1", steps=1)
    assert deferred(model) == {"1.w": "Noted"}
    assert sorted(halves) == ["input"] * 4 + ["weight"] * 4  # The module's own, too.


class Meet(torch.autograd.Function):
    """The tensor; a backward of a certain number waits for that of another stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meeting: tuple[threading.Barrier, list[int], int]) -> Tensor:
        ctx.meeting = meeting
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        barrier, calls, number = ctx.meeting
        calls.append(len(calls))
        if calls[-1] == number:
            barrier.wait(30)
        return grad, None


def test_two_stages_sum_gradients_of_one_leaf_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_LARGE", 2**14)
    barrier = threading.Barrier(2)
    first, second = ((barrier, list[int](), number) for number in range(2))
    leaf, x = torch.randn(100, 100, requires_grad=True), torch.randn(8, 100)
    # The second stage's second backward is at work while the first stage's first one is.
    layers = nn.Sequential(Call(lambda x: Meet.apply(x @ leaf, first)), Call(lambda x: Meet.apply(x @ leaf, second)))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=4, schedule="1f1b", loss_fn=squares)
    model(x, target=0).backward()
    found, leaf.grad = leaf.grad, None
    squares(x @ leaf @ leaf, 0).backward()
    assert found is not None and leaf.grad is not None
    torch.testing.assert_close(found, leaf.grad)
