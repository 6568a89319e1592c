"""Which schedule a model runs: the one of a name for its stages and devices, or the user's own if it fits."""
from __future__ import annotations

import pytest

from splitpipe import schedule
from splitpipe.checks import resolve_schedule

EACH = {name: schedule.build(name, 1, 1).stages for name in schedule.names()}
NAMES = pytest.mark.parametrize("name", schedule.names())


@NAMES
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_name_is_built_for_stages_devices_and_chunks(name: str, devices: int) -> None:
    found = resolve_schedule(name, devices * EACH[name], devices, 8)
    assert found == schedule.build(name, devices, 8) and found.name == name


@NAMES
def test_without_devices_there_are_as_many_as_the_stages_take(name: str) -> None:
    assert resolve_schedule(name, 4, None, 8).devices == 4 // EACH[name]


def test_interleaved_schedules_take_what_the_balance_has() -> None:
    for stages in (2, 4, 6, 8):
        found = resolve_schedule("interleaved-1f1b", stages, 2, 8)
        assert (found.stages, found.devices) == (stages, 2)


def test_a_schedule_of_the_users_own_is_taken_as_it_is() -> None:
    plan = schedule.build("v-half", 2, 6)
    assert resolve_schedule(plan, 4, 2, 6) is plan and resolve_schedule(plan, 4, None, 6) is plan


@pytest.mark.parametrize(("stages", "devices", "chunks"), [(3, 2, 6), (4, 3, 6), (4, 2, 5)])
def test_one_that_does_not_fit_is_refused(stages: int, devices: int, chunks: int) -> None:
    with pytest.raises(ValueError, match="the schedule does not fit: it has"):
        resolve_schedule(schedule.build("v-half", 2, 6), stages, devices, chunks)


@pytest.mark.parametrize("devices", [0, 3])
def test_devices_that_do_not_go_with_the_stages_are_refused(devices: int) -> None:
    with pytest.raises(ValueError, match=f"balance has 4 stages for {devices} device"):
        resolve_schedule("zb-v", 4, devices, 8)
