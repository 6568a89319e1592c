"""The promise: a pipeline gives what its module gives, for all layers, batch sizes, chunks and checkpoint modes,
drop-in, by every schedule and compiled, whether it is cut by balance or by names."""
from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from splitpipe import schedule
from splitpipe.compiled.layers import Code
from tests.helpers import scheduled
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import codes as codes
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.covering import graded, pairs, pairwise
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same, assert_same_tensors, assert_transparent, twins
from tests.promise.layers import LAYERS, ON_THE_CPU, batched_of

AXES: dict[str, list[Any]] = {
    "name": [*LAYERS, *ON_THE_CPU],
    "by": ["balance", "cuts"],
    "way": ["drop-in", ("1f1b", 2), ("zb-h1", 2), ("zb-v", 1)],
    "sizes": [(4, 1), (4, 4), (5, 2), (7, 3), (3, 8), (1, 4)],
    "checkpoint": ["always", "except_last", "never"],
    "backward": ["split", "autograd"],
}


def possible(name: str, way: Any, **_: Any) -> bool:
    """With a schedule, reentrant checkpoints are refused."""
    return way == "drop-in" or not name.endswith("reentrant")


def assert_promise(name: str, by: str, way: Any, sizes: tuple[int, int], **options: Any) -> None:
    """Trains the layers of that name, drop-in or by a schedule, beside their module."""
    make, value = (LAYERS | ON_THE_CPU)[name]
    size, chunks = sizes
    compare = assert_transparent if way == "drop-in" else partial(scheduled.assert_transparent, name=way[0],
                                                                  devices=way[1])
    compare(nn.Sequential(*make()), value(size), by=by, chunks=chunks, batched=batched_of(name, by), **options)


@graded(
    AXES, essence=[["name"], *pairs(["by", "way", "sizes", "checkpoint", "backward"])],
    thorough=[["name", "by"], ["name", "way"], ["name", "sizes"], ["name", "checkpoint", "backward"]],
    allowed=possible,
)
def test_a_pipeline_is_its_module(
    name: str, by: str, way: Any, sizes: tuple[int, int], checkpoint: str, backward: str
) -> None:
    assert_promise(name, by, way, sizes, checkpoint=checkpoint, backward=backward)


COMPILED = {**AXES, "name": AXES["name"][::2], "sizes": [(4, 2), (5, 2), (3, 8)], "checkpoint": ["always", "never"]}
del COMPILED["backward"]
#: What torch does not compile as one graph, and so runs as it is.
WHOLE = {"lstm", "gru", "time first", "gradient inside forward"}


@pytest.mark.usefixtures("nothing_compiled")
@graded(
    COMPILED, essence=[["way"]], thorough=[["name"], *pairs(["by", "way", "sizes", "checkpoint"])], allowed=possible
)
def test_a_compiled_pipeline_is_its_module(
    name: str, by: str, way: Any, sizes: tuple[int, int], checkpoint: str, codes: list[Code]
) -> None:
    assert_promise(name, by, way, sizes, checkpoint=checkpoint, compile=EAGER)
    assert [code.why for code in codes if code.why] == [] or name in WHOLE


SCHEDULES: dict[str, list[Any]] = {
    **{axis: AXES[axis] for axis in ("by", "checkpoint", "backward")},
    "name": [*schedule.names()], "devices": [1, 2, 4], "sizes": [(8, 8), (13, 8), (3, 8), (6, 3), (5, 1)],
}


@graded(
    SCHEDULES, essence=[["name"], ["devices"], ["sizes"]],
    thorough=[*pairs([*SCHEDULES]), ["name", "checkpoint", "backward"]],
)
def test_every_schedule(
    by: str, checkpoint: str, backward: str, name: str, devices: int, sizes: tuple[int, int]
) -> None:
    kinds = [lambda: nn.Linear(6, 6), nn.Tanh, lambda: nn.LayerNorm(6)]
    layers = [kinds[k % 3]() for k in range(devices * scheduled.stages_of(name) + 1)]
    size, chunks = sizes
    scheduled.assert_transparent(
        nn.Sequential(*layers), torch.randn(size, 6), name, devices, by=by, chunks=chunks,
        checkpoint=checkpoint, backward=backward, target=torch.randn(size, 6), steps=1,
    )


@pairwise(balance=[[4], [1, 3], [1, 1, 1, 1]], **{axis: AXES[axis] for axis in ("by", "checkpoint", "backward")})
def test_any_number_of_stages(by: str, balance: list[int], checkpoint: str, backward: str) -> None:
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6)]
    assert_transparent(nn.Sequential(*layers), torch.randn(6, 6), balance, by=by, chunks=3, checkpoint=checkpoint,
                       backward=backward)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_eval_and_no_grad(by: str, training: bool, grad: bool) -> None:
    plain, model = twins(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Linear(6, 2)), by=by)
    for module in (plain, model):
        module.train(training)
    model[1].eval()
    plain[1].eval()
    x = torch.randn(5, 6)
    with torch.set_grad_enabled(grad):
        y, expected = model(x), plain(x)
    assert_same(y, expected, "output")
    assert y.requires_grad == expected.requires_grad


@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_microbatches_normalised_apart_are_microbatches_run_one_after_the_other(by: str) -> None:
    """Without deferral BatchNorm sees microbatches: the pipeline equals a loop over them, in buffers too."""
    for checkpoint in ("always", "except_last", "never"):
        plain, model = twins(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
            by=by, chunks=3, checkpoint=checkpoint)
        x = torch.randn(8, 3, 5, 5)
        for _ in range(3):
            y = model(x)
            expected = torch.cat([plain(part) for part in x.chunk(3)])
            assert_same(y, expected, "output")
            y.square().mean().backward()
            expected.square().mean().backward()
            assert_same_tensors(model, plain)
