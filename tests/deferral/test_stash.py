"""What is stashed: when each half of a backward runs, and what is alive until then."""
from __future__ import annotations

import _thread
import copy
import gc
import weakref
from collections import deque
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitFunction, SplitPipe, is_recomputing
from splitpipe.deferral import stash
from tests.helpers.twin import Failing, Note
from tests.promise.layers import Apply

CHECKPOINT = pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
LIMIT = pytest.mark.parametrize("stash_limit", [None, 0, 500])
#: As many bytes as there are.
ALL = 2**30


class Buffer(bytearray):
    """Memory whose end can be seen."""


def seen(like: Tensor, watched: list[weakref.ref[Buffer]]) -> Tensor:
    """Zeros in memory of their own, watched from now on."""
    buffer = Buffer(like.nbytes)
    watched.append(weakref.ref(buffer))
    return torch.frombuffer(buffer, dtype=like.dtype).view_as(like)


class Gradient(torch.autograd.Function):
    """The tensor; its gradient goes on in memory that is watched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watched: list[weakref.ref[Buffer]]) -> Tensor:
        ctx.watched = watched
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return seen(grad, ctx.watched), None


class Logged(SplitFunction):
    """x * weight; says when each half of its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        ctx.log, ctx.name = options["log"], options["name"]
        ctx.only_input = options.get("only_input", [])
        ctx.save_for_input(weights[0], seen(x, ctx.only_input))
        ctx.save_for_weight(x, None)
        return x * weights[0]

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        ctx.log.append(("B", ctx.name))
        return grad_output * ctx.saved_for_input[0]

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor]:
        ctx.log.append(("W", ctx.name))
        return ((grad_output * ctx.saved_for_weight[0]).sum(0),)


class Scale(nn.Module):
    def __init__(self, width: int, name: str, log: list[Any], **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))
        self.options = {"name": name, "log": log, **options}

    def forward(self, x: Tensor) -> Tensor:
        return Logged.apply(x, self.weight, **self.options)

    def __deepcopy__(self, memo: Any) -> Scale:
        other = Scale(len(self.weight), **self.options)
        other.weight = copy.deepcopy(self.weight, memo)
        return other


def logged(log: list[Any], stages: int = 2, depth: int = 2, **options: Any) -> SplitPipe:
    layers = [Scale(4, f"{stage}.{layer}", log) for stage in range(stages) for layer in range(depth)]
    return SplitPipe(nn.Sequential(*layers), [depth] * stages, devices=["cpu"] * stages, **options)


def test_every_b_of_a_stage_comes_before_its_first_w() -> None:
    log: list[Any] = []
    model = logged(log, chunks=4, checkpoint="never", stash_limit=ALL)
    for _ in range(2):
        log.clear()
        model(torch.randn(8, 4, requires_grad=True)).sum().backward()
        assert sorted(log) == sorted([(kind, f"{s}.{k}") for kind in "BW" for s in "01" for k in "01"] * 4)
        for stage in "01":
            kinds = [kind for kind, name in log if name.startswith(stage)]
            assert kinds == ["B"] * 8 + ["W"] * 8


@pytest.mark.parametrize("before", [0, 1, 2])
def test_b_of_a_threads_first_node_comes_before_w(before: int) -> None:
    """It has the lowest number of all, and would share it with Flush."""
    log: list[Any] = []
    noted = [Apply(lambda x: Note.apply(x, log, ("B", "0.0"))) for _ in range(before)]  # Its node has no rule.
    stage = [*noted, Scale(4, "0.1", log)]
    options = {"chunks": 4, "checkpoint": "never", "stash_limit": ALL}
    model = SplitPipe(nn.Sequential(*stage), [len(stage)], devices=["cpu"], **options)
    model(torch.randn(8, 4, requires_grad=True)).sum().backward()
    assert [kind for kind, _ in log] == ["B"] * 4 * (before + 1) + ["W"] * 4


def test_a_checkpointed_microbatch_holds_nothing_back(nothing_small: None) -> None:
    log: list[Any] = []
    logged(log, chunks=3, checkpoint="always")(torch.randn(6, 4, requires_grad=True)).sum().backward()
    assert len(log) == 24
    for before, after in zip(log[::2], log[1::2]):
        assert (before[0], after[0]) == ("B", "W")
        assert before[1] == after[1]


@pytest.mark.parametrize("little", [0, 2**22])
def test_w_that_takes_much_memory_comes_before_recomputations(little: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stash, "_LITTLE", little)
    log: list[Any] = []
    model = logged(log, stages=1, chunks=3, checkpoint="except_last", stash_limit=ALL)
    model[0].register_forward_hook(lambda *_: log.append(("F", "0.0")) if is_recomputing() else None)
    for _ in range(2):  # The first step shows what the stage is like.
        log.clear()
        model(torch.randn(6, 4, requires_grad=True)).sum().backward()
    late, early = [*["F", "B", "B"] * 2, *["W"] * 6], ["W", "W", *["F", "B", "B", "W", "W"] * 2]
    assert [kind for kind, _ in log] == ["B", "B", *(late if little else early)]


def test_at_the_limit_the_heaviest_weights_are_computed_early() -> None:
    log: list[Any] = []
    rows = 2 * 4 * 4  # Bytes of a microbatch's input, and of its output gradient.
    model = logged(log, stages=1, depth=1, chunks=4, checkpoint="never", stash_limit=2 * 2 * rows)
    model(torch.randn(8, 4, requires_grad=True)).sum().backward()
    assert [kind for kind, _ in log] == ["B", "B", "B", "W", "W", "W", "B", "W"]


