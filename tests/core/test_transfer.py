"""A tensor moved between stages has the same values and gradients, and every stream waits for what it reads."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe.core import stream, transfer
from splitpipe.core.graph import rank, rank_of
from splitpipe.core.transfer import Copy, Port, Route, Routes, Wait, hand_over, leave
from splitpipe.training.exchange import Exchange
from tests.helpers.twin import Nothing

CPU = torch.device("cpu")
HERE = Port(CPU, None, None)


def leaf() -> Tensor:
    return torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()


def through(x: Tensor, source: Port = HERE, target: Port = HERE) -> Tensor:
    route = Route(source, target)
    (y,) = route.arrive(*route.depart([leave(x, source, target)]))
    assert isinstance(y, Tensor)
    return y


def test_second_derivatives_are_right() -> None:
    def function(x: Tensor) -> Tensor:
        return through(through(x * x) ** 2) * x

    assert torch.autograd.gradcheck(function, (leaf(),))
    assert torch.autograd.gradgradcheck(function, (leaf(),))


@pytest.mark.parametrize("function", [
    lambda x: Copy.apply(x, HERE, HERE), lambda x: Wait.apply(x, None, None), lambda x: leave(x, HERE, HERE), through,
], ids=["copy", "wait", "leave", "all"])
def test_an_undefined_gradient_stays_undefined(function: Callable[[Tensor], Tensor]) -> None:
    x = leaf()
    Nothing.apply(function(x * 1)).sum().backward()
    assert x.grad is None


def test_only_what_autograd_follows_gets_nodes() -> None:
    plain = torch.arange(3)
    assert through(plain) is plain and hand_over(plain, None, None) is plain
    x = leaf()
    with torch.no_grad():
        assert through(x) is x
    assert not through(x.detach()).requires_grad
    assert hand_over(x, None, None) is x, "it stays on its stream"


def noted(order: list[int], number: int, _: Tensor) -> None:
    order.append(number)


def test_the_node_of_the_highest_rank_goes_backward_first() -> None:
    for ranks in ([1, 2, 3], [3, 1, 2]):
        x = leaf()
        order: list[int] = []
        branches = [x * 1 for _ in ranks]
        for branch, given in zip(branches, ranks):
            rank(branch, given)
            assert rank_of(branch) == given
            branch.register_hook(partial(noted, order, given))
        torch.stack(branches).sum().backward()
        assert order == [3, 2, 1]


def test_ranks_of_tensors_that_leave_and_arrive() -> None:
    x = leaf() * 1
    y = leave(x, HERE, HERE)
    assert rank_of(y) == rank_of(x)
    route = Route(HERE, HERE)
    (z,) = route.arrive(*route.depart([y]))
    copied: Any = z.grad_fn
    assert rank_of(z) == copied.next_functions[0][0]._sequence_nr() > rank_of(leaf() * 1)


class Verbs:
    """Writes down what streams are told; a stream is a word here."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[Any, ...]] = []
        patch.setattr(stream, "wait", lambda one, other: self.told.append(("wait", one, other)))
        patch.setattr(stream, "hold", lambda x, one: self.told.append(("hold", x.data_ptr(), one)))
        patch.setattr(stream, "use", self.use)
        patch.setattr(stream, "mark", lambda one: f"mark on {one}")
        patch.setattr(stream, "wait_for", lambda one, event: self.told.append(("wait for", one, event)))
        patch.setattr(stream, "spent", lambda event: self.told.append(("spent", event)))
        patch.setattr(stream, "same", lambda one, other: one == other)

    def use(self, *streams: Any) -> Any:
        self.told.append(("use", *streams))
        return nullcontext()

    def order(self, *verbs: tuple[Any, ...]) -> None:
        """Checks that these were told, in this order."""
        places = [self.told.index(verb) for verb in verbs]
        assert places == sorted(places), self.told
        self.told.clear()


def port(number: int) -> Port:
    names: list[Any] = [f"{kind} {number}" for kind in ("compute", "copy", "order")]
    return Port(CPU, *names)


def test_streams_wait_and_hold_in_the_order_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = Verbs(monkeypatch)
    source, target = port(0), port(1)
    for x in (leaf() * 1, leaf().detach()):
        through(x, source, target)
        verbs.order(
            ("wait", "copy 0", "compute 0"),
            ("use", "copy 1", "copy 0"),
            ("hold", x.data_ptr(), "copy 0"),
            ("hold", x.data_ptr(), "compute 1"),
            ("wait for", "compute 1", "mark on copy 1"),
            ("spent", "mark on copy 1"),
        )


def test_an_event_is_released_once_after_all_tensors_were_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = Verbs(monkeypatch)
    route = Route(port(0), port(1))
    route.arrive(*route.depart([leave(x, route.source, route.target) for x in (leaf() * 1, leaf() * 1, leaf())]))
    assert [told[0] for told in verbs.told if told[-1] == "mark on copy 1"] == ["wait for"] * 3 + ["spent"]


def test_a_schedule_gives_an_event_back_when_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = Verbs(monkeypatch)
    computes: list[Any] = ["compute 0", "compute 1"]
    routes = Routes([CPU, CPU], computes, lambda _, use: f"copy {use}")  # type: ignore[arg-type, return-value]
    exchange = Exchange(computes, routes, side_by_side=True)
    exchange.send(0, 1, "key", [leaf().detach()])
    exchange.receive(1, "key")
    assert [told for told in verbs.told if told[-1] == "mark on copy in from 0"] == [
        ("wait for", "compute 1", "mark on copy in from 0"), ("spent", "mark on copy in from 0")
    ]


