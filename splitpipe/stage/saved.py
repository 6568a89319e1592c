"""Saved tensors of a checkpointed forward, as numbers or as tensors, and of its recomputation."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.note import uncompiled
from splitpipe.core.tensors import storage_of
from splitpipe.core.thread_state import Hooks, Packed, unchanged

#: A tensor saved as itself, and its version at that time.
Record = tuple[Tensor, int]
#: The shape, dtype and, if it has some, strides of a saved tensor: of factors that lie in memory otherwise, matmul may
#: save the second one first.
Meta = tuple[torch.Size, torch.dtype, "tuple[int, ...] | None"]


def meta_of(x: Tensor) -> Meta:
    """What must be the same in a recomputation."""
    return x.shape, x.dtype, x.stride() if x.layout is torch.strided else None


@uncompiled
def load(record: Record) -> Tensor:
    """The tensor; raises if it has been written to since, because hooks turn off torch's own check."""
    tensor, version = record
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{list(tensor.shape)} tensor of {tensor.dtype} is at version {tensor._version}; expected version "
            f"{version}."
        )
    return tensor


class SavedDirectly:
    """Tensors that live on anyway, saved as themselves: parameters, and other leaves, which the graph keeps alive."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.ids = frozenset(map(id, parameters))
        #: The metas of what the previous microbatch has saved, which are likely for the next one.
        self.metas: list[Meta] = []
        #: A single object for all equal metas, because the garbage collector walks through all objects.
        self.same: dict[Meta, Meta] = {}
        self._records: dict[int, Record] = {}

    def record(self, x: Tensor) -> Record:
        """The record of a tensor that lives on. A parameter keeps the same one until it is written to."""
        key, version = id(x), x._version
        if key not in self.ids:
            return x, version
        known = self._records.get(key)
        if known is None or known[1] != version:
            known = self._records[key] = x, version
        return known


def identify(x: Tensor) -> int:
    """The identity of the tensor's memory, or of a tensor without storage."""
    return storage_of(x) or id(x)


class Refill:
    """The saved tensors of a recomputation, which must match the forward's."""

    def __init__(self, metas: Sequence[Meta], direct: SavedDirectly) -> None:
        self._metas = metas
        self._direct = direct
        self.tensors: list[Tensor] = []
        self.versions: list[int] = []

    def hooks(self) -> Hooks:
        """The hooks of a recomputation."""
        metas, direct, tensors, versions = self._metas, self._direct, self.tensors, self.versions
        ids = direct.ids

        @uncompiled
        def pack(x: Tensor) -> Record | int:
            if x.is_leaf and (x.requires_grad or id(x) in ids):
                return direct.record(x)
            number = len(tensors)
            if number < len(metas):
                shape, dtype, strides = metas[number]
                if x.shape != shape or x.dtype != dtype or strides is not None and x.stride() != strides:
                    raise recomputation_error(
                        f"saved {meta_of(x)} as its tensor {number}, but the forward saved {metas[number]}"
                    )
            tensors.append(x)
            versions.append(x._version)
            return number

        @uncompiled
        def unpack(packed: Record | int) -> Tensor:
            if not isinstance(packed, int):
                return load(packed)
            if packed >= len(tensors):  # The recomputation is over, and the frame has them.
                raise RuntimeError(
                    "backward ran through a tensor that a recomputation made: gradients run through the graph of the "
                    "first forward, and that of the recomputation has lost what it saved. Module hooks see the "
                    "layers again in a recomputation: expected them to check splitpipe.is_recomputing(), and to "
                    "leave those tensors alone."
                )
            return load((tensors[packed], versions[packed]))

        return pack, unpack

    def records(self, passing: Collection[int] = ()) -> list[Tensor | None]:
        """The tensors without the graph that made them; copies of those in memory that ``passing`` names (identify).

        A tensor that was written to stays as it is: it is an error if a node asks for it. Usually, none does: for
        example, for a codebook that forward moves in place after choosing from it, which has no gradient.
        """
        for number, x in enumerate(self.tensors) if passing else ():
            if identify(x) in passing and x._version == self.versions[number]:
                self.tensors[number] = copy = x.detach().clone()
                self.versions[number] = copy._version
        # Not by .data, which is faster: a function that, in backward, overwrites what another one has saved is an
        # error, and only versions, which all tensors in that memory share, show it.
        return [x if x.is_leaf else x.detach() for x in self.tensors]


class Passing(Packed):
    """A saved tensor whose memory will have other values in backward: copied when the run that saves it is over."""

    def __init__(self, x: Tensor) -> None:
        self._record: Record = x.detach(), x._version

    def load(self) -> Tensor:
        """The tensor; raises if the run has written to it since, as without a pipeline."""
        return load(self._record)

    def keep(self) -> None:
        """Called when the run is over."""
        tensor, version = self._record
        if tensor._version == version:
            copy = tensor.clone()
            self._record = copy, copy._version


@contextmanager
def saved_apart(memory: Callable[[], Collection[int]]) -> Iterator[None]:
    """Saves copies of tensors in memory with these identities, which has other values after the block."""
    if not memory():
        yield
        return
    passing: list[Passing] = []

    @uncompiled
    def pack(x: Tensor) -> Tensor | Packed:
        if identify(x) not in memory():
            return x.detach()
        passing.append(Passing(x))
        return passing[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, unchanged):
        yield
    for each in passing:
        each.keep()


def recomputation_error(how: str) -> RuntimeError:
    """The error for a recomputation that differs from its forward."""
    return RuntimeError(
        f"the recomputation of a checkpointed stage {how}: expected the same operations both times. A layer does "
        "something else when it is recomputed (because of a counter, the time, random numbers of Python or NumPy, "
        "another graph of torch.compile for another batch size). Make it repeatable, check "
        "splitpipe.is_recomputing() there, or use checkpoint='never'."
    )


def made_other(kinds: Sequence[Any], before: Sequence[Any]) -> RuntimeError:
    """The error for a recomputation with nodes of other kinds than the forward's, in the order from its output."""
    differing = (k for k, (one, other) in enumerate(zip(kinds, before)) if one is not other)
    at = next(differing, min(len(kinds), len(before)))
    made, expected = (each[at].__name__ if at < len(each) else "nothing" for each in (kinds, before))
    return recomputation_error(f"made {made}, but the forward made {expected}, {at} nodes before its output")
