"""Moves a parameter or buffer to another device, as the same object, for the sake of optimizers and tied modules."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import swap_tensors

from splitpipe.core.torch_private import is_traceable_wrapper_subclass


def moves_itself(x: Tensor) -> bool:
    """True for a tensor that contains others, such as a quantised weight and its scales: its class moves them along."""
    return type(x).to is not Tensor.to or is_traceable_wrapper_subclass(x)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """The tensor itself, on another device."""
    if x.device == device or not x.is_leaf:
        return x
    with torch.inference_mode(False), torch.no_grad():  # The first call may be in inference mode, others not.
        y, grad = x.to(device), x.grad
        made = None if grad is None else grad.to(device)
        if moves_itself(x):  # The tensors that it contains aren't part of its .data.
            _become(x, y)
        else:
            try:
                x.data = y
            except RuntimeError:  # Some devices' tensors are of another kind.
                _become(x, y)
        x.grad = made
    return x


def _become(x: Tensor, y: Tensor) -> None:
    if y is x:  # A weight may be quantised in place when it is moved.
        return
    hooks, later = x._backward_hooks, x._post_accumulate_grad_hooks
    if isinstance(x, Parameter) and not isinstance(y, Parameter):
        y = Parameter(y, x.requires_grad)
    swap_tensors(x, y)
    x._backward_hooks, x._post_accumulate_grad_hooks = hooks, later
