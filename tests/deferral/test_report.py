"""What the report says of every parameter, and how it looks."""
from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitpipe import SplitFunction, SplitPipe, schedule
from splitpipe.deferral.report import DeferralReport, Row, Sightings, row
from tests.helpers.deferring import Call, Unruled, deferred, left
from tests.helpers.twin import step, twins

UNSEEN = "no function was seen to use it in a forward with grad mode (compiled code isn't seen)"
NOT_YET = "not known yet: run a step first"


class Offset(SplitFunction):
    """x + any of two weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        return x + sum(weight for weight in weights if weight is not None)

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(grad_output.sum(0) if need else None for need in ctx.needs_weight_grad)


def pipeline(*layers: nn.Module, balance: list[int] | None = None, **options: object) -> SplitPipe:
    return twins(nn.Sequential(*layers), balance, chunks=2, **options)[1]


def test_the_table() -> None:
    model = pipeline(nn.Linear(6, 4), Unruled(4), nn.Linear(4, 2, bias=False).requires_grad_(False))
    step(model, torch.randn(4, 6))
    assert str(model.deferral_report()) == (
        "parameter  stage  deferred  why\n"
        "0.weight   0      yes       Linear\n"
        "0.bias     0      yes       Linear\n"
        "1.weight   1      no        sin has no rule\n"
        "2.weight   1      no        it is frozen\n"
        "deferred: 2 of 4 parameters, 70.0% of the elements"
    )


def test_the_table_of_no_parameters() -> None:
    assert str(pipeline(nn.Tanh()).deferral_report()) == (
        "parameter  stage  deferred  why\ndeferred: 0 of 0 parameters"
    )


def test_the_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = Row("a.long.name.of.a.parameter", 10, 4, True, "Linear"), Row("b", 123456, 4, False, "why not")
    assert str(DeferralReport(rows)).splitlines() == [
        "parameter                   stage   deferred  why",
        "a.long.name.of.a.parameter  10      yes       Linear",
        "b                           123456  no        why not",
        "deferred: 1 of 2 parameters, 50.0% of the elements",
    ]


def used(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(x, w) @ w + w.sum() + w.exp().sum() + F.linear(F.linear(x, v.t()), v)


def computed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.linear(x, v.t()), w * 2)


#: What two parameters of a layer are used for, and what the report says of them.
USES: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "nothing": (lambda x, w, v: x * 2, UNSEEN, UNSEEN),
    "functions without a rule": (used, "exp has no rule, sum has no rule", "+ Linear"),
    "a computed weight, a view": (computed, "mul has no rule", "+ Linear"),
    "a call with a computed weight": (
        lambda x, w, v: Offset.apply(x, w[0], v[0] * 2), "split_call: what it would defer is computed in forward",
        "mul has no rule"),
}


@pytest.mark.parametrize("name", USES)
def test_a_row_names_what_its_parameter_is_used_for(name: str) -> None:
    function, *expected = USES[name]
    model = pipeline(Call(function, w=torch.randn(4, 4), v=torch.randn(4, 4)))
    step(model, torch.randn(4, 4))
    assert [("+ " if row.deferred else "") + row.why for row in model.deferral_report()] == expected


def test_the_report_before_a_step_and_after_a_forward() -> None:
    whole = pipeline(nn.Linear(6, 4), Unruled(4), backward="autograd")
    whole[0].bias.requires_grad_(False)
    for _ in range(2):
        why = "backward='autograd'"
        assert left(whole) == {"0.weight": why, "0.bias": "it is frozen", "1.weight": why}
        step(whole, torch.randn(4, 6))
    model = pipeline(nn.Linear(6, 4), Unruled(4))
    with torch.no_grad():
        model(torch.randn(4, 6))
    assert set(left(model).values()) == {NOT_YET} and len(left(model)) == 3
    model(torch.randn(4, 6))
    assert set(deferred(model)) == {"0.weight", "0.bias"}
    report = model.deferral_report()
    assert len(report) == 3 and tuple(report) == report.rows
    assert [(row.parameter, row.stage, row.elements) for row in report] == [
        ("0.weight", 0, 24), ("0.bias", 0, 4), ("1.weight", 1, 4)]


class OwnParameter(nn.Parameter):
    """A parameter of a class of its own."""


@pytest.mark.parametrize("kind", [nn.Parameter, OwnParameter])
def test_a_parameter_that_is_an_input_is_left_to_autograd(kind: type[nn.Parameter]) -> None:
    layer = Call(lambda x, w, p: x + F.linear(p, w).mean(), w=torch.randn(5, 4), p=torch.randn(3, 4))
    layer.p = kind(layer.p.detach())
    model = pipeline(layer)
    step(model, torch.randn(4, 4))
    assert left(model)["0.p"] == "mm: its input is a parameter"


def test_a_layer_put_in_a_parameters_place_is_seen_for_itself() -> None:
    model = pipeline(nn.Linear(6, 4, bias=False), nn.Tanh())
    step(model, torch.randn(4, 6))
    model[0].weight = nn.Parameter(torch.randn(4, 6))
    assert left(model) == {"0.weight": UNSEEN}
    step(model, torch.randn(4, 6))
    assert deferred(model) == {"0.weight": "Linear"}


def test_sightings_of_a_parameter_end_with_it() -> None:
    sightings = Sightings()
    parameter = nn.Parameter(torch.randn(3))
    sightings.deferred(parameter, "Linear")
    number = id(parameter)
    sightings._seen[id(other := nn.Parameter(torch.randn(3)))] = sightings._seen[number]
    assert sightings.find(other) is None  # The same number, another parameter.
    del parameter
    gc.collect()
    assert sightings._seen[number].parameter() is None


@pytest.mark.parametrize(("noted", "expected"), [
    ([], (False, "otherwise")),
    (["+b", "+a"], (True, "a, b")),
    (["-b", "-a"], (False, "a, b")),
    (["+a", "-c", "-b"], (True, "a; by autograd: b, c")),
])
def test_why_is_in_the_same_order_whatever_came_first(noted: list[str], expected: tuple[bool, str]) -> None:
    sightings, parameter = Sightings(), nn.Parameter(torch.randn(3))
    for note in noted:
        (sightings.deferred if note[0] == "+" else sightings.left)(parameter, note[1:])
    found = row("name", 0, parameter, sightings.find(parameter), "otherwise")
    assert (found.deferred, found.why) == expected


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_microbatch_left_whole_tells_nothing_of_the_others(checkpoint: Any) -> None:
    op = schedule.Op
    rows = [
        [op("F", 0, 0), op("F", 0, 1), op("BW", 0, 0), op("B", 0, 1), op("W", 0, 1)],
        [op("F", 1, 0), op("BW", 1, 0), op("F", 1, 1), op("B", 1, 1), op("W", 1, 1)],
    ]
    model = SplitPipe(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint,
        schedule=schedule.Schedule(rows, [0, 1]), loss_fn=nn.MSELoss(),
    )
    model(torch.randn(6, 4), target=torch.randn(6, 4)).backward()
    assert all(row.deferred for row in model.deferral_report())


def test_a_report_moves_nothing() -> None:
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=["cpu"] * 2)
    model[1] = nn.Linear(4, 4, device="meta")
    model.deferral_report()
    assert model[1].weight.device.type == "meta"
