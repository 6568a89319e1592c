"""B and W of a stage: the gradients of its inputs, for which another stage waits, and later those of its weights.

    B    given gradients ──> roots ──> ... ──┬──> entries       sent to the stages before
                                             ├──> weight nodes  the gradients of their outputs, for W
                                             └──> other leaves  added to the sums
    W    what B(0), B(1), ... have left ──> one product for several microbatches, where that is faster ──> sums

B is one call of autograd's engine, which captures all these on the way. Hooks of parameters are parked until all B have
ended: they see the gradients of the batch, once.

Drop-in, W comes right after a microbatch's gradient has left for the stage before if more waits than ``limit``:
what waits keeps the inputs of layers alive, which would undo what checkpointing saves. On an accelerator, it runs on a
second stream. Its inputs are kept until the compute stream, whose allocator reuses their memory, waits for that W.

W reads tensors after autograd would have. So their versions are compared with those at the end of F and of B.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.backward.graph_walk import Walk, WeightNode, total_version
from splitpipe.backward.weight_gradients import Total
from splitpipe.core import stream
from splitpipe.core.note import add_note
from splitpipe.core.stream import Stream
from splitpipe.core.torch_private import _foreach_add_, run_backward

_SHARED = (
    "microbatches share a part of a graph, and the backward of one has freed it for the others: weights that the "
    "caller computed, or a tensor that a layer keeps from one call to the next. Expected layers that compute "
    "everything from their inputs and parameters in each call, detached tensors, or SplitPipe(..., "
    "backward='autograd', checkpoint='never')."
)

_WRITTEN = (
    "a tensor was modified in place during backward, before its weight gradient was computed: expected saved "
    "activations and output gradients to stay as they are. A layer's backward overwrites a gradient, or what another "
    "layer has saved; use SplitPipe(..., backward='autograd') with it."
)


class Part(NamedTuple):
    """What B has left for W of a node: what its ``accumulate`` gets, and the version of all of that."""

    node: WeightNode
    ctx: Any  #: The weight node itself, or what was left at stand-ins. Has ``saved_for_weight``.
    grad: Any  #: That of the output; None for compiled code.
    version: int


class InputGradients(NamedTuple):
    """What B has computed, and left for W."""

    entries: Sequence[Tensor | None]  #: None: no gradient arrived.
    leaves: Sequence[tuple[Tensor, Tensor]]  #: Each with its gradient.
    parts: Sequence[Part]


def backward_input(
    roots: Sequence[GradientEdge], grads: Sequence[Tensor], entries: Sequence[GradientEdge], graph: Walk, keep: bool
) -> InputGradients:
    """Runs backward from the roots, given their gradients, to ``entries``; ``keep``: the graph is needed again."""
    nodes, stand_ins, leaves, _ = graph
    ends = (*entries, *[GradientEdge(node, 0) for node in nodes], *leaves)
    if not roots or not ends:
        return InputGradients([None] * len(entries), [], [])
    for node in stand_ins:
        node.leftovers = []
    try:
        captured = run_backward(tuple(roots), tuple(grads), keep, False, ends, True, False)
        left = [Part(own, *each) for node, own in stand_ins.items() for each in node.leftovers]
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise RuntimeError(_SHARED) from error
        raise
    finally:
        for node in stand_ins:
            node.leftovers = None
    first, last = len(entries), len(entries) + len(nodes)
    # Versions of what nodes have saved are those at the end of F: B doesn't read it, as autograd would.
    parts = [
        Part(own, own, grad, own.version + total_version([grad]))
        for own, grad in zip(nodes.values(), captured[first:last]) if grad is not None
    ]
    pairs = [(x, grad) for x, grad in zip(leaves, captured[last:]) if grad is not None]
    return InputGradients(captured[:first], pairs, parts + left)


def _silent(*_: Any) -> None:
    """Takes the place of a parked hook, which can then be removed meanwhile."""


class LeafHooks:
    """Parked hooks of leaves."""

    def __init__(self) -> None:
        self._parked: list[tuple[dict[int, Any], int, Any]] = []  # A tensor's table of hooks, key, hook.

    def park(self, leaves: Iterable[Tensor]) -> None:
        """Parks the hooks that leaves have now."""
        tables: list[Any] = [table for x in leaves for table in (x._backward_hooks, x._post_accumulate_grad_hooks)]
        for table in filter(None, tables):
            self._parked += [(table, key, hook) for key, hook in table.items() if hook is not _silent]
            table.update(dict.fromkeys(table, _silent))

    def restore(self) -> None:
        """Puts the hooks back that haven't been removed."""
        parked, self._parked = self._parked, []
        for table, key, hook in parked:
            if table.get(key) is _silent:
                table[key] = hook


