"""A tensor that says itself how it goes to another device, as quantised weights do, is moved by that alone."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from splitpipe.partition.placement import moved

CUDA = torch.device("cuda:0")
DEVICES = [torch.device("meta"), pytest.param(CUDA, marks=pytest.mark.cuda)]


class Scaled(nn.Parameter):
    """A weight with a scale of its own, and one that it shares with what its own ``to`` makes of it."""

    scale: Tensor
    shared: dict[str, Tensor]

    def to(self, *args: Any, **kwargs: Any) -> Scaled:  # type: ignore[override]
        self.shared["scale"] = self.shared["scale"].to(*args, **kwargs)
        return scaled(super().to(*args, **kwargs), self.scale.to(*args, **kwargs), self.shared)


class Quantised(nn.Parameter):
    """A weight that its own ``to`` changes and gives back, as one does that is quantised when it is moved."""

    def to(self, *args: Any, **kwargs: Any) -> Quantised:  # type: ignore[override]
        self.copy_(self.round())
        return self


def scaled(data: Tensor, scale: Tensor, shared: dict[str, Tensor]) -> Scaled:
    x = Scaled(data, requires_grad=False)
    x.scale, x.shared = scale, shared
    return x


def of_scaled(x: Any) -> list[Tensor]:
    return [x, x.scale, x.shared["scale"]]


def of_two(x: Any) -> list[Tensor]:
    return [x, x.a, x.b]


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Tensor]]]] = {
    "scaled": (lambda: scaled(torch.ones(2, 2), torch.ones(2), {"scale": torch.ones(2)}), of_scaled),
    "wrapper": (lambda: nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2))), of_two),
    "buffer": (lambda: TwoTensor(torch.ones(2, 2), torch.ones(2, 2)), of_two),
}


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_tensor_holds_goes_along(kind: str, device: torch.device) -> None:
    make, held = KINDS[kind]
    x = make()
    assert moved(x, device) is x
    assert {part.device for part in held(x)} == {device}
    assert type(x) is type(make()) and isinstance(x, nn.Parameter) is (kind != "buffer")


def test_a_tensor_that_its_own_to_changes_stays_itself() -> None:
    x = Quantised(torch.full((2, 2), 0.8))
    seen = weakref.ref(x)  # One that has such a reference can't be swapped.
    assert moved(x, torch.device("meta")) is x is seen() and (x == 1).all()
