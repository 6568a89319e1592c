"""Whatever goes wrong in a pass is raised in the caller, noted; the module is as it was, and the next step works."""
from __future__ import annotations

import contextvars
import copy
import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, is_recomputing
from splitpipe.core import thread_state
from splitpipe.core.mailbox import Exchange
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Outcome, Pool
from splitpipe.deferral.function import SplitFunction
from splitpipe.training.executor import Execution, OpRun
from tests.helpers.covering import graded, pairs
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import flat, mlp, twins
from tests.helpers.twin import assert_same_tensors


class Special(BaseException):
    pass


NAMES = pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "gpipe"])
STAGES = 4


class Fault:
    """Raises an exception, once, at the second call of one kind on one stage."""

    def __init__(self) -> None:
        self.at: tuple[str, int] | None = None
        self.error: BaseException = ValueError()
        self.calls = 0

    def arm(self, kind: str, stage: int, error: BaseException) -> None:
        self.at, self.error, self.calls = (kind, stage), error, 0

    def check(self, kind: str, stage: int) -> None:
        if self.at == (kind, stage):
            self.calls += 1
            if self.calls == 2:
                self.at = None
                raise self.error

    def __deepcopy__(self, memo: object) -> Fault:
        return Fault()


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault, stage: int) -> Tensor:
        ctx.fault, ctx.stage = fault, stage
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.fault.check("function", ctx.stage)
        return grad, None, None


class Scale(SplitFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Any, **options: Any) -> Tensor:
        ctx.fault, ctx.stage = options["fault"], options["stage"]
        ctx.save_for_input(*weights)
        ctx.save_for_weight(x)
        return x * weights[0]

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor:
        ctx.fault.check("input", ctx.stage)
        return grad_output * ctx.saved_for_input[0]

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor]:
        ctx.fault.check("weight", ctx.stage)
        return ((grad_output * ctx.saved_for_weight[0]).sum(0),)


class Fragile(nn.Module):
    def __init__(self, fault: Fault, stage: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))
        self.fault, self.stage = fault, stage

    def forward(self, x: Tensor) -> Tensor:
        self.fault.check("recomputation" if is_recomputing() else "forward", self.stage)
        x = Plain.apply(self.layer(x), self.fault, self.stage)
        y: Tensor = Scale.apply(x, self.weight, fault=self.fault, stage=self.stage)
        return y


def fragile(name: str, **options: Any) -> tuple[nn.Sequential, SplitPipe, Fault]:
    fault = Fault()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        fault.check("loss", STAGES - 1)
        return F.mse_loss(output, target)

    layers = nn.Sequential(*[Fragile(fault, stage) for stage in range(STAGES)])
    plain, model = twins(layers, name, 2 if name == "zb-v" else STAGES, loss_fn=loss_fn, chunks=3,
                         **{"checkpoint": "never", **options})
    return plain, model, fault


