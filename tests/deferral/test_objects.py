"""What a call leaves that waits for backward, and what that keeps alive."""
from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.deferral.function import Context
from tests.helpers.deferring import Call, Scale
from tests.helpers.deferring import apart as apart
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import twins


def test_a_forward_leaves_no_context_objects() -> None:
    """Each object that does is one more for the garbage collector to walk."""
    model = SplitPipe(nn.Sequential(nn.Linear(6, 6), nn.Conv1d(6, 6, 1)), [2], devices=["cpu"], chunks=2,
                      checkpoint="never")
    # Those of other tests may still be there: they are held, so that their ids stay theirs, and not counted.
    others = [found for found in gc.get_objects() if type(found) is Context]
    theirs = set(map(id, others))
    y = model(torch.randn(4, 6, 6))
    assert not [found for found in gc.get_objects() if type(found) is Context and id(found) not in theirs]
    y.sum().backward()


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_options_are_not_kept(inside: bool) -> None:
    """What is in them may lead to the graph, as a layer that keeps its output does: nobody would free the two."""

    class Option:
        pass

    def call(x: Tensor, w: Tensor) -> Tensor:
        option = Option()
        alive.append(weakref.ref(option))
        return Scale.apply(x, w, option=option)

    alive: list[weakref.ref[Option]] = []
    layer = Call(call, w=torch.randn(6))
    module = twins(nn.Sequential(layer), chunks=1, checkpoint="never")[1] if inside else layer
    y = module(torch.randn(4, 6, requires_grad=True))
    assert [reference() for reference in alive] == [None]
    y.sum().backward()


def test_a_layer_that_keeps_its_output_does_not_keep_the_model() -> None:
    def storing(self: Any, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last  # type: ignore[no-any-return]

    layer = module_of(storing, **linears("layer"))
    reference = weakref.ref(layer)
    model = SplitPipe(nn.Sequential(layer, nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    del layer
    model(torch.randn(4, 4)).sum().backward()
    del model
    gc.collect()
    assert reference() is None
