"""Sequence numbers: of the nodes that are ready, a device goes backward through the one with the highest number first.

Autograd counts them by thread. Two threads' numbers compare by accident, so nodes that are to go first, last or in
turn between the threads of a pipeline are given theirs here. Priority orders what happens on the host, and no more:
gradients are right in any order.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from splitpipe.core.thread_state import unobserved

#: A gradient that can leave for another device leaves before its own device gets more to do.
FIRST = 2**62
LAST = 0


def rank(x: Tensor, number: int) -> None:
    """Sets the sequence number of the tensor's node."""
    node: Any = x.grad_fn
    node._set_sequence_nr(number)


def rank_of(x: Tensor) -> int:
    """The sequence number of the tensor's node; 0 for a leaf, which has none."""
    return 0 if x.grad_fn is None else x.grad_fn._sequence_nr()


def reserve(count: int) -> None:
    """Has this thread make no node with a number below ``count`` any more. Costs something once a thread.

    Guarantee: it ends. Inference mode, or a mode of the caller's that runs ops without grad, would have no node made.
    """
    if _get_sequence_nr() < count:
        with unobserved(), torch.inference_mode(False), torch.enable_grad():
            x = torch.empty(0, device="cpu", requires_grad=True)
            while _get_sequence_nr() < count:
                x.view(0)
