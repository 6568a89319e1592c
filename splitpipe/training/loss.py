"""The loss inside a call: the last layer of the last stage, and how the batch's loss is made from microbatches'.

A microbatch's loss is traced while it is computed (``trace``): it consists of terms, each with a divisor. B runs
backward from the terms, before the counts of later microbatches are known:

    term     gradient that microbatch i starts from    of the batch
    a sum    1                                         1
    a mean   count_i / n                               count_i / sum of counts

n is an estimate of the sum, from the first microbatch that runs backward, for all terms. The gradients are also
multiplied by a gradient scaler's scale. Release multiplies them by the correction of both. There is only one
correction, so several terms must have proportional counts.
"""
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import DisableTorchFunction
from splitpipe.loss import terms
from splitpipe.loss.facts import tensors
from splitpipe.loss.reducing import AS_PAIR, Told
from splitpipe.loss.terms import CONSTANT, SUM, Amount, Divisor, Number, Term, Unknown
from splitpipe.loss.trace import Trace
from splitpipe.skip.box import Key, Namespace, current


class _Caller(Namespace):
    """The namespace of the caller's values, equal to nothing else."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


#: A microbatch's target is passed as a skip, from the caller to the last stage.
TARGET: Key = (_Caller(), "target")


class Losses:
    """The loss of a microbatch: its value, what it consists of, and the terms from which B starts."""

    def __init__(self, value: Tensor, made: Number | Unknown) -> None:
        self.value = value.detach()
        #: The value with its graph.
        self.given: Tensor | None = value
        self.made = made
        roots = [t.value for t in made.terms] if isinstance(made, Number) else [value]
        live = [isinstance(x, Tensor) and x.requires_grad and value.requires_grad for x in roots]
        #: The tensors that B starts from, and the numbers of their terms.
        self.roots = [x for x, used in zip(roots, live) if used]
        self.numbers = [k for k, used in enumerate(live) if used]

    def apart(self) -> tuple[list[Any], Losses]:
        """The roots, and the rest, which has no graph."""
        roots, self.roots, self.given = self.roots, [], None
        if isinstance(self.made, Number):
            self.made = self.made.detached()
        return roots, self


class Objective(nn.Module):
    """The loss of a microbatch, as a layer. ``reduction``: as given by the user; None: from the trace."""

    def __init__(self, loss_fn: Callable[..., Any], reduction: str | None, told: Told, pairs: bool = True) -> None:
        super().__init__()
        # If loss_fn is a module, it becomes one of the stage's modules; any other callable is an attribute.
        self.loss_fn = loss_fn
        self.reduction = reduction
        self._told = told
        self._pairs = pairs
        self._watched = isinstance(loss_fn, nn.Module)  # Until it has been called once.
        self.begin([1, 1])

    def begin(self, rows: Sequence[int], input: Sequence[int | None] = (), target: Sequence[int | None] = ()) -> None:
        """Begins a call.

        Args:
            rows: those of each microbatch. If there is only one, its loss is the batch's.
            input: the dimensions of the batch in the input's tensors, which the output may have too.
            target: those in the target's tensors.
        """
        self._rows, self._figures = rows, ()  # The first loss has none so far.
        self._output, self._target = (next((dim for dim in dims if dim is not None), 0) for dims in (input, target))
        self._listed = all(dim is None for dim in target)
        self._compiled = is_compiled(self.loss_fn)
        self._traces = self.reduction is None and len(rows) > 1 and not self._compiled

    def forward(self, output: Any) -> Any:
        """The loss; the target is passed as a skip."""
        return self.loss(output, current().pop(TARGET)).apart()

    def loss(self, output: Any, target: Any, trace: Trace | None = None) -> Losses:
        """The loss of a microbatch; ``trace`` has seen how the output was computed."""
        with DisableTorchFunction():
            if not self._traces:
                trace = None
            elif trace is None:
                values = (output, self._output), (target, self._target)
                sizes = [x.shape[self._dim(x, dim)] for value, dim in values for x in tensors((value,)) if x.dim()]
                trace = Trace(sizes[0] if sizes else 1)
                trace.facts.returned(output, lambda: "a layer")
                self._turn(trace, output, self._output)
            if trace is not None:
                trace.facts.begin(output)
                if isinstance(target, (list, tuple)) and len(target) == trace.facts.rows:
                    if self._listed or not any(x.dim() and x.shape[0] == len(target) for x in tensors(target)):
                        trace.facts.begin_rows(target)  # One entry per row.
                trace.facts.begin(target)
                self._turn(trace, target, self._target)
            before = self._versions()
        with nullcontext() if trace is None else trace:
            found = self.loss_fn(output, target)
        with DisableTorchFunction():  # The user's function modes don't see these checks.
            self._warn_written(before)
            if self._pairs and isinstance(found, (tuple, list)) and len(found) == 2:
                total, count = _verified_pair(found)
                return Losses(total, Number((Term(total, SUM, Divisor(count), 1.0, "loss_fn"),)))
            loss = _scalar(found, "the loss", self._pairs)
            return Losses(loss, self._made(loss, found, trace))

    def _versions(self) -> dict[str, tuple[Tensor, int | None]]:
        """The buffers of loss_fn with their versions, in its first call."""
        watched = self.loss_fn if self._watched and len(self._rows) > 1 else None
        return {n: (x, version_of(x)) for n, x in watched.named_buffers()} if isinstance(watched, nn.Module) else {}

    def _warn_written(self, before: dict[str, tuple[Tensor, int | None]]) -> None:
        now = self._versions() if before else {}
        self._watched = self._watched and len(self._rows) < 2
        written = [
            name for name, (x, version) in before.items()
            if name not in now or now[name][0] is not x or now[name][1] != version
        ]
        if written:
            warnings.warn(
                f"loss_fn changes its buffers ({', '.join(map(repr, written[:3]))}): it is called for each microbatch, "
                "so the loss of later ones depends on earlier ones, and differs from that of the whole batch. Expected "
                "a loss_fn that leaves its buffers as they are; change them after the step.",
                stacklevel=2,
            )

    def _turn(self, trace: Trace, value: Any, dim: int) -> None:
        for x in tensors((value,)) if dim else ():
            if self._dim(x, dim):
                trace.facts.turn(x, dim)

    def _dim(self, x: Tensor, dim: int) -> int:
        """The dimension, if it may have the rows; else the first."""
        return dim if dim < x.dim() and x.shape[dim] in self._rows else 0

    def _made(self, loss: Tensor, found: Tensor, trace: Trace | None) -> Number | Unknown:
        if trace is None:
            unknown = self.reduction is None and self._compiled
            made: Number | Unknown | None = Unknown("a compiled function") if unknown else None
        else:
            made = trace.number(found) or Unknown("loss_fn")
        figures: tuple[Any, ...] = getattr(made, "figures", ())
        self._figures = self._figures or figures
        where = terms.not_understood(made) or terms.differing([self._figures, figures])
        if where:
            self._told.warn(where, AS_PAIR if self._pairs else "another loss_fn")
        if made is None:
            return Number((Term(loss, SUM),)) if self.reduction == "sum" else Unknown("")
        return made


def is_compiled(loss_fn: object) -> bool:
    """True for functions compiled by torch.compile, whose code no function mode sees."""
    inner = getattr(loss_fn, "func", loss_fn)
    return (
        hasattr(inner, "_torchdynamo_orig_callable") or type(inner).__name__ == "OptimizedModule"
        or isinstance(inner, nn.Module) and inner._compiled_call_impl is not None
    )


def begun(known: Objective | None, loss_fn: Callable[..., Any], reduction: str | None, told: Told) -> Objective:
    """The objective of a loss for a new call: the known one, if it has this loss."""
    return known if known is not None and known.loss_fn is loss_fn else Objective(loss_fn, reduction, told)


_OR_PAIR = ", or a pair (total, count) for the sum of totals divided by the sum of counts"
_NO_PAIR = "; only splitpipe.SplitPipe accepts pairs (total, count)"


def _verified_pair(found: Sequence[Any]) -> tuple[Tensor, Amount]:
    total, count = found
    if not isinstance(count, (int, float, Tensor)) or (isinstance(count, Tensor) and count.numel() != 1):
        raise TypeError(
            f"loss_fn returned {_shown(count)} as the count of its pair: expected a number, over the whole batch "
            "the divisor of the total."
        )
    if isinstance(count, Tensor) and count.requires_grad:
        raise TypeError(
            "loss_fn returned a count that requires grad: expected a number that only divides the total. Detach it, "
            "or return a mean."
        )
    plain = count.reshape(()) if isinstance(count, Tensor) else float(count)
    return _scalar(total, "the total of its pair", True), plain


def _scalar(found: Any, what: str, pairs: bool) -> Tensor:
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        raise TypeError(
            f"loss_fn returned {_shown(found)} as {what}: expected a tensor of one number"
            f"{_OR_PAIR if pairs else _NO_PAIR}. Reduce it (reduction='mean', loss.mean())."
        )
    return found.reshape(()) if found.dim() else found


def _shown(found: object) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)} and type {found.dtype}"
    return f"a {type(found).__name__}"


class Reduction:
    """Makes the loss of the batch from the losses of microbatches with these numbers of rows.

    The gradients of B are scaled by a gradient scaler's scale, if there is one.
    """

    def __init__(self, rows: Sequence[int], scale: Tensor | None) -> None:
        self._rows = rows
        self._scale = scale
        self._losses: dict[int, Losses] = {}
        self._numbers: dict[int, Number] = {}
        self._by_rows = False  # Whether the loss is taken as a mean over rows.
        self._mixed = False  # Whether it was traced in the first microbatches only, so that they count differently.
        #: Estimates of each term's divisor for the whole batch, from the first microbatch that runs backward.
        self._whole: list[Amount | None] | None = None

    def add(self, microbatch: int, losses: Losses) -> None:
        """Records the loss of a microbatch."""
        made = losses.made
        unknown = isinstance(made, Unknown) or bool(made.terms) and all(term.unknown for term in made.terms)
        self._by_rows = self._by_rows or not self._numbers and unknown
        self._mixed = self._mixed or isinstance(made, Unknown) and not self._by_rows
        if isinstance(made, Unknown) or self._by_rows:  # With a single row, it may not show that rows meet.
            rows = self._rows[microbatch] if len(self._rows) > 1 else 1  # One that is the batch may have none.
            made = terms.by_rows(losses.value, rows, terms.not_understood(made))
        # An untraced part next to a traced one counts like that one, since there is only one correction.
        base = next((term.divisor for term in made.terms if term.divisor is not None and not term.unknown), None)
        if base is not None:
            made = replace(made, terms=tuple([
                replace(term, divisor=base) if term.unknown else term for term in made.terms
            ]))
        self._losses[microbatch], self._numbers[microbatch] = losses, made

    def seeds(self, microbatch: int) -> list[Tensor]:
        """The gradients that a microbatch's backward starts from, one per root."""
        losses, number = self._losses[microbatch], self._numbers[microbatch]
        estimates = self._estimates(microbatch) if self._incomplete(number) else []
        known = self._whole or []
        # A first microbatch in which nothing counts may have no count.
        whole = self._whole = [
            known[k] if k < len(known) and known[k] is not None else estimates[k] if k < len(estimates) else None
            for k in range(max(len(known), len(number.terms)))
        ]
        if self._by_rows and isinstance(losses.made, Number):
            share = terms.shares(self._rows)[microbatch]
            parts = [losses.made.terms[k] for k in losses.numbers]
            return [self._scaled(torch.full_like(part.value, part.factor * share)) for part in parts]  # type: ignore[arg-type]
        return [self._seed(number, k, whole, microbatch) for k in losses.numbers]

    def _incomplete(self, number: Number) -> bool:
        known = self._whole or []
        return any(
            term.divisor is not None and (k >= len(known) or known[k] is None) for k, term in enumerate(number.terms)
        )

    def _scaled(self, seed: Tensor) -> Tensor:
        return seed if self._scale is None else seed * self._scale.to(seed.dtype)

    def _seed(self, number: Number, k: int, whole: Sequence[Amount | None], microbatch: int) -> Tensor:
        term = number.terms[k]
        assert isinstance(term.value, Tensor)
        factor: Amount = terms.weight(term, terms.shares(self._rows)[microbatch])
        factor = terms.divided_by(factor) if isinstance(factor, Tensor) else factor
        if term.kind is CONSTANT and term.divisor is None:
            divided = [j for j, each in enumerate(number.terms) if each.divisor is not None]
            base = divided[0] if divided else None
            if base is not None:  # With the correction, counts add up to 1; shares of rows may not.
                divisor, estimate = number.terms[base].divisor, whole[base]
                assert divisor is not None and estimate is not None
                factor = terms.wide(divisor.count, term.value) / terms.wide(estimate, term.value)
        estimate = whole[k] if k < len(whole) else None
        if estimate is not None:
            factor = terms.wide(factor, term.value) / terms.wide(estimate, term.value)
        factor = factor if term.factor == 1 else factor * term.factor
        if not isinstance(factor, Tensor):
            return self._scaled(torch.full_like(term.value, factor))
        seed = factor.to(term.value.device, term.value.dtype)
        if type(term.value) is not Tensor or seed.shape != term.value.shape:  # A DTensor's seed is one too.
            seed = torch.ones_like(term.value) * seed
        return self._scaled(seed)

    def _estimates(self, microbatch: int) -> list[Amount | None]:
        each = self._numbers[microbatch].terms
        grown = sum(self._rows) / max(1, self._rows[microbatch])
        single = len(each) == 1 and each[0].kind is SUM
        found: list[Amount | None] = []
        for term in each:
            here = None if term.divisor is None else term.divisor.here
            if isinstance(here, Tensor):
                found.append(self._power(here) if single else torch.where(here == 0, sum(self._rows), here * grown))
            else:  # NONE may be a sum, whose gradients aren't divided.
                by = 1.0 if term.divisor is terms.NONE else grown
                found.append(None if here is None else here * by or 1.0)
        return found

    def _power(self, count: Tensor) -> Tensor:
        # A power of two changes no digit, and nothing overflows in half precision.
        count = count.to(torch.promote_types(count.dtype, torch.float32))
        whole = torch.where(count == 0, max(1, *self._rows), count) * len(self._rows)
        return torch.exp2(whole.clamp(min=1).log2().round())

    def result(self) -> tuple[Tensor, Tensor | None]:
        """The loss of the batch, and the factor for the gradients (None: 1)."""
        order = sorted(self._numbers)
        like, rows = self._losses[order[0]].value, [self._rows[i] for i in order]
        each = [self._numbers[i] for i in order]
        columns = terms.aligned(each)
        # B has run backward term by term, so all microbatches must have the same terms.
        if columns is None or self._mixed or terms.conditional(each) or self._penalised() and not terms.sharing(each):
            raise ValueError(
                f"microbatches have losses of different kinds: {self._listed(order)}. Expected the same terms in each: "
                "let loss_fn return a pair (total, count), for the sum of totals divided by the sum of counts, pass "
                "reduction='mean' (by rows) or 'sum', or use schedule='gpipe' and compute the loss from model(x)."
            )
        divisors = [terms.whole(column) for column in columns]
        unit = self._correction(columns, divisors, order, like)
        scale = None if self._scale is None else self._scale.reciprocal()
        if unit is not None and scale is not None:
            unit = unit * scale
        return terms.combined(columns, rows, like, divisors), scale if unit is None else unit

    def _correction(
        self, columns: Sequence[Sequence[Term]], divisors: Sequence[Amount | None], order: list[int], like: Tensor
    ) -> Tensor | None:
        whole = self._whole or []
        units: list[Amount] = []
        for column, divisor, estimate in zip(columns, divisors, whole):
            if not column[0].factor:
                continue
            if divisor is not None and estimate is not None:
                units.append(_quotient(terms.wide(estimate, like), terms.wide(divisor, like)))
            elif column[0].kind is SUM:
                units.append(1.0)
        if len(units) > 1 and not _equal(units):
            raise ValueError(
                f"the loss has several terms whose counts aren't proportional: {self._listed(order)}. A schedule "
                "runs backward before all counts are known, and corrects all gradients by one factor. Expected terms "
                "with one count: let loss_fn return a pair (total, count), pass reduction='mean' (by rows), or use "
                "schedule='gpipe' and compute the loss from model(x)."
            )
        if not units or not isinstance(units[0], Tensor) and math.isclose(units[0], 1, rel_tol=1e-9):
            return None
        return _tensor(units[0], like)

    def _penalised(self) -> bool:
        """True if B has started from a constant."""
        each = [(losses.made, losses.numbers) for losses in self._losses.values()]
        return any(isinstance(made, Number) and made.terms[k].kind is CONSTANT for made, at in each for k in at)

    def _listed(self, order: Sequence[int]) -> str:
        """The terms of the loss, with their counts in each microbatch."""
        found: dict[str, list[str]] = {}
        for i in order:
            for k, term in enumerate(self._numbers[i].terms):
                count = "a sum" if term.divisor is None else f"{float(term.divisor.here):g}"
                found.setdefault(f"term {k} ({term.function or 'a sum'})", []).append(count)
        return "; ".join(f"{name} has the counts {', '.join(counts)}" for name, counts in found.items())


def _tensor(amount: Amount, like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    if isinstance(amount, Tensor):
        return amount.to(like.device, dtype)
    return torch.full((), amount, dtype=dtype, device=like.device)  # The host doesn't wait for it.


def _quotient(above: Amount, below: Amount) -> Amount:
    if isinstance(below, Tensor):
        return torch.where(below == 0, 1, above / torch.where(below == 0, 1, below))
    return above / below if below else 1.0


def _equal(units: Sequence[Amount]) -> bool:
    """True if all are equal. If some are tensors, the host waits for them, which only happens for several terms."""
    if all(unit is units[0] for unit in units):
        return True
    numbers = [float(unit) for unit in units]
    return all(math.isclose(number, numbers[0], rel_tol=1e-4) for number in numbers)
