"""Guards of a pipelined module's forward: what compilers, transforms and exports can't trace."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import Proxy

from splitpipe.core.torch_private import _disable_dynamo, peek_interpreter_stack


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function."""
    return function(*arguments)


#: Calls a function that torch.compile can't trace because of its threads; code around it and its layers are traced.
# torch.compiler.disable isn't used: it would load the compiler when this module is imported, which takes seconds.
outside_of_compilers: Callable[..., Any] = _disable_dynamo(called)


_DETACH = "splitpipe.detach(model) returns the plain module"


def refuse_transforms() -> None:
    """Raises inside a torch.func transform, forward-mode AD, a trace or an export, which would be lost."""
    if peek_interpreter_stack() is not None:
        raise RuntimeError(
            "SplitPipe was called inside a torch.func transform (grad, vmap, jvp ...), which doesn't reach its worker "
            f"threads. Use autograd (loss.backward(), torch.autograd.grad), or transform the plain module: {_DETACH}."
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(
            "SplitPipe was called by torch.jit.trace (or torch.onnx.export with dynamo=False), which doesn't see its "
            f"worker threads. Trace the plain module: {_DETACH}."
        )
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "SplitPipe was called inside forward-mode AD (forward_ad.dual_level), but its copies lose tangents. "
            f"Use reverse mode, or call the plain module: {_DETACH}."
        )


def refuse_export(input: object = None) -> None:
    """Raises for an export or a symbolic trace, while code that is traced can still raise."""
    if torch.compiler.is_exporting() or isinstance(input, Proxy):
        raise RuntimeError(
            "SplitPipe was called by torch.export, torch.onnx.export or torch.fx, which don't see its worker "
            f"threads. Export the plain module: {_DETACH}."
        )
