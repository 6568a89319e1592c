"""Guards of a pipelined module's forward: what compilers, transforms and exports can't trace."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import Proxy

from splitpipe.core.torch_private import _disable_dynamo, peek_interpreter_stack

_REFUSED = (
    "SplitPipe was called {}, which doesn't reach its worker threads and copies: expected the plain module there, "
    "which splitpipe.detach(model) returns."
)

#: Calls a function that torch.compile can't trace because of its threads; code around it and its layers are traced.
outside_of_compilers: Callable[..., Any] = _disable_dynamo(lambda function, *arguments: function(*arguments))


def refuse_transforms() -> None:
    """Raises inside a torch.func transform, forward-mode AD or a trace, which would be lost."""
    if peek_interpreter_stack() is not None:
        raise RuntimeError(_REFUSED.format("inside a torch.func transform (grad, vmap, jvp ...)"))
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(_REFUSED.format("by torch.jit.trace (or torch.onnx.export with dynamo=False)"))
    if forward_ad._current_level >= 0:
        raise RuntimeError(_REFUSED.format("inside forward-mode AD (forward_ad.dual_level)"))


def refuse_export(input: object = None) -> None:
    """Raises for an export or a symbolic trace, while code that is traced can still raise."""
    if torch.compiler.is_exporting() or isinstance(input, Proxy):
        raise RuntimeError(_REFUSED.format("by torch.export, torch.onnx.export or torch.fx"))
