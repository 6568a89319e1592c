"""The containers among a block's arguments: if a block gets copies of them, its changes are copied back.

For example, a forward passes a list to its blocks, and each appends what it has made. A block of a later stage, or one
that is checkpointed, gets a copy, with the tensors of its stage. Lists, dicts, deques and dataclasses are changed as
the block has changed its copies; for other containers that pytree knows, a change is an error.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core.torch_private import tree_leaves


class Old:
    """An element that a container had before: its place."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


class Given:
    """A container that a block was given, and returns: its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


#: The new contents of some containers, by their numbers, where old elements are represented by their places.
Changes = dict[int, Any]
_LISTS = (list, deque)
_NONE = (Tensor, nn.Module, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


def containers(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The containers among arguments, each once, in the same order for each copy of them."""
    found: list[Any] = []
    known: set[int] = set()
    for value in (*args, *kwargs.values()):
        if not isinstance(value, _NONE):
            _look(value, found, known)
    return found


def _look(value: Any, found: list[Any], known: set[int]) -> None:
    if not isinstance(value, tuple):
        if id(value) in known or not _changes(value):
            return
        known.add(id(value))
        found.append(value)
    for each in _values(_content(value)):
        if not isinstance(each, _NONE):
            _look(each, found, known)


def _changes(value: Any) -> bool:
    """True for a value that can be changed, and that becomes another object when a nesting is flattened and remade."""
    if isinstance(value, (list, dict, deque)) or is_dataclass(value) and not isinstance(value, type):
        return True
    return not callable(value) and [id(leaf) for leaf in tree_leaves(value)] != [id(value)]


def _content(value: Any) -> Any:
    """What a container holds: a dict, or a list."""
    if isinstance(value, dict):
        return dict(value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return list(value if isinstance(value, (*_LISTS, tuple)) else tree_leaves(value))


def verify_once(found: list[Any], count: int) -> None:
    """Raises for containers that a block is given twice, and of which it would get two copies."""
    if len(found) != count:
        raise RuntimeError(
            "a block is given one container in two places, and would get two copies: expected it once. Pass it in one "
            "argument, or use checkpoint='never' and only lists and dicts."
        )


def copies(found: Iterable[Any]) -> list[Any]:
    """The current contents of the containers."""
    return [_content(each) for each in found]


def changes(found: Iterable[Any], before: Iterable[Any]) -> Changes:
    """The changes that a block has made to its containers."""
    made: Changes = {}
    for number, (container, then) in enumerate(zip(found, before)):
        now = _content(container)
        keys = then if isinstance(then, dict) else range(len(then))
        if len(now) == len(then) and [*map(id, _items(now))] == [*map(id, _items(then))]:
            continue
        old = {id(then[key]): Old(key) for key in keys}
        if isinstance(now, dict):
            made[number] = {key: old.get(id(value), value) for key, value in now.items()}
        else:
            made[number] = [old.get(id(value), value) for value in now]
    return made


def _values(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def _items(content: Any) -> Iterable[Any]:
    return chain.from_iterable(content.items()) if isinstance(content, dict) else content


def change(own: list[Any], made: Changes) -> None:
    """Changes the forward's own containers in the same way as the block has changed its copies."""
    for number, content in made.items():
        container = own[number]
        then = _content(container)
        if isinstance(content, dict):
            new = {key: then[x.key] if isinstance(x, Old) else x for key, x in content.items()}
            _fill(container, new, then)
            continue
        values = [then[x.key] if isinstance(x, Old) else x for x in content]
        if isinstance(container, _LISTS):
            container.clear()
            container.extend(values)
        else:
            raise RuntimeError(
                f"a block has changed the {type(container).__name__} that it was given, of which it has a copy because "
                "it is recomputed or in a later stage: expected changes only to lists, dicts, deques and dataclasses. "
                "Return the new one from the block."
            )


def _fill(container: Any, new: dict[Any, Any], then: dict[Any, Any]) -> None:
    """Sets the contents of a dict or a dataclass."""
    if not isinstance(container, dict):
        for name, value in new.items():
            object.__setattr__(container, name, value)
        return
    for key in [key for key in then if key not in new]:
        del container[key]
    if [*new] != [*then]:  # In the new order, if keys can be removed.
        for key in [key for key in then if key in new]:
            del container[key]
    for key, value in new.items():
        if key not in container or container[key] is not value:
            container[key] = value


def marked(value: Any, given: list[Any]) -> Any:
    """A block's return value, with marks in place of containers that it was given."""
    marks = {id(container): Given(number) for number, container in enumerate(given)}
    return _replaced(value, marks) if given else value


def returned(value: Any, own: list[Any]) -> Any:
    """A block's return value, with the forward's own containers in place of marks."""
    return _replaced(value, own) if own else value


def _replaced(value: Any, by: dict[int, Given] | list[Any]) -> Any:
    found = by[value.number] if isinstance(value, Given) and isinstance(by, list) else None
    if isinstance(by, dict):
        found = by.get(id(value))
    if found is not None:
        return found
    if type(value) in (tuple, list):
        new = [_replaced(each, by) for each in value]
        return value if all(x is y for x, y in zip(new, value)) else type(value)(new)
    if type(value) is dict:
        changed = {key: _replaced(each, by) for key, each in value.items()}
        return value if all(changed[key] is value[key] for key in value) else changed
    return value


def spent(value: Any) -> Iterator[Any]:
    """The iterators among the leaves of arguments."""
    return (leaf for leaf in value if isinstance(leaf, Iterator))
