"""Divides a model into stages, by the time or the memory of its parts."""
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import accumulate
from numbers import Real
from time import perf_counter
from typing import Any, overload

import torch
from torch import nn

from splitpipe.balance.layers import held, layers_of, sizes, times
from splitpipe.balance.solver import solve
from splitpipe.balance.survey import Surveyed, surveyed
from splitpipe.balance.units import Units, overhead, times_of
from splitpipe.checks import finite, is_integer, is_layered, resolve_device
from splitpipe.core.stream import Place
from splitpipe.core.tensors import memory_of

Device = torch.device | int | str


@overload
def balance_by_time(  # type: ignore[overload-overlap]
    partitions: int, module: nn.Sequential, sample: object, *, timeout: float = 1.0, device: Device | None = None
) -> list[int]: ...


@overload
def balance_by_time(
    partitions: int, module: nn.Module, sample: object, *, timeout: float = 1.0, device: Device | None = None
) -> list[str]: ...


def balance_by_time(
    partitions: int, module: nn.Module, sample: object, *, timeout: float = 1.0, device: Device | None = None
) -> list[int] | list[str]:
    """Chooses stages so that the slowest one takes as little time as possible.

    Each layer of an nn.Sequential is run forward and backward, in train mode, as a copy. The copies are made one at a
    time, so no device has to hold the whole model. Any other module is trained as a whole copy, with the split
    backward, and may be cut at each call of a repeated block (children of one module, of one class, such as the layers
    of a transformer).

    The model, its gradients and buffers, the sample and the random state stay as they are. The user's hooks don't run.
    Autocast applies if it is on around the call.

    Args:
        partitions: number of stages.
        module: the model. If it isn't an nn.Sequential, backward starts at the field ``loss`` of its output, or else at
            all tensors in it.
        sample: for an nn.Sequential, an input, a tensor of shape (rows, ...) or a nesting of them. For any other module
            the arguments of a call: keyword arguments in a dict, positional ones in a tuple, or one tensor. On any
            device; ideally with as many rows as a microbatch.
        timeout: seconds for repeating runs, in all. Copying takes additional time, and so do the first runs, which are
            a warm-up. A layer's first run counts only if there is no time for a second.
        device: where to run the copies. Default: the current accelerator, or the CPU if there is none.

    Returns:
        For an nn.Sequential, the number of layers of each stage, for ``balance``. For any other module, the names of
        the blocks with whose calls stages 1, 2, ... start, for ``cuts``.

    Raises:
        TypeError: ``module`` isn't an nn.Module, or another argument has a wrong type.
        ValueError: ``partitions`` is less than 1 or more than the number of layers, or than one plus the number of
            possible cuts; no blocks of a module repeat; ``timeout`` isn't positive; ``sample`` has no rows; or there is
            no such ``device``.

    Example:
        >>> from splitpipe.balance import balance_by_time
        >>> module = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> balance = balance_by_time(2, module, torch.randn(16, 8), timeout=0.1)
        >>> len(balance), sum(balance)
        (2, 3)
        >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
        >>> encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        >>> cuts = balance_by_time(2, encoder, torch.randn(16, 3, 8), timeout=0.1)
        >>> len(cuts), cuts[0].startswith("layers.")
        (1, True)
    """
    verify_numbers(partitions, len(module) if is_layered(module) else None, timeout=timeout)
    place = Place(resolve_device(device))
    if is_layered(module):
        return solve(times(layers_of(module, sample, "sample"), timeout, place.device), operator.index(partitions))

    def costs(units: Units) -> list[float]:
        units.run()
        end = perf_counter() + timeout
        found = times_of(units.recorded(lambda done: not done or perf_counter() < end))
        return [sum(each.less(empty)) for each, empty in zip(found, overhead(place, len(found)))]

    return _cuts(partitions, surveyed(module, sample), place, costs)


@overload
def balance_by_size(  # type: ignore[overload-overlap]
    partitions: int, module: nn.Sequential, input: object, *, chunks: int = 1, param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]: ...


@overload
def balance_by_size(
    partitions: int, module: nn.Module, input: object, *, chunks: int = 1, param_scale: float = 2.0,
    device: Device | None = None,
) -> list[str]: ...


