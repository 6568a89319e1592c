"""What waits for W: how much, in which order it is computed, that nobody writes to it, and which stream waits."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, is_recomputing
from tests.helpers.deferring import Call, Scale, scale
from tests.helpers.deferring import double as double
from tests.promise.layers import Apply

#: As many bytes as there are.
ALL = 2**30


class Logged(Scale):
    """Says when each half of its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        ctx.log, ctx.name = options["log"], options["name"]
        return Scale.forward(ctx, x, *weights)

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        ctx.log.append(("B", ctx.name))
        return Scale.backward_input(ctx, grad_output)

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        ctx.log.append(("W", ctx.name))
        return Scale.backward_weight(ctx, grad_output)


def logged(log: list[Any], stages: int = 1, **options: Any) -> SplitPipe:
    layers = [scale(4, Logged, log=log, name=str(stage)) for stage in range(stages)]
    return SplitPipe(nn.Sequential(*layers), [1] * stages, devices=["cpu"] * stages, **options)


def kinds(log: list[tuple[str, str]], stage: str = "0") -> str:
    return "".join(kind for kind, name in log if name == stage)


#: Bytes that a microbatch of two rows leaves: the input, and the gradient of the output.
WAITING = 2 * 2 * 4 * 8


@pytest.mark.parametrize(("limit", "order"), [(ALL, "BBBBWWWW"), (0, "BWBWBWBW"), (WAITING - 1, "BWBWBWBW"),
                                              (WAITING, "BBWWBBWW"), (2 * WAITING, "BBBWWWBW")])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_w_of_all_that_waits_comes_when_it_is_more_than_the_limit(checkpoint: str, limit: int, order: str) -> None:
    log: list[Any] = []
    model = logged(log, stages=2, chunks=4, checkpoint=checkpoint, stash_limit=limit)
    for _ in range(2):
        log.clear()
        model(torch.randn(8, 4, requires_grad=True)).sum().backward()
        assert [kinds(log, stage) for stage in "01"] == [order] * 2


def test_by_default_no_more_waits_than_the_weights_take_and_w_comes_before_the_next_recomputation() -> None:
    log: list[Any] = []
    logged(log, chunks=2, checkpoint="never")(torch.randn(4, 4)).sum().backward()
    assert kinds(log) == "WW"  # The input needs no gradient.
    log.clear()
    model = logged(log, chunks=4, checkpoint="always")
    model[0].register_forward_hook(lambda *_: log.append(("F", "0")) if is_recomputing() else None)
    model(torch.randn(8, 4, requires_grad=True)).sum().backward()
    assert kinds(log) == "FBW" * 4


class Overwriting(torch.autograd.Function):
    """Twice x; backward overwrites its input, which another layer has saved, and its gradient, which others have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.x.zero_()
        return grad.mul_(2)


@pytest.mark.parametrize(("function", "shape"), [(nn.functional.linear, (4, 4)), (Scale.apply, (4,))])
@pytest.mark.parametrize("schedule", [None, "zb-h1"])
def test_a_tensor_that_w_reads_and_backward_overwrites_is_an_error(schedule, function, shape):
    def residual(x: Tensor, w: Tensor) -> Tensor:
        x = x * 1
        return Overwriting.apply(x) + function(x, w)

    options = {} if schedule is None else {"schedule": schedule, "loss_fn": nn.functional.mse_loss}
    layers = nn.Sequential(nn.Linear(4, 4), Call(residual, weight=torch.rand(shape)))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never", stash_limit=ALL, **options)
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified in place during backward.*backward='autograd'") as caught:
        (model(x).square().sum() if schedule is None else model(x, target=torch.randn(4, 4))).backward()
    assert "in the weight gradient of 1.weight" in caught.value.__notes__


def test_a_gradient_that_w_reads_and_another_stage_overwrites_is_an_error() -> None:
    first = Apply(lambda x: (x * 1, Overwriting.apply(x * 1)))
    last = Call(lambda xs, w: nn.functional.linear(xs[0], w) + xs[1], weight=torch.rand(4, 4))
    first.shared = last.shared = nn.Buffer(torch.zeros(1))  # One worker: B of the first stage, then W of the last.
    model = SplitPipe(nn.Sequential(first, last), [1, 1], devices=["cpu"] * 2, chunks=3, stash_limit=ALL)
    with pytest.raises(RuntimeError, match="modified in place during backward"):
        model(torch.randn(6, 4, requires_grad=True)).square().sum().backward()
