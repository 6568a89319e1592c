"""Threads: workers that fail at any line of the package or don't start, and callers that meet in one model."""
from __future__ import annotations

import copy
import linecache
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe
from splitpipe.core.worker import WorkerDiedError
from tests.helpers.twin import assert_same, assert_same_tensors

PACKAGE = str(Path(splitpipe.__file__).parent)
KINDS = pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb-v"])
BATCH = torch.linspace(-1, 1, 15).reshape(5, 3)


def layers(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), *between, nn.Linear(3, 3), nn.Linear(3, 3))


def piped(module: nn.Sequential, kind: str, **options: Any) -> SplitPipe:
    stages = 4 if kind == "zb-v" else 2
    balance = [1] * (stages - 1) + [len(module) - stages + 1]
    if kind != "gpipe":
        options.update(schedule=kind, loss_fn=F.mse_loss)
    return SplitPipe(module, balance, devices=["cpu"] * 2, chunks=3, **options)


def loss_of(model: nn.Module, x: Tensor = BATCH) -> Tensor:
    if isinstance(model, SplitPipe) and model._loss_fn is not None:
        return model(x, target=x)  # type: ignore[no-any-return]
    return F.mse_loss(model(x), x)


def gradients(model: nn.Module) -> list[Tensor]:
    """Those of a step, and none are left behind."""
    loss_of(model).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found  # type: ignore[return-value]


def at_once(*calls: Callable[[], object]) -> list[Any]:
    """What calls in threads of their own give or raise. One that hangs fails the test, and is left alone."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    return found


# Workers


class Broken(BaseException):
    """What breaks a worker."""


class Breaker:
    """Breaks a thread at the first line of the package where it has broken none yet.

    Lines with ``with`` are let be: Python comes to them again before the block is left.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self.where: tuple[str, int] | None = None
        self._armed = False

    def follow(self) -> None:
        """This is the thread to break, when told to."""
        sys.settrace(self._called)

    def arm(self) -> None:
        """From here on it breaks."""
        self.where, self._armed = None, True

    def disarm(self) -> None:
        """No more."""
        self._armed = False

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        where = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and self._armed and where not in self.seen:
            self.seen.add(where)
            if not linecache.getline(*where).lstrip().startswith("with "):
                self.where, self._armed = where, False
                raise Broken
        return self._line


