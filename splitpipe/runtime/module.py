"""Calls of any module through its forward: what differs from those of an nn.Sequential."""
from __future__ import annotations

import inspect
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
from splitpipe.engine.step import StepRun
from splitpipe.engine.stitched.copy import Lane
from splitpipe.engine.stitched.forward import CheckpointedBlocks, StitchedCrossing
from splitpipe.loss.numbers import UNSEEN
from splitpipe.loss.objective import Objective
from splitpipe.microbatch.arguments import name_arguments, read_arguments
from splitpipe.microbatch.division import Divider
from splitpipe.partition.attributes import Attributes
from splitpipe.partition.blocks import Blocks
from splitpipe.partition.call_hook import surround
from splitpipe.partition.device_map import device_map
from splitpipe.partition.placement import Placement, arguments_of, rehearsal
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
        self.signature, flags = inspect.signature(self._forward_of(module)), options.batched or {}
        read = partial(read_arguments, self.signature, flags, "the input")
        super().__init__(options, Divider(read, flags.get("target"), options.chunks))
        self.named_dims = [dim for dim in flags.values() if type(dim) is int and dim > 0]
        self._placement = Placement(options.places)
        self.stage_of = self._placement.stage_of  #: The stage of each module that was called.
        self._mapped = 0  # How many there were when ``hf_device_map`` was written.
        self._traced: dict[Any, bool] = {}  #: Whether calls of a kind have returned numbers; others aren't traced.
        self._blocks: Any = None  # They begin anew if modules or parameters change, and so do the next ones.
        self._attributes, self._modules = Attributes(), dict[nn.Module, Modules]()

    def __reduce__(self) -> tuple[type[Runtime], tuple[Any, ...]]:
        return ModuleRuntime, (self.module, self.own, self.options)

    @property
    def module(self) -> nn.Module:
        """The module that is run."""
        if (module := self._module_of()) is None:
            raise ReferenceError("the module of this forward is gone: expected it to be kept alive while it is called.")
        return module

    def _forward_of(self, module: nn.Module) -> Callable[..., Any]:
        return type(module).forward.__get__(module) if self.own is None else self.own

    def write_map(self) -> None:
        """Writes ``hf_device_map``, by which accelerate and Trainer don't move it; before a call, a guess."""
        self._mapped, blocks = len(self.stage_of), Blocks(self.module, self.options.cuts)
        vars(self.module)["hf_device_map"] = device_map(self.module, blocks, self.stage_of, self._resources.devices)

    def _stages_of(self, module: nn.Module) -> Mapping[nn.Module, int]:
        return self.stage_of

    def place(self, sample: Any) -> None:
        """Places parameters by a call with one row of a sample (all of it with split=), which leaves no other trace."""
        args, kwargs = arguments_of(sample)
        if self.options.split is None:
            args, kwargs = self.divider.divide(args, kwargs)[0].some(1)
        args, kwargs = map_tensors(lambda x: x.detach().clone(), (args, kwargs))
        with rehearsal(self.module, self._resources.devices):
            self.run(self.batch(self.module, args, kwargs))

    def batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> Batch:
        """What the module, or what wraps it, was called with. A cache can't be split or joined."""
        module, given = self.module, dict(name_arguments(self.signature, args, kwargs))
        names = tuple([name for name, value in given.items() if value is not None])
        kind = module.training, torch.is_grad_enabled(), target is not None, names
        labels = any(["label" in name for name in names])
        cache, takes = given.get("use_cache"), "use_cache" in self.signature.parameters
        if takes and "use_cache" not in given and (labels or module.training):
            kwargs = {**kwargs, "use_cache": False}
        cache = cache or takes and cache is None and not labels
        unsplit = not module.training and target is None and bool(cache)
        return Batch(module, args, kwargs, target, unsplit, labels, kind)

    def _layers(self, module: nn.Module, objective: Objective | None, anew: bool) -> ModelLayers:
        """The blocks that each stage has called, and the loss; ``anew``: the next calls are first calls."""
        options = self.options
        if anew:
            self._blocks, self._modules, self._attributes = Blocks(module, options.cuts), {}, Attributes()
            self.draws.clear()
            self._compiler.compile(self._blocks.blocks)
            for part in (module, *self._blocks.blocks, *self._blocks.opened):
                surround(part)
            self._placement.begin(module)
            self.called = self._placement.called
        blocks = self._blocks.blocks
        parts = [[(blocks[x], x) for x in own if x in blocks] for own in self.called]
        layers = ModelLayers(module, parts, options.places, options.schedule, objective)
        # A first call, which shows the layers of each stage, is to do the same as later ones.
        bytes = sum([x.nbytes for x in module.parameters() if x.requires_grad])
        for stage in layers.stages:
            stage.weight_bytes = bytes // len(parts)
        return layers

    def _begin_forwards(self, batch: Batch, step: StepRun, targets: Sequence[Activation | None]) -> None:
        call, placement, streams = step.call, self._placement, self._resources.named
        several, first = call.microbatches > 1, call.first
        self._attributes.looks = first
        attributes = self._attributes if several and (first or any(self._attributes.places.values())) else None
        traced = several and self.options.reduction is None and self._traced.get(batch.kind, True)
        stitched = step.drop_in and not self.options.split_backward
        # In one graph, parameters are carried like the values of one more microbatch.
        carry = Lane(step, call.microbatches, streams).carry if stitched else None
        if placement.several:
            step.shared = SharedParameters(batch.module, placement, step.stages, carry)
        own = ModuleCall(
            step, self._forward_of(batch.module), batch.module, self._blocks, placement, attributes, traced,
            self._modules, batch.labels, partial(StitchedCrossing, streams) if stitched else Crossing,
            CheckpointedBlocks if stitched else BlockChains, self._objective, targets,
        )
        parts = call.scatter(call.input, detached=not stitched)
        step.forwards = [ModuleForward(own, i, part) for i, part in enumerate(parts)]
        if call.first:  # It moves parameters, and shows what is left in attributes.
            step.pool = None

    def _end(self, batch: Batch, step: StepRun, outputs: Sequence[Output], loss: Tensor | None) -> Any:
        if step.call.microbatches > 1:
            numbers = not step.drop_in or any([output.numbers for output in outputs])
            numbers = numbers or any([isinstance(x, Tensor) and not x.dim() for x in outputs[0].leaves])
            if not self._traced.setdefault(batch.kind, numbers) and numbers:
                self._traced[batch.kind] = True
                self._said.discard(UNSEEN.function)  # It is said once for each kind of call.
        value = super()._end(batch, step, outputs, loss)
        if self._mapped != len(self.stage_of):
            self.write_map()
        return value
