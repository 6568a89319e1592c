"""A pipeline as a module: the wrapper, with the module's state, on the devices of stages; and calls that are errors."""
from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy
from typing_extensions import Self

from splitpipe.core.stream import Place
from splitpipe.core.torch_private import _disable_dynamo, peek_interpreter_stack

#: The tables of a module, of parameters, buffers, children and hooks, which both modules share.
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]
_REFUSED = (
    "SplitPipe was called {}, which doesn't reach its worker threads and copies: expected the plain module there, "
    "which splitpipe.detach(model) returns."
)


class Resident(nn.Module):
    """Wraps ``inner``, on which attributes are looked up and set; ``to`` changes dtypes, but not devices."""

    inner: nn.Module
    _places: Sequence[Place]

    def _wrap(self, module: nn.Module) -> None:
        own = vars(self)
        # Not by nn.Module's __setattr__, which would register the module as a child, and change the names of the state.
        own.update({name: vars(module)[name] for name in _TABLES}, inner=module)
        for name in vars(nn.Module()).keys() - _TABLES:  # These are values: they are looked up on the module.
            own.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or hasattr(type(self), name) or "inner" not in vars(self):
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)  # Its forward reads it there.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _TABLES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._wrap(self.inner)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]  # type: ignore[index]

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        self.inner[index] = module  # type: ignore[operator]

    def __bool__(self) -> bool:
        return True  # There is no length unless the module has one.

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the module, as its own ``train`` does."""
        self.inner.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the module, under its own names."""
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state of the module."""
        return self.inner.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.inner._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        apply_at_home(self.inner, self._places, fn, recurse, refuses=True)
        return self


def apply_at_home(
    module: nn.Module, places: Sequence[Place], fn: Callable[[Tensor], Tensor], recurse: bool, refuses: bool
) -> nn.Module:
    """A pipeline's ``_apply``: dtypes change, devices don't.

    ``refuses``: raises for a move to another device, rather than warn. If a parent is moved, neither happens.
    """
    direct, moves = traceback.extract_stack(limit=3)[0].name != "_apply", False  # A parent calls its children's.
    refused = (
        f"this module is a pipeline, whose stages stay on {', '.join(map(str, places))} (the first call moves them "
        "there): expected no .to(device), .cuda() or .cpu(), or splitpipe.detach(model, device)."
    )

    def at_home(x: Tensor) -> Tensor:
        nonlocal moves
        y = fn(x)
        if y.device == x.device or all([place.device == y.device for place in places]):
            return y
        if direct and refuses:
            raise TypeError(refused)
        moves = True
        return x.to(y.dtype)

    type(module)._apply(module, at_home, recurse)
    if moves and direct:
        warnings.warn(refused, stacklevel=4)
    return module


def is_pipeline(module: nn.Module) -> bool:
    """True for a SplitPipe and an attached module."""
    return isinstance(module, Resident) or hasattr(vars(module).get("forward"), "runtime")


def untraced(args: Sequence[Any], run: Callable[..., Any], *given: Any) -> Any:
    """Calls ``run``, which torch.compile doesn't trace; raises for what would export a call with these arguments."""
    if torch.compiler.is_exporting() or any([isinstance(x, Proxy) for x in args]):  # While traced code can raise.
        raise RuntimeError(_REFUSED.format("by torch.export, torch.onnx.export or torch.fx"))
    return _untraced(run, *given) if "torch._dynamo" in sys.modules else run(*given)


#: torch.compile can't trace a call because of the threads; it does trace the code around it, and its layers.
_untraced: Callable[..., Any] = _disable_dynamo(lambda run, *given: run(*given))


def verify_untransformed() -> None:
    """Raises inside a transform that a pipeline can't follow."""
    if peek_interpreter_stack() is not None:
        raise RuntimeError(_REFUSED.format("inside a torch.func transform (grad, vmap, jvp ...)"))
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise RuntimeError(_REFUSED.format("by torch.jit.trace (or torch.onnx.export with dynamo=False)"))
    if forward_ad._current_level >= 0:
        raise RuntimeError(_REFUSED.format("inside forward-mode AD (forward_ad.dual_level)"))
