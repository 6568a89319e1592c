"""What orders streams is needed: without it there is an access without an order, or a step takes longer."""
from __future__ import annotations

import sys

import pytest

from tests.devices import cases, makespans, sites
from tests.devices.log import settle

pytestmark = [
    pytest.mark.cuda, pytest.mark.devices(4), pytest.mark.fake, pytest.mark.thorough,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names before Python 3.11"),
]


# What is made again on another stream has the transposes of weights there, which torch says, too.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("place", sites.CAUGHT)
def test_without_a_place_that_orders_streams_there_is_a_hazard(place: str) -> None:
    with sites.watched(place):
        found = any(cases.run(case).hazards for case in sites.few(sites.CAUGHT[place]))
    settle()
    assert found


def test_without_a_place_that_keeps_streams_apart_a_step_takes_longer() -> None:
    before, missed = {way: max(way.taken()) for way in makespans.CHECKED}, []
    for place in sites.SLOWER:
        with sites.watched(place):
            if not any(max(way.taken()) > before[way] for way in makespans.CHECKED):
                missed.append(place)
    settle()
    assert missed == []


def test_every_place_that_orders_streams_is_known() -> None:
    known = {*sites.CAUGHT, *sites.SLOWER, *sites.EXPLAINED}
    # One place is where a single subject comes by in one way only.
    paths = [name for name in cases.PATHS if name not in cases.COMPILED]
    with sites.watched() as counts:
        for case in (*sites.few(*paths), *sites.few("elsewhere")):
            cases.run(case)
    seen = {place for place in counts if place}
    assert (sorted(seen - known), sorted(known - seen - {sites.READS})) == ([], [])
