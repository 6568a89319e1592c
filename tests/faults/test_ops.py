"""A fault in any kind of op, of any stage and microbatch: the caller has the error, the model is as it was."""
from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import DeferredBatchNorm, SplitPipe, schedule
from splitpipe.core.note import add_note
from tests.helpers.faults import ERRORS, SIGNALS, Loss, Place, fragile, throws, watch
from tests.helpers.twin import assert_same_tensors

#: Kinds of op that are met in F.
FORWARD = ("forward", "stash", "pop", "loss")
#: By kind of op: what notes say that a layer, or a stage, did. A parameter's hook runs in the caller's own backward.
LAYER = {**dict.fromkeys(FORWARD, "forward"), "recomputation": "recomputation"}
STAGE = {"recomputation": "recomputation", "weight": "(weight gradients|backward)",
         **dict.fromkeys(["input", "tensor hook", "stashed hook"], "backward")}
#: Kinds that every case meets.
KINDS = {"forward", "stash", "pop", "tensor hook", "stashed hook", "input", "weight", "parameter hook",
         "accumulated hook"}


class Case:
    """A module and its pipeline, with a fault in the pipeline and hooks on its parameters."""

    def __init__(self, stages: int, chunks: int, name: str | None = None, device: str = "cpu", **options: Any) -> None:
        threads = set(threading.enumerate())
        module, balance, self.fault = fragile(stages)
        self.plain = copy.deepcopy(module).to(device)
        rows = stages
        if name is not None:
            options.update(schedule=name, loss_fn=Loss(self.fault, stages - 1))
            rows = stages // schedule.build(name, 1, 1).stages
        self.model = SplitPipe(module, balance, devices=[device] * rows, chunks=chunks, deferred_batch_norm=True,
                               **options)
        watch(self.model, self.fault)
        self.scheduled, self.chunks = name is not None, chunks
        #: True if B is an op, and not a part of one graph.
        self.captured = self.scheduled or options.get("backward") != "autograd"
        self.rows = torch.arange(3 * chunks - 1, device=device)
        self.y, x = torch.randn(2, len(self.rows), 4, device=device)
        self.inputs = {self.model: x.clone().requires_grad_(), self.plain: x.clone().requires_grad_()}
        self.step(self.model)  # A stage's first microbatch ever runs alone: what it learns then is no concern here.
        self.threads = set(threading.enumerate()) - threads
        with self.fault.listening() as heard:
            self.step(self.model)
        self.places = list(heard)
        self.step(self.plain)
        self.whole = [leaf.grad for leaf in self.leaves(self.plain)]

    def leaves(self, module: nn.Module) -> list[Tensor]:
        return [*module.parameters(), self.inputs[module]]

    def loss(self, module: nn.Module) -> Tensor:
        given = self.inputs[module], self.rows
        if self.scheduled and module is self.model:
            loss: Tensor = module(given, target=self.y)
            return loss
        return F.mse_loss(module(given)[0], self.y)

    def step(self, module: nn.Module) -> None:
        for leaf in self.leaves(module):
            leaf.grad = None
        self.loss(module).backward()

    def survives(self, error: type[BaseException], same: bool = True) -> BaseException:
        """A step that fails with the error, which is given back, and one that works; ``same``: the threads stay."""
        for layer in self.model.modules():
            if isinstance(layer, DeferredBatchNorm):
                layer.reset_running_stats()  # After many steps with one batch they would not change any more.
        leaves = self.leaves(self.model)
        grads = [torch.full_like(leaf, 0.5) for leaf in leaves]
        for leaf, grad in zip(leaves, grads):
            leaf.grad = grad
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        threads, called = set(threading.enumerate()), True
        with pytest.raises(error) as caught:
            loss = self.loss(self.model)
            called = False
            loss.backward()
        assert [*map(id, self.leaves(self.model))] == [*map(id, leaves)], "a parameter is another"
        for leaf, grad, whole in zip(leaves, grads, self.whole):
            assert leaf.grad is grad
            if not (grad == 0.5).all():  # Autograd had it whole, before or after the fault.
                assert not called
                torch.testing.assert_close(grad, 0.5 + whole)
        if called:
            assert all(buffer.equal(buffers[name]) for name, buffer in self.model.named_buffers())
        assert not same or self.threads <= set(threading.enumerate()) <= threads
        self.trains_on()
        return caught.value

    def trains_on(self) -> None:
        """The next step is that of a module in the same state."""
        self.plain.load_state_dict(self.model.state_dict())
        for module in self.plain, self.model:
            self.step(module)
        assert_same_tensors(self.model, self.plain)
        torch.testing.assert_close(self.inputs[self.model].grad, self.inputs[self.plain].grad)

    def fails(self, place: Place, act: Callable[[], None], error: type[BaseException],
              same: bool = True) -> BaseException:
        """A step that fails at a place with the error, which is given back, and one that works."""
        self.fault.arm(place, act)
        try:
            # In the one graph, a stage that fails ends its threads; the next call starts others.
            found = self.survives(error, same=same and self.captured)
            assert self.fault.fired == place
            return found
        except BaseException as failed:
            add_note(failed, f"with a fault at {place}")
            raise

    def noted(self, place: Place, error: BaseException) -> list[str]:
        """What is promised of the notes of an error, as patterns."""
        kind, stage, mark = place
        if mark is None:
            return []
        last, i, where = len(self.plain) - 1, mark // 3, rf"stage {stage} \(cpu\)"  # type: ignore[operator]
        layer = {"stash": 1, "pop": last - 1, "loss": "loss_fn"}.get(kind, {0: 0, last - 2: last}.get(stage, stage + 1))
        found = []
        if kind in STAGE and self.captured:  # W of several microbatches is computed together.
            found.append(rf"in the {STAGE[kind]} of {where}" + rf", microbatch {i}" * (kind != "weight"))
        if kind in LAYER:
            found.append(rf"in the {LAYER[kind]} of layer '{layer}' \(\w+\), {where}, microbatch {i} of {self.chunks}")
        if kind in FORWARD and isinstance(error, Exception):
            found.append(rf"microbatches of 3 rows of {len(self.rows)}, as the input\[0\] has them")
        return found


