"""Facts about tensors that need no device: whether one is plain, its storage and version, shared memory."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from splitpipe.core.torch_private import tree_flatten, tree_unflatten


def is_plain(x: Tensor) -> bool:
    """True if a tensor is dense, strided and not of a subclass."""
    return type(x) in (Tensor, Parameter) and x.layout is torch.strided and not x.is_nested


def storage_of(x: Tensor) -> int:
    """The address of a plain tensor's memory; 0 if it has none, and for any other tensor, which may have several."""
    return x.untyped_storage().data_ptr() if is_plain(x) else 0


def dense(x: Tensor) -> Tensor:
    """A sparse tensor with all of its zeros; any other one as it is."""
    return x if x.layout is torch.strided or x.is_nested else x.to_dense()


def version_of(x: Tensor) -> int | None:
    """The tensor's version; None for an inference tensor, which has none."""
    try:
        return x._version  # Without calling is_inference() first, in which torch would release the GIL.
    except RuntimeError:
        return None


def sharing(values: Sequence[Any], tainted: Sequence[Tensor] = ()) -> frozenset[int]:
    """The places of tensors that share a storage with another of the values, or with a tainted one."""
    storages = [storage_of(x) if isinstance(x, Tensor) else 0 for x in values]
    counts = Counter([*storages, *{storage_of(x) for x in tainted}])
    return frozenset([k for k, storage in enumerate(storages) if storage and counts[storage] > 1])


def map_tensors(change: Callable[[Any], Any], value: Any, of: Any = Tensor) -> Any:
    """A copy of a nesting, with its tensors, or what is ``of`` other types, changed."""
    if isinstance(value, of):
        return change(value)
    kind = type(value)  # Without pytree, which takes as long as some functions do.
    if kind is tuple or kind is list:
        return kind([map_tensors(change, x, of) for x in value])
    if kind is dict:
        return {key: map_tensors(change, x, of) for key, x in value.items()}
    leaves, structure = tree_flatten(value)
    return tree_unflatten([change(x) if isinstance(x, of) else x for x in leaves], structure)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nestings of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, (tuple, list, dict)):
        return []
    return [x for each in (value.values() if isinstance(value, dict) else value) for x in tensors_in(each)]


def wait_for_collectives(values: Iterable[Any]) -> None:
    """Waits for collectives whose results are dropped unread, as a recomputation's output: torch would keep them."""
    for x in [x for x in values if isinstance(x, Tensor)]:
        pending: Any = x.to_local() if hasattr(x, "to_local") else x
        if hasattr(pending, "trigger_wait"):
            pending.trigger_wait()
