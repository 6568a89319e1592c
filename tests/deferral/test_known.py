"""What a stage knows of a call: whether its input is of a class that the function takes, and how many came before."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe
from splitpipe.deferral.catch import Catch, Register
from splitpipe.deferral.function import SplitFunction
from splitpipe.deferral.linear import Linear, MeshedLinear
from splitpipe.deferral.pending import Names
from splitpipe.deferral.report import Sightings
from tests.helpers.deferring import Call, deferred


@pytest.mark.parametrize("whole", [False, True])
def test_calls_with_the_same_weights_are_numbered_in_each_microbatch_if_all_of_the_batch_counts(whole: bool) -> None:
    numbers: list[tuple[int, int]] = []

    class Scale(SplitFunction):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            numbers.append((len(x), ctx.number))
            ctx.save_for_input(weight)
            ctx.save_for_weight(x)
            return x * weight

        @staticmethod
        def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
            return grad_output * ctx.saved_for_input[0]

        @staticmethod
        def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor]:
            return ((grad_output * ctx.saved_for_weight[0]).sum(0),)

    Scale.whole = whole
    layer = Call(lambda x, v, w: Scale.apply(Scale.apply(Scale.apply(Scale.apply(x, v), w), v), v), v=torch.ones(4),
                 w=torch.ones(4))
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never")
    model(torch.randn(3, 4)).sum().backward()
    assert numbers == [(rows, number if whole else 0) for rows in (2, 1) for number in (0, 0, 1, 2)]
    assert deferred(model) == {"0.v": "Scale", "0.w": "Scale"}


class Shared(Tensor):
    """Stands for a DTensor."""


def test_a_function_for_tensors_that_processes_share_takes_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("torch.distributed.tensor"), "DTensor", Shared)
    nothing: Any = None
    sink: Any = SimpleNamespace(fills=False)
    catch = Catch(Register(nothing, Names([]), Sightings()), (), sink, {})
    whole, shared = torch.ones(2, 2), torch.ones(2, 2).as_subclass(Shared)
    other = "its input is of a class of its own"
    assert [catch._refused(MeshedLinear, x) for x in (whole, shared)] == [other, ""]
    assert [catch._refused(Linear, x) for x in (whole, shared)] == ["", other]
