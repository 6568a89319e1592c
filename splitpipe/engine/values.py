"""The values of one microbatch that cross from stage to stage, wherever the module's code keeps them.

Arguments of a block are passed at its call. Values in lists, closures and local variables are found when code between
blocks uses them, by a function mode, Follow. A value that has reached a stage is identified by the tensor that the
module's code still refers to, so that it crosses once; later stages take it from the last one that had it, including
everything written to it there.

Guarantee: on a stage, the module's code never computes with another stage's tensor. A block that accesses more than its
arguments (such as an attribute of another module) would break it. Then devices differ, and torch raises an error; or,
with a schedule, the gradient arrives at the earlier stage's input, which is an error too.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from splitpipe.core.note import uncompiled
from splitpipe.core.tensors import storage_of, version_of
from splitpipe.core.thread_state import unobserved
from splitpipe.core.torch_private import DisableTorchFunction, tree_map_only


class Transfer(Protocol):
    """How values get to later stages: in autograd's graph, or between a schedule's graphs."""

    @property
    def using(self) -> Callable[[Tensor], None] | None:
        """Called with each tensor that is used, if another stream of its device may have made it."""

    def foreign(self, x: Tensor) -> bool:
        """True for a tensor that a stage other than the current one has made, or that is on its device."""

    def maker(self, x: Tensor) -> int:
        """The stage that has made a foreign tensor."""

    def carry(self, x: Tensor, source: int) -> Tensor:
        """A value of an earlier stage, for the current one."""

    @property
    def refuses(self) -> bool:
        """True if a write is an error because not all values with that memory see it; False: autograd handles it."""

    @property
    def writing(self) -> Callable[[], None] | None:
        """Called with a write to a value that has crossed, if that matters."""

    @property
    def one_graph(self) -> bool:
        """True if all stages have one graph."""

    def differentiates(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Called with a backward in the module's own code, and its arguments, before it begins."""

    def state(self, x: Tensor) -> Tensor | None:
        """The copy of a parameter or buffer for the current stage; None for other tensors."""


class _Cell:
    """A value that has crossed: the stage that it is on now, and its tensors elsewhere."""

    __slots__ = ("dirty", "kept", "latest", "stage", "storage", "version")

    def __init__(self, x: Tensor) -> None:
        self.kept = [x]  # So that no other tensor gets its id.
        self.latest = x
        self.storage = storage_of(x)
        self.stage = -1
        self.version: int | None = None
        self.dirty = False  # True if it was written to on a stage before its current one.

    @property
    def written(self) -> bool:
        """True if it was written to since it left the stage that made it."""
        return self.dirty or self.version is not None and version_of(self.latest) != self.version


