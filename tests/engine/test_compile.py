"""Blocks that are compiled, in place and as a module of torch's, in a module with cuts."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from tests.engine.models import Stack, batch
from tests.helpers.covering import few
from tests.helpers.scheduled import mlp, twins
from tests.helpers.twin import assert_same_tensors

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sin()


CUTS = ["layers.1", "layers.3"]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    dynamo = pytest.importorskip("torch._dynamo", reason="needs torch.compile, which torch does not have here")
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.mark.parametrize("options", [
    {}, {"schedule": "zb-h1", "checkpoint": "always"}, *few(0, [
        {"checkpoint": "always"}, {"schedule": "1f1b"}, {"schedule": "zb-h1"},
        {"schedule": "zb-h1", "backward": "autograd"},
    ]),
], ids=str)
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_blocks_are_compiled_once(options: dict[str, Any], in_place: bool) -> None:
    plain = Stack(block=Block)
    module = copy.deepcopy(plain)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for number, layer in enumerate(module.layers):
        if in_place:
            layer.compile(backend=backend)
        else:
            module.layers[number] = torch.compile(layer, backend=backend)
    model, given, counts = SplitPipe(module, cuts=CUTS, devices=["cpu"] * 3, chunks=3, **options), batch(), []
    for _ in range(3):
        for each in (model, plain):
            each(**given)["loss"].backward()
        counts.append(len(graphs))
    assert counts[0] and counts[2] == counts[1]
    if in_place:
        assert_same_tensors(model, plain)
    else:
        torch.testing.assert_close([x.grad for x in model.parameters()], [x.grad for x in plain.parameters()])


@pytest.mark.thorough
def test_a_compiled_model_runs_its_schedule() -> None:
    plain, model = twins(mlp(4), "zb-v", 2, loss_fn=nn.functional.mse_loss, chunks=3)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    compiled = torch.compile(model, backend="eager")
    compiled(x, target=y).backward()
    nn.functional.mse_loss(plain(x), y).backward()
    assert_same_tensors(model, plain)
    torch.testing.assert_close(compiled(x), plain(x))
