"""What B has left for W on one stage, by microbatch, and the sums of weight gradients.

    B(0), B(1), ...  ──> store ──> W(0, 1): one product for several microbatches, where that is faster ──> sums

Drop-in, W comes right after a microbatch's gradient has left for the stage before if more waits than ``limit``:
what waits keeps the inputs of layers alive, which would undo what checkpointing saves. On an accelerator, W runs on a
second stream. Its inputs are kept until the compute stream, whose allocator reuses their memory, waits for that W.

W reads tensors after autograd would have. So their versions are compared with those at the end of F and of B.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from splitpipe.backward.accumulate import Sums
from splitpipe.backward.input_backward import InputGradients, Part
from splitpipe.backward.rules import WeightNode, total_version
from splitpipe.core import stream
from splitpipe.core.note import add_note
from splitpipe.core.stream import Stream


class WeightGradStore:
    """The pending weight gradients of a stage in one call, and its sums.

    ``weight_stream``: that of W, if it isn't ``compute``. ``limit``: how many bytes may wait for W; None: any number.
    ``names``: those of parameters, by identity, for errors.
    """

    def __init__(
        self, compute: Stream, weight_stream: Stream = None, limit: int | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.sums = Sums()
        self._compute = compute
        self._stream = compute if weight_stream is None else weight_stream
        self._limit, self._waiting = limit, 0  # With a limit: the bytes that wait.
        self._names = names or {}
        self._pending: dict[int, list[Part]] = {}
        self._reading: tuple[torch.Event, Any] | None = None  # What W may still be reading.

    @property
    def size(self) -> int:
        """The bytes that wait for W."""
        return sum(map(_size, self._pending.values()))

    @property
    def full(self) -> bool:
        """True if more waits than the limit."""
        return self._limit is not None and self._waiting > self._limit

    def add(self, microbatch: int, gradients: InputGradients) -> None:
        """Adds what B of a microbatch has left: gradients of leaves to the sums, the rest for W."""
        self.finish()  # W had the time of one B: what it has read is let go of.
        self._pending.setdefault(microbatch, []).extend(gradients.parts)
        if self._limit is not None:
            self._waiting += _size(gradients.parts)
        self.sums.add(gradients.leaves)

    def backward_weight(self, microbatches: Sequence[int] | None = None) -> None:
        """W of these microbatches (None: all that wait), summed over them."""
        chosen = list(self._pending) if microbatches is None else microbatches
        parts = [part for i in chosen for part in self._pending.pop(i, ())]
        self._waiting = 0  # With a limit, W is that of all.
        if not parts:
            return
        if self._stream is self._compute:
            self._accumulate(parts)
            return
        totals = [self.sums.of(x) for part in parts for x in part.node.weights if x is not None]
        for total in totals:
            total.allocate()
        before = [total.value for total in totals]  # W may put others in their place.
        stream.wait(self._stream, self._compute)
        with stream.use(self._stream):
            self._accumulate(parts)
        self.finish()
        if (event := stream.mark(self._stream)) is not None:
            self._reading = event, (parts, before)

    def finish(self) -> None:
        """Makes the compute stream wait for W, and lets go of what W has read."""
        if self._reading is not None:
            stream.wait_for(self._compute, self._reading[0])
            self._reading = None

    def clear(self) -> None:
        """Forgets what waits, and all sums. After an error, the compute stream waits for all that W has begun."""
        stream.wait(self._compute, self._stream)
        self.finish()
        self._pending, self._waiting, self.sums = {}, 0, Sums()

    def _accumulate(self, parts: Sequence[Part]) -> None:
        groups: dict[Any, list[Part]] = {}
        for part in parts:
            node = part.node
            if total_version([*part.ctx.saved_for_weight, part.grad]) != part.version:
                raise self._described(RuntimeError(_WRITTEN), node)  # Autograd would have read it before that.
            groups.setdefault((node.accumulate, node.way, *map(id, node.weights)), []).append(part)
        for own in groups.values():
            node = own[0].node
            totals = [None if x is None else self.sums.of(x) for x in node.weights]
            try:
                node.accumulate(totals, [(part.ctx, part.grad) for part in own])
            except BaseException as error:
                self._described(error, node)
                raise

    def _described(self, error: BaseException, node: WeightNode) -> BaseException:
        names = [self._names.get(id(x), "a tensor without a name") for x in node.weights if x is not None]
        add_note(error, f"in the weight gradient of {', '.join(names)}")
        return error


_WRITTEN = (
    "a tensor was modified in place during backward, before its weight gradient was computed: expected saved "
    "activations and output gradients to stay as they are. A layer's backward overwrites a gradient, or what another "
    "layer has saved; use SplitPipe(..., backward='autograd') with it."
)


def _size(parts: Sequence[Part]) -> int:
    """The bytes that parts keep alive."""
    tensors = [x for part in parts for x in (*part.ctx.saved_for_weight, part.grad)]
    return sum({id(x): x.nbytes for x in tensors if x is not None}.values())
