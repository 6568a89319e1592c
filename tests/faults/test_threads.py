"""Threads of the user's that meet in one model, and copies made at any moment: they train as the original does."""
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
BATCH = torch.linspace(-1, 1, 21).reshape(7, 3)


def layers(*between: nn.Module) -> nn.Sequential:
    """With buffers, a frozen parameter, and one that two stages have."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval(), *between, nn.Linear(3, 3), nn.Linear(3, 3))
    module[-1].weight = module[0].weight
    module[-2].bias.requires_grad_(False)
    return module


def piped(module: nn.Sequential, kind: str | None, **options: Any) -> SplitPipe:
    stages = 4 if kind == "zb-v" else 2
    if kind is not None:
        options |= {"schedule": kind, "loss_fn": F.mse_loss}
    balance = [1] * (stages - 1) + [len(module) - stages + 1]
    return SplitPipe(module, **{"balance": balance, "devices": ["cpu"] * 2, "chunks": 3, **options})


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
}


def storages(model: nn.Module) -> set[int]:
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("amid", [True, False], ids=["amid a call", "with a graph and gradients"])
@KINDS
def test_a_copy_made_at_any_moment_trains_as_the_model_and_shares_nothing_with_it(
    kind: str | None, how: str, amid: bool
) -> None:
    module = layers(meeting := Meeting())
    expected = gradients(copy.deepcopy(module))
    model = piped(module, kind)
    if amid:
        found, copied = at_once(lambda: gradients(model), meeting.amid(lambda: COPIES[how](model)))
        assert_same(found, expected, "gradients")
    else:
        meeting.inside[0].set()
        loss_of(model).backward()
        loss = loss_of(model)
        copied = COPIES[how](model)
        assert how == "layers" or all(parameter.grad is None for parameter in copied.parameters()), "as of any module"
        loss.backward()
        model.zero_grad()
        copied.zero_grad()
    assert not storages(model) & storages(copied)
    assert copied[0].weight is copied[len(copied) - 1].weight and not copied[len(copied) - 2].bias.requires_grad
    assert_same(gradients(copied), expected, "gradients of the copy")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(gradients(model), expected, "gradients of the model")


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
