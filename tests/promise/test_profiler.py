"""torch.profiler sees the ops of all stages, which run in the thread that it watches."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from splitpipe import SplitPipe
from tests.helpers.scheduled import inside, loss_of
from tests.helpers.twin import stages
from tests.promise.layers import Apply

CHUNKS = 4



def named(x: Tensor) -> Tensor:
    """A layer that has a name in profiles."""
    with record_function("mine"):
        return x.tanh()


def piped(by: str, **options: Any) -> SplitPipe:
    module, where = stages(nn.Sequential(nn.Linear(8, 8), Apply(named), nn.Linear(8, 4)), [2, 1], by)
    return SplitPipe(module, devices=["cpu", "cpu"], chunks=CHUNKS, **where, **inside(options))


def profiled(step: Callable[[], object], **options: Any) -> Any:
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        step()
    return seen


def counts(step: Callable[[], object]) -> list[int]:
    """How often a profile of a step has a layer, a name, and a node of the backward."""
    found = Counter({event.key: event.count for event in profiled(step).key_averages()})
    return [found[name] for name in ("aten::addmm", "mine", "aten::tanh_backward")]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_a_profile_has_each_op_and_name_once_a_microbatch_and_changes_no_result(by: str, schedule: str) -> None:
    model, x, found = piped(by, schedule=schedule, checkpoint="never"), torch.randn(8, 8), []
    with torch.no_grad():
        assert counts(lambda: model(x)) == [2 * CHUNKS, CHUNKS, 0]
    for profiling in (False, True, True, False):
        model.zero_grad()
        if profiling:
            assert counts(lambda: loss_of(model, x).backward()) == [2 * CHUNKS, CHUNKS, CHUNKS]
        else:
            loss_of(model, x).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
