"""Facts about tensors that need no device: whether one is plain, its storage and version, shared memory."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from splitpipe.core.torch_private import is_traceable_wrapper_subclass

#: A device, and the address of memory there.
Address = tuple[torch.device, int]

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def is_plain(x: Tensor) -> bool:
    """True if a tensor is dense, strided and not of a subclass."""
    return type(x) in (Tensor, Parameter) and x.layout is torch.strided and not x.is_nested


def storage_of(x: Tensor) -> int:
    """The identity of a plain tensor's storage; 0 for any other tensor, which may have several or none."""
    if not is_plain(x):
        return 0
    identity: int = x.untyped_storage()._cdata
    return identity


def memory_of(*tensors: Tensor) -> dict[Address, int]:
    """The storages behind tensors, of any kind: their addresses and bytes. A lazy layer's have none yet."""
    found: dict[Address, int] = {}
    for x in tensors:
        if is_lazy(x):
            continue
        if is_traceable_wrapper_subclass(x):
            found |= memory_of(*(getattr(x, name) for name in x.__tensor_flatten__()[0]))
        elif x.layout in _PARTS:
            found |= memory_of(*(getattr(x, name)() for name in _PARTS[x.layout]))
        else:
            storage = x.untyped_storage()
            found[x.device, storage.data_ptr()] = storage.nbytes()
    return found


def version_of(x: Tensor) -> int | None:
    """The tensor's version; None for an inference tensor, which has none."""
    try:
        return x._version  # Without calling is_inference() first, in which torch would release the GIL.
    except RuntimeError:
        return None


def sharing(values: Sequence[Any], tainted: Sequence[Tensor] = ()) -> frozenset[int]:
    """The places of tensors that share a storage with another of the values, or with a tainted one."""
    if len(values) < 2 and not tainted:
        return frozenset()
    # An empty tensor can't be written to.
    storages = [storage_of(x) if isinstance(x, Tensor) and x.numel() else 0 for x in values]
    taken = {storage_of(x) for x in tainted}
    if len(storages) > 1:
        taken.update([storage for storage, count in Counter(storages).items() if count > 1])
    return frozenset([k for k, storage in enumerate(storages) if storage and storage in taken])