class Values:
    """The values of one microbatch, as its current stage sees them."""

    def __init__(self, transfer: Transfer, link: Callable[[Tensor, Tensor], None] | None = None) -> None:
        self._transfer = transfer
        self._using = transfer.using
        self._link = link  # Called with each tensor, and its counterpart on another stage.
        self._cells: dict[int, _Cell] = {}
        self._written: set[int] = set()  # The storages of values that were written to after crossing.
        self.stage = 0

    def here(self, x: Tensor) -> Tensor:
        """The tensor for the current stage: itself, or its counterpart here."""
        if self._using is not None:
            self._using(x)
        cell = self._cells.get(id(x))
        if cell is not None:
            if cell.stage == self.stage:
                return cell.latest
        elif not self._transfer.foreign(x):
            if self._written:
                self._verify_view(x)
            return x
        with unobserved():
            return self._come(x, cell)

    def _come(self, x: Tensor, cell: _Cell | None) -> Tensor:
        copy = self._transfer.state(x) if cell is None else None
        if copy is not None:
            return copy
        if cell is None:
            cell = _Cell(x)
            self._verify_unwritten(cell)
            cell.stage = self._transfer.maker(x)
        cell.dirty = cell.written
        y = self._transfer.carry(cell.latest, cell.stage)
        cell.latest, cell.stage, cell.version = y, self.stage, version_of(y)
        cell.kept.append(y)
        if self._link is not None:
            self._link(x, y)
        self._cells[id(x)] = self._cells[id(y)] = cell
        return y

    def _verify_unwritten(self, cell: _Cell) -> None:
        for other in self._cells.values():
            if other.storage == cell.storage != 0 and other.written:
                self._refuse()

    def _refuse(self) -> None:
        if self._transfer.refuses:
            again = "" if self._transfer.writing is None else " All stages now share one graph: repeat the step."
            raise RuntimeError(_ALIASED + again)

    def note_writes(self) -> None:
        """Called after a function or block that may have written to values."""
        if not self._cells:
            return
        with DisableTorchFunction():  # Follow would see each question.
            written = [cell for cell in self._cells.values() if cell.written]
        if written and self._transfer.writing is not None:
            self._transfer.writing()
        if written:
            with unobserved():
                self._written = {x for cell in written for x in (cell.storage, storage_of(cell.latest))} - {0}

    def _verify_view(self, x: Tensor) -> None:
        """Raises for a view from before a write to its memory, since its gradient would miss the write."""
        with unobserved():
            base = x._base
            if base is None or storage_of(x) not in self._written or not self._transfer.foreign(base):
                return
            if all(base is not one for cell in self._cells.values() for one in (cell.latest, cell.latest._base)):
                self._refuse()

    def verify(self) -> None:
        """At the end of a segment, raises for a write in place to a value that shares memory with another one."""
        cells = {id(cell): cell for cell in self._cells.values()}.values()
        written = {cell.storage: cell for cell in cells if cell.stage == self.stage and cell.written and cell.storage}
        for cell in cells if written else ():
            if written.get(cell.storage, cell) is not cell:
                self._refuse()

    def hand(self, value: Any) -> Any:
        """A nesting with its tensors for the current stage."""
        return changed(value, self.here, {})

    def simple(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same for arguments that are ``SIMPLE``."""
        here = self.here
        with DisableTorchFunction():  # Follow would see each question.
            args = tuple([here(x) if isinstance(x, Tensor) else x for x in args])
            if kwargs:
                kwargs = {name: here(x) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        return args, kwargs

    def latest(self, x: Tensor) -> Tensor:
        """The tensor as it was last."""
        cell = self._cells.get(id(x))
        return x if cell is None else cell.latest

    def asked(self, x: Tensor) -> Tensor:
        """The tensor that a question is about: itself, or what it has become by a write in place."""
        cell = self._cells.get(id(x))
        return cell.latest if cell is not None and cell.written else x

    def clear(self) -> None:
        """Forgets all values at the end of the forward."""
        self._cells.clear()
        self._link = None  # It refers to losses, with their graphs.


_ALIASED = (
    "a value from an earlier stage was written to in place, and another value from there shares its memory, for "
    "example as a view: the other value and its gradient would miss the write. Write to a copy (x.clone()), or make "
    "the view again after the write."
)

#: Functions that query facts, or attach something to the tensor itself.
_ASKING = frozenset(
    "size dim numel nelement ndimension stride is_contiguous is_floating_point is_complex element_size storage_offset "
    "data_ptr get_device is_shared register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ "
    "__hash__ is_tensor is_storage has_names __get__".split()
)
#: Functions that read values on the host.
_READING = frozenset("item tolist __bool__ __int__ __float__ __index__ __repr__ __format__ __len__ numpy".split())

Here = Callable[[Tensor], Tensor]


class Follow(TorchFunctionMode):
    """Sees functions between blocks, and replaces their tensors by those of the current stage."""

    def __init__(
        self,
        here: Here,
        latest: Here,
        asked: Here,
        differentiates: Callable[..., None] | None = None,
        one_graph: bool = False,
        wrote: Callable[[], None] | None = None,
        seen: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self._here = here
        self._latest = latest
        self._asked = asked
        self._differentiates = differentiates  # Called with a backward in the module's own code; may raise.
        self._one_graph = one_graph
        self._wrote = wrote  # Called after a function that may have written to its arguments.
        self._seen = seen  # The replaced tensors, for a recomputation.

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ASKING:
            found = func(*[changed(arg, self._asked) for arg in args], **(kwargs or {}))
            if name != "__get__" or not isinstance(found, Tensor) or not args:
                return found
        change = self._latest if name in _READING else self._found
        backward = func in BACKWARDS
        if backward and self._one_graph:  # The path from a value's copy to the value counts as well.
            change = self._asked
        new = [changed(arg, change) for arg in args]
        if backward and self._differentiates is not None:
            self._differentiates(func, new, changed(kwargs or {}, change))
        found = func(*new, **changed(kwargs, change)) if kwargs else func(*new)
        if self._wrote is not None and (name[-1:] == "_" or kwargs is not None and "out" in kwargs):
            self._wrote()
        return found

    def _found(self, x: Tensor) -> Tensor:
        y = self._here(x)
        if self._seen is not None and y is not x:
            self._seen[id(x)] = x, y
        return y


def changed(value: Any, change: Here, known: dict[int, Any] | None = None) -> Any:
    """A nesting with its tensors changed. It avoids pytree where possible, which takes as long as some functions do.

    ``known``: lists and dicts that were seen, so that one that occurs twice stays one.
    """
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        return change(value)
    if kind is tuple:
        return tuple([changed(each, change, known) for each in value])
    if kind is list or kind is dict:
        found = None if known is None else known.get(id(value))
        if found is None:
            if kind is dict:
                found = {key: changed(each, change, known) for key, each in value.items()}
            else:
                found = [changed(each, change, known) for each in value]
            if known is not None:
                known[id(value)] = found
        return found
    if kind in _PLAIN or isinstance(value, (int, float, torch.Size)):
        return value
    return tree_map_only(Tensor, change, value)


_PLAIN = frozenset([int, float, complex, bool, str, type(None), torch.dtype, torch.device])
#: Types that aren't containers, and of which only tensors contain tensors.
SIMPLE = _PLAIN | {Tensor, Parameter}


def is_simple(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if all arguments are ``SIMPLE``."""
    return SIMPLE.issuperset(map(type, args)) and SIMPLE.issuperset(map(type, kwargs.values()))


def replay(seen: dict[int, tuple[Tensor, Tensor]]) -> Follow:
    """A mode for a block that is recomputed: functions get the same tensors as the first time."""

    def again(x: Tensor) -> Tensor:
        found = seen.get(id(x))
        return x if found is None else found[1]

    return Follow(again, again, again)


#: The functions that run backward, each with two arguments: the start, and the tensors to reach (None: all).
BACKWARDS: dict[Any, tuple[str, str]] = {
    torch.autograd.grad: ("outputs", "inputs"),
    torch.autograd.backward: ("tensors", "inputs"),
    Tensor.backward: ("self", "inputs"),
}


def differentiated(
    func: Any, args: Iterable[Any], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor] | None]:
    """The outputs from which a call of one of BACKWARDS starts, and the inputs that it must reach (None: all)."""
    given = signature(func).bind(*args, **kwargs).arguments
    outputs, inputs = (given.get(name) for name in BACKWARDS[func])
    return _tensors(outputs), None if inputs is None else _tensors(inputs)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value
    return [x for x in values if isinstance(x, Tensor)]
