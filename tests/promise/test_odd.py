"""Calls from odd places: under modes, hooks and profilers of the caller's thread, in a checkpoint, in a layer."""
from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from splitpipe import SplitPipe
from tests.helpers import scheduled, twin
from tests.helpers.covering import graded, pairs
from tests.helpers.deferring import double as double
from tests.helpers.modules import module_of
from tests.helpers.scheduled import inside, loss_of
from tests.helpers.twin import assert_same_tensors, stages
from tests.promise.layers import Apply

pytestmark = pytest.mark.usefixtures("double")


class Halves(TorchFunctionMode):
    """Changes what layers compute."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y / 2 if func is torch.nn.functional.linear else y


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "save_on_cpu": save_on_cpu,
    "function mode": Halves,
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "profiler": profile,
}
AXES: dict[str, list[Any]] = {"around": [*AROUND],
                              "where": ["forward", "step"],
                              "way": [{}, {"backward": "autograd"}, {"schedule": "zb-h1"}, {"schedule": "1f1b"}],
                              "checkpoint": ["never", "always"],
                              "by": ["balance", "cuts"]}


def twins(by: str = "balance", **options: Any) -> tuple[nn.Sequential, SplitPipe, set[str]]:
    """A module, a pipeline of a copy, and the threads that run the pipeline's layers."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    module, where = stages(copy.deepcopy(plain), [3, 3], by)
    model, threads = SplitPipe(module, **where, **inside({"devices": ["cpu"] * 2, "chunks": 3, **options})), set[str]()
    for layer in module.modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda *_: threads.add(threading.current_thread().name))
    return plain, model, threads


@graded(AXES, essence=[["around"]], thorough=pairs([*AXES]),
        # Torch switches function modes off in backward, where drop-in recomputes: docs/limits.md.
        allowed=lambda around, where, way, checkpoint, **_: where == "step" if "schedule" in way else (
            around != "function mode" or checkpoint == "never"))
def test_a_step_is_that_of_the_module(around: str, where: str, way: dict[str, Any], checkpoint: str, by: str) -> None:
    plain, model, threads = twins(by, checkpoint=checkpoint, **way)
    for _ in range(2):
        x, losses = torch.randn(7, 4), []
        for module in (plain, model):
            threads.clear()
            with AROUND[around]():
                loss = loss_of(module, x)
                if where == "step":
                    loss.backward()
            if where == "forward":
                assert module is plain or threads == {threading.current_thread().name}
                loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        assert where == "forward" or threads == {threading.current_thread().name}
        assert_same_tensors(model, plain)


@pytest.mark.parametrize("by", ["balance", "cuts"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_checkpoint_around_the_pipeline(by: str, reentrant: bool, mode: str, schedule: str) -> None:
    plain, model, _ = twins(by, checkpoint=mode, schedule=schedule)
    for _ in range(2):
        x = torch.randn(7, 4)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for module, leaf in zip((plain, model), leaves):
            checkpoint(module, leaf, use_reentrant=reentrant).square().mean().backward()
        torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
        assert_same_tensors(model, plain)


def differentiated(x: Tensor) -> Tensor:
    """The gradient of an energy, as of force fields."""
    with torch.enable_grad():
        found, = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
    return found


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_checkpoint_around_a_model_whose_layer_differentiates_is_right(mode: str) -> None:
    plain, model = twin.twins(nn.Sequential(nn.Linear(4, 4), Apply(differentiated)), checkpoint=mode)
    x = torch.rand(5, 4)
    for either in plain, model:
        checkpoint(either, x, use_reentrant=False).sum().backward()
    assert_same_tensors(model, plain)


def calling(self: Any, x: Tensor) -> Tensor:
    """Calls a model in forward, if it has one."""
    for model in self.model:
        model(x)
    return x * 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("target", [None, torch.zeros(5, 4)])
def test_a_layer_that_calls_its_own_model_is_told_so(name: str, target: Tensor | None) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), module_of(calling, model=[]), nn.Linear(4, 4))
    plain, model = scheduled.twins(layers, name, loss_fn=F.mse_loss)
    x = torch.rand(5, 4)
    model[1].model = [model]
    with pytest.raises(RuntimeError, match="called by one of its layers"):
        model(x, target)
    model[1].model = []
    F.mse_loss(plain(x), torch.zeros(5, 4)).backward()
    model(x, target=torch.zeros(5, 4)).backward()
    assert_same_tensors(model, plain)


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
