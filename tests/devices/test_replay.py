"""Virtual time: streams keep order, an engine does one launch at a time, waits hold. No device is needed for that."""
from __future__ import annotations

from typing import Any, Literal

import pytest

from tests.devices.log import Launch
from tests.devices.replay import Replayed, replay


def launch(
    kind: Literal["op", "copy", "record", "wait"], stream: int, device: int = 0, priority: int = 0, event: int = 0,
    name: str = "-",
) -> Launch:
    return Launch(kind, device, stream, priority, event, 1.0, 1, name)


def replayed(*launches: Launch, **costs: Any) -> Replayed:
    """With ops and copies that take one unit, but for the names given."""
    return replay(launches, lambda launch: costs.get(launch.name, 1.0))


def starts(found: Replayed) -> dict[str, float]:
    return {span.name: span.start for span in found.spans}


def test_a_stream_does_one_thing_after_the_other() -> None:
    found = replayed(launch("op", 0, name="a"), launch("copy", 0, name="b"), launch("op", 0, name="c"))
    assert starts(found) == {"a": 0, "b": 1, "c": 2}
    assert found.makespan == 3


def test_streams_of_a_device_share_what_computes() -> None:
    assert replayed(launch("op", 0), launch("op", 1)).makespan == 2


def test_devices_compute_side_by_side() -> None:
    found = replayed(launch("op", 0), launch("op", 0, device=1), launch("op", 0, device=1))
    assert found.makespan == 2
    assert (found.busy(0), found.busy(1)) == (1, 2)


def test_a_copy_and_an_op_of_two_streams_run_side_by_side() -> None:
    found = replayed(launch("copy", 1), launch("op", 0))
    assert found.makespan == 1
    assert found.busy(0, "copy") == found.busy(0, "compute") == 1


def test_what_waits_first_is_what_the_host_launched_first() -> None:
    found = replayed(launch("op", 0, name="a"), launch("op", 2, name="b"), launch("op", 1, name="c"))
    assert starts(found) == {"a": 0, "b": 1, "c": 2}


def test_a_lower_priority_number_comes_first() -> None:
    found = replayed(launch("op", 0, name="a"), launch("op", 1, priority=-1, name="b"))
    assert starts(found) == {"b": 0, "a": 1}


def test_what_has_begun_is_not_interrupted() -> None:
    found = replayed(
        launch("op", 0, name="long"), launch("op", 0, device=1), launch("record", 0, device=1, event=1),
        launch("wait", 1, event=1), launch("op", 1, priority=-1, name="urgent"), long=3.0,
    )
    assert starts(found)["urgent"] == 3


def test_a_stream_waits_for_an_event_and_not_for_what_comes_behind_it() -> None:
    found = replayed(
        launch("wait", 0, event=1), launch("op", 0, name="late"),
        launch("op", 0, device=1), launch("record", 0, device=1, event=1), launch("op", 0, device=1),
    )
    assert starts(found)["late"] == 1


def test_an_event_from_before_the_log_is_over() -> None:
    assert replayed(launch("wait", 0, event=1), launch("op", 0)).makespan == 1


def test_ops_that_take_no_time_need_no_engine() -> None:
    found = replayed(launch("op", 0, name="long"), launch("op", 1, name="free"), launch("copy", 1, name="c"),
                     long=3.0, free=0.0)
    assert starts(found) == {"long": 0, "c": 0}


def test_a_log_of_nothing_takes_no_time() -> None:
    assert replayed().makespan == 0


def test_streams_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="wait for ever"):
        replayed(
            launch("wait", 0, event=1), launch("record", 0, event=2),
            launch("wait", 1, event=2), launch("record", 1, event=1),
        )
