"""What takes the place of a microbatch's tensor in an attribute of a block, which all microbatches share."""
from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from splitpipe.core.torch_private import DisableTorchFunction


class Stale:
    """Stands in the attribute, named ``where``, once the stage of the block has ended: whatever uses it raises.

    It passes for a tensor if it stands for one, so that code which looks for tensors doesn't overlook it.
    """

    def __init__(self, where: str, tensor: bool) -> None:
        self.__dict__.update(where=where, tensor=tensor)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return Tensor if self.__dict__["tensor"] else Stale

    def __reduce__(self) -> Any:
        return Stale, (self.__dict__["where"], self.__dict__["tensor"])

    def __repr__(self) -> str:
        return f"<{self.__dict__['where']} of one microbatch, no longer there>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Questions of copy and pickle, and isinstance(x, nn.Parameter).
            raise AttributeError(name)
        self._used()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        with DisableTorchFunction():
            for x in _leaves((args, kwargs)):
                if type(x) is Stale:
                    x._used()
        raise RuntimeError("a tensor of one microbatch was used in an attribute that all microbatches share")

    def _used(self, *args: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.__dict__['where']!r}, which was a tensor with a graph, is used by a later stage, another "
            "microbatch or after the call: it belonged to one microbatch, and all of them share the module. Use it "
            "right after the block, or return it from the block."
        )

    __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = __call__ = __float__ = __int__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __neg__ = __pow__ = __matmul__ = __rmatmul__ = __lt__ = __gt__ = _used


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for x in value for leaf in _leaves(x)] if isinstance(value, (list, tuple)) else [value]
