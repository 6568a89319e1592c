"""Virtual time: streams keep order, an engine does one launch at a time, waits hold. No device is needed for that."""
from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.devices.log import Kind, Launch
from tests.devices.replay import Replayed, replay


def launch(kind: Kind, name: str = "-", stream: int = 0, device: int = 0, priority: int = 0, event: int = 0) -> Launch:
    return Launch(kind, device, stream, priority, event, 1.0, 1, name)


op, copy, record, wait = (partial(launch, kind) for kind in ("op", "copy", "record", "wait"))


def replayed(*launches: Launch) -> Replayed:
    """With ops and copies that take one unit, but for those named long, three, and free, none."""
    costs = {"long": 3.0, "free": 0.0}
    return replay(launches, lambda launch: costs.get(launch.name, 1.0))


@pytest.mark.parametrize(("launches", "starts"), [
    pytest.param([op("a"), copy("b"), op("c")], {"a": 0, "b": 1, "c": 2}, id="a stream keeps its order"),
    pytest.param([op("a"), op("b", 1)], {"a": 0, "b": 1}, id="streams of a device share what computes"),
    pytest.param([op("a"), op("b", device=1), op("c", device=1)], {"a": 0, "b": 0, "c": 1}, id="devices do not"),
    pytest.param([copy("a", 1), op("b")], {"a": 0, "b": 0}, id="a copy and an op run side by side"),
    pytest.param([op("a"), op("b", 2), op("c", 1)], {"a": 0, "b": 1, "c": 2}, id="first launched, first run"),
    pytest.param([op("a"), op("b", 1, priority=-1)], {"b": 0, "a": 1}, id="a lower priority number comes first"),
    pytest.param(
        [op("long"), op("a", device=1), record(event=1, device=1), wait(event=1, stream=1),
         op("urgent", 1, priority=-1)],
        {"long": 0, "a": 0, "urgent": 3}, id="what has begun is not interrupted",
    ),
    pytest.param(
        [wait(event=1), op("late"), op("a", device=1), record(event=1, device=1), op("b", device=1)],
        {"a": 0, "late": 1, "b": 1}, id="an event does not wait for what comes behind it",
    ),
    pytest.param([wait(event=1), op("a")], {"a": 0}, id="an event from before the log is over"),
    pytest.param([op("long"), op("free", 1), copy("c", 1)], {"long": 0, "c": 0}, id="no time needs no engine"),
    pytest.param([], {}, id="nothing"),
])
def test_when_launches_start(launches: list[Launch], starts: dict[str, float]) -> None:
    assert {span.name: span.start for span in replayed(*launches).spans} == starts


def test_an_engine_is_busy_while_it_has_work() -> None:
    found: Any = replayed(copy("a", 1), op("b"), op("c", device=1), op("d", device=1))
    assert [found.busy(0, "copy"), found.busy(0), found.busy(1)] == [1, 1, 2]


def test_streams_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="wait for ever"):
        replayed(wait(event=1), record(event=2), wait(event=2, stream=1), record(event=1, stream=1))
