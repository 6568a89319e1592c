"""Recomputations for which two threads ask at once, and buffers that move before backward."""
from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.stage.checkpoint import Frame
from splitpipe.stage.saved import SavedDirectly
from tests.helpers.covering import pairwise
from tests.helpers.scheduled import inside, loss_of
from tests.helpers.twin import assert_same_tensors, stages


def test_two_threads_that_miss_a_tensor_run_the_stage_once() -> None:
    runs: list[int] = []
    x = torch.ones(3, requires_grad=True) * 1

    def again(fill: Any) -> None:
        runs.append(1)
        fill(lambda: (x * x), lambda: ())

    frame = Frame(again, SavedDirectly([]))
    with torch.autograd.graph.saved_tensors_hooks(*frame.hooks()):
        x * x
    frame.close()
    met, lock = threading.Barrier(2), threading.RLock()

    class Meeting:
        """Both have missed it by the time that the first one has the lock."""

        def __enter__(self) -> None:
            met.wait(60)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    frame._lock = Meeting()  # type: ignore[assignment]
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(frame._unpack(0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(runs) == 1 and len(found) == 2


class Moving(nn.Module):
    """Moves its buffer in each forward, seen by its version or not, and looks at it then, or before."""

    def __init__(self, look: Callable[[Any, Tensor], Tensor], moment: str = "afterwards") -> None:
        super().__init__()
        self.layer, self.look, self.moment = nn.Linear(6, 6), look, moment
        self.register_buffer("codes", torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.look(self, x) if self.moment == "before" else None
        with torch.no_grad():
            (self.codes.data if self.moment == "unseen" else self.codes).mul_(0.9)
        return self.look(self, x) if y is None else y


def scaled(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = x * layer.codes
    return y


def chosen(layer: Any, x: Tensor) -> Tensor:
    """Of a choice that moving does not change."""
    y: Tensor = x + layer.codes[(x * layer.codes).argmax(1)][:, None]
    return y


LOOKS: dict[str, Callable[[], Moving]] = {
    "afterwards": lambda: Moving(scaled), "unseen": lambda: Moving(scaled, "unseen"),
    "for a choice": lambda: Moving(chosen),
    "at a view": lambda: Moving(lambda layer, x: x * layer.codes[None].expand(len(x), -1)),
    "through a layer": lambda: Moving(lambda layer, x: x + layer.layer(layer.codes[None])),
}


@pairwise(name=[*LOOKS], by=["balance", "cuts"], schedule=["gpipe", "1f1b", "zb-h1"])
def test_backward_has_the_buffer_as_its_microbatch_left_it(name: str, by: str, schedule: str) -> None:
    plain = nn.Sequential(nn.Linear(6, 6), LOOKS[name](), nn.Linear(6, 2))
    model = wrapped(copy.deepcopy(plain), by, checkpoint="always", schedule=schedule)
    x = torch.rand(8, 6)
    for _ in range(2):
        for part in x.chunk(4):
            loss_of(plain, part).backward()
        (4 * loss_of(model, x)).backward()
        assert_same_tensors(model, plain)


@pairwise(checkpoint=["never", "except_last", "always"], by=["balance", "cuts"], schedule=["gpipe", "1f1b", "zb-h1"])
def test_a_moved_buffer_that_backward_needs_is_an_error(
    checkpoint: Any, by: str, schedule: str
) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), Moving(scaled, "before"), nn.Linear(6, 2))
    model = wrapped(layers, by, checkpoint, schedule)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(model, torch.rand(8, 6)).backward()


def wrapped(module: nn.Sequential, by: str, checkpoint: Any, schedule: str) -> SplitPipe:
    options = inside({"devices": ["cpu"] * 2, "chunks": 4, "checkpoint": checkpoint, "schedule": schedule})
    layers, where = stages(module, [2, 1], by)
    return SplitPipe(layers, **where, **options)
