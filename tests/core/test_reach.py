"""What a graph leads to: its leaves, each once, and the edges where it is to end."""
from __future__ import annotations

import torch
from torch import Tensor

from splitpipe.core.graph import Edge, reached


def edge(x: Tensor, number: int = 0) -> Edge:
    return x.grad_fn, number


def ids(found: list[Tensor]) -> set[int]:
    return {id(leaf) for leaf in found}


def test_all_leaves_of_a_graph_each_once() -> None:
    a, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    x = a * b + a
    found = reached([edge(x.sin()), edge(x * x), edge(c * 2)])
    assert ids(found.leaves) == ids([a, b, c]) and len(found.leaves) == 3


def test_no_node_is_no_leaf() -> None:
    assert reached([]).leaves == reached([(None, 0), edge(torch.ones(2))]).leaves == []


def test_the_walk_goes_no_further_than_its_ends() -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(4, requires_grad=True)
    one, other = (b * 2).split(2)
    end = edge(a * 2), edge(other, 1)
    y = (a * 2).sum() + one.sum()
    assert ids(reached([edge(y)], end).leaves) == ids([a, b]), "another output of the node, another node of the kind"
    inner = a * 2
    outer = reached([edge(inner.sin() * other.sum())], {edge(inner), edge(other, 1)})
    assert not outer.leaves and set(outer.ends) == {edge(inner), edge(other, 1)}


def test_nodes_that_were_made_elsewhere_are_told_by_their_numbers() -> None:
    a = torch.randn(3, requires_grad=True)
    before = a * 2
    now = range(before.grad_fn._sequence_nr() + 1, 2**60)
    assert not reached([edge(a * 3)], numbers=now).others
    assert reached([edge(before.sin())], numbers=now).others
    assert not reached([edge(before.sin())], {edge(before)}, now).others
