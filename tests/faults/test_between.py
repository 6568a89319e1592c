"""Faults outside of the layers, where a batch is cut, sent between stages and joined: as those in an op."""
from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.core import microbatch
from splitpipe.segments.chain import ChainWalk
from splitpipe.training.exchange import Exchange
from tests.helpers.twin import assert_same_tensors

X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(1, 2, 24).reshape(8, 3)
WAYS: dict[str, dict[str, Any]] = {
    "drop-in": {}, "scheduled": {"schedule": "zb-h1", "loss_fn": F.mse_loss}
}
ways = pytest.mark.parametrize("way", WAYS)


class Counts(nn.Module):
    """Has statistics of the batch, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x.detach())
        return x


class Pair:
    """A module and its pipeline after a step; the place that a test breaks raises ``error`` once, if it is armed."""

    def __init__(self, way: str) -> None:
        module = nn.Sequential(nn.Linear(3, 3), Counts(), nn.Tanh(), nn.Linear(3, 3))
        self.plain, self.scheduled = copy.deepcopy(module), way == "scheduled"
        self.model = SplitPipe(module, [2, 2], devices=["cpu"] * 2, chunks=3, deferred_batch_norm=True, **WAYS[way])
        self.error, self.armed = LookupError("it broke"), False
        self.trains()

    def breaks(self, function: Callable[..., Any], wrong: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        """The function, which raises the error instead for the first arguments that are wrong."""
        def broken(*args: Any, **kwargs: Any) -> Any:
            if self.armed and wrong(*args):
                self.armed = False
                raise self.error
            return function(*args, **kwargs)

        return broken

    def loss(self) -> Tensor:
        loss: Tensor = self.model(X, target=Y) if self.scheduled else F.mse_loss(self.model(X), Y)
        return loss

    def trains(self) -> None:
        F.mse_loss(self.plain(X), Y).backward()
        self.loss().backward()
        assert_same_tensors(self.model, self.plain)

    def survives(self, call: Callable[[], Tensor]) -> None:
        """The call raises the error and leaves gradients, buffers and threads alone, and the next step is right."""
        threads = set(threading.enumerate())
        self.armed = True
        with pytest.raises(LookupError) as caught:
            call()
        assert caught.value is self.error and not self.armed
        assert_same_tensors(self.model, self.plain)
        self.trains()
        assert set(threading.enumerate()) <= threads


@ways
def test_an_error_where_the_batch_is_cut(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(way)
    monkeypatch.setattr(microbatch, "scatter", pair.breaks(microbatch.scatter))
    pair.survives(pair.loss)


@ways
def test_an_error_where_outputs_are_joined(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(way)
    monkeypatch.setattr(microbatch, "gather", pair.breaks(microbatch.gather))
    pair.survives(lambda: pair.model(X))


@ways
def test_an_error_where_a_stage_takes_what_another_has_made(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(way)
    monkeypatch.setattr(ChainWalk, "_taken", pair.breaks(ChainWalk._taken, lambda *_: _in_a_worker()))
    pair.survives(pair.loss)


def test_an_error_where_a_stage_sends_a_gradient_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("scheduled")
    monkeypatch.setattr(Exchange, "send", pair.breaks(Exchange.send))
    pair.survives(pair.loss)


def _in_a_worker() -> bool:
    return threading.current_thread() is not threading.main_thread()
