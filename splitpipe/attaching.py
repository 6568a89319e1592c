"""``attach``: a module runs as a pipeline in place, by cuts; what SplitPipe does with cuts; and ``detach``."""
from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from splitpipe import checks
from splitpipe.batch.arguments import takes
from splitpipe.batch.flags import verify_named
from splitpipe.batch.splitting import Split, verify_split
from splitpipe.batchnorm import DeferredBatchNorm, undefer
from splitpipe.checks import UNCHECKPOINTED_TAIL, Checkpoint, verify_options
from splitpipe.compiled.options import verify_compile
from splitpipe.core.stream import Device
from splitpipe.loss.reducing import Reduce, verify_reduction
from splitpipe.partition.blocks import verify_cuts
from splitpipe.partition.call_hook import expose
from splitpipe.partition.homes import moved, verify_filled
from splitpipe.partition.resident import Shell, plain
from splitpipe.schedule.op import Schedule
from splitpipe.segments.runtime import SegmentRuntime
from splitpipe.segments.stages import Options
from splitpipe.training.engine import called, outside_of_compilers, refuse_export, refuse_transforms

M = TypeVar("M", bound=nn.Module)
#: The tensors of one call, to place the module with: keyword arguments, or positional ones.
Sample = Mapping[str, Any] | tuple[Any, ...] | torch.Tensor


class Piped:
    """A module's forward as a pipeline: called as it is, with its signature."""

    def __init__(self, runtime: SegmentRuntime, name: str) -> None:
        self.runtime = runtime
        self.attached = False  #: Whether the module has an ``hf_device_map``.
        self.__name__ = name
        signature = runtime.signature
        if signature is not None:
            self.__signature__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_export()
        return (outside_of_compilers if "torch._dynamo" in sys.modules else called)(self._run, args, kwargs)

    @property
    def __code__(self) -> CodeType:
        """That of a call: torch.export asks for it before it calls."""
        return Piped.__call__.__code__

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_transforms()
        if "torch.distributed.fsdp" in sys.modules:
            checks.verify_ungathered(self.runtime.module)
        target = None
        runtime = self.runtime
        if "target" in kwargs and (runtime.options.loss_fn is not None or not takes(runtime.signature, "target")):
            kwargs = dict(kwargs)
            target = kwargs.pop("target")
        value = runtime.call(args, kwargs, target)
        if self.attached and runtime.mapped != len(runtime.stage_of):
            self.write_map()
        return value

    def write_map(self) -> None:
        """Writes ``hf_device_map``: accelerate and Trainer leave a model that has one where it is."""
        runtime, self.attached = self.runtime, True
        runtime.mapped = len(runtime.stage_of)
        vars(runtime.module)["hf_device_map"] = runtime.device_map()


def options_of(
    stages: int,
    stages_from: Literal["balance", "cuts"],
    cuts: Iterable[str] = (),
    batched: Any = None,
    *,
    devices: Iterable[Device] | None,
    chunks: int,
    checkpoint: Checkpoint | None,
    deferred_batch_norm: bool,
    backward: Literal["split", "autograd"],
    schedule: str | Schedule,
    loss_fn: Callable[..., Any] | None,
    grad_scaler: object | None,
    stash_limit: int | None,
    split: Split | None,
    reduction: Literal["mean", "sum"] | Reduce | None,
    compile: bool | Mapping[str, Any],
) -> Options:
    """How a module is run, of arguments that are checked here: those that SplitPipe and attach have in common.

    ``stages_from``: the argument that says how many stages there are.
    """
    verify_options(
        chunks=chunks, checkpoint=checkpoint, deferred_batch_norm=deferred_batch_norm, backward=backward,
        schedule=schedule, loss_fn=loss_fn, grad_scaler=grad_scaler, stash_limit=stash_limit,
        own_loss=stages_from == "cuts",
    )
    verify_reduction(reduction)
    verify_split(split)
    compiling, count = verify_compile(compile), operator.index(chunks)
    listed = checks.verify_listed(devices, stages)
    drop_in = schedule == "gpipe" and loss_fn is None
    plan, places = checks.resolve_places(schedule, drop_in, listed, stages, count, stages_from=stages_from)
    default: Checkpoint = "except_last" if plan is None or plan.name == "gpipe" else "never"
    kept = default if checkpoint is None else checkpoint
    limit = None if stash_limit is None else operator.index(stash_limit)
    return Options(
        tuple(cuts), tuple(places), count, kept, UNCHECKPOINTED_TAIL[kept], backward == "split", limit, plan, batched,
        reduction, loss_fn, grad_scaler, compiling, split,
    )


