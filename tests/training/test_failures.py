"""A pass that fails: which of several errors is raised, what is stopped and closed, and who may call a model."""
from __future__ import annotations

import copy
import re
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.segments.executor import Executor
from tests.helpers.deferring import double as double
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
    begun, stopped, stop = threading.Event(), threading.Event(), Executor._fail
    monkeypatch.setattr(Executor, "_fail", lambda *each: (stop(*each), stopped.set()))
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
