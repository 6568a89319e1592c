"""What a caller asks a plan for: what is taken, what is refused before anything is measured, and what is left alone."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import Plan
from splitpipe.checks import number_of
from splitpipe.core.stream import Place
from splitpipe.planner.planning import chunks_of, places_of, room_of
from splitpipe.schedule import build
from tests.helpers.covering import few

pytestmark = pytest.mark.draws


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def planned(**options: Any) -> Plan:
    return splitpipe.plan(layers(), torch.randn(4, 3), **{"chunks": 2, "seconds": 0, **options})


@pytest.mark.parametrize(("rows", "asked", "expected"), [
    (5, 4, [3]), (8, 4, [4]), (7, range(1, 8), [1, 2, 3, 4, 7]), (10, None, [2, 4, 5]),
    (8, torch.tensor(2), [2]), (8, torch.tensor([2, 4]), [2, 4]), (8, (n for n in (2, 4)), [2, 4]),
])
def test_chunks_are_as_many_as_there_are_microbatches(rows: int, asked: Any, expected: list[int]) -> None:
    assert chunks_of(asked, rows, 2) == expected


def test_chunks_of_a_schedule_of_ones_own_are_taken_as_they_are() -> None:
    assert chunks_of(4, 5, 2, [build("1f1b", 2, 4)]) == [4]


def test_numbers_may_be_of_any_type() -> None:
    numpy = pytest.importorskip("numpy")
    two = [Place(torch.device("cpu"))] * 2
    assert room_of(numpy.int64(9), two, None) == [9.0, 9.0]
    assert room_of(numpy.array([9, 8]), two, None) == [9.0, 8.0]
    assert room_of(10**400, two, None) == [float("inf")] * 2
    assert number_of("seconds", numpy.float32(1.5), "a time") == 1.5
    with pytest.raises(ValueError, match="finite"):
        number_of("seconds", 10**400, "a time")


@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerators_two_stages_on_the_cpu_are_planned() -> None:
    assert planned().devices == ("cpu", "cpu")
    alone = splitpipe.plan(nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3), chunks=2, seconds=0)
    assert alone.devices == ("cpu",) and "on 1 device:" in str(alone)


def test_a_stream_is_refused() -> None:
    place: Any = Place(torch.device("cuda", 0), object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected whole devices, each once, and no streams"):
        places_of([place])


@pytest.mark.parametrize("mode", few(1, [
    torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.float16),
]))
def test_in_inference_mode_and_under_autocast_a_plan_is_made(mode: Any) -> None:
    with mode():
        x = torch.randn(4, 3)
        assert planned(target=x, loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, schedules=["1f1b"]).chunks == 2
