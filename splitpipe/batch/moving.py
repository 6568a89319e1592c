"""Moves the caller's tensors to the devices of the stages that take them, as the caller's ``x.to(device)`` would.

The copies belong to the caller: they are made on its streams, for which the stages wait, and in its graph, which
returns gradients to the tensors' devices. For a copy from the CPU, the host waits; if the memory is pinned, it waits
only at the end of the call, because a training loop may refill that memory as soon as the call has returned.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from splitpipe.batch.division import Division
from splitpipe.core import stream
from splitpipe.core.tensors import is_plain


class Moves:
    """The copies of one call's input and target."""

    def __init__(self) -> None:
        self._unread: list[torch.Event] = []

    def input(self, input: Division, devices: Sequence[torch.device]) -> Division:
        """The input on the devices, the first stage's first; tensors on none of them are moved to that."""
        tensors = [leaf for leaf in input.leaves if isinstance(leaf, Tensor)]
        known = {*devices}
        strange = [x for x in tensors if x.device not in known]
        if not strange:
            return input
        if any(x.is_meta for x in strange):
            raise ValueError(
                f"the input is on meta, but the first stage is on {devices[0]}: expected tensors with values."
            )
        # Next to tensors elsewhere, a tensor on the CPU may belong there, such as lengths of sequences.
        if not all(x.device.type == "cpu" for x in tensors):
            known.add(torch.device("cpu"))
        return self._moved(input, devices[0], lambda x: x.device not in known)

    def target(self, target: Division, device: torch.device) -> Division:
        """The target on the last stage's device."""
        return self._moved(target, device, lambda x: x.device != device)

    def settle(self) -> None:
        """Waits until pinned memory has been read."""
        while self._unread:
            event = self._unread.pop()
            stream.finish(event)
            stream.spent(event)

    def _moved(self, division: Division, device: torch.device, chosen: Callable[[Tensor], bool]) -> Division:
        found: dict[int, Tensor] = {}  # Tensors that microbatches share are copied once.
        pinned = False
        for x in division.leaves:
            if isinstance(x, Tensor) and id(x) not in found and chosen(x):
                pins = x.device.type == "cpu" and is_plain(x) and x.is_pinned()
                found[id(x)] = x.to(device, non_blocking=pins or "cpu" not in (x.device.type, device.type))
                pinned = pinned or pins
        if not found:
            return division
        event = stream.mark(stream.current(device)) if pinned else None
        if event is not None:
            self._unread.append(event)
        return replace(division, leaves=[found.get(id(x), x) for x in division.leaves])
