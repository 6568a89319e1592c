"""A pass that fails: which of several errors is raised, what is stopped and closed, and who may call a model."""
from __future__ import annotations

import contextvars
import copy
import gc
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.core import thread_state
from splitpipe.core.mailbox import Exchange
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Outcome, Pool
from splitpipe.training.executor import Execution, OpRun
from tests.helpers.deferring import double as double
from tests.helpers.faults import Special
from tests.helpers.scheduled import mlp, twins
from tests.helpers.twin import assert_same_tensors


def run(model: SplitPipe) -> Tensor:
    loss: Tensor = model(torch.randn(7, 4), target=torch.randn(7, 4))
    return loss


def test_two_stages_that_fail_one_after_the_other_do_not_hang() -> None:
    failed = threading.Event()

    class Fails(nn.Module):
        armed = False

        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first = first

        def forward(self, x: Tensor) -> Tensor:
            if self.armed and self.first and x.max() > 0:
                failed.set()
                raise ValueError("first")
            if self.armed and not self.first:
                assert failed.wait(60)
                raise ValueError("second")
            return x * 1

    model = SplitPipe(nn.Sequential(Fails(True), Fails(False)), [1, 1], devices=["cpu"] * 2, chunks=2,
                      schedule="1f1b", loss_fn=lambda y, _: y.mean())
    x = torch.tensor([[0.0], [1.0]])
    model(x, target=0)  # A stage's first microbatch ever runs alone.
    Fails.armed = True
    with pytest.raises(ValueError):
        model(x, target=0)
    Fails.armed = False
    assert model(x, target=0) == 0.5


def test_a_worker_does_no_further_pass_once_another_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped, stop = threading.Event(), threading.Event(), Exchange.stop
    monkeypatch.setattr(Exchange, "stop", lambda self: (stop(self), stopped.set()))
    done: list[Tensor] = []

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            done.append(x)
            if len(done) == 2:  # What the others are given is there already.
                begun.set()
                assert stopped.wait(60)
            return super().forward(x)

    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert begun.wait(60)
            raise ValueError

    _, model = twins(nn.Sequential(First(4, 4), Fails(4, 4)), "gpipe", 2, loss_fn=F.mse_loss, chunks=7)
    with pytest.raises(ValueError):
        run(model)
    assert len(done) == 2


def test_a_layer_may_call_another_model() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SplitPipe(mlp(4), [2, 2], devices=["cpu"] * 2, chunks=2, schedule="1f1b", loss_fn=F.mse_loss)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    module = nn.Sequential(nn.Linear(4, 4), Calls(), nn.Linear(4, 4))
    plain = copy.deepcopy(module)
    model = SplitPipe(module, [1, 1, 1], devices=["cpu"] * 3, chunks=3, schedule="zb-h1", loss_fn=F.mse_loss)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    for loss in (model(x, target=y), F.mse_loss(plain(x), y)):
        loss.backward()
    assert_same_tensors(model, plain)