def piped(
    module: nn.Module,
    cuts: Iterable[str],
    *,
    devices: Iterable[Device] | None,
    chunks: int,
    checkpoint: Checkpoint | None,
    deferred_batch_norm: bool,
    backward: Literal["split", "autograd"],
    schedule: str | Schedule,
    loss_fn: Callable[..., Any] | None,
    grad_scaler: object | None,
    stash_limit: int | None,
    batched: Mapping[str, Any] | None,
    split: Split | None,
    reduction: Literal["mean", "sum"] | Reduce | None,
    sample: Sample | None,
    compile: bool | Mapping[str, Any],
) -> Piped:
    """Checks everything, and has the module's forward run as a pipeline from now on."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: expected an nn.Module.")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("module is a torch.jit.ScriptModule: expected one whose forward is Python, to be run as it is.")
    checks.verify_ungathered(module)
    names = verify_cuts(module, cuts)
    verify_filled(module)
    options = options_of(
        len(names) + 1, "cuts", names, verify_named(batched), devices=devices, chunks=chunks, checkpoint=checkpoint,
        deferred_batch_norm=deferred_batch_norm, backward=backward, schedule=schedule, loss_fn=loss_fn,
        grad_scaler=grad_scaler, stash_limit=stash_limit, split=split, reduction=reduction, compile=compile,
    )
    if any(place.stream is not None for place in options.places):
        raise TypeError(
            "devices names a torch.Stream: with cuts=, expected devices alone, whose current streams are used."
        )
    before = vars(module).get("forward")
    own = before.runtime.own if isinstance(before, Piped) else before
    made = Piped(SegmentRuntime(module, own, options), "forward")
    if sample is not None:
        made.runtime.place(sample)
    if deferred_batch_norm:
        DeferredBatchNorm.convert_deferred_batch_norm(module)
    vars(module)["forward"] = made
    if isinstance(before, Piped) and before.attached:
        made.write_map()
    return made


def attach(
    module: M,
    cuts: Iterable[str],
    *,
    devices: Iterable[Device] | None = None,
    chunks: int = 1,
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
    """Has a module run as a pipeline, in place: the same object, of its class, with its methods and attributes.

    Its ``forward`` is replaced on the instance, by one with the same signature. So what knows the module goes on:
    ``isinstance``, ``generate``, ``save_pretrained``, transformers' Trainer, PEFT. ``SplitPipe(module, cuts=...)`` is
    the same in a wrapper of its own.

    Args:
        module: any module. Its parameters go to their stages' devices in the first call, or with ``sample``.
        cuts: qualified names of submodules, in the order of their calls: stage j+1 begins where ``cuts[j]`` is called.
        devices: as of SplitPipe, and so are all further arguments.
        chunks: number of microbatches.
        checkpoint: which microbatches have their blocks run again in backward.
        deferred_batch_norm: whether BatchNorm layers keep the running statistics of the whole batch.
        backward: ``"split"`` or ``"autograd"``.
        schedule: a name, or a Schedule. All but ``"gpipe"`` go backward inside the forward, from ``loss_fn`` or else
            from the field ``loss`` of the module's output.
        loss_fn: ``loss_fn(output, target)``, called where the model is called with ``target=``.
        grad_scaler: the loop's ``torch.amp.GradScaler``, for a schedule under float16 autocast.
        stash_limit: bytes held back for weight gradients.
        batched: how arguments and ``target`` are cut, by name: True, False, a dimension, ``"rows"`` (a list with one
            entry per row), or a nesting of them. None: tensors whose first dimension has the size of the batch, that of
            the first tensor, and lists with as many entries.
        split: ``split(args, kwargs, chunks)`` gives (args, kwargs) for each microbatch, for what no rule can cut.
        reduction: how numbers that microbatches give, such as a loss, make one: ``"mean"`` weighted by rows, ``"sum"``,
            or, drop-in, a function of the list of values and the list of rows. None: as the trace shows.
        sample: arguments of a call (keywords in a dict, positional ones in a tuple), of which one row places the
            parameters now. None: the first call does.
        compile: whether blocks are compiled, as for SplitPipe.

    Returns:
        The module.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument has a wrong value; a parameter is on meta.

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
    made = piped(
        module, cuts, devices=devices, chunks=chunks, checkpoint=checkpoint, deferred_batch_norm=deferred_batch_norm,
        backward=backward, schedule=schedule, loss_fn=loss_fn, grad_scaler=grad_scaler, stash_limit=stash_limit,
        batched=batched, split=split, reduction=reduction, sample=sample, compile=compile,
    )
    made.write_map()
    return module


class Detached:
    """The forward of a SplitPipe that was detached."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise RuntimeError(
            "this SplitPipe was detached: expected calls of the module that splitpipe.detach gave, or of a new "
            "SplitPipe around that. To go on with a model, detach a copy of it (copy.deepcopy)."
        )


def detach(module: nn.Module, device: torch.device | str | int | None = None) -> nn.Module:
    """Gives the plain module back, to export, trace, compile or save it, or to run it on one device.

    It has its parameters (the same objects: optimizers go on with them), hooks, mode, and running statistics;
    BatchNorm layers that became deferred ones are of their own class again, and layers are not compiled by the pipeline
    any more. It can become a pipeline again.

    Args:
        module: a SplitPipe, or a module that ``attach`` was called with. A SplitPipe can't be called afterwards; to go
            on with it, detach a copy (``copy.deepcopy(model)``).
        device: where all parameters and buffers go. None: they stay on the devices of their stages, and the module runs
            there if that is one device.

    Returns:
        Of a SplitPipe the module that it was given; of an attached one the same object, with its own ``forward`` and
        without ``hf_device_map``.

    Raises:
        TypeError: the module is not a pipeline, or ``device`` is not a device.
        ValueError: there is no such device.

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
        _bring(found, place)  # First: what fails changes nothing.
    if isinstance(module, Shell):
        vars(module)["forward"] = Detached()
    forward = vars(found).get("forward")
    if isinstance(forward, Piped):
        del vars(found)["forward"]
        if forward.runtime.own is not None:
            vars(found)["forward"] = forward.runtime.own
        if forward.attached:
            vars(found).pop("hf_device_map", None)
    expose(found)
    undefer(found)
    return found


def _bring(module: nn.Module, device: torch.device) -> None:
    """Moves all that is in a module: tensors stay themselves, and ties ties. Pipelines in it stay where they are."""
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
        return "module is a SplitPipe that was detached: expected calls of the module that splitpipe.detach gave."
    inside = [
        name for name, part in module.named_modules() if _is_pipeline(part)
    ] if isinstance(module, nn.Module) else []
    found = f"; {inside[0]!r} in it is one: detach that" if inside else ""
    return f"module is a {type(module).__name__}, not a pipeline: expected a SplitPipe, or an attached module{found}."
