"""Layers in company: runs of them are measured together, as in a stage, and each gets its part of the whole.

A layer that is run over and over finds its weights in the caches, and memory where it left it. In a stage other layers
were at work in between. So runs of layers are measured as one stage, and with a stage for each layer, which says how to
divide what the one stage takes.
"""
from __future__ import annotations

from collections.abc import Sequence

from splitpipe.planner.probe import Times

#: Runs that a module is divided into, at most.
RUNS = 8
#: How often each run is measured, one after the other, if there is time: the median counts.
ROUNDS = 3


def length(layers: int) -> int:
    """How many layers a run has, of so many in all; the last one may have less."""
    return -(-layers // RUNS)


def divided(each: Sequence[Times], whole: Times) -> list[Times]:
    """The parts that layers have of what their run takes.

    Args:
        each: what the layers took as stages of their own, one behind the other.
        whole: what the run took as one stage.

    Example:
        >>> divided([Times(1, 2, 0), Times(3, 2, 0)], Times(2, 8, 1))
        [Times(forward=0.5, backward_input=4.0, backward_weight=0.5), \
Times(forward=1.5, backward_input=4.0, backward_weight=0.5)]
    """
    columns = []
    for times, together in zip(zip(*each), whole):
        total = sum(times)
        columns.append([together * (time / total if total else 1 / len(each)) for time in times])
    return [Times(*times) for times in zip(*columns)]
