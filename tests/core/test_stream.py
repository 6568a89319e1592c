"""A place is copied without its stream; what streams do is in tests/devices and tests/gpu."""
from __future__ import annotations

import copy
import pickle
from typing import Any

import torch

from splitpipe.core import stream


def test_a_copied_place_has_the_device_and_not_the_stream() -> None:
    own: Any = object()
    place = stream.Place(torch.device("cpu"), own, own)
    for again in pickle.loads(pickle.dumps(place)), copy.deepcopy(place):
        assert (again.device, again.stream, again.owner) == (torch.device("cpu"), None, None)
