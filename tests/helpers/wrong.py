"""The public doors with right arguments, and for each argument values that are wrong and the error that is due."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import splitpipe
from splitpipe import DeferredBatchNorm, Plan, SplitFunction, SplitPipe
from splitpipe.balance import balance_by_size, balance_by_time, cuts_by_size, cuts_by_time
from splitpipe.checks import TooFewDevicesError
from splitpipe.distributed import Pipeline
from splitpipe.schedule import (
    BlockOp,
    BuildingBlock,
    Bytes,
    Costs,
    Op,
    Recording,
    Schedule,
    Step,
    Tiling,
    Timeline,
    build,
    check,
    from_csv,
    search,
    simulate,
)
from splitpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from splitpipe.skip.skippable import Skippable
from tests.helpers.deferring import Scale

mse = nn.functional.mse_loss
Error = type[BaseException]


class Odd:
    """Nothing that anyone asks for."""

    def __repr__(self) -> str:
        return "<odd>"


@dataclass(frozen=True)
class Wrong:
    """A wrong value.

    Args:
        make: gives it, a new one each time.
        error: that is due, of exactly this type.
        says: stands in the message.
    """

    make: Callable[[], Any]
    error: Error
    says: str


@dataclass(frozen=True)
class Door:
    """Something public that takes arguments.

    Args:
        name: of it.
        of: whose signature counts.
        right: arguments that are right, by their names, made again each time.
        wrong: for each argument, what is wrong for it.
        on: makes what it is a method of; None: it is none.
        call: with that, and the arguments by their names; None: ``of``.
        free: arguments that nothing is wrong for here, and why.
        told: where else the errors are documented.
        plain: whether its messages are Python's own, as those of an index are.
    """

    name: str
    of: Callable[..., Any]
    right: Callable[[], dict[str, Any]]
    wrong: dict[str, list[Wrong]]
    on: Callable[[], Any] | None = None
    call: Callable[..., Any] | None = None
    free: dict[str, str] = field(default_factory=dict)
    told: Sequence[Callable[..., Any]] = ()
    plain: bool = False

    def __str__(self) -> str:
        return self.name


def each(error: Error, says: str, values: Iterable[Any]) -> list[Wrong]:
    """A row for each value; a function among them makes it."""
    return [Wrong(value if _makes(value) else _given(value), error, says) for value in values]


def _makes(value: object) -> bool:
    return getattr(value, "__name__", "") == "<lambda>"


def _given(value: Any) -> Callable[[], Any]:
    return lambda: value


# Groups of values. A lambda makes what is used up by looking at it.

ONES: list[Any] = [lambda: (number for number in (2, 2)), Odd(), {"a": 1}]
#: Of another type than a whole number.
UNWHOLE: list[Any] = [
    "2", b"2", 2.0, 2.5, math.nan, math.inf, True, False, 2j, Decimal(2), [2], (2,), torch.tensor(2.0),
    torch.tensor([2, 2]), torch.tensor(True), numpy.float64(2.0), numpy.bool_(True), numpy.array([2, 2]), int, *ONES,
]
#: Of another type than a real number.
UNREAL: list[Any] = ["2", b"2", True, 2j, [2], torch.tensor([2.0, 2.0]), numpy.array([2.0]), float, *ONES]
UNBOOL: list[Any] = [None, "yes", b"", 1, 0, 2.0, [True], torch.tensor(True), numpy.bool_(True), bool, *ONES]
UNTEXT: list[Any] = [b"1f1b", 1, 2.0, True, ["1f1b"], torch.ones(2), *ONES]
UNPATH: list[Any] = [None, 2.0, True, 1, ["a"], torch.ones(2), *ONES]
UNMODULE: list[Any] = [None, "module", 2, [nn.Linear(2, 2)], nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]),
                       nn.Sequential, torch.ones(2), *ONES]
UNSCHEDULE: list[Any] = [None, "1f1b", b"1f1b", 2, True, [[Op("F", 0, 0), Op("BW", 0, 0)]], Schedule, torch.ones(2),
                         *ONES]
UNCALLABLE: list[Any] = ["mse_loss", 2, True, torch.ones(2), [mse], *ONES]
#: Values that can't be cut into microbatches.
UNCUT: list[Any] = [None, "x", 2, 2.0, True, object, [], {}, (), torch.tensor(1.0), [1, 2], *ONES]


def no_number(says: str, none: bool = False, error: Error = TypeError) -> list[Wrong]:
    """What is no whole number above 0."""
    types = UNWHOLE if none else [None, *UNWHOLE]
    return each(error, says, types) + each(ValueError, says, [0, -1, -(10**30), numpy.int64(0)])


def no_real(says: str, none: bool = False, error: Error = TypeError) -> list[Wrong]:
    """What is no real number; what is below 0, or not finite."""
    types = UNREAL if none else [None, *UNREAL]
    return each(error, says, types) + each(ValueError, says, [-1, -1e-9, math.nan, math.inf, -math.inf, 10**400])


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


MODULE = [
    *each(TypeError, "expected an nn.Sequential", UNMODULE),
    *each(TypeError, "whose forward() is its own", [type("Own", (nn.Sequential,), {"forward": lambda self, x: x})()]),
]
SKIPS = each(TypeError, "the layers' skips do not fit", [
    lambda: nn.Sequential(skippable(stash=["a"])(nn.Identity)(), *layers()[:3]),
    lambda: nn.Sequential(*layers()[:3], skippable(pop=["a"])(nn.Identity)()),
])
BALANCE = [
    *each(TypeError, "balance", ["22", b"22", 4, 4.0, True, [2.0, 2.0], [2, "2"], [2, None], [True, 3], [[2, 2]],
                                 {"a": 4}, torch.tensor(4), torch.tensor([2.0, 2.0]), Odd(), [2, Odd()], int,
                                 {1: 3, 3: 1}, {1, 3}]),
    *each(ValueError, "balance", [[], [2, 1], [2, 3], [0, 4], [-1, 5], [10**30], [1] * 5, [4, 0],
                                  lambda: (number for number in (2, 1)), numpy.array([2, 3])]),
]
NO_NAMES = ["1f1", "1F1B", "gpip", "", "zb-h9", " 1f1b", "1f1b\n", "x" * 1000]
SCHEDULES = [
    *each(TypeError, "schedule", [None, b"1f1b", 1, 2.0, True, ["1f1b"], Schedule, torch.ones(2), *ONES]),
    *each(ValueError, "no schedule has the name", NO_NAMES),
    *each(ValueError, "the schedule does not fit", [build("1f1b", 3, 2), build("1f1b", 2, 3), build("zb-v", 2, 2)]),
    *each(ValueError, "missing", [Schedule([[Op("F", 0, 0)], [Op("F", 1, 0)]], [0, 1])]),
]
LOSS = [*each(TypeError, "loss_fn", UNCALLABLE), *each(ValueError, "expected loss_fn", [None])]


def _given_pipe() -> dict[str, Any]:
    return {"module": layers(), "balance": [2, 2], "devices": ["cpu", "cpu"], "chunks": 2, "schedule": "1f1b",
            "loss_fn": mse}


COMPILE = [
    *each(TypeError, "compile", ["inductor", 1, 0, 2.0, [True], torch.ones(2), Odd(), {"fullgraph": True}]),
    *each(TypeError, "compile has dynamic", [{"dynamic": 1}]),
    *each(TypeError, "compile has options", [{"options": True}]),
    *each(ValueError, "compile has the backend", [{"backend": "eager"}, {"backend": None}]),
    *each(ValueError, "CUDA graphs", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}]),
]
DEVICES = [
    *each(TypeError, "devices", ["cpu", b"cpu", 0, 0.0, True, torch.device("cpu"), Odd(), [None, "cpu"], ["cpu", 1.0],
                                 [b"cpu", "cpu"], [True, "cpu"], [["cpu"], "cpu"], {1: "cpu", 2.0: "cpu"}]),
    *each(ValueError, "devices", [["cpu", "gpu"], ["cpu", "cuda:99"], ["", "cpu"], ["cpu", "meta"], ["cpu", -1],
                                  ["cpu", 10**30], ["cpu", "cpu:x"], ["cpux", "cpu"]]),
]

PIPE = Door(
    "SplitPipe", SplitPipe, _given_pipe,
    {
        "module": [*MODULE, *SKIPS, *each(ValueError, "sums to 4", [nn.Sequential()])],
        "balance": [*BALANCE, *each(ValueError, "balance", [[4]])],
        "devices": [*DEVICES, *each(ValueError, "balance has 2 stages for", [[], ["cpu"], ["cpu"] * 3])],
        "chunks": no_number("chunks", none=True),
        "checkpoint": each(TypeError, "checkpoint", [b"always", 1, 2.0, True, ["always"], torch.ones(2), *ONES])
        + each(ValueError, "checkpoint", ["", "Always", "except-last", "allways", "never "]),
        "deferred_batch_norm": each(TypeError, "deferred_batch_norm", UNBOOL),
        "backward": each(TypeError, "backward", [None, *UNTEXT])
        + each(ValueError, "backward", ["", "Split", "splitt"]),
        "schedule": SCHEDULES,
        "loss_fn": LOSS,
        "grad_scaler": each(TypeError, "grad_scaler", [2.0, "auto", True, torch.amp.GradScaler, torch.ones(1), *ONES]),
        "stash_limit": each(TypeError, "stash_limit", UNWHOLE) + each(ValueError, "stash_limit", [-1, -(10**30)]),
        "batched": each(TypeError, "batched", [0.0, "x", b"x", torch.ones(2), {1: "x"}, {True}, *ONES[:2]])
        + each(TypeError, "batched[1]", [(True, None), [True, 1.0], (True, ("x",))])
        + each(ValueError, "leaves nothing to cut", [False]),
        "split": each(TypeError, "split", [1, True, "rows", {"x": 1}, [(1,)], *ONES[:2]]),
        "compile": COMPILE,
    },
    free={name: "of a module with cuts, below" for name in ("cuts", "reduction", "sample")},
)
DROPIN = Door(
    "SplitPipe without a schedule", SplitPipe,
    lambda: {"module": layers(), "balance": [2, 2], "devices": ["cpu", "cpu"]},
    {
        "module": MODULE,
        "balance": BALANCE,
        "devices": [*DEVICES, *each(TooFewDevicesError, "expected 2", [[], ["cpu"]])],
        "chunks": no_number("chunks", none=True),
        "schedule": each(ValueError, "expected loss_fn", ["1f1b", "gpip", build("1f1b", 2, 1)]),
        "grad_scaler": each(ValueError, "grad_scaler is given without loss_fn", [torch.amp.GradScaler("cpu")]),
    },
    free={name: "as of SplitPipe" for name in ("checkpoint", "deferred_batch_norm", "backward", "loss_fn",
                                               "stash_limit", "batched", "split", "cuts", "reduction", "sample",
                                               "compile")},
)


class Net(nn.Module):
    """A module with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"y": x}


