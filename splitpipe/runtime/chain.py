"""Calls of an nn.Sequential, drop-in or scheduled."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from splitpipe.batch.custom_split import Split, parts_of
from splitpipe.batch.division import Division, collected, undivided
from splitpipe.batch.inputs import of_input, of_target, rows_of_part
from splitpipe.batch.joining import Joiner, Parts
from splitpipe.batch.reading import Memory
from splitpipe.batchnorm import DeferredBatchNorm
from splitpipe.core import microbatch, thread_state
from splitpipe.core.thread_state import State
from splitpipe.core.torch_private import tree_map_only
from splitpipe.deferral.pending import PendingStore
from splitpipe.deferral.report import DeferralReport
from splitpipe.engine.chain import ChainForward, ChainRun, ChainStep
from splitpipe.engine.dropin import DropinWork
from splitpipe.engine.parts import Cutting
from splitpipe.loss.reducing import Reducer
from splitpipe.partition import placing
from splitpipe.partition.attributes import Attributes
from splitpipe.partition.homes import verify_filled
from splitpipe.runtime.base import Runtime, forgetting, inner_state
from splitpipe.runtime.options import Options
from splitpipe.runtime.report import report
from splitpipe.schedule.plurals import counted
from splitpipe.skip.pairs import verify_skippables
from splitpipe.stage.call import Call
from splitpipe.stage.layers import BlockLayers, ModelLayers, Named, chain_layers
from splitpipe.stage.stage import Block

T = TypeVar("T")


class ChainRuntime(Runtime):
    """Runs an nn.Sequential: each span of layers on its place, scheduled or drop-in."""

    def __init__(self, spans: Sequence[tuple[int, int]], options: Options, deferred: bool = False) -> None:
        super().__init__(options)
        self._spans = spans
        self._deferred = deferred
        #: The flags of the input and of the target.
        self._batched: tuple[Any, Any] = (None, None) if options.batched is None else options.batched
        self._memory = Memory()
        self._joiner = Joiner()
        self._known: list[nn.Module] = []  # The layers that have been placed.
        self._layers: tuple[Sequence[Any], ModelLayers] | None = None
        self._attributes = Attributes()

    def __deepcopy__(self, memo: object) -> ChainRuntime:
        return ChainRuntime(self._spans, self.options, self._deferred)

    def __reduce__(self) -> tuple[type[ChainRuntime], tuple[Any, ...]]:
        return ChainRuntime, (self._spans, self.options, self._deferred)

    def layers(self, module: nn.Module) -> list[Named]:
        """The module's current layers, each on its stage's device."""
        named = [(name, layer) for name, layer in module._modules.items() if layer is not None]
        found = [layer for _, layer in named]
        if len(found) != len(self._known) or not all(map(is_, found, self._known)):
            self._place(module, found)
            self._known = found
        return named

    def _place(self, module: nn.Module, layers: list[nn.Module]) -> None:
        """Prepares layers that have replaced others as those were prepared when the module was wrapped."""
        expected = self._spans[-1][1]
        if len(layers) != expected:
            raise RuntimeError(
                f"the model has {counted(len(layers), 'layer')} now, but balance "
                f"{[end - start for start, end in self._spans]} was given for {expected}: expected the same number. "
                "Layers may be replaced; to add or remove some, build a new SplitPipe."
            )
        known = {*map(id, self._known)}
        new = [layer for layer in layers if id(layer) not in known] if known else []  # A copy's layers are in place.
        if not new:
            return
        for layer in new:
            verify_filled(layer)
        verify_skippables(cast(nn.Sequential, module))
        places = self._resources.places
        stages = [layers[start:end] for start, end in self._spans]
        placing.verify_stages(stages, places)
        undo = placing.move([[layer for layer in stage if id(layer) not in known] for stage in stages], places)
        try:
            for layer in new if self._deferred else ():
                DeferredBatchNorm.convert_deferred_batch_norm(layer)
        except BaseException:
            undo()
            raise

    def _by_stage(self, layers: Sequence[Named], objective: nn.Module | None = None) -> ModelLayers:
        """The layers by stage; with a schedule, the loss is the last one."""
        known, key = self._layers, (*layers, objective)
        if known is not None and known[0] == key and known[1].same():
            return known[1]
        found = chain_layers(layers, self._spans, self._resources.places, objective)
        self._layers = (key, found) if found.lasting else None
        return found

    def _stage(self, call: Call, layers: ModelLayers, j: int, pending: PendingStore | None) -> Block:
        return Block(cast(BlockLayers, layers.stages[j]), self._resources.caches[j], call, pending)

    def forward(self, layers: Sequence[Named], input: Any, training: bool) -> Any:
        """The output of the batch."""
        state = thread_state.capture()

        def outputs() -> Any:
            self._compiler.compile(layer for _, layer in layers)
            found = self._by_stage(layers)
            division, _ = self._divided(input, None)
            call, parts = self._outputs(found, division, training, state)
            whole = self._joiner.joined(parts, division, partial(self._rehearsed, found, division))
            if self.options.reduction is not None:
                whole = self._reduced(whole, parts, [count for _, count in division.rows])
            self._resources.settle_rng_modes(call.end())
            return whole

        return self._guarded(state, outputs)

    def _reduced(self, whole: Any, parts: Parts, rows: list[int]) -> Any:
        """The output with its numbers, which were stacked, reduced."""
        reducer, columns = Reducer(self.options.reduction, [], self._told), list(zip(*(leaves for leaves, _ in parts)))
        leaves, spec = microbatch.flatten(whole, "the output")
        numbers = [k for k, column in enumerate(columns) if all(isinstance(x, Tensor) and not x.dim() for x in column)]
        if numbers and len(leaves) != len(columns):
            raise ValueError(
                "reduction= was given, and the output has both numbers and a list with one entry per row: expected one "
                "of them. Return the list's entries as a tensor."
            )
        for k in numbers:
            leaves[k] = reducer.reduced(columns[k], rows)
        return microbatch.unflatten(leaves, spec)

    def _outputs(
        self, layers: ModelLayers, input: Division, training: bool, state: State
    ) -> tuple[Call, Parts]:
        """The output of each microbatch, on the caller's streams."""
        resources = self._resources
        call = self._call(input, state, layers, training)
        threads, stages = resources.pool(layers), self._stages(call, layers)
        run, cutting = ChainRun(call, stages, ranked=state.grad), Cutting(stages[0].sink is not None)
        work = DropinWork(run, cutting, resources.routes(call.computes))
        for i, activation in enumerate(call.cut(call.input, 0)):
            work.forwards.append(ChainForward(run, i, activation, work, inside=not state.function_modes))
        found, _ = self._found(work, threads, self._watched(layers, call))
        for each in stages:
            if each.sink is not None and call.checkpointed:
                each.note()
        return call, [(call.handed_back(leaves), spec) for leaves, spec in found]

    def _rehearsed(self, layers: ModelLayers, input: Division, rows: int) -> tuple[Any] | None:
        """The output for the first rows of the input; None if the layers can't be run on that few."""
        if input.some is None:
            return None
        module = _together(layers)
        value = tree_map_only(Tensor, lambda x: x.detach().clone(), input.some(0, rows))  # It may be written to.
        whole = undivided(value, rows)

        def output() -> Any:
            call, [part] = self._outputs(layers, whole, False, thread_state.capture())
            call.end()
            return microbatch.unflatten(*part)

        return self._tried(module, output)

    def _divided(self, input: Any, target: Any) -> tuple[Division, Division | None]:
        """The input and the target, if there is one, divided into microbatches."""
        if self.options.splitting is not None:
            return self._split(self.options.splitting, input, target, self.options.chunks)
        division = of_input(input, self._batched[0], self.options.chunks, self._memory)
        if target is None:
            return division, None
        return division, of_target(target, self._batched[1], division, self._memory)

    def _split(self, split: Split, input: Any, target: Any, chunks: int) -> tuple[Division, Division | None]:
        named = {} if target is None else {"target": target}
        parts = parts_of(split, (input,), named, chunks, None if self._trainer is None else chunks)
        for number, (args, kwargs) in enumerate(parts):
            if len(args) != 1 or kwargs.keys() != named.keys():
                expected = "((input,), {})" if target is None else "((input,), {'target': target})"
                raise ValueError(
                    f"split returned {len(args)} positional arguments and the names {sorted(kwargs)} for microbatch "
                    f"{number}: expected {expected}."
                )
        inputs = [args[0] for args, _ in parts]
        rows = [rows_of_part(part, self._batched[0]) for part in inputs]
        division = collected(inputs, rows)
        return division, None if target is None else collected([kwargs["target"] for _, kwargs in parts], rows)

    def train(
        self,
        layers: Sequence[Named],
        input: Any,
        target: Any,
        training: bool,
        loss_fn: Callable[..., Any],
        grad_scaler: Any,
    ) -> Tensor:
        """Runs forward and backward, and returns the loss of the batch."""
        trainer, state = self._step_trainer(), thread_state.capture()
        scale = self._scale(state, grad_scaler)
        inner = inner_state(state)

        def loss() -> Tensor:
            objective = self._objective_of(loss_fn)
            self._compiler.compile(layer for _, layer in layers)
            found = self._by_stage(layers, objective)
            division, targets = self._divided(input, target)
            assert targets is not None
            call = self._call(division, inner, found, training)
            objective.begin([count for _, count in call.rows], division.dims, targets.dims)
            resources = self._resources
            threads = resources.pool(found)
            stage_of, run_of = partial(self._stage, call, found), partial(ChainRun, call, ranked=False)
            step = ChainStep(resources.routes(call.computes), threads, stage_of, run_of)
            with forgetting(threads, step.forwards), self._watched(found, call):
                value = trainer.train(found, call, targets, scale, step)
            step.leave()
            return value

        return self._guarded(state, loss)

    def _watched(self, layers: ModelLayers, call: Call) -> AbstractContextManager[None]:
        if self._attributes.looked:
            return nullcontext()
        return self._attributes.reported(_together(layers), [count for _, count in call.rows])

    def report(self, module: nn.Module) -> DeferralReport:
        """The report on deferral, from the uses of parameters seen in the stages' forwards."""
        layers = [layer for layer in module._modules.values() if layer is not None]
        stage_of: dict[nn.Module, int] = {}
        for stage, (start, end) in enumerate(self._spans):
            for part in [part for layer in layers[start:end] for part in layer.modules()]:
                stage_of.setdefault(part, stage)
        return report(module, stage_of, self._resources.caches, self.options.split)


def _together(layers: ModelLayers) -> nn.Sequential:
    module = nn.Sequential()
    module._modules.update({name: layer for stage in layers.stages for name, layer in stage.layers})
    return module