CASES: dict[str, Callable[[], Case]] = {
    "drop-in": lambda: Case(3, 3),
    "drop-in, autograd": lambda: Case(3, 2, backward="autograd", checkpoint="always"),
    "1f1b, autograd, always": lambda: Case(2, 2, "1f1b", backward="autograd", checkpoint="always"),
    "zb-h1": lambda: Case(3, 3, "zb-h1"),
    "zb-v, always": lambda: Case(4, 2, "zb-v", checkpoint="always"),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "zb-h1" else pytest.mark.thorough) for name in CASES
])
def test_an_error_in_any_kind_of_op_has_its_place_and_leaves_the_model_unchanged(name: str) -> None:
    """At two places of each kind, in stages and microbatches by turns, in the ways that there are by turns."""
    case, at = CASES[name](), dict[str, list[Place]]()
    for place in case.places:
        at.setdefault(place.kind, []).append(place)
    assert {*at} == {*KINDS, *["loss"] * case.scheduled, *["recomputation"] * (case.model.checkpoint != "never")}
    places = [place for n, own in enumerate(at.values()) for place in {own[n % len(own)], own[-1]}]
    for n, place in enumerate(places):
        error = ERRORS[n % len(ERRORS)]("no")
        assert case.fails(place, throws(error), type(error)) is error
        notes = "\n".join(getattr(error, "__notes__", []))
        assert all(re.search(pattern, notes) for pattern in case.noted(place, error)), (place, notes)
        assert "use_reentrant" not in notes


@pytest.mark.parametrize(("name", "kinds"), [
    ("drop-in", {"accumulated hook": True, "recomputation": False, "tensor hook": False, "forward": False}),
    ("zb-h1", {"parameter hook": True, "forward": False, "weight": False, "input": False}),
])
def test_an_interrupt_leaves_the_model_unchanged(name: str, kinds: dict[str, bool]) -> None:
    case = CASES[name]()
    for n, (kind, same) in enumerate(kinds.items()):
        place = [place for place in case.places if place.kind == kind][-1]
        # In a worker: the caller, who waits, is interrupted, and gives its pool up. In backward the caller is at work.
        case.fails(place, [*SIGNALS.values()][n % len(SIGNALS)], KeyboardInterrupt, same)


@pytest.mark.timeout(60)
@pytest.mark.thorough
def test_after_a_short_soak_nothing_is_left_behind_and_what_would_be_is_told() -> None:
    from tests.tools.soak import grown, soak  # Which takes its cases from here.

    counts = soak(20, seed=1)
    assert grown(counts) == []
    assert grown([*counts, {**counts[-1], "tensors": counts[-1]["tensors"] + 1}]) != []
