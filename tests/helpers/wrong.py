"""The public doors with right arguments, and for each argument values that are wrong and the error that is due."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import DeferredBatchNorm, Plan, SplitPipe
from splitpipe.balance import balance_by_size, balance_by_time
from splitpipe.distributed import Pipeline
from splitpipe.planner.planning import chosen
from splitpipe.schedule import (
    BlockOp,
    BuildingBlock,
    Costs,
    Op,
    Recording,
    Schedule,
    Timeline,
    build,
    check,
    reorder,
    search,
    simulate,
)
from splitpipe.skip import skippable, verify_skippables
from tests.helpers.recording import emulated, played, recorded

mse = nn.functional.mse_loss
Error = type[BaseException]


class Odd:
    """Nothing that anyone asks for."""

    def __repr__(self) -> str:
        return "<odd>"


@dataclass(frozen=True)
class Wrong:
    """A wrong value, or a lambda that makes one; the error that is due, of exactly this type; a part of its message."""

    value: Any
    error: Error
    says: str

    def make(self) -> Any:
        return self.value() if getattr(self.value, "__name__", "") == "<lambda>" else self.value


Rows = dict[str, list[Wrong]]


@dataclass(frozen=True)
class Door:
    """Something public that takes arguments."""

    name: str
    of: Callable[..., Any]  # Whose signature counts.
    right: Callable[[], dict[str, Any]]  # Makes arguments that are right, by their names.
    wrong: Rows  # For each argument, what is wrong for it.
    on: Callable[[], Any] | None = None  # Makes what it is a method of.
    call: Callable[..., Any] | None = None  # With that, and the arguments by their names; None: ``of``.
    free: set[str] = field(default_factory=set)  # Arguments that nothing is wrong for here, or that another door has.
    told: Sequence[Callable[..., Any]] = ()  # Where else the errors are documented.

    def __str__(self) -> str:
        return self.name


def each(error: Error, says: str, values: Iterable[Any]) -> list[Wrong]:
    """A row for each value."""
    return [Wrong(value, error, says) for value in values]


# Groups of values of another type than the one in their name.

UNWHOLE: list[Any] = ["2", 2.0, math.nan, True, [2], torch.tensor(2.0), torch.tensor(True), numpy.float64(2.0), Odd()]
UNREAL: list[Any] = ["2", True, 2j, [2], torch.tensor([2.0, 2.0]), Odd()]
UNBOOL: list[Any] = [None, "yes", 1, 0, numpy.bool_(True), Odd()]
UNTEXT: list[Any] = [b"1f1b", 1, ["1f1b"], Odd()]
UNMODULE: list[Any] = [None, "module", [nn.Linear(2, 2)], nn.Sequential, Odd()]
MODULES = [lambda: nn.Linear(2, 2), lambda: nn.ModuleList([nn.Linear(2, 2)])]
UNSCHEDULE: list[Any] = [None, "1f1b", [[Op("F", 0, 0), Op("BW", 0, 0)]], Schedule, Odd()]
UNCALLABLE: list[Any] = ["mse_loss", 2, torch.ones(2), Odd()]
#: What can't be cut into microbatches.
UNCUT: list[Any] = [None, "x", 2, [], {}, torch.tensor(1.0), [1, 2], Odd()]


def no_number(says: str, none: bool = False, error: Error = TypeError) -> list[Wrong]:
    """What is no whole number above 0."""
    return each(error, says, UNWHOLE if none else [None, *UNWHOLE]) + each(ValueError, says, [0, -1, numpy.int64(0)])


def no_real(says: str, none: bool = False, error: Error = TypeError) -> list[Wrong]:
    """What is no real number; what is below 0, or not finite."""
    types = UNREAL if none else [None, *UNREAL]
    return each(error, says, types) + each(ValueError, says, [-1, math.nan, math.inf])


def layers() -> nn.Sequential:
    """Four layers, with a BatchNorm and a Dropout among them."""
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))


def model(**options: Any) -> SplitPipe:
    """Two stages."""
    return SplitPipe(layers(), [2, 2], devices=["cpu", "cpu"], chunks=2, **options)


def scheduled(**options: Any) -> SplitPipe:
    """Two stages that go backward themselves."""
    return model(**{"schedule": "1f1b", "loss_fn": mse, **options})


def x() -> Tensor:
    return torch.randn(4, 3)


# A pipeline in one process

def patched() -> nn.Sequential:
    """With a forward of its own."""
    module = nn.Sequential(nn.Tanh())
    module.forward = lambda input: input
    return module


MODULE = [*each(TypeError, "expected an nn.Sequential", [None, nn.Sequential]),
          *each(TypeError, "Write the model as nn.Sequential(layer", [*UNMODULE, *MODULES]),
          *each(TypeError, "with its own forward: expected an nn.Sequential", [
              type("Own", (nn.Sequential,), {"forward": lambda self, x: x})(), lambda: patched()])]
#: What no pipeline is made of.
UNWRAPPED = [*each(TypeError, "expected an nn.Module", UNMODULE),
             *each(TypeError, "module is a SplitPipe: expected an nn.Module that isn't split yet", [lambda: model()]),
             *each(TypeError, "the module itself is a torch.jit.ScriptModule: expected", [torch.jit.ScriptModule()]),
             *each(TypeError, "'b' is a torch.jit.ScriptModule: expected modules whose forward",
                   [nn.ModuleDict({"b": torch.jit.ScriptModule()})]),
             *each(TypeError, "ModuleList has no forward", [nn.ModuleList(layers())]),
             *each(TypeError, "compiled as a whole: expected torch.compile", [
                 type("OptimizedModule", (nn.Linear,), {})(3, 3)])]
SKIPS = each(TypeError, "the layers' skips do not fit", [
    lambda: nn.Sequential(skippable(stash=["a"])(nn.Identity)(), *layers()[:3]),
    lambda: nn.Sequential(*layers()[:3], skippable(pop=["a"])(nn.Identity)()),
])
BALANCE = [
    *each(TypeError, "expected a list of ints", ["22", 4, {1: 3, 3: 1}, torch.tensor(4), Odd()]),
    *each(TypeError, "list of ints", [[2.0, 2.0], [True, 3], [numpy.True_, 3], [torch.tensor(1.5), 2], [[2, 2]]]),
    *each(ValueError, "balance_by_time(", [[], [2, 1], [0, 4], [-1, 5], [1] * 5, numpy.array([2, 3])]),
]
NO_NAMES = ["1F1B", "", "zb-h9", " 1f1b"]
SCHEDULES = [
    *each(TypeError, "schedule", [*UNTEXT, Schedule]),
    *each(ValueError, "there is no schedule named", NO_NAMES),
    *each(ValueError, "the schedule does not fit", [build("1f1b", 3, 2), build("1f1b", 2, 3), build("zb-v", 2, 2)]),
    *each(ValueError, "3 stages, 3 rows and 8 microbatches: expected", [build("1f1b", 3, 8)]),
    *each(ValueError, "missing", [Schedule([[Op("F", 0, 0)], [Op("F", 1, 0)]], [0, 1])]),
]
LOSS = [*each(TypeError, "loss_fn", UNCALLABLE), *each(ValueError, "expected loss_fn", [None]),
        *each(TypeError, "an instance, such as nn.MSELoss()", [nn.MSELoss])]
COMPILE = [*each(TypeError, "compile", ["inductor", 1, [True], Odd(), {"fullgraph": True}]),
           *each(TypeError, "compile has dynamic", [{"dynamic": 1}]),
           *each(TypeError, "compile has options", [{"options": True}]),
           *each(ValueError, "compile has the backend", [{"backend": "eager"}, {"backend": None}]),
           *each(ValueError, "CUDA graphs", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}])]
DEVICES = [*each(TypeError, ": expected a list", ["cpu", 0, torch.device("cpu"), Odd(), {1: "cpu"}]),
           *each(TypeError, ": expected a torch.device, an index, or a string", [["cpu", 1.0], [True, "cpu"]]),
           *each(ValueError, "isn't available: expected one of cpu", [["cpu", "cuda:99"], ["cpu", "meta"]]),
           *each(ValueError, "expected one of cpu", [["cpu", "gpu"], ["cpu", -1]])]
#: What all who wrap a module check in one place.
OPTIONS: Rows = {
    "devices": DEVICES,
    "chunks": no_number("chunks", none=True),
    "checkpoint": each(TypeError, "checkpoint", UNTEXT) + each(ValueError, "checkpoint", ["", "Always", "never "]),
    "deferred_batch_norm": each(TypeError, "deferred_batch_norm", UNBOOL),
    "backward": each(TypeError, "backward", [None, *UNTEXT]) + each(ValueError, "backward", ["", "Split"]),
    "schedule": SCHEDULES,
    "grad_scaler": each(TypeError, "grad_scaler", [2.0, "auto", torch.amp.GradScaler, Odd()]),
    "stash_limit": each(TypeError, "stash_limit", UNWHOLE) + each(ValueError, "stash_limit", [-1]),
    "split": each(TypeError, "split", [1, "rows", {"x": 1}, Odd()]),
    "reduction": [*each(ValueError, "reduction", ["", "max"]), *each(TypeError, "reduction", [1, Odd()]),
                  *each(ValueError, "a schedule runs backward before all losses are known", [sum])],
    "compile": COMPILE,
}
PIPE = Door(
    "SplitPipe", SplitPipe,
    lambda: {"module": layers(), "balance": [2, 2], "devices": ["cpu", "cpu"], "chunks": 2, "schedule": "1f1b",
             "loss_fn": mse, "deferred_batch_norm": True},
    {**OPTIONS,
     "module": [*MODULE, *SKIPS, *each(ValueError, "sums to 4", [nn.Sequential()])],
     "balance": [*BALANCE, *each(ValueError, "balance", [[4]])],
     "devices": [*DEVICES, *each(ValueError, "the model has 2 stages for", [[], ["cpu"], ["cpu"] * 3])],
     "schedule": SCHEDULES + each(ValueError, "schedule 'zb-v' expects 2 stages per device", ["zb-v"]),
     "loss_fn": LOSS,
     "batched": each(TypeError, "batched", [0.0, "x", {1: "x"}, Odd()])
     + each(TypeError, "batched[1]", [(True, None), [True, 1.0]])},
    free={"cuts", "sample"},
)
DROPIN = Door("SplitPipe without a schedule", SplitPipe,
              lambda: {"module": layers(), "balance": [2, 2], "devices": ["cpu", "cpu"]},
              {"devices": each(ValueError, "expected 2", [[], ["cpu"]]),
               "schedule": each(ValueError, "expected loss_fn", ["1f1b", build("1f1b", 2, 1)]),
               "loss_fn": each(ValueError, "loss_fn is given without a schedule", [mse]),
               "grad_scaler": each(ValueError, "grad_scaler is given without loss_fn", [torch.amp.GradScaler("cpu")])})


class Net(nn.Module):
    """A module with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"y": x}


