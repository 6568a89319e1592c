"""Microbatches that are not checkpointed as nodes, whose backward goes through the graph of their own run."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.training import capture
from tests.helpers.covering import pairwise
from tests.helpers.modules import module_of
from tests.helpers.scheduled import assert_steps, inside
from tests.helpers.twin import assert_same_tensors, twins

BOTH = pytest.mark.parametrize("by_cuts", [False, True], ids=["layers", "cuts"])


class Block(nn.Module):
    """A linear layer, and a function of its output and the block."""

    def __init__(self, function: Callable[[Tensor, Any], Any] = lambda y, block: y.tanh()) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self.linear(x), self)


def pair(*blocks: nn.Module, by_cuts: bool = False, **options: Any) -> tuple[Any, SplitPipe]:
    """A plain module, and a copy in two stages of which the second begins with the last block."""
    return twins(nn.Sequential(*blocks).double(), [len(blocks) - 1, 1], "cuts" if by_cuts else "balance",
                 **{"chunks": 3, "checkpoint": "never", **options})


def rows() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64)


def deferred(model: SplitPipe) -> bool:
    return any(row.deferred for row in model.deferral_report())


def test_the_first_step_is_as_later_ones_bit_by_bit() -> None:
    _, model = pair(Block(), nn.LayerNorm(4), Block())
    x, found = rows(), []
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert deferred(model)
    for later in found[1:]:
        torch.testing.assert_close(later, found[0], rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("backward", ["split", "autograd"])
def test_a_loss_kept_from_inside_is_an_error(backward: Any, by_cuts: bool) -> None:
    kept: list[Tensor] = []

    def keeping(y: Tensor, block: Any) -> Tensor:
        kept.append(y.square().sum())
        return y.tanh()

    plain, model = pair(Block(), Block(keeping), Block(), by_cuts=by_cuts, backward=backward)
    model(rows()).sum().backward()  # By cuts, on one device, the first forward is one graph.
    for _ in range(2):
        x = rows()
        for each in (plain, model):
            each.zero_grad()
            kept.clear()
            loss = each(x).square().sum() + sum(kept)
            if each is model and backward == "split":
                with pytest.raises(RuntimeError, match="backward='autograd'"):
                    loss.backward()
                return
            loss.backward()
        assert_same_tensors(model, plain)


@BOTH
@pytest.mark.parametrize("late", [False, True])
def test_a_tensor_that_was_computed_elsewhere_keeps_its_gradient(late: bool, by_cuts: bool) -> None:
    weight = torch.rand(4, dtype=torch.float64, requires_grad=True)
    scale: list[Any] = [1.0]
    plain, model = pair(Block(), Block(lambda y, block: y * scale[0]), Block(), by_cuts=by_cuts)
    if late:
        assert_steps(plain, model, rows)
    for _ in range(3):
        x, found = rows(), []
        for each in (plain, model):
            each.zero_grad()
            weight.grad = None
            scale[0] = weight.exp().square()
            each(x).square().sum().backward()
            found.append(weight.grad)
        torch.testing.assert_close(*found)
        assert_same_tensors(model, plain)


def test_inputs_of_a_block_of_which_one_is_made_of_the_other() -> None:
    """Its B is asked for both gradients, and must not go from one to the other by the graph around it."""
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.two(self.norm(h).tanh(), h))  # type: ignore[no-any-return]

    plain = module_of(forward, first=nn.Linear(4, 4), norm=nn.LayerNorm(4), two=nn.Bilinear(4, 4, 4), last=Block())
    plain = plain.double()
    model = SplitPipe(copy.deepcopy(plain), cuts=["last"], devices=["cpu"] * 2, chunks=3, checkpoint="never")
    assert_steps(plain, model, rows)


def doubled(grad: Tensor) -> Tensor:
    return grad * 2


@pairwise(
    by_cuts=[False, True], at=["tensor", "node", "hook of the module"],
    options=[{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}, {"schedule": "zb-h1", "checkpoint": "always"}],
)
def test_hooks_of_a_linear_layers_output_change_its_gradients(options: dict[str, Any], at: str, by_cuts: bool) -> None:
    def hooked(y: Tensor, block: Any) -> Tensor:
        if at == "tensor":
            y.register_hook(doubled)
        elif at == "node":
            y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))  # type: ignore[union-attr]
        return y.tanh()

    plain, model = pair(Block(), Block(hooked), Block(hooked), by_cuts=by_cuts, **inside(options))
    if at == "hook of the module":
        for each in (plain, model):
            each[1].linear.register_forward_hook(lambda module, given, y: y.register_hook(doubled) and None)
    assert_steps(plain, model, rows, 2)


@BOTH
def test_without_hooks_no_python_runs_per_layer_in_b(by_cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(*args: Any) -> Any:
        raise AssertionError("watched, although there is no hook")

    plain, model = pair(Block(), Block(), Block(), by_cuts=by_cuts)
    with monkeypatch.context() as patched:
        patched.setattr(capture, "_watched", watched)
        assert_steps(plain, model, rows)
        model[1].linear.register_forward_hook(  # type: ignore[union-attr,operator]
            lambda module, given, y: y.register_hook(doubled) and None
        )
        with pytest.raises(AssertionError, match="there is no hook"):
            model(rows()).sum().backward()


def test_a_loss_kept_from_inside_that_comes_after_the_output() -> None:
    """As on another device, where autograd may come to the output first."""
    kept: list[Tensor] = []

    def keeping(y: Tensor, block: Any) -> Tensor:
        kept.append(y.square())
        return y.tanh()

    model = SplitPipe(
        nn.Sequential(Block(keeping)).double(), [1], devices=["cpu"], chunks=3, checkpoint="never"
    )
    y = model(rows())
    total = y.sum()
    joined: Any = y.grad_fn
    nodes: list[Any] = [total.grad_fn, joined, *[node for node, _ in joined.next_functions]]
    assert [type(node).__name__ for node in nodes[2:]] == ["BlockNodeBackward"] * 3
    for node in nodes:
        node._set_sequence_nr(2**62)
    with pytest.raises(RuntimeError, match="backward='autograd'"):
        (total + torch.cat(kept).sum()).backward()
