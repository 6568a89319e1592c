"""A stage's task: its order of contexts, what it learns of its stage, and what it keeps."""
from __future__ import annotations

import contextvars
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import context, microbatch
from splitpipe.checkpoint import Batch
from splitpipe.partition import Place
from splitpipe.randomness import Manner
from splitpipe.stage import Memory, Parcel, Result, Stage, Task


def run(memory: Memory, *layers: nn.Module, value: Any, checkpoint: bool = False) -> Result:
    named = [(str(number), layer) for number, layer in enumerate(layers)]
    stage = Stage(3, Place(torch.device("cpu")), named, memory, None, checkpoint)
    task = Task(
        stage=stage,
        number=(1, 4),
        value=Parcel(*microbatch.flatten(value, "the input")),
        skips={},
        state=context.capture(),
        variables=contextvars.copy_context(),
        seed=7,
        checkpoint=checkpoint,
        batch=Batch([]),
    )
    return task()


class Half(nn.Module):
    """Works in place when told to."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5) if self.in_place else x * 0.5


def known(memory: Memory) -> Any:
    (found,) = memory.known.values()
    return found


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_stage_learns_whether_it_writes_to_its_input(in_place: bool, checkpoint: bool) -> None:
    memory = Memory()
    run(memory, Half(in_place), value=torch.rand(2, requires_grad=True) * 1, checkpoint=checkpoint)
    assert known(memory).in_place is in_place


def test_a_checkpointed_stage_that_starts_to_write_to_its_input_is_an_error_once() -> None:
    memory, layer = Memory(), Half(False)
    run(memory, layer, value=torch.rand(2, requires_grad=True) * 1, checkpoint=True)
    layer.in_place = True
    with pytest.raises(RuntimeError, match=r"stage 3 \(cpu\) wrote to its input in place.*repeat the step"):
        run(memory, layer, value=torch.rand(2, requires_grad=True) * 1, checkpoint=True)
    x = torch.rand(2, requires_grad=True)
    run(memory, layer, value=x * 1, checkpoint=True).value.leaves[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 0.5))


def test_a_stage_learns_how_it_draws_and_forgets_it_with_its_modes() -> None:
    memory, layer = Memory(), nn.Dropout()
    manners = []
    for _ in range(3):
        run(memory, layer, value=torch.rand(2))
        manners.append(known(memory).manner)
    assert manners == [Manner.SEEN] * 3
    layer.eval()
    run(memory, layer, value=torch.rand(2))
    assert len(memory.known) == 2


def test_outputs_are_flat_and_know_their_nesting() -> None:
    class Nest(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"a": (x, None), "b": [x * 2, 3]}

    result = run(Memory(), Nest(), value=torch.rand(2))
    assert microbatch.unflatten(result.value.leaves, result.value.spec)["b"][1] == 3
    assert result.frame is None and not result.skips


def test_a_value_that_cannot_travel_is_refused_with_its_layer() -> None:
    @dataclass
    class Box:
        inside: Tensor

    class Hides(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Box(x)

    with pytest.raises(TypeError, match=r"the output of layer '0' \(Hides\) holds tensors in a Box"):
        run(Memory(), Hides(), value=torch.rand(2))


def test_an_exception_has_a_note_with_stage_layer_and_microbatch() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no")

    with pytest.raises(KeyError) as info:
        run(Memory(), nn.Identity(), Fails(), value=torch.rand(2))
    assert info.value.__notes__ == ["in the forward of layer '1' (Fails), stage 3 (cpu), microbatch 1 of 4"]
