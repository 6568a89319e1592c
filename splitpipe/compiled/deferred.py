"""The second half of a compiled backward: the weight gradients of one call, or of several microbatches together."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.compiled.halves import Halves
from splitpipe.deferral.accumulator import Total
from splitpipe.deferral.linear import merged


class Leftover:
    """What one call's first half leaves: the arguments of the second."""

    __slots__ = ("_others", "saved_for_weight")

    def __init__(self, given: Sequence[Any]) -> None:
        self.saved_for_weight: tuple[Tensor, ...] = tuple([x for x in given if isinstance(x, Tensor)])
        self._others = [(k, x) for k, x in enumerate(given) if not isinstance(x, Tensor)]

    def given(self) -> list[Any]:
        """The arguments."""
        found: list[Any] = list(self.saved_for_weight)
        for k, x in self._others:
            found.insert(k, x)
        return found


class Deferred:
    """The weights' half of a graph, used like a SplitFunction of its weights."""

    __name__ = "compiled"

    def __init__(
        self, second: Callable[[list[Any]], Sequence[Any]], halves: Halves, weights: Sequence[int]
    ) -> None:
        self._second = second
        self._made = halves.weights
        self._number = {number: k for k, number in enumerate(weights)}  # The weight of each output.

    def accumulate(self, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Any]]) -> None:
        """Adds the weight gradients of several calls."""
        _verify_first()
        pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for ctx, _ in parts:
            made = self._second(ctx.given())
            for number, places in self._made:
                total = totals[self._number[number]]
                if total is None:
                    continue
                if len(places) == 1:
                    total.add(made[places[0]])
                else:
                    pairs.setdefault(number, []).append((made[places[0]], made[places[1]]))
        for number, those in pairs.items():
            total = totals[self._number[number]]
            assert total is not None
            for left, right in merged(those, total):
                total.add_product(left.t(), right)

    def gradients(self, given: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """The weight gradients of one call, each with the index of its output in the whole graph."""
        _verify_first()
        made = self._second(list(given))
        for number, places in self._made:
            yield number, made[places[0]] if len(places) == 1 else made[places[0]].t().mm(made[places[1]])


def _verify_first() -> None:
    if torch.is_grad_enabled():  # As in a backward that is differentiated.
        raise RuntimeError(
            "create_graph=True was used in a backward through a compiled layer, but torch's compiler doesn't support "
            "second derivatives: expected SplitPipe(...) without compile=, or layers of another backend."
        )
