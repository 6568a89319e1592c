"""What the sizes of a call say: the rows, the dimension of each tensor, and lists with one entry per row."""
from __future__ import annotations

import inspect
import warnings
from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe.microbatch.arguments import read_arguments
from splitpipe.microbatch.division import Divider, decide, find_size


def any_forward(*args: Any, **kwargs: Any) -> None:
    """A forward with any arguments."""


pytestmark = pytest.mark.filterwarnings("ignore:argument .* every microbatch gets all of it")


def divider_of(forward: Callable[..., Any], batched: Any, chunks: int) -> Divider:
    return Divider(partial(read_arguments, inspect.signature(forward), batched or {}, "the input"), None, chunks)


def read(*values: Any, flags: Any = ()) -> Any:
    """The rows, the dimensions along which leaves are split, and for each value whether it is split between entries."""
    given, named = ({f"a{k}": x for k, x in enumerate(each)} for each in (values, flags))
    root = read_arguments(inspect.signature(any_forward), named, "the input", **given)
    found = find_size(root, 2)
    decide(root, found)
    own = root.children[1].children  # type: ignore[index]
    return found.rows, [leaf.dim for leaf in root.leaves], [bool(node.children and node.times) for node in own or ()]


def images(count: int, channels: int = 3) -> list[Tensor]:
    return [torch.zeros(channels, 5 + number, 4) for number in range(count)]


def boxes(count: int) -> list[dict[str, Tensor]]:
    return [{"box": torch.zeros(2, 4)} for _ in range(count)]


x = torch.zeros


@pytest.mark.parametrize(("values", "rows", "dims", "by_rows"), [
    ([x(4, 2)], 4, [0], [False]),
    ([x(4, 2), x(3), x(4)], 4, [0, None, 0], [False] * 3),
    ([images(4), boxes(4)], 4, [None] * 8, [True, True]),
    ([images(4), x(4)], 4, [None] * 4 + [0], [True, False]),
    ([[x(4, 2)] * 3, [{"a": x(4)}] * 3, x(4)], 4, [0] * 7, [False] * 3),
    ([[x(2)] * 4, [{"a": x(2)}] * 4, x(4)], 4, [None] * 8 + [0], [True, True, False]),
    ([images(4), x(3)], 3, [0] * 5, [False, False]),
    ([x(4, 2), x(1, 2), x(1, 4, 4)], 4, [0, None, None], [False] * 3),
    ([x(4, 2), UserDict(a=x(4), b=["a"] * 4)], 4, [0, 0] + [None] * 4, [False, False]),
    ([x(4, 2), [1, 2, 3, 4]], 4, [0] + [None] * 4, [False, True]),
    ([x(4, 2), [1, 0.5, True, 4]], 4, [0] + [None] * 4, [False, True]),
    ([x(4, 2), ["a"] * 4, ["b"] * 3], 4, [0] + [None] * 7, [False, True, False]),
    ([x(4, 2), [None] * 4], 4, [0] + [None] * 4, [False, False]),
    ([x(4, 2), [x(4, 3), x(4, 1)]], 4, [0, 0, 0], [False, False]),
    ([[x(5), x(3), x(2)]], 3, [None] * 3, [True]),
    ([x(1, 2), [x(1, 2)]], 1, [0, 0], [False, False]),
])
def test_where_one_reading_is_possible_it_is_taken(values: Any, rows: int, dims: Any, by_rows: Any) -> None:
    assert read(*values) == (rows, dims, by_rows)


