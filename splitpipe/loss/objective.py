"""The loss inside a call: the last layer of the last stage."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import NoneType
from typing import Any

from torch import Tensor, nn

from splitpipe.compiled.layers import is_compiled
from splitpipe.core.tensors import tensors_in
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss.numbers import Amount, Number, Unknown, quotient
from splitpipe.loss.reduction import AS_PAIR, BatchLoss
from splitpipe.loss.trace import Trace
from splitpipe.skip.tracker import Key, Namespace, current

_NAMESPACE = Namespace()
#: A microbatch's target and number are passed as skips, from the caller to the last stage.
TARGET: Key = (_NAMESPACE, "target")
MICROBATCH: Key = (_NAMESPACE, "microbatch")


class Objective(nn.Module):
    """The loss of a microbatch, as a layer.

    ``reduction``: as given by the user; None: from the trace. ``said``: of what was warned. ``pairs``: whether loss_fn
    may return pairs, which it may not across processes.
    """

    def __init__(self, loss_fn: Callable[..., Any], reduction: str | None, said: set[str], pairs: bool = True) -> None:
        super().__init__()
        # If loss_fn is a module, it becomes one of the stage's modules; any other callable is an attribute.
        self.loss_fn, self.reduction = loss_fn, reduction
        self._said, self._pairs = said, pairs
        self.begin([1, 1])

    def begin(self, rows: Sequence[int], input: Sequence[int | None] = (), target: Sequence[int | None] = ()) -> None:
        """Begins a call whose microbatches have these rows.

        ``input``, ``target``: the dimensions of the batch in their tensors. The output may have the input's.
        """
        self._rows, ways = rows, AS_PAIR if self._pairs else "another loss_fn"
        self.batch_loss = BatchLoss(rows, self.reduction, self._said, ways)
        self._input, self._target = input, [dim for dim in target if dim is not None]
        self.compiled = is_compiled(self.loss_fn)

    def forward(self, output: Any) -> Any:
        """The part of a microbatch in the batch's loss."""
        i: Any = current().pop(MICROBATCH)
        value, number = self.loss(i, output, current().pop(TARGET))
        with DisableTorchFunction():
            return self.batch_loss.part(i, value, number)

    def loss(self, i: int, output: Any, target: Any, trace: Trace | None = None) -> tuple[Tensor, Number | Unknown]:
        """The loss of a microbatch, and what it consists of; ``trace`` has seen how the output was computed."""
        with DisableTorchFunction():
            traces = self.reduction is None and len(self._rows) > 1 and not self.compiled
            trace = self._begun(trace, i, output, target) if traces else None
        with trace or nullcontext():
            value = self.loss_fn(output, target)
        with DisableTorchFunction():  # The user's function modes don't see these checks.
            loss, count = _verified(value, self._pairs)
            if count is not None:
                return loss, quotient(loss, count, loss)
            if trace is None:
                return loss, Unknown("a compiled function")
            return loss, trace.ledger.number(value) or Unknown("loss_fn")

    def _begun(self, trace: Trace | None, i: int, output: Any, target: Any) -> Trace:
        """A trace that knows where the rows are in the output and in the target."""
        if trace is None:
            trace = Trace(self._rows, i, self._input)
            trace.ledger.note_numbers(output, "a layer")
        trace.ledger.begin(output, trace.ledger.dim, Unknown("a layer"))
        trace.ledger.begin(target, [*self._target, 0][0])
        # A list of values without a batch may have one entry per row.
        if not self._target or not any([x.dim() and x.shape[0] == trace.ledger.rows for x in tensors_in(target)]):
            trace.ledger.begin_entries(target)
        return trace


def _verified(value: Any, pairs: bool) -> tuple[Tensor, Amount | None]:
    """A loss, or the total and the count of a pair."""
    loss, count = value if pairs and isinstance(value, (tuple, list)) and len(value) == 2 else (value, None)
    plain = isinstance(count, (int, float, NoneType)) or isinstance(count, Tensor) and count.numel() == 1
    if not plain or isinstance(count, Tensor) and count.requires_grad or not (
        isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
    ):
        whole = ", or a pair (total, count), for the sum of totals divided by the sum of counts, which have no graph"
        raise TypeError(
            f"loss_fn returned {_shown(loss)}{'' if count is None else f' and the count {_shown(count)}'}: expected a "
            f"tensor of one number{whole if pairs else '; only splitpipe.SplitPipe accepts pairs (total, count)'}. "
            "Reduce it (loss.mean()), or start from output.sum() * 0 in place of 0."
        )
    return loss.reshape(()), count.reshape(()) if isinstance(count, Tensor) else count


def _shown(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    graph = ", with a graph" if value.requires_grad else ""
    return f"a tensor of shape {list(value.shape)} and type {value.dtype}{graph}"
