"""Calls of any module through its forward, drop-in or scheduled."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from splitpipe.batch import arguments, outputs
from splitpipe.batch.division import Division, absent
from splitpipe.batch.outputs import Joiner
from splitpipe.compiled.theirs import user_compiled
from splitpipe.core import thread_state
from splitpipe.core.note import add_note
from splitpipe.core.torch_private import tree_map_only
from splitpipe.core.worker import Pool
from splitpipe.deferral.pending import PendingStore
from splitpipe.deferral.report import DeferralReport
from splitpipe.engine.code import CodeForward
from splitpipe.engine.dropin import CodeDropinWork
from splitpipe.engine.nodes import BlockNodes
from splitpipe.engine.parts import Cutting
from splitpipe.engine.run import CodeRun
from splitpipe.engine.scheduled import CodeStep, with_loss
from splitpipe.loss.reducing import AS_FUNCTION, Reducer
from splitpipe.loss.terms import SUM, Number, Term, Unknown, not_understood
from splitpipe.loss.tracing import Numbers, Tracing
from splitpipe.partition.attributes import Attributes, noted
from splitpipe.partition.blocks import Blocks, device_map
from splitpipe.partition.call_hook import surround
from splitpipe.partition.homes import Homes, buffer_versions, rehearse
from splitpipe.runtime.base import Runtime, forgetting, inner_state
from splitpipe.runtime.options import Options
from splitpipe.runtime.report import report
from splitpipe.stage.call import Call
from splitpipe.stage.layers import ModelLayers, StageCache, code_layers
from splitpipe.stage.stage import Stage
from splitpipe.training.loss import Losses


class CodeRuntime(Runtime):
    """Runs one module, each stage on its place, scheduled or drop-in."""

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, options: Options) -> None:
        super().__init__(options)
        self._module_of = weakref.ref(module)  # The module refers to this, as its forward.
        #: The instance's previous forward, if it had one.
        self.own = own
        self._homes = Homes(options.places, module)
        self.stage_of = self._homes.stage_of  #: The stage of each module that was called.
        self.mapped = 0  #: How many there were when ``hf_device_map`` was written.
        self._numbers = Numbers()
        self.signature = arguments.parameters_of(self._forward)
        limit = None if options.schedule is None else options.chunks
        self._divider = arguments.Divider(self.signature, options.batched, options.splitting, options.chunks, limit)
        #: The module's layers, how many modules each stage had called, and whether the user has compiled a part.
        self._known: tuple[ModelLayers, list[int], bool] | None = None
        self.attributes = Attributes()  #: What modules may not keep in attributes.
        self._versions: dict[nn.Module, list[tuple[Tensor, int | None]]] = {}  # From before the first call.
        self._joiner = Joiner()
        self._writes: dict[Any, bool] = {}  # By kind of call, if there is one device; see Cutting.
        self._block_caches: WeakKeyDictionary[nn.Module, dict[int, StageCache]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[CodeRuntime], tuple[Any, ...]]:
        return CodeRuntime, (self.module, self.own, self.options)

    @property
    def module(self) -> nn.Module:
        """The module that is run."""
        module = self._module_of()
        if module is None:
            raise ReferenceError("the module of this forward is gone: expected it to be kept alive while it is called.")
        return module

    @property
    def _forward(self) -> Callable[..., Any]:
        return type(self.module).forward.__get__(self.module) if self.own is None else self.own

    def device_map(self) -> dict[str, torch.device]:
        """The devices of blocks by name; before the first call, a guess from the order of definition."""
        blocks = Blocks(self.module, self.options.cuts)
        return device_map(blocks, self.stage_of, self._resources.devices, self._homes.complete)

    def place(self, sample: Any) -> None:
        """Gives parameters their homes by a call with one row of a sample, which leaves no other trace."""
        rehearse(self._placed, self.module, sample, self._resources.devices, self._divider.sample)

    def _placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = thread_state.capture()
        return self._guarded(state, partial(self._outputs, args, kwargs, state, whole=True), alone=True)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> Any:
        """The module's output for the batch; with a schedule, the loss for a target, or the output with its loss."""
        state = thread_state.capture()
        own_loss = self.options.schedule is not None and self.options.loss_fn is None
        if target is not None or own_loss and self.module.training and state.grad:
            call = partial(self._train, args, kwargs, target, state)
        else:
            call = partial(self._outputs, args, kwargs, state)
        return self._guarded(state, call, alone=True)

    # Common to both.

    def _divided(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, state: thread_state.State, blocks: Blocks
    ) -> tuple[Division, Division | None]:
        """The arguments and the target, divided into microbatches."""
        training = self.module.training
        kwargs = self._divider.without_cache(args, kwargs, blocks.opened, training and state.grad)
        return self._divider.divided(args, kwargs, target, training, self._separable)

    def _separable(self, division: Division) -> bool:
        """True if the outputs of microbatches make that of the batch, judging by runs of two rows and of each."""
        traces: list[Any] = []
        some = (0, 1), (1, 1), (0, 2)
        found = [self._rehearsed(division, rows, noted(self.module, traces), start) for start, rows in some]
        if not all([trace == traces[0] and trace[1] for trace in traces]):
            return False  # It keeps values of the whole batch from call to call.
        one, other, two = found
        return one is not None and other is not None and two is not None and outputs.separable(*one, *other, *two)

    def _begin(self, input: Division, state: thread_state.State, layers: ModelLayers) -> Call:
        return self._call(input, state, layers, self.module.training, anywhere=True)

    def _prepare(self, blocks: Blocks) -> None:
        if not self._homes.trained and not self._versions:
            self._versions = {part: buffer_versions(part) for part in blocks.opened}
        self._compiler.compile(blocks.blocks)
        if self._known is not None and not self._known[0].structure.same():
            self._known = None
            self.attributes.restructured()
        if self._known is None:
            self._homes.restructured()
        several, compiled = self._homes.several, user_compiled(self.module) if self._known is None else self._known[2]
        for part in (*blocks.blocks, *blocks.opened):
            inside = part in blocks.blocks
            surround(part, compiled and inside).arriving = self._homes.brought if several and inside else None
        self._homes.gather()

    def _model_layers(self, blocks: Blocks) -> ModelLayers:
        """The module's layers; if modules or parameters have changed, they are looked up again."""
        called, known = [len(each) for each in self._homes.called], self._known
        if known is not None and known[1] == called and self._homes.complete:
            layers = known[0]
        else:
            layers = code_layers(blocks, self._homes, self.options.places)
            self._known = (layers, called, user_compiled(self.module)) if layers.lasting else None
        self._homes.forget_all_but(layers.stages[0].identities)
        return layers

    def _threads_for(self, layers: ModelLayers, call: Call) -> Pool:
        """A pool with as many threads as the call may need."""
        self._resources.find_workers(layers)
        scheduled = self.options.schedule is not None
        return self._resources.pool(layers, len(call.rows) + scheduled * max(self._resources.workers))

    def _stage(self, call: Call, layers: ModelLayers, j: int, pending: PendingStore | None) -> Stage:
        modes = self.module.training, *layers.structure.modes()
        return Stage(layers.stages[j], self._resources.caches[j], call, modes, pending, layers.compiled)

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: bool, grad: bool) -> Any:
        """A key that is equal for calls of which either all or none return numbers."""
        given = [name for name, value in arguments.pairs(self.signature, args, kwargs) if value is not None]
        return self.module.training, grad, target, tuple(given)

    def _tracing(self, kind: Any, call: Call) -> Tracing | None:
        """How to trace the call's forwards; None if the trace would not be used."""
        if self.options.reduction is not None:
            return None
        return self._numbers.begin(kind, call.input)

    def _run(
        self, call: Call, blocks: Blocks, layers: ModelLayers, tracing: Tracing | None, stages: list[Stage],
        scheduled: bool, parts: bool = False,
    ) -> CodeRun:
        return CodeRun(
            call, stages, self._forward, blocks, self._homes,
            ranked=not scheduled and call.state.grad,
            in_turn=self._in_turn(call),
            one_graph=not scheduled and not parts and not self._homes.several,
            calls=BlockNodes(call, stages, layers, self._block_cache),
            tracing=tracing,
            attributes=self.attributes,
            structure=layers.structure,
        )

    def _block_cache(self, block: nn.Module, stage: int) -> StageCache:
        of_block = self._block_caches.setdefault(block, {})
        found = of_block.get(stage)
        if found is None:
            shared = self._resources.caches[stage].sightings
            found = of_block[stage] = StageCache(sightings=shared)
            self._resources.block_caches.add(found)
        return found

    def _watches(self, call: Call) -> tuple[list[int], bool]:
        return [count for _, count in call.rows], self.module.training and call.state.grad

    def _in_turn(self, call: Call) -> bool:
        """Whether ops must run one after another."""
        return self._homes.in_turn or self.attributes.watches(*self._watches(call))

    @contextmanager
    def _watched(self, call: Call) -> Iterator[None]:
        """Watches what microbatches leave in the module's attributes, and adds a hint to their errors."""
        try:
            with self.attributes.watched(self.module, *self._watches(call)):
                yield
        except Exception as error:
            if call.input.hint and len(call.rows) > 1:
                add_note(error, call.input.hint)
            raise

    def _ended(self) -> None:
        """Ends a call that completed."""
        if not self._homes.trained and self.module.training:
            Blocks(self.module, self.options.cuts).warn_uncalled(self._homes.called)
        self._homes.note_writes(self._versions)
        self._versions = {}
        self._homes.complete, self._homes.trained = True, self._homes.trained or self.module.training

    # Drop-in.

    def _outputs(self, args: Any, kwargs: dict[str, Any], state: thread_state.State, whole: bool = False) -> Any:
        """The output; ``whole``: as a single microbatch."""
        blocks = Blocks(self.module, self.options.cuts)
        if whole:
            division = self._divider.whole(args, kwargs)
        else:
            division, _ = self._divided(args, kwargs, None, state, blocks)
        self._prepare(blocks)
        layers = self._model_layers(blocks)
        call = self._begin(division, state, layers)
        threads = self._threads_for(layers, call)
        stages = self._stages(call, layers)
        kind = self._kind(args, kwargs, False, state.grad)
        cutting = Cutting(stages[0].sink is not None, self._homes.several, self._writes, kind)
        run = self._run(
            call, blocks, layers, self._tracing(kind, call), stages, scheduled=False, parts=cutting.known
        )
        work = CodeDropinWork(run, cutting, self._resources.routes(call.computes), self._homes)
        for i, activation in enumerate(call.cut(call.input, 0)):
            work.forwards.append(CodeForward(run, i, activation, work))
        found, numbers = self._found(work, threads, self._watched(call))
        if len(work.forwards) > 1:
            self._numbers.end(kind, any(isinstance(x, Tensor) and not x.dim() for x in found[0][0]) or any(numbers))
        run.verify_copies()
        try:
            output = self._joined(call, found, Reducer(self.options.reduction, numbers, self._told))
        except outputs.Inseparable:
            self._divider.joins(division, False)
            return self._outputs(args, kwargs, state, whole=True)
        self._resources.settle_rng_modes(call.end())
        self._ended()
        if not whole:
            self.attributes.settle(division, self._rehearsed)
        return output

    def _joined(self, call: Call, found: list[tuple[list[Any], Any]], reducer: Reducer) -> Any:
        """The outputs of all microbatches, joined."""
        rows = [count for _, count in call.rows]
        again, exact = partial(self._rehearsed, call.input), not self.module.training
        return self._joiner.joined(found, rows, reducer, again, call.input.kind() if len(rows) > 1 else "", exact)

    def _rehearsed(
        self, division: Division, rows: int, inside: AbstractContextManager[None] | None = None, start: int = 0
    ) -> tuple[Any] | None:
        """The output for some rows of a call, from ``start``; None if the module can't be run on that few."""
        if division.some is None:
            return None
        # It may be written to.
        args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), division.some(start, rows))
        output = lambda: self._outputs(args, kwargs, thread_state.capture(), whole=True)  # noqa: E731
        return self._tried(self.module, output, inside)

    def _losses(self, value: Tensor, made: Number | Unknown | None) -> Losses:
        """The module's own loss of a microbatch."""
        if self.options.reduction == "sum":
            made = Number((Term(value, SUM),))
        where = not_understood(made)
        if where:
            self._told.warn(where, AS_FUNCTION)
        return Losses(value, made or Unknown(""))

    # With a schedule.

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, state: thread_state.State) -> Any:
        trainer, options = self._step_trainer(), self.options
        if target is not None and options.loss_fn is None:
            raise ValueError(
                "target= was given, but the model has no loss_fn to pass it to: expected SplitPipe(..., "
                "loss_fn=criterion), or labels for the module's own loss."
            )
        scale, inner = self._scale(state, options.grad_scaler), inner_state(state)
        blocks = Blocks(self.module, self.options.cuts)
        division, targets = self._divided(args, kwargs, target, inner, blocks)
        self._prepare(blocks)
        layers = self._model_layers(blocks)
        objective = None
        if target is not None:
            assert options.loss_fn is not None
            objective = self._objective_of(options.loss_fn)
            layers = layers.with_loss(objective)
        call = self._begin(division, inner, layers)
        threads = self._threads_for(layers, call)
        if objective is not None:
            assert targets is not None
            objective.begin([count for _, count in call.rows], target=targets.dims)
        kind = self._kind(args, kwargs, target is not None, state.grad)
        tracing = self._tracing(kind, call)
        step = CodeStep(
            self._resources.routes(call.computes),
            threads,
            stage_of=partial(self._stage, call, layers),
            run_of=partial(self._run, call, blocks, layers, tracing, scheduled=True),
            homes=self._homes,
            objective=objective,
            losses=self._losses,
        )
        with forgetting(threads, step.forwards), self._watched(call):
            loss = trainer.train(layers, call, targets or absent(division), scale, step, in_turn=self._in_turn(call))
            numbers = [forward.numbers for forward in step.forwards]
        step.leave()
        if tracing is not None:
            self._numbers.end(kind, True)
        self._ended()
        self.attributes.settle(division, self._rehearsed)
        if objective is not None:
            return loss
        made = [step.outputs.pop(i) for i in range(len(call.rows))]
        reducer = Reducer(options.reduction, numbers, self._told)
        return with_loss(self._joined(call, made, reducer), loss)

    def report(self, module: object = None) -> DeferralReport:
        """The report on deferral, from the uses of parameters seen in the stages' forwards."""
        return report(self.module, self.stage_of, self._resources.caches, self.options.split)
