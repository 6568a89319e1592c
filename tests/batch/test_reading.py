"""What the sizes of a call say: the rows, the dimension of each tensor, and lists with one entry per row."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe.batch.reading import AmbiguousBatchError, Memory, Reader
from splitpipe.batch.tree import Node


def read(*values: Any, flags: Any = None, memory: Memory | None = None, optional: bool = True) -> Any:
    """The rows, the dimensions along which leaves are cut, and for each value whether it is cut between entries."""
    nodes: list[Node] = []
    for number, value in enumerate(values):
        flag = None if flags is None else flags[number]
        nodes.append(Node(value, flag, f"argument 'a{number}'", nodes[-1].stop if nodes else 0))
    found = Reader(nodes, "the input", memory or Memory(), optional=optional).read()
    return found.size, found.dims, [node.by_rows for node in nodes]


def images(count: int, channels: int = 3) -> list[Tensor]:
    return [torch.zeros(channels, 5 + number, 4) for number in range(count)]


def boxes(count: int) -> list[dict[str, Tensor]]:
    return [{"box": torch.zeros(2, 4)} for _ in range(count)]


x = torch.zeros


@pytest.mark.parametrize(("values", "rows", "dims", "by_rows"), [
    ([x(4, 2)], 4, [0], [False]),
    ([x(4, 2), x(3), x(4)], 4, [0, None, 0], [False] * 3),
    ([images(4), boxes(4)], 4, [None] * 8, [True, True]),
    ([tuple(images(4)), tuple(boxes(4))], 4, [None] * 8, [True, True]),
    ([images(4), x(4)], 4, [None] * 4 + [0], [True, False]),
    ([[x(4, 2)] * 3, [{"a": x(4)}] * 3, x(4)], 4, [0] * 7, [False] * 3),
    ([[x(2)] * 4, [{"a": x(2)}] * 4, x(4)], 4, [None] * 8 + [0], [True, True, False]),
    ([images(4), x(3)], 3, [0] * 5, [False, False]),
    ([x(4, 2), [1, 2, 3, 4]], 4, [0] + [None] * 4, [False, True]),
    ([x(4, 2), ["a"] * 4, ["b"] * 3], 4, [0] + [None] * 7, [False, True, False]),
    ([x(4, 2), (1, 2)], 4, [0, None, None], [False, False]),
    ([x(6, 2), (1, 2, 3, 4, 5, 6)], 6, [0] + [None] * 6, [False, True]),
    ([x(4, 2), [None] * 4], 4, [0] + [None] * 4, [False, False]),
    ([x(4, 2), [torch.tanh] * 4], 4, [0] + [None] * 4, [False, False]),
    ([x(4, 2), [(1, 2)] * 4], 4, [0] + [None] * 8, [False, True]),
    ([x(4, 2), ([(8, 8)] * 2)], 4, [0] + [None] * 4, [False, False]),
    ([x(4, 2), [x(4, 3), x(4, 1)]], 4, [0, 0, 0], [False, False]),
    ([x(2, 2), [x(2, 3), x(2).bool()]], 2, [0, 0, 0], [False, False]),
    ([(x(4, 2), x(4).bool())], 4, [0, 0], [False]),
    ([[x(5), x(3), x(2)]], 3, [None] * 3, [True]),
    ([[x(()), x(())]], 2, [None] * 2, [True]),
    ([["a", "b", "c"]], 3, [None] * 3, [True]),
    ([(images(4), boxes(4)), x(4)], 4, [None] * 8 + [0], [False, False]),
    ([x(1, 2), [x(1, 2)]], 1, [0, 0], [False, False]),
])
def test_where_one_reading_is_possible_it_is_taken(values: Any, rows: int, dims: Any, by_rows: Any) -> None:
    assert read(*values) == (rows, dims, by_rows)


@pytest.mark.parametrize(("values", "says"), [
    ([images(4)], ["'a0' is a list of 4", "[3, 5, 4], [3, 6, 4]", "4 rows, one entry each", "a batch of 3 rows",
                   "{'a0': 'rows'}", "{'a0': 0}"]),
    ([[x(4, 2)] * 3, [{"a": x(4)}] * 3], ["'a0' is a list of 3", "{'a0': 0}"]),
    ([images(4), boxes(4), x(3)], ["'a0' is a list of 4"]),
    ([x(2, 2), [x(2, 3), x(2, 3)]], ["'a1' is a list of 2", "one entry for each of 2 rows", "{'a1': 'rows'}"]),
    ([x(4, 2), {"m": [x(4, 3)] * 4}], ["'a1'['m'] is a list of 4", "{'a1': {'m': 'rows'}}", "{'a1': {'m': 0}}"]),
    ([x(4, 2), (8, 8, 8, 8)], ["'a1' is a tuple of 4", "one number for each of 4 rows", "{'a1': False}"]),
    ([(images(4), boxes(4))], ["'a0' is a tuple of 2", "{'a0': ('rows', 'rows')}"]),
])
def test_a_doubt_is_an_error_that_shows_both_readings(values: Any, says: list[str]) -> None:
    with pytest.raises(AmbiguousBatchError) as caught:
        read(*values)
    assert [part for part in says if part not in str(caught.value)] == []


def test_in_doubt_an_earlier_call_decides() -> None:
    memory = Memory()
    assert read(x(4, 2), (x(4, 3), x(4, 3)), memory=memory)[1] == [0, 0, 0]
    assert read(x(2, 2), (x(2, 3), x(2, 3)), memory=memory)[1:] == ([0, 0, 0], [False, False])
    memory = Memory()
    assert read(images(4), [1, 2, 3, 4], memory=memory)[2] == [True, True]
    assert read(images(3), [1, 2, 3], memory=memory)[2] == [True, True]
    assert read(images(5), memory=memory) == (5, [None] * 5, [True])
    memory = Memory()
    assert read(x(4, 2), (8, 8), memory=memory)[2] == [False, False]
    assert read(x(2, 2), (8, 8), memory=memory)[2] == [False, False]


def test_a_call_by_mistake_says_nothing_of_later_ones() -> None:
    memory = Memory()
    assert read(x(4, 2), ["a"] * 3, memory=memory)[2] == [False, False]
    assert read(x(4, 2), ["a"] * 4, memory=memory)[2] == [False, True]
    assert read(x(3, 2), ["a"] * 3, memory=memory)[2] == [False, True]


@pytest.mark.parametrize(("values", "flags", "expected"), [
    ([images(4)], ["rows"], (4, [None] * 4, [True])),
    ([images(4)], [0], (3, [0] * 4, [False])),
    ([x(2, 2), [x(2, 3), x(2, 3)]], [None, "rows"], (2, [0, None, None], [False, True])),
    ([x(5, 4, 2), x(3, 4)], [1, None], (4, [1, None], [False, False])),
    ([x(5, 4, 2), (x(2, 4, 2), x(2, 4, 2))], [-2, 1], (4, [1, 1, 1], [False, False])),
    ([x(4, 2), x(3, 4, 5)], [None, 1], (4, [0, 1], [False, False])),
    ([x(4, 2), ["a"] * 4], [None, False], (4, [0] + [None] * 4, [False, False])),
    ([(images(4), boxes(4))], [("rows", "rows")], (4, [None] * 8, [False])),
    ([x(4), {"a": x(2, 4), "b": x(4)}], [None, {"a": 1}], (4, [0, 1, 0], [False, False])),
])
def test_what_is_said_goes_first(values: Any, flags: Any, expected: Any) -> None:
    assert read(*values, flags=flags) == expected


@pytest.mark.parametrize(("values", "flags", "says"), [
    ([x(4, 2)], [2], "has the shape [4, 2], but batched specifies dimension 2 as the batch"),
    ([x(4, 2)], ["rows"], "is a Tensor, but batched specifies 'rows' there"),
    ([x(4, 2), ["a"] * 3], [True, "rows"], "has 3 entries, and batched specifies one entry per row, but the batch"),
    ([x(4, 2), x(3, 5)], [0, 1], "sizes [4, 5] along dimensions [0, 1]"),
])
def test_what_is_said_wrongly_is_an_error(values: Any, flags: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(*values, flags=flags)
    assert says in str(caught.value)


def test_modules_and_dtypes_are_no_rows() -> None:
    assert read(x(2, 2), [nn.Identity(), nn.Identity()], [torch.float32, torch.int64])[2] == [False] * 3
