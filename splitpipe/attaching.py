"""``attach`` makes a module run as a pipeline, in place; ``detach`` undoes it."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from splitpipe import checks
from splitpipe.balance.defaults import chosen_cuts
from splitpipe.batch.custom_split import Split
from splitpipe.batchnorm import log_undeferred, undefer
from splitpipe.checks import Checkpoint
from splitpipe.core.stream import Device
from splitpipe.loss.reducing import Reduce
from splitpipe.partition import dispatched
from splitpipe.partition.call_hook import expose, surround
from splitpipe.partition.moving import moved
from splitpipe.partition.resident import Shell, plain
from splitpipe.piped import Given, Piped, Sample, piped
from splitpipe.schedule.op import Schedule

M = TypeVar("M", bound=nn.Module)


def attach(
    module: M,
    cuts: Iterable[str] | None = None,
    *,
    devices: Iterable[Device] | None = None,
    chunks: int | None = None,
    checkpoint: Checkpoint | None = None,
    deferred_batch_norm: bool = False,
    backward: Literal["split", "autograd"] = "split",
    schedule: str | Schedule = "gpipe",
    loss_fn: Callable[..., Any] | None = None,
    grad_scaler: object | None = None,
    stash_limit: int | None = None,
    batched: Mapping[str, Any] | None = None,
    split: Split | None = None,
    reduction: Literal["mean", "sum"] | Reduce | None = None,
    sample: Sample | None = None,
    compile: bool | Mapping[str, Any] = False,
) -> M:
    """Makes a module run as a pipeline, in place. It stays the same object, with its class, methods and attributes.

    Only ``forward`` is replaced, on the instance, by one with the same signature. Code that knows the module keeps
    working: ``isinstance``, ``generate``, ``save_pretrained``, transformers' Trainer, PEFT.
    ``SplitPipe(module, cuts=...)`` does the same in a separate wrapper, which also has ``record()`` and
    ``deferral_report()``. Attaching again replaces the pipeline.

    Args:
        module: any module. Its parameters are moved to their stages' devices in the first call, or now if ``sample`` is
            given.
        cuts: qualified names of submodules, in the order of their calls: stage j+1 starts where ``cuts[j]`` is called.
            Default: where the device changes in the ``hf_device_map`` that the model was loaded with. Without such a
            map, at calls of repeated blocks, such as the layers of a transformer, chosen so that each stage's weights,
            gradients and Adam states fill the same share of its device's free memory, or, with ``sample``, so that the
            stages take the same time.
        devices: one per stage. Default: those of the model's ``hf_device_map``; without one, all accelerators; without
            any, the CPU for every stage (two stages, without ``cuts``). This and all arguments below are as for
            SplitPipe.
        chunks: number of microbatches. Default: four per device.
        checkpoint: which microbatches have their blocks recomputed in backward.
        deferred_batch_norm: whether BatchNorm layers keep the running statistics of the whole batch.
        backward: ``"split"`` or ``"autograd"``.
        schedule: a name, or a Schedule. All but ``"gpipe"`` run backward inside the forward, from ``loss_fn`` or,
            without it, from the field ``loss`` of the module's output.
        loss_fn: ``loss_fn(output, target)``, called if the model is called with ``target=``.
        grad_scaler: the training loop's ``torch.amp.GradScaler``, for a schedule under float16 autocast.
        stash_limit: the number of bytes that a stage may keep for deferred weight gradients.
        batched: how arguments and ``target`` are split, by name: True, False, a dimension, ``"rows"`` (a list with one
            entry per row), or a nesting of these. Default: tensors whose first dimension has the batch size, which is
            that of the first tensor, and lists of that length.
        split: ``split(args, kwargs, chunks)`` returns (args, kwargs) for each microbatch, for inputs that ``batched``
            can't describe.
        reduction: how numbers returned by microbatches, such as losses, are combined: ``"mean"`` weighted by rows,
            ``"sum"``, or (drop-in only) a function of the list of values and the list of row counts. Default: as the
            trace of the computation shows.
        sample: the arguments of a call (keyword arguments in a dict, positional ones in a tuple). A forward on one row
            of them places the parameters now; otherwise, the first call does. Without ``cuts``, stages are timed on the
            sample too.
        compile: whether blocks are compiled, as for SplitPipe.

    Returns:
        The module.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value; a parameter is on meta or offloaded by accelerate; or, without
            ``cuts``, no blocks repeat or the devices can't hold the model.

    Example:
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         return {"y": self.last(self.first(x).relu())}
        >>> net = attach(Net(), cuts=["last"], devices=["cpu", "cpu"], chunks=2)
        >>> net(torch.randn(4, 4))["y"].shape
        torch.Size([4, 2])
    """
    names, devices = chosen_cuts(module, cuts, devices, schedule, sample)
    given = Given(
        devices=devices, chunks=chunks, checkpoint=checkpoint, deferred_batch_norm=deferred_batch_norm,
        backward=backward, schedule=schedule, loss_fn=loss_fn, grad_scaler=grad_scaler, stash_limit=stash_limit,
        split=split, reduction=reduction, compile=compile,
    )
    made = piped(module, names, given, batched=batched, sample=sample)
    if not deferred_batch_norm:
        log_undeferred(module, made.runtime.options.chunks)
    made.write_map()
    surround(module).watch = made.watched
    return module


class Detached:
    """The forward of a SplitPipe that was detached."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error."""
        raise RuntimeError(
            "this SplitPipe was detached: expected calls of the module that splitpipe.detach returned, or of a new "
            "SplitPipe around it. To keep using a model, detach a copy of it (copy.deepcopy)."
        )