def _by_cuts() -> dict[str, Any]:
    return {"module": Net(), "cuts": ["layers.2"], "devices": ["cpu", "cpu"], "chunks": 2, "schedule": "1f1b"}


BY_CUTS: Rows = {
    **{name: rows[:1] for name, rows in OPTIONS.items()},
    "cuts": each(TypeError, "such as cuts=", ["layers.1", 1, [1], ["layers.1", 2], Odd()])
    + each(ValueError, "the names of submodules of Net, each once", [
        ["layer.1"], [""], ["layers.1", "x"], ["layers"], ["layers.1", "layers.1"]])
    + each(ValueError, "the model has 4 stages for", [["layers.1", "layers.2", "layers.3"]]),
    "devices": each(ValueError, "the model has 2 stages for", [[], ["cpu"], ["cpu"] * 3]),
    "loss_fn": each(TypeError, "loss_fn", UNCALLABLE[:1]),
    "batched": each(TypeError, "a dict by argument name, such as", ["x", 1, (True,), {1: True}])
    + each(TypeError, "batched", [{"x": 1.0}, {"x": "row"}]),
    "sample": each(TypeError, "sample", [1, "x", [torch.ones(2, 3)]]) + each(TypeError, "holds no tensor", [{}, ()]),
}
ATTACH = Door("attach", splitpipe.attach, _by_cuts, {"module": UNWRAPPED, **BY_CUTS})
DEVICE_MAP = Door("device_map", splitpipe.device_map, lambda: {"module": Net(), "devices": ["cpu", "cpu"]},
                  {"module": each(TypeError, "expected an nn.Module", UNMODULE)
                   + each(ValueError, "no repeated blocks", [nn.Sequential(nn.Linear(3, 3), nn.ReLU())]),
                   "devices": DEVICES})
