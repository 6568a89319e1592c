"""What comes from outside of a call: interrupts in the caller, threads that die, do not start, or meet in a model."""
from __future__ import annotations

import copy
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.deferring import Call
from tests.helpers.scheduled import loss_of
from tests.helpers.twin import assert_same_tensors, stages

#: With cuts the module's own code runs, each microbatch in a thread of its own.
WAYS = pytest.mark.parametrize(("name", "by"), [
    (None, "balance"), ("1f1b", "balance"), ("zb-v", "balance"), (None, "cuts"), ("1f1b", "cuts")])
X, Y = torch.linspace(-1, 1, 28).reshape(7, 4), torch.linspace(0, 1, 28).reshape(7, 4)


def piped(name: str | None, by: str = "balance",
          call: Callable[[Tensor], Tensor] = torch.tanh) -> tuple[nn.Sequential, SplitPipe]:
    """A module that calls what is given in its last stage, and its pipeline, which has made a step."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Call(call), nn.Linear(4, 4))
    options: dict[str, Any] = {} if name is None else {"schedule": name, "loss_fn": F.mse_loss}
    wrapped, where = stages(copy.deepcopy(module), [1, 1, 1, 2] if name == "zb-v" else [2, 3], by)
    model = SplitPipe(wrapped, devices=["cpu"] * 2, chunks=3, checkpoint="never", **where, **options)
    step(model)
    return module, model


def step(model: nn.Module) -> None:
    model.zero_grad()
    loss_of(model, X, Y, F.mse_loss).backward()


def assert_right(plain: nn.Sequential, model: SplitPipe) -> None:
    step(plain)
    step(model)
    assert_same_tensors(model, plain)


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Sends SIGINT, in a worker, until the main thread has raised KeyboardInterrupt."""
    armed, sending = threading.Event(), threading.Lock()

    def handle(*_: object) -> None:
        if armed.is_set():
            armed.clear()
            raise KeyboardInterrupt

    def send() -> None:
        with sending:
            armed.set()
            while armed.is_set():  # One that arrives just before the main thread blocks is noticed with the next.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    yield send
    with sending:  # A sender that has seen too late that it was raised sends one too many.
        signal.signal(signal.SIGINT, before)


@WAYS
def test_an_interrupt_waits_for_running_ops(name: str | None, by: str, interrupt: Callable[[], None]) -> None:
    doing: list[Callable[[], Any]] = []
    ended = threading.Event()

    def call(x: Tensor) -> Tensor:
        if doing and "splitpipe worker" in threading.current_thread().name:
            doing.pop()()
        return x.tanh()

    plain, model = piped(name, by, call)
    model.zero_grad()
    doing.append(lambda: (interrupt(), ended.set()))
    with pytest.raises(KeyboardInterrupt):
        step(model)
    assert ended.is_set() and all(parameter.grad is None for parameter in model.parameters())
    assert_right(plain, model)


@WAYS
@pytest.mark.parametrize("worker", [0, 1])
def test_a_dead_worker_fails_the_call_and_is_replaced_in_the_next(name, by, worker, monkeypatch, untraced):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    before = set(threading.enumerate())
    plain, model = piped(name, by)
    threads = {thread.name: thread for thread in set(threading.enumerate()) - before}
    ident = ctypes.c_ulong(threads[f"splitpipe worker {worker}"].ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1
    with pytest.raises(RuntimeError, match="a worker thread ended"):
        step(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_right(plain, model)
    for thread in threads.values():
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads.values()), "what is left of the old ones ends with them"


@pytest.mark.parametrize("name", [None, "1f1b"])
@pytest.mark.parametrize("started", range(2))
def test_a_thread_that_cannot_start_is_an_error_and_the_next_call_is_right(name, started, monkeypatch):
    plain, model = piped(name)
    model = copy.deepcopy(model)
    start, starts = threading.Thread.start, iter([True] * started + [False])

    def started_so_far(thread: threading.Thread) -> None:
        if not next(starts, True):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started_so_far)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        step(model)
    assert_right(plain, model)


def test_one_thread_goes_forward_while_another_goes_backward() -> None:
    plain, model = piped(None)
    model.zero_grad()
    inside, done, output = threading.Event(), threading.Event(), model(X)
    output.register_hook(lambda _: (inside.set(), done.wait(60)) and None)
    thread = threading.Thread(target=F.mse_loss(output, Y).backward, daemon=True)
    thread.start()
    assert inside.wait(60)
    loss = F.mse_loss(model(2 * X), Y)
    done.set()
    thread.join(60)
    assert not thread.is_alive(), "a call hangs"
    loss.backward()
    (F.mse_loss(plain(X), Y) + F.mse_loss(plain(2 * X), Y)).backward()
    assert_same_tensors(model, plain)
