"""The arguments of a call: which ones are split into microbatches, and whether there may be several at all.

Tensors are split if their first dimension has the batch size, which is that of the first tensor; lists with one entry
per row are split between entries; every microbatch gets all other values whole. ``batched=`` overrides this by name.
"""
from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.batch.custom_split import Split, parts_of
from splitpipe.batch.division import Division, collected, divide
from splitpipe.batch.inputs import of_target
from splitpipe.batch.reading import AmbiguousBatchError, Memory, Reader, Reading, rows_of, written
from splitpipe.batch.tree import Node
from splitpipe.core.microbatch import cuts
from splitpipe.core.torch_private import tree_leaves, tree_unflatten

#: Values of these classes are the same for every microbatch.
CONSTANT = (
    torch.Size, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Generator, enum.Enum, slice, range, type,
)


class Arguments(NamedTuple):
    """The arguments of a call, and how they can be split."""

    value: tuple[tuple[Any, ...], dict[str, Any]]
    nodes: list[Node]
    reading: Reading
    #: The arguments that contain an object which several microbatches can't share, such as a cache.
    objects: list[str]

    def divided(self, chunks: int) -> Division:
        """The arguments, divided into microbatches. Raises AmbiguousBatchError if there would be several of them."""
        if self.reading.doubt is not None and chunks > 1:
            raise self.reading.doubt
        count, names = len(self.value[0]), list(self.value[1])

        def build(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return tuple(values[:count]), dict(zip(names, values[count:]))

        rows = cuts(self.reading.size, chunks)
        hint = self._hint()
        if hint and len(rows) > 1 and all(count == 1 for _, count in rows):
            raise AmbiguousBatchError(hint)  # A value with all rows would be broadcast with a microbatch's single row.
        return replace(divide(self.value, self.nodes, self.reading.dims, rows, build), hint=hint)

    def _hint(self) -> str:
        """Advice for unmarked tensors that may have the batch as their second dimension."""
        size, dims = self.reading.size, self.reading.dims
        found = [
            leaf for node in self.nodes for leaf in _shared(node)
            if leaf.flag is None and dims[leaf.start] is None and isinstance(leaf.value, Tensor)
            and leaf.value.dim() > 2 and leaf.value.shape[0] > 1 and leaf.value.shape[1] == size
        ]
        if not found:
            return ""
        shapes = ", ".join(f"{leaf.where} of shape {list(leaf.value.shape)}" for leaf in found[:3])
        return (
            f"{shapes} isn't split, but its dimension 1 has as many elements as the batch has "
            f"rows. If that is the batch, pass SplitPipe(..., batched={written(found[0], 1)}), and if not, "
            f"batched={written(found[0], False)}."
        )


def parameters_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a forward, if it has one."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def takes(signature: inspect.Signature | None, name: str) -> bool:
    """True if a forward takes an argument of that name."""
    if signature is None or name in signature.parameters:
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def caches(signature: inspect.Signature | None, opened: Mapping[nn.Module, str]) -> bool:
    """True if a module can be told not to keep a cache: by its own argument, or by one of a module inside it.

    ``opened`` has the modules inside with their names. All those in between have to take any keywords.
    """
    if signature is None or "use_cache" in signature.parameters:
        return signature is not None
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return False
    forwards = {name: type(part).forward for part, name in opened.items() if type(part).forward not in _NO_FORWARDS}
    closed = tuple([f"{name}." for name, x in forwards.items() if name and not takes(_signature_of(x), "use_cache")])
    return any(_place_of_cache(x) is not None and not f"{name}.".startswith(closed) for name, x in forwards.items())


def uncached(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a module inside, with ``use_cache=False`` if nothing but its configuration decides otherwise.

    In training: the blocks of a backbone would add to the cache when they are recomputed, too.
    """
    forward = type(part).forward
    place = _place_of_cache(forward) if part.training and torch.is_grad_enabled() else None
    if place is None or len(args) > place - 1 or kwargs.get("use_cache") is not None:
        return kwargs
    found = _signature_of(forward)
    decides = found is not None and found.parameters["use_cache"].default is None
    return {**kwargs, "use_cache": False} if decides else kwargs


def labelled(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call is given labels: then it is an evaluation, which needs no cache."""
    return any(
        value is not None and ("label" in name or name in ("start_positions", "end_positions"))
        for name, value in pairs(signature, args, kwargs)
    )


#: What modules without a forward have: those that only hold others.
_NO_FORWARDS = {nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward}
_signature_of = lru_cache(parameters_of)


@lru_cache
def _place_of_cache(forward: Callable[..., Any]) -> int | None:
    """The place of the argument ``use_cache``, if a forward has it; that of ``self`` is 0."""
    found = _signature_of(forward)
    return list(found.parameters).index("use_cache") if found is not None and "use_cache" in found.parameters else None


def read(
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batched: Mapping[str, Any] | None,
    memory: Memory,
    whose: str = "the input",
) -> Arguments:
    """Decides which values are split and which are whole. Raises the errors of the checks of a batch."""
    nodes = _nodes(signature, args, kwargs, batched)
    reading = Reader(nodes, whose, memory, optional=True).read(strict=False)
    objects = [node.where for node in nodes if any(map(_is_object, _shared(node)))]
    return Arguments((args, kwargs), nodes, reading, objects)


def _nodes(
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batched: Mapping[str, Any] | None,
) -> list[Node]:
    given = pairs(signature, args, kwargs)
    if batched is not None and (unknown := batched.keys() - {"target", *(name for name, _ in given)}):
        allowed = set() if signature is None else {*signature.parameters}
        if wrong := sorted(map(str, unknown - allowed)):
            raise ValueError(
                f"batched names {', '.join(map(repr, wrong))}, which the call doesn't have: expected names of "
                f"arguments, of {', '.join(repr(name) for name, _ in given)}."
            )
    nodes: list[Node] = []
    for name, value in given:
        flag = None if batched is None else batched.get(name)
        nodes.append(Node(value, flag, f"argument {name!r}", nodes[-1].stop if nodes else 0))
    return nodes


def _shared(node: Node) -> Iterator[Node]:
    """The leaves that all microbatches share: those without a separate row for each."""
    if node.children is None:
        yield node
    elif not node.by_rows:
        for child in node.children:
            yield from _shared(child)


def _is_object(leaf: Node) -> bool:
    return leaf.flag is None and not isinstance(leaf.value, (Tensor, *CONSTANT)) and not callable(leaf.value)


def pairs(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Each argument with its name, in the order in which (args, kwargs) are flattened."""
    positional = [] if signature is None else [
        parameter.name for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    positional += [f"args[{number}]" for number in range(len(positional), len(args))]
    return [*zip(positional, args), *kwargs.items()]


class Divider:
    """Divides the arguments of a module's calls into microbatches, and remembers what earlier calls have shown."""

    def __init__(
        self, signature: inspect.Signature | None, batched: Mapping[str, Any] | None, split: Split | None, chunks: int,
        limit: int | None,
    ) -> None:
        self._signature = signature
        self._batched = batched
        self._splitting = split
        self._chunks = chunks
        self._limit = limit  # The most microbatches that the schedule allows.
        self._memory = Memory()
        self._separable: dict[str, bool] = {}  # In eval mode, by kind of call.

    def without_cache(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], opened: Mapping[nn.Module, str], trains: bool
    ) -> dict[str, Any]:
        """The keywords, with ``use_cache=False`` if there may be several microbatches, whose caches can't be joined."""
        given = [name for name, _ in pairs(self._signature, args, kwargs)]
        if "use_cache" in given or not (trains or labelled(self._signature, args, kwargs)):
            return kwargs
        return {**kwargs, "use_cache": False} if caches(self._signature, opened) else kwargs

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Division:
        """The arguments as one microbatch."""
        return self._read(args, kwargs).divided(1)

    def divided(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, training: bool,
        separable: Callable[[Division], bool],
    ) -> tuple[Division, Division | None]:
        """The arguments and the target (if there is one), divided.

        In eval mode, ``separable`` says for a kind of call whether the outputs of microbatches make that of the batch.
        """
        if self._splitting is not None:
            division, targets = self._split(self._splitting, args, kwargs, target)
            if training or target is not None:
                return division, targets
            part = tree_unflatten(division.scattered()[0][0], division.spec)
            seen = replace(division, some=lambda start, rows: part)  # It shows the kinds of values in the output.
            return (division if self._separates(seen, separable) else self.whole(args, kwargs)), None
        found = self._read(args, kwargs)
        chunks = 1 if found.objects else self._chunks
        if chunks > 1 and not training and target is None:
            doubtful = found.reading.doubt is not None or found.reading.size < 2
            chunks = 1 if doubtful or not self._separates(found.divided(1), separable) else chunks
        division = found.divided(chunks)
        flags = None if self._batched is None else self._batched.get("target")
        return division, None if target is None else of_target(target, flags, division, self._memory)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return read(self._signature, args, kwargs, self._batched, self._memory)

    def _separates(self, division: Division, separable: Callable[[Division], bool]) -> bool:
        kind = division.kind()
        if kind not in self._separable:
            self._separable[kind] = separable(division)
        return self._separable[kind]

    def joins(self, division: Division, found: bool) -> None:
        """Records, for a kind of call in eval mode, whether microbatches' outputs make that of the batch."""
        self._separable[division.kind()] = found

    def _split(
        self, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Division, Division | None]:
        named = kwargs if target is None else {**kwargs, "target": target}
        parts = parts_of(split, args, named, self._chunks, self._limit)
        targets = []
        if target is not None:
            if any("target" not in kwargs for _, kwargs in parts):
                raise ValueError(
                    "split returned microbatches without 'target', which the call was given: expected it in the "
                    "kwargs of each, split like their inputs."
                )
            targets = [kwargs.pop("target") for _, kwargs in parts]
        rows = [rows_of(_nodes(self._signature, *part, self._batched)) for part in parts]
        return collected(parts, rows), collected(targets, rows) if targets else None

    def sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A few rows of a call's arguments, as in a microbatch."""
        if self._splitting is not None:
            return parts_of(self._splitting, args, kwargs, self._chunks)[0]
        some = self.whole(args, kwargs).some
        assert some is not None
        found: tuple[tuple[Any, ...], dict[str, Any]] = some(0, 1)
        return found


def holds_objects(value: Any) -> bool:
    """True if arguments contain an object that may contain tensors which pytree doesn't see."""
    if isinstance(value, _KNOWN):
        return False
    if type(value) in (tuple, list):
        return any([holds_objects(each) for each in value])
    if type(value) is dict:
        return any([holds_objects(each) for each in value.values()])
    return any(not isinstance(leaf, _KNOWN) and not _is_code(leaf) for leaf in tree_leaves(value))


_KNOWN = (Tensor, *CONSTANT)


def _is_code(value: Any) -> bool:
    """True for callables that hold no values: a module, or a function without a closure."""
    return isinstance(value, (nn.Module, BuiltinFunctionType)) or (
        isinstance(value, FunctionType) and not value.__closure__ and not value.__defaults__
    )
