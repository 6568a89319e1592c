"""What weights are called in their layers, for messages.

Held by nodes of the graph, and so holds nothing: a layer that keeps its own output would be a cycle through the graph,
which no collector finds.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn


class Names:
    """The names of a stage's parameters.

    Args:
        layers: name and module of each layer.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._layers = [(name, weakref.ref(layer)) for name, layer in layers]

    def of(self, weights: Sequence[Tensor | None]) -> partial[str]:
        """A call that gives the names of some weights."""
        return partial(self._find, [weakref.ref(weight) for weight in weights if weight is not None])

    def _find(self, weights: Sequence[weakref.ref[Tensor]]) -> str:
        wanted = [weight() for weight in weights]
        names = [
            own
            for name, layer in ((name, reference()) for name, reference in self._layers)
            if layer is not None
            for own, parameter in layer.named_parameters(name)
            if any(parameter is weight for weight in wanted)
        ]
        return ", ".join(names) or "a computed weight"
