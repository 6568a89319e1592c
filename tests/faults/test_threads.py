"""Threads of the user's that meet in one model: they train, evaluate and copy it at once."""
from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers import scheduled
from tests.helpers.twin import assert_same, assert_same_tensors

KINDS = pytest.mark.parametrize("kind", [None, "zb-v"])
BATCH = torch.linspace(-1, 1, 15).reshape(5, 3)


def layers(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), *between, nn.Linear(3, 3), nn.Linear(3, 3))


def piped(module: nn.Sequential, kind: str | None, **options: Any) -> SplitPipe:
    stages = 4 if kind == "zb-v" else 2
    balance = [1] * (stages - 1) + [len(module) - stages + 1]
    if kind is not None:
        options.update(schedule=kind, loss_fn=F.mse_loss)
    return SplitPipe(module, balance, devices=["cpu"] * 2, chunks=3, **options)


def loss_of(model: nn.Module, x: Tensor = BATCH) -> Tensor:
    return scheduled.loss_of(model, x, x, F.mse_loss)


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


class Meeting(nn.Module):
    """In its first call it lets another thread go on, and waits for it. Copies have none in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.done = [threading.Event()], [threading.Event()]

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


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "layers": lambda model: copy.deepcopy(nn.Sequential(*model)),
}


@pytest.mark.parametrize("how", COPIES)
@KINDS
def test_a_copy_made_in_the_midst_of_a_call_is_a_copy_of_the_model(kind: str | None, how: str) -> None:
    module = layers(meeting := Meeting())
    module[-1].weight = module[0].weight  # In different stages.
    expected = gradients(copy.deepcopy(module))
    model = piped(module, kind)
    found, copied = at_once(lambda: gradients(model), meeting.amid(lambda: COPIES[how](model)))
    assert_same(found, expected, "gradients")
    assert copied[0].weight is copied[len(copied) - 1].weight is not model[0].weight
    assert_same(gradients(copied), expected, "gradients of the copy")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_thread_goes_forward_while_another_goes_backward() -> None:
    plain, meeting = layers(), Meeting()
    other, model = copy.deepcopy(plain), piped(plain, None, checkpoint="never")
    output = model(BATCH)
    output.register_hook(lambda grad: (meeting(grad), None)[1])
    loss = at_once(F.mse_loss(output, BATCH).backward, meeting.amid(lambda: loss_of(model, 2 * BATCH)))[1]
    assert_same([p.grad for p in model.parameters()], gradients(copy.deepcopy(other)), "gradients of the first")
    loss.backward()
    (loss_of(other) + loss_of(other, 2 * BATCH)).backward()
    assert_same_tensors(model, other)


@KINDS
def test_one_thread_evaluates_without_gradients_while_another_trains(kind: str | None) -> None:
    plain = layers()
    expected, outputs = gradients(plain), plain(BATCH).detach()
    model, barrier = piped(plain, kind), threading.Barrier(2, timeout=60)

    def evaluated() -> Tensor:
        with torch.no_grad():
            output: Tensor = model(BATCH)
        return output

    def repeated(call: Callable[[], Any]) -> Callable[[], list[Any]]:
        return lambda: [(barrier.wait(), call())[1] for _ in range(20)]

    trained, found = at_once(repeated(lambda: gradients(model)), repeated(evaluated))
    assert_same(trained, [expected] * 20, "gradients")
    assert_same(found, [outputs] * 20, "outputs")