CUTS = [
    *each(TypeError, "cuts", ["layers.1", b"layers.1", 1, True, [1], [None], ["layers.1", 2], Odd()]),
    *each(ValueError, "no submodule", [["layer.1"], [""], ["layers.9"], ["layers.1", "x"]]),
    *each(ValueError, "never called", [["layers"]]),
    *each(ValueError, "the same module", [["layers.1", "layers.1"]]),
]
ANY = {
    "cuts": [*CUTS, *each(ValueError, "cuts has 4 stages for", [["layers.1", "layers.2", "layers.3"]])],
    "devices": [*DEVICES, *each(ValueError, "cuts has 2 stages for", [[], ["cpu"], ["cpu"] * 3])],
    "chunks": no_number("chunks", none=True),
    "checkpoint": each(TypeError, "checkpoint", [b"always", 1, True]) + each(ValueError, "checkpoint", ["", "allways"]),
    "deferred_batch_norm": each(TypeError, "deferred_batch_norm", UNBOOL),
    "backward": each(TypeError, "backward", [None, *UNTEXT]) + each(ValueError, "backward", ["", "splitt"]),
    "schedule": SCHEDULES,
    "loss_fn": each(TypeError, "loss_fn", UNCALLABLE),
    "grad_scaler": each(TypeError, "grad_scaler", [2.0, "auto", True, torch.amp.GradScaler, torch.ones(1), *ONES]),
    "stash_limit": each(TypeError, "stash_limit", UNWHOLE) + each(ValueError, "stash_limit", [-1]),
    "batched": each(TypeError, "batched", [1, True, (True,), "x", {1: True}, {"x": 1.0}, {"x": "row"}, *ONES[:2]]),
    "split": each(TypeError, "split", [1, True, "rows", {"x": 1}, [(1,)], *ONES[:2]]),
    "reduction": each(ValueError, "reduction", ["", "max", "Mean"])
    + each(TypeError, "reduction", [1, True, *ONES]),
    "sample": each(TypeError, "sample", [1, "x", True, [torch.ones(2, 3)]]) + each(ValueError, "sample", [{}, ()]),
    "compile": COMPILE,
}
ATTACH = Door(
    "attach", splitpipe.attach,
    lambda: {"module": Net(), "cuts": ["layers.2"], "devices": ["cpu", "cpu"], "chunks": 2, "schedule": "1f1b"},
    {"module": each(TypeError, "expected an nn.Module", [x for x in UNMODULE if not isinstance(x, nn.Module)]), **ANY},
)
DEVICE_MAP = Door(
    "device_map", splitpipe.device_map, lambda: {"module": Net(), "devices": ["cpu", "cpu"]},
    {"module": each(TypeError, "expected an nn.Module", [x for x in UNMODULE if not isinstance(x, nn.Module)])
     + each(ValueError, "no blocks that repeat", [nn.Sequential(nn.Linear(3, 3), nn.ReLU())]),
     "devices": DEVICES},
)
BY_CUTS = Door(
    "SplitPipe with cuts", SplitPipe,
    lambda: {"module": Net(), "cuts": ["layers.2"], "devices": ["cpu", "cpu"], "chunks": 2, "schedule": "1f1b"},
    {"balance": each(ValueError, "balance and cuts", [[2, 2]]), **ANY},
    free={"module": "as of attach"},
)


