"""What comes from outside of a pass: an interrupt in the caller, a worker that dies, another's failure."""
from __future__ import annotations

import ctypes
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.core.worker import Outcome, WorkerDiedError
from splitpipe.training.gradients import ParkedHooks
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mlp, twins
from tests.helpers.twin import assert_same_tensors
from tests.training.test_failures import NAMES, STAGES, Fault, Fragile, run, survives


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """SIGINT raises in this thread, as ever, and says so by the event."""
    received = threading.Event()

    def handler(number: int, frame: Any) -> None:
        if not received.is_set():
            received.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


@NAMES
def test_hooks_are_put_back_where_no_interrupt_arrives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def put_back(hooks: ParkedHooks) -> None:
        threads.append(threading.current_thread())
        put(hooks)

    put = ParkedHooks.put_back
    monkeypatch.setattr(ParkedHooks, "put_back", put_back)
    _, model = twins(mlp(4), name, 2, chunks=3)
    model(torch.randn(7, 4), target=0.25)
    assert threads[0] is not threading.main_thread()


@NAMES
@pytest.mark.parametrize("stage", [0, STAGES - 1])
def test_an_interrupt_in_the_caller_waits_for_the_passes_that_run(name: str, stage: int) -> None:
    ended = threading.Event()

    class Interrupts(Fragile):
        armed = False

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                Interrupts.armed = False
                # Again, if it falls between a thread's look at signals and its wait, where Python does not see it.
                while not received.wait(0.01):
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                # The caller has it from here on, and must not return before this pass does.
                ended.set()
            return super().forward(x)

    layers = [Fragile(Fault(), number) for number in range(STAGES)]
    layers[stage] = Interrupts(Fault(), stage)
    plain, model = twins(nn.Sequential(*layers), name, 2 if name == "zb-v" else STAGES, loss_fn=F.mse_loss, chunks=3,
                         checkpoint="never")
    with survives(plain, model), interruptible() as received:
        Interrupts.armed = True
        with pytest.raises(KeyboardInterrupt) as info:
            run(model)
    assert ended.is_set()
    assert re.search(rf"while the workers did .*{stage}F\d", "\n".join(info.value.__notes__))


def died(model: SplitPipe) -> str:
    """The notes of a pass whose worker dies. Nothing else holds the exception, nor what it holds in turn."""
    try:
        run(model)
    except WorkerDiedError as error:
        return "\n".join(error.__notes__)
    return "it did not die"


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("name", ["zb-v", "1f1b"])
def test_a_worker_that_dies_fails_the_pass_and_the_next_has_new_ones(
    name: str, worker: int, monkeypatch: pytest.MonkeyPatch, untraced: None
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    before = set(threading.enumerate())
    plain, model = twins(mlp(4), name, 2, loss_fn=F.mse_loss, chunks=3)
    run(model).backward()
    model.zero_grad()
    threads = {thread.name: thread for thread in set(threading.enumerate()) - before}
    thread = threads[f"splitpipe worker {worker}"]
    ident = ctypes.c_ulong(thread.ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1
    assert "before its row was done" in died(model)
    thread.join(60)
    assert all(parameter.grad is None for parameter in model.parameters())
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    for loss in (model(x, target=y), F.mse_loss(plain(x), y)):
        loss.backward()
    assert_same_tensors(model, plain)
    for old in threads.values():
        old.join(10)
    assert not any(old.is_alive() for old in threads.values()), "what is left of the old ones ends with them"


def test_threads_end_with_the_model() -> None:
    before = set(threading.enumerate())
    model = twins(mlp(4), "zb-v", 2, loss_fn=F.mse_loss, chunks=3)[1]
    run(model).backward()
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del model
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_other_workers_stop_after_the_pass_that_they_are_in() -> None:
    calls: list[str] = []
    failed = threading.Event()

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append("F")
            if len(calls) > 8 and len(calls) % 2 == 0:
                assert failed.wait(60)
            return x * 1

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(calls) > 8:
                failed.set()
                raise ValueError("no")
            return x * 1

    model = SplitPipe(nn.Sequential(Counts(), Fails()), [1, 1], devices=["cpu"] * 2, chunks=8, schedule="gpipe",
                      loss_fn=lambda y, _: y.mean(), checkpoint="never")
    x = torch.zeros(8, 1, requires_grad=True)
    model(x, target=0)
    with pytest.raises(ValueError, match="no") as info:
        model(x, target=0)
    assert "in 1F0, stage 1 (cpu)" in "\n".join(info.value.__notes__)


def test_that_a_call_is_lost_is_told_before_anybody_stops_waiting_for_it() -> None:
    """Else the caller could find all workers at rest, and no exception yet."""
    waiting: list[bool] = []
    outcome: Outcome[None] = Outcome(lambda: None, lambda _: waiting.append(outcome._done.locked()))
    outcome.fail(WorkerDiedError())
    assert waiting == [True]
