"""Checkpointing with saved-tensor hooks: forward saves numbers, and backward computes the tensors behind them.

This is for what isn't recomputed as a separate graph (``training.recomputed``), as with ``backward="autograd"``.

The nested backward of the usual checkpoint function fires parameter hooks twice, breaks double backward, and returns no
gradients for ``autograd.grad(loss, parameters)``. Here, the graph of the first forward stays, and only what its nodes
saved is dropped:

    forward    node ── pack ──> 0, 1, 2 ...               the tensor itself is freed
    backward   Recompute ── the stage runs again ──> records[0], [1], [2] ...  the tensors that were saved then
               node <─ unpack ── records[number]          dropped when the next node asks

Recompute is a node on the gradient's path into the stage. It comes before the wait for the gradient's copy, so that a
device recomputes during the copy. A node that is reached on another path (through a skip) unpacks first, and starts the
recomputation itself.

For saved tensors, forward makes only numbers, and no objects: with thousands of objects per step that live until
backward, Python's garbage collector would walk the whole process in every step, which took longer than the step's own
work.

Guarantee: a frame refills under its lock, and a missing record is computed when it is needed. Without the lock, two
backward threads (of a stage with nodes on the CPU and on its device) would both run the stage, and one would restore
buffers while the other runs.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from splitpipe.core.graph import rank, rank_of
from splitpipe.core.note import uncompiled
from splitpipe.core.tensors import storage_of
from splitpipe.core.thread_state import Hooks
from splitpipe.core.torch_private import _current_graph_task_id, _get_current_graph_task_keep_graph, queue_callback
from splitpipe.schedule.plurals import counted
from splitpipe.stage.saved import Meta, Record, Refill, SavedDirectly, load, meta_of, recomputation_error

#: Runs the stage in the call that it is given, and keeps what that saves: as copies if it is in memory that gets other
#: values afterwards, which the second call names.
Fill = Callable[[Callable[[], object], Callable[[], Collection[int]]], None]


class Frame:
    """One checkpointed microbatch on one stage, which ``again`` recomputes, once or several times, to fill it.

    ``holds``: saved tensors are held until the end of the first forward, which may turn out not to be repeatable.
    """

    def __init__(self, again: Callable[[Fill], None], direct: SavedDirectly, holds: bool = False) -> None:
        self._again = again
        self._direct = direct
        self._held: list[Record] | None = [] if holds else None
        self._kept = False  # Whether what was held stays.
        self._metas: list[Meta] = []
        self._records: list[Tensor | None] = []
        self._versions: list[int] = []  # The records' versions.
        self._first, self._last = 0, -1  # The numbers of the last node to ask.
        self._task = -1
        self._complete = self._filled = False
        self._keep = False  # Whether the running task keeps the graph, and thus the records, for another task.
        self._lock = threading.RLock()

    def hooks(self) -> Hooks:
        """The hooks of the first forward. They are called for every saved tensor, so they must be cheap."""
        direct, metas, like = self._direct, self._metas, self._direct.metas
        ids, same, held = direct.ids, direct.same, self._held

        @uncompiled
        def pack(x: Tensor) -> Record | int:
            if x.is_leaf and (x.requires_grad or id(x) in ids):
                return direct.record(x)
            number, own = len(metas), meta_of(x)
            meta = like[number] if number < len(like) else None
            if meta != own:
                meta = same.setdefault(own, own)  # Looking at the previous one is cheaper.
            metas.append(meta)
            if held is not None:
                held.append((x, x._version))
            return number

        return pack, self._unpack

    def close(self, keep: bool = False) -> bool:
        """Ends the first forward: every recomputation must save as many tensors as it has saved.

        ``keep``: there can be none. Returns True if what the forward has saved was held, and is kept.
        """
        self._complete = True
        self._direct.metas = self._metas
        held, self._held = self._held, None
        if held is not None:
            if keep:
                self._records = [x if x.is_leaf else x.detach() for x, _ in held]
                self._versions, self._kept = [version for _, version in held], True
            held.clear()  # The hooks have the list: see ``_fill``.
        return self._kept

    def recompute(self) -> None:
        """Fills the records, unless they are filled or there are none."""
        with self._lock:
            if not self._filled and self._metas:
                self._refill()
            self._begin()

    @uncompiled
    def _unpack(self, packed: Record | int) -> Tensor:
        if isinstance(packed, int):
            records = self._records
            found = records[packed] if packed < len(records) else None
            if found is None:
                found = self._missing(packed)
                records = self._records
            version = self._versions[packed]
            # A node's saved tensors have consecutive numbers, and it may unpack each several times. When another node
            # starts to unpack, the records of the previous node are dropped.
            if packed == self._last + 1:
                self._last = packed
            elif packed < self._first or packed > self._last:
                if not self._keep and not self._kept:
                    for number in range(self._first, self._last + 1):
                        records[number] = None
                self._first = self._last = packed
        else:
            found, version = packed
        return found if found._version == version else load((found, version))

    def _missing(self, number: int) -> Tensor:
        with self._lock:
            found = self._records[number] if number < len(self._records) else None
            if found is None:  # Otherwise, another thread has refilled it meanwhile.
                self._refill()
                found = self._records[number]
            assert found is not None
            return found

    def _refill(self) -> None:
        self._again(self._fill)
        self._filled = self._complete
        self._first, self._last = 0, -1
        self._begin()

    def _begin(self) -> None:
        """Records the running graph task; at its end, all records are dropped, unless it keeps the graph."""
        # Otherwise, records that no node has asked for would stay: nodes that the task doesn't reach may keep the
        # frame.
        task = _current_graph_task_id()
        if task == self._task:
            return
        self._task, self._keep = task, _get_current_graph_task_keep_graph()
        self._first, self._last = 0, -1
        if task >= 0 and not self._keep:
            queue_callback(partial(_clear, weakref.ref(self)))  # The task keeps nothing alive.

    def clear(self) -> None:
        """Drops all records."""
        with self._lock:
            self._records, self._filled = [], False

    def _fill(self, run: Callable[[], object], passing: Callable[[], Collection[int]]) -> None:
        """Makes the records of the tensors that the stage saves in a run."""
        refill = Refill(self._metas, self._direct)
        try:
            # A layer may differentiate inside its forward, so saved tensors can be unpacked immediately.
            with torch.autograd.graph.saved_tensors_hooks(*refill.hooks()):
                run()
            # If such a layer asks during the forward, the records aren't complete.
            number, expected = len(refill.tensors), len(self._metas)
            if number < expected or self._complete and number > expected:
                raise recomputation_error(f"saved {counted(number, 'tensor')}, but the forward saved {expected}")
            self._records, self._versions = refill.records(passing()), refill.versions
        finally:
            # The hooks, which their nodes keep, have the list: a node's own output in it would be an uncollectable
            # cycle.
            refill.tensors.clear()


def _clear(frame: weakref.ref[Frame]) -> None:
    there = frame()
    if there is not None:
        there.clear()


def is_checkpoint(hooks: Hooks | None) -> bool:
    """True if saved-tensor hooks belong to a checkpoint: torch's, or that of a pipeline around the model."""
    return hooks is not None and getattr(hooks[0], "__module__", None) in (
        "torch.utils.checkpoint", __name__, Refill.__module__
    )