CUTTING = Door(
    "SplitPipe with cuts", SplitPipe, _by_cuts,
    {"module": UNWRAPPED, "balance": each(ValueError, "balance and cuts are given: expected one of them", [[2, 2]]),
     **BY_CUTS},
)


@dataclass
class Held:
    """A container that hides its tensor."""

    x: Tensor


#: A batch that a model can't take.
BATCH = [*each(TypeError, "expected a tensor, or a nesting", UNCUT),
         *each(TypeError, "expected tensors in any nesting", [lambda: [Held(x())]]),
         *each(ValueError, "2 entries for each of the 4 rows", [lambda: (x(), torch.ones(8, 3))])]
TARGETS = [*each(TypeError, "the target", [lambda: [Held(x())]]),
           *each(ValueError, "has 5 entries, but the", [lambda: torch.ones(5, 3), lambda: (x(), torch.ones(5, 3))])]
FORWARD = Door("SplitPipe.forward", SplitPipe.forward, lambda: {"input": x()},
               {"input": BATCH, "target": each(ValueError, "expected model((x, mask))", [lambda: x(), "x"])}, on=model,
               call=lambda model, **given: model(**given))
TRAIN = Door("SplitPipe.forward with a target", SplitPipe.forward, lambda: {"input": x(), "target": x()},
             {"input": BATCH, "target": TARGETS}, on=scheduled, call=lambda model, **given: model(**given))
