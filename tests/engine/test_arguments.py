"""Arguments of any kind: which tensors are cut, which go whole, and when one microbatch runs."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.models import piped


class Shapes(nn.Module):
    """Notes the shapes that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *more: Any, mask: Any = None, **named: Any) -> Tensor:
        given = [*more, mask, *named.values()]
        leaves = torch.utils._pytree.tree_leaves(given)
        self.seen.append([len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves])
        return self.two(self.one(x))


def lengths(*args: Any, batched: Any = None, **kwargs: Any) -> list[Any]:
    """The lengths of the arguments after the first, in each microbatch; rows are six."""
    module = Shapes()
    model = piped(module, ["two"], batched=batched)
    y = model(torch.randn(6, 4), *args, **kwargs)
    assert y.shape == (6, 4)
    return sorted(model.seen)


SIX, THREE, NUMBER = torch.randn(6, 2), torch.randn(3), torch.tensor(2.0)


@pytest.mark.parametrize(("args", "kwargs", "batched", "expected"), [
    ((SIX,), {}, None, [[2, None]] * 3),
    ((), {"mask": SIX}, None, [[2]] * 3),
    ((THREE, NUMBER, 3, "text", None), {}, None, [[3] + [None] * 5] * 3),
    ((), {"mask": SIX}, {"mask": False}, [[6]] * 3),
    ((), {"mask": {"a": SIX, "b": [SIX]}}, {"mask": {"a": False}}, [[2, 6]] * 3),
    ((), {"mask": (SIX, SIX)}, {"mask": (True, False)}, [[2, 6]] * 3),
    ((), {"other": SIX}, {"other": False}, [[None, 6]] * 3),
    ((SIX,), {}, {"args[1]": False}, [[6, None]] * 3),
])
def test_tensors_of_the_batchs_size_are_cut(
    args: Any, kwargs: Any, batched: Any, expected: list[Any]
) -> None:
    found = lengths(*args, batched=batched, **kwargs)
    assert [sorted(each, key=str) for each in found] == [sorted(each, key=str) for each in expected]


def test_an_object_that_microbatches_can_not_share() -> None:
    class Cache:
        def __init__(self) -> None:
            self.tensors: list[Tensor] = []

    assert lengths(SIX, cache=Cache()) == [[6, None, None]]
    assert len(lengths(SIX, function=torch.tanh)) == 3
    assert len(lengths(SIX, cache=Cache(), batched={"cache": False})) == 3


def test_a_name_that_is_no_arguments_is_an_error() -> None:
    class Model(Shapes):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return self.two(self.one(x))

    with pytest.raises(ValueError, match="batched names 'maks', which the call doesn't have: expected .* 'x', 'mask'"):
        piped(Model(), ["two"], batched={"maks": False})(torch.randn(6, 4), SIX)
