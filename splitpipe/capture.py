"""Going backward without touching a leaf: the gradients are captured, and summed by hand.

For graphs that reach leaves which were not lent to their stage: those that a closure holds, say. Autograd would
accumulate into their ``.grad``, which is the user's, and fire their hooks once a microbatch.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe import reach
from splitpipe.aliases import Loan
from splitpipe.deferral.sums import Sums
from splitpipe.note import add_note


class Capture:
    """Goes backward in one stage.

    Args:
        stage: for messages.
        loan: the parameters.
        sums: of the stage.
    """

    def __init__(self, stage: str, loan: Loan, sums: Sums) -> None:
        self._stage = stage
        self._loan = loan
        self._sums = sums

    def __call__(self, roots: Sequence[Any], grads: Sequence[Tensor]) -> None:
        """Adds to the sums of all leaves that are reached.

        Args:
            roots: tensors or edges to start from.
            grads: of these.

        Raises:
            RuntimeError: a leaf that is no parameter of the layers has hooks.
        """
        found = reach.leaves([root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots])
        for leaf in found:
            if leaf._backward_hooks and leaf not in self._loan:
                raise RuntimeError(
                    f"{self._stage} uses a tensor of shape {list(leaf.shape)} that requires grad, has hooks and is no "
                    "parameter of its layers: they would fire once a microbatch. Expected a parameter: register it "
                    "(self.name = nn.Parameter(...)) in the layer that uses it, or set no hooks on it."
                )
        if found:
            # What is outside of the pass may be gone through by every microbatch.
            captured = self._grad(roots, found, grads)
            for leaf, grad in zip(found, captured):
                if grad is not None:
                    self._sums.of(leaf).add(grad)

    def _grad(self, roots: Sequence[Any], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        try:
            return torch.autograd.grad(roots, leaves, grads, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                add_note(
                    error,
                    f"{self._stage} uses a tensor that requires grad and is no parameter of its layers, whose gradient "
                    "can't be had through a reentrant torch.utils.checkpoint: pass use_reentrant=False to it, or "
                    "register the tensor (self.name = nn.Parameter(...)) in the layer that uses it.",
                )
            raise
