"""What weights are called in their layers, for messages.

Held by nodes of the graph, and so holds no layer: one that keeps its own output would be a cycle through the graph,
which no collector finds.
"""
from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn


class Names:
    """The names of a stage's parameters.

    Args:
        layers: name and module of each layer.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self._layers = [(name, weakref.ref(layer)) for name, layer in layers]

    def layer(self, number: int) -> nn.Module | None:
        """A layer, by its place in the stage; None if it is gone."""
        return self._layers[number][1]()

    def of(self, weights: Sequence[Tensor]) -> str:
        """The names of some weights."""
        names = [
            own
            for name, layer in ((name, reference()) for name, reference in self._layers)
            if layer is not None
            for own, parameter in layer.named_parameters(name)
            if any(parameter is weight for weight in weights)
        ]
        return ", ".join(names) or "a computed weight"
