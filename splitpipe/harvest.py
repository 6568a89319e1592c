"""What a pass has computed, collected: the gradients of parameters, of the input, of whatever else the loss reaches."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitpipe.aliases import Lent, Loan
from splitpipe.deferral.ledger import Sums
from splitpipe.deferral.total import Total
from splitpipe.entry import Grads


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


def parameters(loan: Loan, sums: Sequence[Sums]) -> Iterator[Sheaf]:
    """The gradients of the parameters, layer by layer. Those that nothing was computed for are left out."""
    for stage, layers in enumerate(loan.layers):
        for layer in layers:
            found = [(total, lent.real) for lent in layer if (total := _sum(lent, sums)) is not None]
            if found:
                yield Sheaf(stage, [total for total, _ in found], [real for _, real in found])


def _sum(lent: Lent, sums: Sequence[Sums]) -> Total | None:
    whole: Total | None = None
    for worker, alias in lent.aliases.items():
        for part in (sums[worker].take(alias), None if alias.grad is None else Total.of(alias.grad)):
            if whole is None:
                whole = part
            elif part is not None:
                whole.join(part)
        alias.grad = None
    return whole


def strays(sums: Sequence[Sums], stages: Sequence[int]) -> Iterator[Sheaf]:
    """The gradients of leaves that were not lent.

    Args:
        sums: of each worker, without what the parameters have taken.
        stages: a stage of each worker.
    """
    found: dict[int, Sheaf] = {}
    for own, stage in zip(sums, stages):
        for leaf, total in own.rest():
            if id(leaf) in found:
                found[id(leaf)].totals[0].join(total)
            else:
                found[id(leaf)] = Sheaf(stage, [total], [leaf])
    yield from found.values()


def given(leaves: Sequence[Any], rows: Sequence[tuple[int, int]], grads: Callable[[int], Grads], stage: int) -> Sheaf:
    """The gradients of what the caller gave.

    Args:
        leaves: of the input, or the target.
        rows: first row and number of rows of each microbatch.
        grads: of those leaves that require grad, of each microbatch.
        stage: that it was given to.
    """
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    sheaf = Sheaf(stage, [], [])
    if not wanted:
        return sheaf
    for leaf, parts in zip(wanted, zip(*[grads(i) for i in range(len(rows))])):
        if any(part is not None for part in parts):
            sheaf.totals.append(Total.of(_joined(leaf, rows, parts)))
            sheaf.reals.append(leaf)
    return sheaf


def _joined(leaf: Tensor, rows: Sequence[tuple[int, int]], parts: Sequence[Tensor | None]) -> Tensor:
    if not leaf.dim():
        return torch.stack([part for part in parts if part is not None]).sum(0)
    shape = leaf.shape[1:]
    return torch.cat([
        torch.zeros((count, *shape), dtype=leaf.dtype, device=leaf.device) if part is None else part
        for part, (_, count) in zip(parts, rows)
    ])
