"""One run of a pipeline with a number of microbatches, or of a plain module, which changes nothing."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.batchnorm import DeferredBatchNorm
from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import tree_map_only
from splitpipe.microbatch.gather import find_loss
from splitpipe.microbatch.tree import flatten
from splitpipe.partition.resident import Resident
from splitpipe.partition.restore import random_states, restore_after
from splitpipe.piped import Piped
from splitpipe.runtime.runtime import Options, Runtime

_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
_RATES = "dropout", "drop_path", "drop_prob", "drop_rate", "layerdrop"
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, DeferredBatchNorm
_PLAIN = bool, int, float, str, type(None), torch.Size


class CheckedCall(NamedTuple):
    """A call that is checked, and what its loss is computed with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss: Callable[[Any], Any] | None
    loss_fn: Callable[[Any, Any], Any] | None


class Run(NamedTuple):
    """What a run has computed.

    ``values``: by kind and name; ``counts``: by how much numbers in attributes, and the versions of parameters, have
    grown; ``dtypes``: of what was computed; ``drew``: whether a generator has moved on.
    """

    values: dict[str, dict[str, Any]]
    counts: dict[str, float]
    dtypes: set[torch.dtype]
    drew: bool


def fresh(runtime: Runtime, chunks: int) -> Runtime:
    """Another runtime of the same model, with this number of microbatches, which knows of no earlier call."""
    options = runtime.options._replace(chunks=chunks)
    if chunks == 1 and options.checkpoint == "except_last":
        options = options._replace(checkpoint="always")  # It has the rows of all microbatches.
    kind: Any
    kind, given = runtime.__reduce__()  # As in a copy.
    made: Runtime = kind(*[options if isinstance(each, Options) else each for each in given])
    return made