DEVICE = [*each(TypeError, "device is", [0.0, True, ["cpu"], Odd()]),
          *each(ValueError, "device is", ["gpu", "", "cuda:99", "meta", -1])]
DETACH = Door(
    "detach", splitpipe.detach, lambda: {"module": splitpipe.attach(Net(), ["layers.2"], devices=["cpu", "cpu"])},
    {"module": each(TypeError, "not a pipeline: expected a SplitPipe", [*UNMODULE, *MODULES]), "device": DEVICE},
)


def _pipeline() -> dict[str, Any]:
    return {"model": scheduled()}


NO_PIPELINE = each(TypeError, "not a pipeline: expected a SplitPipe", [*UNMODULE, *MODULES])
RECORD = Door("record", splitpipe.record, _pipeline, {"model": NO_PIPELINE})
REPORT = Door("deferral_report", splitpipe.deferral_report, _pipeline, {"model": NO_PIPELINE})
SAME = Door("check", splitpipe.check, lambda: {"model": scheduled(), "target": x(), "args": (x(),)},
            {"model": NO_PIPELINE, "target": TARGETS, "loss": each(TypeError, "loss is", [2.0, "mse", [mse], Odd()]),
             "against": each(TypeError, "against is", [2.0, "net", [layers()], Odd()]),
             "rows": each(ValueError, "rows is", [0, -1, 1.5, "2", [2], Odd()]),
             "tolerance": each(ValueError, "tolerance is", [-1e-3, math.nan, "0", [0.1], Odd()])},
            call=lambda model, args, **given: splitpipe.check(model, *args, **given), free={"args", "kwargs"})

# Layers