#: A batch that a model can't take.
BATCH = [
    *each(TypeError, "expected a tensor, or a nesting", UNCUT),
    *each(TypeError, "torch.strided", [lambda: torch.eye(4, 3).to_sparse()]),
    *each(TypeError, "expected tensors in any nesting", [lambda: [Held(x())]]),
    *each(ValueError, "first dimensions [4, 5]", [lambda: (x(), torch.ones(5, 3))]),
    *each(ValueError, "the first stage is on cpu", [lambda: torch.empty(4, 3, device="meta")]),
]
TARGETS = [
    *each(TypeError, "the target", [lambda: torch.eye(4, 3).to_sparse(), lambda: [Held(x())]]),
    *each(ValueError, "first dimension", [
        lambda: torch.ones(5, 3), lambda: torch.ones(3, 3), lambda: (x(), torch.ones(5, 3))]),
    *each(ValueError, "the target", [lambda: torch.empty(4, 3, device="meta")]),
]


@dataclass
class Held:
    """A container that hides its tensor."""

    x: Tensor


FORWARD = Door(
    "SplitPipe.forward", SplitPipe.forward, lambda: {"input": x()}, {"input": BATCH, "target": [
        *each(ValueError, "the model has no loss_fn", [lambda: x(), "x", 2])]},
    on=model, call=lambda model, **given: model(**given),
)
TRAIN = Door(
    "SplitPipe.forward with a target", SplitPipe.forward, lambda: {"input": x(), "target": x()},
    {"input": BATCH, "target": TARGETS},
    on=scheduled, call=lambda model, **given: model(**given),
)
ITEM = Door(
    "SplitPipe.__getitem__", SplitPipe.__getitem__, lambda: {"index": 0},
    {"index": each(TypeError, "", [None, "0", 0.0, [0], torch.tensor(0.0), *ONES])
     + each(IndexError, "index", [4, -5, 10**30])},
    on=model, plain=True,
)
APPLY = Door(
    "SplitFunction.apply", SplitFunction.apply, lambda: {"x": x(), "weights": torch.ones(3)},
    {"x": each(TypeError, "as x", [None, "x", 2.0, True, [x()], numpy.ones(3), *ONES]),
     "weights": each(TypeError, "as weight 0", ["x", 2.0, True, [torch.ones(3)], numpy.ones(3), *ONES])},
    call=lambda x, weights: Scale.apply(x, weights),
    free={"options": "forward's own"},
)
NORM = Door(
    "DeferredBatchNorm", DeferredBatchNorm, lambda: {"num_features": 3},
    {
        "num_features": no_number("num_features"),
        "eps": no_real("eps"),
        "momentum": no_real("momentum", none=True),
        "affine": each(TypeError, "affine", UNBOOL),
        "chunks": no_number("chunks"),
    },
)
CONVERT = Door(
    "DeferredBatchNorm.convert_deferred_batch_norm", DeferredBatchNorm.convert_deferred_batch_norm,
    lambda: {"module": layers()},
    {
        "module": each(TypeError, "module", [None, "x", 2, [nn.BatchNorm1d(3)], nn.BatchNorm1d, torch.ones(2), *ONES])
        + each(ValueError, "not initialized yet", [lambda: nn.Sequential(nn.BatchNorm1d(2), nn.LazyBatchNorm1d())]),
        "chunks": no_number("chunks"),
    },
)
NORMALISE = Door(
    "DeferredBatchNorm.forward", DeferredBatchNorm.forward, lambda: {"input": x()},
    {"input": each(ValueError, "input", [torch.ones(3), torch.tensor(1.0)])
     + each(ValueError, "Expected more than 1 value", [torch.ones(1, 3)])},
    on=lambda: DeferredBatchNorm(3), told=[DeferredBatchNorm],
)
NAMES = each(TypeError, "", [None, 2, 2.0, True, "skip", b"skip", [1], [b"skip"], [None], ["a", 2], [["a"]], Odd(),
                             torch.ones(2)])
