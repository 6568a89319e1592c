"""A fault in any kind of op, of any stage and microbatch: the caller has the error, the model is as it was."""
from __future__ import annotations

import copy
import gc
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, schedule
from splitpipe.core.note import add_note
from tests.helpers.deferring import double as double
from tests.helpers.faults import ERRORS, SIGNALS, Lines, Loss, Patched, Place, fragile, throws, watch
from tests.helpers.twin import assert_same_tensors

pytestmark = pytest.mark.timeout(60)

#: In F, in B and in W of a microbatch, of every stage; of the first or last stage alone.
FORWARD, BACKWARD = ("forward", "recomputation", "stash", "pop", "loss"), ("tensor hook", "function", "input")
SKIP, WEIGHT = ("popped hook", "stashed hook"), ("weight",)
#: In the caller's thread, whatever the schedule: in ``loss.backward()``; around the ops.
RELEASE, AROUND = ("parameter hook", "weight hook", "accumulated hook"), ("scatter", "gather")


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """What was there before is not looked through at each collection."""
    gc.freeze()
    yield
    gc.unfreeze()


class Caught(NamedTuple):
    """What the caller has of a step that failed. (Not the error, which holds the frames that it passed.)"""

    error: type[BaseException]
    own: bool
    notes: str
    called: bool  # By the model's call; else by loss.backward().


class Case:
    """A module and its pipeline, with a fault in the pipeline and hooks on its parameters."""

    def __init__(self, stages: int, chunks: int, name: str | None = None, **options: Any) -> None:
        threads = set(threading.enumerate())
        module, balance, self.fault = fragile(stages)
        self.plain = copy.deepcopy(module)
        rows = stages
        if name is not None:
            options.update(schedule=name, loss_fn=Loss(self.fault, stages - 1))
            rows = stages // schedule.build(name, 1, 1).stages
        self.model = SplitPipe(module, balance, devices=["cpu"] * rows, chunks=chunks, deferred_batch_norm=True,
                               **options)
        watch(self.model, self.fault)
        self.scheduled, self.stages, self.chunks = name is not None, stages, chunks
        self.split = options.get("backward") != "autograd"
        self.rows = torch.arange(3 * chunks - 1)
        self.y = torch.randn(len(self.rows), 4)
        x = torch.randn(len(self.rows), 4)
        self.inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        # A stage's first microbatch ever runs alone. What they draw and learn then is no concern of these tests.
        self.step()
        self.threads = set(threading.enumerate()) - threads
        with self.fault.listening() as heard:
            self.step()
        self.places = list(heard)
        self.model.zero_grad()
        self.loss(self.plain, 1).backward()
        self.whole = self.gradients(self.plain, 1)

    def loss(self, module: nn.Module, which: int) -> Tensor:
        given = self.inputs[which], self.rows
        if self.scheduled and module is self.model:
            loss: Tensor = module(given, target=self.y)
            return loss
        return F.mse_loss(module(given)[0], self.y)

    def step(self) -> None:
        self.loss(self.model, 0).backward()

    def gradients(self, module: nn.Module, which: int) -> list[Tensor]:
        leaves = [*module.parameters(), self.inputs[which]]
        assert all(leaf.grad is not None for leaf in leaves)
        return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]

    def attempt(self) -> Caught | None:
        """A step."""
        called = True
        raised = None
        try:
            loss = self.loss(self.model, 0)
            called = False
            loss.backward()
        except BaseException as error:
            raised = Caught(type(error), error is self.thrown, "\n".join(getattr(error, "__notes__", [])), called)
        self.thrown = None
        return raised

    thrown: BaseException | None = None

    def fails(self, place: Place, act: Callable[[], None], error: type[BaseException]) -> Caught:
        """A step that fails at a place, and one that works."""

        def attempt() -> Caught | None:
            self.fault.arm(place, act)
            caught = self.attempt()
            assert self.fault.fired == place
            return caught

        return self.survives(attempt, error, {True})

    def survives(
        self, attempt: Callable[[], Caught | None], error: type[BaseException], *unchanged: set[bool]
    ) -> Caught:
        """A step that fails, and one that works.

        Args:
            attempt: the first.
            error: that it raises.
            unchanged: whether buffers may be as they were, all of them, or changed, if the call itself fails.
        """
        model = self.model
        leaves = [*model.parameters(), self.inputs[0]]
        for leaf in leaves:
            leaf.grad = torch.full_like(leaf, 0.5)
        grads = [leaf.grad for leaf in leaves]
        held = [(layer, name, held) for layer in model.modules() for name, held in layer._parameters.items()]
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        threads = set(threading.enumerate())

        caught = attempt()
        assert caught is not None and caught.error is error
        assert all(layer._parameters[name] is before for layer, name, before in held)
        for leaf, grad, whole in zip(leaves, grads, self.whole):
            assert leaf.grad is grad is not None
            if not (grad == 0.5).all():  # Autograd had it whole, before or after the fault.
                assert not caught.called
                torch.testing.assert_close(grad, 0.5 + whole)
        if caught.called:
            assert {buffer.equal(buffers[name]) for name, buffer in model.named_buffers()} in unchanged
        assert self.threads <= set(threading.enumerate()) <= threads
        self.trains_on()
        return caught

    def trains_on(self) -> None:
        """The next step is that of a module in the same state."""
        self.plain.load_state_dict(self.model.state_dict())
        for module, which in ((self.plain, 1), (self.model, 0)):
            leaves = [*module.parameters(), self.inputs[which]]
            for leaf in leaves:
                leaf.grad = None
            loss = self.loss(module, which)
            loss.backward()
        assert_same_tensors(self.model, self.plain)
        torch.testing.assert_close(self.inputs[0].grad, self.inputs[1].grad)


