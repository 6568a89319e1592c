"""The gradients that a scheduled call has computed, collected for their release: of parameters and of the input."""
from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from splitpipe.core import microbatch, stream
from splitpipe.core.stream import Stream
from splitpipe.deferral.accumulator import Sums, Total
from splitpipe.training.gradients import Grads


class GradientGroup(NamedTuple):
    """Gradients that are released together.

    Attributes:
        stage: on whose stream they were computed.
        totals: the gradients.
        reals: what they are gradients of.
    """

    stage: int
    totals: list[Total]
    reals: list[Tensor]


def parameter_gradients(
    layers: Sequence[Sequence[Sequence[Tensor]]], sums: Sequence[Sums], computes: Sequence[Stream]
) -> list[GradientGroup]:
    """The gradients of what the stages computed with: parameters, layer by layer, and other leaves of their graphs.

    Tensors without a gradient are left out.

    Args:
        layers: parameters of each layer of each stage.
        sums: of each stage.
        computes: the stream of each.
    """
    _meet(computes)
    found: dict[int, list[tuple[int, Tensor, Total]]] = {}
    for stage, own in enumerate(sums):
        for leaf, total in own:
            found.setdefault(id(leaf), []).append((stage, leaf, total))
    groups = []
    for stage, parts in enumerate(layers):
        for parameters in parts:
            reals = [parameter for parameter in parameters if id(parameter) in found]
            if reals:
                totals = [_sum(found.pop(id(real)), stage, computes) for real in reals]
                groups.append(GradientGroup(stage, totals, reals))
    for rest in found.values():
        stage, leaf, _ = rest[0]
        groups.append(GradientGroup(stage, [_sum(rest, stage, computes)], [leaf]))
    return groups


def _meet(computes: Sequence[Stream]) -> None:
    """Streams of one device wait for each other: a parameter may have gradients from several."""
    different = {id(compute): compute for compute in computes if compute is not None}.values()
    for one in different:
        for other in different:
            if one.device == other.device:
                stream.wait(one, other)


def _sum(parts: Sequence[tuple[int, Tensor, Total]], stage: int, computes: Sequence[Stream]) -> Total:
    """One sum of several, on a stage's stream."""
    (_, _, whole), *others = parts
    if others:
        with stream.use(computes[stage]):
            for _, _, other in others:
                whole.join(other)
    for at, _, total in parts:
        if not stream.same(computes[at], computes[stage]) and total.value is not None:
            stream.hold(total.value, computes[stage])
    return whole


def input_gradients(
    leaves: Sequence[Any], rows: list[tuple[int, int]], grads: Sequence[Grads], whole: Container[int] = ()
) -> list[tuple[Tensor, Tensor]]:
    """The caller's tensors that require grad and have one, each with its gradient.

    Args:
        leaves: of the input, or the target.
        rows: first row and number of rows of each microbatch.
        grads: of those leaves that require grad, of each microbatch.
        whole: places of the leaves that every microbatch had whole.
    """
    wanted = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    columns = zip(*grads) if wanted else ()
    pairs = [
        (leaf, microbatch.gradient_of(leaf, rows, column, k in whole)) for (k, leaf), column in zip(wanted, columns)
    ]
    return [(leaf, grad) for leaf, grad in pairs if grad is not None]