def test_a_stage_waits_for_its_copy_and_not_for_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for x in (leaf() * 1, leaf().detach()):
        with monkeypatch.context() as patch:
            verbs = Verbs(patch)
            route = Route(port(0), port(1))
            departed = [route.depart([leave(x, route.source, route.target)]) for _ in range(2)]
            events = iter(["the first", "the second"])
            for leaves, _ in departed:
                route.arrive(leaves, next(events))  # type: ignore[arg-type]
            assert [told for told in verbs.told if told[1] == "compute 1"] == [
                ("wait for", "compute 1", "the first"), ("wait for", "compute 1", "the second")
            ]


def test_values_go_to_the_device_of_the_target_unless_they_are_there() -> None:
    meta = Port(torch.device("meta"), None, None)
    y = through(leaf(), HERE, meta)
    assert y.device.type == "meta" and y.requires_grad
    route, there = Route(HERE, meta), torch.empty(2, device="meta")
    leaves, event = route.depart([3, None, there])
    assert leaves[2] is there and route.arrive(leaves, event) == [3, None, there]


def test_the_gradient_goes_the_same_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = Verbs(monkeypatch)
    x = leaf()
    y = through(x, port(0), port(1))
    verbs.told.clear()
    gradient = torch.ones(3, dtype=torch.float64)
    torch.autograd.grad(y, x, gradient)
    verbs.order(
        ("wait", "copy 1", "compute 1"),
        ("use", "copy 0", "copy 1"),
        ("hold", gradient.data_ptr(), "copy 1"),
        ("hold", gradient.data_ptr(), "compute 0"),
        ("wait", "compute 0", "copy 0"),
    )


def test_a_tensor_handed_over_is_held_and_waited_for_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = Verbs(monkeypatch)
    x = leaf()
    one: list[Any] = ["one", "two"]
    y = hand_over(x, *one)
    verbs.order(("hold", x.data_ptr(), "two"), ("wait", "two", "one"))
    y.sum().backward()
    verbs.order(("wait", "one", "two"))


def test_two_streams_of_one_device_are_ordered_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = Verbs(monkeypatch)
    x = torch.ones(2)
    assert transfer.move(x, port(0), port(1)) is x
    verbs.order(("use", "copy 1", "copy 0"), ("wait", "copy 1", "copy 0"))


GPU = torch.device("cuda", 0)
CYCLES = 50_000_000
SIZE = 1 << 20


def ported(device: torch.device) -> Port:
    return Port(device, stream.new(device), stream.new(device), stream.new(device))


def late(like: Tensor, value: float, where: Port) -> Tensor:
    """A tensor that the port's compute stream fills after a while."""
    with stream.use(where.compute):
        x = torch.zeros_like(like)
        if where.compute is not None:
            torch.cuda._sleep(CYCLES)
        return x.fill_(value)


@pytest.mark.cuda
@pytest.mark.parametrize("target", [GPU, CPU], ids=str)
@pytest.mark.parametrize("source", [GPU, CPU], ids=str)
@pytest.mark.parametrize("tracked", [True, False])
def test_values_and_gradients_are_right_under_delay(
    source: torch.device, target: torch.device, tracked: bool
) -> None:
    out, into = ported(source), ported(target)
    for _ in range(2):
        x = late(torch.empty(SIZE, device=source), 3.0, out)
        with stream.use(out.compute):
            x.requires_grad_(tracked)
            y = x * 2
        y = through(y, out, into)
        with stream.use(into.compute):
            assert y.device == target and torch.equal(y, torch.full_like(y, 6.0))
        if tracked:
            gradient = late(y.detach(), 5.0, into)
            with stream.use(into.compute):
                y.backward(gradient)
            torch.cuda.synchronize()
            assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 10.0))


@pytest.mark.cuda
@pytest.mark.parametrize("tracked", [True, False])
def test_memory_freed_meanwhile_is_not_overwritten_before_it_is_read(tracked: bool) -> None:
    out, into = ported(GPU), ported(GPU)
    weight = torch.ones(SIZE, device=GPU).requires_grad_(tracked)
    torch.cuda.synchronize()
    with stream.use(out.compute):
        x = weight + 2
    with stream.use(into.compute):
        torch.cuda._sleep(CYCLES)
    y = through(x, out, into)
    del x
    with stream.use(into.compute):
        z = y + 1
    del y
    with stream.use(out.compute):
        others = [torch.zeros(SIZE, device=GPU) for _ in range(4)]
    torch.cuda.synchronize()
    assert torch.equal(z, torch.full_like(z, 4.0)) and len(others) == 4


@pytest.mark.cuda
def test_a_tensor_handed_over_is_right_under_delay_both_ways() -> None:
    out, into = ported(GPU), ported(GPU)
    x = late(torch.empty(SIZE, device=GPU), 3.0, out).requires_grad_()
    y = hand_over(x, out.compute, into.compute)
    gradient = late(y.detach(), 5.0, into)
    with stream.use(into.compute):
        assert torch.equal(y, torch.full_like(y, 3.0))
        y.backward(gradient)
    torch.cuda.synchronize()
    assert x.grad is not None and torch.equal(x.grad, gradient)


@pytest.mark.cuda
def test_the_callers_streams_stay_as_they_are() -> None:
    before, index = stream.current(GPU), torch.accelerator.current_device_index()
    x = torch.ones(4, device=GPU, requires_grad=True)
    through(x * 1, ported(GPU), ported(GPU)).sum().backward()
    assert (stream.current(GPU), torch.accelerator.current_device_index()) == (before, index)
