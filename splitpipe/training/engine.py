"""What all calls of a model need, drop-in or scheduled: one call at a time, and the caller's thread-local state."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge
from torch.fx import Proxy

from splitpipe.core import thread_state
from splitpipe.core.phase import is_checkpointing, is_recomputing
from splitpipe.core.thread_state import Hooks, State
from splitpipe.core.torch_private import _disable_dynamo, peek_interpreter_stack
from splitpipe.core.worker import ProcessLock
from splitpipe.deferral.accumulator import Sums
from splitpipe.deferral.stash import Stashes
from splitpipe.deferral.streams import BackwardStreams
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.stage.call import Call
from splitpipe.stage.checkpoint import Frame
from splitpipe.stage.layers import StageLayers
from splitpipe.stage.resources import Resources
from splitpipe.stage.saved import Refill
from splitpipe.training.capture import Capture, ParkedHooks
from splitpipe.training.record import Recorder
from splitpipe.training.sink import DropinSink
from splitpipe.training.step import Trainer

T = TypeVar("T")


class Engine:
    """A model's resources and, with a schedule, its trainer. ``split``: whether to defer weight gradients.

    For these, a stage keeps up to ``stash_limit`` bytes (None: depending on its device).
    """

    def __init__(
        self, resources: Resources, split: bool, stash_limit: int | None, schedule: Schedule | None
    ) -> None:
        self.resources = resources
        self.split = split
        self.trainer = None if schedule is None else Trainer(resources, schedule, split)
        self._stash_limit = stash_limit
        self._lock = ProcessLock()

    def scale(self, state: State, grad_scaler: Any) -> Tensor | None:
        """The scale of a gradient scaler, as a tensor; None without a scaler or a backward."""
        if not state.grad:
            return None
        if grad_scaler is not None and grad_scaler.is_enabled():
            scale: Tensor = grad_scaler.scale(torch.ones((), device=self.resources.devices[-1]))
            return scale
        if any(enabled and dtype is torch.float16 for _, enabled, dtype in state.autocast):
            raise RuntimeError(
                "the model was called under float16 autocast without a grad_scaler: a schedule runs backward inside "
                "the forward, before the loss is scaled, so small gradients would become 0. Expected "
                "SplitPipe(..., grad_scaler=scaler) with the loop's torch.amp.GradScaler, or bfloat16."
            )
        return None

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Records the steps of the block."""
        trainer = self.trainer
        if trainer is None:
            raise RuntimeError(
                "record() needs a model that runs backward itself: expected SplitPipe(..., schedule=..., "
                "loss_fn=criterion). With schedule='gpipe' and a loss_fn, loss = model(x, target=y) can be recorded."
            )
        if trainer.recorder is not None:
            raise RuntimeError("the model is already being recorded: expected one `with model.record()` at a time.")
        trainer.recorder = Recorder(trainer.schedule, self.resources.places)
        try:
            yield trainer.recorder.recording
        finally:
            recorder, trainer.recorder = trainer.recorder, None
            recorder.finish()

    def guarded(self, state: State, call: Callable[[], T], alone: bool = False) -> T:
        """Raises for calls by the model's own layers; with a schedule, or ``alone``, runs one call at a time."""
        if self.resources.at_work_here():
            raise RuntimeError(
                "a SplitPipe was called by one of its layers, inside its own forward: expected layers that call "
                "other modules, since it would wait for itself. (If a layer differentiates in its forward, a "
                "checkpoint around the model calls it again: expected the model's own checkpoint='always' instead.)"
            )
        # The user's function modes see the layers' calls, which workers make, but not the pipeline's own.
        hidden = thread_state.function_modes(state.function_modes, ()) if state.function_modes else nullcontext()
        if self.trainer is None and not alone:
            with hidden:
                return call()
        with hidden, self._lock.lock:
            if self.trainer is not None:
                self.trainer.recover()  # This process may have been forked during another thread's step.
            return call()

    def sinks(self, call: Call, stages: Sequence[Any]) -> list[DropinSink | None]:
        """Where the weight gradients of each stage's blocks go; None if all are left to autograd."""
        # A pipeline inside something that is recomputed must make the same nodes both times; and torch's checkpoint
        # would recompute for each backward that reaches what it has saved.
        inside = is_checkpointing() or is_recomputing() or recomputes(call.state.hooks)
        # A user's modes see the functions that layers call, but not the pipeline's own.
        watched = call.state.observed or call.state.hooks_disabled is not None
        if not self.split or not call.state.grad or inside or watched:
            return [None] * len(self.resources.devices)
        found: list[DropinSink | None] = []
        for own, streams in zip(stages, self._streams(call)):
            found.append(DropinSink(own, Stashes(streams, self._stash_limit, own.names, partial(_views, own))))
        return found

    def _streams(self, call: Call) -> Iterator[BackwardStreams]:
        resources = self.resources
        sides = [None if resources.on_cpu else resources.named(device, "weights") for device in resources.devices]
        return map(BackwardStreams, resources.devices, call.computes, sides)


