"""Moves parameters and buffers to other devices, as the same objects, for the sake of optimizers and tied modules."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import swap_tensors

from splitpipe.core.stream import Place
from splitpipe.core.torch_private import is_traceable_wrapper_subclass
from splitpipe.partition.resident import is_pipeline


def move_stages(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Moves each stage's layers to its device."""
    for stage, place in zip(stages, places):
        for layer in stage:
            move(layer, place.device)


def move(module: nn.Module, device: torch.device) -> None:
    """Moves a module, but no pipelines inside it, to a device."""
    # Not module.to(device), which may raise if a part places its tensors itself.
    module._apply(lambda x: moved(x, device), recurse=False)
    for child in module.children():
        if not is_pipeline(child):
            move(child, device)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """The tensor itself, on another device."""
    if x.device == device or not x.is_leaf:
        return x
    with torch.inference_mode(False), torch.no_grad():  # The first call may be in inference mode, others not.
        y, grad = x.to(device), None if x.grad is None else x.grad.to(device)
        _replace(x, y)
        x.grad = grad
    return x


def _replace(x: Tensor, y: Tensor) -> None:
    """Gives a tensor another one's contents, and keeps its hooks."""
    # Of a tensor that contains others, such as a quantised weight and its scales, these aren't part of its .data.
    if type(x).to is Tensor.to and not is_traceable_wrapper_subclass(x):
        try:
            x.data = y
            return
        except RuntimeError:  # Some devices' tensors are of another kind.
            pass
    if y is x:  # A weight may be quantised in place when it is moved.
        return
    hooks, later = x._backward_hooks, x._post_accumulate_grad_hooks
    if isinstance(x, Parameter) and not isinstance(y, Parameter):
        y = Parameter(y, x.requires_grad)
    swap_tensors(x, y)
    x._backward_hooks, x._post_accumulate_grad_hooks = hooks, later
