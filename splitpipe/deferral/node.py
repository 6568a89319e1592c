"""Autograd functions that belong to the split backward engine."""
from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from torch.autograd.function import _SingleLevelFunction


class Node(_SingleLevelFunction):
    """A function whose backward has effects that autograd does not know of.

    Not a Function, which asks at every call whether it is inside a transform of torch.func: a Catch has asked.
    """

    apply: ClassVar[Any]

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> NoReturn:
        """What compiled autograd asks a node before it traces it."""
        raise RuntimeError(
            "compiled autograd was to trace the split backward engine, which puts weight gradients off while autograd "
            "runs: expected SplitPipe(..., backward='autograd'), or a backward outside of compiled autograd (without "
            "torch._dynamo.config.compiled_autograd)."
        )
