"""A batch is split whatever its nesting, its slices behave like tensors of their own, and outputs are joined again."""
from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe.microbatch.division import Divider, read_input
from splitpipe.microbatch.gather import gather
from splitpipe.microbatch.tree import flatten, unflatten, verify_open
from tests.helpers.twin import assert_same

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Holder:
    held: Any


def split(value: Any, chunks: int) -> list[Any]:
    """The microbatches of a value."""
    division, _ = Divider(partial(read_input, flags=None), None, chunks).divide((value,), {})
    return [unflatten(leaves, nesting) for leaves, nesting in division.scatter()]


def nestings(rows: int) -> list[Any]:
    x, y = torch.rand(rows, 3), torch.arange(rows)
    return [x, (x, y), [x, y], OrderedDict(b=x, a=y), Point(x, y), UserDict(a=x, b=y), deque([x, y]),
            (x, None, 3, "mask", 2.5, True, b"raw", 1j), {"a": [(x, {"b": None, "c": Point(y, "text")}), []], 7: ()}]


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


@pytest.mark.parametrize("hide", [Holder, lambda x: {x}, lambda x: UserList([1, (deque([x]),)]),
                                  lambda x: Holder({"a": [x]})])
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
def test_a_tensor_that_can_not_be_cut_with_the_others_is_an_error_of_torch(make: Any) -> None:
    with pytest.raises(RuntimeError, match="NestedTensor|Sparse"):
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


WEIGHT = torch.rand(4, 4, requires_grad=True)
EVEN, UNEVEN, SINGLE = [2, 2, 2], [3, 3, 1], [1, 1, 1]


@dataclass(frozen=True)
class Frozen:
    y: Any
    name: str = "name"


class Box:
    """An object that pytree doesn't know."""


def test_containers_that_differ_in_more_than_their_parts_can_not_be_joined() -> None:
    with pytest.raises(ValueError, match="which can't be joined"):
        gather([defaultdict(factory, x=torch.rand(2)) for factory in (int, float)], [2, 2])


def joined(function: Callable[[Tensor], Any], rows: Sequence[int], along: Sequence[int] = (0,)) -> Any:
    """The outputs of a function for microbatches, joined."""
    x = torch.arange(float(sum(rows) * 4)).view(-1, 4)
    return gather([function(part) for part in x.split(list(rows))], rows, along)


def whole(function: Callable[[Tensor], Any], rows: Sequence[int]) -> Any:
    """The output of the function for the batch."""
    return function(torch.arange(float(sum(rows) * 4)).view(-1, 4))


#: A function of rows of four; the dimensions along which the input was split.
JOINED: dict[str, tuple[Callable[[Tensor], Any], Sequence[int]]] = {
    "a row for each row": (lambda y: y, (0,)),
    "any nesting": (lambda y: {"a": [(y, {"b": None, "c": Point(y, "text")}), []], 7: (), "d": deque([y])}, (0,)),
    "plain values": (lambda y: (y, None, 3, "mask", 2.5, True, b"raw", 1j, torch.float32, torch.Size([3])), (0,)),
    "the batch second, as the input's": (lambda y: y.t(), (1,)),
    "either": (lambda y: (y, y.t().expand(5, 4, -1).transpose(1, 2), y.t()), (0, 1)),
    "a weight": (lambda y: (y, WEIGHT), (0,)),
    "equal positions": (lambda y: {"y": y, "positions": torch.arange(5)}, (0,)),
    "several entries per row": (lambda y: torch.stack([y, -y], 1).flatten(0, 1), (0,)),
    "selected rows": (lambda y: y[(y[:, 0] > 3) & (y[:, 0] < 11)], (0,)),
    "objects of rows": (lambda y: ["abc" for _ in y] and [Frozen(Box) for _ in y], (0,)),
    "dicts of rows": (lambda y: [{"box": own[None, :3].expand(6, 3), "n": 3, "s": own.sum()} for own in y], (0,)),
    "a list of layers": (lambda y: [y, y * 2], (0,)),
}


@pytest.mark.parametrize("rows", [EVEN, UNEVEN, SINGLE, [5]], ids=str)
@pytest.mark.parametrize("name", JOINED)
def test_the_output_is_that_of_the_batch(name: str, rows: list[int]) -> None:
    function, along = JOINED[name]
    assert_same(joined(function, rows, along), whole(function, rows), "output")


