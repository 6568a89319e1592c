"""A rehearsal: the module is run on one row of a sample, so that its parameters find their homes before the first call.

Nothing that draws or counts shows it: random states, buffers, modes and plain attributes of modules are put back.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.core.torch_private import _NormBase, tree_leaves, tree_map_only


def rehearse(call: Callable[[tuple[Any, ...], dict[str, Any]], Any], module: nn.Module, sample: Any) -> None:
    """Runs ``call`` on the first row of a sample."""
    args, kwargs = _arguments(sample)
    sizes = [x.shape[0] for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
    if not sizes:
        raise ValueError(
            "sample holds no tensor: expected the arguments of a call, keywords in a dict or positional ones in a "
            "tuple."
        )
    args, kwargs = tree_map_only(
        Tensor, lambda x: x[:1] if x.dim() and x.shape[0] == sizes[0] else x, (args, kwargs)
    )
    with torch.no_grad(), _unchanged(module):
        call(args, kwargs)


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, tuple):
        return sample, {}
    if isinstance(sample, Tensor):
        return (sample,), {}
    raise TypeError(
        f"sample is a {type(sample).__name__}: expected the arguments of a call, keywords in a dict or positional ones "
        "in a tuple."
    )


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    parts = list(module.modules())
    buffers = [{name: x.clone() for name, x in part._buffers.items() if x is not None} for part in parts]
    attributes = [(part, dict(vars(part))) for part in parts]
    modes = [part.training for part in parts]
    tables = ("_parameters", "_buffers", "_modules", "_compiled_call_impl", "training")
    kinds = {x.device.type for x in module.parameters()} - {"cpu"}
    try:
        with torch.random.fork_rng(device_type=kinds.pop() if kinds else "cuda"):
            for part in parts:
                if isinstance(part, _NormBase):  # Of one row it could take no statistics.
                    part.training = False
            yield
    finally:
        for part, mode in zip(parts, modes):
            part.training = mode
        for part, before in attributes:
            now = vars(part)
            for name in [name for name in now if name not in before]:
                del now[name]
            now.update({name: value for name, value in before.items() if name not in tables})
        with torch.no_grad():
            for part, kept in zip(parts, buffers):
                for name, value in kept.items():
                    x = part._buffers.get(name)
                    if x is not None and x.shape == value.shape:
                        x.copy_(value)
