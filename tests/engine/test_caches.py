"""What microbatches leave in a cache nobody could join: in training a module is told to keep none."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe import attach
from tests.helpers.modules import linears, module_of


def telling(self: Any, x: Tensor, use_cache: bool = True) -> tuple[Tensor, bool]:
    """Says whether it was to keep a cache."""
    return self.two(self.one(x)), use_cache


def around(self: Any, x: Tensor, **kwargs: Any) -> Any:
    """Hands its keywords on."""
    return self.model(x, **kwargs)


@pytest.mark.parametrize("handed", [False, True])
def test_use_cache_is_false_in_training(handed: bool) -> None:
    net, cut = module_of(telling, **linears("one", "two")), "two"
    if handed:
        net, cut = module_of(around, model=net), "model.two"
    model, x = attach(net, cuts=[cut], devices=["cpu"] * 2, chunks=2), torch.randn(4, 4)
    assert model(x)[1] is False
    assert model(x, use_cache=True)[1] is True
    assert model.eval()(x)[1] is True


def deciding(self: Any, x: Tensor, use_cache: bool | None = None) -> tuple[Tensor, bool | None]:
    """Says whether it was to keep a cache; None: its configuration decides."""
    return self.two(self.one(x)), use_cache


def asking(self: Any, x: Tensor, *given: Any) -> Any:
    """Has a part that may keep a cache."""
    return self.model(x, *given)


@pytest.mark.parametrize(("part", "expected"), [(deciding, [False, True, None]), (telling, [True, True, True])])
def test_a_part_that_decides_itself_keeps_no_cache_in_training(part: Any, expected: list[Any]) -> None:
    net = module_of(asking, model=module_of(part, **linears("one", "two")))
    model, x = attach(net, cuts=["model.two"], devices=["cpu"] * 2, chunks=2), torch.randn(4, 4)
    found = [model(x)[1], model(x, True)[1], model.eval()(x)[1]]
    assert found == expected


def test_keywords_are_not_handed_through_a_module_that_takes_none() -> None:
    inner = module_of(asking, model=module_of(deciding, **linears("one", "two")))
    model, x = attach(module_of(around, model=inner), cuts=["model.model.two"], devices=["cpu"] * 2), torch.randn(4, 4)
    assert model(x)[1] is False
