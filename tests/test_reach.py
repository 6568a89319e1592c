"""The leaves below some nodes, each once."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitpipe.reach import leaves


class End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def ids(found: list[Tensor]) -> set[int]:
    return {id(leaf) for leaf in found}


def test_all_leaves_of_a_graph_each_once() -> None:
    a, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    x = a * b + a
    found = leaves([x.sin().grad_fn, (x * x).grad_fn, (c * 2).grad_fn])
    assert ids(found) == ids([a, b, c]) and len(found) == 3


def test_no_node_is_no_leaf() -> None:
    assert leaves([]) == leaves([None]) == leaves([torch.ones(2).grad_fn]) == []


def test_the_walk_goes_no_further_than_its_ends() -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    y = End.apply(a * 2) * b
    end: Any = End
    assert ids(leaves([y.grad_fn], end._backward_cls)) == {id(b)}
    assert ids(leaves([y.grad_fn])) == {id(a), id(b)}
