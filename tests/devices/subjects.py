"""What is trained on devices: modules for the paths between stages, and all layers of the transparency grid."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from splitpipe.core import stream
from tests.helpers.compiling import EAGER
from tests.helpers.modules import Pop, Stash, module_of
from tests.helpers.twin import even
from tests.promise.layers import LAYERS, Apply, batched_of

from . import modules
from .modules import WIDTH

Make = Callable[[], nn.Module]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def first() -> nn.Module:
    """Of two tensors the first, changed in place."""
    return Apply(lambda value: value[0].relu_())


def layered(forward: Callable[..., Any], **parts: Any) -> Make:
    """Makes modules with this forward and a layer."""
    return lambda: module_of(forward, layer=linear(), **parts)  # type: ignore[no-any-return]


def paired(self: Any, value: Any) -> Any:
    """Two tensors, one of which is a mask that has no gradient."""
    x, mask = value if isinstance(value, tuple) else (value, value.detach() > 0)
    return self.layer(x) * mask, mask


def scaled(self: Any, value: Any) -> Any:
    """A tensor of the batch, and one that all microbatches have whole, with a gradient of its own."""
    x, table = value
    return self.layer(x) * table.tanh(), table


def sliced(self: Any, x: Tensor) -> Tensor:
    """Its output, and its input's gradient, are slices of transposes: in memory they have gaps, and another order."""
    both = torch.cat([x, x.detach()])
    return (self.layer.weight @ both.t().contiguous()).t()[: len(x)]  # type: ignore[no-any-return]


def elsewhere(self: Any, x: Tensor) -> Tensor:
    """Computes on a stream of its own, where there are streams, as layers with a communication of their own do."""
    here = stream.current(x.device)
    own = self.own = self.own or stream.new(x.device)
    stream.wait(own, here)
    with stream.use(own):
        y: Tensor = self.layer(x.sin()).tanh()
    stream.wait(here, own)
    stream.hold(x, own)
    stream.hold(y, here)
    return y


class Block(nn.Module):
    """A norm, a linear layer, a scale: several ops with weights, which are deferred if it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.scale = nn.LayerNorm(WIDTH), linear(), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.layer(self.norm(x)).tanh()


def _first(value: Any) -> Tensor:
    tensor: Tensor = next(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return tensor


def _rows(size: int) -> Tensor:
    return torch.randn(size, WIDTH)


@dataclass(frozen=True)
class Subject:
    """Something to train, for so many stages, with a batch of so many rows.

    It is to equal the unwrapped "module"; the same pipeline on the "cpu", where microbatches are normalised apart; or
    the same pipeline that "never" checkpoints, where random numbers are drawn.
    """

    make: Callable[[int], nn.Module]
    value: Callable[[int], Any] = _rows
    options: dict[str, Any] = field(default_factory=dict)
    measure: Literal["module", "cpu", "never"] = "module"
    differentiable: bool = True  # Whether the batch requires grad.
    cuts: Callable[[int], list[str]] | None = None  # None: by layers.
    dim: int = 0  # Along which the batch's first tensor has its rows.

    def rows(self, batch: Any) -> int:
        """The rows of a batch."""
        return _first(batch).shape[self.dim]

    def borders(self, stages: int) -> dict[str, Any]:
        """The options of SplitPipe that say where the stages begin."""
        if self.cuts is not None:
            return {"cuts": self.cuts(stages)}
        layers: Any = self.make(stages)
        return {"balance": even(len(layers), stages)}


def in_each(*makes: Make) -> Callable[[int], nn.Sequential]:
    """These layers in every stage."""
    return lambda stages: nn.Sequential(*(nn.Sequential(*(make() for make in makes)) for _ in range(stages)))


def and_last(make: Make, *makes: Make) -> Callable[[int], nn.Sequential]:
    """One layer in every stage but the last, which has others."""
    return lambda stages: nn.Sequential(*(make() for _ in range(stages - 1)),
                                        nn.Sequential(*(make() for make in makes)))


def skips(stages: int) -> nn.Sequential:
    """A skip from the first stage to the last one."""
    first, last = nn.Sequential(linear(), Stash()), nn.Sequential(Pop(), linear())
    return nn.Sequential(first, *(linear() for _ in range(stages - 2)), last)


def ties(stages: int) -> nn.Sequential:
    """The first two stages share their layer: they are to be on one device."""
    shared = linear()
    return nn.Sequential(shared, nn.Sequential(shared, nn.Tanh()), *(linear() for _ in range(stages - 2)))


def _between(name: str) -> Subject:
    make, value = LAYERS[name]
    batched = batched_of(name, "balance")
    dim = batched if isinstance(batched, int) else 0
    options = {} if batched is None else {"batched": {"input": dim, "target": 0} if dim else batched}
    if dim:  # The output has the batch elsewhere, which a loss can't be told: its mean is by rows.
        options["reduction"] = "mean"
    return Subject(lambda stages: nn.Sequential(nn.Identity(), *make(), nn.Identity()), value, options, dim=dim)


chain = in_each(linear, nn.Tanh)
SUBJECTS = {
    "chain": Subject(chain),
    "pairs": Subject(and_last(layered(paired), layered(paired), first)),
    "skips": Subject(skips),
    "statistics": Subject(in_each(linear, lambda: nn.BatchNorm1d(WIDTH)), options={"deferred_batch_norm": True},
                          measure="cpu"),
    "slices": Subject(in_each(layered(sliced))),
    "elsewhere": Subject(in_each(layered(elsewhere, own=None))),
    "elsewhere, a batch without grad": Subject(in_each(layered(elsewhere, own=None)), differentiable=False),
    "compiled": Subject(in_each(Block, Block), options={"compile": EAGER}),
    "ties": Subject(ties),
    "dropouts": Subject(in_each(linear, nn.Dropout, nn.Tanh), measure="never"),
    "tables": Subject(and_last(layered(scaled), layered(scaled), first), lambda size: (_rows(size), _rows(1)[0]),
                      {"batched": (True, False)}),
    **{f"module: {name}": Subject(make, cuts=modules.cuts) for name, make in modules.MODULES.items()},
    "module: compiled": Subject(modules.Carried, options={"compile": EAGER}, cuts=modules.cuts),
    **{f"layers: {name}": _between(name) for name in LAYERS},
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