CONVERT = Door(
    "DeferredBatchNorm.convert_deferred_batch_norm", DeferredBatchNorm.convert_deferred_batch_norm,
    lambda: {"module": layers()},
    {"module": each(TypeError, "module", UNMODULE)
     + each(ValueError, "not initialized yet", [lambda: nn.Sequential(nn.BatchNorm1d(2), nn.LazyBatchNorm1d())])},
)
DECORATED = Door(
    "the decorator of skippable", skippable(), lambda: {"cls": nn.Identity},
    {"cls": each(TypeError, "@skippable decorates", [None, nn.Identity(), int, lambda: skippable()(nn.Identity)])},
    call=lambda **given: skippable()(**given), told=[skippable],
)
VERIFY = Door("verify_skippables", verify_skippables, lambda: {"module": layers()},
              {"module": each(TypeError, "module", UNMODULE) + SKIPS})

# Balance and plan

NESTED = [*UNCUT, lambda: [Held(x())]]
UNEQUAL = [lambda: (x(), torch.ones(8, 3))]
LEARNED = each(ValueError, "module has no layers", [nn.Sequential()])
PARTITIONS = no_number("partitions") + each(ValueError, "expected 1 to 4", [5])
TIMEOUT = no_real("timeout") + each(ValueError, "timeout", [0])
BY_TIME = Door("balance_by_time", balance_by_time,
               lambda: {"partitions": 2, "module": layers(), "device": "cpu", "sample": x(), "timeout": 1e-9},
               {"partitions": PARTITIONS, "module": LEARNED, "timeout": TIMEOUT, "device": DEVICE,
                "sample": each(TypeError, "sample", NESTED) + each(ValueError, "sample", UNEQUAL)})
BY_SIZE = Door(
    "balance_by_size", balance_by_size,
    lambda: {"partitions": 2, "module": layers(), "device": "cpu", "input": x()},
    {"partitions": PARTITIONS, "module": LEARNED, "chunks": no_number("chunks"), "param_scale": no_real("param_scale"),
     "device": DEVICE, "input": each(TypeError, "input", NESTED) + each(ValueError, "input", UNEQUAL)},
    told=[balance_by_time],
)
UNCUTTABLE = [
    *each(TypeError, "expected an nn.Module", UNMODULE),
    *each(ValueError, "no repeated blocks", MODULES),
    *each(ValueError, "no repeated blocks", [type("Own", (nn.Sequential,), {"forward": lambda self, x: x})()]),
    *each(TypeError, "module is a SplitPipe", [lambda: SplitPipe(Net(), cuts=["layers.2"], devices=["cpu"] * 2)]),
]
SAMPLE = [*each(TypeError, "", [None, 2, [x()], {}, (), {"x": 1}]),
          *each(ValueError, "no rows", [lambda: torch.ones(0, 3), lambda: {"x": torch.ones(0, 3)}])]
CUT: Rows = {"partitions": no_number("partitions") + each(ValueError, "1 to 2, as each stage needs at least a", [5]),
             "module": UNCUTTABLE, "device": DEVICE}
CUT_BY_TIME = Door("balance_by_time", balance_by_time,
                   lambda: {"partitions": 2, "module": Net(), "device": "cpu", "sample": x(), "timeout": 1e-9},
                   {**CUT, "sample": SAMPLE, "timeout": TIMEOUT})
