"""Divides a model into stages, by the time or the memory of its layers."""
from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from splitpipe.balance.rig import Layer, measure
from splitpipe.balance.survey import survey
from splitpipe.checks import accelerators, is_integer, number_of, resolve_device
from splitpipe.core.stream import Place
from splitpipe.partition.by_bytes import divide

Device = torch.device | int | str


def balance_by_time(
    partitions: int, module: nn.Module, sample: object, *, timeout: float = 1.0, device: Device | None = None
) -> list[Any]:
    """Chooses stages so that the slowest one takes as little time as possible.

    A copy of the module is trained, in train mode and with the split backward, as a pipeline on one device: with each
    layer of an nn.Sequential as a stage, or with a cut at each call of a repeated block (children of one module, of one
    class, such as the layers of a transformer). The model, its gradients and buffers, the sample and the random state
    stay as they are. The user's hooks don't run. Autocast applies if it is on around the call.

    Args:
        partitions: number of stages.
        module: the model. If it isn't an nn.Sequential, backward starts at the field ``loss`` of its output, or else at
            all tensors in it.
        sample: an input of an nn.Sequential, such as a tensor of shape (rows, ...). For any other module, a call's
            arguments: keywords in a dict, positional ones in a tuple, or one tensor. Ideally as large as a microbatch.
        timeout: seconds for repeating runs, not counting the copy and the first runs, which are a warm-up.
        device: where to run the copy. Default: the current accelerator, all if it is too small, or the CPU without any.

    Returns:
        For an nn.Sequential, the number of layers of each stage, for ``balance``. For any other module, the names of
        the blocks with whose calls stages 1, 2, ... start, for ``cuts``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value, or there are fewer layers or repeated blocks than stages.

    Example:
        >>> from splitpipe.balance import balance_by_time
        >>> module = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> balance = balance_by_time(2, module, torch.randn(16, 8), timeout=0.1)
        >>> len(balance), sum(balance)
        (2, 3)
    """
    if not number_of("timeout", timeout, "seconds"):
        raise ValueError(f"timeout is {timeout}: expected seconds, more than 0.")
    return _stages(partitions, module, sample, "sample", device, lambda layer: layer.time, seconds=timeout)


def balance_by_size(
    partitions: int, module: nn.Module, input: object, *, chunks: int = 1, param_scale: float = 2.0,
    device: Device | None = None,
) -> list[Any]:
    """Chooses stages so that the fullest one takes as little memory as possible.

    It runs a copy, returns and raises as ``balance_by_time`` does. A stage holds the tensors that autograd saves for
    backward (a storage counts for the first layer or block that saves it; the model's input isn't counted) and
    ``param_scale`` times the parameters. Frozen parameters and buffers count at most once, shared state for the first
    layer or block that has it.

    Args:
        partitions: as for ``balance_by_time``, and so are ``module`` and ``device``.
        input: a training batch, in the form of ``balance_by_time``'s sample.
        chunks: number of microbatches that the batch is split into. Only the first of them is run.
        param_scale: number of tensors of a parameter's size that training holds, including the parameter: 2 with its
            gradient, 3 with SGD's momentum, 4 with Adam's two averages, 5 with the third one of amsgrad.

    Example:
        >>> from splitpipe.balance import balance_by_size
        >>> module = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
        >>> balance_by_size(2, module, torch.randn(16, 8), param_scale=4.0)
        [1, 2]
    """
    scale = number_of("param_scale", param_scale, "tensors per parameter")

    def size(layer: Layer) -> float:
        return layer.saved - layer.repeated + scale * layer.parameters + min(scale, 1.0) * layer.state

    return _stages(partitions, module, input, "input", device, size, chunks=chunks)


def _stages(
    partitions: int, module: nn.Module, sample: object, whose: str, device: Device | None,
    cost: Callable[[Layer], float], *, chunks: int = 1, seconds: float = 0.0,
) -> list[Any]:
    """The number of layers of each stage, or the names of the blocks with which stages 1, 2, ... start."""
    for name, value in ("partitions", partitions), ("chunks", chunks):
        if not is_integer(value):
            raise TypeError(f"{name} is {value!r}: expected an int. Check the order of the arguments.")
        if value < 1:
            raise ValueError(f"{name} is {value}: expected 1 or more.")
    places = [Place(resolve_device(device))]
    if device is None:
        places += [place for place in accelerators() if place not in places]
    subject = survey(module, sample, whose)
    most, what = len(subject.names), "a layer" if subject.layered else "a block"
    if partitions > most:
        raise ValueError(f"partitions is {partitions}: expected 1 to {most}, as each stage needs at least {what}.")
    layers = measure(subject, places, chunks=operator.index(chunks), seconds=seconds)
    lengths = divide([cost(layer) for layer in layers], [1.0] * operator.index(partitions))
    return lengths if subject.layered else [subject.names[start] for start in accumulate(lengths[:-1])]