SKIPPABLE = Door(
    "skippable", skippable, lambda: {"stash": ["a"], "pop": ["b"]},
    {"stash": NAMES, "pop": NAMES},
    call=lambda **given: skippable(**given)(nn.Identity),
)
DECORATED = Door(
    "the decorator of skippable", skippable(), lambda: {"cls": nn.Identity},
    {"cls": each(TypeError, "@skippable decorates", [None, "x", 2, nn.Identity(), int, Odd, Odd(),
                                                     lambda: skippable()(nn.Identity)])},
    call=lambda **given: skippable()(**given),
    told=[skippable],
)
ISOLATE = Door(
    "Skippable.isolate", Skippable.isolate, lambda: {"ns": Namespace(), "only": ["a"]},
    {"ns": each(TypeError, "namespace", ["a", 2, True, Namespace, object(), ["a"], *ONES]),
     "only": [row for row in NAMES if row.make() is not None]
     + each(TypeError, "does not declare", [["b"], ["A"], ["a", "b"]])},
    on=lambda: skippable(stash=["a"])(nn.Identity)(),
)
class Stashes(nn.Module):
    """Stashes its input."""

    def forward(self, x: Tensor) -> Any:
        yield stash("a", x)
        return x


class Yields(nn.Module):
    """Yields one command."""

    def __init__(self, command: Any) -> None:
        super().__init__()
        self.command = command

    def forward(self, x: Tensor) -> Any:
        yield self.command
        return x


def _yielding(command: Any, names: dict[str, list[str]]) -> nn.Module:
    return skippable(**names)(Yields)(command)


STASH = Door(
    "stash", stash, lambda: {"name": "a", "tensor": None},
    {"name": each(RuntimeError, "does not declare", [None, 2, True, b"a", ["a"], ("a",), torch.ones(2), "b", "",
                                                     *ONES])},
    call=lambda **given: _yielding(stash(**given), {"stash": ["a"]})(torch.ones(2)),
    free={"tensor": "anything can be stashed that can lie between layers"},
    told=[Skippable],
)
POP = Door(
    "pop", pop, lambda: {"name": "a"}, {"name": STASH.wrong["name"]},
    call=lambda **given: nn.Sequential(skippable(stash=["a"])(Stashes)(), _yielding(pop(**given), {"pop": ["a"]}))(
        torch.ones(2)),
    told=[Skippable],
)
VERIFY = Door(
    "verify_skippables", verify_skippables, lambda: {"module": layers()},
    {"module": each(TypeError, "module", [None, "x", 2, [nn.Identity()], nn.Identity, torch.ones(2), *ONES]) + SKIPS},
)


def _balanced() -> dict[str, Any]:
    return {"partitions": 2, "module": layers(), "device": "cpu"}


PARTITIONS = no_number("partitions") + each(ValueError, "expected 1 to 4", [5, 10**30])
DEVICE = [
    *each(TypeError, "device is", [b"cpu", 0.0, True, ["cpu"], torch.ones(1), *ONES]),
    *each(ValueError, "device is", ["gpu", "", "cuda:99", "meta", -1, 10**30, "cpu:x", torch.device("meta")]),
]
DETACH = Door(
    "detach", splitpipe.detach, lambda: {"module": splitpipe.attach(Net(), ["layers.2"], devices=["cpu", "cpu"])},
    {"module": each(TypeError, "not a pipeline: expected a SplitPipe", UNMODULE), "device": DEVICE},
)
LEARNED = [*MODULE, *each(ValueError, "module has no layers", [nn.Sequential()])]
UNCUTTABLE = [
    *each(TypeError, "expected an nn.Module", [x for x in UNMODULE if not isinstance(x, nn.Module)]),
    *each(ValueError, "no blocks that repeat", [x for x in UNMODULE if isinstance(x, nn.Module)]),
    *each(TypeError, "module is a SplitPipe", [lambda: SplitPipe(Net(), cuts=["layers.2"], devices=["cpu"] * 2)]),
]
BY_TIME = Door(
    "balance_by_time", balance_by_time, lambda: {**_balanced(), "sample": x(), "timeout": 1e-9},
    {
        "partitions": PARTITIONS,
        "module": LEARNED,
        "sample": each(TypeError, "sample", [*UNCUT, lambda: [Held(x())]])
        + each(ValueError, "sample", [lambda: (x(), torch.ones(5, 3))]),
        "timeout": no_real("timeout") + each(ValueError, "timeout", [0]),
        "device": DEVICE,
    },
)
BY_SIZE = Door(
    "balance_by_size", balance_by_size, lambda: {**_balanced(), "input": x()},
    {
        "partitions": PARTITIONS,
        "module": LEARNED,
        "input": each(TypeError, "input", [*UNCUT, lambda: [Held(x())]])
        + each(ValueError, "input", [lambda: (x(), torch.ones(5, 3))]),
        "chunks": no_number("chunks"),
        "param_scale": no_real("param_scale"),
        "device": DEVICE,
    },
)



