"""A value as a tree of its leaves and containers, with the ``batched=`` flag of each."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from splitpipe.batch.flags import ROWS, descend, is_nested, misfit
from splitpipe.core.microbatch import is_batch_leaf
from splitpipe.core.torch_private import tree_flatten, tree_unflatten

_LEAVES = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Node:
    """A leaf or a container; its leaves have the indices from ``start`` to ``stop``."""

    __slots__ = ("by_rows", "children", "flag", "listed", "rebuild", "start", "stop", "value", "where")

    def __init__(self, value: Any, flag: Any, where: str, start: int, record: bool = False) -> None:
        self.value = value
        self.flag = flag
        self.where = where
        self.start = start
        self.by_rows = False  #: One entry per row: each belongs to the microbatch of its row.
        parts, self.rebuild = (None, None) if isinstance(value, _LEAVES) else one_level(value)
        #: True for a list or tuple that might have one entry per row.
        self.listed = type(value) in (list, tuple) and not record and not is_nested(flag)
        if flag == ROWS and not self.listed:
            raise ValueError(
                f"{where} is a {type(value).__name__}, but batched specifies 'rows' there: expected a list or tuple "
                "with one entry per row. For a tensor, give the dimension of the batch."
            )
        self.children: list[Node] | None = None
        if parts is None:
            if is_nested(flag):
                if value is not None:
                    raise misfit(where, flag, value)
                self.flag = None  # An optional value that is left out.
            self.stop = start + 1
            return
        keys = list(value) if isinstance(value, dict) else range(len(parts))
        self.children = []
        for key, part, inner in zip(keys, parts, descend(flag, value, len(parts), where)):
            self.children.append(Node(part, inner, f"{where}[{key!r}]", start))
            start = self.children[-1].stop
        self.stop = start

    def leaves(self) -> Iterator[Node]:
        """The leaves, in the order in which pytree flattens them."""
        if self.children is None:
            yield self
        else:
            for child in self.children:
                yield from child.leaves()

    def numbers(self, start: int, stop: int) -> Any:
        """The value for rows ``start`` to ``stop``, with its leaves' indices in their places."""
        if self.children is None:
            return self.start
        chosen = self.children[start:stop] if self.by_rows else self.children
        assert self.rebuild is not None
        return self.rebuild([child.numbers(start, stop) for child in chosen])

    # A list that might have one entry per row.

    def alike(self) -> bool:
        """True if the entries of a list are of one kind, as entries for rows are."""
        return alike(self.value)

    def tensors(self) -> list[Tensor]:
        """The tensors inside that have dimensions."""
        return [leaf.value for leaf in self.leaves() if isinstance(leaf.value, Tensor) and leaf.value.dim()]

    def common(self) -> int | None:
        """The first dimension of all tensors inside; None if they disagree, or if there are none."""
        sizes = {x.shape[0] for x in self.tensors()}
        return sizes.pop() if len(sizes) == 1 else None


def one_level(value: Any) -> tuple[list[Any] | None, Callable[[list[Any]], Any] | None]:
    """The children of a container, and a function that makes it from them again; None for a leaf."""
    if type(value) is list:
        return value, list
    if type(value) is tuple:
        return list(value), tuple
    if type(value) is dict:
        keys = list(value)
        return list(value.values()), lambda parts: dict(zip(keys, parts))
    if is_batch_leaf(value):
        return None, None
    parts, spec = tree_flatten(value, lambda x: x is not value or is_batch_leaf(x))
    if len(parts) == 1 and parts[0] is value:
        return None, None
    return parts, lambda parts: tree_unflatten(parts, spec)


def alike(values: list[Any] | tuple[Any, ...]) -> bool:
    """True if values are of one kind: tensors with the same dtype and number of dimensions, dicts, strings, numbers."""
    entries = [entry for entry in values if entry is not None]
    if not entries:
        return False
    first = entries[0]
    if isinstance(first, Tensor):
        return all(isinstance(x, Tensor) and x.dtype == first.dtype and x.dim() == first.dim() for x in entries)
    if callable(first) or isinstance(first, (torch.dtype, torch.device, torch.layout)):
        return False
    return all(type(entry) is type(first) for entry in entries)
