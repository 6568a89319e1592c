"""Layers of random models: on other shapes, with parameters and buffers of their own, on nestings, with skips."""
from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from splitpipe.skip import pop, stash

Pair = namedtuple("Pair", ["left", "right"])
#: A matrix that goes along with the rows, and is no part of the batch.
Weight = namedtuple("Weight", ["of"])
WIDTH = 4


class Lifted(nn.Module):
    """A layer that works on another shape of a row."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = layer
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(len(x), *self.shape)).reshape(x.shape)


class ByMicrobatch(nn.BatchNorm1d):
    """What a pipeline promises of BatchNorm, for a whole batch: microbatches normalised apart."""

    def __init__(self, features: int, chunks: int, deferred: bool) -> None:
        super().__init__(features)
        self.chunks = chunks
        self.deferred = deferred

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        if not self.deferred:
            return torch.cat([super(ByMicrobatch, self).forward(part) for part in x.chunk(self.chunks)])
        with torch.no_grad():
            super().forward(x)
        return torch.cat([F.batch_norm(part, None, None, self.weight, self.bias, True, 0.0, self.eps)
                          for part in x.chunk(self.chunks)])


class Own(nn.Module):
    """Parameters of its own in torch's functions."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ParameterList(parameters)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


class Total(nn.Module):
    """Sums up in buffers what has passed: in place, and by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("shift", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        self.total = self.total + x.detach().double().reshape(-1, WIDTH).sum(0)
        return x + self.shift


class Parallel(nn.Module):
    """Layers in a ModuleList, all of which get the input; their sum."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


class Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x * 1)


class Checkpointed(nn.Module):
    """A residual block inside torch.utils.checkpoint, whose reentrant form asks for an input and output with grad.

    Args:
        layer: inside.
        reentrant: which form of it.
        plain: the same without a checkpoint.
    """

    def __init__(self, layer: nn.Module, reentrant: bool, plain: bool) -> None:
        super().__init__()
        self.layer = layer
        self.reentrant = reentrant
        self.plain = plain

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return self.inner(x * 1)
        if self.reentrant and not (x.requires_grad and torch.is_grad_enabled()):
            return self.inner(x)
        return checkpoint(self.inner, x * 1, use_reentrant=self.reentrant)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Closing(nn.Module):
    """Multiplies by a leaf that a closure holds; ``held`` is for those who look at its gradient."""

    def __init__(self, leaf: Tensor) -> None:
        super().__init__()
        self.held = [leaf]
        self.function = lambda x: x * leaf

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Embed(nn.Embedding):
    """Looks up a row's numbers; of one number a row if the rows have a single dimension."""

    def __init__(self, flat: bool) -> None:
        super().__init__(7, WIDTH, padding_idx=0)
        self.flat = flat

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens[:, 0] if self.flat else tokens)


def main(value: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The first tensor of a nesting, and what puts another into its place."""
    leaves, spec = tree_flatten(value)
    place = next(k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return leaves[place], lambda x: tree_unflatten([*leaves[:place], x, *leaves[place + 1 :]], spec)


def weights(value: Any) -> list[Weight]:
    """The matrices that go along."""
    return [x for x in tree_leaves(value, is_leaf=lambda x: isinstance(x, Weight)) if isinstance(x, Weight)]


def merged(value: Any) -> Tensor:
    """One tensor of all those in a nesting."""
    first, *others = (x for x in tree_leaves(value, is_leaf=lambda x: isinstance(x, Weight))
                      if isinstance(x, (Tensor, Weight)))
    for other in others:
        if isinstance(other, Weight):
            first = first + 0.5 * F.linear(first, other.of)
        elif other.is_floating_point():
            first = first + 0.5 * other.mean(-1, keepdim=True)
        else:
            first = first * (1 + other.to(first.dtype).reshape(-1, *[1] * (first.dim() - 1)))
    return first


class Inside(nn.Module):
    """A layer on the first tensor of a nesting; the rest passes by."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.layer(value)
        x, put = main(value)
        return put(self.layer(x))


class Handing(nn.Module):
    """Hands its own tensor on as it is, beside the rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight)

    def forward(self, value: Any) -> Any:
        return {"x": merged(value), "more": [Weight(self.weight)]}


class Skipping(nn.Module):
    """Adds what it pops to its input, and stashes its output, under several names, and a matrix that goes along."""

    def __init__(self, layer: nn.Module, stashed: list[str], popped: list[str], copied: bool) -> None:
        super().__init__()
        self.layer = layer
        self.stashed, self.popped, self.copied = stashed, popped, copied

    def forward(self, value: Any) -> Any:
        x, put = main(value)
        for name in self.popped:
            skip = yield pop(name)
            if skip["x"].is_floating_point() and x.is_floating_point():
                x = x + skip["scale"] * skip["x"]
            for weight in skip["weights"]:
                x = x + F.linear(x, weight.of) if x.is_floating_point() else x
        value = self.layer(put(x))
        for number, name in enumerate(self.stashed):
            kept, _ = main(value)
            kept = kept * 1 if self.copied or number else kept
            yield stash(name, {"x": kept, "none": None, "scale": 0.5, "weights": weights(value)})
        return value


#: What gives a nesting, of any value.
PACKS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x.tanh(), x * 2),
    "dict": lambda x: {"a": x * 1.5, "b": [x.sin(), None], "c": 3},
    "namedtuple": lambda x: Pair(x * 1, ("text", x.cos(), ())),
    "integers": lambda x: {"x": x * 1, "numbers": x.detach().reshape(len(x), -1)[:, 0].gt(0).long()},
    "detached": lambda x: [x.detach() * 2, x * 1],
    "twice": lambda x: (x, x),
    "views": lambda x: (x, x[..., :2]),
}
