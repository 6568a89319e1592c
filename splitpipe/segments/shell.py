"""The shell of a module with cuts: a module around it, with its parameters, buffers, children, hooks and attributes."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from typing_extensions import Self

from splitpipe.core.stream import Place
from splitpipe.schedule.op import Schedule
from splitpipe.segments.attach import Piped
from splitpipe.segments.runtime import SegmentRuntime
from splitpipe.stage.resident import Resident


class Shell(Resident):
    """A module whose forward may be another one's, run as a pipeline."""

    _balance: Sequence[int]
    _places: Sequence[Place]
    _chunks: int
    _checkpoint: Any
    _schedule: Schedule | None
    _runtime: Any

    def wrap(self, module: nn.Module, forward: Piped) -> None:
        """Stands around a module: its parameters, buffers, children and hooks are this one's, too."""
        runtime, options = forward.runtime, forward.runtime.options
        internals = {name: vars(module)[name] for name in vars(nn.Module()) if name in vars(module)}
        # Past nn.Module, which would take the module for a child.
        self.__dict__.update(internals, forward=forward, inner_module=module)
        self._balance, self._places, self._chunks = [], options.places, options.chunks
        self._checkpoint, self._schedule, self._runtime = options.checkpoint, options.schedule, runtime

    @property
    def inner(self) -> nn.Module | None:
        """The module with cuts; None if this is a pipeline of layers."""
        return vars(self).get("inner_module")

    @property
    def cuts(self) -> list[str]:
        """The names of the modules at whose calls the stages but the first begin; none for an nn.Sequential."""
        runtime = self._runtime
        return list(runtime.options.cuts) if isinstance(runtime, SegmentRuntime) else []

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.inner is None:
                raise
            return getattr(self.inner, name)  # config, generate, save_pretrained

    def __bool__(self) -> bool:
        return True  # There is no length, unless the module has one.

    def train(self, mode: bool = True) -> Self:
        """As nn.Module's."""
        if self.inner is not None:
            self.inner.training = mode
        return super().train(mode)
