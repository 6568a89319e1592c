"""A stage's task: its order of contexts, what it learns of its stage, and what it keeps."""
from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import is_recomputing
from splitpipe.batch.inputs import of_input
from splitpipe.batch.reading import Memory
from splitpipe.core import generator, microbatch, thread_state
from splitpipe.core.stream import Place
from splitpipe.skip import skippable, stash
from splitpipe.stage.call import Activation, begin
from splitpipe.stage.checkpoint import Batch
from splitpipe.stage.layers import BlockLayers, StageCache
from splitpipe.stage.stage import Block
from splitpipe.stage.task import Result, Skips, Task

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


class Saves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


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


@dataclass
class Box:
    inside: Tensor


@skippable(stash=["odd"])
class Hides(nn.Module):
    """Gives, or stashes, a tensor in an object that pytree doesn't know."""

    def __init__(self, aside: bool) -> None:
        super().__init__()
        self.aside = aside

    def forward(self, x: Tensor) -> Any:
        yield stash("odd", Box(x) if self.aside else x)
        return x if self.aside else Box(x)


@pytest.mark.parametrize(("aside", "words"), [
    (False, r"the output of layer '0' \(Hides\) holds tensors in a Box"),
    (True, "the skip 'odd' holds tensors in a Box"),
])
def test_a_value_that_cannot_travel_is_refused(aside: bool, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        run(StageCache(), Hides(aside), value=torch.rand(2))


@skippable(stash=["aside"])
class Views(nn.Module):
    """Two values, of which one shares memory with a part of the skip."""

    def forward(self, x: Tensor) -> Any:
        y, z = x * 2, x * 3
        yield stash("aside", (z * 1, z[:1], y * 1))
        return z, y


def test_values_know_which_share_memory() -> None:
    result = run(StageCache(), Views(), value=torch.rand(2))
    (skip,) = result.skips.values()
    assert (result.value.shared, skip.shared) == ({0}, {1})


def test_what_arrives_shared_is_shared_still_when_it_leaves() -> None:
    value = Activation(*microbatch.flatten((torch.rand(2), torch.rand(2)), "the input"), frozenset({0}))
    assert run(StageCache(), nn.Identity(), value=value).value.shared == {0}


@pytest.mark.parametrize("own", [True, False])
def test_a_batch_written_to_since_is_an_error(own: bool) -> None:
    """Though a stage keeps a copy."""
    rows, value = torch.rand(2), torch.rand(2, requires_grad=True)
    batch = Batch([rows])
    given = rows.data if own else value * 1
    y = run(StageCache(), nn.Linear(2, 2), value=given, checkpoint=True, batch=batch).value.leaves[0]
    batch.close()
    rows.zero_()
    if own:
        with pytest.raises(RuntimeError, match="the batch was modified in place between the forward and its recomputa"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert value.grad is not None


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


class Sends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x).as_subclass(Late)


def test_a_recomputation_waits_for_what_nobody_will_read() -> None:
    Late.waited.clear()
    result = run(StageCache(), Sends(), value=torch.ones(2, requires_grad=True) * 1, checkpoint=True)
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
    result = run(StageCache(), Saves(), value=torch.rand(2, requires_grad=True) * 1, checkpoint=True, pending=room)
    assert result.frame is not None
    result.frame.recompute()
    assert room.log == ["runs", "makes room", "runs"]
