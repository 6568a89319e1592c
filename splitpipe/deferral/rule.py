"""What a rule is: it reads a call of one of torch's functions as one of a SplitFunction, or says why it can't."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from splitpipe.deferral.function import SplitFunction

#: Function, input, weights and options; or why the call is left to autograd.
Found = tuple[type[SplitFunction], Tensor, tuple[Tensor | None, ...], dict[str, Any]] | str
Rule = Callable[..., Found]


def tensors(*values: object) -> bool:
    """Whether all are tensors, or None."""
    return all([value is None or isinstance(value, Tensor) for value in values])