@pytest.mark.parametrize(("values", "says"), [
    ([images(4)], ["'a0' is a list of 4", "[3, 5, 4], [3, 6, 4]", "4 rows, one entry each", "a batch of 3 rows",
                   "{'a0': 'rows'}", "{'a0': 0}"]),
    ([x(2, 2), [x(2, 3), x(2, 3)]], ["'a1' is a list of 2", "one entry for each of 2 rows", "{'a1': 'rows'}"]),
    ([x(4, 2), {"m": [x(4, 3)] * 4}], ["'a1'['m'] is a list of 4", "'rows' for the former, 0 for the latter"]),
    ([x(4, 2), x(8, 3)], ["'a1' has the shape [8, 3]", "2 entries for each of the 4 rows of argument 'a0'",
                          "{'a1': 'groups'}", "{'a1': False}"]),
    ([x(4, 2), {"m": x(12)}], ["3 entries for each of the 4 rows", "'groups' for the former, False"]),
    ([x(4, 2), images(8)], ["'a1' is a list of 8", "2 entries for each", "{'a1': 'groups'}", "{'a1': False}"]),
    ([x(4, 2), x(3, 4, 5)], ["'a1' has the shape [3, 4, 5]", "along dimension 1", "{'a1': 1}", "{'a1': False}"]),
])
def test_a_doubt_is_an_error_that_shows_both_readings(values: Any, says: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        read(*values)
    assert [part for part in says if part not in str(caught.value)] == []


@pytest.mark.parametrize(("values", "flags", "expected"), [
    ([images(4)], ["rows"], (4, [None] * 4, [True])),
    ([images(4)], [0], (3, [0] * 4, [False])),
    ([x(2, 2), [x(2, 3), x(2, 3)]], [None, "rows"], (2, [0, None, None], [False, True])),
    ([x(5, 4, 2), x(3, 4)], [1, None], (4, [1, None], [False, False])),
    ([x(4, 2), x(3, 4, 5)], [None, 1], (4, [0, 1], [False, False])),
    ([x(4, 2), ["a"] * 4], [None, False], (4, [0] + [None] * 4, [False, False])),
    ([x(4), {"a": x(2, 4), "b": x(4)}], [None, {"a": 1}], (4, [0, 1, 0], [False, False])),
    ([x(8), x(4, 2)], ["groups", None], (4, [0, 0], [False, False])),
    ([x(4, 2), images(8), x(4)], [None, "groups", "groups"], (4, [0] + [None] * 8 + [0], [False, True, False])),
    ([x(4, 2), x(8), x(3, 4, 5)], [None, False, False], (4, [0, None, None], [False] * 3)),
])
def test_what_is_said_goes_first(values: Any, flags: Any, expected: Any) -> None:
    assert read(*values, flags=flags) == expected


@pytest.mark.parametrize(("values", "flags", "says"), [
    ([x(4, 2)], [2], "Dimension out of range"),
    ([x(4, 2)], ["rows"], "is a Tensor, but batched says 'rows' there"),
    ([x(4, 2), ["a"] * 3], [True, "rows"], "has 3 entries, but the batch has 4 rows, as argument 'a0' has"),
    ([x(4, 2), x(3, 5)], [0, 1], "'a1' has 5 entries, but the batch has 4 rows, as argument 'a0' has"),
    ([x(4, 2), ["a"] * 6], [None, "groups"], "has 6 entries, but the batch has 4 rows"),
])
def test_what_is_said_wrongly_is_an_error(values: Any, flags: Any, says: str) -> None:
    with pytest.raises((ValueError, IndexError)) as caught:
        read(*values, flags=flags)
    assert says in str(caught.value)


@pytest.mark.parametrize("batched", [{"mems": 1}, {"mems[0]": 1, "mems[1]": 1}])
def test_a_flag_for_all_of_star_arguments_or_for_one(batched: Any) -> None:
    divider = divider_of(lambda data, *mems, **more: None, batched, 2)
    for given in ((x(4),), (x(4), x(3, 4), x(4, 4))):  # The first segment has no memories.
        assert divider.divide(given, {})[0].dims == [0, 1, 1][: len(given)]
    with pytest.raises(ValueError, match="batched names 'more', which the call doesn't have"):
        divider_of(lambda x, **more: None, {"more": 0}, 2).divide((x(4),), {})


@pytest.mark.parametrize("rows", [1, 4])
def test_of_a_single_microbatch_no_error_shows_two_readings(rows: int) -> None:
    given = x(rows, 2), x(2 * rows), [x(rows)] * rows, x(3, rows, 2)
    for chunks in (1, 2):
        divider = divider_of(any_forward, None, chunks)
        if min(chunks, rows) == 1:
            assert len(divider.divide(given, {})[0].rows) == 1
        else:
            with pytest.raises(ValueError, match="2 entries for each of the 4 rows"):
                divider.divide(given, {})


@pytest.mark.parametrize(("values", "batched", "count"), [
    ((x(8, 2), x(9, 2)), None, 1), ((x(8, 2), {"a": x(9)}, x(7, 2)), None, 2), ((x(8, 2), x(9)), {"args[1]": False}, 0),
    ((x(8, 5), x(5, 5), x(1), x(()), ["a"] * 9, [x(4)] * 8), None, 0),
])
def test_a_tensor_of_an_odd_size_is_warned_of_once(values: Any, batched: Any, count: int) -> None:
    divider = divider_of(any_forward, batched, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        divider.divide(values, {})
        divider.divide(values, {})
    assert len(caught) == count
    assert all("but argument 'args[0]' has 8 rows: every microbatch gets all" in str(each.message) for each in caught)
