"""What a recomputation must find as its forward found it: modes, tensors, random numbers and context variables.

F has written to buffers once, and R must not write to them again. So R gets copies with the values that F began with:
spectral norm reads what it writes. Which buffers F writes to, the first checkpointed F shows, by version or by value,
since codebooks often write through ``.data``. A BatchNorm's statistics, which get no new version, always count.

If R leaves a buffer alone that F has written to, something else told F to, such as a cache's length in an attribute. R
has then computed with the value before: an error, after which the next step is right.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from splitpipe.core.phase import phase
from splitpipe.core.random_numbers import RNGStates
from splitpipe.core.tensors import is_plain, version_of
from splitpipe.core.thread_state import Bound
from splitpipe.core.torch_private import _foreach_add

T = TypeVar("T")
_version, _requires_grad = attrgetter("_version"), attrgetter("requires_grad")


class Modules:
    """Modules that are recomputed together: a stage of a Sequential, or a block."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.parameters = [(m._parameters, n, p) for m in modules for n, p in m._parameters.items() if p is not None]
        self.buffers = [(m, n) for m in modules for n, x in m._buffers.items() if x is not None and not is_lazy(x)]
        self._tables: list[Any] = [table for m in modules for table in (m._modules, m._parameters, m._buffers)]
        self._lazy = [x for table in self._tables for x in table.values() if is_lazy(x)]
        self._empty = [(table, name) for table in self._tables for name, value in table.items() if value is None]
        self._size, self._own = sum(map(len, self._tables)), [p for _, _, p in self.parameters]
        self._hooks: list[Any] = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        #: The buffers to which F writes; None: no F has shown it yet.
        self.written: set[tuple[nn.Module, str]] | None = None

    def same(self) -> bool:
        """True if no module, parameter or buffer has been added, removed or, if it was lazy or None, filled."""
        empty = all([table.get(name) is None for table, name in self._empty])
        return empty and sum(map(len, self._tables)) == self._size and all(map(is_lazy, self._lazy))

    def own(self) -> bool:
        """True if they have the parameters that they began with, and none that was computed, as by functional_call."""
        return all([p.is_leaf and table.get(name) is p for table, name, p in self.parameters])

    @property
    def version(self) -> tuple[int, list[bool]]:
        """Changes when a parameter is written to, frozen or unfrozen."""
        return sum(map(_version, self._own)), [*map(_requires_grad, self._own)]

    def hooks(self) -> int:
        """How many hooks their forwards call."""
        return sum(map(len, self._hooks))


class CheckpointedRun:
    """One checkpointed F that is about to run, and R of it, which finds everything as it was."""

    def __init__(self, modules: Modules, rng_states: RNGStates, whose: str) -> None:
        self._modules, self._rng_states, self._whose = modules, rng_states, whose
        self._version, self._hooks, self._context = modules.version, modules.hooks(), copy_context()
        self._modes = [m.training for m in modules.modules]
        self._buffers = [(m, n, x, version_of(x)) for m, n in modules.buffers if (x := m._buffers.get(n)) is not None]
        known = modules.written
        self._before = _copies([x for m, name, x, _ in self._buffers if known is None or (m, name) in known])
        self._written: list[tuple[nn.Module, str, Tensor]] = []  # A layer that differentiates runs R before F ends.

    def first(self, forward: Callable[[], T]) -> T:
        """Runs F."""
        with Bound(phase, "checkpointing"), self._rng_states.first(recomputed=True):
            result = forward()
        modules, buffers, self._hooks = self._modules, self._buffers, self._modules.hooks()
        self._written = [
            (m, name, x) for m, name, x, version in buffers
            if m._buffers.get(name) is not x or version_of(x) != version
        ]
        if modules.written is None:
            modules.written = {(m, name) for m, name, _ in self._written}
            modules.written.update([(m, name) for m, name, x, _ in buffers if self._changed_in_silence(m, x)])
        begun = [name for m, name, _ in self._written if (m, name) not in modules.written]
        if begun or not modules.same():
            modules.written = None
            what = f"wrote to buffer {begun[-1]!r}" if begun else "created modules, parameters or buffers"
            raise RuntimeError(
                f"{self._whose} {what} in its forward, which it hadn't done before, so this microbatch can't be "
                "recomputed: expected layers that always or never do. Repeat the step."
            )
        self._before = {id(x): self._before[id(x)] for m, name, x, _ in buffers if (m, name) in modules.written}
        return result

    def _changed_in_silence(self, m: nn.Module, x: Tensor) -> bool:
        # Of a DeferredBatchNorm, the call writes to all at its end.
        return hasattr(m, "track_running_stats") or is_plain(x) and not torch.equal(x, self._before[id(x)])

    def recompute(self, forward: Callable[[], T]) -> T:
        """Runs R."""
        modules, written = self._modules, self._modules.written or ()
        later = [n for m, n, x, version in self._buffers if version_of(x) != version and (m, n) not in written]
        if modules.version != self._version or modules.hooks() != self._hooks or later:
            raise RuntimeError(
                f"{f'buffer {later[0]!r}' if later else 'a parameter or a module hook'} of {self._whose} was changed, "
                "removed, frozen or unfrozen between a checkpointed forward and its backward, which recomputes it. "
                "Expected backward first, then optimizer.step() and the like; or checkpoint='never'."
            )
        copies = dict(zip(self._before, _copies(self._before.values()).values()))
        found: list[tuple[dict[str, Any], str, Any]] = [
            *[(vars(m), "training", mode) for m, mode in zip(modules.modules, self._modes) if m.training is not mode],
            # functional_call may have put other ones there for F.
            *[each for each in modules.parameters if each[0].get(each[1]) is not each[2]],
            *[(m._buffers, name, copies.get(id(x), x)) for m, name, x, _ in self._buffers],
        ]
        now = [(table, name, table.get(name)) for table, name, _ in found]
        try:
            for table, name, value in found:
                table[name] = value
            context = self._context.copy()  # R may run again, and changes the variables as F did.
            context.run(phase.set, "recomputing")
            with self._rng_states.repeated():
                result = context.run(forward)
            for m, name, x in self._written:
                if m._buffers.get(name) is copies[id(x)] and copies[id(x)]._version == 0:
                    raise RuntimeError(
                        f"{self._whose} wrote to buffer {name!r} in its forward, not in its recomputation: expected "
                        "layers that depend on inputs, parameters and buffers alone. Repeat the step, in which a cache "
                        "needn't grow, or use checkpoint='never'."
                    )
            return result
        finally:
            for table, name, value in now:
                table[name] = value


def _copies(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """A copy of each tensor, by identity; most in one call, since a model may have hundreds of statistics."""
    distinct = {id(x): x for x in tensors}
    many = {key: x for key, x in distinct.items() if x.is_floating_point() and is_plain(x)}
    with torch.no_grad():
        made = dict(zip(many, _foreach_add([*many.values()], 0))) if many else {}
        return {key: made[key] if key in made else x.clone() for key, x in distinct.items()}
