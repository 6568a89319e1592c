"""What a call leaves behind that was interrupted, once or twice."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.segments.walk import Walk
from tests.helpers.deferring import Call
from tests.helpers.signals import interrupts


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Raises in the main thread, from a worker."""
    with interrupts() as send:
        yield send


def test_the_traceback_of_an_interrupt_holds_nothing_that_was_on_its_way(interrupt: Callable[[], None]) -> None:
    left = [1]

    def call(x: Tensor) -> Tensor:
        if left:
            left.pop()
            interrupt()
        return x * 1

    model = SplitPipe(nn.Sequential(Call(call), nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=4)
    with pytest.raises(KeyboardInterrupt) as info:
        model(torch.randn(8, 4))
    held = [value for entry in info.traceback for value in entry.frame.f_locals.values()]
    assert not [value for value in held if isinstance(value, Walk) and vars(value)]


def test_workers_of_an_interrupted_call_leave_alone_what_the_next_one_has_parked(interrupt: Callable[[], None]) -> None:
    doing: list[Any] = []
    go = threading.Event()

    def call(x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda _: doing.pop()() if doing else None)  # In B, which has parked hooks before.
        return y

    def twice() -> None:
        interrupt()
        interrupt()  # The second is raised while the first one is waited for.
        assert go.wait(60)

    def let_go() -> None:
        go.set()
        for outcome in [pool.submit(worker, lambda: None) for worker in range(2)]:
            assert outcome.ended(60)  # And so has the interrupted call, which was before it.

    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Call(call), nn.Linear(4, 4))
    model = SplitPipe(module, [2, 3], devices=["cpu"] * 2, chunks=3, schedule="1f1b", loss_fn=F.mse_loss,
                      backward="autograd")
    fired: list[Tensor] = []
    model[2].weight.register_hook(fired.append)
    model(torch.randn(6, 4), target=torch.randn(6, 4))
    pool: Any = model._runtime._resources._pool
    doing.append(twice)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(6, 4), target=torch.randn(6, 4))
    doing.append(let_go)
    model(torch.randn(6, 4), target=torch.randn(6, 4)).backward()
    assert go.is_set() and len(fired) == 1 and torch.equal(fired[0], model[2].weight.grad)