PLAN = Door(
    "plan", splitpipe.plan,
    lambda: {"module": layers(), "sample": x(), "target": x(), "loss_fn": mse, "devices": ["cpu", "cpu"], "chunks": 2,
             "schedules": ["1f1b"], "seconds": 0},
    {
        "module": [*UNCUTTABLE, *each(ValueError, "no layers", [nn.Sequential()]), *SKIPS],
        "sample": each(TypeError, "sample", NESTED)
        + each(ValueError, "sample", [*UNEQUAL, lambda: torch.ones(0, 3)]),
        "target": TARGETS + each(ValueError, "target", [None, lambda: (x(), torch.ones(3))]),
        "loss_fn": each(TypeError, "loss_fn", UNCALLABLE) + each(ValueError, "loss_fn", [None]),
        "devices": [*DEVICES, *each(ValueError, "devices is empty", [[]])],
        "memory": each(TypeError, "memory", ["2", True, 2j, [None, 2], Odd()])
        + each(ValueError, "memory", [0, -1, math.nan, [1e9], [1e9, math.nan], []]),
        "chunks": each(TypeError, "chunks", ["2", 2.0, True, [2.0], [None], [1, True], torch.tensor(2.0), Odd()])
        + each(ValueError, "chunks", [0, -1, 5, [], [2, 0], [2, 5]]),
        "schedules": each(TypeError, "schedules", ["1f1b", 1, build("1f1b", 2, 2), Odd(), {"1f1b": 1}])
        + each(ValueError, "schedules", [[], ["1f1b", "zb-h9"], [None], [["1f1b"]]]),
        "optimizer_state": no_real("optimizer_state"),
        "compile": COMPILE,
        "seconds": no_real("seconds"),
    },
)


def planned(**fields: Any) -> Plan:
    """A plan for two stages of two layers."""
    found = chosen(emulated(0, layers=4, devices=2, chunks=[2]), ["1f1b"], mse)
    return replace(found, devices=("cpu", "cpu"), **fields)


def timeline(name: str = "1f1b", chunks: int = 2) -> Timeline:
    """One that was simulated."""
    return played(name, 2, chunks)


ARGUMENTS = Door("Plan.arguments", Plan.arguments, lambda: {"loss_fn": mse},
                 {"loss_fn": each(TypeError, "loss_fn", UNCALLABLE) + each(ValueError, "loss_fn", [None])},
                 on=lambda: planned(loss_fn=None))
APPLIED = Door(
    "Plan.apply", Plan.apply, lambda: {"module": layers(), "loss_fn": mse},
    {**ARGUMENTS.wrong, "module": MODULE + each(ValueError, "layers", [lambda: layers()[:3], nn.Sequential()])},
    on=lambda: planned(loss_fn=None),
)
COMPARE = Door(
    "Plan.compare", Plan.compare, lambda: {"timeline": recorded(timeline())},
    {"timeline": each(TypeError, "timeline", [None, timeline(), build("1f1b", 2, 2), Recording, Odd()])
     + each(ValueError, "recording", [lambda: recorded(timeline("zb-v")), lambda: recorded(timeline(chunks=3))])
     + each(RuntimeError, "nothing was recorded", [lambda: Recording(build("1f1b", 2, 2))])},
    on=planned,
)

# Schedules. What is no number there is a ValueError, as a number that makes no sense is.

HUGE = each(ValueError, "too many ops", [10**9, 10**30])
COSTS = each(TypeError, "costs", [1, [1, 1, 1], Costs, Odd()])
FOR_SCHEDULE: Rows = {"schedule": each(TypeError, "schedule", UNSCHEDULE)}
SIZES: Rows = {"devices": no_number("devices=", error=ValueError) + HUGE,
               "chunks": no_number("chunks=", error=ValueError) + HUGE}
BUILD = Door("schedule.build", build, lambda: {"name": "interleaved-low-memory", "devices": 2, "chunks": 4},
             {**SIZES,
              "name": each(ValueError, "there is no schedule named", [None, *UNTEXT, *NO_NAMES]),
              "options": [row for name in ("stages_per_device", "group")
                          for row in each(ValueError, f"{name}=", [{name: value} for value in (*UNWHOLE, 0, -1)])]
              + each(ValueError, "has no option", [{"split": True}, {"": 1}])
              + each(ValueError, "too many ops", [{"stages_per_device": 10**9}])
              + each(ValueError, "expected", [{"group": 3}, {"group": 10**30}])},
             call=lambda name, devices, chunks, options=None: build(name, devices, chunks, **(options or {})))
