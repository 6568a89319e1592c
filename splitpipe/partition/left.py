"""Tensors with graphs that blocks leave in attributes: for the code right after them, and for no other.

A tensor is withdrawn when its microbatch leaves the stage: in its place, there is something that raises when it is used
(``Stale``). Until then, no other microbatch is on that stage, so code right after the block gets its own tensor. Code
on a later stage raises at the latest in the last microbatch, since no other one can leave a tensor after it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from splitpipe.partition.kept import inside, kept_tensors
from splitpipe.partition.stale import Stale


class LeftTensors:
    """What the blocks of a module leave."""

    def __init__(self) -> None:
        #: While calls are looked at, the name of each module, and its attributes at the start.
        self._before: dict[nn.Module, tuple[str, dict[str, Any]]] = {}
        #: By block, the names of the attributes in which it has left such tensors; and the stage of each module.
        self._of: WeakKeyDictionary[nn.Module, dict[tuple[nn.Module, str], str]] = WeakKeyDictionary()
        self._stages: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def begin(self, module: nn.Module, attributes: dict[nn.Module, dict[str, Any]]) -> None:
        """Begins to look for tensors that aren't among these attributes."""
        self._before = {part: (name, attributes[part]) for name, part in module.named_modules()}

    def end(self) -> None:
        """Looks no more: from now on, only at where some were."""
        self._before = {}

    def expected(self, microbatches: int) -> bool:
        """Whether blocks may leave some, as far as is known, in a call of several microbatches."""
        return microbatches > 1 and bool(self._before or self._of)

    def recalled(self, block: nn.Module, stage: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """A block's call, whose recomputations withdraw what they leave."""
        return _Recalled(call, partial(self.withdraw, block, stage)) if self._before or block in self._of else call

    def by(self, block: nn.Module) -> list[Tensor]:
        """The tensors with graphs that the block has left."""
        for _, part, own, x in kept_tensors(block) if self._before else ():
            name, before = self._before.get(part, ("", {}))
            if x.grad_fn is not None and (own not in before or vars(part)[own] is not before[own]):
                self._of.setdefault(block, {})[part, own] = f"{name}.{own}".strip(".")
        values = [vars(part).get(own) for part, own in self._of.get(block, ())]
        return [x for value in values for _, x in inside(value) if x.grad_fn is not None]

    def withdraw(self, block: nn.Module, stage: int) -> None:
        """Withdraws these tensors, even without a graph; raises if the attributes are those of another stage, too."""
        self.by(block)
        for (part, own), where in list(self._of.get(block, {}).items()):
            value = vars(part).get(own)
            if any(True for _ in inside(value)):
                if self._stages.setdefault(part, stage) != stage:
                    raise mixed([where])
                vars(part)[own] = Stale(where, isinstance(value, Tensor))


class _Recalled:
    """A block's call; what a recomputation leaves in attributes is withdrawn at once."""

    def __init__(self, call: Callable[..., Any], withdraw: Callable[[], None]) -> None:
        self._call = call
        self._withdraw = withdraw
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self._call(*args, **kwargs)
        if self._called:
            self._withdraw()
        self._called = True
        return value


#: What to do about a tensor in an attribute.
ADVICE = "Keep it in a local variable, or return it from the block"


def mixed(names: Sequence[str]) -> RuntimeError:
    """The error about tensors with graphs, of which other microbatches might get the wrong ones."""
    return RuntimeError(
        f"the forward left {', '.join(map(repr, names[:3]))}, a tensor with a graph, in an attribute of a "
        "module, which all microbatches share: code in the forward that reads it would get another microbatch's. "
        f"{ADVICE}; detach it if nothing there reads it."
    )
