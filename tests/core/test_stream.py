"""The verbs of streams do nothing on the CPU; what they do on devices is in tests/devices and tests/gpu."""
from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from splitpipe.core import stream

CPU = torch.device("cpu")


def test_the_cpu_has_no_stream_and_every_verb_is_a_no_op_there() -> None:
    assert stream.current(CPU) is None and stream.new(CPU) is None
    x = torch.ones(2)
    stream.wait(None, None)
    stream.hold(x, None)
    with pytest.raises(KeyboardInterrupt), stream.use(), stream.use(None), stream.use(None, None):
        raise KeyboardInterrupt


def test_a_copied_place_has_the_device_and_not_the_stream() -> None:
    own: Any = object()
    place = stream.Place(CPU, own, own)
    for again in pickle.loads(pickle.dumps(place)), copy.deepcopy(place):
        assert (again.device, again.stream, again.given) == (CPU, None, None)
