"""What modules, and random numbers, were before a run that is to leave no trace."""
from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.lazy import LazyModuleMixin

from splitpipe.core.tensors import dense

#: Whose entries are restored, as those of a module's own tables: of buffers, of hooks.
_TABLES = list, set, dict, OrderedDict, defaultdict, Counter, deque


@contextmanager
def restore_after(
    modules: Sequence[nn.Module], devices: Sequence[torch.device], kept: frozenset[str] = frozenset()
) -> Iterator[None]:
    """Restores gradients, attributes, buffers and random numbers at the end. Inside, no parameter has a gradient.

    Of what attributes refer to, tensors and tables are restored; what these, or other objects, refer to is not.
    ``kept``: attributes that stay if the run has set them.
    Parameters that the run writes to aren't, either: a copy of all of them may not fit.
    """
    grads = [(weight, weight.grad) for part in modules for weight in part._parameters.values() if weight is not None]
    attributes = [(vars(part), {**vars(part)}) for part in modules]
    values = [x for _, own in attributes for x in own.values()]
    found = [*values, *[x for part in modules for x in part._buffers.values()]]
    tensors = [(x, x.detach().clone()) for x in found if isinstance(x, Tensor) and not isinstance(x, Parameter)]
    plain = [part for part in modules if not isinstance(part, LazyModuleMixin)]  # Its first call takes its hooks off.
    tables = [(x, copy(x)) for part in plain for x in vars(part).values() if type(x) in _TABLES]
    states = [(x.set_state, x.get_state()) for x in values if isinstance(x, torch.Generator)] + random_states(devices)
    try:
        for weight, _ in grads:
            weight.grad = None
        yield
    finally:
        for weight, grad in grads:
            weight.grad = grad if grad is None else grad.to(weight.device)  # It may have been moved to its stage.
        for now, own in attributes:
            for name in now.keys() - own.keys() - kept:
                del now[name]
            now.update({name: value for name, value in own.items() if name != "_compiled_call_impl"})
        for table, entries in tables:
            table.clear()
            table.extend(entries) if isinstance(table, (list, deque)) else table.update(entries)
        for set_state, state in states:
            set_state(state)
        for x, content in tensors:
            if x.shape != content.shape:
                x.data = content
            elif not torch.equal(dense(x), dense(content.to(x.device))):
                with torch.inference_mode(x.is_inference()), torch.no_grad():
                    x.detach().copy_(content)


def random_states(devices: Iterable[torch.device]) -> list[tuple[Callable[[Any], object], Any]]:
    """The states of the default generators of torch, Python and NumPy, and what sets each."""
    states: list[Any] = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
    for device in {device for device in devices if device.type != "cpu"}:
        module = torch.get_device_module(device)
        states.append((partial(module.set_rng_state, device=device), module.get_rng_state(device)))
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states
