"""What a checkpointed forward saves, by numbers: filled once, and dropped with the node that holds the number."""
from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, is_recomputing
from splitpipe.stage.saved import Lasting, Numbering


def test_a_number_is_held_as_long_as_somebody_has_it() -> None:
    numbering = Numbering()
    x = torch.ones(2, 3)
    first, second = numbering.give(x), numbering.give(x)
    assert numbering.place(second) == 1 and len(numbering) == 2
    assert numbering.held(0) and numbering.held(1)
    del first
    assert not numbering.held(0) and numbering.held(1) and numbering.any_held()
    del second
    assert not numbering.any_held()


def test_tensors_that_look_alike_share_the_note_of_it() -> None:
    numbering = Numbering()
    numbers = [numbering.give(torch.ones(2, 3)), numbering.give(torch.zeros(2, 3))]
    assert len(numbers) == 2 and numbering.metas[0] is numbering.metas[1]


def test_a_parameter_has_one_record_until_it_is_written_to() -> None:
    weight = nn.Parameter(torch.ones(2))
    lasting = Lasting([weight])
    first = lasting.record(weight)
    assert lasting.record(weight) is first
    with torch.no_grad():
        weight.add_(1)
    assert lasting.record(weight) == (weight, first[1] + 1)


class Count(nn.Module):
    """Counts its recomputations; its parameter steps itself as soon as it has a gradient."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.body = body
        self.again = 0

    def forward(self, x: Tensor) -> Any:
        self.again += is_recomputing()
        return self.body(x * self.weight)


class Inner(torch.autograd.Function):
    """Goes back through another graph of its stage between two looks at what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x, other)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        before = ctx.saved_tensors[0]
        ctx.saved_tensors[1].sum()
        with torch.enable_grad():
            y = before.detach().requires_grad_()
            torch.autograd.grad(y.sin().sum(), y)
        assert ctx.saved_tensors[0].equal(before)
        return grad * 2, None


@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_a_node_that_asks_again_later_is_answered_without_another_run(backward: Any) -> None:
    def body(x: Tensor) -> Tensor:
        y = Inner.apply(x, x.detach().exp())
        z = y.sin()
        z.register_hook(lambda grad: grad * z.grad_fn._saved_self.cos().abs().ceil())  # type: ignore[union-attr]
        return z.tanh()

    layer = Count(body)

    def step(weight: Tensor) -> None:
        weight.detach().sub_(weight.grad)  # type: ignore[arg-type]

    layer.weight.register_post_accumulate_grad_hook(step)
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="always", backward=backward)
    model(torch.rand(4, 3)).sum().backward()
    assert layer.again == 2


def test_a_stage_of_which_nothing_that_was_saved_is_left_is_not_run_again() -> None:
    def body(x: Tensor) -> Tensor:
        x.exp().sin()  # Saved by nodes that are gone.
        return x + 1

    layer = Count(body)
    layer.weight.requires_grad_(False)
    x = torch.rand(4, 3, requires_grad=True)
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="always")
    model(x + 1).sum().backward()
    assert layer.again == 0 and x.grad is not None


def test_what_no_node_asks_for_is_gone_when_backward_is_over_though_another_output_lives() -> None:
    made: list[weakref.ref[Tensor]] = []

    class Deaf(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = x.detach() * 1
            made.append(weakref.ref(kept))
            ctx.save_for_backward(kept)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return Deaf.apply(x).sin(), x.cos()

    model = SplitPipe(nn.Sequential(Two()), [1], devices=["cpu"], checkpoint="always")
    first, second = model(torch.rand(4, 3, requires_grad=True))
    first.sum().backward()
    assert len(made) == 2 and not any(reference() is not None for reference in made)
    assert second.grad_fn is not None
