"""A batch is cut and joined whatever its nesting, and its slices behave like tensors of their own."""
from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from splitpipe.core.microbatch import Scatter, batch_size, cuts, flatten, gather, scatter, unflatten
from tests.helpers.twin import Nothing, assert_same

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Holder:
    held: Any


def split(value: Any, chunks: int) -> list[Any]:
    """The microbatches of a value."""
    leaves, spec = flatten(value, "the input", batch=True)
    return [unflatten(cut, spec) for cut in scatter(leaves, cuts(batch_size(leaves), chunks))]


def joined(*values: Any) -> Any:
    """What the outputs of the microbatches give together."""
    return gather([flatten(value, "the output") for value in values])


def nestings(rows: int) -> list[Any]:
    x, y = torch.rand(rows, 3), torch.arange(rows)
    return [
        x,
        (x, y),
        [x, y],
        {"a": x, "b": y},
        OrderedDict(b=x, a=y),
        Point(x, y),
        deque([x, y]),
        (x, None, 3, "mask", 2.5, True, b"raw", 1j),
        {"a": [(x, {"b": None, "c": Point(y, "text")}), []], 7: ()},
    ]


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 7, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_any_nesting_is_split_like_chunk_and_joined_again(rows: int, chunks: int) -> None:
    for value in nestings(rows):
        microbatches = split(value, chunks)
        leaves, spec = flatten(value, "it")
        for number, microbatch in enumerate(microbatches):
            found, nesting = flatten(microbatch, "it")
            assert nesting == spec
            for cut, leaf in zip(found, leaves):
                if isinstance(leaf, Tensor):
                    assert torch.equal(cut, leaf.chunk(chunks)[number] if rows else leaf)
                else:
                    assert cut is leaf
        assert_same(joined(*microbatches), value, "joined")


@pytest.mark.parametrize("chunks", range(1, 12))
def test_cuts_have_the_sizes_of_chunk_and_none_is_empty(chunks: int) -> None:
    for rows in range(1, 24):
        sizes = [len(part) for part in torch.arange(rows).chunk(chunks)]
        found = cuts(rows, chunks)
        assert [count for _, count in found] == sizes
        assert [start for start, _ in found] == [sum(sizes[:number]) for number in range(len(sizes))]
    assert cuts(0, chunks) == [(0, 0)]


def test_each_microbatch_has_a_clone_of_a_0_dim_tensor() -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    microbatches = split((torch.rand(4), scale), 2)
    first, second = (found for _, found in microbatches)
    assert first.data_ptr() != scale.data_ptr() and first.data_ptr() != second.data_ptr()
    first.mul_(10)
    assert [value.item() for value in (scale, first, second)] == [2, 20, 2]
    (first + second).backward()
    assert scale.grad == 11


def test_outputs_without_dimensions_come_stacked() -> None:
    assert joined(torch.tensor(1), torch.tensor(2)).tolist() == [1, 2]
    assert joined(torch.tensor(1)).tolist() == [1]


def test_one_microbatch_is_given_as_it_is() -> None:
    x, other = torch.rand(3), object()
    value = joined({"x": x, "other": other, "none": None})
    assert value["x"] is x and value["other"] is other and value["none"] is None


def test_slices_that_all_get_no_gradient_give_none() -> None:
    x = torch.rand(4, requires_grad=True)
    seen: list[Tensor | None] = []
    parts = Scatter.apply(x, [(0, 2), (2, 2)])
    parts[0].grad_fn.register_hook(lambda gradients, _: seen.extend(gradients))
    Nothing.apply(parts[0]).sum().backward()
    assert seen == [None] and x.grad is None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_first_slice_counts_versions_with_the_batch_and_the_others_apart(requires_grad: bool) -> None:
    x = torch.rand(6).requires_grad_(requires_grad) * 1
    first, second, third = split(x, 3)

    def versions() -> list[int]:
        return [tensor._version for tensor in (x, first, second, third)]

    before = versions()
    with torch.no_grad():
        second.add_(1)
    assert [now - then for now, then in zip(versions(), before)] == [0, 0, 1, 0]
    with torch.no_grad():
        first.add_(1)
    assert [now - then for now, then in zip(versions(), before)] == [1, 1, 1, 0]
    with torch.no_grad():
        x.add_(1)
    assert [now - then for now, then in zip(versions(), before)] == [2, 2, 1, 0]


@pytest.mark.parametrize("written", [0, 1, 2])
def test_writing_to_one_slice_leaves_saved_tensors_of_others_valid(written: int) -> None:
    x = torch.rand(6, dtype=torch.float64, requires_grad=True)
    microbatches = split(x * 1, 3)
    squares = [cut.square() for number, cut in enumerate(microbatches) if number != written]
    microbatches[written].mul_(4)
    (sum(square.sum() for square in squares) + microbatches[written].sum()).backward()
    expected = (2 * x.detach()).index_fill(0, torch.tensor([2 * written, 2 * written + 1]), 4)
    assert torch.equal(x.grad, expected)


def test_a_write_to_a_slice_that_autograd_saved_is_noticed() -> None:
    for written in range(3):
        microbatches = split(torch.rand(6, requires_grad=True) * 1, 3)
        square = microbatches[written].square().sum()
        with torch.no_grad():
            microbatches[written].mul_(4)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()


