"""A module whose forward runs as a pipeline with cuts: what ``attach`` and ``SplitPipe`` have in common."""
from __future__ import annotations

import inspect
import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import nn

from splitpipe import checks
from splitpipe.batchnorm import defer
from splitpipe.checks import Checkpoint, verify_options
from splitpipe.compiled.backend import verify_compile
from splitpipe.core.stream import Device
from splitpipe.loss.numbers import Reduce
from splitpipe.microbatch.chunk_spec import verify_named
from splitpipe.microbatch.custom_split import Split
from splitpipe.partition.device_map import Hooks, put_back, take_off
from splitpipe.partition.resident import Resident, apply_at_home, is_pipeline, untraced
from splitpipe.runtime.module import ModuleRuntime
from splitpipe.runtime.runtime import Options, Runtime
from splitpipe.schedule.construct.library import build
from splitpipe.schedule.op import Schedule

_log = logging.getLogger("splitpipe")

F = TypeVar("F", bound=Callable[..., Any])

#: The arguments of one call, for placing the module: keyword arguments, or positional ones.
Sample = Mapping[str, Any] | tuple[Any, ...] | torch.Tensor


class Piped:
    """A module's forward, run as a pipeline, with the same signature."""

    __name__ = "forward"

    def __init__(self, runtime: ModuleRuntime, hooks: Hooks, map_before: Any) -> None:
        self.runtime = runtime
        #: accelerate's hooks that were removed, and the module's previous map.
        self.hooks, self.map_before = hooks, map_before
        self.__signature__ = runtime.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return untraced(args, self._run, args, kwargs)

    __code__ = __call__.__code__  #: torch.export reads it before it calls.

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime = self.runtime
        # The call's keyword arguments are a separate dict.
        target = kwargs.pop("target", None) if runtime.options.loss_fn is not None else None
        return runtime.run(runtime.batch(runtime.module, args, kwargs, target))

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """The attached module's ``_apply``, which its ``to`` and ``cuda`` call, and its parent's."""
        return apply_at_home(self.runtime.module, self.runtime.options.places, fn, recurse, refuses=False)

    def extra_repr(self) -> str:
        """What ``print`` shows of the attached module, besides its layers."""
        own = type(self.runtime.module).extra_repr(self.runtime.module)
        return f"{own}{', ' if own else ''}{described(self.runtime.options)}"


def described(options: Options) -> str:
    """The stages and how they run, for ``print``."""
    parts = f"balance={[*options.balance]}" if options.balance else f"cuts={[*options.cuts]}"
    named = "" if options.schedule is None else f", schedule={options.schedule.name or 'custom'!r}"
    devices = ", ".join(map(str, options.places))
    return f"{parts}, devices=[{devices}], chunks={options.chunks}, checkpoint={options.checkpoint!r}{named}"


class Arguments(TypedDict, total=False):
    """The arguments that SplitPipe and attach have in common; SplitPipe explains them."""

    devices: Iterable[Device] | None
    chunks: int | None
    checkpoint: Checkpoint | None
    deferred_batch_norm: bool
    backward: Literal["split", "autograd"]
    schedule: str | Schedule | None
    loss_fn: Callable[..., Any] | None
    grad_scaler: object | None
    stash_limit: int | None
    batched: Any
    split: Split | None
    reduction: Literal["mean", "sum"] | Reduce | None
    sample: Sample | None
    compile: bool | Mapping[str, Any]


#: Of arguments that aren't None if they are left out.
_DEFAULTS: Arguments = {"deferred_batch_norm": False, "backward": "split", "compile": False}


def complete(function: str, given: Arguments) -> Arguments:
    """The given arguments of a function, and the defaults of all others."""
    for name in given.keys() - Arguments.__annotations__.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {**dict.fromkeys(Arguments.__annotations__), **_DEFAULTS, **given}  # type: ignore[typeddict-item]


def with_arguments(function: F) -> F:
    """Lists all arguments in a function's signature, for ``inspect.signature``, ``help`` and editors."""
    own = inspect.signature(function)
    kept = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, kind in Arguments.__annotations__.items():
        default, annotation = _DEFAULTS.get(name), kind.__forward_arg__
        kept.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    function.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
    return function