DIFFERS = r"has the shape {} and differs between microbatches, of {} rows"
REFUSED: dict[str, tuple[Callable[[Tensor], Any], list[int], str]] = {
    "the batch second": (lambda y: y.t(), EVEN, DIFFERS.format(r"\[4, 2\]", 2)),
    "no batch": (lambda y: {"m": y.mean(0)[:3]}, EVEN, r"output\['m'\] " + DIFFERS.format(r"\[3\]", 2)),
    "no batch, but the first rows": (lambda y: y.mean(0)[:3], UNEVEN, DIFFERS.format(r"\[3\]", 3)),
    "all pairs of rows": (lambda y: y @ y.t(), UNEVEN, "Expected size 3 but got size 1"),
    "other dimensions": (lambda y: y[:, 0] if len(y) == 1 else y, UNEVEN, "must have same number of dimensions"),
    "a number of rows": (lambda y: (y, len(y)), UNEVEN, r"0 and 2 return 3 and 1 as the output\[1\]"),
    "a number of the data": (lambda y: float(y[0, 0]), EVEN, r"0 and 1 return 0.0 and 8.0 as the output, .*equal"),
    "None in one": (lambda y: None if len(y) == 3 else y, UNEVEN, r"0 and 2 return None and a Tensor"),
    "an object": (lambda y: {"y": y, "c": Box()}, EVEN,
     r"a Box and a Box as the output\['c'\],.* \(a cache: use_cache=False\)"),
    "an object with an == of its own": (lambda y: (y, Fraction(1, 3)), EVEN, "return a Fraction and a Fraction as"),
    "an array": (lambda y: y.numpy(), EVEN, r"return a ndarray and a ndarray as the output"),
    "strings of rows": (lambda y: ["text" for _ in y], EVEN, r"list of 2, and each microbatch has 2 rows: it could"),
    "states of an RNN": (lambda y: (y[None], y[None] * 2), EVEN, r"tuple of 2, and each microbatch has 2 rows"),
    "means": (lambda y: (y.mean(0)[:3], y.mean(0)[1:]), EVEN, r"tuple of 2, and each microbatch has 2 rows"),
    "another length": (lambda y: [y] * int(y[0, 0] + 3), EVEN,
     r"0 and 1 return .* as the output, which can.t be joined"),
    "another container": (lambda y: (y,) if len(y) == 1 else [y], UNEVEN, r"0 and 2 return a .*in the same nesting"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_an_error_of_five_lines_at_most(name: str) -> None:
    function, rows, words = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=words) as caught:
        joined(function, rows)
    assert len(str(caught.value)) < 5 * 120


def test_two_dimensions_that_could_both_be_the_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 2, 4\] and differs between microbatches"):
        joined(lambda y: y.expand(2, -1, -1), EVEN, (0, 1))


def test_where_batched_names_another_dimension_the_first_still_counts_if_only_that_fits() -> None:
    assert_same(joined(lambda y: y[:, :3], [4, 4], (1,)), whole(lambda y: y[:, :3], [4, 4]), "pooled")
    assert_same(joined(lambda y: y.t()[:3], [3, 3], (1,)), whole(lambda y: y.t()[:3], [3, 3]), "length first")


def test_entries_of_rows_that_are_second_are_an_error_as_their_order_is_unknown() -> None:
    for function in (lambda y: y.t().flatten(), lambda y: y.t()[y.t() > 3]):  # Length first, or only some.
        with pytest.raises(ValueError, match="and not flattened"):
            joined(function, EVEN, (1,))


def test_dataclasses_are_containers() -> None:
    found = gather([Frozen((torch.ones(2, 3), Frozen(None))), Frozen((torch.ones(1, 3), Frozen(None)))], [2, 1])
    assert type(found) is Frozen and found.y[0].shape == (3, 3) and found.y[1] == Frozen(None)
    with pytest.raises(ValueError, match="the same nesting"):
        gather([Frozen(Frozen(None)), Frozen(Point(1, 2))], [2, 1])


def test_an_empty_output_of_one_dimension_joins_as_nothing() -> None:
    x = torch.rand(2, 3)
    for outputs in ([x, torch.empty(0)], [torch.empty(0), x]):
        assert torch.equal(gather(outputs, [2, 2]), x)
