"""What orders streams is needed: without it there is an access without an order."""
from __future__ import annotations

import sys

import pytest

from tests.devices import cases, sites
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
        # Which thread is first, chance decides.
        found = any(any(cases.run(sites.CAUGHT[place])) for _ in range(8))
    settle()
    assert found


def test_every_place_that_orders_streams_is_known() -> None:
    assert sites.places() == {*sites.CAUGHT, *sites.EXPLAINED}
