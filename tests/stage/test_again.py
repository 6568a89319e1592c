"""Recomputations that take several tries, or that two threads ask for at once."""
from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from splitpipe import SplitPipe
from splitpipe.stage.checkpoint import Frame
from splitpipe.stage.inventory import Inventory
from splitpipe.stage.saved import SavedDirectly


class Table(nn.Module):
    """Makes its buffer once, behind a flag."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0))
        self.made = False
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.made:
            self.table, self.made = torch.ones(6), True
        if self.generator is not None:
            x = x * torch.rand(x.shape, generator=self.generator)
        return x * self.table


@pytest.mark.parametrize("backward", ["split", "autograd"])
@pytest.mark.parametrize("own", [False, True])
def test_a_second_try_draws_the_numbers_of_the_forward(own: bool, backward: Any) -> None:
    layers = [nn.Identity() if own else nn.Dropout(), Table(torch.Generator().manual_seed(1) if own else None)]
    model = SplitPipe(nn.Sequential(*layers), [2], devices=["cpu"], checkpoint="always", backward=backward)
    x = torch.ones(64, 6, requires_grad=True)
    y = model(x)
    y.sum().backward()
    # The input and the table are ones: the gradient is what the forward multiplied by, and so is the output.
    torch.testing.assert_close(x.grad, y.detach())


def test_two_threads_that_miss_a_tensor_run_the_stage_once() -> None:
    runs: list[int] = []
    x = torch.ones(3, requires_grad=True) * 1

    def again(fill: Any) -> None:
        runs.append(1)
        fill(lambda: (x * x))

    frame = Frame(again, SavedDirectly([]))
    with torch.autograd.graph.saved_tensors_hooks(*frame.hooks()):
        x * x
    frame.close()
    met, lock = threading.Barrier(2), threading.RLock()

    class Meeting:
        """Both have missed it by the time that the first one has the lock."""

        def __enter__(self) -> None:
            met.wait(60)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    frame._lock = Meeting()  # type: ignore[assignment]
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(frame._unpack(0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(runs) == 1 and len(found) == 2


def test_a_buffer_that_is_none_is_no_reason_to_look_again() -> None:
    inventory = Inventory([("0", nn.InstanceNorm1d(4)), ("1", nn.BatchNorm1d(4))])
    slots = inventory.slots()
    assert inventory.buffers(slots).complete and inventory.buffers(slots) is inventory.buffers(inventory.slots())


class Square(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class Overwrites(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.saved_tensors[0].mul_(2)
        return 3 * grad


class Both(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()  # Which saves its output.
        return Square.apply(y) + Overwrites.apply(y)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_to_overwrite_in_backward_what_another_function_has_saved_is_an_error(checkpoint: Any) -> None:
    model = SplitPipe(nn.Sequential(Both()), [1], devices=["cpu"], checkpoint=checkpoint, backward="autograd")
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        model(torch.ones(4, requires_grad=True)).sum().backward()
