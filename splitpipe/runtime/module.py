"""Calls of any module through its forward: what differs from those of an nn.Sequential."""
from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core.tensors import map_tensors
from splitpipe.engine.block_checkpoint import BlockChains
from splitpipe.engine.crossing import Crossing
from splitpipe.engine.drop_in import Output
from splitpipe.engine.module import ModuleCall, ModuleForward
from splitpipe.engine.module_output import keep_loss, keep_output, keep_own_loss
from splitpipe.engine.step import StepRun
from splitpipe.engine.stitched.copy import Lane
from splitpipe.engine.stitched.forward import CheckpointedBlocks, StitchedCrossing
from splitpipe.loss.objective import Objective
from splitpipe.loss.reduction import UNSEEN
from splitpipe.microbatch.divider import ArgumentDivider, labelled, name_arguments, signature_of
from splitpipe.microbatch.division import Division
from splitpipe.partition.attributes import Attributes
from splitpipe.partition.blocks import Blocks
from splitpipe.partition.call_hook import surround
from splitpipe.partition.device_map import device_map
from splitpipe.partition.placement import arguments_of, rehearsal
from splitpipe.runtime.runtime import Batch, Options, Runtime
from splitpipe.stage.call import Activation
from splitpipe.stage.layers import ModelLayers
from splitpipe.stage.recomputation import Modules
from splitpipe.stage.shared_parameters import SharedParameters


class ModuleRuntime(Runtime):
    """Runs one module, each stage on its place."""

    own_forward = True

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None, options: Options) -> None:
        self._module_of = weakref.ref(module)  # The module refers to this, as its forward.
        self.own = own  #: The instance's previous forward, if it had one.
        self.signature = signature_of(self._forward)
        super().__init__(options, divider=partial(ArgumentDivider, self.signature))
        self.stage_of = self._placement.stage_of  #: The stage of each module that was called.
        self.mapped = 0  #: How many there were when ``hf_device_map`` was written.
        self._traced: dict[Any, bool] = {}  #: Whether calls of a kind have returned numbers; others aren't traced.
        self._attributes = Attributes()
        self._modules: dict[nn.Module, Modules] = {}

    def __reduce__(self) -> tuple[type[Runtime], tuple[Any, ...]]:
        return ModuleRuntime, (self.module, self.own, self.options)

    @property
    def module(self) -> nn.Module:
        """The module that is run."""
        if (module := self._module_of()) is None:
            raise ReferenceError("the module of this forward is gone: expected it to be kept alive while it is called.")
        return module

    @property
    def _forward(self) -> Callable[..., Any]:
        return type(self.module).forward.__get__(self.module) if self.own is None else self.own

    def device_map(self) -> dict[str, torch.device]:
        """The devices of blocks by name; before the first call, a guess from the order of definition."""
        blocks = Blocks(self.module, self.options.cuts)
        return device_map(blocks, self.stage_of, self._resources.devices, self._placement.complete)

    def _stages_of(self, module: nn.Module) -> Mapping[nn.Module, int]:
        return self.stage_of

    def place(self, sample: Any) -> None:
        """Places parameters by a call with one row of a sample, which leaves no other trace."""
        args, kwargs = map_tensors(lambda x: x.detach().clone(), self._divider.sample(*arguments_of(sample)))
        with rehearsal(self.module, self._resources.devices):
            self.run(self.batch(self.module, args, kwargs, unsplit=True))

    def batch(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None,
        unsplit: bool = False,
    ) -> Batch:
        """What the module, or what wraps it, was called with."""
        module, given = self.module, name_arguments(self.signature, args, kwargs)
        names = tuple([name for name, value in given if value is not None])
        kind = module.training, torch.is_grad_enabled(), target is not None, names
        return Batch(module, args, kwargs, target, Blocks(module, self.options.cuts), unsplit, kind)

    def prepare(self, batch: Batch) -> tuple[Division, Division | None, ModelLayers]:
        """If modules or parameters have changed, it looks at all of them again."""
        blocks, placement, divider, options = batch.blocks, self._placement, self._divider, self.options
        same = self._known is not None and self._known[1].same()
        if not same:
            self._known, self._modules, self._attributes = None, {}, Attributes()
            self._compiler.compile(blocks.blocks)
            for part in (*blocks.blocks, *blocks.opened):
                surround(part)
        placement.prepare(batch.module, same)
        key, known = [*map(len, placement.called)], self._known
        if known is None or known[0] != key:
            parts = [[(blocks.blocks[x], x) for x in own if x in blocks.blocks] for own in placement.called]
            known = key, ModelLayers(batch.module, parts, options.places, options.schedule, self._objective)
            # A first call, which shows the layers of each stage, is to do the same as later ones.
            bytes = sum([x.nbytes for x in batch.module.parameters() if x.requires_grad])
            for stage in known[1].stages:
                stage.weight_bytes = bytes // len(parts)
            self._known = None if known[1].computed else known
        if batch.unsplit:
            return *divider.divide(batch.args, batch.kwargs, unsplit=True), known[1]
        return *divider.divide_call(batch.args, batch.kwargs, batch.target, batch.module.training), known[1]

    def _begin_forwards(
        self, batch: Batch, step: StepRun, objective: Objective | None, targets: Sequence[Activation | None]
    ) -> SharedParameters:
        call, options, placement, streams = step.call, self.options, self._placement, self._resources.named
        attributes = self._attributes if call.microbatches > 1 else Attributes()
        if call.microbatches > 1:
            attributes.begin(batch.module.training and call.state.grad)
        traced = call.microbatches > 1 and options.reduction is None and self._traced.get(batch.kind, True)
        stitched = step.drop_in and not options.split_backward
        # In one graph, parameters are carried like the values of one more microbatch.
        carry = Lane(step, call.microbatches, streams).carry if stitched else None
        shared = SharedParameters(batch.module, placement, step.stages, carry)
        finish: Callable[[Any, Any], None] = keep_output
        if not step.drop_in:
            finish = keep_own_loss if objective is None else partial(keep_loss, objective, targets)
        labels = labelled(dict(name_arguments(self.signature, batch.args, batch.kwargs)))
        own = ModuleCall(
            step, self._forward, batch.blocks, placement, shared, attributes, traced, self._modules, labels,
            partial(StitchedCrossing, streams) if stitched else Crossing,
            CheckpointedBlocks if stitched else BlockChains, finish,
        )
        parts = call.scatter(call.input, detached=not stitched)
        step.forwards = [ModuleForward(own, i, part) for i, part in enumerate(parts)]
        # First calls move parameters, and show what is left in attributes: their F must run one after another.
        if attributes.looks or placement.several and not placement.trained:
            step.pool = None
        return shared

    def _end(self, batch: Batch, step: StepRun, outputs: Sequence[Output]) -> None:
        placement, training = self._placement, batch.module.training
        if step.call.microbatches > 1:
            numbers = not step.drop_in or any([output.numbers for output in outputs])
            numbers = numbers or any([isinstance(x, Tensor) and not x.dim() for x in outputs[0].leaves])
            traced = self._traced.setdefault(batch.kind, numbers)
            if numbers and not traced:
                self._traced[batch.kind] = True
                self._said.discard(UNSEEN.function)  # It is said once for each kind of call.
        if not placement.complete and not any([x in batch.blocks.blocks for x in placement.called[0]]):
            warnings.warn(
                "stage 0 calls no module, so its device is idle: expected cuts= without the module that is called "
                "first.", stacklevel=5,
            )
        placement.complete, placement.trained = True, placement.trained or training
        super()._end(batch, step, outputs)
