"""torch.profiler sees the ops of all stages, in the threads that they run in."""
from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.profiler import ProfilerActivity, profile, record_function

from splitpipe import SplitPipe
from splitpipe.core.torch_private import _profiler_enabled
from tests.helpers.scheduled import inside, loss_of
from tests.helpers.twin import stages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit says so")
CHUNKS = 4


class Named(nn.Module):
    """A layer that has a name in profiles."""

    def forward(self, x: Tensor) -> Tensor:
        with record_function("mine"):
            return x.tanh()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Named(), nn.Linear(8, 4))


def wrapped(cuts: bool, schedule: str, **options: Any) -> SplitPipe:
    more = inside({"devices": ["cpu", "cpu"], "chunks": CHUNKS, "checkpoint": "never", "schedule": schedule} | options)
    module, where = stages(layers(), [2, 1], "cuts" if cuts else "balance")
    return SplitPipe(module, **where, **more)


def stepper(model: SplitPipe) -> Callable[[], None]:
    x = torch.randn(8, 8)
    return lambda: loss_of(model, x).backward()


def found(step: Callable[[], None], **options: Any) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        step()
    return Counter({event.key: event.count for event in seen.key_averages()})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("cuts", [False, True])
def test_a_profile_has_each_op_and_name_once_a_microbatch(cuts: bool, schedule: str) -> None:
    step = stepper(wrapped(cuts, schedule))
    step()
    for _ in range(2):
        seen = found(step)
        assert (seen["aten::addmm"], seen["mine"], seen["aten::tanh_backward"]) == (2 * CHUNKS, CHUNKS, CHUNKS)


@pytest.mark.parametrize("cuts", [False, True])
def test_the_first_call_and_one_without_grad_mode_are_profiled(cuts: bool) -> None:
    model = wrapped(cuts, "gpipe")
    with torch.no_grad():
        first, second = (found(lambda: model(torch.randn(8, 8)))["mine"] for _ in range(2))
    assert first >= second == CHUNKS  # The first call with cuts also runs on fewer rows, to know outputs.


@pytest.mark.parametrize("cuts", [False, True])
def test_a_recomputation_is_profiled_where_it_runs(cuts: bool) -> None:
    model = wrapped(cuts, "gpipe", checkpoint="always")
    stepper(model)()
    output = model(torch.randn(8, 8))
    assert found(output.sum().backward)["mine"] == CHUNKS
    outputs: list[Tensor] = []
    assert found(lambda: outputs.append(model(torch.randn(8, 8))))["mine"] == CHUNKS
    with profile(activities=[ProfilerActivity.CPU]) as other:
        thread = threading.Thread(target=outputs.pop().sum().backward)
        thread.start()
        thread.join()
    assert not [event for event in other.key_averages() if event.key == "mine"]  # Another thread's backward.


@pytest.mark.parametrize("cuts", [False, True])
def test_ops_that_hooks_see_one_at_a_time_are_profiled(cuts: bool) -> None:
    model = wrapped(cuts, "gpipe")

    def step() -> None:
        with save_on_cpu():
            model(torch.randn(8, 8)).sum().backward()

    step()
    assert found(step)["mine"] == CHUNKS


@pytest.mark.thorough
@pytest.mark.parametrize("options", [
    pytest.param({"with_stack": True}, marks=pytest.mark.compiles),  # Not code that is measured: its calls don't end.
    {"profile_memory": True, "record_shapes": True, "with_flops": True},
])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_all_that_a_profile_can_have_is_there(schedule: str, options: dict[str, bool]) -> None:
    model = wrapped(False, schedule)
    step = stepper(model)
    step()
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        step()
    ops = [event for event in seen.events() if event.name == "aten::addmm"]
    assert len(ops) == 2 * CHUNKS and len({event.thread for event in ops}) == 2
    assert not options.get("record_shapes") or all(event.input_shapes[1] == [2, 8] and event.flops for event in ops)
    assert not options.get("profile_memory") or any(event.cpu_memory_usage > 0 for event in ops)


@pytest.mark.thorough
def test_a_profile_of_some_steps_has_those() -> None:
    counts: list[int] = []

    def ready(seen: profile) -> None:
        counts.append(sum(event.count for event in seen.key_averages() if event.key == "mine"))

    when = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    step = stepper(wrapped(True, "1f1b"))
    with profile(activities=[ProfilerActivity.CPU], schedule=when, on_trace_ready=ready) as seen:
        for _ in range(4):
            step()
            seen.step()
    assert counts == [2 * CHUNKS]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("cuts", [False, True])
def test_a_profile_ends_with_its_block_in_every_thread_and_changes_no_result(cuts: bool, schedule: str) -> None:
    inside: list[bool] = []
    model = wrapped(cuts, schedule)
    next(each for each in model.modules() if isinstance(each, Named)).register_forward_hook(
        lambda *_: inside.append(_profiler_enabled())
    )
    step, gradients = stepper(model), []
    step()  # The first one shows whether anything keeps what the hook is given, and sums in another order.
    inside.clear()
    for around in (nullcontext(), profile(activities=[ProfilerActivity.CPU]), nullcontext()):
        model.zero_grad()
        with around:
            step()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert inside == [False] * CHUNKS + [True] * CHUNKS + [False] * CHUNKS
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("cuts", [False, True])
def test_a_thread_in_which_a_layer_fails_is_profiled_no_longer(cuts: bool, schedule: str) -> None:
    model = wrapped(cuts, schedule)
    step = stepper(model)
    step()
    inside: list[bool] = []
    named = next(each for each in model.modules() if isinstance(each, Named))

    def hook(*_: object) -> None:
        inside.append(_profiler_enabled())
        if inside[-1]:
            raise ZeroDivisionError

    named.register_forward_hook(hook)
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(ZeroDivisionError):
        step()
    step()
    assert True in inside and inside[-CHUNKS:] == [False] * CHUNKS


def test_a_pipeline_inside_a_layer_is_profiled() -> None:
    inner = wrapped(False, "gpipe")
    model = SplitPipe(nn.Sequential(nn.Linear(8, 8), inner), [1, 1], devices=["cpu", "cpu"], chunks=2)
    with torch.no_grad():
        assert found(lambda: model(torch.randn(8, 8)))["mine"] == 2 * CHUNKS


def test_a_torch_without_the_names_runs_unprofiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitpipe.core.thread_state.profiler_state", None)
    step = stepper(wrapped(False, "1f1b"))
    step()
    assert found(step)["mine"] == 0
