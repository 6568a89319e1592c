"""A value as its leaves and their nesting: the containers that torch's pytree knows, and any other mapping."""
from __future__ import annotations

import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from copy import copy
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.core.torch_private import tree_flatten, tree_unflatten

#: Classes of values that hold no others.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_LEAVES = (Tensor, *PLAIN)
#: Classes of objects whose attributes aren't part of a batch.
_CODE = (type, ModuleType, nn.Module, torch.Generator, *PLAIN)


class Level(NamedTuple):
    """The parts of a container, and a function that makes it from others; ``kind`` is equal for equal containers."""

    keys: Sequence[Any]
    parts: list[Any]
    kind: Any
    rebuild: Callable[[list[Any]], Any]


#: A level without its parts, and the nestings of these; None: a leaf.
Nesting = tuple[Callable[[list[Any]], Any], list[Any]] | None


class Node:
    """A value of a call, its flag of ``batched=``, its name in messages, and the nodes inside; None: a leaf.

    ``rebuild`` makes it from its parts; ``listed``: it may be a list with one entry per row.
    """

    def __init__(
        self, value: Any, flag: Any, where: str, children: Sequence[Node] | None = None, rebuild: Any = None,
        listed: bool = False,
    ) -> None:
        self.value, self.flag, self.where, self.listed = value, flag, where, listed
        self.children, self._rebuild = children, rebuild
        self._leaves = [leaf for child in children or () for leaf in child.leaves]  # Not itself, which is a cycle.
        self.tensors = [x.value for x in self.leaves if isinstance(x.value, Tensor) and x.value.dim()]
        # How it is split, as ``division`` decides:
        self.times = 0  #: The number of entries per row, if it is split.
        self.dim: int | None = None  #: The dimension along which a tensor is split.
        self.single = False  #: Whether one microbatch has it, as an entry of a list.

    @property
    def leaves(self) -> list[Node]:
        """The leaves inside; of a leaf, itself."""
        return [self] if self.children is None else self._leaves

    def part(self, start: int, count: int) -> tuple[list[Node], Nesting]:
        """The leaves that a microbatch with these rows gets, or gets a part of, and their nesting."""
        if self.children is None:
            return [self], None
        stop = (start + count) * self.times if self.times else None
        parts = [child.part(start, count) for child in self.children[start * self.times : stop]]
        return [leaf for leaves, _ in parts for leaf in leaves], (self._rebuild, [nesting for _, nesting in parts])


def open_level(value: Any, fields: bool = False) -> Level | None:
    """One level of a container; None for a leaf. ``fields``: a dataclass is a container of its fields."""
    kind = type(value)
    if isinstance(value, _LEAVES):
        return None
    if kind is list or kind is tuple:
        return Level(range(len(value)), [*value], (kind, len(value)), kind)
    keys: Any = [*value] if isinstance(value, Mapping) else []
    root = iter((False,))  # Asked first. In torch, a function that refers to the value would keep it, by a cycle.
    parts, spec = tree_flatten(value, lambda _: next(root, True))
    if len(parts) != 1 or parts[0] is not value:
        return Level(keys or range(len(parts)), parts, spec, lambda parts: tree_unflatten(parts, spec))
    if isinstance(value, Mapping):
        return Level(keys, [value[key] for key in keys], (kind, keys), lambda parts: kind(dict(zip(keys, parts))))
    if fields and dataclasses.is_dataclass(value) and kind is not type:
        keys = [field.name for field in dataclasses.fields(value)]
        return Level(keys, [getattr(value, key, None) for key in keys], (kind, keys), lambda x: _fill(value, keys, x))
    return None


def _fill(instance: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    copied = copy(instance)
    for name, value in zip(names, values):
        object.__setattr__(copied, name, value)  # It may be frozen.
    return copied


def described(value: Any) -> str:
    """A value in a message: a plain one as it is, of any other its class, and what it has."""
    if isinstance(value, PLAIN):
        return f"{value!r:.60}"
    has = [*value] if isinstance(value, Mapping) else len(value) if type(value) in (list, tuple) else None
    return f"a {type(value).__name__}" + ("" if has is None else f" of {has!r:.60}")


def alike(values: list[Any] | tuple[Any, ...]) -> bool:
    """True if values are of one kind: tensors with the same dtype and number of dimensions, dicts, strings, numbers."""
    entries = [x for x in values if x is not None]
    kinds = {Tensor if isinstance(x, Tensor) else float if isinstance(x, (int, float)) else type(x) for x in entries}
    tensors = {(x.dtype, x.dim()) for x in entries if isinstance(x, Tensor)}
    return len(kinds) == 1 and len(tensors) < 2 and not callable(entries[0])


def flatten(value: Any, fields: bool = False) -> tuple[list[Any], Nesting]:
    """The leaves of a value, and its nesting."""
    level = open_level(value, fields)
    if level is None:
        return [value], None
    flat = [flatten(part, fields) for part in level.parts]
    return [leaf for leaves, _ in flat for leaf in leaves], (level.rebuild, [nesting for _, nesting in flat])


def unflatten(leaves: Iterable[Any], nesting: Nesting) -> Any:
    """The value with these leaves."""
    rest = iter(leaves)
    return next(rest) if nesting is None else nesting[0]([unflatten(rest, inner) for inner in nesting[1]])


def hidden(value: object, deep: bool = True) -> Iterator[Tensor]:
    """The tensors inside a leaf that isn't one, at any depth; ``deep``: also in attributes of any object."""
    seen, objects = {id(value)}, [value]
    for each in objects:  # They become more meanwhile.
        for part in _inside(each, deep):
            if isinstance(part, Tensor):
                yield part
            elif id(part) not in seen:
                seen.add(id(part))
                objects.append(part)


def _inside(value: object, deep: bool) -> Iterable[Any]:
    if isinstance(value, (Mapping, tuple, list, deque, UserList, Set)):
        return value.values() if isinstance(value, Mapping) else value
    if not dataclasses.is_dataclass(value) and (not deep or isinstance(value, _CODE)):
        return ()
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *[getattr(value, name, None) for name in slots]]


def verify_open(leaves: Iterable[object], whose: str, deep: bool = False) -> None:
    """Raises a TypeError for a leaf that holds tensors; ``deep``: also for one with tensors in its attributes."""
    for leaf in leaves:
        if not isinstance(leaf, _LEAVES) and next(hidden(leaf, deep), None) is not None:
            advice = ", write False for it in batched= if it isn't to be split, or unpack it in split=" if deep else ""
            raise TypeError(
                f"{whose} holds tensors in a {type(leaf).__name__}, which can't be split into microbatches or moved "
                "between devices: expected tensors in any nesting of tuple, list, dict and namedtuple. Unpack it, or "
                f"register the class with torch.utils._pytree.register_pytree_node{advice}."
            )