def alive() -> int:
    """How many tensors there are."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@contextmanager
def named(*what: object) -> Iterator[None]:
    """Says which of many steps an assertion is about."""
    try:
        yield
    except BaseException as error:
        add_note(error, f"with a fault at {what}")
        raise


def planned(case: Case, every: int = 1) -> list[tuple[Place, int]]:
    """Each place, or every second one, with a number; each kind of op with as many numbers as there are errors."""
    kinds: dict[str, list[Place]] = {}
    for place in case.places:
        kinds.setdefault(place.kind, []).append(place)
    return [
        (places[n * every % len(places)], n)
        for places in kinds.values()
        for n in range(max(len(places) // every, len(ERRORS)))
    ]


def note_of(case: Case, place: Place) -> str:
    """What is promised of the notes of an error, as a pattern."""
    kind, stage, mark = place
    where = rf"stage {stage} \(cpu\)"
    i = mark // 3 if isinstance(mark, int) else None
    microbatch = rf"{where}, microbatch {i} of {case.chunks}"
    parts = []
    if case.scheduled and kind not in RELEASE + AROUND:
        letters = {"send": "[FB]W?", "recomputation": "BW?", "weight": "(BW?|W)"}
        letter = "F" if kind in FORWARD else "BW?"
        parts.append(rf"in .*{stage}{letters.get(kind, letter)}{'.' if i is None else i}.*, {where}")
    if kind in ("forward", "recomputation", "loss"):
        parts.append(rf"in the {kind.replace('loss', 'forward')} of layer '.*' \((Fragile|Objective)\), {microbatch}")
    elif kind in ("stash", "pop"):
        parts.append(rf"in the forward of layer '.*' \((Keep|Add)\), {microbatch}")
    elif kind == "input" and case.split:
        parts.append(rf"in the backward of layer '.*' \(Fragile\), {microbatch}")
    elif kind in WEIGHT and case.split:
        parts.append("in the weight gradient of .*weight")
    return ".*".join(rf"(?=[\s\S]*{part})" for part in parts)


CASES: dict[str, Callable[[], Case]] = {
    "drop-in": lambda: Case(3, 3),
    "drop-in, never": lambda: Case(3, 2, checkpoint="never", stash_limit=0),
    "drop-in, autograd": lambda: Case(3, 2, backward="autograd", checkpoint="always"),
    "gpipe": lambda: Case(2, 2, "gpipe"),
    "1f1b": lambda: Case(2, 3, "1f1b"),
    "1f1b, autograd, always": lambda: Case(2, 2, "1f1b", backward="autograd", checkpoint="always"),
    "zb-h1": lambda: Case(3, 3, "zb-h1"),
    "zb-v, always": lambda: Case(4, 2, "zb-v", checkpoint="always"),
    "interleaved-1f1b": lambda: Case(4, 2, "interleaved-1f1b", checkpoint="except_last"),
    "v-half": lambda: Case(4, 2, "v-half"),
}


#: Those with a fault at every place; to the others it comes at every second one.
WHOLE = ("drop-in", "zb-h1", "zb-v, always")


@pytest.mark.parametrize("name", CASES)
def test_an_error_in_any_op_is_raised_in_the_caller_and_the_model_is_as_it_was(name: str) -> None:
    case = CASES[name]()
    met: set[tuple[str, type[BaseException]]] = set()
    with Patched(case.fault):
        with case.fault.listening() as heard:
            case.step()
        case.places = list(heard)
        case.trains_on()
        before = alive()
        for place, n in planned(case, 1 if name in WHOLE else 2):
            error = ERRORS[n % len(ERRORS)]
            case.thrown = error("no")
            with named(place, error):
                caught = case.fails(place, throws(case.thrown), error)
                assert caught.own
                assert re.match(note_of(case, place), caught.notes), caught.notes
            met.add((place.kind, error))
    assert alive() == before, "a failed step has left tensors behind"
    assert met == {(kind, error) for kind in {place.kind for place in case.places} for error in ERRORS}


@pytest.mark.parametrize("name", ["drop-in", "1f1b", "zb-v, always"])
def test_an_interrupt_sent_in_any_op_is_raised_in_the_caller_and_the_model_is_as_it_was(name: str) -> None:
    case = CASES[name]()
    for place, n in planned(case, 1 if name == "1f1b" else 2):
        way = list(SIGNALS)[n % len(SIGNALS)]
        with named(place, way):
            case.fails(place, SIGNALS[way], KeyboardInterrupt)


@pytest.mark.parametrize("name", ["drop-in, never", "1f1b"])
@pytest.mark.parametrize(("file", "every"), [("worker.py", 1), ("", 71)])
def test_an_interrupt_between_any_two_lines_of_the_callers_leaves_the_model_as_it_was(
    name: str, file: str, every: int
) -> None:
    case = CASES[name]()

    def attempt(lines: Lines) -> Caught | None:
        with lines:
            caught = case.attempt()
        # The end of torch.no_grad() is Python, too, and may itself be what is interrupted.
        torch.set_grad_enabled(True)
        return caught

    attempt(whole := Lines(file))
    assert whole.count > 30
    for at in range(1, whole.count, every):
        with named(lines := Lines(file, at)):
            # The call may have been through with all, and be interrupted on its way out.
            case.survives(partial(attempt, lines), KeyboardInterrupt, {True}, {False})


@pytest.mark.parametrize("name", CASES)
def test_there_is_an_op_of_each_kind_at_every_stage_and_microbatch(name: str) -> None:
    """Else a fault would be missing above."""
    case = CASES[name]()
    found = Counter(place.kind for place in case.places)
    each = case.stages * case.chunks
    expected = dict.fromkeys(("forward", *BACKWARD, *WEIGHT), each)
    expected.update(dict.fromkeys(("stash", "pop", *SKIP), case.chunks), **dict.fromkeys(RELEASE, case.stages))
    spared = {"always": 0, "except_last": 1, "never": case.chunks}[case.model.checkpoint]
    expected["recomputation"] = case.stages * (case.chunks - spared)
    if case.scheduled:
        expected["loss"] = case.chunks
    assert found == Counter(expected)
