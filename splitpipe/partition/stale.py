"""What takes the place of a microbatch's tensor in an attribute of a module, which all microbatches share."""
from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from splitpipe.core.torch_private import DisableTorchFunction


class Stale(Tensor):
    """The value of an attribute, ``where``, from the end of its stage on: whatever uses it raises an error.

    It is a tensor, because code may ask for one: ``isinstance(block.attn, Tensor)``.
    """

    place: str

    def __new__(cls, where: str) -> Stale:
        with DisableTorchFunction():
            made = torch.empty(0, device="cpu").as_subclass(cls)
        made.place = where
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.place} of one microbatch, no longer there>"

    def __deepcopy__(self, memo: object) -> Stale:
        return type(self)(self.place)

    def __reduce_ex__(self, protocol: object) -> tuple[type[Stale], tuple[str]]:
        return type(self), (self.place,)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Questions of Python and torch: whether it is a Parameter.
            raise AttributeError(name)
        _used(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _used((args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        _used((args, kwargs))


def _used(given: Any) -> NoReturn:
    named = next((repr(x.place) for x in _leaves(given) if isinstance(x, Stale)), "an attribute")
    raise RuntimeError(
        f"{named}, which was a tensor with a graph, is used by a later stage, another microbatch or after the call: it "
        "belonged to one microbatch, and all of them share the module. Use it right after the block that left it, keep "
        "it in a local variable, or return it from the block."
    )


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for x in value for leaf in _leaves(x)] if isinstance(value, (list, tuple)) else [value]
