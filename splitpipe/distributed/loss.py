"""The loss of a microbatch as its part of the batch's loss; the last stage's process has the whole target."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.torch_private import tree_map_only
from splitpipe.loss import terms
from splitpipe.loss.reducing import Told
from splitpipe.loss.terms import Number
from splitpipe.training.loss import Objective


class Loss:
    """A microbatch's part of the loss of the batch; all microbatches have the same size."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], chunks: int) -> None:
        self._objective = Objective(loss_fn, None, Told(), pairs=False)
        self._chunks = chunks
        self._target: Any = None
        self._whole: list[Any] | None = None

    def begin(self, target: Any) -> None:
        """Takes the target of the whole batch."""
        self._objective.begin([1] * self._chunks)
        self._target, self._whole = target, None

    def end(self) -> None:
        """Ends the step: forgets the target."""
        self._target = self._whole = None

    def __call__(self, output: Any, target: Any) -> Tensor:
        losses = self._objective.loss(output, target)
        number = losses.made
        assert losses.given is not None
        if not isinstance(number, Number):
            return losses.given / self._chunks
        if self._whole is None:
            self._whole = self._divisors(number, output, target)
        if len(number.terms) != len(self._whole):
            raise ValueError(_DIFFERENT)
        total: Any = 0.0
        for term, divisor in zip(number.terms, self._whole):
            total = total + terms.part(term, 1 / self._chunks, divisor)
        made: Tensor = torch.as_tensor(total).to(losses.given.dtype)
        return made

    def _divisors(self, number: Number, output: Any, target: Any) -> list[Any]:
        """The terms' divisors for the whole batch: counts may only depend on targets."""
        each = [number] * self._chunks
        if any(term.divisor is not None and isinstance(term.divisor.count, Tensor) for term in number.terms):
            with torch.no_grad():
                empty = tree_map_only(Tensor, torch.zeros_like, output)
                found = [self._objective.loss(empty, part).made for part in self._parts(target)]
            each = [made for made in found if isinstance(made, Number)]
            if len(each) < len(found) or terms.aligned(each) is None or terms.conditional(each):
                raise ValueError(_DIFFERENT)
        return [terms.whole([made.terms[k] for made in each]) for k in range(len(number.terms))]

    def _parts(self, target: Any) -> list[Any]:
        """The targets of all microbatches."""
        return [
            tree_map_only(Tensor, lambda x: x.chunk(self._chunks)[i] if x.dim() else x, self._target)  # noqa: B023
            for i in range(self._chunks)
        ]


_DIFFERENT = (
    "microbatches have losses with different terms, which processes can't combine: expected the same terms for every "
    "microbatch. Return them, or use splitpipe.SplitPipe."
)