def _cut() -> dict[str, Any]:
    return {"partitions": 2, "module": Net(), "device": "cpu"}


SAMPLE = [
    *each(TypeError, "", [None, "x", 2, [x()], object]),
    *each(TypeError, "", [{}, (), {"x": 1}]),
    *each(ValueError, "no rows", [lambda: torch.ones(0, 3), lambda: {"x": torch.ones(0, 3)}]),
]
CUT = {
    "partitions": no_number("partitions") + each(ValueError, "expected 1 to 2", [5, 10**30]), "module": UNCUTTABLE,
    "device": DEVICE,
}
CUT_BY_TIME = Door(
    "cuts_by_time", cuts_by_time, lambda: {**_cut(), "sample": x(), "timeout": 1e-9},
    {**CUT, "sample": SAMPLE, "timeout": BY_TIME.wrong["timeout"]},
)
CUT_BY_SIZE = Door(
    "cuts_by_size", cuts_by_size, lambda: {**_cut(), "input": x()},
    {**CUT, "input": SAMPLE, "chunks": no_number("chunks"), "param_scale": no_real("param_scale")},
)
PLAN = Door(
    "plan", splitpipe.plan,
    lambda: {"module": layers(), "sample": x(), "target": x(), "loss_fn": mse, "devices": ["cpu", "cpu"], "chunks": 2,
             "schedules": ["1f1b"], "seconds": 0},
    {
        "module": [*UNCUTTABLE, *each(ValueError, "no layers", [nn.Sequential()]), *SKIPS],
        "sample": each(TypeError, "sample", [*UNCUT, lambda: [Held(x())], lambda: torch.eye(4, 3).to_sparse()])
        + each(ValueError, "sample", [lambda: (x(), torch.ones(5, 3)), lambda: torch.ones(0, 3)]),
        "target": TARGETS + each(ValueError, "target", [None, lambda: torch.ones(5, 3), lambda: (x(), torch.ones(3))]),
        "loss_fn": each(TypeError, "loss_fn", UNCALLABLE) + each(ValueError, "loss_fn", [None]),
        "devices": [*DEVICES, *each(ValueError, "devices is empty", [[]])],
        "memory": each(TypeError, "memory", ["2", b"2", True, 2j, ["2", 2], [None, 2], [True, 2], *ONES[1:]])
        + each(ValueError, "memory", [0, -1, math.nan, [1e9], [1e9] * 3, [1e9, math.nan], [1e9, 0], []]),
        "chunks": each(TypeError, "chunks", ["2", b"2", 2.0, math.nan, True, False, 2j, Decimal(2), [2.0], [True],
                                             ["2"],
                                             [None], torch.tensor(2.0), torch.tensor(True), numpy.float64(2.0), int,
                                             *ONES[1:]])
        + each(ValueError, "chunks", [0, -1, 5, 10**30, [], [2, 0], [2, 5]]),
        "schedules": each(TypeError, "schedules", ["1f1b", b"1f1b", 1, 2.0, True, build("1f1b", 2, 2), Odd(),
                                                   torch.tensor(1), {"1f1b": 1}])
        + each(ValueError, "schedules", [[], ["1f1b", "zb-h9"], [None], [2], [b"1f1b"], [["1f1b"]]]),
        "optimizer_state": no_real("optimizer_state"),
        "compile": COMPILE,
        "seconds": no_real("seconds"),
        "progress": each(TypeError, "progress", [value for value in UNBOOL if value is not None]),
    },
)
ACROSS = Door(
    "distributed.Pipeline", Pipeline,
    lambda: {"module": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "balance": [2], "chunks": 2, "loss_fn": mse,
             "device": "cpu"},
    {
        "module": MODULE,
        "balance": [row for row in BALANCE if "is required" in row.says or row.error is TypeError]
        + each(ValueError, "balance", [[], [1], [3], [0, 2], [1, 1]]),
        "chunks": no_number("chunks"),
        "schedule": [row for row in SCHEDULES if row.says != "missing"],
        "loss_fn": LOSS,
        "device": DEVICE,
        "group": each(TypeError, "group", ["world", 2, True, [0], torch.ones(1), *ONES]),
        "cuts": each(ValueError, "balance and cuts", [["1"]]),
    },
)


# Schedules. What is no number there is a ValueError, as a number that makes no sense is.

