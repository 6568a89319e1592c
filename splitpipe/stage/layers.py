"""The layers of a model by stage, and facts that follow from them.

The facts are kept until a call finds, by identity, other children or parameters than those before it: for example, a
parameter that ``torch.func.functional_call`` swaps for one call.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from splitpipe.backward.report import Uses
from splitpipe.compiled.layers import is_compiled
from splitpipe.core.stream import Place
from splitpipe.schedule.op import Schedule
from splitpipe.skip.skippable import crossing
from splitpipe.skip.tracker import Key
from splitpipe.stage.recomputation import Modules, empty

Named = tuple[str, nn.Module]


class StageLayers:
    """The layers of one stage; ``skips``: the stages that each skip between stages goes from and to."""

    def __init__(self, index: int, place: Place, layers: Sequence[Named], skips: Mapping[Key, tuple[int, int]]) -> None:
        self.index, self.place, self.name = index, place, f"stage {index} ({place})"
        self.calls = [layer for _, layer in layers]
        self.described = [f"layer {name!r} ({type(layer).__name__})" for name, layer in layers]
        self.modules = list(dict.fromkeys(module for layer in self.calls for module in layer.modules()))
        self.recomputed = Modules(self.modules)  #: As a recomputation of all layers needs them.
        self.arriving = [key for key, (source, target) in skips.items() if source < target == index]
        #: The skips that go to later stages, and the stages.
        self.leaving = [(key, target) for key, (source, target) in skips.items() if index == source < target]
        self.parameters = [*{id(x): x for layer in self.calls for x in layer.parameters()}.values()]
        self.weight_bytes = sum([x.nbytes for x in self.parameters if x.requires_grad])
        #: How its parameters are used, for the report on deferral, and whether that is known of all.
        self.uses: dict[int, Uses] = {}
        self.uses_known = False

    def add_uses(self, seen: Mapping[int, Uses], hooked: bool) -> None:
        """Adds uses that a graph has shown; ``hooked``: whether hooks were set meanwhile, as torch.compile may do."""
        self.uses.update(seen)
        known = [id(x) in self.uses for x in self.parameters if x.requires_grad]
        self.uses_known = bool(self.parameters) and not hooked and all(known)  # A module's first call has none yet.


class ModelLayers:
    """The layers of all stages: ``parts`` of a module, with their names, and the loss.

    The module itself isn't kept, only its tables: its forward may refer to this.
    """

    def __init__(
        self, module: nn.Module, parts: Sequence[Sequence[Named]], places: Sequence[Place],
        schedule: Schedule | None = None, objective: nn.Module | None = None,
    ) -> None:
        loss = [] if objective is None else [("loss_fn", objective)]
        parts, roots = [*parts[:-1], [*parts[-1], *loss]], [*module.named_children(), *loss]
        skips = crossing(parts)
        self.stages = [StageLayers(j, place, part, skips) for j, (place, part) in enumerate(zip(places, parts))]
        self.workers = (*workers(self.stages, range(len(places)) if schedule is None else schedule.placement),)
        self._modules = list(dict.fromkeys(chain.from_iterable(root.modules() for _, root in roots)))
        self._tables: list[Any] = [table for m in (module, *self._modules) for table in (m._modules, m._parameters)]
        self._parts = self._look()
        state = [x for m in (module, *self._modules) for x in (*m._parameters.values(), *m._buffers.values())]
        #: True if a module is compiled, or a parameter or buffer a DTensor: ops then run in the caller's thread. For
        #: processes match collectives by the order of the calls, which would vary with a thread per stage.
        self.odd = any(map(is_compiled, (module, *self._modules))) or any([hasattr(x, "full_tensor") for x in state])
        named = [(name, x) for name, x in module._parameters.items() if x is not None]
        named += [each for name, root in roots for each in root.named_parameters(name)]
        self.names = {id(x): name for name, x in reversed(named)}  #: Those of parameters, by identity.
        #: The names of parameters that the caller has computed, as with functional_call: these belong to one call.
        self.computed = [name for name, x in named if x.requires_grad and not x.is_leaf]

    def same(self) -> bool:
        """True if all of it is still the same objects."""
        found = self._look()
        return len(found) == len(self._parts) and all(map(is_, found, self._parts))

    def _look(self) -> list[Any]:
        compiled = [module._compiled_call_impl for module in self._modules]
        return [*chain.from_iterable(map(dict.values, self._tables)), *compiled, *empty(self._modules)]


def workers(stages: Sequence[StageLayers], rows: Sequence[int]) -> list[int]:
    """The worker of each stage: one per accelerator; on the CPU one per row, or one for all if stages share state."""
    # Two threads that update one buffer lose updates, and two that call one layer could clash in what it keeps (such as
    # the weight that a hook of weight_norm sets).
    states = [_state(stage.modules) for stage in stages if stage.place.device.type == "cpu"]
    together = len(set[object]().union(*states)) < sum(map(len, states))
    devices = [stage.place.device for stage in stages]
    keys = [device if together or device.type != "cpu" else row for device, row in zip(devices, rows)]
    return [[*dict.fromkeys(keys)].index(key) for key in keys]


def _state(modules: Sequence[nn.Module]) -> set[object]:
    """The modules with parameters, as others keep little, and the buffers."""
    state = [module for module in modules if next(module.parameters(), None) is not None]
    return {*state, *[id(buffer) for module in modules for buffer in module.buffers(recurse=False)]}
