"""A multilayer perceptron as a plain nn.Sequential: narrow to wide and back."""

from __future__ import annotations

from torch import nn


def mlp(*, narrow: int, wide: int, layers: int) -> nn.Sequential:
    """Linear layers with a ReLU between any two of them.

    Args:
        narrow: width of the input, and of every second layer's output.
        wide: width of the outputs in between.
        layers: number of linear layers.

    Example:
        >>> len(mlp(narrow=4, wide=8, layers=2))
        3
    """
    children: list[nn.Module] = []
    for number in range(layers):
        children += [nn.Linear(*((wide, narrow) if number % 2 else (narrow, wide))), nn.ReLU()]
    return nn.Sequential(*children[:-1])
