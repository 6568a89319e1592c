"""Layers in company: runs of them are measured together, as in a stage, and each gets its part of the whole.

A layer that is run over and over finds its weights in the caches, and memory where it left it. In a stage other layers
were at work in between. So what runs of layers take is right, and what single layers take says how to divide it.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splitpipe.planner.probe import Times
from splitpipe.planner.profile import Layer

#: Runs that a module is divided into, at most.
RUNS = 8


def length(layers: int) -> int:
    """How many layers a run has, of so many in all; the last one may have less."""
    return -(-layers // RUNS)


def divided(layers: Sequence[Layer], whole: Times) -> list[Layer]:
    """The layers with such times that they take what the run took.

    Args:
        layers: of the run, as they were measured by themselves.
        whole: what the run took.

    Example:
        >>> found = divided([Layer(1, 2, 0), Layer(3, 2, 0)], Times(2, 8, 1))
        >>> [(layer.forward, layer.backward_input, layer.backward_weight) for layer in found]
        [(0.5, 4.0, 0.0), (1.5, 4.0, 0.0)]
    """
    parts = []
    for name, time in whole._asdict().items():
        alone = sum(getattr(layer, name) for layer in layers)
        parts.append((name, time / alone if alone else 0.0))
    return [replace(layer, **{name: getattr(layer, name) * part for name, part in parts}) for layer in layers]