HUGE = each(ValueError, "too many ops", [10**9, 10**30])
COSTS = each(TypeError, "costs", [1, "1", b"1", True, [1, 1, 1], Costs, Bytes(1, 1, 0), torch.ones(3), *ONES])
BYTES = each(TypeError, "bytes", [1, "1", True, [1, 1, 1], Bytes, Costs(), torch.ones(3), *ONES])
PATH = [
    *each(TypeError, "", UNPATH),
    *each(FileNotFoundError, "", ["", "absent/a.file", "/proc/absent/a.file"]),
    *each(IsADirectoryError, "", [".", "/"]),
    *each(OSError, "too long", ["x" * 5000]),
]
BUILD = Door(
    "schedule.build", build, lambda: {"name": "interleaved-low-memory", "devices": 2, "chunks": 4},
    {
        "name": each(ValueError, "no schedule has the name", [None, *UNTEXT, *NO_NAMES]),
        "devices": no_number("devices=", error=ValueError) + HUGE,
        "chunks": no_number("chunks=", error=ValueError) + HUGE,
        "options": [
            row for name in ("stages_per_device", "group")
            for row in each(ValueError, f"{name}=", [{name: value} for value in (*UNWHOLE, 0, -1) if not _makes(value)])
        ]
+ each(ValueError, "has no option", [{"split": True}, {"stage_per_device": 2}, {"stages": 2}, {"": 1}])
        + each(ValueError, "too many ops", [{"stages_per_device": 10**9}])
        + each(ValueError, "expected", [{"group": 0}, {"group": 3}, {"group": 2.0}, {"group": True},
                                        {"group": 10**30}]),
    },
    call=lambda name, devices, chunks, options=None: build(name, devices, chunks, **(options or {})),
)
CHECK = Door(
    "schedule.check", check, lambda: {"schedule": build("1f1b", 2, 2)},
    {"schedule": each(TypeError, "schedule", UNSCHEDULE)
     + each(ValueError, "", [Schedule([], []), Schedule([[]], [0]), Schedule([[Op("F", 0, 0)]], [1])])},
)
SIMULATE = Door(
    "schedule.simulate", simulate, lambda: {"schedule": build("1f1b", 2, 2)},
    {
        "schedule": CHECK.wrong["schedule"],
        "costs": COSTS + each(ValueError, "3 numbers", [Costs([1, 1, 1]), Costs(copy=[1, 1, 1])]),
        "bytes": BYTES + each(ValueError, "", [Bytes([1], 1, 0), Bytes(3, 1, 1)]),
    },
)


def op(kind: Any = "F", stage: Any = 0, microbatch: Any = 0) -> Schedule:
    """A schedule with this op in it, verified."""
    made = Schedule([[Op(kind, stage, microbatch), Op("BW", 0, 0)]], [0])
    check(made)
    return made


WHOLES: list[Any] = [None, "0", b"0", 0.0, 0.5, math.nan, True, [0], torch.tensor(0.0), torch.tensor([0, 0]), *ONES]
OP = Door(
    "schedule.Op", Op, lambda: {"kind": "F", "stage": 0, "microbatch": 0},
    {
        "kind": each(ValueError, "is of kind", ["", "f", "FF", "I", "BWW", "F "])
        + each(TypeError, "Op", [None, 0, True, b"F", ["F"], {"F"}, Odd()]),
        "stage": each(TypeError, "Op", WHOLES) + each(ValueError, "stage", [-1, 1, 10**30]),
        "microbatch": each(TypeError, "Op", WHOLES) + each(ValueError, "", [-1, 1, 10**30]),
    },
    call=op, told=[Schedule, check],
)
ROWS: list[Any] = [None, 1, "0F0", b"0F0", [1], ["0F0"], [["0F0"]], [[b"0F0"]], [[0]], [[None]], [[("F", 0)]],
                   [[("F", 0, 0, 0)]], [Op("F", 0, 0)], [None], {0: [Op("F", 0, 0)]}, [{Op("F", 0, 0): 1}],
                   torch.ones(1, 1, 3), Odd(),
                   build("1f1b", 1, 1)]
PLACEMENT: list[Any] = [None, 0, "0", b"0", ["0"], [0.0], [True], [None], {0: 0}, {0}, torch.tensor(0), Odd()]
SCHEDULE = Door(
    "schedule.Schedule", Schedule, lambda: {"rows": [[Op("F", 0, 0), Op("BW", 0, 0)]], "placement": [0]},
    {
        "rows": each(TypeError, "rows", ROWS),
        "placement": each(TypeError, "placement", PLACEMENT),
        "name": each(TypeError, "name", [None, *UNTEXT]),
    },
)
TILING = Door(
    "schedule.Tiling", Tiling,
    lambda: {**SCHEDULE.right(), "starts": [[0, 1]], "costs": Costs()},
    {
        **SCHEDULE.wrong,
        "starts": each(TypeError, "starts", [None, 0, "01", b"01", ["01"], [["0", "1"]], [[None, 1]], [[0, True]],
                                             [0, 1], {0: 1}, Odd()])
        + each(ValueError, "starts", [[[]], [[0]], [[0, 1, 2]], [[0, 1], []], [[0, math.nan]]]),
        "costs": [*COSTS, *each(TypeError, "costs", [None])],
    },
)
REORDER = Door(
    "schedule.Tiling.reorder", Tiling.reorder, lambda: {"memory": 1},
    {"memory": no_real("memory=", error=ValueError)[:-5] + each(ValueError, "memory=", [-1, math.nan])},
    on=lambda: block().repeat(2),
)


def block(**options: Any) -> BuildingBlock:
    """Of one stage."""
    given: dict[str, Any] = {"ops": [BlockOp("F", 0, 0), BlockOp("BW", 0, 2)], "placement": [0], "interval": 4}
    return BuildingBlock(**(given | options))


