"""Joins the outputs of microbatches to that of the batch, and finds the loss among a module's.

    a row, or k, for each row of the batch   joined along the first dimension, or the one that ``batched`` names
    a list with one entry per row            concatenated
    a number, [] in shape                    combined by the reducer; without one, stacked
    equal in all microbatches                the value, once: a weight, positions, a name

Anything else is an error.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from splitpipe.core.note import add_note
from splitpipe.microbatch.tree import PLAIN, alike, described, flatten, open_level


def gather(
    outputs: Sequence[Any], rows: Sequence[int], along: Sequence[int] = (0,), reducer: Any = None,
    where: str = "the output",
) -> Any:
    """The output of the batch, whose microbatches have these rows; ``reducer`` combines numbers (``loss.numbers``).

    ``along``: the dimensions along which values of the input were split; ``where``: what messages call the output.
    """
    first = outputs[0]
    counts = [first] if type(first) is int else [*first[:1]] if type(first) is torch.Size else []
    if len(outputs) > 1 and len({*rows}) == 1 and rows[0] in counts:
        raise ValueError(
            f"{where} is {first!r}, and each microbatch has {rows[0]} rows, which it may count: expected a tensor with "
            "a row for each, or another number of chunks."
        )
    if len(outputs) > 1 and all(x is first for x in outputs):
        return first
    if all(isinstance(x, Tensor) for x in outputs):
        return _join_tensors(outputs, rows, along, reducer, where)
    if type(first) in (list, tuple) and _is_by_rows(outputs, rows, along, where):
        return type(first)(chain.from_iterable(outputs))
    levels = [None if isinstance(x, PackedSequence) else open_level(x, fields=True) for x in outputs]
    for number, (x, level) in enumerate(zip(outputs, levels)):
        if level is not None and levels[0] is not None:
            same = level.kind == levels[0].kind
        else:  # Of other classes, == may be any code.
            same = isinstance(x, Tensor) or isinstance(x, PLAIN) and x == first
        if x is not first and not (same and type(x) is type(first)):
            raise ValueError(
                f"microbatches 0 and {number} return {described(first)} and {described(x)} as {where}, which can't be "
                "joined: expected equal values, or tensors in the same nesting, such as mask.sum() for a number. "
                "Leave it out (a cache: use_cache=False), or use chunks=1."
            )
    if levels[0] is None:
        return first
    columns = zip(*(level.parts for level in levels if level is not None))
    named = zip(levels[0].keys, columns)
    return levels[0].rebuild([gather(each, rows, along, reducer, f"{where}[{key!r}]") for key, each in named])


def _join_tensors(
    column: Sequence[Tensor], rows: Sequence[int], along: Sequence[int], reducer: Any, where: str
) -> Tensor:
    first = column[0]
    if reducer is not None and reducer.reduces(column):
        return reducer.reduced(column, rows)  # type: ignore[no-any-return]
    if not any(x.dim() for x in column):
        return torch.stack([*column])
    if len(column) == 1:
        return first
    # A microbatch may have skipped the last stages, so that its values are on another device.
    column = [x.to(first.device) for x in column]
    same = all(x.shape == first.shape for x in column)
    fits = {dim: all([[*x.shape[dim : dim + 1]] == [n] for x, n in zip(column, rows)]) for dim in (0, 1, *along)}
    dims = [dim for dim in along if fits[dim]] or [0] * fits[0]
    if not dims and same and all(torch.equal(x, first) for x in column):
        return first
    second = fits[1] and (max(rows) > 1 or first.dim() > 2)
    several = not dims and not second and (not same or len({*rows}) == 1 and first.shape[0] % rows[0] == 0)
    if several and 0 in along:
        dims = [0]  # Several entries per row, or selected ones; those of rows that are second may be in any order.
    if len(dims) != 1:
        raise ValueError(
            f"{where} has the shape {[*first.shape]} and differs between microbatches, of {rows[0]} rows: expected the "
            "batch first, or where batched names it for an input, and not flattened: y.transpose(0, 1); or another "
            "number of chunks."
        )
    try:
        return torch.cat(column, dims[0])
    except RuntimeError as error:
        add_note(error, f"in joining {where}: pad it, or use squeeze(-1); if it compares rows, return the features.")
        raise


def _is_by_rows(column: Sequence[Any], rows: Sequence[int], along: Sequence[int], where: str) -> bool:
    """True for a list with one entry per row; raises if it may as well have one for each layer, for example."""
    first = column[0]
    if any(type(x) is not type(first) or len(x) != count for x, count in zip(column, rows)):
        return False
    shared = all(x is y and not isinstance(x, PLAIN) for each in column[1:] for x, y in zip(each, first))
    if len({*rows}) > 1 or len(column) > 1 and shared or not alike(first):
        return len({*rows}) > 1
    entries = [[x for x in flatten(each, fields=True)[0] if not isinstance(x, PLAIN)] for each in zip(*column)]
    if any(not isinstance(x, Tensor) for each in entries for x in each):
        return True  # Objects can't be joined in any other way.
    # An entry that holds for all rows, such as a layer's, has the batch as a dimension in every microbatch.
    tensors = [own for own in ([x for x in each if x.dim()] for each in entries) if own]
    whole = [all(any([*x.shape[dim : dim + 1]] == [rows[0]] for dim in along) for x in own) for own in tensors]
    if type(first) is list and whole and not any(whole):
        return True
    layers = all(whole) and all(x is None or isinstance(x, Tensor) and x.dim() for x in first)
    outputs = type(first) is tuple and (any(whole) or not whole)  # A tuple is rather several outputs.
    if layers or outputs or len(column) == 1:
        return False
    raise ValueError(
        f"{where} is a {type(first).__name__} of {rows[0]}, and each microbatch has {rows[0]} rows: it could have one "
        f"entry per row, or {rows[0]} for all rows. Return a tensor or a dict, or choose another number of chunks."
    )


def find_loss(output: Any) -> tuple[int, Tensor]:
    """The loss and its place among the leaves: the field or key ``loss``, or the one number with a graph."""
    leaves, _ = flatten(output, fields=True)
    found: Any = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    floating = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]
    numbers = [k for k in floating if not leaves[k].dim() and leaves[k].requires_grad >= torch.is_grad_enabled()]
    places = numbers if found is None else [k for k in floating if leaves[k] is found]
    if not places or found is None and len(places) > 1:
        kind = f"{len(numbers)} numbers with a graph" if found is None else f"a {type(found).__name__} as its loss"
        raise TypeError(
            f"the module's output, a {type(output).__name__}, has {kind}: a schedule runs backward inside the forward, "
            "so it needs the field or key 'loss', or just one such number. Pass labels=..., or a loss_fn and a target; "
            "leave out the schedule; or, for outputs only, use model.eval() or torch.no_grad()."
        )
    return places[0], leaves[places[0]]
