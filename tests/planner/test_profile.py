"""A profile that can't be is refused when it is made."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from splitpipe.planner.profile import Device, Kind, Layer, Link, Profile

LAYER = Layer(1.0, 1.0, 1.0)
KIND = Kind("cpu", {1: (LAYER,)})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Layer(-1.0, 1.0, 1.0), "forward=-1.0"),
        (lambda: Layer(1.0, math.nan, 1.0), "backward_input=nan"),
        (lambda: Kind("cpu", {1: (LAYER,), 2: ()}), r"cpu: found \[0, 1\] layers"),
        (lambda: Link(latency=-1.0), "a latency that is not negative"),
        (lambda: Link(bandwidth=0.0), "a positive bandwidth"),
        (lambda: Profile(("a", "b"), (1,), (1,), (KIND,), (Device("cpu", 0),)), r"found \[1, 2\] layers"),
        (lambda: Profile(("a",), (1,), (1,), (KIND,), (Device("cpu", 1),)), r"devices \['cpu'\] of no kind"),
        (lambda: Profile(("a",), (1,), (1,), (KIND,), ()), "of no kind"),
    ],
)
def test_what_can_not_be_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