class Batch:
    """The tensors of a batch, which must not be written to between the forward and a recomputation that uses them."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        # The batch itself: microbatches have separate version counters, and some are kept as copies.
        self._tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._storages = {storage_of(x) for x in self._tensors} - {0}
        self._versions: list[int] | None = None

    def shares(self, leaves: Sequence[Any]) -> bool:
        """True if a leaf is in the memory of the batch: its rows, passed through layers or not."""
        return any([storage_of(leaf) in self._storages for leaf in leaves if isinstance(leaf, Tensor)])

    def close(self) -> None:
        """Ends the forward, in which layers may write to the batch."""
        self._versions = [tensor._version for tensor in self._tensors]

    def verify(self) -> None:
        """Raises a RuntimeError if the batch has been written to since."""
        if self._versions is not None and self._versions != [tensor._version for tensor in self._tensors]:
            raise RuntimeError(WRITTEN.format("batch"))


WRITTEN = (
    "the {} was modified in place between the forward and its recomputation: expected it as the forward saw it. Write "
    "to the batch after backward, or pass a copy (x.clone()) to the model."
)


class Remade(Protocol):
    """Something that is recomputed in backward."""

    def recompute(self) -> None:
        """Recomputes it, for the running graph task."""


class Recompute(Function):
    """The tensor; in backward, the stage that made it is recomputed first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frame: Remade) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.frame = frame
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        frame = ctx.frame
        if frame is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the first backward freed what its checkpointed "
                "stages keep. Pass retain_graph=True to it."
            )
        if grad is not None:
            frame.recompute()
        if not _get_current_graph_task_keep_graph():
            ctx.frame = None  # As autograd frees saved tensors; the loss, and thus this node, may live on.
        return grad, None


def remade(leaves: Sequence[Any], frame: Remade) -> list[Any]:
    """Outputs of a checkpointed stage after its recomputation, if their own nodes can't wait for that."""
    if not isinstance(frame, Frame):
        return [*leaves]
    return [
        checkpointed(leaf, frame, rank_of(leaf)) if isinstance(leaf, Tensor) and leaf.grad_fn is not None else leaf
        for leaf in leaves
    ]


def checkpointed(x: Tensor, frame: Remade, priority: int) -> Tensor:
    """The stage's output, which requires grad, after its recomputation."""
    y: Tensor = Recompute.apply(x, frame)
    # The number of the stage's last node. With a new number from this thread, which would be the highest, every
    # microbatch would be recomputed before any runs backward.
    rank(y, priority)
    return y
