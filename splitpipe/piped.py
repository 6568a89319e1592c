"""A module whose forward runs as a pipeline with cuts: what ``attach`` and ``SplitPipe`` have in common."""
from __future__ import annotations

import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from splitpipe import checks
from splitpipe.batch.arguments import takes
from splitpipe.batch.custom_split import Split, verify_split
from splitpipe.batch.flags import verify_named
from splitpipe.batchnorm import DeferredBatchNorm
from splitpipe.checks import UNCHECKPOINTED_TAIL, Checkpoint, verify_options
from splitpipe.compiled.options import verify_compile
from splitpipe.core.stream import Device
from splitpipe.loss.reducing import Reduce, verify_reduction
from splitpipe.partition import dispatched
from splitpipe.partition.blocks import verify_cuts
from splitpipe.partition.homes import verify_filled
from splitpipe.runtime.code import CodeRuntime
from splitpipe.runtime.guards import called, outside_of_compilers, refuse_export, refuse_transforms
from splitpipe.runtime.options import Options
from splitpipe.schedule.op import Schedule

_log = logging.getLogger("splitpipe")

#: The arguments of one call, for placing the module: keyword arguments, or positional ones.
Sample = Mapping[str, Any] | tuple[Any, ...] | torch.Tensor


class Piped:
    """A module's forward, run as a pipeline, with the same signature."""

    def __init__(self, runtime: CodeRuntime, name: str) -> None:
        self.runtime = runtime
        self.attached = False  #: Whether the module has an ``hf_device_map``.
        #: accelerate's hooks that were removed, and the module's previous map.
        self.hooks: dispatched.Hooks = []
        self.map_before: Any = None
        self._calls = 0
        self._told = False  # Whether it was said that the forward was replaced.
        self.__name__ = name
        signature = runtime.signature
        if signature is not None:
            self.__signature__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        refuse_export()
        return (outside_of_compilers if "torch._dynamo" in sys.modules else called)(self._run, args, kwargs)

    def __repr__(self) -> str:
        options = self.runtime.options
        devices = [str(place.device) for place in options.places]
        return f"<pipeline: cuts={[*options.cuts]}, devices={devices}, chunks={options.chunks}>"

    @property
    def __code__(self) -> CodeType:
        """The code of a call: torch.export reads it before it calls."""
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

    def watched(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The value of the module's own call, after a warning if its forward has been replaced by one without us."""
        before = self._calls
        value = call(*args, **kwargs)
        module = self.runtime.module
        if self._calls == before and not self._told and vars(module).get("forward") is not self:
            self._told = True
            warnings.warn(
                f"a call of the attached {type(module).__name__} didn't run as a pipeline, because its forward was "
                "replaced after splitpipe.attach by a function that doesn't call the previous one: expected "
                "splitpipe.attach after the code that replaces it.",
                stacklevel=4,
            )
        return value

    def write_map(self) -> None:
        """Writes ``hf_device_map``: accelerate and Trainer don't move a model that has one."""
        runtime, self.attached = self.runtime, True
        runtime.mapped = len(runtime.stage_of)
        vars(runtime.module)["hf_device_map"] = runtime.device_map()


class Given(TypedDict):
    """The arguments that SplitPipe and attach have in common, as they were given."""

    devices: Iterable[Device] | None
    chunks: int | None
    checkpoint: Checkpoint | None
    deferred_batch_norm: bool
    backward: Literal["split", "autograd"]
    schedule: str | Schedule
    loss_fn: Callable[..., Any] | None
    grad_scaler: object | None
    stash_limit: int | None
    split: Split | None
    reduction: Literal["mean", "sum"] | Reduce | None
    compile: bool | Mapping[str, Any]


#: How to get more stages.
_MORE = {"balance": "a longer balance", "cuts": "more cuts"}


def options_of(
    given: Given, stages: int, stages_from: Literal["balance", "cuts"], cuts: Iterable[str] = (), batched: Any = None
) -> Options:
    """Checks these arguments, and returns the options of a run.

    ``stages_from``: the argument that determines the number of stages.
    """
    chunks, schedule, loss_fn, reduction = given["chunks"], given["schedule"], given["loss_fn"], given["reduction"]
    checkpoint, backward, limit = given["checkpoint"], given["backward"], given["stash_limit"]
    verify_options(
        chunks=chunks, checkpoint=checkpoint, deferred_batch_norm=given["deferred_batch_norm"], backward=backward,
        schedule=schedule, loss_fn=loss_fn, grad_scaler=given["grad_scaler"], stash_limit=limit,
        own_loss=stages_from == "cuts", chosen=True,
    )
    verify_reduction(reduction)
    verify_split(given["split"])
    compiling, listed = verify_compile(given["compile"]), checks.verify_listed(given["devices"], stages)
    count = checks.resolve_chunks(chunks, schedule, listed, stages)
    if chunks is None:
        _log.info("chosen: chunks=%d", count)
    drop_in = schedule == "gpipe" and loss_fn is None
    plan, places = checks.resolve_places(schedule, drop_in, listed, stages, count, stages_from=stages_from)
    unused = [] if listed is None else [str(place) for place in checks.resolve_devices(listed) if place not in places]
    if unused:
        warnings.warn(
            f"devices names {', '.join(unused)}, which won't be used, as there are fewer stages ({stages}): expected "
            f"one device per stage. Give {_MORE[stages_from]}, or fewer devices.",
            stacklevel=4,
        )
    default: Checkpoint = "except_last" if plan is None or plan.name == "gpipe" else "never"
    kept = default if checkpoint is None else checkpoint
    return Options(
        tuple(cuts), tuple(places), count, kept, UNCHECKPOINTED_TAIL[kept], backward == "split",
        None if limit is None else operator.index(limit), plan, batched, reduction, loss_fn, given["grad_scaler"],
        compiling, given["split"],
    )


def piped(
    module: nn.Module, cuts: Iterable[str], given: Given, *, batched: Mapping[str, Any] | None = None,
    sample: Sample | None = None,
) -> Piped:
    """Checks all arguments, and makes the module's forward run as a pipeline."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: expected an nn.Module.")
    checks.verify_python(module)
    checks.verify_ungathered(module)
    names = verify_cuts(module, cuts)
    dispatched.verify_resident(module)
    verify_filled(module)
    options = options_of(given, len(names) + 1, "cuts", names, verify_named(batched))
    before = vars(module).get("forward")
    again = before if isinstance(before, Piped) else None
    hooks = [] if again else dispatched.take_off(module)
    own = again.runtime.own if again else vars(module).get("forward")
    made = Piped(CodeRuntime(module, own, options), "forward")
    made.hooks = again.hooks if again else hooks
    made.map_before = again.map_before if again else vars(module).get("hf_device_map")
    try:
        if sample is not None:
            made.runtime.place(sample)
    except BaseException:
        dispatched.put_back(hooks)
        raise
    if given["deferred_batch_norm"]:
        DeferredBatchNorm.convert_deferred_batch_norm(module)
    vars(module)["forward"] = made
    if again is not None and again.attached:
        made.write_map()
    return made