@contextmanager
def survives(plain: nn.Sequential, model: SplitPipe) -> Iterator[None]:
    """The block, in which a pass fails: parameters, gradients and threads are as before, and the model trains on."""
    x, y = torch.randn(7, 4, requires_grad=True), torch.randn(7, 4)
    for loss in (model(x, target=y), F.mse_loss(plain(x), y)):
        loss.backward()
    threads = set(threading.enumerate())
    parameters = {(layer, name): held for layer in model.modules() for name, held in layer._parameters.items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    yield
    for (layer, name), held in parameters.items():
        assert layer._parameters[name] is held, f"{name} of {layer} was not given back"
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert_same_tensors(model, plain)
    for _ in range(2):
        for loss in (model(x, target=y), F.mse_loss(plain(x), y)):
            loss.backward()
        assert_same_tensors(model, plain)
    torch.testing.assert_close(model(x), plain(x))
    assert len(set(threading.enumerate()) - threads) == 0


def run(model: SplitPipe) -> Tensor:
    loss: Tensor = model(torch.randn(7, 4), target=torch.randn(7, 4))
    return loss


#: What fails, the op it fails in, and what the notes say of it besides.
PLACES = {
    "forward": ("F", "in the forward of layer '{0}' (Fragile), stage {0} (cpu), microbatch 1 of 3"),
    "function": ("BW?", ""),  # The layer's own backward: the op and the stage, not the layer.
    "input": ("BW?", "in the backward of layer '{0}' (Fragile), stage {0} (cpu), microbatch"),
    "weight": ("B?W", "in the weight gradient of {0}.weight"),
}
RAISED = {"place": [*PLACES], "name": ["1f1b", "zb-h1", "zb-v", "gpipe"], "stage": [*range(STAGES)]}


@graded(RAISED, essence=[["place"]], thorough=pairs([*RAISED]))
def test_what_a_layer_raises_is_raised_in_the_caller_with_op_stage_and_microbatch(
    place: str, name: str, stage: int
) -> None:
    op, text = PLACES[place]
    plain, model, fault = fragile(name)
    error = ValueError("no")
    with survives(plain, model):
        fault.arm(place, stage, error)
        with pytest.raises(ValueError) as info:
            run(model)
    assert info.value is error
    notes = "\n".join(error.__notes__)
    assert re.search(rf"in .*{stage}{op}\d.*, stage {stage} \(cpu\)", notes), notes
    assert text.format(stage) in notes, notes


@graded(
    {"kind": [ValueError, Special, KeyboardInterrupt, SystemExit], "place": [*PLACES, "loss"]},
    essence=[["kind"]], thorough=[["place"]],
)
def test_exceptions_of_any_class(kind: type[BaseException], place: str) -> None:
    plain, model, fault = fragile("zb-v")
    error = kind("no")
    with survives(plain, model):
        fault.arm(place, STAGES - 1, error)
        with pytest.raises(kind) as info:
            run(model)
    assert info.value is error


@NAMES
def test_an_exception_of_the_loss_function(name: str) -> None:
    plain, model, fault = fragile(name)
    error = ValueError("no")
    with survives(plain, model):
        fault.arm("loss", STAGES - 1, error)
        with pytest.raises(ValueError) as info:
            run(model)
    notes = "\n".join(info.value.__notes__)
    assert "in the forward of layer 'loss_fn' (Objective), stage 3 (cpu), microbatch 1 of 3" in notes
    assert "in 3F1, stage 3 (cpu)" in notes


@graded({"name": RAISED["name"], "stage": [*range(STAGES)]}, essence=[["name"]])
def test_an_exception_of_a_recomputation(name: str, stage: int) -> None:
    plain, model, fault = fragile(name, checkpoint="always")
    error = ValueError("no")
    with survives(plain, model):
        fault.arm("recomputation", stage, error)
        with pytest.raises(ValueError) as info:
            run(model)
    notes = "\n".join(info.value.__notes__)
    assert f"in the recomputation of layer '{stage}' (Fragile), stage {stage} (cpu), microbatch" in notes
    assert re.search(rf"in {stage}BW?\d, stage {stage}", notes)


@pytest.mark.parametrize("place", ["forward", "function", "weight"])
def test_exceptions_without_grad_mode_or_of_the_autograd_engine(place: str) -> None:
    plain, model, fault = fragile("zb-v", backward="autograd")
    with survives(plain, model):
        fault.arm(place, 1, ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            run(model)
        fault.arm("forward", 1, ValueError("again"))
        with torch.no_grad(), pytest.raises(ValueError, match="again"):
            run(model)


@pytest.mark.parametrize("place", ["weight", *(
    pytest.param(place, marks=pytest.mark.thorough) for place in ("forward", "function", "loss")
)])
def test_failed_passes_leave_no_tensor_and_no_thread_behind(place: str) -> None:
    _, model, fault = fragile("zb-v")

    def fail() -> None:
        # A new exception each time: it holds the frames that it passed, and their tensors.
        fault.arm(place, STAGES - 1, ValueError("no"))
        try:
            run(model)
        except ValueError:
            fault.error = ValueError()

    assert flat(fail)


def test_the_first_of_two_exceptions_is_raised_alone() -> None:
    """Two stages fail, one after the other: neither waits for the other's value."""
    failed = threading.Event()

    class Fails(nn.Module):
        armed = False

        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first = first

        def forward(self, x: Tensor) -> Tensor:
            if self.armed and self.first and x.max() > 0:
                failed.set()
                raise ValueError("first")
            if self.armed and not self.first:
                assert failed.wait(60)
                raise ValueError("second")
            return x * 1

    model = SplitPipe(nn.Sequential(Fails(True), Fails(False)), [1, 1], devices=["cpu"] * 2, chunks=2,
                      schedule="1f1b", loss_fn=lambda y, _: y.mean())
    x = torch.tensor([[0.0], [1.0]])
    model(x, target=0)  # A stage's first microbatch ever runs alone.
    Fails.armed = True
    with pytest.raises(ValueError) as info:
        model(x, target=0)
    assert str(info.value) in ("first", "second")
    assert len([note for note in info.value.__notes__ if " stage " in note and note.startswith("in ")]) >= 1
    Fails.armed = False
    assert model(x, target=0) == 0.5


def test_a_worker_does_no_further_pass_once_another_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped, stop = threading.Event(), threading.Event(), Exchange.stop
    monkeypatch.setattr(Exchange, "stop", lambda self: (stop(self), stopped.set()))
    done: list[Tensor] = []

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            done.append(x)
            if len(done) == 2:  # What the others are given is there already.
                begun.set()
                assert stopped.wait(60)
            return super().forward(x)

    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert begun.wait(60)
            raise ValueError

    _, model = twins(nn.Sequential(First(4, 4), Fails(4, 4)), "gpipe", 2, loss_fn=F.mse_loss, chunks=7)
    with pytest.raises(ValueError):
        run(model)
    assert len(done) == 2


def test_a_layer_that_calls_its_own_model_is_told_so() -> None:
    class Calls(nn.Module):
        model: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.model is not None:
                self.model[0](x)
            return x * 1

    layer = Calls()
    plain, model = twins(nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)), "1f1b", 3, loss_fn=F.mse_loss)
    for call in (lambda: run(model), lambda: model(torch.randn(7, 4))):
        model[1].model = [model]
        with pytest.raises(RuntimeError, match="called by one of its own layers"):
            call()
        model[1].model = None
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    for loss in (model(x, target=y), F.mse_loss(plain(x), y)):
        loss.backward()
    assert_same_tensors(model, plain)


