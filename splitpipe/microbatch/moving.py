"""Moves the caller's tensors to the devices of the stages that take them, as the caller's ``x.to(device)`` would.

The copies belong to the caller: they are made on its streams, for which the stages wait, and in its graph, which
returns gradients to the tensors' devices. For a copy from the CPU, the host waits; if the memory is pinned, it waits
only at the end of the call, because a training loop may refill that memory as soon as the call has returned.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from splitpipe.core import stream
from splitpipe.core.tensors import is_plain
from splitpipe.microbatch.division import Division


class Moves:
    """The copies of one call's input and target."""

    def __init__(self) -> None:
        self._unread: list[torch.Event] = []

    def input(self, input: Division, devices: Sequence[torch.device]) -> Division:
        """The input on the devices, the first stage's first; tensors on none of them are moved to that."""
        known, found = {*devices}, {leaf.device for leaf in input.leaves if isinstance(leaf, Tensor)}
        # Next to tensors elsewhere, a tensor on the CPU may belong there, such as lengths of sequences.
        known |= {torch.device("cpu")} if found - {torch.device("cpu")} else set()
        return self.move(input, devices[0], known)

    def settle(self) -> None:
        """Waits until pinned memory has been read."""
        while self._unread:
            event = self._unread.pop()
            event.synchronize()
            stream.spent(event)

    def move(self, division: Division, device: torch.device, known: Collection[torch.device] = ()) -> Division:
        """The values on a device, but for tensors on those ``known``."""
        found, pinned = dict[int, Tensor](), False  # Tensors that microbatches share are copied once.
        for x in division.leaves:
            if isinstance(x, Tensor) and id(x) not in found and x.device not in (device, *known):
                pins = x.device.type == "cpu" and is_plain(x) and x.is_pinned()
                found[id(x)] = x.to(device, non_blocking=pins or "cpu" not in (x.device.type, device.type))
                pinned = pinned or pins
        if pinned and (event := stream.mark(stream.current(device))) is not None:
            self._unread.append(event)
        return replace(division, leaves=[found.get(id(x), x) for x in division.leaves]) if found else division
