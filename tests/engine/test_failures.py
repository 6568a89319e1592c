"""Errors in a forward or backward with cuts reach the caller with their place, and the model is usable afterwards."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.helpers.covering import graded
from tests.helpers.faults import ERRORS, throws
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import Failing, assert_same_tensors


def meeting(self: Any, x: Tensor, rows: Tensor) -> Tensor:
    """A block that calls what stands there for its first row."""
    self.calls.pop(int(rows[0]), lambda: None)()
    return self.layer(x).tanh()  # type: ignore[no-any-return]


def fragile(self: Any, x: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Calls what stands in ``between`` after its blocks, and fails in backward if a failure stands in a list."""
    for layer in self.layers:
        x = layer(x, rows)
    self.between.pop(int(rows[0]), lambda: None)()
    return {"loss": self.failing(x).square().mean(), "y": x}


#: Where it goes wrong: the number of a block or "between", the stage, the first row of a microbatch.
PLACES = [(0, 0, 4), (1, 1, 0), (2, 1, 2), (3, 2, 4), (3, 2, 0), ("between", 2, 2)]
AXES: dict[str, list[Any]] = {"way": [{}, {"schedule": "1f1b"}, {"schedule": "zb-h1"}, {"backward": "autograd"}],
                              "checkpoint": ["never", "always"], "place": PLACES, "error": [*ERRORS],
                              "first": [True, False]}
X = {"x": torch.linspace(-1, 1, 24).reshape(6, 4), "rows": torch.arange(6)}


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(**X)["loss"].backward()


def pair(way: dict[str, Any], checkpoint: str) -> tuple[nn.Module, SplitPipe]:
    blocks = nn.ModuleList(module_of(meeting, calls={}, **linears("layer")) for _ in range(4))
    plain = module_of(fragile, layers=blocks, between={}, failing=Failing([]))
    return plain, SplitPipe(copy.deepcopy(plain), cuts=["layers.1", "layers.3"], devices=["cpu"] * 3, chunks=3,
                            checkpoint=checkpoint, **way)


def assert_right(plain: nn.Module, model: nn.Module) -> None:
    for each in (plain, model):
        step(each)
    assert_same_tensors(model, plain)


@graded(AXES, [["error"], ["place"]], [["way", "checkpoint"], ["way", "error"], ["way", "place"], ["way", "first"]])
def test_an_error_in_a_forward_has_its_place_and_the_next_step_is_right(way, checkpoint, place, error, first):
    plain, model = pair(way, checkpoint)
    if not first:
        step(model)
        model.zero_grad()
    block, stage, row = place
    (model.between if block == "between" else model.layers[block].calls)[row] = throws(error("found"))
    with pytest.raises(error, match="found") as info:
        model(**X)["loss"].backward()
    notes = "\n".join(info.value.__notes__)
    assert notes.count("in the forward of") == 1 and f"stage {stage} (cpu), microbatch {row // 2} of 3" in notes
    assert block == "between" or f"block 'layers.{block}' (meeting)" in notes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_right(plain, model)


@graded({axis: AXES[axis] for axis in ("way", "checkpoint")}, [["way"]], [["way", "checkpoint"]])
def test_after_an_error_in_backward_the_next_step_is_right(way: dict[str, Any], checkpoint: str) -> None:
    plain, model = pair(way, checkpoint)
    for error in (ValueError("found"), KeyboardInterrupt()):
        model.failing.failures.append(error)
        with pytest.raises(type(error)):
            step(model)
    assert_right(plain, model)


@pytest.mark.parametrize("way", AXES["way"][:3])
def test_an_error_in_a_recomputation_has_its_place(way: dict[str, Any]) -> None:
    plain, model = pair(way, "always")
    block = model.layers[2]
    block.calls[2] = lambda: block.calls.update({2: throws(ValueError("again"))})
    with pytest.raises(ValueError, match="again") as info:
        step(model)
    assert "layers.2" in "\n".join(info.value.__notes__)
    assert_right(plain, model)
