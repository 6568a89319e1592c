"""Layers under torch.compile beside layers whose weight gradients are deferred. No C++ compiler is needed."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import SplitPipe
from tests.compiled.test_layers import Block
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.covering import graded, pairs
from tests.helpers.scheduled import inside, loss_of
from tests.helpers.twin import stages

# The compiler's own.
pytestmark = [
    pytest.mark.compiles, pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]


class Breaking(Block):
    """Compiled in two pieces."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        torch._dynamo.graph_break()
        return self.scale * self.down(self.up(x))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Block(6), nn.Tanh(), Block(6), nn.Linear(6, 6)).double()


def wrapper(module: nn.Sequential, backend: Any) -> None:
    module[1] = torch.compile(module[1], backend=backend)


def method(module: nn.Sequential, backend: Any) -> None:
    module[1].compile(backend=backend)


def breaking(module: nn.Sequential, backend: Any) -> None:
    module[1] = Breaking(6).double()
    module[1].compile(backend=backend)


AXES: dict[str, list[Any]] = {
    "change": [wrapper, method, breaking], "backend": ["eager", "aot_eager"], "by": ["balance", "cuts"],
    "options": [{"checkpoint": "never"}, {"checkpoint": "always"}, {"schedule": "zb-h1", "checkpoint": "always"},
                {"schedule": "zb-h1", "checkpoint": "always", "backward": "autograd"}],
}


def compiled(
    change: Callable[[nn.Sequential, Any], None], backend: str, by: str = "balance", **options: Any
) -> tuple[nn.Sequential, SplitPipe, Any]:
    """A module, and a pipeline of the same, of which a part is compiled; the backend, which counts its graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    plain, module, counted = layers(), layers(), CompileCounterWithBackend(backend)
    change(plain, lambda graph, _: graph.forward)
    change(module, counted)
    module.load_state_dict(plain.state_dict())
    wrapped, where = stages(module, [3, 2], by)
    return plain, SplitPipe(wrapped, devices=["cpu"] * 2, chunks=2, **where, **inside(options)), counted


def assert_equal(model: nn.Module, plain: nn.Module, rows: int = 8) -> None:
    x = torch.randn(rows, 6, dtype=torch.float64)
    for module in (model, plain):
        module.zero_grad()
        loss_of(module, x).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@graded(AXES, essence=[["backend"]], thorough=pairs([*AXES]))
def test_compiled_layers_give_the_same_and_are_not_compiled_again(
    change: Any, backend: str, by: str, options: dict[str, Any]
) -> None:
    plain, model, counted = compiled(change, backend, by, **options)
    found = []
    for _ in range(4):
        assert_equal(model, plain)
        found.append(counted.frame_count)
    assert found[0] and len({*found}) == 1
    for rows in (7, 3):
        assert_equal(model, plain, rows)


def test_neighbours_are_deferred_and_the_report_says_that_compiled_code_is_not() -> None:
    plain, model, _ = compiled(method, "aot_eager")
    assert_equal(model, plain)
    rows = {row.parameter: row for row in splitpipe.deferral_report(model)}
    for name in ("0.weight", "0.bias", "3.up.weight", "3.down.bias", "4.weight"):
        assert rows[name].deferred, rows[name]
    for name in ("1.up.weight", "1.up.bias", "1.norm.weight"):
        assert not rows[name].deferred and rows[name].why == "CompiledFunctionBackward has no rule", rows[name]
