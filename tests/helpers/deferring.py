"""A pipeline whose weight gradients wait: made of a function and its parameters, equal to its module; its report."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitFunction, deferral_report
from splitpipe.backward import graph_walk
from tests.helpers.covering import few
from tests.helpers.scheduled import assert_transparent

#: Drop-in: W of all microbatches at once; W after each B; recomputed.
WAYS: dict[str, dict[str, Any]] = {"merged": {"checkpoint": "never"},
                                   "at once": {"checkpoint": "never", "stash_limit": 0},
                                   "checkpointed": {"checkpoint": "except_last"}}
#: For ``trained``, by a schedule, too.
ALL: dict[str, dict[str, Any]] = {**WAYS, "zb-h1": {"schedule": "zb-h1"},
                                  "zb-h1, checkpointed": {"schedule": "zb-h1", "checkpoint": "always"}}


def tried(names: Iterable[str], more: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Parametrizes a test of layers by their names: each drop-in and by a schedule, and some in all ways."""
    names = [*names]
    more = {*more} or {*names[:2]}
    return pytest.mark.parametrize(("name", "way"), [
        pytest.param(name, way, id=f"{name}-{which}", marks=[] if which == "merged" or name in more and which in (
            "checkpointed", "zb-h1") else pytest.mark.thorough)
        for name in names for which, way in ALL.items() if which in ("merged", "zb-h1") or name in more
    ])


#: For what does not depend on when products are computed.
in_more_ways = pytest.mark.parametrize("way", few(1, ALL.values()), ids=ALL)
drop_in = pytest.mark.parametrize("way", few(1, WAYS.values()), ids=WAYS)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """What differs in more than the last digits of a double is no rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits convolutions that are too small to gain by it, too."""
    monkeypatch.setattr(graph_walk, "_MANY", 0)


class Call(nn.Module):
    """A function of the input and of parameters, in their order."""

    def __init__(self, function: Callable[..., Any], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, value if isinstance(value, nn.Parameter) else nn.Parameter(value))

    def forward(self, x: Any) -> Any:
        return self.function(x, *self._parameters.values())


class Scale(SplitFunction):
    """The tensor times a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        ctx.save_for_input(*weights)
        ctx.save_for_weight(x)
        return x * weights[0]

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output * ctx.saved_for_input[0]

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ((grad_output * ctx.saved_for_weight[0]).sum(0),)


def scale(width: int, function: type[SplitFunction] = Scale, **options: Any) -> Call:
    """A layer that calls the function."""
    return Call(lambda x, w: function.apply(x, w, **options), weight=torch.rand(width))


def deferred(model: nn.Module) -> dict[str, str]:
    """The parameters that the report says are deferred, and how."""
    return {row.parameter: row.why for row in deferral_report(model) if row.deferred}


def fused(model: nn.Module) -> dict[str, str]:
    """The parameters whose gradients B computes, and why."""
    return {row.parameter: row.why for row in deferral_report(model) if not row.deferred}


def trained(layer: nn.Module, value: Any, **options: Any) -> nn.Module:
    """The layer, between two stages of no parameters, as a pipeline that is its module: three uneven microbatches."""
    layers, name = nn.Sequential(nn.Identity(), layer, nn.Tanh()), options.pop("schedule", None)
    return assert_transparent(layers, value, name, balance=[1, 2], **{"chunks": 3, **options})
