"""What a recomputation must find as its forward found it: modes, tensors, random numbers and context variables.

F has written to buffers once, and R must not write to them again. So R gets copies with the values that F began with:
spectral norm reads what it writes. Which buffers F writes to, the first checkpointed F shows, by version or by value,
since codebooks often write through ``.data``. A BatchNorm's statistics, which get no new version, always count.

If R leaves a buffer alone that F has written to, something else told F to, such as a cache's length in an attribute. R
has then computed with the value before: an error, after which the next step is right.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from splitpipe.core.phase import phase
from splitpipe.core.random_numbers import RNGStates
from splitpipe.core.tensors import is_plain, version_of
from splitpipe.core.thread_state import bound
from splitpipe.core.torch_private import _foreach_add

T = TypeVar("T")


class Modules:
    """Modules that are recomputed together: a stage of a Sequential, or a block."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.parameters = [(m._parameters, n, p) for m in modules for n, p in m._parameters.items() if p is not None]
        self.buffers = [(m, n) for m in modules for n, x in m._buffers.items() if x is not None and not is_lazy(x)]
        self._tables: list[Any] = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        #: The buffers to which F writes; None: no F has shown it yet.
        self.written: set[tuple[nn.Module, str]] | None = None

    @property
    def version(self) -> tuple[int, list[bool], list[bool]]:
        """Changes when a parameter is written to, frozen or unfrozen, or when what is None or lazy is filled."""
        own = [p for _, _, p in self.parameters]
        tables: list[Any] = [table for m in self.modules for table in (m._modules, m._parameters, m._buffers)]
        empty = [x is None or is_lazy(x) for table in tables for x in table.values()]
        return sum([p._version for p in own]), [p.requires_grad for p in own], empty

    @property
    def hooks(self) -> int:
        """The number of hooks of forwards. A forward may set or remove some."""
        return sum(map(len, self._tables))


class CheckpointedRun:
    """One checkpointed F that is about to run, and R of it, which finds everything as it was."""

    def __init__(self, modules: Modules, rng_states: RNGStates, whose: str) -> None:
        self._modules, self._rng_states, self._whose = modules, rng_states, whose
        self._version, self._hooks, self._context = modules.version, modules.hooks, copy_context()
        self._modes = [(vars(m), "training", m.training) for m in modules.modules]
        self._buffers = [(m, n, x, version_of(x)) for m, n in modules.buffers if (x := m._buffers.get(n)) is not None]
        known = modules.written
        self._before = _copies({id(x): x for m, name, x, _ in self._buffers if known is None or (m, name) in known})
        self._written: list[tuple[nn.Module, str, Tensor]] = []  # A layer that differentiates runs R before F ends.

    def first(self, forward: Callable[[], T]) -> T:
        """Runs F."""
        with bound(phase, "checkpointing"):
            result = forward()
        self._hooks = self._modules.hooks
        modules, buffers, before = self._modules, self._buffers, self._before
        first, written = modules.written is None, {*(modules.written or ())}
        for m, name, x, version in buffers:
            if m._buffers.get(name) is not x or version_of(x) != version:
                self._written.append((m, name, x))
                written.add((m, name))
            elif first and (hasattr(m, "track_running_stats") or is_plain(x) and not torch.equal(x, before[id(x)])):
                written.add((m, name))  # Of a DeferredBatchNorm, the call writes to all at its end.
        modules.written = written
        self._before = {id(x): before[id(x)] for m, name, x, _ in buffers if (m, name) in written and id(x) in before}
        return result

    def recompute(self, forward: Callable[[], T]) -> T:
        """Runs R."""
        modules, before = self._modules, self._before
        changed = [name for _, name, x, version in self._buffers if version_of(x) != version and id(x) not in before]
        same = modules.version == self._version and modules.hooks == self._hooks
        if changed or not same:
            what = f"buffer {changed[0]!r}" if changed else "a module, a parameter or a module hook"
            raise RuntimeError(
                f"{what} of {self._whose} was changed, added, removed, frozen or unfrozen between a checkpointed "
                "forward and its backward, which recomputes it. Expected backward first, then optimizer.step() and the "
                "like; or checkpoint='never'. Repeat the step if it was the forward that did so for the first time."
            )
        copies = _copies(before)
        buffers = [(m._buffers, name, copies.get(id(x), x)) for m, name, x, _ in self._buffers]
        # Also parameters: functional_call may have put others there for F.
        found: list[tuple[dict[str, Any], str, Any]] = [*self._modes, *modules.parameters, *buffers]
        now = [(table, name, table.get(name)) for table, name, _ in found]
        try:
            for table, name, value in found:
                table[name] = value
            context = self._context.copy()  # R may run again, and changes the variables as F did.
            context.run(phase.set, "recomputing")
            with self._rng_states.repeated():
                result = context.run(forward)
            for m, name, x in self._written:
                y = copies.get(id(x), x)
                if m._buffers.get(name) is y and (y is x or y._version == 0):
                    raise RuntimeError(
                        f"{self._whose} wrote to buffer {name!r} in its forward, not in its recomputation: expected "
                        "layers that depend on inputs, parameters and buffers alone. Repeat the step, in which a cache "
                        "needn't grow, or use checkpoint='never'."
                    )
            return result
        finally:
            for table, name, value in now:
                table[name] = value


def _copies(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """A copy of each tensor, by its key; most in one call, since a model may have hundreds of statistics."""
    many = {key: x for key, x in tensors.items() if x.is_floating_point() and is_plain(x)}
    with torch.no_grad():
        made = dict(zip(many, _foreach_add([*many.values()], 0))) if many else {}
        return {key: made[key] if key in made else x.clone() for key, x in tensors.items()}
