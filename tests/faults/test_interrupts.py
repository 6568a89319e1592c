"""What comes from outside of a call: interrupts in the caller, threads that die or do not start."""
from __future__ import annotations

import copy
import ctypes
import linecache
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe
from splitpipe.core.note import add_note
from splitpipe.core.worker import WorkerDiedError
from tests.faults.test_ops import CASES
from tests.helpers.deferring import Call
from tests.helpers.signals import interrupts
from tests.helpers.twin import assert_same_tensors

NAMES = pytest.mark.parametrize("name", [None, "1f1b", "zb-v"])
X, Y = torch.linspace(-1, 1, 28).reshape(7, 4), torch.linspace(0, 1, 28).reshape(7, 4)


def piped(name: str | None, call: Callable[[Tensor], Tensor] = torch.tanh) -> tuple[nn.Sequential, SplitPipe]:
    """A module that calls what is given in its last stage, and its pipeline, which has made a step."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Call(call), nn.Linear(4, 4))
    options: dict[str, Any] = {} if name is None else {"schedule": name, "loss_fn": F.mse_loss}
    model = SplitPipe(copy.deepcopy(module), [1, 1, 1, 2] if name == "zb-v" else [2, 3], devices=["cpu"] * 2, chunks=3,
                      checkpoint="never", **options)
    step(model, name)
    return module, model


def step(model: nn.Module, name: str | None) -> None:
    model.zero_grad()
    (F.mse_loss(model(X), Y) if name is None else model(X, target=Y)).backward()


def assert_right(plain: nn.Sequential, model: SplitPipe, name: str | None) -> None:
    step(plain, None)
    step(model, name)
    assert_same_tensors(model, plain)


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Raises in the main thread, from a worker."""
    with interrupts() as send:
        yield send


@NAMES
@pytest.mark.parametrize("twice", [False, True])
def test_an_interrupt_waits_for_the_ops_that_run_and_a_second_one_does_not(
    name: str | None, twice: bool, interrupt: Callable[[], None]
) -> None:
    doing: list[Callable[[], Any]] = []
    go, ended = threading.Event(), threading.Event()

    def call(x: Tensor) -> Tensor:
        if doing and "splitpipe worker" in threading.current_thread().name:
            doing.pop()()
        return x.tanh()

    def interrupts() -> None:
        interrupt()
        if twice:
            interrupt()
            assert go.wait(60)
        ended.set()

    plain, model = piped(name, call)
    model.zero_grad()
    doing.append(interrupts)
    with pytest.raises(KeyboardInterrupt) as info:
        step(model, name)
    assert ended.is_set() is not twice
    go.set()
    assert ended.wait(60) and all(parameter.grad is None for parameter in model.parameters())
    # The second is an error of its own, raised while the first one is handled.
    assert twice or name is None or re.search(r"while the workers did .*\dF\d", "\n".join(info.value.__notes__))
    assert_right(plain, model, name)


@NAMES
def test_an_interrupt_in_backward_is_raised_and_the_next_step_is_right(name: str | None) -> None:
    plain, model = piped(name)
    handle = model[0].weight.register_hook(lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        step(model, name)
    handle.remove()
    assert_right(plain, model, name)


@NAMES
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_dies_fails_the_call_and_the_next_has_new_ones(
    name: str | None, worker: int, monkeypatch: pytest.MonkeyPatch, untraced: None
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    before = set(threading.enumerate())
    plain, model = piped(name)
    threads = {thread.name: thread for thread in set(threading.enumerate()) - before}
    ident = ctypes.c_ulong(threads[f"splitpipe worker {worker}"].ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1
    with pytest.raises(WorkerDiedError):
        step(model, name)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_right(plain, model, name)
    for thread in threads.values():
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads.values()), "what is left of the old ones ends with them"


@pytest.mark.parametrize("name", [None, "1f1b"])
@pytest.mark.parametrize("started", range(4))  # Two workers, and two threads that set the number of torch's own.
def test_a_thread_that_cannot_start_is_an_error_and_the_next_call_is_right(
    name: str | None, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = piped(name)
    model = copy.deepcopy(model)
    start, starts = threading.Thread.start, iter([True] * started + [False])

    def started_so_far(thread: threading.Thread) -> None:
        if not next(starts, True):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started_so_far)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        step(model, name)
    assert_right(plain, model, name)


def _finalizes(frame: FrameType | None) -> bool:
    """True inside of a finalizer, of another model that is collected now, say."""
    while frame is not None and frame.f_code is not weakref.finalize.__call__.__code__:
        frame = frame.f_back
    return frame is not None


class Lines:
    """Counts the lines of the package that a thread comes by, and is interrupted at one of them.

    But never at a ``with``: Python comes by its line once more at the end of the block, before that is left.

    Args:
        file: whose lines count; all those of the package if it has no name.
        at: the line, from 1 on; 0: none.
    """

    PACKAGE = str(Path(splitpipe.__file__).parent)

    def __init__(self, file: str = "", at: int = 0) -> None:
        self.count, self.at, self._file, self.where = 0, at, file, ""

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        sys.settrace(self._before)
        torch.set_grad_enabled(True)  # The end of torch.no_grad() is Python, and may be what is interrupted.
        if kind is None and self.count < self.at:  # How many lines a wait has depends on the workers.
            raise KeyboardInterrupt

    def start(self) -> None:
        """This is the thread."""
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        file = frame.f_code.co_filename
        if _finalizes(frame):  # What is raised there is printed, and goes no further.
            return None
        return self._line if file.startswith(self.PACKAGE) and file.endswith(self._file) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        where = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not linecache.getline(*where).lstrip().startswith("with "):
            self.count += 1
            if self.count == self.at:
                self.where = f"{Path(where[0]).name}:{where[1]}"
                raise KeyboardInterrupt
        return self._line


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "file", "every"), [
    ("drop-in", "worker.py", 5), ("drop-in", "batchnorm.py", 5), ("drop-in", "", 149),
    ("1f1b", "worker.py", 3), ("1f1b", "batchnorm.py", 5), ("1f1b", "", 31),
])
def test_an_interrupt_at_any_line_of_the_caller_is_raised_and_the_model_is_as_it_was(
    name: str, file: str, every: int
) -> None:
    case = CASES[name]()
    with Lines(file) as whole:
        case.step(case.model)
    assert whole.count > 30
    for at in range(1, whole.count, every):
        lines = Lines(file, at)
        try:
            case.survives(KeyboardInterrupt, same=False, through=True, within=lines)
        except BaseException as failed:
            add_note(failed, f"with an interrupt at line {at}, {lines.where}")
            raise


@pytest.mark.thorough
@pytest.mark.parametrize("name", [None, "1f1b"])
def test_an_exception_at_any_line_of_a_worker_is_raised_or_harmless_and_the_next_step_is_right(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    plain, model = piped(name)

    def attempt(at: int) -> Lines:
        lines = Lines(at=at)
        pool = model._runtime._resources._pool
        assert pool is not None
        pool.submit(0, lines.start).get()
        try:
            step(model, name)
        except (KeyboardInterrupt, WorkerDiedError):
            pass
        finally:
            lines.at = 0
        assert_right(plain, model, name)
        return lines

    whole = min([attempt(0) for _ in range(3)], key=lambda lines: lines.count)
    assert whole.count > 30
    # Which lines a worker comes by depends on the others.
    reached = [bool(attempt(at).where) for at in range(1, whole.count, 61)]
    assert all(reached[: len(reached) // 2])