def test_a_layer_that_writes_to_what_another_needs_is_told_of_it() -> None:
    class Spoils(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            y.data.mul_(1)
            with torch.no_grad():
                y.add_(1)
            return y

    _, model = twins(nn.Sequential(nn.Linear(4, 4), Spoils()), "1f1b", 2, loss_fn=F.mse_loss, chunks=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as info:
        run(model)
    assert re.search(r"in 1BW\d, stage 1", "\n".join(info.value.__notes__))


def test_a_parameter_that_a_layer_replaces_in_its_forward_stays_replaced() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(self.weight, Marked):
                self.weight = Marked(torch.ones(4))
            return x * self.weight

    class Marked(nn.Parameter):
        pass

    model = twins(nn.Sequential(nn.Linear(4, 4), Replaces()), "1f1b", 2, loss_fn=F.mse_loss)[1]
    run(model)
    assert type(model[1].weight) is Marked


class Calls:
    """The ops of a stage, which note that they are called, and call what they are given."""

    trace = None

    def __init__(self, stage: int, log: list[str], does: Callable[[], object] = str) -> None:
        self.stage, self.log, self.does = stage, log, does

    def forward(self, microbatch: int) -> None:
        self.does()
        self.log.append(f"{self.stage}F{microbatch}")

    def close(self) -> None:
        self.log.append(f"{self.stage} closed")


class Nowhere:
    """An exchange between stages that send nothing."""

    def stop(self) -> None:
        pass


def walk(
    *passes: Calls, pool: Pool | None = None, done: Callable[[], object] = str, around: State | None = None,
    exchange: Any = None,
) -> None:
    """Has each stage's own worker do one F."""
    execution = Execution(
        stages=passes,  # type: ignore[arg-type]
        rows=[[OpRun("F", one.stage, (0,))] for one in passes],
        exchange=exchange or Nowhere(),
        around=around or thread_state.capture(),
        done=done,  # type: ignore[arg-type]
    )
    execution.run(pool or Pool([str(one.stage) for one in passes]), contextvars.copy_context())


def test_the_first_exception_is_raised_though_another_follows() -> None:
    begun, stopped = threading.Event(), threading.Event()

    def first() -> None:
        assert begun.wait(60)
        raise KeyError

    def second() -> None:
        begun.set()
        assert stopped.wait(60)
        raise ValueError

    with pytest.raises(KeyError):
        walk(Calls(0, [], first), Calls(1, [], second), exchange=SimpleNamespace(stop=stopped.set))


def test_each_stage_is_closed_once_and_the_end_is_told_once_when_all_are() -> None:
    log: list[str] = []
    walk(*[Calls(stage, log) for stage in range(3)], done=lambda: log.append("done"))
    assert sorted(log[:-1]) == ["0 closed", "0F0", "1 closed", "1F0", "2 closed", "2F0"] and log[-1] == "done"


def test_passes_are_in_the_state_that_is_around_them() -> None:
    seen: list[bool] = []
    with torch.no_grad():
        around = thread_state.capture()
    walk(Calls(0, [], lambda: seen.append(torch.is_grad_enabled())), around=around)
    assert seen == [False]


def test_what_is_raised_before_the_first_pass_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(state: State) -> Any:
        raise Special("no")

    around = thread_state.capture()
    monkeypatch.setattr(thread_state, "entered", entered)
    with pytest.raises(Special, match="no") as info:
        walk(Calls(0, []), around=around)
    assert info.value.__notes__ == ["before its first op"]


def test_what_interrupts_the_caller_is_raised_when_no_worker_is_at_work_any_more() -> None:
    log: list[str] = []
    begun, resting = threading.Event(), threading.Event()

    class Interrupts(Pool):
        def submit(self, worker: int, *given: Any) -> Outcome[Any]:
            if worker == 0 and not resting.is_set():
                assert begun.wait(60)
                raise Special
            return super().submit(worker, *given)

        def _rest(self) -> None:
            resting.set()
            super()._rest()

    def does() -> None:
        begun.set()
        resting.wait(60)

    try:
        with pytest.raises(Special):
            walk(Calls(0, log), Calls(1, log, does), pool=Interrupts(["0", "1"]))
        assert log == ["1F0", "1 closed"]
    finally:
        resting.set()


class Tracked(Special):
    """Can be followed by a weak reference."""

    made: list[weakref.ref[BaseException]] = []

    def __init__(self) -> None:
        self.made.append(weakref.ref(self))


def fail() -> None:
    raise Tracked


@pytest.mark.parametrize("does", [{"in_pass": fail}, {"done": fail}])
def test_an_exception_goes_with_its_last_reference(does: dict[str, Callable[[], object]]) -> None:
    gc.disable()
    try:
        with suppress(Special):
            walk(Calls(0, [], does.get("in_pass", str)), done=does.get("done", str))
        assert Tracked.made.pop()() is None
    finally:
        gc.enable()
