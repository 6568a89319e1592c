"""A module whose forward calls layers in a loop, for pipelines by cuts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn


class Loop(nn.Module):
    """Layers that a forward of the module's own calls one after the other."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def cuts(balance: Sequence[int]) -> list[str]:
    """The names in a Loop at which the stages of a balance begin."""
    return [f"layers.{sum(balance[:stage])}" for stage in range(1, len(balance))]