CHECK = Door("schedule.check", check, lambda: {"schedule": build("1f1b", 2, 2)},
             {"schedule": FOR_SCHEDULE["schedule"]
              + each(ValueError, "", [Schedule([], []), Schedule([[]], [0]), Schedule([[Op("F", 0, 0)]], [1])])})
SIMULATE = Door(
    "schedule.simulate", simulate, lambda: {"schedule": build("1f1b", 2, 2)},
    {**CHECK.wrong, "costs": COSTS + each(ValueError, "3 numbers", [Costs([1, 1, 1]), Costs(copy=[1, 1, 1])])},
)


def op(kind: Any = "F", stage: Any = 0, microbatch: Any = 0) -> Schedule:
    """A schedule with this op in it, verified."""
    made = Schedule([[Op(kind, stage, microbatch), Op("BW", 0, 0)]], [0])
    check(made)
    return made


WHOLES: list[Any] = [None, "0", 0.5, True, [0], torch.tensor(0.0), Odd()]
PLACES = {name: each(TypeError, "Op", WHOLES) + each(ValueError, "", [-1, 1]) for name in ("stage", "microbatch")}
OP = Door(
    "schedule.Op", Op, lambda: {"kind": "F", "stage": 0, "microbatch": 0},
    {**PLACES, "kind": each(ValueError, "is of kind", ["", "f", "I"]) + each(TypeError, "Op", [None, b"F", {"F"}])},
    call=op, told=[Schedule, check],
)
PLACEMENT: list[Any] = [None, 0, "0", ["0"], [0.0], [True], {0: 0}, torch.tensor(0), Odd()]
SCHEDULE = Door(
    "schedule.Schedule", Schedule, lambda: {"rows": [[Op("F", 0, 0), Op("BW", 0, 0)]], "placement": [0]},
    {"rows": each(TypeError, "rows", [None, "0F0", ["0F0"], [[0]], [[("F", 0, 0, 0)]], [Op("F", 0, 0)],
                                      {0: [Op("F", 0, 0)]}, [{Op("F", 0, 0): 1}], build("1f1b", 1, 1), Odd()]),
     "placement": each(TypeError, "placement", PLACEMENT), "name": each(TypeError, "name", [None, *UNTEXT])},
)
def block(**options: Any) -> BuildingBlock:
    """Of one stage."""
    return BuildingBlock(**BLOCK.right() | options)


REORDER = Door("schedule.reorder", reorder, lambda: {"schedule": build("1f1b", 2, 2), "memory": 1},
               {**SIMULATE.wrong, "memory": each(ValueError, "memory=", [None, *UNREAL, -1, math.nan])})
BLOCK = Door(
    "schedule.BuildingBlock", BuildingBlock,
    lambda: {"ops": [BlockOp("F", 0, 0), BlockOp("BW", 0, 2)], "placement": [0], "interval": 4},
    {"ops": each(TypeError, "ops", [None, "0F0", [1], [("F", 0, 0)], [Op("F", 0, 0)], BlockOp("F", 0, 0), Odd()]),
     "placement": each(TypeError, "placement", PLACEMENT) + each(ValueError, "placement", [[-1], [10**9]]),
     "interval": each(ValueError, "interval=", [None, *UNREAL, 0, -1, math.nan, math.inf, 10**400]),
     "costs": COSTS},
)
PASS = Door(
    "schedule.BlockOp", BlockOp, lambda: {"kind": "F", "stage": 0, "start": 0},
    {"kind": each(ValueError, "is an op of the block", ["", "f", "I"]) + each(TypeError, "BlockOp", [None, b"F"]),
     "stage": PLACES["stage"],
     "start": each(TypeError, "BlockOp", [None, *UNREAL, math.nan, 10**400]) + each(ValueError, "start", [math.inf]),
     "microbatch": PLACES["microbatch"][:-1]},
    call=lambda **given: block(ops=[BlockOp(**given), BlockOp("BW", 0, 2)]), told=[BuildingBlock],
)
REPEAT = Door("schedule.BuildingBlock.repeat", BuildingBlock.repeat, lambda: {"chunks": 2}, {"chunks": SIZES["chunks"]},
              on=block)
