"""Faults in modules with cuts: whatever happens in a segment, nobody hangs, and the next call is right.

What errors say of blocks, and errors in backward, are in segments/test_failures.py.
"""
from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.core.worker import Pool, WorkerDiedError
from splitpipe.segments.walk import Walk
from tests.helpers.faults import ERRORS, SIGNALS, throws
from tests.helpers.signals import interrupts

WAYS = pytest.mark.parametrize(
    "options", [{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}], ids=str
)
X = torch.linspace(-1, 1, 18).reshape(6, 3)


class Net(nn.Module):
    """Calls what it is told to once, between blocks, in some microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.at: tuple[int, float] | None = None
        self.does: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        first, skips = float(x[0, 0].detach()), []
        for number, block in enumerate(self.blocks):
            skips.append(x)
            x = block(x).tanh()
            if self.at == (number, first):
                self.at = None
                self.does()
        return x + skips[0] * skips[2]


def made(**options: Any) -> tuple[Net, SplitPipe]:
    """A module, and a pipeline of it."""
    torch.manual_seed(0)
    net = Net()
    if "schedule" in options:
        options["loss_fn"] = F.mse_loss
    model = SplitPipe(net, cuts=["blocks.1", "blocks.2"], devices=["cpu"] * 3, chunks=3, **options)
    return net, model


def step(model: nn.Module) -> None:
    scheduled = isinstance(model, SplitPipe) and model.schedule.name != "gpipe"
    loss = model(X, target=X) if scheduled else F.mse_loss(model(X), X)
    loss.backward()


def is_right(net: Net, model: SplitPipe) -> None:
    """A step gives what the unwrapped module gives."""
    model.zero_grad()
    step(model)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    step(plain)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@WAYS
def test_an_error_between_blocks_says_where_and_the_next_call_is_right(options: dict[str, Any]) -> None:
    net, model = made(**options)
    for number, error in enumerate(ERRORS):
        net.at, net.does = (number % 3, float(X[2, 0])), throws(error("on purpose"))
        with pytest.raises(error, match="on purpose") as caught:
            step(model)
        notes = str(caught.value.__notes__)
        assert f"stage {number % 3}" in notes and "microbatch 1 of 3" in notes
        del caught
        is_right(net, model)


@WAYS
def test_an_interrupt_ends_the_call_and_the_next_is_right(options: dict[str, Any]) -> None:
    net, model = made(**options)
    for stage, send in enumerate(SIGNALS.values()):
        net.at, net.does = (stage, float(X[2, 0])), send
        with pytest.raises(KeyboardInterrupt):
            step(model)
            signal.sigtimedwait([], 5)  # It arrives here at the latest.
        is_right(net, model)


@WAYS
@pytest.mark.thorough
def test_an_interrupt_while_microbatches_are_forgotten_leaves_the_model_usable(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, model = made(**options)
    step(model)
    real = Walk.forget
    for at in range(3):
        net.at, net.does = (1, float(X[2, 0])), throws(ValueError("on purpose"))
        left = [at]

        def interrupted(walk: Walk, left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            real(walk)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Walk, "forget", interrupted)
            step(model)
        is_right(net, model)


@WAYS
@pytest.mark.thorough
def test_what_a_second_interrupt_leaves_at_work_disturbs_no_later_call(options: dict[str, Any]) -> None:
    net, model = made(**options)
    step(model)
    go, ended = threading.Event(), threading.Event()

    with interrupts() as send:

        def stays() -> None:
            send()  # The caller wakes, and is interrupted once more while it waits for this.
            send()
            assert go.wait(60)
            ended.set()

        net.at, net.does = (1, float(X[2, 0])), stays
        with pytest.raises(KeyboardInterrupt):
            step(model)
    threads = model._runtime._resources._pool
    assert isinstance(threads, Pool) and threads.left and not ended.is_set()
    is_right(net, model)
    go.set()
    assert ended.wait(60)
    is_right(net, model)


@WAYS
def test_a_microbatchs_thread_that_dies_fails_the_call_and_the_next_has_new_ones(options: dict[str, Any]) -> None:
    net, model = made(**options)
    step(model)
    threads = model._runtime._resources._pool
    assert isinstance(threads, Pool)

    def dies() -> None:
        ident = threading.get_ident()
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit)) == 1

    net.at, net.does = (1, float(X[2, 0])), dies
    with pytest.raises((SystemExit, WorkerDiedError)):
        step(model)
    is_right(net, model)
    threads._queues[1].put(None)  # That ends the thread.
    threads._threads[1].join(60)
    assert not threads.usable
    is_right(net, model)