def balance_by_size(
    partitions: int, module: nn.Module, input: object, *, chunks: int = 1, param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int] | list[str]:
    """Chooses stages so that the fullest one takes as little memory as possible.

    Copies are run on one microbatch, and the model may be cut, as in ``balance_by_time``. A stage holds the tensors
    that autograd saves for backward (a storage counts for the first layer or block that saves it; the model's input
    isn't counted) and ``param_scale`` times the parameters. Frozen parameters and buffers count at most once. Shared
    state counts for the first layer that has it, or the first block that is called with it.

    Args:
        partitions: number of stages.
        module: the model.
        input: a training batch, on any device: the input of an nn.Sequential, or the arguments of a call, as the
            ``sample`` of ``balance_by_time``.
        chunks: number of microbatches that the batch is split into. Only the first of them is run.
        param_scale: number of tensors of a parameter's size that training holds, including the parameter: 2 with its
            gradient, 3 with SGD's momentum, 4 with Adam's two averages, 5 with the third one of amsgrad.
        device: where to run the copies. Default: the current accelerator, or the CPU if there is none.

    Returns:
        The number of layers of each stage, or the names of the blocks with which stages start, as ``balance_by_time``.

    Raises:
        TypeError: ``module`` isn't an nn.Module, or another argument has a wrong type.
        ValueError: ``partitions`` is less than 1 or more than the number of layers, or than one plus the number of
            possible cuts; no blocks of a module repeat; ``chunks`` is less than 1; ``param_scale`` is less than 0 or
            makes sizes infinite; ``input`` has no rows, or its tensors have different numbers of rows; or there is no
            such ``device``.

    Example:
        >>> from splitpipe.balance import balance_by_size
        >>> module = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> balance_by_size(2, module, torch.randn(16, 8), param_scale=4.0)
        [1, 2]
        >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
        >>> encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        >>> balance_by_size(2, encoder, torch.randn(16, 3, 8), param_scale=4.0)
        ['layers.2']
    """
    verify_numbers(
        partitions, len(module) if is_layered(module) else None, chunks=chunks, param_scale=param_scale
    )
    place = Place(resolve_device(device))
    if is_layered(module):
        found = sizes(layers_of(module, input, "input"), operator.index(chunks), param_scale, place.device)
        return solve(_finite(found, param_scale, "layer"), operator.index(partitions))

    def costs(units: Units) -> list[float]:
        units.run()
        saved = units.saved(units.recorded())
        counted = {*memory_of(*units.call.latest)}
        found = []
        for own, state in zip(saved, units.state()):
            found.append(sum(own[key] for key in own.keys() - counted) + held(state, param_scale))
            counted |= own.keys()
        return _finite(found, param_scale, "part")

    return _cuts(partitions, surveyed(module, input, "input"), place, costs, operator.index(chunks))


def _cuts(
    partitions: int, found: Surveyed, place: Place, costs: Callable[[Units], list[float]], chunks: int = 1
) -> list[str]:
    """The names of the blocks with which stages 1, 2, ... of a module start."""
    verify_numbers(partitions, len(found.cuts) + 1, "a block")
    lengths = solve(found.measured([place], costs, chunks), operator.index(partitions))
    return [found.cuts[start - 1] for start in accumulate(lengths[:-1])]


def _finite(sizes: list[float], param_scale: float, what: str) -> list[float]:
    if math.inf in sizes:
        raise ValueError(
            f"param_scale is {param_scale}: expected a number small enough that the bytes of {what} "
            f"{sizes.index(math.inf)} times it fit into a float. Leave it out for 2."
        )
    return sizes


def verify_numbers(
    partitions: Any, most: int | None = None, what: str = "a layer", *, timeout: Any = 1.0, chunks: Any = 1,
    param_scale: Any = 2.0,
) -> None:
    """Raises for wrong numbers, with all faults in one error. ``most``: how many stages there can be, if known."""
    whole = ("partitions", partitions, "the number of stages"), ("chunks", chunks, "the number of microbatches")
    for name, value, meaning in whole:
        if not is_integer(value):
            raise TypeError(f"{name} is {value!r}: expected an int, {meaning}. Check the order of the arguments.")
    for name, value in ("timeout", timeout), ("param_scale", param_scale):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}: expected a number. Leave it out for the default.")
    faults = []
    if most == 0:
        faults.append("module has no layers: expected at least one. Add the layers first.")
    elif most is not None and not 1 <= operator.index(partitions) <= most:
        faults.append(f"partitions is {partitions}: expected 1 to {most}, as each stage needs at least {what}.")
    if operator.index(chunks) < 1:
        faults.append(f"chunks is {chunks}: expected 1 or more. Give the same number as to SplitPipe.")
    if not 0 < finite(timeout) < math.inf:
        faults.append(f"timeout is {timeout}: expected seconds, more than 0. Leave it out for 1 second.")
    if not 0 <= finite(param_scale) < math.inf:
        faults.append(f"param_scale is {param_scale}: expected 0 or more. Leave it out for 2.")
    if faults:
        raise ValueError("\n".join(faults))
