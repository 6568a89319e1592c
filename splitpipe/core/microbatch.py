"""Splits a batch into microbatches, and joins microbatches to a batch, whatever their nesting.

A value is any nesting of tuple, list, dict and namedtuple. Its tensors are split along the first dimension, like
``torch.chunk``. Tensors that are marked whole, tensors without dimensions, and all other values are passed to every
microbatch unchanged.
"""
from __future__ import annotations

import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils.rnn import PackedSequence

from splitpipe.core.torch_private import TreeSpec, tree_flatten, tree_unflatten

Leaves = list[Any]
Rows = list[tuple[int, int]]
#: The treespec of a single leaf.
_LEAF: TreeSpec = tree_flatten(None)[1]
#: The treespec of a ``Flat``.
FLAT: TreeSpec = tree_flatten([])[1]
#: The way out for objects that hold tensors.
_OR_SPLIT = " Or pass a function that divides such objects, split=."
#: Values that hold no tensors.
_PLAIN = (torch.Size, bool, int, float, complex, str, bytes, type(None))


class Flat(list[Any]):
    """Flattened leaves: ``flatten`` doesn't look for a nesting, which takes as long as a small layer."""


def flatten(value: object, whose: str, batch: bool = False) -> tuple[Leaves, TreeSpec]:
    """The leaves of a value and its nesting; raises for containers with tensors that pytree doesn't know."""
    if type(value) is Tensor:
        return [value], _LEAF
    if type(value) is Flat:
        leaves, spec = list(value), FLAT
    else:
        # A PackedSequence can be passed between stages as it is, but its rows aren't rows of the batch.
        leaves, spec = tree_flatten(value, is_batch_leaf if batch else _is_leaf)
    for leaf in leaves:
        verify_open(leaf, whose)
    return leaves, spec


def verify_open(leaf: object, whose: str, deep: bool = False) -> None:
    """Raises for a leaf that is a container of tensors; ``deep``: also for other objects with tensors in attributes."""
    if not isinstance(leaf, (Tensor, *_PLAIN)) and next(hidden(leaf, deep), None) is not None:
        advice = f", or use False for it in batched= if every microbatch gets it whole.{_OR_SPLIT}" if deep else "."
        raise TypeError(
            f"{whose} holds tensors in a {type(leaf).__name__}, which can't be split into microbatches or moved "
            "between devices: expected tensors in any nesting of tuple, list, dict and namedtuple. Unpack it "
            f"there, or register the class with torch.utils._pytree.register_pytree_node{advice}"
        )


def _is_leaf(value: object) -> bool:
    return type(value) is torch.Size  # A pytree would make a tuple of it.


def is_batch_leaf(value: object) -> bool:
    """True for values that pytree takes for a nesting, although they are leaves: a size, packed sequences."""
    return isinstance(value, (torch.Size, PackedSequence))


def unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """The value that ``flatten`` flattened."""
    if spec is _LEAF:
        (leaf,) = leaves
        return leaf
    if spec is FLAT:
        return Flat(leaves)
    return tree_unflatten(leaves, spec)


def hidden(leaf: object, deep: bool = True) -> Iterator[Tensor]:
    """The tensors that a container holds which is a leaf to pytree, at any depth; ``deep``: also other objects'."""
    seen: set[int] = set()
    stack = [leaf]
    while stack:
        for part in _inside(stack.pop(), deep):
            if isinstance(part, Tensor):
                yield part
            elif id(part) not in seen:
                seen.add(id(part))
                stack.append(part)


#: Objects whose attributes aren't part of a batch.
_CODE = (type, ModuleType, nn.Module, torch.Generator, *_PLAIN)


def _inside(value: object, deep: bool) -> Iterable[Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list, deque, UserList, Set)):
        return value
    if not deep or isinstance(value, _CODE) or hasattr(value, "__code__"):
        return ()
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    return [*getattr(value, "__dict__", {}).values(), *[getattr(value, name, None) for name in names]]


