"""Hooks of parameters are silent while B computes the gradients of microbatches: they see the batch's, once."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def _silent(*_: Any) -> None:
    """Takes the place of a parked hook, which can then be removed meanwhile."""


class LeafHooks:
    """Hooks of leaves that a call has parked."""

    def __init__(self) -> None:
        self._parked: list[tuple[dict[int, Any], int, Any]] = []  # The tensor's table of hooks, key, hook.

    def park(self, leaves: Iterable[Tensor]) -> None:
        """Parks the hooks that leaves have now."""
        for x in leaves:
            tables: list[Any] = [x._backward_hooks, x._post_accumulate_grad_hooks]
            for table in filter(None, tables):
                for key, hook in list(table.items()):
                    if hook is not _silent:
                        self._parked.append((table, key, hook))
                        table[key] = _silent

    def restore(self) -> None:
        """Puts the hooks back that haven't been removed."""
        parked, self._parked = self._parked, []
        for table, key, hook in parked:
            if table.get(key) is _silent:
                table[key] = hook