class WeightGradStore:
    """The pending weight gradients of a stage in one call, and its sums. Only one thread at a time may use it.

    ``weight_stream``: that of W, if it isn't ``compute``. ``limit``: how many bytes may wait for W; None: any number.
    ``names``: those of parameters, by identity, for errors.
    """

    def __init__(
        self, compute: Stream, weight_stream: Stream = None, limit: int | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.sums: dict[int, Total] = {}  #: By the identity of the weight.
        self._compute = compute
        self._stream = compute if weight_stream is None else weight_stream
        self.limit = math.inf if limit is None else limit
        self.waiting = 0  #: With a limit: the bytes that wait.
        self._names = names or {}
        self._pending: dict[int, list[Part]] = {}
        self._reading: tuple[torch.Event, Any] | None = None  # What W may still be reading.

    @property
    def size(self) -> int:
        """The bytes that wait for W."""
        return sum(map(_size, self._pending.values()))

    def total(self, weight: Tensor) -> Total:
        """The growing sum of a weight."""
        total = self.sums.get(id(weight))
        if total is None:
            total = self.sums[id(weight)] = Total(weight)
        return total

    def add(self, microbatch: int, gradients: InputGradients) -> None:
        """Adds what B of a microbatch has left: gradients of leaves to the sums, the rest for W."""
        self.finish()  # W had the time of one B: what it has read is let go of.
        self._pending.setdefault(microbatch, []).extend(gradients.parts)
        if self.limit < math.inf:
            self.waiting += _size(gradients.parts)
        values: list[Any] = []
        grads: list[Tensor] = []
        for leaf, grad in gradients.leaves:
            total = self.total(leaf)
            if type(grad) is Tensor and total.adds_in_place(grad):
                values.append(total.value)
                grads.append(grad)
            else:
                total.add(grad)
        if values:  # In one call: a model may have hundreds of weights, most of them tiny.
            _foreach_add_(values, grads)

    def backward_weight(self, microbatches: Sequence[int] | None = None) -> None:
        """W of these microbatches (None: all that wait), summed over them."""
        chosen = list(self._pending) if microbatches is None else microbatches
        parts = [part for i in chosen for part in self._pending.pop(i, ())]
        self.waiting = 0  # With a limit, W is that of all.
        if not parts:
            return
        if self._stream is self._compute:
            self._accumulate(parts)
            return
        totals = [self.total(x) for part in parts for x in part.node.weights if x is not None]
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
        self._pending, self.waiting, self.sums = {}, 0, {}

    def _accumulate(self, parts: Sequence[Part]) -> None:
        groups: dict[Any, list[Part]] = {}
        for part in parts:
            node = part.node
            groups.setdefault((node.accumulate, node.way, *map(id, node.weights)), []).append(part)
        for own in groups.values():
            node = own[0].node
            totals = [None if x is None else self.total(x) for x in node.weights]
            try:
                for part in own:  # Autograd would have read it before it was written to.
                    if total_version([*part.ctx.saved_for_weight, part.grad]) != part.version:
                        raise RuntimeError(_WRITTEN)
                node.accumulate(totals, [(part.ctx, part.grad) for part in own])
            except BaseException as error:
                names = [self._names.get(id(x), "a tensor without a name") for x in node.weights if x is not None]
                add_note(error, f"in the weight gradient of {', '.join(names)}")
                raise


def _size(parts: Sequence[Part]) -> int:
    """The bytes that parts keep alive."""
    tensors = [x for part in parts for x in (*part.ctx.saved_for_weight, part.grad)]
    return sum({id(x): x.nbytes for x in tensors if x is not None}.values())
