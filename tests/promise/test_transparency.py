"""The promise: a pipeline gives what its module gives, for all layers, batch sizes, chunks and checkpoint modes,
drop-in, by every schedule and compiled, whether it is cut by balance or by names."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe, schedule
from tests.helpers import scheduled
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.covering import graded, pairs
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import inside
from tests.promise.forwards import CUTS, FORWARDS
from tests.promise.layers import LAYERS, ON_THE_CPU, batched_of

AXES: dict[str, list[Any]] = {"name": [*LAYERS, *ON_THE_CPU],
                              "by": ["balance", "cuts"],
                              "way": [(None,), ("1f1b", 2), ("zb-h1", 2), ("zb-v", 1)],
                              "sizes": [(4, 1), (4, 4), (5, 2), (7, 3), (3, 8), (1, 4)],
                              "checkpoint": ["always", "except_last", "never"],
                              "backward": ["split", "autograd"]}


def assert_promise(name: str, by: str, way: Any, sizes: tuple[int, int], **options: Any) -> None:
    """Trains the layers of that name, drop-in or by a schedule, beside their module."""
    make, value = (LAYERS | ON_THE_CPU)[name]
    size, chunks = sizes
    scheduled.assert_transparent(
        nn.Sequential(*make()), value(size), *way, by=by, chunks=chunks, batched=batched_of(name, by), **options)


@graded(AXES, essence=[["name"], *pairs(["by", "way", "sizes", "checkpoint", "backward"])],
        thorough=[["name", "by"], ["name", "way"], ["name", "sizes"], ["name", "checkpoint", "backward"]])
def test_a_pipeline_is_its_module(name, by, way, sizes, checkpoint, backward):
    assert_promise(name, by, way, sizes, checkpoint=checkpoint, backward=backward)


BY_NAMES: dict[str, list[Any]] = {"name": [*FORWARDS], "way": ["gpipe", "1f1b", "zb-h1"],
                                  "checkpoint": AXES["checkpoint"], "backward": AXES["backward"],
                                  "more": [{"chunks": 3}, {"chunks": 1}, {"chunks": 2, "stash_limit": 0}]}


@graded(BY_NAMES, essence=[["name"], ["way", "checkpoint"]], thorough=[
    ["name", "way", "backward"], ["name", "checkpoint"], ["name", "more"], ["way", "checkpoint", "backward"],
])
def test_a_module_that_is_cut_by_names_is_itself(name, way, checkpoint, backward, more):
    plain = FORWARDS[name]().double()
    options = inside({"schedule": way, "checkpoint": checkpoint, "backward": backward, **more})
    model = SplitPipe(copy.deepcopy(plain), cuts=CUTS, devices=["cpu"] * 3, **options)
    scheduled.assert_steps(plain, model, lambda: torch.randn(6, 4), 2)


#: All but what torch refuses: a second derivative.
COMPILED = {"name": [name for name in AXES["name"][::2] if name != "gradient inside forward"], "by": AXES["by"],
            "way": AXES["way"], "sizes": [(4, 2), (5, 2), (3, 8)], "checkpoint": ["always", "never"]}


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Torch's, which it hides from users.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated")  # The compiler's own.
@graded(COMPILED, essence=[["way"]], thorough=[["name"], *pairs(["by", "way", "sizes", "checkpoint"])])
def test_a_compiled_pipeline_is_its_module(name, by, way, sizes, checkpoint):
    assert_promise(name, by, way, sizes, checkpoint=checkpoint, compile=EAGER)


SCHEDULES: dict[str, list[Any]] = {**{axis: AXES[axis] for axis in ("by", "checkpoint", "backward")},
                                   "name": [*schedule.names()], "devices": [1, 2, 4],
                                   "sizes": [(8, 8), (13, 8), (3, 8), (6, 3), (5, 1)]}


@graded(SCHEDULES, essence=[["name"], ["devices"], ["sizes"]],
        thorough=[*pairs([*SCHEDULES]), ["name", "checkpoint", "backward"]])
def test_every_schedule(by, checkpoint, backward, name, devices, sizes):
    kinds = [lambda: nn.Linear(6, 6), nn.Tanh, lambda: nn.LayerNorm(6)]
    layers = [kinds[k % 3]() for k in range(devices * scheduled.stages_of(name) + 1)]
    size, chunks = sizes
    scheduled.assert_transparent(nn.Sequential(*layers), torch.randn(size, 6), name, devices, by=by, chunks=chunks,
                                 checkpoint=checkpoint, backward=backward, target=torch.randn(size, 6), steps=1)
