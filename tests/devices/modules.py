"""Modules with cuts, for some number of stages: what crosses borders by lists, closures, locals, ties and objects."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def cuts(stages: int) -> list[str]:
    """Each stage but the first begins with a block of its own."""
    return [f"blocks.{stage}" for stage in range(1, stages)]


class Block(nn.Module):
    """A layer; more arguments are added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        y = self.layer(x).tanh()
        for each in more:
            y = y + each
        return y


class Module(nn.Module):
    """A block for each stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(stages))


class Of(Module):
    """Blocks with a forward of their own, and buffers."""

    def __init__(self, forward: Callable[..., Any], stages: int = 3, **buffers: Tensor) -> None:
        super().__init__(stages)
        self.own = forward
        for name, x in buffers.items():
            self.register_buffer(name, x)

    def forward(self, *values: Tensor, **named: Tensor) -> Any:
        return self.own(self, *values, **named)


class Carried(Module):
    """Lists, locals, a closure, a mask, a shift that no node saves; parameters and buffers used between blocks."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.gates = nn.ParameterList(torch.randn(WIDTH) for _ in range(stages))
        self.uncalled = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        table, mask, states = self.table.sin(), x.detach() > -1, []
        shift = x.detach() * 0.1

        def scaled(h: Tensor) -> Tensor:
            return h * self.scale * table

        h = x
        for block, gate in zip(self.blocks, self.gates):
            states.append(h)
            h = block(h, table, gate) * gate
            h = scaled(h) + torch.arange(WIDTH, device=h.device) * 0.01
        for state in reversed(states):
            h = h + state * mask
        h = h + shift
        del shift
        return F.linear(torch.stack([h, states[0]]).sum(0), self.uncalled.weight)


class Tied(Module):
    """The first block is called again in the last stage, which has a layer with its weight, too."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.blocks[0].layer.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(self.blocks[0](x)) + F.linear(x, self.blocks[0].layer.weight)


def filled(net: Of, x: Tensor) -> Tensor:
    """Every stage writes its part into a tensor that the first one has made."""
    made = x.new_zeros(len(net.blocks), *x.shape)
    for number, block in enumerate(net.blocks):
        x = block(x)
        made[number] = x
    return made.sum(0) * made[0]


def spread(net: Of, x: Tensor) -> Any:
    """An output from every stage, on its device."""
    found = []
    for block in net.blocks:
        x = block(x)
        found.append(x * 2)
    return found


def detached(net: Of, x: Tensor) -> Tensor:
    """Between stages nothing has a gradient."""
    for block in net.blocks[:-1]:
        x = block(x).detach()
    return net.blocks[-1](x)


def forces(net: Of, x: Tensor) -> Tensor:
    """Differentiates through all stages."""
    h = y = net.blocks[0](x)
    for block in net.blocks[1:]:
        y = block(y)
    (force,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
    return y + force.to(y.device)


def recomputing(net: Of, x: Tensor, chance: float = 0.0) -> Tensor:
    """Has blocks run again by torch.utils.checkpoint: borders lie inside of it."""
    for block in net.blocks:
        x = checkpoint(lambda x, block=block: F.dropout(block(x), chance), x, use_reentrant=False)
    return x


#: By name.
MODULES: dict[str, Callable[[int], nn.Module]] = {
    "carried": Carried, "tied": Tied, "recomputing": partial(Of, recomputing), "filled": partial(Of, filled),
    "spread": partial(Of, spread), "forces": partial(Of, forces),
    "nothing tracked": partial(Of, detached),
}
