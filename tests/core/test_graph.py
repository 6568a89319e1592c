"""The autograd graph: Fork and Join change its order and nothing else; reserved sequence numbers; walks to leaves."""
from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.overrides import TorchFunctionMode

from splitpipe.core.graph import Edge, fork, join, rank, rank_of, reached, reserve, unleaf
from tests.helpers.twin import Nothing


class Log(torch.autograd.Function):
    """The tensor; backward writes down its name, and passes on no gradient if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str, passes: bool = True) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.log, ctx.name, ctx.passes = log, name, passes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        ctx.log.append(ctx.name)
        return grad if ctx.passes else None, None, None, None


def leaf() -> Tensor:
    return torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()


def lanes(log: list[str], x: Tensor, z: Tensor, dependent: bool) -> tuple[Tensor, Tensor]:
    """Two lanes of two nodes each; the second one joins the first one in its middle."""
    first = Log.apply(x, log, "first in")
    second = Log.apply(z, log, "second in")
    if dependent:
        first, phony = fork(first)
        second = join(second, phony)
    return Log.apply(first, log, "first out"), Log.apply(second, log, "second out")


def test_the_lane_that_joins_goes_backward_before_the_one_that_forked() -> None:
    reserve(1)  # In a new process the first node would be as old as the one that is made old.
    orders = []
    for dependent in (False, True):
        log: list[str] = []
        second, first = lanes(log, leaf(), leaf(), dependent)[::-1]
        # The engine takes the youngest ready node first; made old, the second lane would come last.
        node: Any = second.grad_fn
        node._set_sequence_nr(0)
        (first.sum() + second.sum()).backward()
        orders.append(log)
    assert orders[0].index("first in") < orders[0].index("second out")
    assert orders[1].index("second out") < orders[1].index("first in")


def test_gradients_pass_through_unchanged() -> None:
    x, z = leaf(), leaf()
    first, second = lanes([], x, z, True)
    assert torch.equal(first, x) and torch.equal(second, z)
    (3 * first + 5 * second).sum().backward()
    assert x.grad is not None and z.grad is not None
    assert x.grad.tolist() == [3, 3, 3] and z.grad.tolist() == [5, 5, 5]


def test_the_graph_has_one_edge_between_the_lanes() -> None:
    x, z = leaf() * 1, leaf() * 1
    first, phony = fork(x)
    second = join(z, phony)
    forked, joined = first.grad_fn, second.grad_fn
    assert forked is not None and joined is not None and phony.grad_fn is forked
    assert [node for node, _ in forked.next_functions] == [x.grad_fn]
    assert [node for node, _ in joined.next_functions] == [z.grad_fn, forked]
    assert phony.numel() == 0 and phony.device.type == "cpu"


@pytest.mark.parametrize("forks", [True, False])
def test_a_lane_that_the_loss_does_not_use_gets_no_gradient_from_the_other(forks: bool) -> None:
    x, z = leaf(), leaf()
    first, second = lanes([], x, z, True)
    used, unused = (x, z) if forks else (z, x)
    (first if forks else second).sum().backward()
    assert used.grad is not None and unused.grad is None


def test_undefined_gradients_pass_through_both() -> None:
    log: list[str] = []
    x, z = leaf(), leaf()
    first, phony = fork(Log.apply(x, log, "first"))
    second = join(Log.apply(z, log, "second"), phony)
    outs = [Log.apply(lane, log, "none", False) for lane in (first, second)]
    (outs[0].sum() + outs[1].sum()).backward()
    assert sorted(log) == ["first", "none", "none", "second"]
    assert x.grad is None and z.grad is None


def test_second_derivatives_are_right() -> None:
    def function(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        first, phony = fork(x * x)
        return first * x, unleaf(join(z * x, phony)) ** 2

    assert torch.autograd.gradcheck(function, (leaf(), leaf()))
    assert torch.autograd.gradgradcheck(function, (leaf(), leaf()))


@pytest.mark.parametrize("through", [lambda x: fork(x)[0], lambda x: join(x, torch.empty(0)), unleaf])
def test_what_comes_out_is_the_same_memory_and_may_be_written_to_in_place(through: Any) -> None:
    x = leaf()
    y = through(x)
    assert y.data_ptr() == x.data_ptr() and y._version == x._version and not y.is_leaf
    before = x.detach().clone()
    y.mul_(3)
    assert torch.equal(x, 3 * before) and x._version == y._version == 1
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3, 3]


@pytest.mark.parametrize("through", [lambda x: fork(x)[0], lambda x: join(x, torch.empty(0)), unleaf])
def test_a_later_write_to_what_autograd_saved_is_noticed(through: Any) -> None:
    x = leaf() * 1
    square = through(x).square().sum()
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_the_phony_is_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        _, phony = fork(leaf())
    assert phony.device.type == "cpu" and phony.requires_grad


def test_a_graph_of_both_goes_with_its_last_reference() -> None:
    gc.collect()
    gc.disable()
    try:
        first, second = lanes([], leaf(), leaf(), True)
        nodes = [weakref.ref(lane.grad_fn) for lane in (first, second)]
        del first, second
        assert [node() for node in nodes] == [None, None]
    finally:
        gc.enable()


def test_without_grad_mode_neither_of_both_requires_grad() -> None:
    with torch.no_grad():
        first, phony = fork(leaf())
        assert not first.requires_grad and not join(leaf(), phony).requires_grad


def test_unleaf_passes_no_gradient_on_as_none() -> None:
    x = torch.rand(3, requires_grad=True)
    Nothing.apply(unleaf(x)).sum().backward()
    assert x.grad is None


def test_the_phony_gets_no_gradient() -> None:
    x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
    forked, phony = fork(x)
    seen: list[Tensor | None] = []
    phony.grad_fn.register_prehook(lambda gradients: seen.append(gradients[1]))
    (forked * 2 + join(y, phony) * 3).sum().backward()
    assert seen == [None]


def test_a_tensor_s_node_takes_the_number_it_is_given() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert rank_of(x) == 0
    rank(y, 7)
    assert rank_of(y) == 7
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]


def test_a_thread_makes_no_node_with_a_reserved_number() -> None:
    found: list[int] = []

    def work() -> None:
        with torch.no_grad():
            reserve(40)
        found.append(_get_sequence_nr())
        reserve(30)
        found.append(_get_sequence_nr())
        found.append(rank_of(torch.ones(1, requires_grad=True) * 2))

    thread = threading.Thread(target=work)  # A thread counts its own.
    thread.start()
    thread.join()
    assert found == [40, 40, 40]


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
    found: list[int] = []
    quiet = Quiet()

    def work() -> None:
        with torch.inference_mode(), quiet:
            before = quiet.seen
            reserve(9)
            found.extend([_get_sequence_nr(), quiet.seen - before])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [9, 0]


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