BLOCK = Door(
    "schedule.BuildingBlock", BuildingBlock,
    lambda: {"ops": [BlockOp("F", 0, 0), BlockOp("BW", 0, 2)], "placement": [0], "interval": 4},
    {
        "ops": each(TypeError, "ops", [None, 1, "0F0", b"0F0", [1], ["0F0"], [None], [("F", 0, 0)],
                                             [Op("F", 0, 0)], {0: BlockOp("F", 0, 0)}, BlockOp("F", 0, 0), Odd()]),
        "placement": each(TypeError, "placement", PLACEMENT) + each(ValueError, "placement", [[-1], [10**9], [10**30]]),
        "interval": each(ValueError, "interval=", [None, *UNREAL, 0, -1, math.nan, math.inf, 10**400]),
        "costs": COSTS,
    },
)
PASS = Door(
    "schedule.BlockOp", BlockOp, lambda: {"kind": "F", "stage": 0, "start": 0},
    {
        "kind": OP.wrong["kind"][:0] + each(ValueError, "is an op of the block", ["", "f", "I", "F "])
        + each(TypeError, "BlockOp", [None, 0, True, b"F", ["F"], Odd()]),
        "stage": each(TypeError, "BlockOp", WHOLES) + each(ValueError, "stage", [-1, 1, 10**30]),
        "start": each(TypeError, "BlockOp", [None, "0", b"0", True, 2j, [0], torch.tensor([0.0]), *ONES])
        + each(ValueError, "start", [math.nan, math.inf, -math.inf, 10**400]),
        "microbatch": each(TypeError, "BlockOp", WHOLES) + each(ValueError, "microbatch", [-1]),
    },
    call=lambda **given: block(ops=[BlockOp(**given), BlockOp("BW", 0, 2)]),
    told=[BuildingBlock],
)
REPEAT = Door(
    "schedule.BuildingBlock.repeat", BuildingBlock.repeat, lambda: {"chunks": 2},
    {"chunks": no_number("chunks=", error=ValueError) + HUGE},
    on=block,
)
TIME = each(ValueError, "=", [None, "1", b"1", "1 2", b"12", True, 2j, -1, math.nan, math.inf, 10**400, ["1"], [None],
                              [-1], [math.nan],
                              [True], {1: 2}, {1}, torch.tensor(2.0), Odd(), lambda: iter(["x"]), Costs()])
COST = Door(
    "schedule.Costs", Costs, lambda: {},
    {name: [Wrong(row.make, row.error, f"{name}=") for row in TIME]
     for name in ("forward", "backward_input", "backward_weight", "copy", "recompute")}
    | {"uncheckpointed": each(ValueError, "uncheckpointed=", [None, *UNWHOLE, -1])},
)
SIZE = Door(
    "schedule.Bytes", Bytes, lambda: {"forward": 1, "backward_input": 1, "backward_weight": 0},
    {name: [Wrong(row.make, row.error, f"{name}=") for row in TIME]
     for name in ("forward", "backward_input", "backward_weight")},
)
FOR_SCHEDULE = each(TypeError, "schedule", UNSCHEDULE)
OF_SCHEDULES: list[tuple[Any, Callable[..., Any]]] = [
    (Costs(), Costs.times), (Costs(recompute=1), Costs.again), (Costs(), Costs.hops), (Bytes(1, 1, 0), Bytes.changes),
]
TIMES, AGAIN, HOPS, CHANGES = (
    Door(f"schedule.{method.__qualname__}", method, lambda: {"schedule": build("1f1b", 2, 2)},
         {"schedule": FOR_SCHEDULE}, on=lambda whose=whose: whose)
    for whose, method in OF_SCHEDULES
)
SEARCH = Door(
    "schedule.search", search, lambda: {"devices": 2, "chunks": 2, "seconds": 0},
    {
        "devices": no_number("devices=", error=ValueError) + HUGE,
        "chunks": no_number("chunks=", error=ValueError) + HUGE,
        "costs": COSTS + each(ValueError, "", [Costs([1, 1, 1])]),
        "memory": each(ValueError, "memory=",
                       ["2", b"2", True, 2j, ["2", 2], [None, 2], [True, 2], 0, 0.5, -1, math.nan, [2], [2] * 3,
                                               [2, math.nan], [], {2: 2, 3: 3}, {2, 3}, torch.tensor(2.0), Odd()]),
        "stages_per_device": no_number("stages_per_device=", none=True, error=ValueError) + HUGE,
        "seconds": no_real("seconds=", error=ValueError),
        "span": each(ValueError, "span=", [None, *UNTEXT, "", "Makespan", "makspan"]),
    },
)


def timeline() -> Timeline:
    """One that was simulated."""
    return simulate(build("1f1b", 2, 2))


OTHERS = each(TypeError, "others", [None, "1f1b", 1, build("1f1b", 2, 2), Timeline, Costs(), [timeline()], Odd()])
SVG, HTML = (
    Door(f"schedule.{method.__qualname__}", method, lambda: {"path": "a.file"}, {"path": PATH, "others": OTHERS},
         on=timeline, call=lambda drawn, path, method=method, **others: method(drawn, path, *others.values()),
         plain=True)
    for method in (Timeline.to_svg, Timeline.to_html)
)
TRACE = Door(
    "schedule.Timeline.to_chrome_trace", Timeline.to_chrome_trace, lambda: {"path": "a.file"},
    {"path": PATH, "others": OTHERS,
     "unit": each(ValueError, "unit", [None, *UNREAL, 0, -1, math.nan, math.inf, 10**400])},
    on=timeline, call=lambda drawn, path, unit=1.0, **others: drawn.to_chrome_trace(path, *others.values(), unit=unit),
    plain=True,
)
CURVE = Door(
    "schedule.Timeline.curve", Timeline.curve, lambda: {"device": 0},
    {"device": each(ValueError, "device=", [*WHOLES, -1, 2, 10**30]), "bytes": BYTES},
    on=timeline,
)
TO_CSV = Door(
    "schedule.Schedule.to_csv", Schedule.to_csv, lambda: {"path": "a.file"}, {"path": PATH},
    on=lambda: build("1f1b", 2, 2), plain=True,
)
FROM_CSV = Door(
    "schedule.from_csv", from_csv, lambda: {"path": "schedule.csv"},
    {"path": PATH[:-1] + each(FileNotFoundError, "", ["absent.csv"]) + each(OSError, "too long", ["x" * 5000])},
    plain=True,
)
STEP = Door(
    "schedule.Step", Step, lambda: {"spans": timeline().spans, "copies": (), "memory": (None, None)},
    {
        "spans": each(TypeError, "spans",
                      [None, 1, "x", [1, 2], ["x", "y"], [[None], [None]], [[Op("F", 0, 0)]] * 2, Odd()])
        + each(ValueError, "", [(), timeline().spans[:1], timeline().spans * 2, [(), ()]]),
        "copies": each(TypeError, "copies", [None, 1, "x", [1], ["xy"], [(None, None)], Odd()]),
        "memory": each(TypeError, "memory", [None, 1, "xy", ["x", "y"], Odd()])
        + each(ValueError, "", [(), (None,), (1, 2, 3)]),
    },
    call=lambda **given: Recording(build("1f1b", 2, 2)).add(Step(**given)),
    told=[Recording.add],
)
RECORDING = Door(
    "schedule.Recording", Recording, lambda: {"schedule": build("1f1b", 2, 2)},
    {"schedule": FOR_SCHEDULE,
     "devices": each(TypeError, "devices",
                     [None, 1, "ab", b"ab", [1, 2], [None, None], [torch.device("cpu")] * 2, {"a": 1, "b": 2}, Odd()])
     + each(ValueError, "name", [["a"], ["a", "b", "c"]])},
)
ADD = Door(
    "schedule.Recording.add", Recording.add, lambda: {"step": Step(timeline().spans, (), (None, None))},
    {"step": each(TypeError, "step", [None, 1, "x", timeline(), timeline().spans, Step, Odd()])},
    on=lambda: Recording(build("1f1b", 2, 2)),
)


