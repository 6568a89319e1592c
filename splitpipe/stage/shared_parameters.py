"""Parameters and buffers that several stages use: one copy a call on each other device, and their gradients sent home.

    embedding.weight   on cuda:0, its home
    lm_head            on cuda:1, tied to it: computes with the copy, whose gradient is added to that of the weight
"""
from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core import stream
from splitpipe.core.tensors import version_of
from splitpipe.core.transfer import brought
from splitpipe.partition.placement import Placement, moved
from splitpipe.stage.segment import RunningStage


class SharedParameters:
    """The copies of one call. ``carry``: copies a tensor from a stage to another one in the graph, or None."""

    def __init__(self, module: nn.Module, placement: Placement, stages: Sequence[RunningStage], carry: Any) -> None:
        self._module, self._placement, self._stages, self._carry = module, placement, stages, carry
        self._lock = threading.Lock()
        #: Originals, copies and the copies' versions, by the original's identity and the device.
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor, int | None]] = {}

    def copy(self, x: Tensor, stage: int) -> Tensor | None:
        """A parameter or buffer of the module for a stage on another device; None for other tensors."""
        if not x.is_leaf or not isinstance(x, nn.Parameter) and id(x) not in self._placement.homes:
            return None
        device = self._stages[stage].device
        with self._lock:
            if x.device not in self._placement.devices:  # That of a module that is never called: it is used here first.
                return moved(x, device)
            if (id(x), device) not in self._copies:
                if self._carry is not None:
                    y = self._carry(x, self._home(x), stage)
                else:
                    y = brought(x.detach(), device)
                    y = nn.Parameter(y, x.requires_grad) if isinstance(x, nn.Parameter) else y
                self._copies[id(x), device] = x, y, version_of(y)
            return self._copies[id(x), device][1]

    def reach(self, stage: RunningStage, leaves: Mapping[int, Tensor]) -> None:
        """Records the leaves of a stage's graph: a copy's original with the stage that is its home."""
        originals = {id(y): x for x, y, _ in [*self._copies.values()]}
        for key, x in leaves.items():
            if (original := originals.get(key)) is not None:
                self._stages[self._home(original)].reached[id(original)] = original
            else:
                stage.reached[key] = x

    def _home(self, x: Tensor) -> int:
        return self._placement.stage_on(x.device, len(self._stages))

    def bring_home(self) -> None:
        """Adds the gradients of copies to those of the originals, on the streams of the stages."""
        for x, copy, _ in self._copies.values():
            home = self._stages[self._home(x)]
            for stage in self._stages:
                total = stage.store.sums.pop(id(copy), None)
                if total is not None and total.value is not None:
                    with stream.use(stage.compute, home.compute):
                        home.store.total(x).add(brought(total.value, x.device))

    def verify(self) -> None:
        """Raises for a copy that was written to: the original hasn't changed."""
        for x, copy, version in self._copies.values():
            if version_of(copy) != version:
                named = (*self._module.named_buffers(), *self._module.named_parameters())
                name = next((name for name, own in named if own is x), "a parameter")
                raise RuntimeError(
                    f"{name!r}, which is on {x.device}, was written to by a stage on "
                    f"{copy.device}, which has a copy during a call: expected modules that write to it on one device."
                )