def detach(module: nn.Module, device: torch.device | str | int | None = None) -> nn.Module:
    """Returns the plain module, to export, trace, compile or save it, or to run it on one device.

    It keeps its parameters (the same objects, so optimizers stay valid), hooks, mode and running statistics. Deferred
    BatchNorm layers get their original class back, and layers are no longer compiled by the pipeline. The module can
    become a pipeline again.

    Args:
        module: a SplitPipe, or a module that ``attach`` was called with. A SplitPipe can't be called afterwards; to
            keep using it, detach a copy (``copy.deepcopy(model)``).
        device: where to move all parameters and buffers. Default: they stay on the devices of their stages, and the
            module can be run if that is a single device.

    Returns:
        For a SplitPipe, the module that it wraps. For an attached module, the module itself, with its original
        ``forward`` and without ``hf_device_map``.

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
    place = None if device is None else checks.resolve_device(device)
    if isinstance(module, Shell) and not isinstance(vars(module).get("forward"), Detached):
        found = plain(module)
    elif isinstance(module, nn.Module) and isinstance(vars(module).get("forward"), Piped):
        found = module
    else:
        raise TypeError(_no_pipeline(module))
    if place is not None:
        _bring(found, place)  # First, so that a failure changes nothing.
    if isinstance(module, Shell):
        vars(module)["forward"] = Detached()
    forward = vars(found).get("forward")
    if isinstance(forward, Piped):
        del vars(found)["forward"]
        if forward.runtime.own is not None:
            vars(found)["forward"] = forward.runtime.own
        if forward.attached:
            vars(found).pop("hf_device_map", None)
            if forward.map_before is not None:
                vars(found)["hf_device_map"] = forward.map_before
        if device is None:
            dispatched.put_back(forward.hooks)
    expose(found)
    undefer(found)
    return found


def _bring(module: nn.Module, device: torch.device) -> None:
    """Moves everything in a module, keeping tensors' identities and ties. Pipelines inside it stay where they are."""
    parts, before = [*_parts(module)], dict[int, torch.device]()

    def bring(x: Tensor) -> Tensor:
        before.setdefault(id(x), x.device)
        return moved(x, device)

    try:
        for part in parts:
            part._apply(bring, recurse=False)
    except BaseException:
        for part in parts:
            part._apply(lambda x: moved(x, before.get(id(x), x.device)), recurse=False)
        raise


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not _is_pipeline(child):
            yield from _parts(child)


def _is_pipeline(module: nn.Module) -> bool:
    return isinstance(module, Shell) or isinstance(vars(module).get("forward"), Piped)


def _no_pipeline(module: object) -> str:
    if isinstance(module, Shell):
        return "module is a SplitPipe that was detached: expected calls of the module that splitpipe.detach returned."
    inside = [
        name for name, part in module.named_modules() if _is_pipeline(part)
    ] if isinstance(module, nn.Module) else []
    found = f"; {inside[0]!r} inside it is one: detach that" if inside else ""
    return f"module is a {type(module).__name__}, not a pipeline: expected a SplitPipe, or an attached module{found}."