def batch_size(leaves: Leaves, whose: str = "the input") -> int:
    """The number of rows of the batch: the first dimension, which must be the same for all tensors."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        raise nothing_to_cut(leaves, whose)
    verify_strided(tensors, whose)
    sizes = [tensor.shape[0] for tensor in tensors]
    if len(set(sizes)) > 1:
        raise disagreement(sizes, [0] * len(sizes), whose, can_say=False)
    return sizes[0]


def nothing_to_cut(leaves: Leaves, whose: str, said: bool = False) -> Exception:
    """The error for a value without a batch; ``said``: whether ``batched=`` marks values as whole."""
    if said and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return ValueError(
            f"{whose} holds no tensor to split according to batched=: expected one, whose first dimension is the batch."
        )
    kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
    advice = _OR_SPLIT if any(next(hidden(leaf), None) is not None for leaf in leaves) else ""
    return TypeError(
        f"{whose} holds no tensor with a first dimension to split into microbatches (found: {kinds}): expected "
        f"a tensor, or a nesting of tuple, list, dict and namedtuple with one in it.{advice}"
    )


def disagreement(sizes: list[int], dims: list[int], whose: str, can_say: bool) -> ValueError:
    """The error for tensors with different batch sizes; ``can_say``: whether the caller has ``batched=``."""
    advice = "belongs in a layer's buffer here."
    if can_say:
        advice = (
            "is passed whole to every microbatch by SplitPipe(..., batched=(True, False)), for (x, mask); or keep it "
            "in a layer's buffer."
        )
    found = f"first dimensions {sizes}" if not any(dims) else f"sizes {sizes} along dimensions {dims}"
    along = "its first dimension" if not any(dims) else "these"
    return ValueError(
        f"{whose}'s tensors have {found}: expected the same batch size in all, since each is "
        f"split along {along}. Anything that isn't part of the batch (a mask, a table) {advice}"
    )


def verify_strided(leaves: Leaves, whose: str) -> None:
    """Raises for tensors whose layout has no rows to split."""
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            kind = "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
            raise TypeError(
                f"{whose} holds {kind}, which can't be split into microbatches: expected "
                "torch.strided. Convert it first (to_dense(), to_padded_tensor()), or inside the model."
            )


def verify_filled(leaves: Leaves, whose: str) -> None:
    """Raises for tensors without data, which can't be moved to a stage's device."""
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
        raise ValueError(f"{whose} holds a tensor on meta, which has no data: expected one with values.")


def cuts(size: int, chunks: int) -> Rows:
    """The first row and the number of rows of each microbatch: at most ``chunks``, none empty unless the batch is."""
    step = max(1, -(-size // chunks))
    return [(start, min(step, size - start)) for start in range(0, size, step)] or [(0, 0)]


class Scatter(Function):
    """The rows of a tensor, along some dimension, as separate tensors in the same memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, dim: int = 0) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.rows = rows
        ctx.like = x.shape, x.dtype, x.device, dim
        return _slices(x, rows, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        return _stacked(grads, ctx.rows, *ctx.like), None, None


def _slices(x: Tensor, rows: Rows, dim: int) -> tuple[Tensor, ...]:
    """Slices that aren't views: autograd doesn't allow in-place writes to one of several views from one node.

    The first slice shares the version counter of the batch, so that autograd notices a later write to the batch, and a
    layer's in-place write increments the batch's version. Every other slice has a separate counter: with a common one,
    a layer that works in place on one microbatch would invalidate what autograd saved of the others.

    Along dimensions other than the first, slices of contiguous memory are copies: ``view`` then works on them as on the
    batch, and cuDNN accepts them as states of an RNN.
    """
    (start, count), *others = rows
    first = x.detach().narrow(dim, start, count).detach()
    if not others:
        return (first,)
    with torch.no_grad():
        # "Unsafe" is torch's word: the parts share memory, but not a version counter.
        parts: tuple[Tensor, ...] = torch.unsafe_split_with_sizes(x, [count for _, count in rows], dim)
    if dim and x.is_contiguous():
        return tuple([part.contiguous() for part in (first, *parts[1:])])
    return first, *parts[1:]


class Share(Function):
    """A tensor as several, in the same memory, one per microbatch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for _ in range(count)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return _total(grads), None


def _total(grads: Iterable[Tensor | None]) -> Tensor | None:
    found = [grad for grad in grads if grad is not None]
    return reduce(torch.add, found) if found else None


def _stacked(
    parts: Sequence[Tensor | None], rows: Rows, shape: torch.Size, dtype: torch.dtype, device: torch.device, dim: int
) -> Tensor | None:
    if all(part is None for part in parts):
        return None
    return torch.cat([
        torch.zeros((*shape[:dim], count, *shape[dim + 1:]), dtype=dtype, device=device) if part is None else part
        for part, (_, count) in zip(parts, rows)
    ], dim)


def gradient_of(x: Tensor, rows: Rows, parts: Sequence[Tensor | None], dim: int | None) -> Tensor | None:
    """The gradient of a tensor of the batch, from its microbatches' gradients; None if none has one.

    ``dim``: the dimension along which it was split; None if it wasn't.
    """
    if dim is not None:
        return _stacked(parts, rows, x.shape, x.dtype, x.device, dim)
    found = _total(parts)
    # The layer may have passed it to others too: it must be a separate tensor, as a stacked one is.
    return found.clone() if found is not None and any(found is part for part in parts) else found


def scatter(leaves: Leaves, rows: Rows, dims: Sequence[int | None] | None = None) -> list[Leaves]:
    """The leaves of each microbatch; ``dims``: the dimension along which each is split, or None (all: the first)."""
    along = [0 if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves] if dims is None else dims
    columns = [pieces(leaf, rows, dim) for leaf, dim in zip(leaves, along)]
    return [list(microbatch) for microbatch in zip(*columns)] if leaves else [[] for _ in rows]


def pieces(leaf: Any, rows: Rows, dim: int | None) -> Sequence[Any]:
    """A value for each microbatch, split along a dimension, or whole."""
    if not isinstance(leaf, Tensor):
        return [leaf] * len(rows)
    if not leaf.dim() or dim is None and leaf.is_inference():
        # Each microbatch gets a separate tensor: in place, m of them would write to the same memory. Where they do
        # share it, writes are found by its version, which an inference tensor doesn't have.
        return [leaf.clone() for _ in rows]
    tracked = leaf.requires_grad and torch.is_grad_enabled()
    if dim is None:
        shares: Sequence[Tensor] = Share.apply(leaf, len(rows)) if tracked else [leaf.detach() for _ in rows]
        return shares
    parts: Sequence[Tensor] = Scatter.apply(leaf, rows, dim) if tracked else _slices(leaf, rows, dim)
    return parts


def gather(
    microbatches: list[tuple[Leaves, TreeSpec]], joining: Callable[[tuple[Any, ...]], Any] | None = None
) -> Any:
    """Joins the values of all microbatches into one: tensors are joined; others must agree, and are the first's."""
    one = join if joining is None else joining
    spec = microbatches[0][1]
    for number, (_, other) in enumerate(microbatches):
        if other != spec:
            raise ValueError(
                f"microbatches 0 and {number} return outputs with different nesting, which can't be joined: {spec} and "
                f"{other}. Return the same nesting for every microbatch."
            )
    columns = zip(*(leaves for leaves, _ in microbatches))
    output = unflatten([one(column) for column in columns], spec)
    flatten(output, "the output of the last layer", batch=True)
    return output


def join(column: tuple[Any, ...], dim: int = 0) -> Any:
    """Joins the values of microbatches at one place: tensors are joined; others must be equal."""
    first = column[0]
    for number, x in enumerate(column):
        if not isinstance(first, Tensor) or not isinstance(x, Tensor):
            if not same(first, x):
                raise ValueError(
                    f"microbatches 0 and {number} return the outputs {_shown(first)} and {_shown(x)}, which can't be "
                    "joined: expected equal values. Return tensors, which are joined along their first dimension."
                )
        elif not _fit(first, x, dim):
            which = f"dimension {dim}" if dim else "the first dimension"
            raise ValueError(
                f"microbatches 0 and {number} return outputs of shapes {list(first.shape)} and {list(x.shape)}, which "
                f"can't be joined: expected shapes that differ only in {which}. Pad them in the last layer."
            )
    if not isinstance(first, Tensor) or len(column) == 1 and first.dim():
        return first
    return torch.cat(column, dim) if first.dim() else torch.stack(column)


def _fit(x: Tensor, y: Tensor, dim: int) -> bool:
    """True if torch.cat can join them; it ignores empty tensors with one dimension."""
    if x.is_nested or y.is_nested or (0,) in (x.shape, y.shape):
        return True
    if x.dim() != y.dim():
        return False
    return x.shape[:dim] == y.shape[:dim] and x.shape[dim + 1 :] == y.shape[dim + 1 :]


def same(x: Any, y: Any) -> bool:
    """True if two values that aren't tensors are equal."""
    if x is y:
        return True
    try:
        return type(x) is type(y) and not isinstance(x, Tensor) and bool(x == y)
    except Exception:  # The result may be undefined, as for arrays.
        return False


def _shown(value: Any) -> str:
    return "(a tensor)" if isinstance(value, Tensor) else repr(value)
