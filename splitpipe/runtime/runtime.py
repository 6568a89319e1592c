"""A call of a pipelined module, from its arguments to the output or the loss.

    the stages' layers ── divide the batch ── call ─── a forward for each microbatch ── rows of ops ── end
                                                                                     │
                                              drop-in: outputs, in the outer graph ──┤
                                              scheduled: the loss, with gradients ───┘

Here, the module is an nn.Sequential; what any other one does differently is in ``module``.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.backward.report import DeferralReport, report
from splitpipe.backward.split_backward import LeafHooks
from splitpipe.checks import UNCHECKPOINTED_TAIL, Checkpoint, verify_ungathered
from splitpipe.compiled.backend import CompileOptions
from splitpipe.compiled.layers import Compiler, is_compiled
from splitpipe.core import thread_state
from splitpipe.core.note import add_note
from splitpipe.core.stream import Place
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Resources
from splitpipe.engine.drop_in import Output, attach_outputs
from splitpipe.engine.record import Recordings
from splitpipe.engine.rows import OpRows, forward_rows, schedule_rows
from splitpipe.engine.scheduled_step import ScheduledStep
from splitpipe.engine.sequential import SequentialForward
from splitpipe.engine.step import StepRun
from splitpipe.engine.stitched.forward import StitchedForward
from splitpipe.loss.numbers import Reducer
from splitpipe.loss.objective import TARGET, BatchLoss, Objective
from splitpipe.microbatch.custom_split import CustomSplit, Split
from splitpipe.microbatch.division import Divider, Division, move, read_input
from splitpipe.microbatch.gather import gather
from splitpipe.microbatch.tree import unflatten
from splitpipe.partition.attributes import warn_of_losses
from splitpipe.partition.placement import by_stage
from splitpipe.partition.resident import verify_untransformed
from splitpipe.schedule.op import Schedule, counted
from splitpipe.stage.call import Activation, Call
from splitpipe.stage.layers import ModelLayers, Named, StageLayers
from splitpipe.stage.segment import RunningStage


class Options(NamedTuple):
    """How a module is run, as SplitPipe and attach resolve their arguments."""

    balance: tuple[int, ...]  #: Of an nn.Sequential. Any other module has cuts.
    cuts: tuple[str, ...]
    places: tuple[Place, ...]
    chunks: int
    checkpoint: Checkpoint
    split_backward: bool
    stash_limit: int | None
    schedule: Schedule | None
    batched: Any
    reduction: Any
    loss_fn: Callable[..., Any] | None
    grad_scaler: Any
    compiling: CompileOptions | None
    split: Split | None


class Batch(NamedTuple):
    """What a module was called with; ``unsplit``: as one microbatch; ``kind``: equal for calls that return the like."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    unsplit: bool = False
    labels: bool = False  #: Whether there are any among its arguments.
    kind: Any = None


