"""What is trained on devices: a module for some number of stages, a batch for it, and its loss.

Some are made for the paths between stages: a chain, tensors without gradient beside others, skips, statistics that
are read after the pass. The others are all layers of the transparency grid, each with a skip past all of it.
"""
from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from splitpipe.core import stream
from splitpipe.skip import pop, skippable, stash
from tests.helpers.compiling import EAGER
from tests.helpers.twin import even
from tests.promise.layers import LAYERS, batched_of

from . import modules
from .modules import WIDTH


@skippable(stash=["skip"])
class Keep(nn.Module):
    """Stashes what its layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Generator[Any, None, Tensor]:
        y = self.layer(x)
        yield stash("skip", y.relu())
        return y


@skippable(pop=["skip"])
class Join(nn.Module):
    """Adds what was stashed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Generator[Any, Tensor, Tensor]:
        kept = yield pop("skip")
        return self.layer(x) + kept * 3


class Pair(nn.Module):
    """Two tensors, one of which is a mask that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x, mask = value if isinstance(value, tuple) else (value, value.detach() > 0)
        return self.layer(x) * mask, mask


class Scaled(nn.Module):
    """A tensor of the batch, and one that all microbatches have whole, with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x, table = value
        return self.layer(x) * table.tanh(), table


class One(nn.Module):
    """Of two tensors the first, changed in place."""

    def forward(self, value: Any) -> Any:
        return value[0].relu_()


class Residual(nn.Module):
    """Uses its input twice: gradients meet where it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() + self.layer(x)


class Elsewhere(nn.Module):
    """Computes on a stream of its own, where there are streams, as layers with a communication of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._own: stream.Stream = None

    def forward(self, x: Tensor) -> Tensor:
        here = stream.current(x.device)
        own = self._own = self._own or stream.new(x.device)
        stream.wait(own, here)
        with stream.use(own):
            y = self.layer(x.sin()).tanh()
        stream.wait(here, own)
        stream.hold(x, own)
        stream.hold(y, here)
        return y


class Detached(nn.Module):
    """Lets no gradient through."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach()


@skippable(stash=["aside"])
class Aside(nn.Module):
    """Stashes a value for each row, of a batch along that dimension; the input goes on as it is."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1))
        self.dim = dim

    def forward(self, value: Any) -> Generator[Any, None, Any]:
        yield stash("aside", (self.weight * 2).expand(_first(value).shape[self.dim], 1))
        return value


@skippable(pop=["aside"])
class Beside(nn.Module):
    """Scales the first tensor that has a gradient, row by row, by what was stashed."""

    def forward(self, value: Any) -> Generator[Any, Tensor, Any]:
        kept = yield pop("aside")
        leaves, spec = tree_flatten(value)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                leaves[number] = leaf * (1 + kept.reshape(-1, *[1] * (leaf.dim() - 1)))
                break
        return tree_unflatten(leaves, spec)