def test_a_layer_may_call_another_model() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SplitPipe(mlp(4), [2, 2], devices=["cpu"] * 2, chunks=2, schedule="1f1b", loss_fn=F.mse_loss)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    module = nn.Sequential(nn.Linear(4, 4), Calls(), nn.Linear(4, 4))
    plain = copy.deepcopy(module)
    model = SplitPipe(module, [1, 1, 1], devices=["cpu"] * 3, chunks=3, schedule="zb-h1", loss_fn=F.mse_loss)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    for loss in (model(x, target=y), F.mse_loss(plain(x), y)):
        loss.backward()
    assert_same_tensors(model, plain)


def test_a_layer_that_writes_to_what_another_needs_is_told_of_it() -> None:
    class Spoils(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            y.data.mul_(1)
            with torch.no_grad():
                y.add_(1)
            return y

    _, model = twins(nn.Sequential(nn.Linear(4, 4), Spoils()), "1f1b", 2, loss_fn=F.mse_loss, chunks=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as info:
        run(model)
    assert re.search(r"in 1BW\d, stage 1", "\n".join(info.value.__notes__))


def test_a_parameter_that_a_layer_replaces_in_its_forward_stays_replaced() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(self.weight, Marked):
                self.weight = Marked(torch.ones(4))
            return x * self.weight

    class Marked(nn.Parameter):
        pass

    model = twins(nn.Sequential(nn.Linear(4, 4), Replaces()), "1f1b", 2, loss_fn=F.mse_loss)[1]
    run(model)
    assert type(model[1].weight) is Marked


class Calls:
    """The ops of a stage, which note that they are called, and call what they are given."""

    trace = None

    def __init__(self, stage: int, log: list[str], does: Callable[[], object] = str) -> None:
        self.stage, self.log, self.does = stage, log, does

    def forward(self, microbatch: int) -> None:
        self.does()
        self.log.append(f"{self.stage}F{microbatch}")

    def close(self) -> None:
        self.log.append(f"{self.stage} closed")


class Nowhere:
    """An exchange between stages that send nothing."""

    def stop(self) -> None:
        pass


def walk(
    *passes: Calls, pool: Pool | None = None, done: Callable[[], object] = str, around: State | None = None,
    exchange: Any = None,
) -> None:
    """Has each stage's own worker do one F."""
    execution = Execution(
        stages=passes,  # type: ignore[arg-type]
        rows=[[OpRun("F", one.stage, (0,))] for one in passes],
        pool=pool or Pool([str(one.stage) for one in passes]),
        exchange=exchange or Nowhere(),
        around=around or thread_state.capture(),
        done=done,  # type: ignore[arg-type]
    )
    execution.run(contextvars.copy_context())


def test_the_first_exception_is_raised_though_another_follows() -> None:
    begun, stopped = threading.Event(), threading.Event()

    def first() -> None:
        begun.wait()
        raise KeyError

    def second() -> None:
        begun.set()
        stopped.wait()
        raise ValueError

    with pytest.raises(KeyError):
        walk(Calls(0, [], first), Calls(1, [], second), exchange=SimpleNamespace(stop=stopped.set))


def test_each_stage_is_closed_once_and_the_end_is_told_once_when_all_are() -> None:
    log: list[str] = []
    walk(*[Calls(stage, log) for stage in range(3)], done=lambda: log.append("done"))
    assert sorted(log[:-1]) == ["0 closed", "0F0", "1 closed", "1F0", "2 closed", "2F0"] and log[-1] == "done"


def test_passes_are_in_the_state_that_is_around_them() -> None:
    seen: list[bool] = []
    with torch.no_grad():
        around = thread_state.capture()
    walk(Calls(0, [], lambda: seen.append(torch.is_grad_enabled())), around=around)
    assert seen == [False]


def test_what_is_raised_before_the_first_pass_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(state: State) -> Any:
        raise Special("no")

    around = thread_state.capture()
    monkeypatch.setattr(thread_state, "entered", entered)
    with pytest.raises(Special, match="no") as info:
        walk(Calls(0, []), around=around)
    assert info.value.__notes__ == ["before its first op"]


def test_what_interrupts_the_caller_is_raised_when_no_worker_is_at_work_any_more() -> None:
    log: list[str] = []
    begun, resting = threading.Event(), threading.Event()

    class Interrupts(Pool):
        def submit(self, worker: int, *given: Any) -> Outcome[Any]:
            if worker == 0 and not resting.is_set():
                assert begun.wait(60)
                raise Special
            return super().submit(worker, *given)

        def _rest(self) -> None:
            resting.set()
            super()._rest()

    def does() -> None:
        begun.set()
        resting.wait(60)

    try:
        with pytest.raises(Special):
            walk(Calls(0, log), Calls(1, log, does), pool=Interrupts(["0", "1"]))
        assert log == ["1F0", "1 closed"]
    finally:
        resting.set()


class Tracked(Special):
    """Can be followed by a weak reference."""

    made: list[weakref.ref[BaseException]] = []

    def __init__(self) -> None:
        self.made.append(weakref.ref(self))


def fail() -> None:
    raise Tracked


@pytest.mark.parametrize("does", [{"in_pass": fail}, {"done": fail}])
def test_an_exception_goes_with_its_last_reference(does: dict[str, Callable[[], object]]) -> None:
    gc.disable()
    try:
        with suppress(Special):
            walk(Calls(0, [], does.get("in_pass", str)), done=does.get("done", str))
        assert Tracked.made.pop()() is None
    finally:
        gc.enable()
