"""What a caller asks a plan for: what is taken, what is refused before anything is measured, and what is left alone."""
from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import Plan
from splitpipe.checks import number_of
from splitpipe.core.stream import Place
from splitpipe.planner.arguments import chunks_of, memory_of, places_of
from splitpipe.schedule import build
from tests.helpers.covering import few

mse = nn.functional.mse_loss


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def planned(module: nn.Module | None = None) -> Plan:
    x = torch.randn(4, 3)
    return splitpipe.plan(
        layers() if module is None else module, x, target=x, loss_fn=mse, devices=["cpu", "cpu"], chunks=2,
        schedules=["1f1b"], seconds=0,
    )


@pytest.mark.parametrize(("rows", "asked", "expected"), [
    (5, 4, [3]), (8, 4, [4]), (7, range(1, 8), [1, 2, 3, 4, 7]), (10, None, [2, 4, 5]),
    (8, torch.tensor(2), [2]), (8, torch.tensor([2, 4]), [2, 4]), (8, (n for n in (2, 4)), [2, 4]), (8, {2}, [2]),
])
def test_chunks_are_as_many_as_there_are_microbatches(rows: int, asked: Any, expected: list[int]) -> None:
    assert chunks_of(asked, rows, 2) == expected


def test_chunks_of_a_schedule_of_ones_own_are_taken_as_they_are() -> None:
    assert chunks_of(4, 5, 2, [build("1f1b", 2, 4)]) == [4]


@pytest.mark.thorough
def test_a_batch_that_no_chunks_divide_is_compared() -> None:
    module, x = layers(), torch.randn(5, 3)
    found = splitpipe.plan(
        module, x, target=x, loss_fn=mse, devices=["cpu", "cpu"], chunks=4, schedules=["1f1b"], seconds=0
    )
    model = found.apply(module)
    with model.record() as timeline:
        model(x, target=x)
    assert found.compare(timeline).step.recorded > 0


def test_numbers_may_be_of_any_type() -> None:
    numpy = pytest.importorskip("numpy")
    assert memory_of(numpy.int64(9), 2) == [9.0, 9.0]
    assert memory_of(numpy.array([9, 8]), 2) == [9.0, 8.0]
    assert number_of("seconds", numpy.float32(1.5), "a time") == 1.5


def test_a_number_that_is_no_float_is_infinite() -> None:
    assert memory_of(10**400, 1) == [float("inf")]
    with pytest.raises(ValueError, match="finite"):
        number_of("seconds", 10**400, "a time")


@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerators_two_stages_on_the_cpu_are_planned_and_said() -> None:
    found = splitpipe.plan(layers(), torch.randn(4, 3), chunks=2, seconds=0)
    assert found.devices == ("cpu", "cpu") and 'devices=["cpu"] * n plans for n.' in str(found)
    alone = splitpipe.plan(nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3), chunks=2, seconds=0)
    assert alone.devices == ("cpu",) and "on 1 device:" in str(alone)


def test_a_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place: Any = Place(torch.device("cuda", 0), object())  # type: ignore[arg-type]
    monkeypatch.setattr("splitpipe.checks.verify_devices", lambda *_: [place])
    with pytest.raises(TypeError, match="expected its device, since the plan is for whole devices"):
        places_of([place], 2)


def test_an_error_advises_nothing_that_a_plan_does_not_take() -> None:
    with pytest.raises(ValueError, match="first dimensions") as caught:
        splitpipe.plan(layers(), (torch.randn(4, 3), torch.randn(3, 3)))
    assert "batched" not in str(caught.value)


@pytest.mark.parametrize("mode", few(1, [
    torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.float16),
]))
def test_in_inference_mode_and_under_autocast_a_plan_is_made(mode: Any) -> None:
    with mode():
        assert planned().chunks == 2


@pytest.mark.thorough
def test_lazy_layers_are_planned() -> None:
    assert sum(planned(nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(3))).balance) == 2


@pytest.mark.thorough
def test_two_threads_that_plan_leave_the_numbers_of_threads_alone() -> None:
    numbers = []

    def note() -> None:
        numbers.append(torch.get_num_threads())

    for target in (note, planned, planned, note):
        threads = [threading.Thread(target=target) for _ in range(1 if target is note else 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert numbers[0] == numbers[1]
