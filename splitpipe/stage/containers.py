"""The lists and dicts among a block's arguments: where a block is given others in their place, its changes come back.

A forward hands a list to its blocks, say, and each appends what it has made. What a block of a later stage or one that
is checkpointed gets is a copy, with the tensors of its stage.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any


class Old:
    """An element that a container had before: where it was."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


#: The new contents of some containers, by their numbers, in place of old elements where these were.
Changes = dict[int, Any]


def containers(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The lists and dicts among arguments, in the same order for each copy of them."""
    found: list[Any] = []
    for values in (args, kwargs.values()):
        for value in values:
            if isinstance(value, (list, dict, tuple)):
                found += _inside(value)
    return found


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, (list, dict, tuple)):
            yield from _inside(each)


def copies(found: Iterable[Any]) -> list[Any]:
    """What the containers hold now."""
    return [dict(each) if isinstance(each, dict) else list(each) for each in found]


def changes(found: Iterable[Any], before: Iterable[Any]) -> Changes:
    """What a block has changed in its containers."""
    made: Changes = {}
    for number, (now, then) in enumerate(zip(found, before)):
        keys = then if isinstance(then, dict) else range(len(then))
        if len(now) == len(then) and [*map(id, _values(now))] == [*map(id, _values(then))]:
            continue
        old = {id(then[key]): Old(key) for key in keys}
        if isinstance(now, dict):
            made[number] = {key: old.get(id(value), value) for key, value in now.items()}
        else:
            made[number] = [old.get(id(value), value) for value in now]
    return made


def _values(container: Any) -> Iterable[Any]:
    return chain.from_iterable(container.items()) if isinstance(container, dict) else container


def change(own: list[Any], made: Changes) -> None:
    """Changes the forward's own containers as the block has changed what it was given."""
    for number, content in made.items():
        container = own[number]
        if isinstance(container, dict):
            new = {key: container[x.key] if isinstance(x, Old) else x for key, x in content.items()}
            container.clear()
            container.update(new)
        else:
            container[:] = [container[x.key] if isinstance(x, Old) else x for x in content]