def _first(value: Any) -> Tensor:
    tensor: Tensor = next(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return tensor


@dataclass(frozen=True)
class Subject:
    """Something to train.

    Args:
        make: the module, for so many stages.
        value: a batch of so many rows.
        options: of SplitPipe.
        measure: what it is to equal: "module", the unwrapped one; "cpu", the same pipeline there, where microbatches
            are normalised apart; "never", the same pipeline without checkpointing, where random numbers are drawn.
        differentiable: whether the batch requires grad.
        cuts: where the module is cut, for so many stages; None: by layers.
        dim: along which the batch's first tensor has its rows.
    """

    make: Callable[[int], nn.Module]
    value: Callable[[int], Any]
    options: tuple[tuple[str, Any], ...] = ()
    measure: Literal["module", "cpu", "never"] = "module"
    differentiable: bool = True
    cuts: Callable[[int], list[str]] | None = None
    dim: int = 0

    def rows(self, batch: Any) -> int:
        """The rows of a batch."""
        return _first(batch).shape[self.dim]

    def borders(self, stages: int) -> dict[str, Any]:
        """The options of SplitPipe that say where the stages begin."""
        if self.cuts is not None:
            return {"cuts": self.cuts(stages)}
        layers: Any = self.make(stages)
        return {"balance": even(len(layers), stages)}


def _rows(size: int) -> Tensor:
    return torch.randn(size, WIDTH)


def chain(stages: int) -> nn.Sequential:
    """A linear layer a stage, with an activation."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))


def pairs(stages: int) -> nn.Sequential:
    """Two tensors between stages; the last one works in place."""
    return nn.Sequential(*(Pair() for _ in range(stages - 1)), nn.Sequential(Pair(), One()))


def tables(stages: int) -> nn.Sequential:
    """Something that is whole in every stage."""
    return nn.Sequential(*(Scaled() for _ in range(stages - 1)), nn.Sequential(Scaled(), One()))


def skips(stages: int) -> nn.Sequential:
    """A skip from the first stage to the last one."""
    return nn.Sequential(Keep(), *(nn.Linear(WIDTH, WIDTH) for _ in range(stages - 2)), Join())


def statistics(stages: int) -> nn.Sequential:
    """Statistics of the whole batch, in every stage, kept after the pass."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(stages)))


def residuals(stages: int) -> nn.Sequential:
    """Every stage uses its input twice."""
    return nn.Sequential(*(nn.Sequential(Residual(), Residual()) for _ in range(stages)))


class Block(nn.Module):
    """A norm, a linear layer, a scale: several ops with weights, which are deferred if it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.layer(self.norm(x)).tanh()


def compiled(stages: int) -> nn.Sequential:
    """Layers that are compiled, in every stage."""
    return nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(stages)))


def users(stages: int) -> nn.Sequential:
    """Layers that their user has compiled, with a backward that is not split."""
    layers = compiled(stages)
    for layer in layers:
        layer.compile(backend="aot_eager")
    return layers


def elsewhere(stages: int) -> nn.Sequential:
    """Every stage computes on a stream of its own."""
    return nn.Sequential(*(Elsewhere() for _ in range(stages)))


def detached(stages: int) -> nn.Sequential:
    """Nothing but values without gradient between the first stages."""
    return nn.Sequential(*(Detached() for _ in range(stages - 1)), nn.Linear(WIDTH, WIDTH))


def ties(stages: int) -> nn.Sequential:
    """The first two stages share their layer: they are to be on one device."""
    shared = nn.Linear(WIDTH, WIDTH)
    others = (nn.Linear(WIDTH, WIDTH) for _ in range(stages - 2))
    return nn.Sequential(shared, nn.Sequential(shared, nn.Tanh()), *others)


def dropouts(stages: int) -> nn.Sequential:
    """Random numbers in every stage, and what the layers behind them save."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Tanh()) for _ in range(stages)))


def _past(name: str) -> Subject:
    make, value = LAYERS[name]
    batched = batched_of(name, "balance")
    dim = batched if isinstance(batched, int) else 0
    options: tuple[tuple[str, Any], ...] = () if batched is None else (("batched", batched),)
    if dim:  # The output has the batch elsewhere, which a loss can't be told: its mean is by rows.
        options += (("reduction", "mean"),)
    return Subject(lambda stages: nn.Sequential(Aside(dim), *make(), Beside()), value, options, dim=dim)


SUBJECTS = {
    "chain": Subject(chain, _rows), "pairs": Subject(pairs, _rows), "skips": Subject(skips, _rows),
    "statistics": Subject(statistics, _rows, (("deferred_batch_norm", True),), "cpu"),
    "residuals": Subject(residuals, _rows), "elsewhere": Subject(elsewhere, _rows),
    "elsewhere, a batch without grad": Subject(elsewhere, _rows, differentiable=False),
    "compiled": Subject(compiled, _rows, (("compile", EAGER),)),
    "compiled by its user": Subject(users, _rows),
    "detached": Subject(detached, _rows), "ties": Subject(ties, _rows),
    "dropouts": Subject(dropouts, _rows, (), "never"),
    "tables": Subject(tables, lambda size: (_rows(size), _rows(WIDTH)[0]), (("batched", (True, False)),)),
    **{f"module: {name}": Subject(make, _rows, cuts=modules.cuts) for name, make in modules.MODULES.items()},
    "module: compiled": Subject(modules.MODULES["carried"], _rows, (("compile", EAGER),), cuts=modules.cuts),
    **{f"layers: {name}": _past(name) for name in LAYERS},
}


def mean(output: Any, target: Any) -> Tensor:
    """A mean over the first dimension, of every tensor that has a gradient, each row weighted in its own way."""
    total = None
    for number, x in enumerate(tree_leaves(output)):
        if isinstance(x, Tensor) and x.requires_grad:
            y = torch.view_as_real(x) if x.is_complex() else x
            there = target.reshape(-1, *[1] * (y.dim() - 1)).to(y) if isinstance(target, Tensor) else target
            part = (number + 1) * (y - there).square().mean()
            total = part if total is None else total + part.to(total)
    assert total is not None, "nothing to train"
    return total