@pytest.mark.parametrize(
    "hide",
    [
        Holder,
        lambda x: {x},
        lambda x: frozenset([x]),
        lambda x: UserDict(a=x),
        lambda x: UserList([x]),
        lambda x: UserDict(a=[1, (x,)]),
        lambda x: UserDict(a=deque([x])),
        lambda x: Holder(Holder([x])),
        lambda x: Holder({x}),
    ],
)
@pytest.mark.parametrize("nest", [lambda x: x, lambda x: (torch.rand(2), {"a": [x]})])
def test_an_unknown_container_may_not_hold_a_tensor(hide: Any, nest: Any) -> None:
    name = type(hide(torch.rand(2))).__name__
    message = f"(?s)the input holds tensors in a {name}.*expected .*namedtuple.*register"
    for batch in (False, True):
        with pytest.raises(TypeError, match=message):
            flatten(nest(hide(torch.rand(2))), "the input", batch=batch)
        flatten(nest(hide("text")), "the input", batch=batch)
    with pytest.raises(TypeError, match=f"the output of the last layer holds tensors in a {name}"):
        gather([([hide(torch.rand(2))], flatten("a leaf", "it")[1])])


def test_a_container_that_holds_itself_is_looked_through_once() -> None:
    knot = Holder(None)
    knot.held = [knot]
    flatten(knot, "the input")
    knot.held.append(torch.rand(2))
    with pytest.raises(TypeError, match="tensors in a Holder"):
        flatten(knot, "the input")


@pytest.mark.parametrize("value, found", [("text", "str"), ((None, 3), "NoneType, int"), ([], "nothing"),
                                          (torch.tensor(3.0), "Tensor")])
def test_an_input_without_a_tensor_to_cut_is_refused(value: Any, found: str) -> None:
    with pytest.raises(TypeError, match="no tensor with a first dimension") as caught:
        split(value, 2)
    assert all(kind in str(caught.value) for kind in found.split(", "))


def nested(**options: Any) -> Tensor:
    return torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)], **options)


@pytest.mark.parametrize(("make", "error", "says"), [
    (lambda: torch.eye(3).to_sparse(), TypeError, r"layout torch\.sparse_coo.*expected torch\.strided.*to_dense"),
    (lambda: torch.eye(3).to_sparse_csr(), TypeError, r"layout torch\.sparse_csr.*expected torch\.strided.*to_dense"),
    (nested, TypeError, "nested tensor.*to_padded_tensor"),
    (lambda: nested(layout=torch.jagged), TypeError, "nested tensor.*to_padded_tensor"),
    (lambda: {"a": torch.rand(3, 2), "b": torch.rand(4), "c": torch.tensor(1)}, ValueError,
     r"first dimensions \[3, 3, 4\].*expected the same.*buffer"),
])
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_can_not_be_cut_with_the_others_is_refused(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        split((torch.rand(3, 3), make()), 2)


def test_outputs_of_different_nesting_are_refused_with_both() -> None:
    x = torch.rand(2)
    for value, other in [((x,), [x]), ({"a": x}, {"b": x}), ((x, x), (x,)), (x, (x,))]:
        with pytest.raises(ValueError, match="(?s)microbatches 0 and 2 .*different nesting.*same nesting"):
            joined(value, value, other)


@pytest.mark.parametrize(
    "value, other",
    [(1, 2), ("a", "b"), (None, 0), (1, True), (1, 1.0), (torch.ones(1), None), (None, torch.ones(1)),
     (object(), object()), (numpy.ones(2), numpy.ones(2))],
)
def test_plain_outputs_that_differ_are_refused_with_both(value: Any, other: Any) -> None:
    with pytest.raises(ValueError, match="microbatches 0 and 2 return .* and .*equal values") as caught:
        joined((value,), (value,), (other,))
    for shown in (value, other):
        assert ("(a tensor)" if isinstance(shown, Tensor) else repr(shown)) in str(caught.value)


def test_plain_outputs_that_are_equal_come_from_the_first_microbatch() -> None:
    first, second = [1, 2], "text"
    value = joined(({"a": UserList(first)}, second), ({"a": UserList([1, 2])}, "".join(["te", "xt"])))
    assert value[0]["a"].data == first and value[1] is second
    both = numpy.ones(2)
    assert joined((both,), (both,))[0] is both


@pytest.mark.parametrize(
    "value, other",
    [
        (torch.ones(2, 3), torch.ones(2, 4)),
        (torch.ones(2, 3), torch.ones(2)),
        (torch.ones(2), torch.ones(2, 3)),
        (torch.ones(2, 3), torch.ones(())),
        (torch.ones(()), torch.ones(2)),
    ],
)
def test_outputs_of_shapes_that_do_not_join_are_refused_with_both(value: Tensor, other: Tensor) -> None:
    with pytest.raises(ValueError, match="microbatches 0 and 2 .*only in the first dimension.*Pad") as caught:
        joined(value, value, other)
    assert f"{list(value.shape)} and {list(other.shape)}" in str(caught.value)


def test_an_empty_output_of_one_dimension_joins_as_nothing() -> None:
    x = torch.rand(2, 3)
    assert torch.equal(joined(x, torch.empty(0)), x) and torch.equal(joined(torch.empty(0), x), x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_outputs_are_joined_row_after_row() -> None:
    rows = [torch.rand(length, 3) for length in (2, 1, 3)]
    output = joined(torch.nested.nested_tensor(rows[:2]), torch.nested.nested_tensor(rows[2:]))
    assert all(torch.equal(found, row) for found, row in zip(output.unbind(), rows, strict=True))


@pytest.mark.parametrize("batch", [False, True])
def test_a_size_stays_one(batch: bool) -> None:
    value = {"x": torch.rand(2, 3), "size": torch.Size([2, 3])}
    leaves, spec = flatten(value, "the input", batch=batch)
    assert unflatten(leaves, spec)["size"].numel() == 6
