"""What B has left for W on one stage, by microbatch, and the sums of weight gradients.

    B(0), B(1), ...  ──> store ──> W(0, 1): one product for several microbatches, where that is faster ──> sums

Drop-in, W comes right after a microbatch's gradient has left for the stage before if more waits than ``limit``:
what waits keeps the inputs of layers alive, which would undo what checkpointing saves. On an accelerator, W runs on a
second stream. Its inputs are kept until the compute stream, whose allocator reuses their memory, waits for that W.

W reads tensors after autograd would have. So their versions are compared with those at the end of F and of B.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitpipe.backward.accumulate import Sums
from splitpipe.backward.graph_walk import Walk
from splitpipe.backward.input_backward import InputGradients
from splitpipe.backward.rules import WeightNode
from splitpipe.backward.split_function import context_of
from splitpipe.core import stream
from splitpipe.core.note import add_note
from splitpipe.core.stream import Stream
from splitpipe.core.tensors import version_of


class _Pending(NamedTuple):
    """What B of a microbatch has left: weight nodes, the gradients of their outputs, and these gradients' versions."""

    nodes: Sequence[WeightNode]
    grads: Sequence[Tensor | None]
    versions: Sequence[int | None]

    @property
    def size(self) -> int:
        """The bytes that it keeps alive."""
        tensors = [*self.grads, *[x for node in self.nodes for x in node.saved_for_weight]]
        return sum({id(x): x.nbytes for x in tensors if x is not None}.values())


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
        self._pending: dict[int, list[_Pending]] = {}
        self._reading: tuple[torch.Event, Any] | None = None  # What W may still be reading.

    @property
    def size(self) -> int:
        """The bytes that wait for W."""
        return sum([each.size for own in self._pending.values() for each in own])

    @property
    def full(self) -> bool:
        """True if more waits than the limit."""
        return self._limit is not None and self._waiting > self._limit

    def add(self, microbatch: int, graph: Walk, gradients: InputGradients, keep: bool) -> None:
        """Adds what B of a microbatch has left: gradients of leaves to the sums, the rest for W. ``keep``: as for B."""
        self.finish()  # W had the time of one B: what it has read is let go of.
        nodes, outputs = graph.weight_nodes, gradients.outputs
        if any([grad is None or node.whole for node, grad in zip(nodes, outputs)]):
            waits = [_take_rest(node, grad) if node.whole else grad is not None for node, grad in zip(nodes, outputs)]
            nodes, outputs = [*compress(nodes, waits)], [*compress(outputs, waits)]
        if nodes:
            pending = _Pending(nodes, outputs, [None if grad is None else version_of(grad) for grad in outputs])
            self._pending.setdefault(microbatch, []).append(pending)
            if self._limit is not None:
                self._waiting += pending.size
            for node in nodes:  # None may keep the graph alive, with the layers' own functions in it.
                saved = node.saved_for_weight
                node.saved_for_weight = tuple([x if x is None or x.grad_fn is None else x.detach() for x in saved])
                if node.kept is not None:
                    node.kept.saved_for_weight = node.saved_for_weight
                if not keep:
                    node.node = None
        pairs = [(x, grad) for x, grad in zip(graph.leaves, gradients.leaves) if grad is not None]
        if pairs:
            self.sums.add(*zip(*pairs))

    def backward_weight(self, microbatches: Sequence[int] | None = None) -> None:
        """W of these microbatches (None: all that wait), summed over them."""
        chosen = list(self._pending) if microbatches is None else microbatches
        pending = [each for i in chosen for each in self._pending.pop(i, ())]
        if not pending:
            return
        self._waiting -= sum([each.size for each in pending]) if self._pending else self._waiting
        if self._stream is self._compute:
            self._accumulate(pending)
            return
        weights = [x for each in pending for node in each.nodes for x in node.weights if x is not None]
        totals = [self.sums.of(x) for x in weights]
        for x, total in zip(weights, totals):
            total.allocate(x)
        before = [total.value for total in totals]  # W may put others in their place.
        stream.wait(self._stream, self._compute)
        with stream.use(self._stream):
            self._accumulate(pending)
        self.finish()
        event = stream.mark(self._stream)
        assert event is not None
        self._reading = event, (pending, before)

    def finish(self) -> None:
        """Makes the compute stream wait for W, and lets go of what W has read."""
        if self._reading is not None:
            event = self._reading[0]
            stream.wait_for(self._compute, event)
            stream.spent(event)
            self._reading = None

    def clear(self) -> None:
        """Forgets what waits, and all sums."""
        self.finish()
        self._pending, self._waiting, self.sums = {}, 0, Sums()

    def stop(self) -> None:
        """After an error: as ``clear``, but the compute stream waits for all that W has begun."""
        stream.wait(self._compute, self._stream)
        self.clear()

    def _accumulate(self, pending: Sequence[_Pending]) -> None:
        groups: dict[Any, tuple[WeightNode, list[tuple[Any, Any]]]] = {}
        for each in pending:
            self._verify_unwritten(each)
            for node, grad in zip(each.nodes, each.grads):
                key = node.accumulate, node.way, *map(id, node.weights)
                groups.setdefault(key, (node, []))[1].append((node if node.kept is None else node.kept, grad))
        for node, parts in groups.values():
            try:
                node.accumulate([None if x is None else self.sums.of(x) for x in node.weights], parts)
            except BaseException as error:
                self._described(error, node)
                raise

    def _verify_unwritten(self, pending: _Pending) -> None:
        """Raises for a tensor that has been written to since. Autograd would have read it before that."""
        for node, grad, version in zip(*pending[:3]):
            written = grad is not None and version is not None and grad._version != version
            if written or node.current_version() != node.version:
                raise self._described(RuntimeError(_WRITTEN), node)

    def _described(self, error: BaseException, node: WeightNode) -> BaseException:
        names = [self._names.get(id(x), "a tensor without a name") for x in node.weights if x is not None]
        add_note(error, f"in the weight gradient of {', '.join(names)}")
        return error


_WRITTEN = (
    "a tensor was modified in place during backward, before its weight gradient was computed: expected saved "
    "activations and output gradients to stay as they are. A layer's backward overwrites a gradient, or what another "
    "layer has saved; use SplitPipe(..., backward='autograd') with it."
)


def _take_rest(node: WeightNode, grad: Tensor | None) -> bool:
    """Takes what the call of a SplitFunction, or of compiled code, has left for W; False if there is nothing."""
    if node.node.leftovers:
        node.kept = node.node.leftovers.pop()
    elif grad is None or node.partial:
        return False
    else:  # B didn't run it: no input needs a gradient.
        node.kept = context_of(node.node)
    node.saved_for_weight = node.kept.saved_for_weight
    node.version = node.current_version()
    return True
