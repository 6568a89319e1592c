"""Checkpointing by saved-tensor hooks: forward saves numbers, and backward computes what they stand for.

The nested backward of the usual checkpoint function fires parameter hooks twice, loses double backward and gives
``autograd.grad(loss, parameters)`` nothing. Here the graph of the first forward stays, and only what its nodes
saved is dropped:

    forward    node ── pack ──> Handle 0, 1, 2 ...            the tensor itself is freed
    backward   Recompute ── the stage runs again ──> Handle.record = the tensor that was saved as number 0, 1, 2 ...
               node <─ unpack ── Handle.record                freed with the node, which holds the Handle alone

Recompute is a node on the way of the gradient into the stage. It lies above the wait for the gradient's copy, so
that a device recomputes while the copy is under way. A node that is reached around it (over a skip) unpacks first,
and starts the recomputation itself.

Guarantee: a frame refills under its lock, and a Handle, once filled, stays so as long as its node lives. Without
the lock two backward threads (a stage with nodes on the CPU and on its device) would both run the stage, and one's
buffers would be restored under the other's hands.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd
from torch.autograd import Function

from splitpipe.context import Hooks
from splitpipe.dependency import unleaf
from splitpipe.overlap import overlap
from splitpipe.priority import rank
from splitpipe.uncompiled import uncompiled

Meta = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(frozen=True)
class Record:
    """A saved tensor, at the version it was saved at."""

    tensor: Tensor
    version: int

    @uncompiled
    def load(self) -> Tensor:
        """The tensor, unless it was written to since: hooks switch off the check that torch makes."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{list(self.tensor.shape)} tensor of {self.tensor.dtype} is at version {self.tensor._version}; "
                f"expected version {self.version}."
            )
        return self.tensor


class Handle:
    """What a node holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "record")

    def __init__(self) -> None:
        self.record: Record | None = None


class Frame:
    """One checkpointed microbatch on one stage.

    Args:
        again: runs the stage once more, with the hooks it is given as the innermost ones.
        kept: ids of tensors that live on anyway (parameters), saved as themselves.
    """

    def __init__(self, again: Callable[[Hooks], None], kept: Collection[int]) -> None:
        self._again = again
        self._kept = kept
        self._saved: list[tuple[weakref.ref[Handle], Meta]] = []
        self._complete = False
        self._lock = threading.RLock()

    def hooks(self) -> Hooks:
        """The hooks of the first forward."""
        return self._pack, self._unpack

    def close(self) -> None:
        """Ends the first forward: what it saved by now is what every recomputation must save."""
        self._complete = True

    def recompute(self) -> None:
        """Fills the handles, unless they are full."""
        with self._lock:
            handles = [reference() for reference, _ in self._saved]
            if any(handle is not None and handle.record is None for handle in handles):
                self._refill()

    @uncompiled
    def _pack(self, x: Tensor) -> Record | Handle:
        if self._lives_on(x):
            return Record(x, x._version)
        handle = Handle()
        self._saved.append((weakref.ref(handle), _meta(x)))
        return handle

    def _lives_on(self, x: Tensor) -> bool:
        # A leaf that is no parameter (held by a closure, say) is kept by the graph itself.
        return id(x) in self._kept or (x.is_leaf and x.requires_grad)

    @uncompiled
    def _unpack(self, packed: Record | Handle) -> Tensor:
        if isinstance(packed, Record):
            return packed.load()
        with self._lock:
            if packed.record is None:
                self._refill()
            assert packed.record is not None
            return packed.record.load()

    def _refill(self) -> None:
        refill = _Refill(self._saved, self._lives_on)
        try:
            # A layer may differentiate inside its forward, so what is saved can be had back at once.
            self._again((refill.pack, Record.load))
            # Asked for in the middle of the forward, by such a layer, the forward is not complete.
            number = refill.number
            if number < len(self._saved) or self._complete and number > len(self._saved):
                raise _differs(f"saved {number} tensors, where the forward saved {len(self._saved)}")
        except BaseException:
            for reference, _ in self._saved:
                handle = reference()
                if handle is not None:
                    handle.record = None
            raise


class _Refill:
    """Puts what a recomputation saves into the handles of the forward."""

    def __init__(self, saved: Sequence[tuple[weakref.ref[Handle], Meta]], lives_on: Callable[[Tensor], bool]) -> None:
        self._saved = saved
        self._lives_on = lives_on
        self.number = 0

    @uncompiled
    def pack(self, x: Tensor) -> Record:
        """The hook of a recomputation."""
        if self._lives_on(x):
            return Record(x, x._version)
        record = Record(x.detach(), x._version)
        number = self.number
        if number < len(self._saved):
            reference, meta = self._saved[number]
            if meta != _meta(x):
                raise _differs(f"saved {_meta(x)} as its tensor {number}, where the forward saved {meta}")
            handle = reference()
            if handle is not None:
                handle.record = record
        self.number = number + 1
        return record


class Batch:
    """The tensors of a batch, which nobody may write to between the forward and a recomputation that starts from them.

    Microbatches count their versions apart, and some are kept as copies: this looks at the batch itself.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._versions: list[int] | None = None

    def shares(self, leaves: Sequence[Any]) -> bool:
        """Whether some leaf is in the memory of the batch: its rows, passed through layers or not."""
        return any(overlap(x, leaf) for leaf in leaves if isinstance(leaf, Tensor) for x in self._tensors)

    def close(self) -> None:
        """The forward is over: what a layer wrote to the batch, it has written."""
        self._versions = [tensor._version for tensor in self._tensors]

    def verify(self) -> None:
        """Raises a RuntimeError if the batch was written to since."""
        if self._versions is not None and self._versions != [tensor._version for tensor in self._tensors]:
            raise RuntimeError(_WRITTEN.format("batch"))


