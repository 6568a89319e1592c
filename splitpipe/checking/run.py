"""One run of a pipeline with a number of microbatches, or of a plain module, which changes nothing."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.batchnorm import DeferredBatchNorm
from splitpipe.core.tensors import map_tensors, version_of
from splitpipe.microbatch.gather import find_loss
from splitpipe.microbatch.tree import PLAIN, flatten, open_level
from splitpipe.partition.resident import Resident
from splitpipe.partition.restore import random_states, restore_after
from splitpipe.piped import Piped
from splitpipe.runtime.runtime import Options, Runtime

_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
_RATES = "dropout", "drop_path", "drop_prob", "drop_rate", "layerdrop"
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, DeferredBatchNorm


class CheckedCall(NamedTuple):
    """A call that is checked, and what its loss is computed with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss: Callable[[Any], Any] | None
    loss_fn: Callable[[Any, Any], Any] | None


class Run(NamedTuple):
    """What a run has computed."""

    values: dict[str, dict[str, Any]]  # By kind and name.
    counts: dict[str, float]  # By how much numbers in attributes, and the versions of parameters, have grown.
    dtypes: set[torch.dtype]  # Of what was computed.
    drew: bool  # Whether a random number was drawn.


def fresh(runtime: Runtime, chunks: int) -> Runtime:
    """Another runtime of the same model, with this number of microbatches, which knows of no earlier call."""
    options = runtime.options._replace(chunks=chunks)
    if chunks == 1 and options.checkpoint == "except_last":
        options = options._replace(checkpoint="always")  # It has the rows of all microbatches.
    kind: Any
    kind, given = runtime.__reduce__()  # As in a copy.
    made: Runtime = kind(*[options if isinstance(each, Options) else each for each in given])
    return made


def run(model: nn.Module, runtime: Runtime | None, call: CheckedCall, quiet: bool = False) -> Run:
    """A run of a pipeline with this runtime, or of a plain module without one; ``quiet``: in eval mode."""
    module = model.inner if isinstance(model, Resident) else model
    devices = [next((x.device for x in model.parameters()), torch.device("cpu"))]
    if runtime is not None:
        devices = [place.device for place in runtime.options.places]
    named = ("", module), ("loss_fn", call.loss_fn), ("loss", call.loss)
    roots = [(name, root) for name, root in named if isinstance(root, nn.Module)]
    parts = {name: part for own, root in roots for name, part in root.named_modules(prefix=own)}
    parameters = {name: x for own, root in roots for name, x in root.named_parameters(own)}
    trained = {name: x for name, x in parameters.items() if x.requires_grad}
    with restore_after([*parts.values()], devices), torch.enable_grad(), _running(model, module, runtime):
        for part in parts.values():
            _silence(part, quiet)
        generators = [x for part in parts.values() for x in vars(part).values() if isinstance(x, torch.Generator)]
        before, numbers = _positions(devices, generators), _numbers(parts, parameters)
        output, loss = _computed(model, runtime, call, devices[0])
        outputs = {name: x for name, x in _named(output).items() if x is not loss}
        ends = [x for x in (outputs.values() if loss is None else [loss]) if getattr(x, "requires_grad", False)]
        gradients: Sequence[Tensor | None] = [None] * len(trained)
        if ends and trained:
            # Each element has another weight; that of a loss is 1.
            weights = [torch.arange(x.numel(), device=x.device).cos().view_as(x).to(x.dtype) for x in ends]
            gradients = torch.autograd.grad(ends, [*trained.values()], weights, allow_unused=True)
        values = {
            "outputs": outputs, "loss": {} if loss is None else {"the loss": loss},
            "gradients": dict(zip(trained, gradients)),
            "state": {name: x for own, root in roots for name, x in root.named_buffers(own)},
        }
        kept = {kind: {name: _kept(x) for name, x in own.items()} for kind, own in values.items()}
        grown = {name: x - numbers[name] for name, x in _numbers(parts, parameters).items() if name in numbers}
        computed = [x for x in (*outputs.values(), loss, *trained.values()) if isinstance(x, Tensor)]
        dtypes = {x.dtype for x in computed if x.is_floating_point()}
        dtypes |= {torch.get_autocast_dtype(d.type) for d in devices if torch.is_autocast_enabled(d.type)}
        return Run(kept, grown, dtypes, before != _positions(devices, generators))


