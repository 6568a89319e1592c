"""An exception of a layer's own backward says which layer it is; nothing else about backward changes."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint

from splitpipe.core.blame import nodes, watch

Layer = Callable[[Any], Any]


class Raises(torch.autograd.Function):
    """Raises what it is given, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException | None) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.error is not None:
            raise ctx.error
        return grad, None


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class SetUp(torch.autograd.Function):
    """The same in the other style, with its context set up apart."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Swap(torch.autograd.Function):
    """Two tensors in, two out, of which one may get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return y.clone(), x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y: Tensor | None, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        assert ctx.needs_input_grad == (True, True)
        return x, y


def raising(error: BaseException | None) -> Layer:
    return lambda x: Raises.apply(x * 2, error) * 2


def run(value: Any, *layers: Layer) -> tuple[Any, bool]:
    """What the layers give, each watched under its number; and whether a Python node was found."""
    start = nodes(value)
    watched = []
    for number, layer in enumerate(layers):
        value = layer(value)
        watched.append((f"layer {number}", nodes(value)))
    return value, watch(start, watched)


def given() -> Tensor:
    return torch.linspace(1, 2, 4, dtype=torch.float64).requires_grad_()


def own_apply(node: Any) -> bool:
    return "apply" in vars(node)


def below(node: Any) -> Iterator[Any]:
    yield node
    for following, _ in node.next_functions:
        if following is not None:
            yield from below(following)


