"""A microbatch's way through the stages in the code of the module's own forward.

At a *border*, the first call of a cut, its thread leaves stage j, and waits until it is the microbatch's turn on stage
j+1 (see executor). So, as usual, one thread works on each stage.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.batch import outputs
from splitpipe.batch.arguments import holds_objects, uncached
from splitpipe.core import stream, thread_state
from splitpipe.core.generator import exclusive_generator, has_moved, state_of
from splitpipe.core.note import add_note
from splitpipe.core.rng import DeviceState, FirstRun, RngMode
from splitpipe.core.tensors import version_of
from splitpipe.core.thread_state import Bound, Hooks, State, set_function_modes
from splitpipe.core.torch_private import (
    DisableTorchFunction,
    _get_current_function_mode_stack,
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _top_saved_tensors_default_hooks,
    tree_unflatten,
)
from splitpipe.deferral.function import Caller, calling
from splitpipe.engine.executor import Stopped
from splitpipe.engine.forward import Host, MicrobatchForward
from splitpipe.engine.run import CodeRun
from splitpipe.engine.values import Follow, Transfer, Values, is_simple
from splitpipe.loss.counts import uncounted
from splitpipe.loss.tracing import TracedBlock, note_arguments, numbers_of
from splitpipe.partition.call_hook import taker
from splitpipe.partition.left import Left
from splitpipe.skip.box import opened
from splitpipe.stage.call import Activation
from splitpipe.stage.checkpoint import is_checkpoint
from splitpipe.stage.containers import change, changes, containers, copies, marked, returned, verify_once

_BETWEEN = "the code between blocks"


class CodeForward(MicrobatchForward):
    """A microbatch of any module: its values, and the calls of its blocks."""

    run: CodeRun
    parked = True

    def __init__(self, run: CodeRun, i: int, activation: Activation, host: Host) -> None:
        super().__init__(run, i, activation, host)
        shared = [x for k in activation.shared if isinstance(x := activation.leaves[k], Tensor)]
        #: Arguments whose memory is shared, and their versions; empty if they need no gradient.
        self._shared = [(x, version_of(x)) for x in shared] if any([x.requires_grad for x in shared]) else []
        self.trace = None if run.tracing is None else run.tracing.trace(i)
        transfer: Transfer = self.transfer
        self.values = values = Values(transfer, None if self.trace is None else self.trace.facts.link)
        self._follow = Follow(
            values.here, values.latest, values.asked, transfer.differentiates, transfer.one_graph, values.note_writes
        )
        self._caller: Caller | None = None
        self._segment: ExitStack | None = None
        self._start: Tensor | None = None  # The generator's state at the start of the segment, if it has one.
        self._watch: FirstRun | None = None  # Sees draws that the states at the ends of a segment don't show.
        self._begun: Tensor | None = None  # The state at the start of the next segment, if it isn't made from a seed.
        self._hooks: Any = None
        #: The hook of a checkpoint in which the current segment began, and its device's random state there.
        self._inside_of: tuple[Any, DeviceState] | None = None
        #: What is left in attributes, if that may be any; a single microbatch is the batch, and leaves what it does.
        self._left: Left | None = None
        self._where = ""
        self._noted = 0  # The identity of an error raised by a block.

    @property
    def has_generator(self) -> bool:
        """True while the segment has the default generator to itself."""
        return self._start is not None

    def whole(self, pause: Callable[[], None]) -> None:
        """The whole forward; ``pause`` is called between two stages, and raises Stopped if it must stop."""
        self._pause = pause
        try:
            self.run.call.contexts[self.i].run(self._forward)
        finally:
            self.values.clear()
            self._given = None
            self.trace = None  # The trace keeps the numbers' graphs alive.

    def _forward(self) -> None:
        run, state, given = self.run, self.run.call.state, self._given
        assert given is not None
        self._left = run.attributes.left if run.attributes.left and len(run.call.rows) > 1 else None
        around = state._replace(function_modes=(), hooks=self._counted(state))
        with thread_state.entered(around), stream.use(*run.call.computes), Bound(taker, self), opened({}):
            modes = state.function_modes if run.one_graph else (self._follow, *state.function_modes)
            if any([stage.facts.rng in (RngMode.UNKNOWN, RngMode.DOUBTED) for stage in run.stages]):
                # Under a function mode, compiled code would be compiled again.
                self._watch = None if any([stage.compiled for stage in run.stages]) else FirstRun()
            modes = modes if self._watch is None else (self._watch, *modes)
            set_function_modes(modes if self.trace is None else (*modes, self.trace))
            self._hooks = around.hooks
            try:
                self._enter(0)
                self.settled(run.blocks.module)
                leaves = self.transfer.opening(given.leaves)
                args, kwargs = tree_unflatten(leaves, given.spec)
                if self.trace is not None:
                    with DisableTorchFunction():
                        note_arguments(self.trace.facts, run.call.input, self.i, leaves, [*args, *kwargs.values()])
                self._given = given = None
                del leaves
                output = run.forward(*args, **kwargs)
                del args, kwargs
                self._untraced()
                self._verify_shared()
                self.advance(len(run.stages) - 1)
                # Its tensors are used as they were last: a later stage may have written to them.
                self._value = self._host.finish(self, output)
                del output
                self._leave()
            except BaseException as error:
                if not isinstance(error, Stopped) and id(error) != self._noted:
                    add_note(error, f"in the forward of the module, between blocks, {self._where}")
                raise
            finally:
                set_function_modes(())
                if self._segment is not None:
                    self._segment.close()
                    if self._left is not None:
                        self._left.withdraw(self.stage)

    def flat(self, output: Any) -> tuple[list[Any], Any]:
        """The output, flattened, with its tensors as they were last."""
        leaves, nesting = outputs.flatten(output)
        made = numbers_of(self.trace, leaves)
        leaves = [self.values.latest(x) if isinstance(x, Tensor) else uncounted(x) for x in leaves]
        self.numbers = {id(leaves[k]): number for k, number in made.items()}
        if self.run.ranked:
            self.rank(leaves)
        return leaves, nesting

    def _counted(self, state: State) -> Hooks | None:
        """The caller's saved-tensor hooks, or else those that count for the current stage."""
        counting = [self._host.counting(self.i, stage) for stage in range(len(self.run.stages))]
        if state.hooks is not None or state.hooks_disabled or None in counting:
            return state.hooks
        packs = [hooks[0] for hooks in counting if hooks is not None]
        return lambda x: packs[self.stage](x), thread_state.unchanged

    def span(self, stage: int) -> range:
        """The numbers of nodes that the segment on a stage has made, once all have ended."""
        return range(self.firsts[stage], (*self.firsts, self._ends[-1])[stage + 1])

    def _made(self, number: int, likely: int) -> int | None:
        if number < self.firsts[0] or len(self._ends) == len(self.run.stages) and number >= self._ends[-1]:
            return None
        return bisect_right(self.firsts, number) - 1

    def _verify_shared(self) -> None:
        if any([version_of(x) != version for x, version in self._shared]):
            raise RuntimeError(
                "the forward wrote in place to an argument that shares its memory with another argument or "
                "microbatch, and that needs gradients: the gradients of the other would miss the write. Write to a "
                "copy (x.clone()), or pass copies."
            )
        self._shared = []

    def advance(self, stage: int) -> None:
        """Moves on to a later stage, and thus past those in between."""
        while self.stage < stage:
            foreign = _top_saved_tensors_default_hooks(True) is not self._hooks and self._hooks_changed()
            if foreign:
                # torch.utils.checkpoint, which contains the border, will restore this state.
                self._begun = state_of()
            self._leave()
            self.run.attributes.look(self.i)
            self._pause()
            self._enter(self.stage + 1)
            if foreign:
                top = _top_saved_tensors_default_hooks(True)
                self._inside_of = top[0], DeviceState(self.run.stages[self.stage].device)

    def _hooks_changed(self) -> bool:
        top = _top_saved_tensors_default_hooks(True)
        return top is not None and (self._hooks is None or top[0] is not self._hooks[0])

    def _verify_checkpoint(self) -> None:
        """Raises if torch.utils.checkpoint, which began on another device, can't repeat this one's random numbers."""
        if self._inside_of is None:
            return
        hook, state = self._inside_of
        state.verify_undrawn(self.run.stages[self.stage])
        top = _top_saved_tensors_default_hooks(True)
        if top is None or top[0] is not hook:
            self._inside_of = None

    def _enter(self, stage: int) -> None:
        own = self.run.stages[stage]
        self.values.stage = stage
        self._where = f"{own}, microbatch {self.i} of {len(self.run.call.rows)}"
        self._segment = stack = ExitStack()
        stack.enter_context(stream.use(own.compute))
        begun, self._begun = self._begun, None
        if own.facts.rng is not RngMode.NONE or begun is not None:
            seed = self.run.call.seeds.of(stage, self.i)
            start = torch.Generator().manual_seed(seed).get_state() if begun is None else begun
            stack.enter_context(exclusive_generator(start))
            self._start = start
        if self._watch is not None:
            self._watch.begin()
        if self._left is not None:
            self._left.begin()
        self._begin(stage)
        self.transfer.entering()
        self._caller = own.caller(self.i)
        self._at(_BETWEEN)
        stack.enter_context(calling(self._caller))

    def _leave(self) -> None:
        """Ends the segment, and records facts about its borders."""
        own, stack = self.run.stages[self.stage], self._segment
        assert stack is not None
        self.values.verify()
        self._verify_checkpoint()
        if self._left is not None:
            self._left.end(self.stage)
        if self._start is not None:
            drew = has_moved(self._start)
            self._start = None
            self.run.call.seeds.drew |= drew
            if drew or self._watch is not None and self._watch.moved:
                own.facts.rng = RngMode.EXCLUSIVE
            elif own.facts.rng is RngMode.UNKNOWN:
                own.facts.rng = RngMode.NONE
        self._end()
        self._segment = None
        stack.close()

    def settled(self, module: nn.Module) -> bool:
        """Gives a called module its home; returns True if its tensors are on the stage's device."""
        return self.run.settled(module, self.stage)

    def _untraced(self) -> int | None:
        """Skips tracing for code that isn't the user's; returns how many of the user's modes see functions first."""
        modes = _get_current_function_mode_stack()
        if self.trace not in modes:  # It is None, or inside a traced function that calls modules.
            return None
        if modes[-1] is self.trace:
            _pop_torch_function_stack()
            return 0
        at: int = modes.index(self.trace)
        set_function_modes([*modes[:at], *modes[at + 1 :]])
        return len(modes) - 1 - at

    def take(self, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's call; if it is a block, nothing in it is traced."""
        if self._inside_of is not None:
            self._verify_checkpoint()
        trace = self.trace
        above = None if trace is None or block not in self.run.blocks.blocks else self._untraced()
        if trace is None or above is None:
            return self._take(block, call, args, kwargs)
        try:
            return self._take(block, call, args, kwargs)
        finally:
            if above:
                modes = _get_current_function_mode_stack()
                set_function_modes([*modes[:-above], trace, *modes[-above:]])
            else:
                _push_on_torch_function_stack(trace)

    def _take(self, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block's call: the border of its stage if it is a cut, then the block itself, given only its arguments."""
        blocks = self.run.blocks
        cut = blocks.cuts.get(block)
        if cut is not None:
            self.run.verify_cut(block, cut, self.stage)
        if cut is not None and cut > self.stage:
            self.advance(cut)
            if self.run.ranked:
                self.rank((args, kwargs))
        local = self.run.settled(block, self.stage)
        if block not in blocks.blocks:
            return call(*args, **uncached(block, args, kwargs))
        if self._left is not None:
            call = self._left.following(block, self.stage, call)
        traced = None if self.trace is None else self._traced(block, call)
        if self.trace is not None and traced is None and not is_simple(args, kwargs):
            args, kwargs = uncounted((args, kwargs))
        follow, whole, checkpointed = False, self.run.one_graph, self._checkpoints()
        simple = is_simple(args, kwargs)
        own = [] if simple or whole and not checkpointed else containers(args, kwargs)
        if not whole:
            args, kwargs = self.values.simple(args, kwargs) if simple else self.values.hand((args, kwargs))
            # It may access something on another stage.
            follow = not local or not simple and holds_objects((args, kwargs))
        handed = containers(args, kwargs) if own else []
        if own:
            verify_once(handed, len(own))
        then = copies(handed) if own else []
        described, where = blocks.described(block), self._where
        token = taker.set(None)
        try:
            if checkpointed:
                value, made = self._checkpointed(block, traced or call, args, kwargs, follow)
            else:
                self._at(described)
                run = traced or call
                value, made = run(*args, **kwargs) if follow or whole else self._alone(run, args, kwargs), {}
                if own:
                    made, value = changes(handed, then), marked(value, handed)
                    made = {number: content for number, content in made.items() if own[number] is not handed[number]}
            if own:
                change(own, made)
                value = returned(value, own)
            if self.trace is not None:
                self._note(block, traced, (args, kwargs), value)
            if not whole:
                self.values.note_writes()
            return value
        except BaseException as error:
            if not isinstance(error, Stopped):
                self._noted = id(error)
                add_note(error, f"in the forward of {described}, {where}")
            raise
        finally:
            taker.reset(token)
            self._at(_BETWEEN)

    def _at(self, described: str) -> None:
        """Sets what is running, for messages."""
        if self._caller is not None:
            self._caller.where = described, self._where

    def _checkpoints(self) -> bool:
        """True if blocks are checkpointed, except inside torch.utils.checkpoint, which recomputes them itself."""
        return self.i < self.run.call.checkpointed and not is_checkpoint(_top_saved_tensors_default_hooks(True))

    def _traced(self, block: nn.Module, call: Callable[..., Any]) -> TracedBlock | None:
        """The call under a trace, if numbers may be computed in it."""
        trace, tracing = self.trace, self.run.tracing
        if trace is None or tracing is None or not tracing.sees(block):
            return None
        left = list if self._left is None else partial(self._left.tensors, block)
        return TracedBlock(call, trace.facts, partial(tracing.trace, self.i), left)

    def _note(self, block: nn.Module, traced: TracedBlock | None, given: Any, value: Any) -> None:
        """Records what a block's value consists of."""
        assert self.trace is not None and self.run.tracing is not None
        if traced is not None:
            self.run.tracing.seen(block, traced.note(value))
        else:
            with DisableTorchFunction():
                self.trace.facts.returned(value, lambda: self.run.blocks.described(block))
                self.trace.facts.inherit(given, value)

    def _alone(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call that accesses no value of another stage."""
        if _len_torch_function_stack() == 1 and _get_function_stack_at(0) is self._follow:  # The usual case.
            _pop_torch_function_stack()
            try:
                return call(*args, **kwargs)
            finally:
                set_function_modes([self._follow])
        modes = _get_current_function_mode_stack()
        set_function_modes([mode for mode in modes if mode is not self._follow])
        try:
            return call(*args, **kwargs)
        finally:
            set_function_modes(modes)

    def _checkpointed(
        self, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], follow: bool
    ) -> Any:
        return self._alone(self.run.calls.checkpointed, (self, block, call, args, kwargs, follow), {})
