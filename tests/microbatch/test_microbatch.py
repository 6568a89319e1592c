"""A batch is split whatever its nesting, and its slices behave like tensors of their own."""
from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe.microbatch.divider import Divider
from splitpipe.microbatch.tree import flatten, unflatten, verify_open

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Holder:
    held: Any


def split(value: Any, chunks: int) -> list[Any]:
    """The microbatches of a value."""
    division, _ = Divider((None, None), None, chunks).divide((value,), {})
    return [unflatten(leaves, nesting) for leaves, nesting in division.scatter()]


def nestings(rows: int) -> list[Any]:
    x, y = torch.rand(rows, 3), torch.arange(rows)
    return [
        x, (x, y), [x, y], OrderedDict(b=x, a=y), Point(x, y), UserDict(a=x, b=y), deque([x, y]),
        (x, None, 3, "mask", 2.5, True, b"raw", 1j), {"a": [(x, {"b": None, "c": Point(y, "text")}), []], 7: ()},
    ]


@pytest.mark.parametrize("rows", [0, 1, 7, 8])
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_any_nesting_is_split_like_chunk(rows: int, chunks: int) -> None:
    for value in nestings(rows):
        leaves, _ = flatten(value)
        for number, microbatch in enumerate(split(value, chunks)):
            assert type(microbatch) is type(value)
            for cut, leaf in zip(flatten(microbatch)[0], leaves):
                if isinstance(leaf, Tensor):
                    assert torch.equal(cut, leaf.chunk(chunks)[number] if rows else leaf)
                else:
                    assert cut is leaf


def test_each_microbatch_has_a_clone_of_a_0_dim_tensor() -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    microbatches = split((torch.rand(4), scale), 2)
    first, second = (found for _, found in microbatches)
    assert first.data_ptr() != scale.data_ptr() and first.data_ptr() != second.data_ptr()
    first.mul_(10)
    assert [value.item() for value in (scale, first, second)] == [2, 20, 2]
    (first + second).backward()
    assert scale.grad == 11


@pytest.mark.parametrize("written", [0, 1, 2])
def test_writing_to_one_slice_leaves_saved_tensors_of_others_valid_and_is_noticed_for_its_own(written: int) -> None:
    x = torch.rand(6, requires_grad=True)
    microbatches = split(x * 1, 3)
    squares = [cut.square().sum() for cut in microbatches]
    with torch.no_grad():
        microbatches[written].mul_(4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.pop(written).backward(retain_graph=True)
    torch.stack(squares).sum().backward()
    assert torch.equal(x.grad, (2 * x.detach()).index_fill(0, torch.tensor([2 * written, 2 * written + 1]), 0))


@pytest.mark.parametrize("hide", [
    Holder, lambda x: {x}, lambda x: UserList([1, (deque([x]),)]), lambda x: Holder({"a": [x]}),
])
@pytest.mark.parametrize("nest", [lambda x: x, lambda x: (torch.rand(2), {"a": [x]})])
def test_an_unknown_container_may_not_hold_a_tensor(hide: Any, nest: Any) -> None:
    message = f"(?s)the input holds tensors in a {type(hide(1)).__name__}.*expected .*namedtuple.*register"
    for deep in (False, True):
        with pytest.raises(TypeError, match=message):
            verify_open(flatten(nest(hide(torch.rand(2))))[0], "the input", deep)
        verify_open(flatten(nest(hide("text")))[0], "the input", deep)


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr,
                                  lambda x: torch.nested.nested_tensor([*x])])
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_can_not_be_cut_with_the_others_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="which can't be split .*expected torch.strided"):
        split((torch.rand(3, 3), make(torch.eye(3))), 2)


def test_a_tensor_that_is_given_twice_is_one_in_each_microbatch_unless_it_has_a_gradient() -> None:
    for requires_grad in (False, True):
        x = torch.rand(4, 2, requires_grad=requires_grad)
        for first, second in split((x, {"a": x}), 2):
            assert (first is second["a"]) is not requires_grad and torch.equal(first, second["a"])


class Record(dict[str, Any]):
    """A dict whose keys are attributes, too."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.__dict__ = self


def test_a_mapping_is_made_by_its_class() -> None:
    for part in split(Record({"x": torch.arange(4), "names": [*"abcd"]}), 2):
        assert isinstance(part, Record) and part.x is part["x"] and len(part.x) == len(part.names) == 2
