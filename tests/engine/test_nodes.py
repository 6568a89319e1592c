"""Checkpointed blocks and stages as nodes, whose graphs are made in backward."""
from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, is_recomputing
from splitpipe.deferral import stash
from tests.helpers.modules import module_of
from tests.helpers.scheduled import assert_steps, inside, loss_of
from tests.helpers.twin import Looped

WAYS: dict[str, dict[str, Any]] = {
    "drop-in": {}, "1f1b": {"schedule": "1f1b"}, "zb-h1": {"schedule": "zb-h1"},
    "1f1b, autograd": {"schedule": "1f1b", "backward": "autograd"},
}
EACH = pytest.mark.parametrize("way", WAYS)


def chain(*blocks: nn.Module) -> nn.Module:
    """Blocks one after the other, between two layers."""
    return Looped(nn.Linear(4, 4), *blocks, nn.Linear(4, 4))


class Block(nn.Module):
    """A weight, and a function of it and the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def piped(module: nn.Module, way: str, **options: Any) -> tuple[nn.Module, SplitPipe]:
    """A copy, and the module by cuts with all blocks checkpointed."""
    options = {"checkpoint": "always", "chunks": 3, **WAYS[way], **options}
    plain = copy.deepcopy(module.double())
    return plain, SplitPipe(module, cuts=[[*dict(module.named_children())][-1]], devices=["cpu"] * 2, **inside(options))


def rows() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64)


@EACH
def test_what_a_block_saves_is_gone_after_it(way: str) -> None:
    """In the second step, whose blocks are known."""
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def inside(x: Tensor, weight: Tensor) -> Tensor:
        gc.collect()
        alive.append(sum(ref() is not None for ref in seen))
        hidden = (x @ weight).exp()
        seen.append(weakref.ref(hidden))
        return hidden.sin()

    plain, model = piped(chain(*[Block(inside) for _ in range(2)]), way)
    assert_steps(plain, model, rows, 1)
    alive.clear()
    seen.clear()
    loss_of(model, rows()).backward()
    assert {*alive} == {0}


@EACH
def test_a_leaf_in_place_of_a_parameter_is_an_error_once(way: str) -> None:
    other = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    armed: list[Tensor] = []
    plain, model = piped(chain(Block(lambda x, weight: x @ (armed[0] if armed else weight))), way)
    assert_steps(plain, model, rows, 2)
    armed.append(other)
    with pytest.raises(RuntimeError, match=r"isn't one of its parameters.*Repeat the step"):
        loss_of(model, rows()).backward()
    model.zero_grad()
    plain.zero_grad()
    other.grad = None
    given, found = rows(), []
    for each in (plain, model):
        loss_of(each, given).backward()
        found.append(other.grad)
        other.grad = None
    torch.testing.assert_close(found[1], found[0])


@EACH
def test_another_number_of_nodes_is_an_error(way: str) -> None:
    armed: list[int] = []

    def more(x: Tensor, weight: Tensor) -> Tensor:
        return (x * 1.5 if armed and is_recomputing() else x) @ weight

    plain, model = piped(chain(Block(more)), way)
    assert_steps(plain, model, rows, 2)
    armed.append(1)
    with pytest.raises(RuntimeError, match="same operations both times"):
        loss_of(model, rows()[:2]).backward()
    armed.clear()
    model.zero_grad()
    plain.zero_grad()
    assert_steps(plain, model, rows, 2)


@EACH
def test_a_block_may_return_its_arguments_themselves(way: str) -> None:
    seen: list[bool] = []

    class Both(Block):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return x, scale, x @ self.weight * scale

    def handing(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        same, number, made = self.block(x, scale=2.0)
        seen.append(same is x and number == 2.0)
        return self.last(made + same)  # type: ignore[no-any-return]

    net = module_of(handing, first=nn.Linear(4, 4), block=Both(torch.mm), last=nn.Linear(4, 4))
    plain, model = piped(net, way)
    assert_steps(plain, model, rows, 1)
    seen.clear()
    loss_of(model, rows()).backward()
    assert all(seen)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_loss_from_inside_of_a_block(sequential: bool) -> None:
    """Kept by the forward, as router losses of experts are."""
    kept: list[Tensor] = []

    def keeps(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x @ weight
        loss = hidden.square().mean()
        if not is_recomputing():
            kept.append(loss)
        return hidden

    if sequential:
        module = nn.Sequential(nn.Linear(4, 4), Block(keeps), nn.Linear(4, 4)).double()
        plain = copy.deepcopy(module)
        model = SplitPipe(module, [2, 1], devices=["cpu"] * 2, chunks=3, checkpoint="always")
    else:
        plain, model = piped(chain(Block(keeps)), "drop-in")

    def loss(each: nn.Module, x: Tensor) -> Tensor:
        kept.clear()
        out = each(x).sum()
        count = 3 if each is model else 1  # Then come runs that only show which dimension has the rows.
        return out + sum(kept[:count]) / count  # type: ignore[no-any-return]

    assert_steps(plain, model, rows, loss_of=loss)


class Cut(nn.Linear):
    """Lets no gradient through to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


@pytest.mark.parametrize("by_cuts", [False, True])
def test_large_gradients_of_layers_that_b_does_not_go_through(by_cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves as it comes does so when autograd is through with a node; it does not come to the first of these."""
    monkeypatch.setattr(stash, "_SMALL", 0)
    if by_cuts:
        blocks = nn.Linear(4, 4), nn.Sequential(Cut(4, 4), nn.Linear(4, 4))
        plain, model = piped(chain(*blocks), "drop-in", stash_limit=0)
    else:
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Cut(4, 4), nn.Linear(4, 4)).double()
        plain = copy.deepcopy(module)
        model = SplitPipe(module, [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint="always", stash_limit=0)
    # Of an input without grad, the first layer's node has nothing to compute for anybody.
    assert_steps(plain, model, rows, grad=False)
