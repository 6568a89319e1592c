"""The autograd graph: tensors as nodes' outputs, reserved sequence numbers, walks to leaves."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.overrides import TorchFunctionMode

from splitpipe.core.graph import Edge, rank_of, reached, reserve, unleaf
from splitpipe.core.worker import in_new_thread
from tests.helpers.twin import Nothing


def leaf() -> Tensor:
    return torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()


def test_unleaf_passes_no_gradient_on_as_none() -> None:
    x = torch.rand(3, requires_grad=True)
    Nothing.apply(unleaf(x)).sum().backward()
    assert x.grad is None


def test_a_thread_makes_no_node_with_a_reserved_number() -> None:
    def work() -> list[int]:
        with torch.no_grad():
            reserve(40)
        found = [_get_sequence_nr()]
        reserve(30)
        return [*found, _get_sequence_nr(), rank_of(torch.ones(1, requires_grad=True) * 2)]

    assert in_new_thread(work) == [40, 40, 40]  # A thread counts its own.


class Quiet(TorchFunctionMode):
    """Runs every function without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        with torch.no_grad():
            return func(*args, **(kwargs or {}))


def test_reserving_ends_in_inference_mode_and_is_seen_by_no_mode() -> None:
    def work() -> tuple[int, int]:
        with torch.inference_mode(), Quiet() as quiet:
            before = quiet.seen
            reserve(9)
            return _get_sequence_nr(), quiet.seen - before

    assert in_new_thread(work) == (9, 0)


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
