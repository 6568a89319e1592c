"""Compiled nodes go backward in contexts of their own where there are several accelerators."""
from __future__ import annotations

import contextvars
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe.compiled import contexts
from tests.compiled.test_layers import Block
from tests.helpers.compiling import nothing_compiled as nothing_compiled

pytestmark = [
    pytest.mark.skipif(torch.__version__ < "2.12", reason="this torch goes backward in no context"),
    pytest.mark.usefixtures("nothing_compiled"), pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]


def compiled() -> nn.Module:
    layer = Block()
    layer.compile(backend="aot_eager")
    return layer


def call(x: Tensor, *devices: int) -> Any:
    """The streams of stages, and inputs."""
    return [None, *[SimpleNamespace(device=device) for device in devices]], [x, 2]


def backward(y: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another device's thread were in the context of the caller's."""
    entered = contextvars.copy_context()
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.graph.contextvars, "copy_context", lambda: entered)
        entered.run(y.sum().backward)


def test_a_compiled_node_does_not_enter_the_callers_context(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = compiled()
    x = torch.ones(2, 4, requires_grad=True)
    before = x * 3  # The caller's, which is left alone.
    y = layer(before) + layer(before)
    contexts.part(*call(before, 0, 1), [y, 3, torch.ones(1)])
    backward(y, monkeypatch)
    assert x.grad is not None


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [(), (0, 0)])
def test_otherwise_nothing_is_done(devices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = compiled()
    y = layer(torch.ones(2, 4))
    contexts.part(*call(y, *devices), [y])
    with pytest.raises(RuntimeError, match="already entered") if contexts.NEEDED else nullcontext():
        backward(y, monkeypatch)


@pytest.mark.thorough
def test_a_torch_that_copies_the_context_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "NEEDED", False)
    y = compiled()(torch.ones(2, 4))
    monkeypatch.setattr(contexts, "reached", lambda *edges: pytest.fail("looked through the graph"))
    contexts.part(*call(y, 0, 1), [y])


def test_without_a_context_there_is_nothing_to_copy() -> None:
    contexts._own(None)
