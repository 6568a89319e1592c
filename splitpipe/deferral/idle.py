"""Which layers a stage's mode stands aside for: in the first microbatch of the pass it caught nothing there.

A mode makes every function slower that is called under it, those written in Python by several microseconds. A layer
of convolutions, norms and activations calls many, and on a CPU there may be none among them to be caught.

The mode stays where a layer has a matrix of weights. It may be a table that not every microbatch looks up, and whose
gradient counts over the whole batch (see ``embedding``). And where a module is compiled: it would be compiled again.
"""
from __future__ import annotations

import torch
from torch import nn

from splitpipe.deferral.pending import Names


class Idle:
    """The layers of one stage in one pass.

    Args:
        names: of the stage's layers.
    """

    __slots__ = ("_names", "_shown")

    def __init__(self, names: Names) -> None:
        self._names = names
        self._shown: dict[tuple[int, bool], bool] = {}

    def has(self, number: int, fills: bool) -> bool:
        """Whether the mode may stand aside for a layer.

        Args:
            number: of the layer.
            fills: whether weight gradients of the microbatch fill idle time: then more is worth catching.
        """
        return self._shown.get((number, fills), False)

    def note(self, number: int, fills: bool, caught: int) -> None:
        """Notes how many calls of a layer were caught, the first time that it ran."""
        if (number, fills) not in self._shown:
            layer = None if caught else self._names.layer(number)
            self._shown[number, fills] = layer is not None and not _to_be_watched(layer)


def _to_be_watched(layer: nn.Module) -> bool:
    modules: list[nn.Module | None] = [layer]
    seen: set[nn.Module | None] = {None}
    with torch._C.DisableTorchFunction():  # Function modes see who asks for a dimension.
        for module in modules:  # It grows.
            if module is None or module in seen:
                continue
            seen.add(module)
            if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
                return True
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dim() == 2:
                    return True
            modules.extend(module._modules.values())
    return False
