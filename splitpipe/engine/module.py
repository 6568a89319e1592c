"""A microbatch's way through the stages in any module's own forward, which runs once.

    thread of microbatch i    F on stage 0 ── split point ── its turn ── F on stage 1 ── ... ── the output

At a split point, the first call of a block that cuts= names, the thread waits until the next stage is free (see
``step``). Blocks compute with their arguments and parameters, and code between them with any value (``crossing``).
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.core import stream, thread_state
from splitpipe.core.note import add_note
from splitpipe.core.random_numbers import position_of
from splitpipe.core.thread_state import bound, set_function_modes
from splitpipe.core.torch_private import (
    DisableTorchFunction,
    _get_current_function_mode_stack,
    _top_saved_tensors_default_hooks,
    tree_flatten,
)
from splitpipe.engine.block_checkpoint import BlockChains
from splitpipe.engine.crossing import SIMPLE, Crossing, changed
from splitpipe.engine.drop_in import Output
from splitpipe.engine.rows import OpRun
from splitpipe.engine.step import StepRun, Stopped
from splitpipe.loss.numbers import Number, Unknown
from splitpipe.loss.objective import Objective
from splitpipe.loss.trace import Trace, sees
from splitpipe.microbatch.arguments import holds_objects
from splitpipe.microbatch.gather import find_loss
from splitpipe.microbatch.tree import flatten, unflatten
from splitpipe.partition.attributes import Attributes
from splitpipe.partition.blocks import Blocks
from splitpipe.partition.call_hook import taker
from splitpipe.partition.placement import Placement
from splitpipe.skip.tracker import opened
from splitpipe.stage.call import Activation
from splitpipe.stage.recomputation import Modules
from splitpipe.stage.segment import Segment


class ModuleCall(NamedTuple):
    """What the microbatches of one call share."""

    step: StepRun
    forward: Callable[..., Any]
    module: nn.Module
    blocks: Blocks
    placement: Placement
    attributes: Attributes | None  #: None: nothing is left in any.
    traced: bool  #: Whether numbers are traced.
    modules: dict[nn.Module, Modules]  #: Those of blocks, to be recomputed.
    labels: bool  #: Whether there are any.
    new_crossing: Callable[..., Crossing]
    new_chains: type[BlockChains]
    objective: Objective | None  #: The loss of a schedule; None: the module's own.
    targets: Sequence[Any]


class ModuleForward:
    """A microbatch of any module."""

    #: Whether its forward is one call, which stays on its thread's stack between two stages.
    own_forward = True

    def __init__(self, call: ModuleCall, i: int, activation: Activation) -> None:
        self._call, self.step, self.i = call, call.step, i
        self._activation: Any = activation
        self.trace = Trace(call.step.call.input.rows, i, call.step.call.input.dims) if call.traced else None
        link = None if self.trace is None else self.trace.ledger.link
        self.crossing = call.new_crossing(self.step, i, call.placement, link)
        #: Whether values may be elsewhere on the first stage, too: in a first call, which moves parameters.
        self._follow_first = call.placement.several and call.step.call.first
        chained = i < call.step.call.checkpointed
        self._chains = call.new_chains(self.step, i, call.attributes) if chained else None
        self.stage = 0
        self._within = ExitStack()
        #: The caller's saved-tensor hooks; and where the generator was, if a stage began inside others.
        self._hooks: Any = None
        self._inside: Any = None
        self._block: nn.Module | None = None  #: The one that runs, or has raised an error.
        self.output: Any = None  #: The output, outside the stages' graphs.

    def forward_all(self, pause: Callable[[], None]) -> None:
        """The whole forward; ``pause`` is called between two stages, and raises Stopped if it must stop."""
        step, trace, placement, self._pause = self.step, self.trace, self._call.placement, pause
        with (
            thread_state.use(step.call.state), stream.use(*step.call.computes), bound(taker, self), bound(opened, {}),
            self._within,
        ):
            before = _get_current_function_mode_stack()
            first = [self.crossing] if self._follow_first else []
            try:
                self._enter(0)
                placement.settle(self._call.module, False, 0)
                given, self._activation = self._activation, None
                leaves = self.crossing.enter(given)
                args, kwargs = unflatten(leaves, given.nesting)
                if trace is not None:
                    trace.begin(step.call.input, self.i, leaves, [*args, *kwargs.values()])
                del given, leaves
                set_function_modes([*first, *before, *([] if trace is None else [trace])])
                output = self._call.forward(*args, **kwargs)
                del args, kwargs
                self.advance(len(step.stages) - 1)
                set_function_modes(before)
                if step.drop_in:
                    self._keep_output(output)
                else:
                    self._keep_loss(output)
                del output
                self._leave()
            except BaseException as error:
                if not isinstance(error, Stopped):
                    block = "the module" if self._block is None else self._call.blocks.described(self._block)
                    where = f"{step.stages[self.stage].name}, microbatch {self.i} of {step.call.microbatches}"
                    add_note(error, f"in the forward of {block}, {where}")
                raise
            finally:
                set_function_modes(before)
                self.crossing.close()
                self._activation = self.trace = None  # The trace keeps the numbers' graphs alive.
                del self._pause

    def advance(self, stage: int) -> None:
        """Moves on to a later stage, past those in between."""
        while self.stage < stage:
            with DisableTorchFunction():  # This isn't the module's code.
                self._leave()
                self._pause()
                self._enter(self.stage + 1)

    def _enter(self, j: int) -> None:
        step, stage = self.step, self.step.stages[j]
        self.stage = j
        hooks = _top_saved_tensors_default_hooks(True)
        self._hooks = hooks if j == 0 else self._hooks
        self._inside = None if hooks == self._hooks else position_of(stage.device)
        self._within.enter_context(step.at_work(OpRun("F", j, (self.i,))))
        if step.call.state.grad and not self.crossing.one_graph:
            stage.fwd_cache[self.i] = Segment()
        self.crossing.begin(j)
        if j == 1:
            modes = _get_current_function_mode_stack()
            set_function_modes([self.crossing, *[mode for mode in modes if mode is not self.crossing]])

    def _leave(self) -> None:
        step, stage, begun = self.step, self.step.stages[self.stage], self._inside
        if self._chains is not None:
            self._chains.end()
        self.crossing.end()
        if self._call.attributes is not None:
            self._call.attributes.withdraw(self.stage, self._call.module if self.i == 0 else None)
        if self.stage == len(step.stages) - 1:  # Not earlier: it may take further values from graphs of earlier stages.
            for each in step.stages:
                if (segment := each.fwd_cache.get(self.i)) is not None:
                    segment.close(step.split, each.own)
                    each.reached.update(segment.graph.reached if step.drop_in else {})
        self._within.close()
        if begun is not None and (step.call.drew or begun != position_of(stage.device)):
            raise RuntimeError(
                f"{stage.name} begins inside torch.utils.checkpoint (the module's own gradient checkpointing) and "
                "draws random numbers, which that doesn't repeat there: expected checkpoint='always' in its place."
            )

    def _keep_output(self, output: Any) -> None:
        """Drop-in: keeps what the caller's backward can start from: the output, and the terms of its numbers."""
        step, crossing = self.step, self.crossing
        self.output = kept = self._changed(output, crossing.leave)
        numbers = [number for number in kept.numbers.values() if isinstance(number, Number)]
        tensors = [*kept.leaves, *[x for number in numbers for x in number.amounts.values()]]
        for x in tensors if step.call.state.grad and not crossing.one_graph else ():
            if isinstance(x, Tensor) and x.grad_fn is not None and id(x) not in kept.left:
                j = crossing.stage_of(x)
                kept.left[id(x)] = x.detach(), j, step.stages[j].fwd_cache[self.i].leave(x)

    def _keep_loss(self, output: Any) -> None:
        """With a schedule: keeps the loss of the microbatch; without ``loss_fn``, the module's own, and the output."""
        call, crossing, scheduled = self._call, self.crossing, self.step.scheduled
        if call.objective is not None:
            target = call.targets[self.i]
            value = unflatten(crossing.enter(target), target.nesting)
            value, number = call.objective.loss(self.i, changed(output, crossing.here), value, self.trace)
        else:
            place, value = find_loss(output)
            known = None if self.trace is None else self.trace.ledger.number(value)
            number = known or Unknown("a loss with a dimension, which may be that of the rows")
            value = crossing.here(value)
            value = value.reshape(()) if value.dim() else value
            self.output = self._changed(output, lambda x: crossing.latest(x).detach())._replace(place=place)
        with DisableTorchFunction():
            number = number.mapped(crossing.here) if isinstance(number, Number) else number
            part = scheduled.batch_loss.part(self.i, crossing.here(value), number)
            segment = self.step.stages[self.stage].fwd_cache.get(self.i)
            origin = None if segment is None or not part.requires_grad else (self.stage, segment.leave(part))
            scheduled.start_backward(self.i, part, origin)

    def _changed(self, output: Any, change: Callable[[Tensor], Tensor]) -> Output:
        """An output with its leaves, and the terms of its numbers, changed."""
        (leaves, nesting), trace = flatten(output, fields=True), self.trace
        traced = [] if trace is None else [(x, trace.ledger.number(x)) for x in leaves if isinstance(x, Tensor)]
        return Output(leaves, nesting, {}, {id(x): number for x, number in traced if number}).changed(change)

    def take(self, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's call: the split point if it is one, then the block itself, given only its arguments."""
        blocks, placement = self._call.blocks, self._call.placement
        stage, is_block = blocks.cuts.get(block), block in blocks.blocks
        if stage is not None:
            before = self.stage
            self.advance(stage)  # First: another microbatch may have other parameters in the block.
            self._verify_split_point(block, stage, before)
        local = placement.settle(block, is_block, self.stage)
        if not is_block:
            return call(*args, **_uncached(block, args, kwargs, self._call.labels))
        modes = _get_current_function_mode_stack()
        set_function_modes([mode for mode in modes if mode is not self.crossing and mode is not self.trace])
        token, self._block = taker.set(None), block
        traced = self.trace if self.trace is not None and sees(block) else None
        read = "" if self.trace is None else self.trace.ledger.read
        try:
            value = self._run_block(block, call, args, kwargs, local, traced)
            self._block = None
            if self.trace is not None:
                self.trace.record(value, "" if traced else blocks.described(block), read)
            return value
        finally:
            taker.reset(token)
            set_function_modes(modes)

    def _verify_split_point(self, block: nn.Module, stage: int, before: int) -> None:
        late = stage < before and block not in self._call.placement.stage_of
        own = [isinstance(x, nn.Parameter) or id(x) in self.step.stages[stage].names for x in block.parameters()]
        if late or stage > before and not all(own):
            why = f"after stage {before} has begun" if late else "while other tensors replace its parameters"
            raise ValueError(
                f"{self._call.blocks.described(block)}, where stage {stage} starts, was called {why}: expected cuts= "
                "in the order of the forward's calls, or sample= instead, and torch.func.functional_call in one block."
            )

    def _modules_of(self, block: nn.Module) -> Modules | None:
        """The modules of a block, to be recomputed; None while code between blocks has replaced its parameters."""
        modules = self._call.modules.get(block)
        if modules is None:
            modules = self._call.modules[block] = Modules([*block.modules()])
        if all([p.is_leaf and table.get(name) is p for table, name, p in modules.parameters]):
            return modules
        del self._call.modules[block]  # They may have been replaced when it was first called.
        return None

    def _run_block(
        self, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], local: bool,
        traced: Trace | None,
    ) -> Any:
        simple = SIMPLE.issuperset(map(type, (*args, *kwargs.values())))
        if self.stage or self._follow_first:
            args, kwargs = changed(args, self.crossing.here), changed(kwargs, self.crossing.here)
        objects = not simple and holds_objects((args, kwargs))
        # Not with tensors on another device: in B, no function is followed. Nor inside torch.utils.checkpoint.
        checkpointed = local and not objects and self._chains is not None
        checkpointed = checkpointed and torch.is_grad_enabled() and _top_saved_tensors_default_hooks(True) is None
        before = tree_flatten((args, kwargs))[0] if not simple and (self.stage or checkpointed) else None
        modules = self._modules_of(block) if checkpointed else None
        if modules is not None and self._chains is not None:
            stage, described = self.step.stages[self.stage], self._call.blocks.described(block)
            value = self._chains.run(stage, modules, described, call, args, kwargs, traced)
        else:
            with nullcontext() if local and not (self.stage and objects) else self.crossing, traced or nullcontext():
                value = call(*args, **kwargs)
        if before is not None and [*map(id, before)] != [*map(id, tree_flatten((args, kwargs))[0])]:
            raise RuntimeError(
                "a block changed a list or dict that it was given, on a later stage or checkpointed: that may be a "
                "copy, and is changed again in a recomputation. Expected blocks that return what they make, or cuts "
                "behind it, with checkpoint='never'."
            )
        return value


_signature = lru_cache(inspect.signature)  # Of functions of classes: a bound method would be kept.


def _uncached(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], labels: bool) -> dict[str, Any]:
    """The keywords of a module inside, with ``use_cache=False`` if only its configuration says otherwise.

    That is in training, and in calls with labels. Microbatches' caches can't be joined, and a wrapper such as PEFT's
    doesn't show that it takes the word.
    """
    if not labels and not (part.training and torch.is_grad_enabled()) or kwargs.get("use_cache") is not None:
        return kwargs
    parameters = _signature(type(part).forward).parameters
    decides = "use_cache" in parameters and parameters["use_cache"].default is None
    return {**kwargs, "use_cache": False} if decides and len(args) < [*parameters].index("use_cache") else kwargs
