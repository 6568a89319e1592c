"""Graphs of one shape are surveyed once; any other graph is surveyed itself."""
from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.core.graph import Edge
from splitpipe.core.torch_private import AccumulateGrad, _get_sequence_nr
from splitpipe.deferral import owners
from splitpipe.deferral.owners import survey
from splitpipe.deferral.shape import Entered, Shape
from splitpipe.training import capture
from tests.helpers.covering import graded
from tests.helpers.scheduled import assert_steps, mean

ROWS, CHUNKS = 8, 4


class Choosing(nn.Module):
    """Runs each microbatch in its own way: the rows' first number says which microbatch it is."""

    def __init__(self, *ways: Callable[[Choosing, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.other = nn.LayerNorm(4), nn.LayerNorm(4)
        self.ways = ways

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.ways[int(part[0, 0]) % len(self.ways)](self, part) for part in x.split(ROWS // CHUNKS)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def usual(net: Choosing, x: Tensor) -> Tensor:
    return net.norm(net.two(net.one(x).tanh()))


def swapped(net: Choosing, x: Tensor) -> Tensor:
    """The same nodes, which lead to other weights."""
    return net.norm(net.one(net.two(x).tanh()))


def longer(net: Choosing, x: Tensor) -> Tensor:
    return net.norm(net.two(net.one(x).tanh()).tanh())


def joined(net: Choosing, x: Tensor) -> Tensor:
    """One node where ``parted`` has two."""
    y = net.one(x).tanh()
    return net.norm(y + y)


def parted(net: Choosing, x: Tensor) -> Tensor:
    return net.norm(net.one(x).tanh() + net.one(x).tanh())


def renormed(net: Choosing, x: Tensor) -> Tensor:
    """The same nodes, which lead to another weight without a rule."""
    return net.other(net.two(net.one(x).tanh()))


def hooked(net: Choosing, x: Tensor) -> Tensor:
    """What is saved is packed: it may be unpacked only once."""
    unpacked: list[int] = []

    def unpack(packed: list[Tensor]) -> Tensor:
        assert len(unpacked) < 20, "unpacked too often"
        unpacked.append(1)
        return packed.pop()

    with torch.autograd.graph.saved_tensors_hooks(lambda y: [y], unpack):
        return usual(net, x)


def frozen(net: Choosing, x: Tensor) -> Tensor:
    return net.norm(nn.functional.linear(net.one(x).tanh(), net.two.weight.detach(), net.two.bias))


def twice(net: Choosing, x: Tensor) -> Tensor:
    """A weight without a rule for one of its uses: none of its gradient waits."""
    return usual(net, x) + net.two.weight.sum()


def detached(net: Choosing, x: Tensor) -> Tensor:
    return net.norm(net.two(net.one(x).tanh().detach()))


WAYS = usual, swapped, longer, joined, parted, frozen, twice, detached, renormed, hooked
STYLES: dict[str, dict[str, Any]] = {
    "never": {"checkpoint": "never"},
    "always": {"checkpoint": "always"},
    "zb-h1": {"schedule": "zb-h1", "loss_fn": mean},
}


def rows() -> Tensor:
    x = torch.randn(ROWS, 4, dtype=torch.float64)
    x[:, 0] = torch.arange(ROWS) // (ROWS // CHUNKS)
    return x


@graded({"other": WAYS, "style": [*STYLES]}, essence=[["style"]], thorough=[["other"]])
def test_a_microbatch_with_another_graph_has_its_own_gradients(
    other: Callable[[Choosing, Tensor], Tensor], style: str
) -> None:
    for ways in ((usual, usual, other, usual), (parted, other, parted, other), (joined, other, joined, other)):
        plain = nn.Sequential(Choosing(*ways), nn.Linear(4, 4), Choosing(*ways[:1])).double()
        model = SplitPipe(copy.deepcopy(plain), [2, 1], devices=["cpu"] * 2, chunks=CHUNKS, **STYLES[style])
        assert_steps(plain, model, rows)


@pytest.mark.thorough
@pytest.mark.parametrize("style", STYLES)
def test_graphs_of_one_shape_are_surveyed_once_per_model(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)).double()
    model = SplitPipe(copy.deepcopy(plain), [2, 2], devices=["cpu"] * 2, chunks=CHUNKS, **STYLES[style])
    assert_steps(plain, model, rows, 2)  # What the report needs is noted then.
    surveys = list[object]()
    survey = capture.survey
    monkeypatch.setattr(capture, "survey", lambda *args: surveys.append(args) or survey(*args))
    assert_steps(plain, model, rows, 1)
    assert not surveys
    for each in (plain, model):
        replaced(each)
    assert_steps(plain, model, rows, 2)  # Again, the report needs to know about the new parameter first.
    assert surveys
    surveys.clear()
    assert_steps(plain, model, rows, 1)
    assert not surveys


def other_dtype(net: nn.Module) -> None:
    net.float()


def replaced(net: Any) -> None:
    torch.manual_seed(1)
    net[0].weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))


def frozen_later(net: Any) -> None:
    net[0].weight.requires_grad_(False)


def reshaped(net: Any) -> None:
    """The bias is summed in another way then, which the rule leaves to autograd."""
    net[0].bias.data = net[0].bias.data[None]


def tied_later(net: Any) -> None:
    net[2].weight = net[0].weight


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "change", [other_dtype, replaced, frozen_later, reshaped, tied_later], ids=lambda each: each.__name__
)
def test_a_model_that_changes_between_steps(change: Callable[[nn.Module], None], style: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)).double()
    model = SplitPipe(copy.deepcopy(plain), [3, 1], devices=["cpu"] * 2, chunks=CHUNKS, **STYLES[style])
    assert_steps(plain, model, rows)
    for each in (plain, model):
        change(each)
    assert_steps(plain, model, lambda: torch.randn(ROWS, 4).to(plain[3].weight))


