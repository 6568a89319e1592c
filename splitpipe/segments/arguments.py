"""The arguments of a call: which tensors are cut into microbatches, and whether there may be several at all.

Tensors whose first dimension has the batch's size, that of the first tensor, are cut; all others go whole into every
microbatch. ``batched=`` says otherwise by name.
"""
from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.core import microbatch
from splitpipe.core.torch_private import TreeSpec, tree_flatten, tree_leaves
from splitpipe.stage.batched import nesting_of_flags, spread

#: Values of these classes are the same for every microbatch.
CONSTANT = (
    torch.Size, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Generator, enum.Enum, slice, range, type,
)


class Arguments(NamedTuple):
    """The flat arguments of a call: (args, kwargs)."""

    leaves: list[Any]
    spec: TreeSpec
    whole: frozenset[int]
    #: The arguments, by name, that hold an object which several microbatches can't share: a cache.
    objects: list[str]


def parameters_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a forward; None if it has none."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def takes(signature: inspect.Signature | None, name: str) -> bool:
    """True if a forward takes an argument of that name."""
    if signature is None or name in signature.parameters:
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def constants(leaves: Iterable[Any], spec: TreeSpec) -> str:
    """What a call is given beside tensors."""
    return f"{spec} {[leaf for leaf in leaves if isinstance(leaf, (bool, int, float, str))]}"


def caches(signature: inspect.Signature | None, opened: Iterable[nn.Module]) -> bool:
    """True if a module can be told to keep no cache: by its own argument, or one that a module inside is handed on."""
    if signature is None or "use_cache" in signature.parameters:
        return signature is not None
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return False
    return any("use_cache" in _arguments_of(type(part).forward) for part in opened)


@lru_cache
def _arguments_of(forward: Callable[..., Any]) -> frozenset[str]:
    found = parameters_of(forward)
    return frozenset() if found is None else frozenset(found.parameters)


def read(
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batched: Mapping[str, Any] | None,
) -> Arguments:
    """Tells apart what is cut and what is whole. Raises what the checks of a batch raise."""
    given = pairs(signature, args, kwargs)
    if batched is not None and (unknown := batched.keys() - {name for name, _ in given}):
        allowed = set() if signature is None else {*signature.parameters}
        if wrong := sorted(map(str, unknown - allowed)):
            raise ValueError(
                f"batched names {', '.join(map(repr, wrong))}, which the call was not given: expected names of "
                f"arguments, of {', '.join(repr(name) for name, _ in given)}."
            )
    leaves, spec = tree_flatten((args, kwargs), microbatch.is_batch_leaf)
    said: list[bool | None] = []
    owners: list[str] = []
    for name, value in given:
        flag = None if batched is None else batched.get(name)
        flags = [flag] * len(tree_flatten(value, microbatch.is_batch_leaf)[0])
        if flag is not None and not isinstance(flag, bool):
            flags = list(spread(flag, value, f"argument {name!r}"))
        said += flags
        owners += [name] * len(flags)
    size = _size(leaves, said)
    whole = frozenset(
        k for k, (leaf, flag) in enumerate(zip(leaves, said))
        if isinstance(leaf, Tensor) and leaf.dim() and not (leaf.shape[0] == size if flag is None else flag)
    )
    objects = [
        name for name, leaf, flag in zip(owners, leaves, said)
        if flag is None and not isinstance(leaf, (Tensor, *CONSTANT)) and not callable(leaf)
    ]
    return Arguments(leaves, spec, whole, sorted(set(objects)))


def names(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The names of the arguments that a call gives."""
    return [name for name, _ in pairs(signature, args, kwargs)]


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


def _size(leaves: list[Any], said: list[bool | None]) -> int | None:
    """The batch's size: that of the first tensor, of those that are said to be cut if there are any."""
    tensors = [(leaf, flag) for leaf, flag in zip(leaves, said) if isinstance(leaf, Tensor) and leaf.dim()]
    chosen = [leaf for leaf, flag in tensors if flag] or [leaf for leaf, flag in tensors if flag is None]
    return chosen[0].shape[0] if chosen else None


def verify_batched(batched: Any) -> dict[str, Any] | None:
    """``batched=`` of a module with cuts: by the names of arguments."""
    if batched is None:
        return None
    if not isinstance(batched, Mapping) or not all(isinstance(name, str) for name in batched):
        raise TypeError(
            f"batched is {batched!r}: expected a dict of arguments' names, True for what is cut and False for what "
            "goes whole into every microbatch, as {'mask': False}; of a nested argument, a nesting of them."
        )
    return {name: nesting_of_flags(flag, f"batched[{name!r}]") for name, flag in batched.items()}


def holds_objects(value: Any) -> bool:
    """True if arguments hold an object that may have tensors in it which pytree doesn't see."""
    if isinstance(value, _KNOWN):
        return False
    if type(value) in (tuple, list):
        return any([holds_objects(each) for each in value])
    if type(value) is dict:
        return any([holds_objects(each) for each in value.values()])
    return any(not isinstance(leaf, _KNOWN) and not _is_code(leaf) for leaf in tree_leaves(value))


_KNOWN = (Tensor, *CONSTANT)


def _is_code(value: Any) -> bool:
    """True for what can be called and holds no values: a module, or a function without a closure."""
    return isinstance(value, (nn.Module, BuiltinFunctionType)) or (
        isinstance(value, FunctionType) and not value.__closure__ and not value.__defaults__
    )
