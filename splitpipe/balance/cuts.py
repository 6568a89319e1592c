"""Cuts for a module, chosen by the time or the memory of what runs between them."""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter

from torch import nn

from splitpipe.balance.balances import Device, balance_by_size, balance_by_time, verify_numbers
from splitpipe.balance.copies import measuring
from splitpipe.balance.layers import held
from splitpipe.balance.solver import solve
from splitpipe.balance.survey import surveyed
from splitpipe.balance.units import FreeLoss, Units, overhead, times_of
from splitpipe.checks import is_layered, resolve_device
from splitpipe.core import microbatch
from splitpipe.core.stream import Place
from splitpipe.core.tensors import Address


def cuts_by_time(
    partitions: int,
    module: nn.Module,
    sample: object,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[str]:
    """Chooses the cuts whose slowest stage is as fast as possible, for any module.

    A copy of the module is trained with the split backward, with a cut at each call of a repeated block (children of
    one module, of one class, such as the layers of a transformer). Of these cuts, it returns those for which the
    largest sum of times is smallest. The module, its gradients and buffers, the sample and the random state stay as
    they are. The user's hooks don't run. For an nn.Sequential, the cuts are those of ``balance_by_time``.

    Args:
        partitions: number of stages.
        module: the model. Backward starts at the field ``loss`` of its output, or else at all tensors in it.
        sample: the arguments of a call, keyword arguments in a dict, positional ones in a tuple, or one tensor, on any
            device; ideally with as many rows as a microbatch.
        timeout: seconds for repeating steps, after the first two.
        device: where to run the copy. Default: the current accelerator, or the CPU if there is none.

    Returns:
        The names of the blocks with whose calls stages 1, 2, ... start.

    Raises:
        TypeError: ``module`` isn't an nn.Module, or another argument has a wrong type.
        ValueError: no blocks of ``module`` repeat, ``partitions`` is less than 1 or more than one plus the number of
            possible cuts, ``timeout`` isn't positive, or there is no such ``device``.

    Example:
        >>> from splitpipe.balance import cuts_by_time
        >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
        >>> module = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        >>> cuts = cuts_by_time(2, module, torch.randn(16, 3, 8), timeout=0.1)
        >>> len(cuts), cuts[0].startswith("layers.")
        (1, True)
    """
    if is_layered(module):
        assert isinstance(module, nn.Sequential)
        found = balance_by_time(partitions, module, sample, timeout=timeout, device=device)
        return _starts([*module._modules], found)
    verify_numbers(partitions, timeout=timeout)
    place = Place(resolve_device(device))

    def costs(units: Units) -> list[float]:
        units.run()
        end = perf_counter() + timeout
        found = times_of(units.recorded(lambda done: not done or perf_counter() < end))
        return [sum(each.less(empty)) for each, empty in zip(found, overhead(place, len(found)))]

    return _cuts(partitions, module, sample, "sample", place, costs)


def cuts_by_size(
    partitions: int,
    module: nn.Module,
    input: object,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[str]:
    """Chooses the cuts whose fullest stage holds as little memory as possible, for any module.

    One microbatch is trained, as in ``cuts_by_time``. A stage holds what autograd saves for backward, each storage
    once, and ``param_scale`` times the parameters of the modules that it is the first to call, as in
    ``balance_by_size``.

    Args:
        partitions: number of stages.
        module: the model.
        input: the arguments of a call with a training batch: keyword arguments in a dict, positional ones in a tuple,
            or one tensor; on any device.
        chunks: number of microbatches that the batch is split into. Only the first of them is run.
        param_scale: number of tensors of a parameter's size that training holds, including the parameter: 2 with its
            gradient, 3 with SGD's momentum, 4 with Adam's two averages.
        device: where to run the copy. Default: the current accelerator, or the CPU if there is none.

    Returns:
        The names of the blocks with whose calls stages 1, 2, ... start.

    Raises:
        TypeError: ``module`` isn't an nn.Module, or another argument has a wrong type.
        ValueError: no blocks of ``module`` repeat, ``partitions`` is less than 1 or more than one plus the number of
            possible cuts, ``chunks`` is less than 1, ``param_scale`` is less than 0 or makes sizes infinite, the
            tensors of ``input`` have no rows, or there is no such ``device``.

    Example:
        >>> from splitpipe.balance import cuts_by_size
        >>> layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
        >>> module = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        >>> cuts_by_size(2, module, torch.randn(16, 3, 8), param_scale=4.0)
        ['layers.2']
    """
    if is_layered(module):
        assert isinstance(module, nn.Sequential)
        found = balance_by_size(partitions, module, input, chunks=chunks, param_scale=param_scale, device=device)
        return _starts([*module._modules], found)
    verify_numbers(partitions, chunks=chunks, param_scale=param_scale)

    def costs(units: Units) -> list[float]:
        units.run()
        counted: set[Address] = set()
        found = []
        for saved, state in zip(units.saved(units.recorded()), units.state()):
            found.append(sum(saved[key] for key in saved.keys() - counted) + held(state, param_scale))
            counted |= saved.keys()
        return found

    return _cuts(partitions, module, input, "input", Place(resolve_device(device)), costs, chunks)


def _cuts(
    partitions: int, module: object, sample: object, whose: str, place: Place,
    costs: Callable[[Units], list[float]], chunks: int = 1,
) -> list[str]:
    found = surveyed(module, sample, whose)
    verify_numbers(partitions, len(found.cuts) + 1, "a block")
    with measuring(place.device):
        loss_fn, target = (None, None) if found.has_loss else (FreeLoss(), 0)
        call = found.call(microbatch.cuts(found.rows, operator.index(chunks))[0][1], place.device)
        sizes = costs(Units(found.module.train(), found.cuts, [place], loss_fn, call, target))
    if math.inf in sizes:
        raise ValueError(
            "param_scale makes sizes infinite: expected one for which they fit into a float. Leave it out for 2."
        )
    return _starts(["", *found.cuts], solve(sizes, operator.index(partitions)))


def _starts(names: Sequence[str], balance: Sequence[int]) -> list[str]:
    """The names of the parts with which stages 1, 2, ... start."""
    return [names[start] for start in accumulate(balance[:-1])]
