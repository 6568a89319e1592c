"""The arguments of a module's calls by name, as microbatches divide them."""
from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from splitpipe.core.torch_private import tree_flatten
from splitpipe.microbatch.division import SHARED, read
from splitpipe.microbatch.tree import Node


def read_arguments(
    signature: inspect.Signature, flags: Mapping[str, Any], whose: str, /, *args: Any, **kwargs: Any
) -> Node:
    """The node of (args, kwargs). Raises a ValueError if ``batched`` names none of the arguments."""
    given = name_arguments(signature, args, kwargs)
    known = {"target", *kwargs, *[name for name, x in signature.parameters.items() if x.kind != x.VAR_KEYWORD]}
    # Of several, such as mems[0], a call may have fewer than another.
    if unknown := sorted([name for name in flags if name.split("[")[0] not in known]):
        names = ", ".join(repr(name) for name, _ in given)
        raise ValueError(f"batched names {unknown[0]!r}, which the call doesn't have: expected some of {names}.")
    own = {name: flags.get(name, flags.get(name.split("[")[0])) for name, _ in given}
    nodes = [read(value, own[name], f"argument {name!r}") for name, value in given]
    positional = Node(args, None, whose, nodes[: len(args)], tuple)
    named = Node(kwargs, None, whose, nodes[len(args) :], lambda values: dict(zip(kwargs, values)))
    return Node((args, kwargs), None, whose, [positional, named], tuple)


def name_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each argument with its name; of those that *mems takes: mems[0], mems[1], ..."""
    names = [name for name, x in signature.parameters.items() if x.kind <= x.POSITIONAL_OR_KEYWORD]
    star = next((name for name, x in signature.parameters.items() if x.kind == x.VAR_POSITIONAL), "args")
    names += [f"{star}[{number}]" for number in range(len(args) - len(names))]
    return [*zip(names, args), *kwargs.items()]


def holds_objects(value: Any) -> bool:
    """True if arguments contain an object, or a function, that may contain tensors which pytree doesn't see."""
    others = [x for x in tree_flatten(value)[0] if not isinstance(x, (*SHARED, nn.Module, BuiltinFunctionType))]
    return any([not isinstance(x, FunctionType) or bool(x.__closure__ or x.__defaults__) for x in others])
