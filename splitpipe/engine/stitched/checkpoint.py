"""Checkpoint: what a stage saves is dropped, and made again in backward, early enough.

    stage ── Wait ══ Copy ══> next stage       backward, from right to left: the stage's stream recomputes during the
                                               copy of the gradient, and only then waits for it

The graph stays, and only what its nodes save is dropped, so there are second derivatives, and gradients of losses that
layers keep. torch.utils.checkpoint does so, too, but takes half as long again on the host, isn't safe with threads
(pytorch#96764), and raises an error if a custom Function reads ``ctx.saved_tensors`` twice.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from splitpipe.core import stream, thread_state
from splitpipe.core.note import uncompiled
from splitpipe.core.random_numbers import RNGStates
from splitpipe.core.stream import Stream
from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import _current_graph_task_id
from splitpipe.stage.recomputation import CheckpointedRun, Modules

Inputs = Sequence[list[Any]]


class SavedTensor:
    """What a node saves in place of a tensor."""

    tensor: Tensor  #: Put here in backward.


class Checkpoint:
    """A run of some modules, now and again in backward; ``whose``: their name.

    Guarantee: two threads of a backward, for nodes on the CPU and on the device, don't both run the modules.
    """

    def __init__(self, modules: Modules, rng_states: RNGStates, whose: str, compute: Stream) -> None:
        self._whose, self._compute = whose, compute
        self._run = CheckpointedRun(modules, rng_states, whose)
        self._state = thread_state.capture()
        self._saved, self._kinds = list[ref[SavedTensor]](), list[Any]()
        self._complete, self._task, self._lock = False, -1, threading.RLock()

    def run(self, first: Callable[[], Any], rerun: Callable[[Inputs], Any], inputs: Inputs) -> Any:
        """What ``first()`` returns; in backward, ``rerun`` is called with copies of these inputs."""
        tensors = {id(x): x for part in inputs for x in part if isinstance(x, Tensor)}
        self._kept = {key: x.detach().requires_grad_(x.requires_grad) for key, x in tensors.items()}
        self._versions = [*map(version_of, self._kept.values())]
        self._rerun, self._inputs = rerun, inputs
        with saved_tensors_hooks(self._pack, self._unpack):
            result = self._run.first(first)
        self._complete = True
        return result

    def recompute(self) -> None:
        """Makes what the run has saved, unless this backward has."""
        with self._lock:
            task = _current_graph_task_id()
            if self._task != task or task < 0:
                self._repeat()
                self._task = task

    @uncompiled
    def _pack(self, x: Tensor) -> SavedTensor:
        saved = SavedTensor()
        self._saved.append(ref(saved))
        self._kinds.append((x.shape, x.dtype))
        return saved

    @uncompiled
    def _unpack(self, saved: SavedTensor) -> Tensor:
        self.recompute()
        return saved.tensor

    def _repeat(self) -> None:
        made = list[Tensor]()

        @uncompiled
        def pack(x: Tensor) -> Tensor:
            made.append(x.detach())
            return made[-1]

        with thread_state.use(self._state), stream.use(self._compute):
            kept = {key: x.clone() for key, x in self._kept.items()}  # The modules may write to these.
            inputs = [[kept.get(id(x), x) for x in part] for part in self._inputs]
            with saved_tensors_hooks(pack, uncompiled(lambda x: x)):
                self._run.recompute(partial(self._rerun, inputs))
        kinds = [(x.shape, x.dtype) for x in made][:None if self._complete else len(self._kinds)]
        if kinds != self._kinds or self._versions != [*map(version_of, self._kept.values())]:
            raise RuntimeError(
                f"{self._whose} saved other tensors in a recomputation than in its forward, or its input was written "
                "to in place: expected layers that do the same in both. Write to a copy (x.clone()), ask "
                "splitpipe.is_recomputing() in a layer whose state decides what it does, or use checkpoint='never'."
            )
        for reference, x in zip(self._saved, made):
            if (saved := reference()) is not None:
                saved.tensor = x