class Runtime:
    """Runs an nn.Sequential, one call at a time: another thread's waits until the forward has returned."""

    own_forward = False  #: Whether a microbatch runs through the module's own forward, rather than layer by layer.
    named_dims: Sequence[int] = ()  #: Those that ``batched`` names, even of a state that is None at first.
    called: Sequence[Any] = ()  #: With cuts, the modules that each stage has called.
    #: Whether one worker runs all rows, in which ops of other microbatches surely come between two stages of one.
    one_worker: bool = False

    def __init__(self, options: Options, divider: Divider | None = None) -> None:
        self.options = options
        self._resources = Resources(options.places)
        self.recordings = Recordings(options.schedule, options.places)
        self._compiler = Compiler(options.compiling, options.split_backward)
        self._said, self._hooks = set[str](), LeafHooks()  #: ``_said``: of which losses was warned.
        self._objective = None if options.loss_fn is None else Objective(options.loss_fn, options.reduction, self._said)
        self._rows: Callable[..., OpRows] = lru_cache(None)(partial(schedule_rows, options.schedule))  # type: ignore
        #: Whether the model draws from the CPU's generator, as calls of each kind have shown.
        self.draws: dict[Any, bool] = {}
        self._known: ModelLayers | None = None  # The layers for a key, if they may be used again.
        self._key: tuple[Any, ...] = ()
        self._last: list[StageLayers] = []  # Those of the last call with grad mode.
        if divider is None:
            divider = Divider(partial(read_input, flags=options.batched[0]), options.batched[1], options.chunks)
        self.divider: Divider | CustomSplit = divider
        if options.split is not None:
            self.divider = CustomSplit(divider, options.split, options.chunks, options.schedule is not None)

    def __reduce__(self) -> tuple[type[Runtime], tuple[Any, ...]]:
        return Runtime, (self.options,)

    def batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> Batch:
        """What the module was called with."""
        return Batch(module, args, kwargs, target)

    def run(self, batch: Batch) -> Any:
        """The output; given a target, the loss; with a schedule and the module's own loss, the output with it."""
        verify_untransformed()
        self._resources.refuse_own_threads()
        with self._resources.lock:
            state, options = thread_state.capture(), self.options
            own_loss = options.schedule is not None and options.loss_fn is None and batch.module.training and state.grad
            drop_in, loss = batch.target is None and not own_loss, None
            scale = None if drop_in else self._begin_scheduled(batch, state)
            if drop_in and not options.split_backward and any([enabled for _, enabled, _ in state.autocast]):
                # In one graph, microbatches that shared a weight's cast would add up its gradient in low precision.
                state = state._replace(autocast_cache=False)
            step, target = self._begin(batch, state, drop_in)
            call = step.call
            try:
                targets = [None] * call.microbatches if target is None else call.scatter(target, TARGET, detached=True)
                self._begin_forwards(batch, step, targets)
                forwards = step.forwards
                if drop_in:
                    step.run_rows(forward_rows(call.microbatches, step.workers))
                    outputs = attach_outputs(step, [forward.output for forward in forwards])
                    call.rejoin()
                else:
                    loss = self._loss(step, target, scale)
                    outputs = [forward.output for forward in forwards]
                if step.shared is not None:
                    step.shared.verify()
            except Exception as error:
                for lines in [division.described() for division in (call.input, target) if division is not None]:
                    if lines:
                        add_note(error, "\n    ".join(lines))
                raise
            return self._end(batch, step, outputs, loss)

    def _begin_scheduled(self, batch: Batch, state: State) -> Tensor | None:
        """Raises for what a schedule can't compute; returns the scale of the gradient scaler, if there is one."""
        scaler = self.options.grad_scaler
        if batch.target is not None and self._objective is None:
            raise ValueError(
                "a target was given, but there's no loss_fn to take it. For a second input, expected model((x, mask)), "
                "one tuple, which the layers take; for a target, SplitPipe(..., schedule='1f1b', loss_fn=criterion)."
            )
        if not state.grad:
            return None
        if scaler is not None and scaler.is_enabled():
            return scaler.scale(torch.ones((), device=self._resources.devices[-1]))  # type: ignore[no-any-return]
        if any(enabled and dtype is torch.float16 for _, enabled, dtype in state.autocast):
            raise RuntimeError(
                "the model was called under float16 autocast without a grad_scaler: a schedule runs backward before "
                "the loss is scaled, so small gradients would become 0. Expected SplitPipe(..., grad_scaler=scaler) "
                "with the loop's torch.amp.GradScaler, or bfloat16."
            )
        return None

    def _loss(self, step: StepRun, target: Division | None, scale: Tensor | None) -> Tensor:
        """The loss of the batch, whose backward hands the gradients over."""
        call, own = step.call, BatchLoss(step.call.input.rows, self.options.reduction, self._said)
        batch_loss = own if target is None or self._objective is None else self._objective.batch_loss
        rows = self._rows(step.workers, call.microbatches, call.state.grad, call.recomputed)
        loss = ScheduledStep(step, target, scale, batch_loss).run(rows)
        if step.recorder is not None:
            step.recorder.end(step.traces)
        return loss

    def _end(self, batch: Batch, step: StepRun, outputs: Sequence[Output], loss: Tensor | None) -> Any:
        """Ends a call that completed; returns the loss of a target, or the output, with the module's own ``loss``."""
        call, rows, reduction, reducer, value = step.call, step.call.input.rows, self.options.reduction, None, loss
        if batch.target is None:
            for output in outputs if loss is not None else ():
                output.leaves[output.place] = loss
            values = [unflatten(output.leaves, output.nesting) for output in outputs]
            if self.own_forward or reduction is not None:
                reducer = Reducer(reduction, [output.numbers for output in outputs], self._said)
            along = sorted({dim for dim in (*call.input.dims, *self.named_dims) if dim is not None}) or [0]
            value = values[0] if self.own_forward and len(rows) == 1 else gather(values, rows, along, reducer)
        if call.state.grad and self._known is not None:
            self._last = [stage.own for stage in step.stages]
        call.end()
        if not self.own_forward and call.first and call.state.grad and call.microbatches > 1:
            warn_of_losses(batch.module)
        return value

    def _begin(self, batch: Batch, state: State, drop_in: bool) -> tuple[StepRun, Division | None]:
        """The step of a call, and the target."""
        resources, options, training = self._resources, self.options, batch.module.training
        objective, layers = None if batch.target is None else self._objective, self._known
        anew = layers is None or not layers.same()
        if layers is None or anew or self._key != (objective, *map(len, self.called)):
            verify_ungathered(batch.module)
            layers = self._layers(batch.module, objective, anew)
            self._key = objective, *map(len, self.called)
            self._known = None if layers.computed else layers
            if objective is not None:
                objective.compiled = is_compiled(objective.loss_fn)
        if layers.computed and state.grad and (options.split_backward or not drop_in):
            raise RuntimeError(
                f"{layers.computed[0]!r} is computed from other tensors (as by torch.func.functional_call), to which "
                "each microbatch would run backward: expected backward='autograd', checkpoint='never' and no schedule."
            )
        division, target = self.divider.divide(batch.args, batch.kwargs, batch.target, batch.unsplit)
        microbatches = len(division.rows)
        tail = UNCHECKPOINTED_TAIL[options.checkpoint] if training and state.grad else None
        checkpointed = 0 if tail is None else max(0, microbatches - tail)
        kind = training, state.grad, microbatches > 1
        call = Call(division, options.places, state, checkpointed, self.own_forward, self.draws, kind)
        sharded = any([isinstance(x, Tensor) and hasattr(x, "full_tensor") for x in call.leaves])  # A DTensor.
        odd = thread_state.is_odd() or layers.odd or call.watched or sharded
        if target is not None and self._objective is not None:
            target = move(target, resources.devices[-1:], call.unread)
            self._objective.begin(division.rows, division.dims, target.dims)
            odd = odd or self._objective.compiled
        # Forwards that stay on their threads' stacks need one each, next to those of the workers.
        workers = (0,) * len(layers.workers) if self.one_worker else layers.workers
        pool = None if odd else resources.pool(workers, microbatches if self.own_forward else 0)
        sides = resources.named if drop_in else None
        stages = [RunningStage(own, call, options.stash_limit, sides, layers.names) for own in layers.stages]
        # Another thread may begin or end a recording: a step has the same one from start to end.
        recorder = self.recordings.current if state.grad and not drop_in else None
        return StepRun(
            call, stages, pool, workers, resources.routes((*call.computes,)), drop_in=drop_in,
            split=options.split_backward and state.grad, hooks=self._hooks, launching=resources.launching,
            recorder=recorder,
            traces=() if recorder is None else recorder.begin(stages),
        ), target

    def _layers(self, module: nn.Module, objective: Objective | None, anew: bool) -> ModelLayers:
        """The layers of all stages, and the loss; ``anew``: the module may have other parts than before."""
        stages = self._stages(module)
        self._compiler.compile(layer for stage in stages for _, layer in stage)
        return ModelLayers(module, stages, self.options.places, self.options.schedule, objective)

    def _stages(self, module: nn.Module) -> list[list[Named]]:
        layers = [(name, layer) for name, layer in module._modules.items() if layer is not None]
        balance = [*self.options.balance]
        if len(layers) != sum(balance):
            raise RuntimeError(
                f"the model has {counted(len(layers), 'layer')} now, but balance {balance} was given for "
                f"{sum(balance)}. Layers may be replaced; to add or remove some, build a new SplitPipe."
            )
        return by_stage(layers, balance)

    def _begin_forwards(self, batch: Batch, step: StepRun, targets: Sequence[Activation | None]) -> None:
        """Gives a step its forwards, with their targets."""
        call, stitched, streams = step.call, step.drop_in and not self.options.split_backward, self._resources.named
        step.forwards = [
            StitchedForward(step, i, part, streams) if stitched else SequentialForward(step, i, part, target)
            for i, (part, target) in enumerate(zip(call.scatter(call.input, detached=not stitched), targets))
        ]

    def _stages_of(self, module: nn.Module) -> Mapping[nn.Module, int]:
        """The stages of modules, as far as they are known."""
        stages = [*enumerate(self._stages(module))]
        return {part: j for j, stage in reversed(stages) for _, layer in stage for part in layer.modules()}

    def report(self, module: nn.Module) -> DeferralReport:
        """The report on deferral, from the steps so far."""
        stage_of = self._stages_of(module)
        parameters = [
            (f"{prefix}.{name}".strip("."), stage_of.get(part, 0), x) for prefix, part in module.named_modules()
            for name, x in part._parameters.items() if x is not None
        ]
        return report(parameters, {stage.index: stage.uses for stage in self._last}, self.options.split_backward)
