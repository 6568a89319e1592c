"""The forward of a model, drop-in or scheduled, on what it has in its own process."""
from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from splitpipe.core import microbatch, thread_state
from splitpipe.core.stream import Place, Stream
from splitpipe.core.thread_state import Hooks
from splitpipe.deferral.mode import Deferring
from splitpipe.deferral.report import DeferralReport, Row, row
from splitpipe.deferral.stash import Stashes
from splitpipe.deferral.streams import Lane
from splitpipe.dropin.forward import Pass
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.stage.call import Setting
from splitpipe.stage.checkpoint import Frame
from splitpipe.stage.resources import Named, Resources
from splitpipe.training.loss import Objective
from splitpipe.training.record import Recorder
from splitpipe.training.rowmean import Sightings
from splitpipe.training.step import Trainer

T = TypeVar("T")

#: The models that a context is inside of. One that is run by its own layer would wait for itself.
_inside: ContextVar[tuple[object, ...]] = ContextVar("splitpipe.runtime", default=())


class Runtime:
    """Runs one model.

    Args:
        places: of the stages.
        spans: first layer of each stage, and the one after its last.
        split: whether weight gradients are deferred.
        stash_limit: how many bytes a stage holds back for them; None: as fits its device.
        schedule: with forward and backward in turn; None if there is none.
        batched: what of the input is cut, as of ``batched.verify_batched``.
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
        self._batched = batched
        self._split = split
        self._stash_limit = stash_limit
        rows = range(len(places)) if schedule is None else schedule.placement
        self._resources = Resources(places, spans, rows)
        self._trainer = None if schedule is None else Trainer(self._resources, schedule, split)
        self._sightings = Sightings()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __deepcopy__(self, memo: object) -> Runtime:
        return Runtime(*self._arguments)

    def __reduce__(self) -> tuple[type[Runtime], tuple[Any, ...]]:
        return Runtime, self._arguments

    def forward(self, layers: Sequence[Named], input: Any, chunks: int, spared: int | None) -> Any:
        """The output of the layers for the batch.

        Args:
            layers: name and module of every layer.
            input: the batch.
            chunks: number of microbatches, at most.
            spared: how many of the last microbatches are not checkpointed; None spares all.
        """
        state = thread_state.capture()
        # The user's function modes see the layers' calls, made in the workers, and none of the pipeline's own.
        with thread_state.function_modes(state.function_modes, ()):
            return self._alone(
                lambda: self._forward(
                    layers, Setting(input, chunks, spared, self._resources.places, state, self._batched)
                )
            )

    def train(
        self,
        layers: Sequence[Named],
        input: Any,
        target: Any,
        chunks: int,
        spared: int | None,
        loss_fn: Callable[..., Any],
        grad_scaler: Any,
    ) -> Tensor:
        """The loss of the layers for the batch, with forward and backward done; see ``forward``.

        Args:
            layers: name and module of every layer.
            input: the batch.
            target: of the batch.
            chunks: number of microbatches, at most.
            spared: how many of the last microbatches are not checkpointed; None spares all.
            loss_fn: called with a microbatch's output and target.
            grad_scaler: whose scale the gradients are computed with; or None.
        """
        assert self._trainer is not None
        state = thread_state.capture()
        # A model whose layer this one is does not go on to these layers: what they compute, they go backward through.
        modes = tuple(mode for mode in state.function_modes if not isinstance(mode, Deferring))
        places, scale = self._resources.places, None
        if state.grad:
            if grad_scaler is not None and grad_scaler.is_enabled():
                scale = grad_scaler.scale(torch.ones((), device=places[-1].device))
            elif any(enabled and dtype is torch.float16 for _, enabled, dtype in state.autocast):
                raise RuntimeError(
                    "the model was called under float16 autocast without a grad_scaler: a schedule goes backward "
                    "inside the forward, before the loss is scaled, and small gradients would be 0. Expected "
                    "SplitPipe(..., grad_scaler=scaler) with the loop's torch.amp.GradScaler, or bfloat16."
                )
        trainer = self._trainer
        # A checkpoint around the call has nothing to keep: what the layers save is used before it returns. Its hooks
        # would have it back by calling the model again, in the midst of the model's own pass.
        hooks = None if _recomputes(state.hooks) else state.hooks
        inner = replace(state, function_modes=modes, hooks=hooks)

        def train() -> Tensor:
            setting = Setting(input, chunks, spared, places, inner, self._batched)
            objective = Objective(loss_fn, self._sightings)
            return trainer.train(layers, objective, target, setting, scale)

        with thread_state.function_modes(state.function_modes, ()):
            return self._alone(train)

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
            recorder.develop()

    def _alone(self, call: Callable[[], T]) -> T:
        """One pass at a time, where a pass goes backward itself."""
        if self._trainer is None:
            return call()
        if self in _inside.get():
            raise RuntimeError(
                "a SplitPipe with a schedule was called by one of its own layers, inside its own forward: expected "
                "layers that call other modules. It would wait for itself."
            )
        if self._pid != os.getpid():  # A fork has copied a lock that a thread of its parent's may have held.
            self._pid, self._lock = os.getpid(), threading.Lock()
            self._trainer.recover()
        with self._lock:
            return contextvars.copy_context().run(self._entered, call)

    def _entered(self, call: Callable[[], T]) -> T:
        _inside.set((*_inside.get(), self))
        return call()

    def _forward(self, layers: Sequence[Named], setting: Setting) -> Any:
        resources = self._resources
        if setting.state.grad:
            resources.verify_groups(layers)
        pool = resources.pool(layers)
        computes = resources.computes()
        deposits = [self._stashes(place.device, compute) for place, compute in zip(resources.places, computes)]
        stages = resources.stages(resources.cut(layers), computes, deposits, setting.stop > 0)
        microbatches = setting.begin(computes)
        run = Pass(
            stages=stages,
            workers=resources.workers,
            pool=pool,
            named=resources.stream,
            state=setting.state,
            seeds=setting.seeds,
            stop=setting.stop,
            batch=setting.batch,
        )
        outputs = run.run(microbatches, setting.variables)
        setting.rejoin()
        whole = microbatch.gather([(setting.handed_back(parcel.leaves), parcel.spec) for parcel in outputs])
        if not setting.end():
            resources.forget_rng_modes()
        return whole

    def report(self, layers: Sequence[Named]) -> DeferralReport:
        """What the stages' forwards have shown of their parameters."""
        rows: list[Row] = []
        seen: set[int] = set()
        for stage, part in enumerate(self._resources.cut(layers)):
            for name, layer in part:
                for own, parameter in layer.named_parameters(name):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        rows.append(row(own, stage, parameter, self._sighting(stage, parameter), self._unseen()))
        return DeferralReport(tuple(rows))

    def _sighting(self, stage: int, parameter: Tensor) -> Any:
        return self._resources.memories[stage].sightings.find(parameter)

    def _unseen(self) -> str:
        if not self._split:
            return "backward='autograd'"
        return "no function was seen to use it in a forward with grad mode (compiled code isn't seen)"

    def _stashes(self, device: torch.device, compute: Stream) -> Stashes | None:
        if not self._split or not torch.is_grad_enabled():
            return None
        return Stashes(Lane(device, compute, self._resources.stream(device, "weights")), self._stash_limit)


def _recomputes(hooks: Hooks | None) -> bool:
    """Whether saved-tensor hooks are those of a checkpoint: torch's, or that of a pipeline around the model."""
    return hooks is not None and getattr(hooks[0], "__module__", None) in ("torch.utils.checkpoint", Frame.__module__)


def refuse_transforms() -> None:
    """Refuses to be called where a transform of torch.func or forward-mode AD would be lost."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "SplitPipe was called inside a torch.func transform (grad, vmap, jvp ...), which does not reach its worker "
            "threads. Use autograd (loss.backward(), torch.autograd.grad), or transform nn.Sequential(*model)."
        )
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "SplitPipe was called inside forward-mode AD (forward_ad.dual_level), whose tangents its copies lose. "
            "Use reverse mode, or call nn.Sequential(*model)."
        )