#: No time: neither a number nor one for each stage.
UNTIME: list[Any] = [None, "1 2", True, 2j, -1, math.nan, 10**400, ["1"], [None], [-1], {1}, lambda: iter(["x"]), Odd()]
COST = Door("schedule.Costs", Costs, dict,
            {name: each(ValueError, f"{name}=", UNTIME)
             for name in ("forward", "backward_input", "backward_weight", "copy", "recompute")}
            | {"uncheckpointed": each(ValueError, "uncheckpointed=", [None, *UNWHOLE, -1])})
TIMES, HOPS = (Door(f"schedule.{method.__qualname__}", method, CHECK.right, FOR_SCHEDULE, on=Costs)
               for method in (Costs.times, Costs.hops))
SEARCH = Door(
    "schedule.search", search, lambda: {"devices": 2, "chunks": 2, "seconds": 0},
    {**SIZES,
     "costs": COSTS + each(ValueError, "", [Costs([1, 1, 1])]),
     "memory": each(ValueError, "memory=", ["2", True, 2j, [None, 2], 0, 0.5, math.nan, [2], [2, math.nan], {2, 3},
                                            torch.tensor(2.0), Odd()]),
     "stages_per_device": no_number("stages_per_device=", none=True, error=ValueError) + HUGE,
     "seconds": no_real("seconds=", error=ValueError),
     "span": each(ValueError, "span=", [None, *UNTEXT, "", "Makespan"])},
)
OTHERS = each(TypeError, "others", [None, build("1f1b", 2, 2), Timeline, [timeline()], Odd()])
SVG, HTML = (
    Door(f"schedule.{method.__qualname__}", method, lambda: {"path": "a.file"}, {"others": OTHERS}, on=timeline,
         call=lambda drawn, path, method=method, **others: method(drawn, path, *others.values()), free={"path"},
         told=[Timeline.to_svg])
    for method in (Timeline.to_svg, Timeline.to_html)
)
# Several processes

ACROSS = Door(
    "distributed.Pipeline", Pipeline,
    lambda: {"module": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "balance": [2], "chunks": 2, "loss_fn": mse,
             "device": "cpu"},
    {"module": MODULE,
     "balance": [row for row in BALANCE if row.error is TypeError]
     + each(ValueError, "balance", [[], [1], [3], [0, 2], [1, 1]]),
     "chunks": no_number("chunks"),
     "schedule": [row for row in SCHEDULES if row.says != "missing"] + each(TypeError, "schedule", [None]),
     "loss_fn": LOSS,
     "device": DEVICE,
     "group": each(TypeError, "group", ["world", 2, [0], Odd()])},
)


def across() -> Pipeline:
    """One process."""
    return Pipeline(**ACROSS.right())


ROWS_OF = [*each(TypeError, "expected a tensor", ["x", 2, [x()], {"a": x()}, numpy.ones((4, 3)), Odd()]),
           *each(ValueError, "rows", [torch.ones(3, 3), torch.ones(0, 3), torch.tensor(1.0), torch.ones(6, 3)])]
STEPS, EVALUATE = (
    Door(f"distributed.Pipeline.{method.__name__}", method, lambda: {"input": x(), "target": x()},
         {"input": ROWS_OF + each(ValueError, "input", [None, (), lambda: (x(),)])
          + each(TypeError, "input 1", [lambda: (x(), "x")]),
          "target": ROWS_OF + each(ValueError, "target", [None]) + each(TypeError, "target", [lambda: (x(),)])},
         on=across, told=[Pipeline.step])
    for method in (Pipeline.step, Pipeline.evaluate)
)
CLIP = Door("distributed.Pipeline.clip_grad_norm_", Pipeline.clip_grad_norm_, lambda: {"max_norm": 1.0},
            {"max_norm": each(TypeError, "max_norm", [None, *UNREAL]) + each(ValueError, "max_norm", [-1, math.nan])},
            on=across)
