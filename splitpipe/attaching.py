"""Functions on a module that runs as a pipeline: ``attach``, ``detach``, ``record`` and ``deferral_report``."""
from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn
from typing_extensions import Unpack

from splitpipe import checks
from splitpipe.backward.report import DeferralReport
from splitpipe.balance.balances import chosen_cuts
from splitpipe.batchnorm import undefer
from splitpipe.partition.call_hook import expose
from splitpipe.partition.device_map import put_back
from splitpipe.partition.placement import move
from splitpipe.partition.resident import Resident
from splitpipe.piped import Arguments, Piped, complete, piped, runtime_of, with_arguments
from splitpipe.schedule.recording import Recording

M = TypeVar("M", bound=nn.Module)


@with_arguments
def attach(module: M, cuts: Iterable[str] | None = None, **options: Unpack[Arguments]) -> M:
    """Makes a module run as a pipeline, in place. It stays the same object, with its class, methods and attributes.

    Only ``forward`` is replaced, on the instance, by one with the same signature. Code that knows the module keeps
    working: ``isinstance``, ``generate``, transformers' Trainer, PEFT. ``SplitPipe(module, cuts=...)`` does the same,
    and returns a wrapper around it. Attaching again replaces the pipeline.

    Args:
        module: any module. Its parameters are moved to their stages' devices in the first call, or now if ``sample`` is
            given.
        cuts: qualified names of submodules, in the order of their calls: stage j+1 starts where ``cuts[j]`` is called.
            Default: where the device changes in the ``hf_device_map`` that the model was loaded with; or at repeated
            blocks, such as the layers of a transformer, so that stages fill the same share of their devices' free
            memory with weights, gradients and Adam states, or, with ``sample``, take the same time.
        options: all other arguments of SplitPipe. ``devices`` are, if left out, those of the model's ``hf_device_map``,
            if it has one. A schedule runs backward from ``loss_fn`` if the module is called with ``target=``, or else
            from the field ``loss`` of its output.

    Returns:
        The module.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value; a parameter is on meta or offloaded by accelerate; or, without
            ``cuts``, no blocks repeat or the devices can't hold the model.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(4, nhead=2, batch_first=True)
        >>> net = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> attach(net, cuts=["layers.1"], devices=["cpu", "cpu"], chunks=2) is net
        True
        >>> net(torch.randn(4, 3, 4)).shape
        torch.Size([4, 3, 4])
    """
    names, given = chosen_cuts(module, cuts, complete("attach", options))
    forward = piped(module, names, given)
    vars(module).update(extra_repr=forward.extra_repr, _apply=forward.apply)
    return module


def detach(module: nn.Module, device: torch.device | str | int | None = None) -> nn.Module:
    """Returns the plain module, to export, trace, compile or save it, or to run it on one device.

    It keeps its parameters (the same objects, so optimizers stay valid), hooks, mode and running statistics. It can
    become a pipeline again.

    Args:
        module: a SplitPipe, or a module that ``attach`` was called with. A SplitPipe can't be called afterwards; to
            keep using it, detach a copy (``copy.deepcopy(model)``).
        device: where to move all parameters and buffers. Default: they stay on the devices of their stages.

    Returns:
        For a SplitPipe, the module that it wraps. For an attached module, the module itself, with its own ``forward``.

    Raises:
        TypeError: the module is not a pipeline, or ``device`` is not a device.
        ValueError: ``device`` doesn't exist on this machine.

    Example:
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> model = SplitPipe(layers, balance=[1, 1], devices=["cpu", "cpu"])
        >>> model(torch.randn(2, 4)).sum().backward()
        >>> detach(model, device="cpu") is layers
        True
    """
    runtime_of(module, "module")  # Raises unless it is a pipeline.
    if vars(module).get("forward") is _detached:
        raise TypeError("module is a SplitPipe that was detached: expected the module that splitpipe.detach returned.")
    found = module.inner if isinstance(module, Resident) else module
    if device is not None:
        move(found, checks.resolve_device(device))  # First: if it fails, detach can be called again.
    if isinstance(module, Resident):
        vars(module)["forward"] = _detached
    forward = vars(found).get("forward")
    vars(found).pop("hf_device_map", None)
    if isinstance(forward, Piped):
        own = {"forward": forward.runtime.own, "hf_device_map": forward.map_before, "extra_repr": None, "_apply": None}
        for name, before in own.items():
            vars(found).pop(name, None)
            if before is not None:
                vars(found)[name] = before
        if device is None:
            put_back(forward.hooks)
    expose(found)
    undefer(found)
    return found


def _detached(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "this SplitPipe was detached: expected calls of the module that splitpipe.detach returned, or a new SplitPipe."
    )


def record(model: nn.Module) -> AbstractContextManager[Recording]:
    """Records the training steps of a ``with`` block, as a timeline that can be read after it.

    Steps are completed calls that computed a loss and its gradients. Stages on the CPU are timed by the host's clock,
    others by their streams, for which the host waits at the end of the block.

    Args:
        model: a SplitPipe, or a module that ``attach`` was called with, with a schedule.

    Returns:
        A context manager that yields a ``schedule.Recording``: ``print`` shows the bottleneck.

    Raises:
        TypeError: ``model`` is not a pipeline.
        RuntimeError: on entry, if the model has no schedule, or is being recorded already.

    Example:
        >>> layers = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        >>> model = SplitPipe(torch.nn.Sequential(*layers), balance=[1, 1], devices=["cpu", "cpu"], chunks=2,
        ...                   schedule="1f1b", loss_fn=torch.nn.MSELoss())
        >>> with record(model) as timeline:
        ...     model(torch.randn(4, 4), target=torch.randn(4, 4)).backward()
        >>> timeline.steps, len(timeline.utilisation)
        (1, 2)
    """
    return runtime_of(model).recordings.open()


def deferral_report(model: nn.Module) -> DeferralReport:
    """Lists which parameters have their gradients deferred, and why others don't, according to the steps so far.

    Args:
        model: a SplitPipe, or a module that ``attach`` was called with.

    Returns:
        A row for each parameter: its name, stage and number of elements, whether it is deferred, and by which function,
        or why not. ``print`` shows them as a table.

    Raises:
        TypeError: ``model`` is not a pipeline.

    Example:
        >>> layers = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)
        >>> model = SplitPipe(torch.nn.Sequential(*layers), balance=[1, 1], devices=["cpu", "cpu"])
        >>> output = model(torch.randn(2, 4))
        >>> {row.why for row in deferral_report(model).rows} == {"linear", "NativeLayerNormBackward0 has no rule"}
        True
    """
    return runtime_of(model).report(model)
