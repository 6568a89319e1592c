"""Divides calls into microbatches: what an nn.Sequential is given, and the arguments of any other module."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from splitpipe.microbatch.arguments import argument_tree, is_object, name_arguments
from splitpipe.microbatch.division import Division, collect, divide
from splitpipe.microbatch.rows import Node, Reading, Rows, cuts, rows_of
from splitpipe.microbatch.tree import verify_open

#: ``split(args, kwargs, chunks)`` returns the arguments of each microbatch: a list of pairs (args, kwargs).
Split = Callable[[tuple[Any, ...], dict[str, Any], int], list[tuple[tuple[Any, ...], dict[str, Any]]]]


def verify_split(split: object) -> None:
    """Raises a TypeError unless ``split`` is a function or None."""
    if split is not None and not callable(split):
        raise TypeError(f"split is {split!r}: expected a function split(args, kwargs, chunks) or None.")


def call_split(
    split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int, limit: int | None = None
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each microbatch; a schedule allows at most ``limit`` of them."""
    found: Any = split(args, dict(kwargs), chunks)
    pairs = isinstance(found, (list, tuple)) and [isinstance(part, tuple) and len(part) == 2 for part in found]
    if not pairs or not all(pairs) or not all(isinstance(x, tuple) and isinstance(y, Mapping) for x, y in found):
        raise TypeError(f"split returned {found!r:.100}: expected a list of pairs (args, kwargs), a tuple and a dict.")
    if limit is not None and len(found) > limit:
        raise ValueError(f"split returned {len(found)} microbatches, and the schedule has {limit}: expected no more.")
    return [(own, dict(named)) for own, named in found]


class Divider:
    """Divides inputs of an nn.Sequential, and targets; a schedule allows no more than ``chunks`` microbatches."""

    def __init__(
        self, batched: Any, split: Split | None, chunks: int, scheduled: bool = False, whose: str = "the input"
    ) -> None:
        flags: tuple[Any, Any] = batched or (None, None)
        self._flags, self._target = flags
        self._split, self._chunks, self._limit, self._whose = split, chunks, chunks if scheduled else None, whose
        self._told = set[str]()  # The values that it has warned of.

    def divide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, whole: bool = False
    ) -> tuple[Division, Division | None]:
        """The arguments, and the target if there is one; ``whole``: as a single microbatch."""
        if self._split is not None and not whole:
            return self._collect(self._split, args, kwargs, target)
        root = self._tree(args, kwargs)
        reading = Reading(root, self._whose)
        # Microbatches can't share an object that may be a cache.
        whole = whole or any(leaf.flag is None and is_object(leaf.value) for leaf in root.leaves(shared=True))
        rows = reading.verify(cuts(reading.size, 1 if whole else self._chunks), self._told)
        return divide(root, rows, reading.batch), None if target is None else divide_target(target, self._target, rows)

    def sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A few rows of a call's arguments, as in a microbatch."""
        if self._split is not None:
            return call_split(self._split, args, kwargs, self._chunks)[0]
        return self.divide(args, kwargs, whole=True)[0].some(1)

    def _collect(
        self, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Division, Division | None]:
        """A loss is a mean weighted by rows: with a target, by the rows of that."""
        named = kwargs if target is None else {**kwargs, "target": target}
        parts = call_split(split, args, named, self._chunks, self._limit)
        if any((target is None) is ("target" in named) for _, named in parts):
            raise ValueError("split returned another 'target' than it was given: expected one in the kwargs of each.")
        targets = [] if target is None else [named.pop("target") for _, named in parts]
        rows = [rows_of(input_node(x, self._target, "the target")) for x in targets]
        rows = rows or [rows_of(self._tree(*part)) for part in parts]
        return collect([self._value(*part) for part in parts], rows), collect(targets, rows) if targets else None

    def _tree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        return _verified(input_node(self._value(args, kwargs), self._flags, self._whose), self._whose)

    def _value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the first layer is given."""
        if len(args) != 1 or kwargs:
            raise ValueError(f"found {len(args)} positional arguments and {sorted(kwargs)}: expected the input alone.")
        return args[0]


class ArgumentDivider(Divider):
    """Divides the arguments of a module's calls."""

    def __init__(
        self, signature: inspect.Signature | None, batched: Mapping[str, Any] | None, *options: Any, **named: Any
    ) -> None:
        super().__init__((batched, (batched or {}).get("target")), *options, **named)
        self._signature = signature

    def divide_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, training: bool
    ) -> tuple[Division, Division | None]:
        """The arguments, and the target; caches can't be split or joined: with one, there is a single microbatch.

        Where none is needed, in training with grad or with labels, ``use_cache=False`` is passed.
        """
        given = dict(name_arguments(self._signature, args, kwargs))
        cache, takes = given.get("use_cache"), self._signature is not None and "use_cache" in self._signature.parameters
        # With labels it is an evaluation.
        labels = [name for name in given if "label" in name or name in ("start_positions", "end_positions")]
        needless = training and torch.is_grad_enabled() or any([given[name] is not None for name in labels])
        if needless and takes and "use_cache" not in given:
            kwargs = {**kwargs, "use_cache": False}
        cache = cache or takes and cache is None and not needless
        return self.divide(args, kwargs, target, whole=not training and target is None and bool(cache))

    def _tree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        return argument_tree(self._signature, args, kwargs, self._flags)

    def _value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs


def divide_target(target: Any, flags: Any, rows: Rows) -> Division:
    """The division of a target into the microbatches of an input."""
    root = _verified(input_node(target, flags, "the target"), "the target")
    return divide(root, Reading(root, "the target", sum(rows[-1])).verify(rows, set()))


def input_node(value: Any, flags: Any, whose: str) -> Node:
    """The node of a value: if it is a tuple, of several inputs, which isn't a list with one entry per row."""
    return Node(value, flags, whose, record=type(value) is tuple and flags not in ("rows", "groups"))


def _verified(root: Node, whose: str) -> Node:
    verify_open([leaf.value for leaf in root.leaves() if leaf.flag is not False], whose, deep=True)
    return root