_WRITTEN = (
    "the {} was modified in place between the forward and its recomputation: expected it as the forward saw it. Write "
    "to the batch after backward, or give the model a copy (x.clone())."
)


class Kept:
    """A tensor that a recomputation starts from.

    It is what a checkpointed microbatch keeps, so the caller's saved-tensor hooks get it as they get what others keep:
    it may wait on the CPU, or be recomputed in its turn.
    """

    def __init__(self, leaf: Tensor, hooks: Hooks | None, in_place: bool) -> None:
        self._requires_grad = leaf.requires_grad
        self._in_place = in_place
        x = leaf.detach()  # Holding the input itself would hold the graph of every stage before.
        if in_place:
            x = x.clone()  # The stage works on the input itself, as it would without a pipeline.
        self._hooks = hooks
        self._packed = x if hooks is None else hooks[0](x)
        self._version = None if hooks is not None or x.is_inference() else x._version

    def again(self, stage: str) -> Tensor:
        """The tensor as the stage found it."""
        x: Tensor = self._packed if self._hooks is None else self._hooks[1](self._packed)
        if self._version is not None and x._version != self._version:
            raise RuntimeError(_WRITTEN.format(f"input of {stage}"))
        x = x.detach().clone() if self._in_place else x.detach()
        return unleaf(x.requires_grad_()) if self._requires_grad else x


def _meta(x: Tensor) -> Meta:
    return x.shape, x.dtype, x.device


def _differs(how: str) -> RuntimeError:
    return RuntimeError(
        f"the recomputation of a checkpointed stage {how}: expected the same operations both times. A layer does "
        "something else when it runs again (a counter, the time, random numbers of Python or NumPy, another graph of "
        "torch.compile for another batch size); make it repeat, ask splitpipe.is_recomputing() there, or use "
        "checkpoint='never'."
    )


class Recompute(Function):
    """The tensor; in backward, the recomputation of the stage that made it comes first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frame: Frame) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.frame = frame
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        frame = ctx.frame
        if frame is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what its checkpointed stages keep was freed by "
                "the first backward. Pass retain_graph=True to it."
            )
        if grad is not None:
            frame.recompute()
        if not _autograd._get_current_graph_task_keep_graph():
            ctx.frame = None  # As autograd frees saved tensors, though the loss and so this node live on.
        return grad, None


def checkpointed(x: Tensor, frame: Frame, priority: int) -> Tensor:
    """The stage's output, with its recomputation in front.

    Args:
        x: an output that requires grad.
        frame: of the forward that made it.
        priority: the sequence number of the stage's last node. The engine takes the highest ready one first; with a
            number of its own thread's, higher than any, every microbatch would be recomputed before any goes backward.
    """
    y: Tensor = Recompute.apply(x, frame)
    rank(y, priority)
    return y