def _computed(
    model: nn.Module, runtime: Runtime | None, call: CheckedCall, device: torch.device
) -> tuple[Any, Tensor | None]:
    """The output and the loss, each None if it isn't known."""
    to = device if runtime is None else None

    def copy(x: Tensor) -> Tensor:  # A layer may write to its input.
        return x.detach().to(to, copy=True).requires_grad_(x.requires_grad)

    args, kwargs, target = map_tensors(copy, call[:3])
    scheduled = runtime is not None and target is not None
    output = model(*args, **kwargs, **({"target": target} if scheduled else {}))
    if runtime is not None and not runtime.draws:
        raise TypeError(
            "the forward of model was replaced after it became a pipeline, as by accelerate's prepare: expected a "
            "check before that."
        )
    if scheduled:
        return None, output
    if call.loss is not None:
        loss = call.loss(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"loss returned a {type(loss).__name__}: expected a tensor without dimensions.")
        return output, loss
    if target is not None and call.loss_fn is not None:
        found = call.loss_fn(output, target)
        return None, found[0] / found[1] if isinstance(found, tuple) else found
    with suppress(TypeError):
        return output, find_loss(output)[1]
    return output, None


@contextmanager
def _running(model: nn.Module, module: nn.Module, runtime: Runtime | None) -> Iterator[None]:
    """Has this runtime run the pipeline inside the block."""
    if runtime is None:
        yield
        return
    forwards = [vars(each).get("forward") for each in (model, module)]
    piped = [each for each in forwards if isinstance(each, Piped)]
    owner, name = (piped[0], "runtime") if piped else (model, "_runtime")
    before = getattr(owner, name)
    setattr(owner, name, runtime)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _silence(part: nn.Module, quiet: bool) -> None:
    """Turns off dropout and statistics of the batch; ``quiet``: all that depends on the mode."""
    if quiet or isinstance(part, _BATCH_NORMS):
        vars(part)["training"] = False
    for name, value in [*vars(part).items()]:
        dropout = name == "p" and isinstance(part, _DROPOUTS) or any([each in name for each in _RATES])
        if dropout and isinstance(value, float):
            vars(part)[name] = 0.0


def _numbers(parts: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """The numbers in attributes, and the versions of parameters."""
    own = [(prefix, name, x) for prefix, part in parts.items() for name, x in vars(part).items()]
    numbers: dict[str, float] = {f"{prefix}.{name}".strip("."): x for prefix, name, x in own if type(x) in (int, float)}
    return numbers | {name: version_of(x) or 0 for name, x in parameters.items()}


def _positions(devices: Sequence[torch.device], generators: Sequence[torch.Generator]) -> list[str]:
    """Where the default generators are, and others."""
    states = [*[state for _, state in random_states(devices)], *[x.get_state() for x in generators]]
    return [str(state.tolist() if isinstance(state, Tensor) else state) for state in states]


def _named(output: Any) -> dict[str, Any]:
    """The leaves of an output that can be compared, by name."""
    level, found = open_level(output, fields=True), dict[str, Any]()
    for name, part in [("the output", output)] if level is None else zip(level.keys, level.parts):
        leaves, _ = flatten(part, fields=True)
        found.update({f"{name}[{k}]" if len(leaves) > 1 else str(name): x for k, x in enumerate(leaves)})
    return {name: x for name, x in found.items() if isinstance(x, (Tensor, *PLAIN))}


def _kept(x: Any) -> Any:
    return x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x