@pytest.mark.parametrize(("kind", "worker"), [("gpipe", 0), ("1f1b", 1)])
def test_a_worker_that_breaks_at_any_line_is_an_error_or_harmless_and_the_next_pass_is_right(
    kind: str, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    plain = layers()
    model, expected = piped(copy.deepcopy(plain), kind), gradients(plain)
    breaker = Breaker()
    while True:
        assert_same(gradients(model), expected, f"after {breaker.where}")
        pool = model._runtime._resources._pool
        assert pool is not None
        pool.submit(worker, breaker.follow).get()
        breaker.arm()
        (found,) = at_once(lambda: gradients(model))
        if isinstance(found, BaseException):
            assert isinstance(found, (Broken, WorkerDiedError)), (breaker.where, found)
            assert all(parameter.grad is None for parameter in model.parameters())
        else:
            assert_same(found, expected, f"with {breaker.where}")
        if breaker.where is None:
            break
    breaker.disarm()
    assert len(breaker.seen) > 100


@pytest.mark.parametrize("started", range(4))
@KINDS
def test_a_thread_that_cannot_start_is_an_error_and_the_next_pass_is_right(
    kind: str, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = layers()
    model, expected = piped(copy.deepcopy(plain), kind), gradients(plain)
    start, starts = threading.Thread.start, iter([True] * started + [False])

    def started_so_far(thread: threading.Thread) -> None:
        if not next(starts, True):
            raise RuntimeError("can't start new thread")
        start(thread)

    # Two workers, and two threads that look after the number of threads of torch's own.
    monkeypatch.setattr(threading.Thread, "start", started_so_far)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        gradients(model)
    assert_same(gradients(model), expected, "gradients")


# Callers


class Meeting(nn.Module):
    """In its first call it lets others go on, and waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.done = [threading.Event()], [threading.Event()]

    def __deepcopy__(self, memo: Any) -> nn.Module:
        return nn.Identity()

    def __reduce__(self) -> Any:
        return nn.Identity, ()

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside[0].is_set():
            self.inside[0].set()
            assert self.done[0].wait(60)
        return x * 1

    def amid(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call, while the layer waits."""

        def run() -> Any:
            try:
                assert self.inside[0].wait(60)
                return call()
            finally:
                self.done[0].set()

        return run


def tied(meeting: nn.Module) -> nn.Sequential:
    """Its first and last layers, which are in different stages, have one weight."""
    module = layers(meeting)
    module[-1].weight = module[0].weight
    return module


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "state": lambda model: copy.deepcopy(model.state_dict()),
    "layers": lambda model: copy.deepcopy(nn.Sequential(*model)),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("how", COPIES)
@KINDS
def test_a_copy_made_in_the_midst_of_a_pass_is_a_copy_of_the_model(kind: str, how: str) -> None:
    meeting = Meeting()
    module = tied(meeting)
    plain = copy.deepcopy(module)
    model, expected = piped(module, kind), gradients(plain)
    found, copied = at_once(lambda: gradients(model), meeting.amid(lambda: COPIES[how](model)))
    assert_same(found, expected, "gradients")
    if how == "state":
        assert_same(dict(copied), dict(plain.state_dict()), "state")
        return
    assert copied[0].weight is copied[len(copied) - 1].weight is not model[0].weight
    assert_same(gradients(copied), expected, "gradients of the copy")
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@KINDS
def test_a_layer_may_copy_its_model(kind: str, how: str) -> None:
    found: list[Any] = []

    class Copies(nn.Module):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            return nn.Identity()

        def __reduce__(self) -> Any:
            return nn.Identity, ()

        def forward(self, x: Tensor) -> Tensor:
            if not found:
                found.append(COPIES[how](model))
            return x

    module = tied(Copies())
    expected = gradients(copy.deepcopy(module))
    model = piped(module, kind)
    assert_same(gradients(model), expected, "gradients")
    assert found[0][0].weight is found[0][-1].weight is not model[0].weight
    assert_same(gradients(found[0]), expected, "gradients of the copy")


def test_one_thread_goes_forward_while_another_goes_backward() -> None:
    plain = layers()
    expected, other = gradients(plain), copy.deepcopy(plain)
    meeting = Meeting()
    model = piped(plain, "gpipe", checkpoint="never")

    def hook(grad: Tensor) -> None:
        meeting(grad)

    output = model(BATCH)
    output.register_hook(hook)

    def forward() -> Tensor:
        return F.mse_loss(model(2 * BATCH), 2 * BATCH)

    _, loss = at_once(F.mse_loss(output, BATCH).backward, meeting.amid(forward))
    assert_same([p.grad for p in model.parameters()], expected, "gradients of the first")
    loss.backward()
    (F.mse_loss(other(BATCH), BATCH) + F.mse_loss(other(2 * BATCH), 2 * BATCH)).backward()
    assert_same_tensors(model, other)


@KINDS
def test_one_thread_evaluates_without_gradients_while_another_trains(kind: str) -> None:
    plain = layers()
    expected, outputs = gradients(plain), plain(BATCH).detach()
    model, barrier = piped(plain, kind), threading.Barrier(2, timeout=60)

    def train() -> list[list[Tensor]]:
        found = []
        for _ in range(20):
            barrier.wait()
            found.append(gradients(model))
        return found

    def evaluate() -> list[Tensor]:
        found = []
        for _ in range(20):
            barrier.wait()
            with torch.no_grad():
                found.append(model(BATCH))
        return found

    trained, evaluated = at_once(train, evaluate)
    assert_same(trained, [expected] * 20, "gradients")
    assert_same(evaluated, [outputs] * 20, "outputs")
    assert not any(output.requires_grad for output in evaluated)


@pytest.mark.parametrize("kinds", [("gpipe", "gpipe"), ("1f1b", "zb-v"), ("gpipe", "1f1b")])
def test_models_that_share_layers_train_at_once(kinds: tuple[str, str]) -> None:
    plain = layers()
    expected = gradients(plain)
    models = [piped(plain, kinds[0]), piped(plain, kinds[1], backward="autograd", checkpoint="always")]
    barrier = threading.Barrier(2, timeout=60)

    def train(model: SplitPipe) -> list[Any]:
        found = []
        for _ in range(20):
            barrier.wait()
            found.append(torch.autograd.grad(loss_of(model), list(model.parameters())))
        return found

    for found in at_once(*(lambda model=model: train(model) for model in models)):
        assert_same(found, [tuple(expected)] * 20, "gradients")
