"""What a pass has computed, collected: the gradients of parameters, of the input, of whatever else the loss reaches."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitpipe import stream
from splitpipe.aliases import Lent, Loan
from splitpipe.deferral.sums import Sums
from splitpipe.deferral.total import Total
from splitpipe.entry import Grads
from splitpipe.stream import Stream


class Sheaf(NamedTuple):
    """Gradients that are released together.

    Attributes:
        stage: on whose stream they were computed.
        totals: the gradients.
        reals: what they are gradients of.
    """

    stage: int
    totals: list[Total]
    reals: list[Tensor]


def inside(loan: Loan, sums: Sequence[Sums], computes: Sequence[Stream]) -> list[Sheaf]:
    """The gradients of what the stages computed with: parameters, layer by layer, and leaves that were not lent.

    What no gradient was computed for is left out.

    Args:
        loan: the parameters.
        sums: of each stage.
        computes: the stream of each.
    """
    _meet(computes)
    found: dict[int, list[tuple[int, Tensor, Total]]] = {}
    for stage, own in enumerate(sums):
        for leaf, total in own:
            found.setdefault(id(leaf), []).append((stage, leaf, total))
    sheaves = []
    for stage, layers in enumerate(loan.layers):
        for layer in layers:
            pairs = [(lent, _sum(list(_parts(lent, found)), stage, computes)) for lent in layer]
            pairs = [(lent, total) for lent, total in pairs if total.value is not None]
            if pairs:
                sheaves.append(Sheaf(stage, [total for _, total in pairs], [lent.real for lent, _ in pairs]))
    for parts in found.values():
        stage, leaf, _ = parts[0]
        sheaves.append(Sheaf(stage, [_sum([(at, total) for at, _, total in parts], stage, computes)], [leaf]))
    return sheaves


def _meet(computes: Sequence[Stream]) -> None:
    """Streams of one device wait for each other: a parameter may have gradients from several."""
    different = {id(compute): compute for compute in computes}.values()
    for one in different:
        for other in different:
            if one is not None and other is not None and one.device == other.device:
                stream.wait(one, other)


def _parts(lent: Lent, found: dict[int, list[tuple[int, Tensor, Total]]]) -> Iterator[tuple[int, Total]]:
    for alias in lent.aliases.values():
        yield from ((at, total) for at, _, total in found.pop(id(alias), ()))


def _sum(parts: Sequence[tuple[int, Total]], stage: int, computes: Sequence[Stream]) -> Total:
    """One sum of several, on a stage's stream."""
    if not parts:
        return Total(torch.float32)
    (_, whole), *others = parts
    if others:
        with stream.use(computes[stage]):
            for _, other in others:
                whole.join(other)
    for at, total in parts:
        if not stream.same(computes[at], computes[stage]) and total.value is not None:
            stream.hold(total.value, computes[stage])
    return whole


def given(
    leaves: Sequence[Any], rows: Sequence[tuple[int, int]], grads: Sequence[Grads]
) -> list[tuple[Tensor, Tensor]]:
    """What the caller gave that requires grad and has one, each with its gradient.

    Args:
        leaves: of the input, or the target.
        rows: first row and number of rows of each microbatch.
        grads: of those leaves that require grad, of each microbatch.
    """
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    columns = zip(*grads) if wanted else ()
    return [
        (leaf, _joined(leaf, rows, column))
        for leaf, column in zip(wanted, columns)
        if any(part is not None for part in column)
    ]


def _joined(leaf: Tensor, rows: Sequence[tuple[int, int]], parts: Sequence[Tensor | None]) -> Tensor:
    if not leaf.dim():
        return torch.stack([part for part in parts if part is not None]).sum(0)
    shape = leaf.shape[1:]
    return torch.cat([
        torch.zeros((count, *shape), dtype=leaf.dtype, device=leaf.device) if part is None else part
        for part, (_, count) in zip(parts, rows)
    ])
