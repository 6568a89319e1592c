"""Divides calls into microbatches: what an nn.Sequential is given, and the arguments of any other module."""
from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core.torch_private import tree_flatten
from splitpipe.microbatch.division import Division, collect, divide
from splitpipe.microbatch.rows import Node, Reading, chunk_rows, rows_of
from splitpipe.microbatch.tree import PLAIN, verify_open

#: ``split(args, kwargs, chunks)`` returns the arguments of each microbatch: a list of pairs (args, kwargs).
Split = Callable[[tuple[Any, ...], dict[str, Any], int], list[tuple[tuple[Any, ...], dict[str, Any]]]]
#: Classes of values that may be the same for every microbatch.
_KNOWN = (Tensor, *PLAIN, torch.layout, torch.memory_format, torch.Generator, enum.Enum, slice, range, type)


class Divider:
    """Divides inputs of an nn.Sequential, and targets; a schedule allows no more than ``chunks`` microbatches."""

    def __init__(
        self, batched: tuple[Any, Any], split: Split | None, chunks: int, scheduled: bool = False,
        whose: str = "the input",
    ) -> None:
        self._flags, self._target = batched
        self._split, self._chunks, self._scheduled, self._whose = split, chunks, scheduled, whose
        self._warned = set[str]()  # The values that it has warned of.

    def divide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, unsplit: bool = False
    ) -> tuple[Division, Division | None]:
        """The arguments, and the target if there is one; ``unsplit``: as a single microbatch."""
        if self._split is not None and not unsplit:
            return self._collect(args, kwargs, target)
        root, chunks = self._tree(args, kwargs), 1 if unsplit else self._chunks
        reading = Reading(root, chunks)
        unknown = [x.value for x in root.leaves(shared=True) if x.flag is None and not isinstance(x.value, _KNOWN)]
        if not all(map(callable, unknown)):
            chunks = 1  # Microbatches can't share an object that may be a cache: all would write to it.
        rows = chunk_rows(reading.size, chunks)
        if len(rows) > 1:
            reading.warn(self._warned)
        return divide(root, rows, reading.batch), None if target is None else divide_target(target, self._target, rows)

    def _collect(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> tuple[Division, Division | None]:
        """What ``split`` returns. A loss is a mean weighted by rows: with a target, by the rows of that."""
        given = {**kwargs} if target is None else {**kwargs, "target": target}
        parts: list[Any] = [*self._split(args, given, self._chunks)]  # type: ignore[misc]
        if not parts or not all([isinstance(own, tuple) and isinstance(named, Mapping) for own, named in parts]):
            raise TypeError(f"split returned {parts!r:.100}: expected a list of pairs (args, kwargs).")
        if self._scheduled and len(parts) > self._chunks:
            raise ValueError(f"split returned {len(parts)} parts for a schedule of {self._chunks}: expected no more.")
        parts = [(own, dict(named)) for own, named in parts]
        targets = [] if target is None else [named.pop("target") for _, named in parts]
        rows = [rows_of(input_node(x, self._target, "the target")) for x in targets]
        rows = rows or [rows_of(self._tree(*part)) for part in parts]
        values = [self._value(*own, **named) for own, named in parts]
        return collect(values, rows), collect(targets, rows) if targets else None

    def _tree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        return input_node(self._value(*args, **kwargs), self._flags, self._whose)

    def _value(self, input: Any) -> Any:
        """What the first layer is given."""
        return input


class ArgumentDivider(Divider):
    """Divides the arguments of a module's calls."""

    def __init__(self, forward: Callable[..., Any], batched: Any, *options: Any, **named: Any) -> None:
        super().__init__((batched, (batched or {}).get("target")), *options, **named)
        self.signature = inspect.signature(forward)

    def _tree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """The nodes of (args, kwargs). Raises a ValueError if ``batched`` names none of the arguments."""
        given, flags = name_arguments(self.signature, args, kwargs), self._flags or {}
        known = {"target", *kwargs}
        known |= {name for name, x in self.signature.parameters.items() if x.kind != x.VAR_KEYWORD}
        # Of several, such as mems[0], a call may have fewer than another.
        if unknown := sorted([name for name in flags if name.split("[")[0] not in known]):
            names = ", ".join(repr(name) for name, _ in given)
            raise ValueError(f"batched names {unknown[0]!r}, which the call doesn't have: expected some of {names}.")
        own = {name: flags.get(name, flags.get(name.split("[")[0])) for name, _ in given}
        nodes = [Node(value, own[name], f"argument {name!r}") for name, value in given]
        root, positional, named = (Node((), None, self._whose, record=True) for _ in range(3))
        root.children, positional.children, named.children = [positional, named], nodes[: len(args)], nodes[len(args) :]
        named.rebuild = lambda values: dict(zip(kwargs, values))
        return root

    def _value(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def name_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each argument with its name; of those that *mems takes: mems[0], mems[1], ..."""
    names = [name for name, x in signature.parameters.items() if x.kind <= x.POSITIONAL_OR_KEYWORD]
    star = next((name for name, x in signature.parameters.items() if x.kind == x.VAR_POSITIONAL), "args")
    names += [f"{star}[{number}]" for number in range(len(args) - len(names))]
    return [*zip(names, args), *kwargs.items()]


def divide_target(target: Any, flags: Any, rows: Sequence[int]) -> Division:
    """The division of a target into the microbatches of an input."""
    root = input_node(target, flags, "the target")
    Reading(root, len(rows), sum(rows))
    for node in root.leaves(shared=True):
        array = node.flag is not False and not isinstance(node.value, Tensor) and hasattr(node.value, "__array__")
        if array and node.value.shape[:1] == (sum(rows),):
            raise TypeError(f"{node.where} is a {type(node.value).__name__}: expected a tensor (torch.as_tensor()).")
    return divide(root, rows, "the input")


def input_node(value: Any, flags: Any, whose: str) -> Node:
    """The node of a value: if it is a tuple, of several inputs, which isn't a list with one entry per row."""
    root = Node(value, flags, whose, record=type(value) is tuple and flags not in ("rows", "groups"))
    verify_open([leaf.value for leaf in root.leaves() if leaf.flag is not False], whose, deep=True)
    return root


def holds_objects(value: Any) -> bool:
    """True if arguments contain an object, or a function, that may contain tensors which pytree doesn't see."""
    others = [x for x in tree_flatten(value)[0] if not isinstance(x, (*_KNOWN, nn.Module, BuiltinFunctionType))]
    return any([not isinstance(x, FunctionType) or bool(x.__closure__ or x.__defaults__) for x in others])
