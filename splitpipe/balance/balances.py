"""A balance for a model, chosen by the time or the memory of its layers."""
from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

import torch
from torch import nn

from splitpipe.balance.layers import first_rows, rows_of, sizes, times
from splitpipe.balance.solver import solve
from splitpipe.checks import finite, is_integer, resolve_device, verify_module
from splitpipe.core.microbatch import cuts

Device = torch.device | int | str


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: object,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Chooses the balance whose slowest stage is as fast as possible.

    Runs each layer forward and backward, in train mode, and divides the layers so that the largest sum of times is as
    small as possible. The layers run as copies, made one at a time: the model, its gradients and buffers, the sample
    and the random state stay as they are, and no device has to hold the whole model. The user's hooks don't run.
    Autocast applies if it is on around the call.

    Args:
        partitions: number of stages.
        module: the model.
        sample: an input, a tensor of shape (rows, ...) or a nesting of them, on any device; ideally with as many rows
            as a microbatch.
        timeout: seconds for repeating runs, for all layers together. The copies take additional time, and so does a
            first run of each layer, which is a warm-up and counts only if there is no time for a second.
        device: where to run the layers. Default: the current accelerator, or the CPU if there is none.

    Returns:
        The number of layers of each stage.

    Raises:
        TypeError: ``module`` isn't an nn.Sequential, or another argument has a wrong type.
        ValueError: ``partitions`` is less than 1 or more than the number of layers, ``timeout`` isn't positive, or
            there is no such ``device``.

    Example:
        >>> from splitpipe.balance import balance_by_time
        >>> module = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> balance = balance_by_time(2, module, torch.randn(16, 8), timeout=0.1)
        >>> len(balance), sum(balance)
        (2, 3)
    """
    verify_module(module)
    verify_numbers(partitions, len(module), timeout=timeout)
    rows_of(sample, "sample")
    return solve(times(module, sample, timeout, resolve_device(device)), operator.index(partitions))


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: object,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Chooses the balance whose fullest stage holds as little memory as possible.

    Runs each layer forward on one microbatch, in train mode, and divides the layers so that the largest sum of the
    bytes that they hold is as small as possible. A layer holds the tensors that autograd saves for backward (a storage
    counts for the first layer that saves it; the model's input isn't counted) and ``param_scale`` times the parameters.
    Frozen parameters and buffers count at most once; state that layers share counts for the first of them. The layers
    run as copies, as in ``balance_by_time``.

    Args:
        partitions: number of stages.
        module: the model.
        input: a training batch, a tensor of shape (rows, ...) or a nesting of them, on any device.
        chunks: number of microbatches that the batch is split into. Only the first of them is run.
        param_scale: number of tensors of a parameter's size that training holds, including the parameter: 2 with its
            gradient, 3 with SGD's momentum, 4 with Adam's two averages, 5 with the third one of amsgrad.
        device: where to run the layers. Default: the current accelerator, or the CPU if there is none.

    Returns:
        The number of layers of each stage.

    Raises:
        TypeError: ``module`` isn't an nn.Sequential, or another argument has a wrong type.
        ValueError: ``partitions`` is less than 1 or more than the number of layers, ``chunks`` is less than 1,
            ``param_scale`` is less than 0 or makes sizes infinite, the tensors of ``input`` have different numbers of
            rows, or there is no such ``device``.

    Example:
        >>> from splitpipe.balance import balance_by_size
        >>> module = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> balance_by_size(2, module, torch.randn(16, 8), param_scale=4.0)
        [1, 2]
    """
    verify_module(module)
    verify_numbers(partitions, len(module), chunks=chunks, param_scale=param_scale)
    microbatch = first_rows(input, cuts(rows_of(input, "input"), operator.index(chunks))[0][1], "input")
    costs = sizes(module, microbatch, param_scale, resolve_device(device))
    if math.inf in costs:
        raise ValueError(
            f"param_scale is {param_scale}: expected a number small enough that the bytes of layer "
            f"{costs.index(math.inf)} times it fit into a float. Leave it out for 2."
        )
    return solve(costs, operator.index(partitions))


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