def test_a_shape_keeps_no_leaf_alive() -> None:
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), [1, 1], devices=["cpu"] * 2, chunks=2)
    for _ in range(3):
        model(torch.randn(4, 4)).sum().backward()
    gc.collect()
    known: dict[int, Any] = {id(x): x for x in gc.get_objects() if isinstance(x, Shape)}
    assert known
    news = [*known.values()]
    while news:
        found = [y for x in news if not isinstance(x, type) for y in gc.get_referents(x)]
        news = [*{id(y): y for y in found if id(y) not in known}.values()]
        known.update({id(y): y for y in news})
    assert not any(isinstance(x, (Tensor, AccumulateGrad, ref)) for x in known.values())


def test_one_microbatch_may_use_a_value_from_outside() -> None:
    outside: list[Tensor] = []

    def inside(net: Choosing, x: Tensor) -> Tensor:
        return usual(net, x) * net.one.bias.exp()

    def given(net: Choosing, x: Tensor) -> Tensor:
        return usual(net, x) * outside[0] if outside else inside(net, x)

    plain = nn.Sequential(Choosing(inside, given, inside, inside), nn.Linear(4, 4)).double()
    model = SplitPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=CHUNKS, checkpoint="never")
    assert_steps(plain, model, rows, 2)
    x, found = rows(), list[Tensor]()
    for each in (plain, model):
        outside[:] = [each[0].one.bias.exp()]
        found += torch.autograd.grad(each(x).square().sum(), outside)
    torch.testing.assert_close(found[1], found[0])


def test_a_node_from_elsewhere_is_not_that_of_a_microbatch() -> None:
    layer = nn.Linear(4, 4)
    graphs: list[tuple[list[Edge], Edge, range]] = []
    for _ in range(2):
        x, first = torch.randn(2, 4, requires_grad=True).clone(), _get_sequence_nr()
        y = layer(x)
        graphs.append(([(y.grad_fn, 0)], (x.grad_fn, 0), range(first, _get_sequence_nr())))
    (roots, end, numbers), (others, other, more) = graphs
    found = survey(roots, Entered([end], numbers), numbers, {})
    assert Shape.known(found)
    shape = Shape(roots, Entered([end], numbers), found)
    assert shape.match(others, Entered([other], more)) == ([], found.leaves, found.edges)
    assert shape.match(others, Entered([other], numbers)) is None
    assert shape.match(others, Entered([other, others[0]], more)) is None


def test_shapes_and_owners_keep_no_accumulate_grad_node() -> None:
    """If Python alone kept it, two threads that train models with this leaf could wait for each other."""
    layer = nn.Linear(4, 4)
    first = _get_sequence_nr()
    y = layer(torch.randn(2, 4))
    roots, ends = [(y.grad_fn, 0)], Entered([], range(first, _get_sequence_nr()))
    shape = Shape(roots, ends, survey(roots, ends, range(first, _get_sequence_nr()), {}))
    ways = [owners._leaf_of(y.grad_fn.next_functions, number) for number in (0, 2)]
    del y, roots, ends
    assert shape and len(ways) == 2
    assert not [x for x in gc.get_objects() if type(x) is AccumulateGrad and x.variable is layer.weight]