@pytest.mark.parametrize("options", [
    {"chunks": 2, "checkpoint": "never", "stash_limit": 0},
    {"stages": 1, "chunks": 4, "schedule": "1f1b", "loss_fn": nn.functional.mse_loss},
])
def test_w_follows_b_where_nothing_is_deferred(options: dict[str, Any]) -> None:
    """By a limit, or a schedule of B and W in one."""
    log: list[Any] = []
    x = torch.randn(4, 4, requires_grad=True)
    model = logged(log, **options)
    (model(x, target=torch.randn(4, 4)) if "schedule" in options else model(x).sum()).backward()
    assert [kind for kind, _ in log] == ["B", "W"] * 8


@pytest.fixture
def nothing_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held back is counted from the first byte on."""
    monkeypatch.setattr(stash, "_SMALL", 0)
    monkeypatch.setattr(stash, "_LITTLE", 0)


def test_gradients_are_handed_over_before_earlier_stages_run(nothing_small: None) -> None:
    log: list[Any] = []
    model = logged(log, chunks=2, checkpoint="never")
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(("handed over", name)))
    model(torch.randn(4, 4, requires_grad=True)).sum().backward()
    found = [name for kind, name in log if kind != "W"]
    assert found[:6] == ["1.1", "1.0", "0.1", "0.0", "1.1", "1.0"]
    assert sorted(found[6:8]) == ["2.weight", "3.weight"]
    assert found[8:10] == ["0.1", "0.0"] and sorted(found[10:]) == ["0.weight", "1.weight"]


@CHECKPOINT
def test_nothing_is_alive_after_backward_though_the_loss_is(checkpoint: str) -> None:
    watched: list[weakref.ref[Buffer]] = []
    gc.disable()
    try:
        model = SplitPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=["cpu"] * 2, chunks=2,
                          checkpoint=checkpoint)

        def hidden(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output + seen(output, watched)

        def given(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            return (args[0] + seen(args[0], watched).add_(args[0]),)

        model[0].register_forward_hook(hidden)
        model[1].register_forward_pre_hook(given)
        loss = model(torch.randn(4, 4, requires_grad=True)).sum()
        loss.backward()
        assert watched
        assert not [reference for reference in watched if reference() is not None]
    finally:
        gc.enable()


@CHECKPOINT
@LIMIT
def test_no_w_runs_of_weights_that_are_not_asked_for(checkpoint: str, stash_limit: Any) -> None:
    log: list[Any] = []
    model = logged(log, chunks=3, checkpoint=checkpoint, stash_limit=stash_limit)
    x = torch.randn(6, 4, requires_grad=True)
    loss = model(x).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    assert [kind for kind, _ in log] == ["B"] * 12
    log.clear()
    torch.autograd.grad(loss, model[1].weight)
    assert [name for kind, name in log if kind == "W"] == ["0.1"] * 3


def test_pending_gradients_of_a_failed_backward_are_freed() -> None:
    failures: list[BaseException] = []
    log: list[Any] = []
    watched: list[weakref.ref[Buffer]] = []
    gc.disable()
    try:
        model = SplitPipe(nn.Sequential(Failing(failures), Scale(4, "", log)), [1, 1], devices=["cpu"] * 2, chunks=1,
                          checkpoint="never")
        loss = Gradient.apply(model(torch.randn(4, 4, requires_grad=True)), watched).sum()
        failures.append(ValueError())
        with pytest.raises(ValueError):
            loss.backward(retain_graph=True)
        assert len(watched) == 1
        assert watched[0]() is None
    finally:
        gc.enable()


class Overwriting(torch.autograd.Function):
    """Twice x; backward leaves its input, which is another layer's saved output, overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: bool) -> Tensor:
        ctx.x, ctx.gradient = x, gradient
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (grad if ctx.gradient else ctx.x).zero_()
        return grad, None


class Residual(nn.Module):
    def __init__(self, gradient: bool) -> None:
        super().__init__()
        self.gradient = gradient
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        return Overwriting.apply(x, self.gradient) + nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("options", [
    {"checkpoint": "never"}, {"schedule": "zb-h1", "loss_fn": nn.functional.mse_loss},
], ids=["drop-in", "zb-h1"])
def test_overwriting_a_pending_gradient_is_an_error(options: dict[str, Any], gradient: bool) -> None:
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4), Residual(gradient)), [1, 1], devices=["cpu"] * 2, chunks=2,
                      **options)
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified in place during backward.*backward='autograd'") as caught:
        (model(x, target=torch.randn(4, 4)) if "schedule" in options else model(x).sum()).backward()
    assert "in the weight gradient of 1.weight" in caught.value.__notes__


def test_an_interrupt_at_the_end_of_a_backward_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine lets go of a stash in whatever thread it ends in. Where Python's code ran for that, a signal that is
    # pending in the main thread would be raised in there, and be lost: Python ignores what a finalizer raises.
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(stash, "queue_callback", ends.append)
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], devices=["cpu"] * 2, chunks=2,
                      checkpoint="never")
    model(torch.ones(4, 4)).sum().backward()
    found = [weakref.ref(end.__self__) for end in ends]  # type: ignore[attr-defined]
    for end in ends:
        end()
    del end
    with pytest.raises(KeyboardInterrupt):
        # No line of Python's in between.
        deque(map(methodcaller("__call__"), [_thread.interrupt_main, ends.clear]), maxlen=0)
    assert len(found) == 2 and not any(ref() for ref in found)