def _views(
    own: StageLayers, sums: Sums, roots: Sequence[GradientEdge], grads: Sequence[Tensor], leaves: Sequence[Tensor]
) -> None:
    hooks = ParkedHooks(threading.get_ident())
    try:
        Capture(own, hooks).backward_views(sums, roots, grads, leaves)
    finally:
        hooks.put_back()


def inner_state(state: State) -> State:
    """The state in which a scheduled step's layers run."""
    # A checkpoint around the call has nothing to keep, since tensors that layers save are used before it returns. To
    # get them back, its hooks would call the model again, during the model's own call.
    hooks = None if recomputes(state.hooks) else state.hooks
    return state._replace(hooks=hooks)


def recomputes(hooks: Hooks | None) -> bool:
    """True if saved-tensor hooks belong to a checkpoint: torch's, or that of a pipeline around the model."""
    return hooks is not None and getattr(hooks[0], "__module__", None) in (
        "torch.utils.checkpoint", Frame.__module__, Refill.__module__
    )


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function."""
    return function(*arguments)


#: Calls a function that torch.compile can't trace because of its threads; code around it and its layers are traced.
# torch.compiler.disable isn't used: it would load the compiler when this module is imported, which takes seconds.
outside_of_compilers: Callable[..., Any] = _disable_dynamo(called)


_DETACH = "splitpipe.detach(model) returns the plain module"


def refuse_transforms() -> None:
    """Raises inside a torch.func transform, forward-mode AD, a trace or an export, which would be lost."""
    if peek_interpreter_stack() is not None:
        raise RuntimeError(
            "SplitPipe was called inside a torch.func transform (grad, vmap, jvp ...), which doesn't reach its worker "
            f"threads. Use autograd (loss.backward(), torch.autograd.grad), or transform the plain module: {_DETACH}."
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(
            "SplitPipe was called by torch.jit.trace (or torch.onnx.export with dynamo=False), which doesn't see its "
            f"worker threads. Trace the plain module: {_DETACH}."
        )
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "SplitPipe was called inside forward-mode AD (forward_ad.dual_level), but its copies lose tangents. "
            f"Use reverse mode, or call the plain module: {_DETACH}."
        )


def refuse_export(input: object = None) -> None:
    """Raises for an export or a symbolic trace, while code that is traced can still raise."""
    if torch.compiler.is_exporting() or isinstance(input, Proxy):
        raise RuntimeError(
            "SplitPipe was called by torch.export, torch.onnx.export or torch.fx, which don't see its worker "
            f"threads. Export the plain module: {_DETACH}."
        )


def defers(split: bool, schedule: Schedule | None) -> bool:
    """True if weight gradients are ever computed separately from input gradients."""
    return split and (schedule is None or any(op.kind == "W" for row in schedule.rows for op in row))
