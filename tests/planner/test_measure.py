"""What a plan is based on: what a caller asks for, the costs of layers, the time between ops, and that of copies."""
from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import Plan
from splitpipe.balance.survey import survey
from splitpipe.checks import number_of
from splitpipe.core.stream import Place
from splitpipe.planner import measure
from splitpipe.planner.measure import Profile
from splitpipe.planner.planning import chunks_of, places_of, room_of
from splitpipe.schedule import build
from tests.helpers.covering import few
from tests.promise.layers import Apply

pytestmark = pytest.mark.draws

CPU = Place(torch.device("cpu"))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))


def profiled(module: nn.Module, sample: Any, chunks: Sequence[int] = (2,), rows: int = 1) -> Profile:
    return measure.profile(survey(module, sample), None, None, [CPU] * rows, chunks, compile=False,
                           memory=[math.inf] * rows, optimizer_state=2.0, seconds=0.01)


def test_each_number_of_chunks_has_each_layer() -> None:
    found = profiled(mlp(), torch.randn(8, 64), [1, 4], rows=2)
    assert [*found.layers] == [1, 4] and found.names == ("0", "1", "2") and found.layered
    assert len(found.devices) == 2 and not found.own_compute
    one, four = found.layers[1], found.layers[4]
    assert [layer.input for layer in one] == [4 * layer.input for layer in four]
    assert found.gap > 0 and found.latency >= 0 and found.bandwidth == math.inf


def test_a_stage_on_the_cpu_is_measured_with_its_share_of_the_threads(threads: None) -> None:
    seen: list[int] = []
    torch.set_num_threads(6)
    profiled(nn.Sequential(Apply(lambda x: (seen.append(torch.get_num_threads()), x)[1])), torch.ones(4, 2), rows=3)
    assert set(seen) == {2} and torch.get_num_threads() == 6


def test_chunks_that_a_layer_refuses_are_left_out() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert profiled(module, torch.randn(8, 4), [1, 4, 8]).layers.keys() == {1, 4}


@pytest.mark.thorough
def test_chunks_that_memory_refuses_are_left_out_unless_all_are() -> None:
    most = 4

    def limited(x: torch.Tensor) -> torch.Tensor:
        if len(x) > most:
            raise torch.OutOfMemoryError("full")
        return x

    assert profiled(nn.Sequential(Apply(limited)), torch.randn(8, 4), [1, 2, 4]).layers.keys() == {2, 4}
    most = 0
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        profiled(nn.Sequential(Apply(limited)), torch.randn(8, 4), [1, 2, 4])


def test_layers_that_share_state_are_tied() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert profiled(nn.Sequential(first, nn.Tanh(), second), torch.randn(8, 4)).tied == ((0, 2),)


#: What torch.accelerator, or the module of a kind of devices, tells of a device. Most of what was taken is free again.
TOLD: dict[str, Any] = {"get_device_name": lambda device: "small" if device.index == 2 else "large",
                        "mem_get_info": lambda _: (1000, 2000), "memory_reserved": lambda device: 600,
                        "memory_allocated": lambda device: 100}


def places(*indices: int) -> list[Any]:
    return [Place(torch.device("cuda", index)) for index in indices]


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**TOLD))


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(("indices", "kinds"), [((0, 1), ""), ((1, 2), "large, small"), ((0, None), "cpu, large")])
def test_devices_have_to_be_of_one_kind(indices: tuple[int | None, ...], kinds: str) -> None:
    given = [CPU if index is None else places(index)[0] for index in indices]
    if not kinds:
        assert places_of(given) == given
        return
    with pytest.raises(ValueError, match=rf"devices are of several kinds \({kinds}\): expected devices of one"):
        places_of(given)


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(("memory", "expected"), [(None, [1350, 1350]), ([1, 2], [1, 2]), (9, [9, 9])])
def test_memory_is_what_was_given_or_most_of_what_is_free(memory: Any, expected: list[float]) -> None:
    assert room_of(memory, places(0, 1), mlp()) == expected


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def planned(**options: Any) -> Plan:
    return splitpipe.plan(layers(), torch.randn(4, 3), **{"chunks": 2, "seconds": 0, **options})


@pytest.mark.parametrize(("rows", "asked", "expected"), [
    (5, 4, [3]), (8, 4, [4]), (7, range(1, 8), [1, 2, 3, 4, 7]), (10, None, [2, 4, 5]),
    (8, 2, [2]), (8, (n for n in (2, 4)), [2, 4]),
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
    assert number_of("seconds", numpy.float32(1.5), "a time") == 1.5


@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerators_two_stages_on_the_cpu_are_planned() -> None:
    assert planned().devices == ("cpu", "cpu")
    alone = splitpipe.plan(nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3), chunks=2, seconds=0)
    assert alone.devices == ("cpu",) and "on 1 device:" in str(alone)


def test_a_stream_is_refused() -> None:
    place: Any = Place(torch.device("cuda", 0), object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected whole devices, each once, and no streams"):
        places_of([place])


@pytest.mark.parametrize("mode", few(1, [torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.float16)]))
def test_in_inference_mode_and_under_autocast_a_plan_is_made(mode: Any) -> None:
    with mode():
        x = torch.randn(4, 3)
        assert planned(target=x, loss_fn=nn.functional.mse_loss, devices=["cpu"] * 2, schedules=["1f1b"]).chunks == 2
