"""The forward of a model, drop-in or scheduled, on its threads and streams in this process."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from splitpipe.core import microbatch, thread_state
from splitpipe.core.stream import Place
from splitpipe.core.thread_state import Hooks, State
from splitpipe.core.torch_private import peek_interpreter_stack
from splitpipe.core.worker import ProcessLock
from splitpipe.deferral.mode import Deferring
from splitpipe.deferral.report import DeferralReport, Row, row
from splitpipe.deferral.stash import Stashes
from splitpipe.deferral.streams import BackwardStreams
from splitpipe.dropin.forward import Forward
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.stage.call import Call, begin
from splitpipe.stage.checkpoint import Frame
from splitpipe.stage.layers import ModelLayers, Named
from splitpipe.stage.resources import Resources
from splitpipe.stage.saved import Refill
from splitpipe.stage.stage import Stage
from splitpipe.training.loss import Objective
from splitpipe.training.mean_check import MeanCheck
from splitpipe.training.record import Recorder
from splitpipe.training.step import Trainer

T = TypeVar("T")


class Runtime:
    """Runs one model: each span of layers on its own place, by a schedule if there is one.

    ``split`` defers weight gradients, for which a stage keeps ``stash_limit`` bytes (None: as fits its device).
    """

    def __init__(
        self,
        places: Sequence[Place],
        spans: Sequence[tuple[int, int]],
        split: bool,
        stash_limit: int | None = None,
        schedule: Schedule | None = None,
        batched: Any = None,
    ) -> None:
        self._arguments = places, spans, split, stash_limit, schedule, batched
        self._spans = spans
        self._batched = batched
        self._split = split
        self._stash_limit = stash_limit
        rows = range(len(places)) if schedule is None else schedule.placement
        # With a schedule the loss is the last layer.
        whole = spans if schedule is None else [*spans[:-1], (spans[-1][0], spans[-1][1] + 1)]
        self._resources = Resources(places, whole, rows)
        self._trainer = None if schedule is None else Trainer(self._resources, schedule, split)
        self._mean_check = MeanCheck()
        self._objective: Objective | None = None
        self._lock = ProcessLock()

    def __deepcopy__(self, memo: object) -> Runtime:
        return Runtime(*self._arguments)

    def __reduce__(self) -> tuple[type[Runtime], tuple[Any, ...]]:
        return Runtime, self._arguments

    def forward(self, layers: Sequence[Named], input: Any, chunks: int, uncheckpointed: int | None) -> Any:
        """The output for the batch; the last ``uncheckpointed`` microbatches (None: all) are not checkpointed."""
        state = thread_state.capture()
        resources = self._resources

        def outputs() -> Any:
            found = resources.layers(layers)
            call = self._begin(found, input, chunks, uncheckpointed, state)
            if state.grad and found.sharded:
                resources.verify_groups(found)
            pool = resources.pool(found)
            own = zip(found.stages, resources.caches, self._stashes(call))
            stages = [Stage(part, cache, call, stashes) for part, cache, stashes in own]
            parcels = Forward(call, stages, pool, resources).run()
            call.rejoin()
            whole = microbatch.gather([(call.handed_back(parcel.leaves), parcel.spec) for parcel in parcels])
            resources.settle_rng_modes(call.end())
            return whole

        return self._guarded(state, outputs)

    def train(
        self,
        layers: Sequence[Named],
        input: Any,
        target: Any,
        chunks: int,
        uncheckpointed: int | None,
        loss_fn: Callable[..., Any],
        grad_scaler: Any,
    ) -> Tensor:
        """The loss of the batch, with forward and backward done."""
        trainer, state = self._trainer, thread_state.capture()
        assert trainer is not None
        scale = self._scale(state, grad_scaler) if state.grad else None
        # The mode of an outer model is left out: these layers go backward in this model's own step.
        modes = tuple(mode for mode in state.function_modes if not isinstance(mode, Deferring))
        # A checkpoint around the call has nothing to keep: tensors that layers save are used before it returns. To get
        # them back, its hooks would call the model again, during the model's own call.
        hooks = None if _recomputes(state.hooks) else state.hooks
        inner = state._replace(function_modes=modes, hooks=hooks)

        def loss() -> Tensor:
            objective = self._objective
            if objective is None or objective.loss_fn is not loss_fn:
                objective = self._objective = Objective(loss_fn, self._mean_check)
            else:
                objective.begin()
            found = self._resources.layers([*layers, ("loss_fn", objective)])
            return trainer.train(found, self._begin(found, input, chunks, uncheckpointed, inner), target, scale)

        return self._guarded(state, loss)

    def _scale(self, state: State, grad_scaler: Any) -> Tensor | None:
        if grad_scaler is not None and grad_scaler.is_enabled():
            scale: Tensor = grad_scaler.scale(torch.ones((), device=self._resources.devices[-1]))
            return scale
        if any(enabled and dtype is torch.float16 for _, enabled, dtype in state.autocast):
            raise RuntimeError(
                "the model was called under float16 autocast without a grad_scaler: a schedule goes backward inside "
                "the forward, before the loss is scaled, and small gradients would be 0. Expected "
                "SplitPipe(..., grad_scaler=scaler) with the loop's torch.amp.GradScaler, or bfloat16."
            )
        return None

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Records the steps of the block."""
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError(
                "record() needs a model that goes backward itself: expected SplitPipe(..., schedule=..., "
                "loss_fn=criterion). With schedule='gpipe' and a loss_fn, loss = model(x, target=y) can be recorded."
            )
        if trainer.recorder is not None:
            raise RuntimeError("the model is being recorded already: expected one `with model.record()` at a time.")
        trainer.recorder = Recorder(trainer.schedule, self._resources.places)
        try:
            yield trainer.recorder.recording
        finally:
            recorder, trainer.recorder = trainer.recorder, None
            recorder.finish()

    def _guarded(self, state: State, call: Callable[[], T]) -> T:
        """Refuses calls by the model's own layers; with a schedule, lets one call run at a time."""
        if self._resources.at_work_here():
            raise RuntimeError(
                "a SplitPipe was called by one of its own layers, inside its own forward: expected layers that call "
                "other modules. It would wait for itself. (Where a layer differentiates in its forward, a checkpoint "
                "around the model calls it again: expected none, and checkpoint='always' of the model's own.)"
            )
        # The user's function modes see the layers' calls, made in the workers, and none of the pipeline's own.
        hidden = thread_state.function_modes(state.function_modes, ()) if state.function_modes else nullcontext()
        if self._trainer is None:
            with hidden:
                return call()
        with hidden, self._lock.lock:
            self._trainer.recover()  # A child may have been forked during another thread's step.
            return call()

    def _begin(
        self, layers: ModelLayers, input: Any, chunks: int, uncheckpointed: int | None, state: State
    ) -> Call:
        resources = self._resources
        computes, callers = resources.streams(layers)
        return begin(
            input,
            chunks,
            uncheckpointed,
            state,
            batched=self._batched,
            devices=resources.devices,
            computes=computes,
            callers=callers,
            collects=layers.collects,
        )

    def _stashes(self, call: Call) -> list[Stashes | None]:
        """The stashes in which the weight gradients of each stage wait."""
        resources = self._resources
        if not self._split or not call.state.grad:
            return [None] * len(resources.devices)
        sides = [None if resources.on_cpu else resources.named(device, "weights") for device in resources.devices]
        streams = map(BackwardStreams, resources.devices, call.computes, sides)
        return [Stashes(each, self._stash_limit) for each in streams]

    def report(self, layers: Sequence[Named]) -> DeferralReport:
        """The report on deferral, from the uses of parameters that the stages' forwards have shown."""
        rows: list[Row] = []
        seen: set[int] = set()
        for stage, (start, end) in enumerate(self._spans):
            cache = self._resources.caches[stage]
            unseen = "no function was seen to use it in a forward with grad mode (compiled code isn't seen)"
            if not self._split:
                unseen = "backward='autograd'"
            elif not any(facts.noted for facts in cache.facts.values()):
                unseen = "not known yet: run a step first"
            for name, layer in layers[start:end]:
                for own, parameter in layer.named_parameters(name):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        rows.append(row(own, stage, parameter, cache.sightings.find(parameter), unseen))
        return DeferralReport(tuple(rows))


def _recomputes(hooks: Hooks | None) -> bool:
    """True if saved-tensor hooks belong to a checkpoint: torch's, or that of a pipeline around the model."""
    return hooks is not None and getattr(hooks[0], "__module__", None) in (
        "torch.utils.checkpoint", Frame.__module__, Refill.__module__
    )


def refuse_transforms() -> None:
    """Refuses to be called where a transform of torch.func, forward-mode AD or a trace would be lost."""
    if peek_interpreter_stack() is not None:
        raise RuntimeError(
            "SplitPipe was called inside a torch.func transform (grad, vmap, jvp ...), which does not reach its worker "
            "threads. Use autograd (loss.backward(), torch.autograd.grad), or transform nn.Sequential(*model)."
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(
            "SplitPipe was called by torch.jit.trace (or torch.onnx.export with dynamo=False), which does not see what "
            "its worker threads do. Trace nn.Sequential(*model)."
        )
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "SplitPipe was called inside forward-mode AD (forward_ad.dual_level), whose tangents its copies lose. "
            "Use reverse mode, or call nn.Sequential(*model)."
        )