def options_of(
    given: Arguments, balance: Sequence[int] = (), cuts: Sequence[str] = (), batched: Any = None
) -> Options:
    """Checks these arguments, and returns the options of a run. ``balance``: of an nn.Sequential."""
    stages = len(balance) or len(cuts) + 1
    schedule, loss_fn, checkpoint = given["schedule"], given["loss_fn"], given["checkpoint"]
    if isinstance(schedule, str) and schedule == "gpipe" and loss_fn is None:
        schedule = None  # Backward of both comes after all forwards.
    verify_options(**{**given, "schedule": schedule}, own_loss=not balance, chosen=True)
    compiling = verify_compile(given["compile"])
    named = None if given["devices"] is None else checks.resolve_devices(given["devices"])
    if given["chunks"] is not None:
        chunks = operator.index(given["chunks"])
    elif isinstance(schedule, Schedule):
        chunks = schedule.microbatches
    else:
        each = 1 if schedule is None else build(schedule, 1, 1).stages
        chunks = 4 * max(1, stages // each if named is None else min(len(named), stages))
        _log.info("chosen: chunks=%d", chunks)
    plan, rows = None, stages
    if schedule is not None:
        plan = checks.resolve_schedule(schedule, stages, None if named is None else len(named), chunks)
        rows = plan.devices
    places = checks.verify_devices(named, rows)
    if plan is not None:
        places = [places[row] for row in plan.placement]
    unused = [str(place) for place in named or () if place not in places]
    if unused:
        warnings.warn(
            f"devices names {', '.join(unused)}, which won't be used, as there are fewer stages ({stages}): expected "
            "one device per stage. Give a longer balance or more cuts, or fewer devices.", stacklevel=4,
        )
    if checkpoint is None:
        checkpoint = "except_last" if plan is None or plan.name == "gpipe" else "never"
    return Options(
        tuple(balance), tuple(cuts), tuple(places), chunks, checkpoint, given["backward"] == "split",
        given["stash_limit"], plan, batched, given["reduction"], loss_fn, given["grad_scaler"], compiling,
        given["split"],
    )


def verify_unsplit(module: object) -> None:
    """Raises for what can't become a pipeline: no module, one that is split, or one whose parameters have no data."""
    if not isinstance(module, nn.Module) or isinstance(module, Resident):
        raise TypeError(f"module is a {type(module).__name__}: expected an nn.Module that isn't split yet.")
    checks.verify_supported(module)
    # Those that accelerate keeps elsewhere are on meta.
    empty = [name for name, x in (*module.named_parameters(), *module.named_buffers()) if x.is_meta]
    if empty:
        raise ValueError(
            f"{checks.some(empty)} are on meta and have no data: expected weights on the CPU or the devices. Load the "
            "model without device_map, or with device_map=splitpipe.device_map(model, devices)."
        )


def piped(module: nn.Module, cuts: Sequence[str], given: Arguments) -> Piped:
    """Checks all arguments but the cuts, and makes the module's forward run as a pipeline."""
    options = options_of(given, cuts=cuts, batched=verify_named(given["batched"]))
    own = vars(module)
    before = own.get("forward")
    if isinstance(before, Piped):
        forward = Piped(ModuleRuntime(module, before.runtime.own, options), before.hooks, before.map_before)
    else:
        hooks = take_off(module)
        forward = Piped(ModuleRuntime(module, own.get("forward"), options), hooks, own.get("hf_device_map"))
    try:
        if given["sample"] is not None:
            forward.runtime.place(given["sample"])
    except BaseException:
        if not isinstance(before, Piped):
            put_back(forward.hooks)
        raise
    defer(module, options.chunks, given["deferred_batch_norm"])
    own["forward"] = forward
    forward.runtime.write_map()
    return forward


def runtime_of(module: object, name: str = "model") -> Runtime:
    """What runs a pipeline. Raises TypeError for an argument that isn't one."""
    if not isinstance(module, nn.Module) or not is_pipeline(module):
        kind = type(module).__name__
        raise TypeError(f"{name} is a {kind}, not a pipeline: expected a SplitPipe, or an attached module.")
    own = vars(module)
    runtime: Runtime = own["_runtime"] if isinstance(module, Resident) else own["forward"].runtime
    return runtime
