"""A stage's task: its order of contexts, what it learns of its stage, and what it keeps."""
from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import is_recomputing
from splitpipe.batch.inputs import of_input
from splitpipe.batch.reading import Memory
from splitpipe.core import generator, microbatch, thread_state
from splitpipe.core.stream import Place
from splitpipe.stage.call import Activation, begin
from splitpipe.stage.checkpoint import Batch
from splitpipe.stage.layers import BlockLayers, StageCache
from splitpipe.stage.stage import Block
from splitpipe.stage.task import Result, Skips, Task
from tests.promise.layers import Apply

CPU = torch.device("cpu")


def run(
    memory: StageCache, *layers: nn.Module, value: Any, checkpoint: bool = False, skips: Skips | None = None,
    batch: Batch | None = None, pending: Any = None, state: thread_state.State | None = None,
) -> Result:
    named = [(str(number), layer) for number, layer in enumerate(layers)]
    state = state or thread_state.capture()
    input = of_input(torch.zeros(4, 1), None, 4, Memory())
    call = begin(input, 0 if checkpoint else None, state, [CPU] * 4, [None] * 4, [None] * 4, False, lambda: None)
    stage = Block(BlockLayers(3, Place(CPU), named), memory, call, pending)
    activation = value if isinstance(value, Activation) else Activation(*microbatch.flatten(value, "the input"))
    task = Task(stage, replace(call, batch=batch or Batch([])), 1, activation, skips or {}, state)
    return call.contexts[1].run(task)


class Half(nn.Module):
    """Works in place when told to."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5) if self.in_place else x * 0.5


def facts(memory: StageCache) -> Any:
    (found,) = memory.facts.values()
    return found


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_stage_learns_whether_it_writes_to_its_input(in_place: bool, checkpoint: bool) -> None:
    memory = StageCache()
    run(memory, Half(in_place), value=torch.rand(2, requires_grad=True) * 1, checkpoint=checkpoint)
    assert facts(memory).in_place is in_place


def test_a_stage_that_starts_to_write_is_an_error_once() -> None:
    memory, layer = StageCache(), Half(False)
    run(memory, layer, value=torch.rand(2, requires_grad=True) * 1, checkpoint=True)
    layer.in_place = True
    with pytest.raises(RuntimeError, match=r"stage 3 \(cpu\) wrote to its input in place.*repeat the step"):
        run(memory, layer, value=torch.rand(2, requires_grad=True) * 1, checkpoint=True)
    x = torch.rand(2, requires_grad=True)
    run(memory, layer, value=x * 1, checkpoint=True).value.leaves[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 0.5))


def test_a_recomputation_in_another_thread_has_the_turn(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "LOCK_TIMEOUT", 0.0)
    found: list[Tensor] = []

    class Differentiates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * x
            if not is_recomputing():  # On an accelerator autograd has a thread of its own for this.
                thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(y.sum(), x)))
                thread.start()
                thread.join()
            return x * 1

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    run(StageCache(), Differentiates(), value=torch.ones(2, requires_grad=True) * 1, checkpoint=True)
    assert [grad.tolist() for grad in found] == [[2.0, 2.0]]


class Late(Tensor):
    """Under way from another process until it is waited for, as torch.distributed has it."""

    waited: list[str] = []

    def trigger_wait(self) -> Tensor:
        self.waited.append("again" if is_recomputing() else "forward")
        return self.as_subclass(Tensor)


def test_recomputation_waits_for_collectives_without_readers() -> None:
    Late.waited.clear()
    sends = Apply(lambda x: (x * x).as_subclass(Late))
    result = run(StageCache(), sends, value=torch.ones(2, requires_grad=True) * 1, checkpoint=True)
    assert result.frame is not None and not Late.waited
    result.frame.recompute()
    assert Late.waited == ["again"]


class Room:
    """A store that takes nothing, and notes when it is to make room."""

    def __init__(self) -> None:
        self.log: list[str] = []

    by_graph = False

    def gains(self, microbatch: int) -> tuple[bool, bool]:
        self.log.append("runs")
        return False, False

    def make_room(self) -> None:
        self.log.append("makes room")


def test_room_is_made_for_each_recomputation_before_it_runs() -> None:
    room = Room()
    x = torch.rand(2, requires_grad=True) * 1
    result = run(StageCache(), Apply(torch.square), value=x, checkpoint=True, pending=room)
    assert result.frame is not None
    result.frame.recompute()
    assert room.log == ["runs", "makes room", "runs"]