def notes_of(value: Tensor, error: BaseException) -> list[str]:
    with pytest.raises(type(error)) as info:
        value.sum().backward()
    assert info.value is error
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("error", [KeyError("x"), ArithmeticError("x"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_exception_of_any_kind_gets_the_note_of_its_layer(error: BaseException) -> None:
    value, found = run(given() * 1, raising(error))
    assert found and notes_of(value, error) == ["layer 0"]


@pytest.mark.parametrize("guilty", range(4))
def test_each_layer_has_its_own_note(guilty: int) -> None:
    error = KeyError("x")
    value, found = run(given() * 1, *(raising(error if number == guilty else None) for number in range(4)))
    assert found and notes_of(value, error) == [f"layer {guilty}"]


def test_without_an_exception_there_is_no_note_and_the_next_one_has_one() -> None:
    error = KeyError("x")
    late: list[BaseException] = []

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if late:
                raise late[0]
            return grad

    value, _ = run(given() * 1, Late.apply)
    value.sum().backward(retain_graph=True)
    late.append(error)
    assert notes_of(value, error) == ["layer 0"]


def test_what_comes_before_the_input_or_after_the_output_is_not_watched() -> None:
    x = given()
    for guilty in (0, 2):
        error = KeyError("x")
        errors = [error if place == guilty else None for place in range(3)]
        before = raising(errors[0])(x)
        inside, found = run(before, raising(errors[1]))
        assert found and notes_of(raising(errors[2])(inside), error) == []


def test_only_python_nodes_between_input_and_output_are_touched() -> None:
    before = Cube.apply(given())
    value, _ = run(before, Cube.apply, lambda x: x.exp(), Cube.apply)
    after = Cube.apply(value)
    touched = [own_apply(node) for node in below(after.grad_fn) if isinstance(node, FunctionCtx)]
    assert touched == [False, True, True, False]


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([], False),
        ([lambda x: x], False),
        ([torch.exp, torch.relu], False),
        ([lambda x: x.detach()], False),
        ([Cube.apply], True),
        ([torch.exp, SetUp.apply, torch.relu], True),
        ([torch.exp, lambda x: checkpoint(torch.exp, x, use_reentrant=True)], True),
        ([torch.exp, lambda x: {"deep": [None, 3, (Cube.apply(x),)]}], True),
        ([lambda x: (x, x * 2), lambda x: (x[0], Cube.apply(x[1]))], True),
    ],
)
def test_it_says_whether_there_is_a_python_node(layers: list[Layer], found: bool) -> None:
    assert run(Cube.apply(given()), *layers)[1] is found


def test_a_leaf_as_input_ends_the_walk_too() -> None:
    error = KeyError("x")
    value, found = run(given(), raising(error))
    assert found and notes_of(value, error) == ["layer 0"]


def test_a_node_that_two_layers_give_belongs_to_the_first() -> None:
    error = KeyError("x")
    value, _ = run(given() * 1, raising(error), lambda x: (x, x + 1), lambda x: x[0] + x[1])
    assert notes_of(value, error) == ["layer 0"]


def test_the_nodes_of_a_value_are_those_of_its_tensors_that_have_one() -> None:
    x = given()
    y, z = x * 2, x + 1
    assert nodes({"a": [y, None, 3, x], "b": (z, "text", y.detach())}) == [y.grad_fn, z.grad_fn]


@pytest.mark.parametrize("function", [Cube, SetUp])
def test_gradients_of_every_order_are_those_of_a_run_unwatched(function: Any) -> None:
    orders = []
    for watched in (False, True):
        x = given()
        layers = (torch.sin, function.apply, lambda x: function.apply(x) * x)
        value: Any = x * 1
        if watched:
            value, _ = run(value, *layers)
        else:
            for layer in layers:
                value = layer(value)
        orders.append([])
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            orders[-1].append(value)
    for value, expected in zip(*orders):
        assert torch.equal(value, expected)


def test_double_backward_is_right() -> None:
    assert torch.autograd.gradcheck(lambda x: run(x * 1, Cube.apply, torch.sin)[0], given())
    assert torch.autograd.gradgradcheck(lambda x: run(x * 1, Cube.apply, torch.sin)[0], given())


@pytest.mark.parametrize("which", [0, 1])
def test_outputs_without_a_gradient_pass_none_as_before(which: int) -> None:
    x, y = given(), given()
    value, found = run((x * 1, y * 1), lambda pair: Swap.apply(*pair))
    assert found
    value[which].sum().backward()
    got, nothing = (y, x) if which == 0 else (x, y)
    assert torch.equal(got.grad, torch.ones(4, dtype=torch.float64)) and nothing.grad is None


def test_hooks_of_a_watched_node_and_its_metadata_stay() -> None:
    value = Cube.apply(given() * 1)
    calls: list[str] = []
    value.grad_fn.register_hook(lambda *_: calls.append("after"))
    value.grad_fn.register_prehook(lambda *_: calls.append("before"))
    value.grad_fn.metadata["key"] = 3
    assert watch([], [("layer", nodes(value))])
    value.sum().backward()
    assert calls == ["before", "after"] and value.grad_fn.metadata == {"key": 3}


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("function", [Cube, SetUp])
def test_a_watched_graph_goes_with_its_last_reference(function: Any, backward: bool) -> None:
    with no_collector():
        value, _ = run(given() * 1, function.apply, torch.exp)
        node, saved = (weakref.ref(x) for x in (value.grad_fn.next_functions[0][0], value))
        assert own_apply(node())
        if backward:
            value.sum().backward()
        del value
        assert node() is None and saved() is None


def test_a_graph_whose_backward_raised_goes_with_its_error() -> None:
    with no_collector():
        error = KeyError("x")
        value, _ = run(given() * 1, raising(error))
        node = weakref.ref(value.grad_fn.next_functions[0][0])
        try:
            value.sum().backward()
        except KeyError as raised:
            raised.__traceback__ = None
        del value, error
        assert node() is None


def test_the_error_of_a_checkpoint_inside_a_layer_names_the_layer() -> None:
    error = KeyError("x")
    for reentrant in (True, False):
        vars(error).clear()
        value, _ = run(given() * 1, torch.exp,
                       lambda x: checkpoint(raising(error), x, use_reentrant=reentrant))  # noqa: B023
        assert notes_of(value, error) == ["layer 1"]


def test_a_node_whose_tensors_are_gone_is_passed_by() -> None:
    """Before torch 2.13 such a function's Python object, still held, refuses to say what is behind it."""

    class Gone:
        @property
        def next_functions(self) -> None:
            raise RuntimeError("Attribute 'next_functions' is invalid for this instance of _C._FunctionBase.")

    assert not watch([], [("in the backward of a layer", [Gone()])])