class CheckedModel:
    """A pipeline with this number of microbatches; without a runtime, a plain module."""

    def __init__(self, model: nn.Module, runtime: Runtime | None, chunks: int) -> None:
        self._model, self._runtime = model, None if runtime is None else fresh(runtime, chunks)
        self._module = model.inner if isinstance(model, Resident) else model
        if runtime is not None:
            self._devices = [place.device for place in runtime.options.places]
        else:
            self._devices = [next((x.device for x in model.parameters()), torch.device("cpu"))]

    def run(self, call: CheckedCall, quiet: bool = False) -> Run:
        """A run; ``quiet``: in eval mode."""
        named = dict(self._module.named_modules())
        for own, part in ("loss_fn", call.loss_fn), ("loss", call.loss):
            if isinstance(part, nn.Module):
                named.update({f"{own}.{name}".strip("."): inner for name, inner in part.named_modules()})
        every = {f"{prefix}.{name}".strip("."): x for prefix, part in named.items()
                 for name, x in part._parameters.items() if x is not None}
        parameters = {name: x for name, x in every.items() if x.requires_grad}
        with restore_after([*named.values()], self._devices), torch.enable_grad(), self._replaced():
            for part in named.values():
                _silence(part, quiet)
            before, numbers = _positions(self._devices), _numbers(named, every)
            output, loss = self._computed(call)
            found = _named(output)
            tensors = [x for x in found.values() if isinstance(x, Tensor) and x is not loss]
            total = _weighted(tensors) if loss is None else loss
            gradients: Any = [None] * len(parameters)
            if isinstance(total, Tensor) and total.requires_grad and parameters:
                gradients = torch.autograd.grad(total, [*parameters.values()], allow_unused=True)
            buffers = {f"{prefix}.{name}".strip("."): x for prefix, part in named.items()
                       for name, x in part._buffers.items() if x is not None}
            values = {
                "outputs": {name: _kept(x) for name, x in found.items() if x is not loss},
                "loss": {} if loss is None else {"the loss": _kept(loss)},
                "gradients": {name: _kept(x) for name, x in zip(parameters, gradients)},
                "state": {name: _kept(x) for name, x in buffers.items()},
            }
            grown = {name: x - numbers[name] for name, x in _numbers(named, every).items() if name in numbers}
            computed = [x for x in (*tensors, loss, *parameters.values()) if x is not None]
            dtypes = {x.dtype for x in computed if x.is_floating_point()} or {torch.float32}
            dtypes |= {torch.get_autocast_dtype(d.type) for d in self._devices if torch.is_autocast_enabled(d.type)}
            drew = before != _positions(self._devices)
        return Run(values, grown, dtypes, drew)

    def _computed(self, call: CheckedCall) -> tuple[Any, Tensor | None]:
        """The output and the loss; None: it isn't known."""
        device = self._devices[0] if self._runtime is None else None

        def copy(x: Tensor) -> Tensor:  # A layer may write to its input.
            return x.detach().to(device, copy=True).requires_grad_(x.requires_grad)

        args, kwargs, target = tree_map_only(Tensor, copy, call[:3])
        scheduled = {} if target is None or self._runtime is None else {"target": target}
        output = self._model(*args, **kwargs, **scheduled)
        if self._runtime is not None and not self._runtime.draws:
            raise TypeError(
                "the forward of model was replaced after it became a pipeline, as by accelerate's prepare: expected a "
                "check before that."
            )
        if scheduled:
            return None, output
        if target is not None and call.loss_fn is not None:
            found = call.loss_fn(output, target)
            return None, found[0] / found[1] if isinstance(found, tuple) else found
        if call.loss is not None:
            loss = call.loss(output)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TypeError(f"loss returned a {type(loss).__name__}: expected a tensor without dimensions.")
            return output, loss
        try:
            return output, find_loss(output)[1]
        except TypeError:
            return output, None

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Has this runtime run the pipeline inside the block."""
        forwards = [vars(each).get("forward") for each in (self._model, self._module)]
        piped = [each for each in forwards if isinstance(each, Piped)]
        owner, name = (piped[0], "runtime") if piped else (self._model, "_runtime")
        before = getattr(owner, name, None)
        if self._runtime is not None:
            setattr(owner, name, self._runtime)
        try:
            yield
        finally:
            if self._runtime is not None:
                setattr(owner, name, before)


def _silence(part: nn.Module, quiet: bool) -> None:
    """Turns off dropout and statistics of the batch; ``quiet``: all that depends on the mode."""
    if quiet or isinstance(part, _BATCH_NORMS):
        vars(part)["training"] = False
    for name, value in [*vars(part).items()]:
        dropout = name == "p" and isinstance(part, _DROPOUTS) or any([each in name for each in _RATES])
        if dropout and isinstance(value, float):
            vars(part)[name] = 0.0


def _numbers(named: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """The numbers in attributes, and the versions of parameters."""
    numbers: dict[str, float] = {
        f"{prefix}.{name}".strip("."): value for prefix, part in named.items()
        for name, value in vars(part).items() if type(value) in (int, float)
    }
    return numbers | {name: version_of(x) or 0 for name, x in parameters.items()}


def _positions(devices: Sequence[torch.device]) -> list[str]:
    """Where all generators are."""
    states = [state for _, state in random_states(devices)]
    return [str(state.tolist() if isinstance(state, Tensor) else state) for state in states]


def _named(output: Any) -> dict[str, Any]:
    """The leaves of an output that can be compared, by name."""
    if isinstance(output, Mapping):
        parts = dict(output)
    elif dataclasses.is_dataclass(output):
        parts = vars(output)
    else:
        parts = dict(enumerate(output)) if isinstance(output, (list, tuple)) else {"the output": output}
    found = {}
    for name, part in parts.items():
        leaves, _ = flatten(part, fields=True)
        found.update({f"{name}[{k}]" if len(leaves) > 1 else str(name): x for k, x in enumerate(leaves)})
    return {name: x for name, x in found.items() if isinstance(x, (Tensor, *_PLAIN))}


def _weighted(leaves: Sequence[Tensor]) -> Tensor | None:
    """A fixed function of outputs, with another weight for each element; None: none has a graph."""
    terms = []
    for x in leaves:
        if x.requires_grad:
            y = torch.view_as_real(x) if x.is_complex() else x
            weights = torch.arange(y.numel(), device=y.device, dtype=torch.float32).cos()
            terms.append((y.flatten() * weights.to(y.dtype)).sum().to("cpu", torch.float64))
    return torch.stack(terms).sum() if terms else None


def _kept(x: Any) -> Any:
    return x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x
