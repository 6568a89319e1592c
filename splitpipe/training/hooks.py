"""Hooks of tensors, parked for the time of a scheduled call: they are to fire in the user's backward, and only there.

Autograd calls the hooks of a tensor whose gradient is captured, too. So a stand-in takes each hook's place in the
tensor's own dictionary: the user's handles stay good, and what a layer registers meanwhile is parked with the rest.

Guarantees: a hook is back when the last call that has parked it ends; ``put_back`` may be repeated if it was
interrupted. What would break them: parking without the lock, as two calls that share a parameter would each take the
other's stand-in for a hook. A backward in another thread meanwhile does without them.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor

from splitpipe.core.generator import gate

_gate = gate()


class _Parked:
    """Stands for a hook, and leaves the gradient as it is."""

    __slots__ = ("holders", "hook")

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.holders: set[ParkedHooks] = set()

    def __call__(self, *_: object) -> None:
        return None


class ParkedHooks:
    """The hooks that one call has parked."""

    def __init__(self) -> None:
        self._parked: list[tuple[dict[int, Any], int, _Parked]] = []

    def park(self, x: Tensor) -> None:
        """Parks the hooks that a tensor has by now."""
        hooks: dict[int, Any] | None = x._backward_hooks
        if not hooks:
            return
        with _gate.lock:
            for key, hook in list(hooks.items()):
                if not isinstance(hook, _Parked):
                    hook = hooks[key] = _Parked(hook)
                if self not in hook.holders:
                    hook.holders.add(self)
                    self._parked.append((hooks, key, hook))

    def put_back(self) -> None:
        """Ends the call's part in it."""
        with _gate.lock:
            for hooks, key, parked in self._parked:
                parked.holders.discard(self)
                if not parked.holders and hooks.get(key) is parked:  # Else its handle has removed it.
                    hooks[key] = parked.hook
            self._parked = []
