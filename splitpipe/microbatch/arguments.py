"""The arguments of a module's call by name, and the caches among them, which several microbatches can't share."""
from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core.torch_private import tree_leaves
from splitpipe.microbatch.rows import Node
from splitpipe.microbatch.tree import PLAIN

#: Classes of values that may be the same for every microbatch.
_KNOWN = (Tensor, *PLAIN, torch.layout, torch.memory_format, torch.Generator, enum.Enum, slice, range, type)


def signature_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a forward, if it has one."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def name_arguments(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Each argument with its name."""
    parameters = [] if signature is None else signature.parameters.values()
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    names += [f"args[{number}]" for number in range(len(names), len(args))]
    return [*zip(names, args), *kwargs.items()]


def argument_tree(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    batched: Mapping[str, Any] | None,
) -> Node:
    """The nodes of (args, kwargs). Raises a ValueError if ``batched`` names none of the arguments."""
    given, flags = name_arguments(signature, args, kwargs), batched or {}
    known = {"target", *(name for name, _ in given), *(() if signature is None else signature.parameters)}
    if unknown := sorted(map(str, flags.keys() - known)):
        names = ", ".join(repr(name) for name, _ in given)
        raise ValueError(f"batched names {unknown[0]!r}, which the call doesn't have: expected some of {names}.")
    nodes = [Node(value, flags.get(name), f"argument {name!r}") for name, value in given]
    root, positional, named = (Node((), None, "the arguments", record=True) for _ in range(3))
    root.children, positional.children, named.children = [positional, named], nodes[: len(args)], nodes[len(args) :]
    named.rebuild = lambda values: dict(zip(kwargs, values))
    return root


def is_object(value: Any) -> bool:
    """True for a value that may be a cache, of which several microbatches would write to the same one."""
    return not isinstance(value, _KNOWN) and not callable(value)


def holds_objects(value: Any) -> bool:
    """True if arguments contain an object, or a function, that may contain tensors which pytree doesn't see."""
    others = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, (*_KNOWN, nn.Module, BuiltinFunctionType))]
    return any([not isinstance(x, FunctionType) or bool(x.__closure__ or x.__defaults__) for x in others])


def uncached(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a module inside, with ``use_cache=False`` if nothing but its configuration decides otherwise.

    In training: microbatches' caches can't be joined, and a wrapper such as PEFT's doesn't show that it takes the word.
    """
    if not part.training or not torch.is_grad_enabled() or kwargs.get("use_cache") is not None:
        return kwargs
    place = _place_of_cache(type(part).forward)
    return kwargs if place is None or len(args) >= place else {**kwargs, "use_cache": False}


@lru_cache  # For functions of classes: a bound method would be kept.
def _place_of_cache(forward: Callable[..., Any]) -> int | None:
    """The place of the argument ``use_cache``, if a forward has it, None by default; that of ``self`` is 0."""
    parameters = getattr(signature_of(forward), "parameters", {})
    decides = "use_cache" in parameters and parameters["use_cache"].default is None
    return [*parameters].index("use_cache") if decides else None