def planned(**fields: Any) -> Plan:
    """A plan for two stages."""
    given: dict[str, Any] = {
        "balance": (2, 2), "devices": ("cpu", "cpu"), "chunks": 2, "checkpoint": "never",
        "schedule": build("1f1b", 2, 2),
        "way": "1f1b", "dropin": False, "step_time": 1.0, "costs": Costs([1, 1], [1, 1], [1, 1]), "peak_bytes": (1, 1),
        "memory": (1e9, math.inf), "layers": ("0", "1", "2", "3"), "loss_fn": mse,
    }
    return Plan(**given | fields)


ARGUMENTS = Door(
    "Plan.arguments", Plan.arguments, lambda: {"loss_fn": mse},
    {"loss_fn": each(TypeError, "loss_fn", UNCALLABLE) + each(ValueError, "loss_fn", [None])},
    on=lambda: planned(loss_fn=None),
)
APPLIED = Door(
    "Plan.apply", Plan.apply, lambda: {"module": layers(), "loss_fn": mse},
    {"module": MODULE + each(ValueError, "layers", [lambda: layers()[:3], nn.Sequential()]),
     "loss_fn": ARGUMENTS.wrong["loss_fn"]},
    on=lambda: planned(loss_fn=None),
)


def recording(name: str = "1f1b", chunks: int = 2) -> Recording:
    """One step."""
    played = simulate(build(name, 2, chunks))
    made = Recording(played.schedule)
    made.add(Step(played.spans, (), (None, None)))
    return made


COMPARE = Door(
    "Plan.compare", Plan.compare, lambda: {"timeline": recording()},
    {"timeline": each(TypeError, "timeline", [None, 1, "x", timeline(), build("1f1b", 2, 2), Recording, Odd()])
     + each(ValueError, "recording", [lambda: recording("zb-v"), lambda: recording(chunks=3)])
     + each(RuntimeError, "nothing was recorded", [lambda: Recording(build("1f1b", 2, 2))])},
    on=planned,
)
TO_JSON, PAGE = (
    Door(f"Plan.{method.__name__}", method, lambda: {"path": "a.file"}, {"path": PATH},
         on=planned, plain=True)
    for method in (Plan.to_json, Plan.to_html)
)
FROM_JSON = Door(
    "Plan.from_json", Plan.from_json, lambda: {"path": "plan.json"},
    {"path": PATH[: len(UNPATH)] + each(FileNotFoundError, "", ["absent.json"]) + each(IsADirectoryError, "", ["."])},
    plain=True,
)


def across(**options: Any) -> Pipeline:
    """One process."""
    given: dict[str, Any] = ACROSS.right() | options
    return Pipeline(**given)


ROWS_OF = [
    *each(TypeError, "expected a tensor", ["x", 2, True, [x()], {"a": x()}, Odd(), numpy.ones((4, 3))]),
    *each(ValueError, "rows", [torch.ones(3, 3), torch.ones(0, 3), torch.tensor(1.0), torch.ones(6, 3)]),
]
STEPS, EVALUATE = (
    Door(f"distributed.Pipeline.{method.__name__}", method, lambda: {"input": x(), "target": x()},
         {"input": ROWS_OF + each(ValueError, "input", [None, (), lambda: (x(),)])
          + each(TypeError, "input 1", [lambda: (x(), "x")]),
          "target": ROWS_OF + each(ValueError, "target", [None]) + each(TypeError, "target", [lambda: (x(),)])},
         on=across)
    for method in (Pipeline.step, Pipeline.evaluate)
)
CLIP = Door(
    "distributed.Pipeline.clip_grad_norm_", Pipeline.clip_grad_norm_, lambda: {"max_norm": 1.0},
    {"max_norm": each(TypeError, "max_norm", [None, *UNREAL])
    + each(ValueError, "max_norm", [-1, math.nan, -math.inf])},
    on=across,
)
MODE = Door(
    "DeferredBatchNorm.train", DeferredBatchNorm.train, dict,
    {"mode": each(ValueError, "mode", [value for value in UNBOOL if not isinstance(value, int)])},
    on=lambda: DeferredBatchNorm(3),
)
