"""Training on devices beside the unwrapped module: what ``subjects`` has, in every way that streams are used."""
from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from splitpipe import SplitPipe
from splitpipe.core import stream
from splitpipe.deferral import stash
from tests.gpu.checks import callers, exact
from tests.helpers.covering import covering, pairs
from tests.helpers.twin import fresh
from tests.promise.test_transparency import AXES

from .log import settle, softcuda
from .subjects import SUBJECTS, mean

#: How many there are at least.
DEVICES = 4
#: Of a microbatch, where a case does not say how many rows the batch has.
ROWS = 2
STEPS = 2
#: What has been made for the paths between stages; what torch.compile is in; what is tried with eight stages.
PATHS = tuple(name for name in SUBJECTS if not name.startswith("layers"))
COMPILED = tuple(name for name in PATHS if "compiled" in name)
EIGHT = ("chain", "pairs", "skips", "module: carried")
#: Layers whose ops autocast treats alike on the CPU and on other devices.
CAST = ("layers: linear", "layers: linear 3d", "layers: lstm", "layers: torch.utils.checkpoint")
#: Options of a case, and what there is of each.
WAYS: dict[str, Sequence[Any]] = {
    "checkpoint": AXES["checkpoint"], "backward": AXES["backward"], "schedule": (None, "1f1b", "zb-h1", "zb-v"),
    "own": (False, True), "parts": (False, True), "given": ("there", "cpu", "pinned", "elsewhere"),
}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    subject: str
    stages: int
    chunks: int
    checkpoint: Any
    backward: Any
    schedule: str | None  # None: the drop-in.
    own: bool  # Whether the caller is on streams of its own, not on the default ones.
    parts: bool = False  # Whether the devices are streams, two on each device, of one class and the other.
    given: str = "there"  # Whether batch and target are where they belong, on the CPU, pinned, or elsewhere.
    rows: int | None = None  # Of the batch; None: ROWS a microbatch.
    autocast: bool = False  # To bfloat16.

    @property
    def double(self) -> bool:
        """Whether it is computed in doubles, where what differs in more than the last digits is no rounding."""
        return self.subject.startswith("layers") and not self.autocast

    @property
    def ranks(self) -> int:
        """How many devices it is for."""
        return self.stages // 2 if self.schedule == "zb-v" else self.stages

    @property
    def possible(self) -> bool:
        """What two stages share has to be on one device, as with parts of devices.

        With cuts, stages on streams share no parameter, and a part of the batch may be on a later stage's device, where
        by a schedule it may have no graph: it is given on the last device, which few stages leave alone.
        """
        if self.subject.startswith("module"):
            elsewhere = self.given != "elsewhere" or self.ranks < DEVICES and not self.parts
            return elsewhere and not (self.parts and self.subject == "module: tied")
        return self.subject != "ties" or self.parts and self.schedule != "zb-v"

    def devices(self) -> list[Any]:
        """Of SplitPipe: each another one, as far as there are some."""
        names = [f"cuda:{index % torch.cuda.device_count()}" for index in range(self.ranks)]
        classes: Any = torch.Stream, torch.cuda.Stream
        if self.parts:
            return [classes[index % 2](device=names[index // 2]) for index in range(self.ranks)]
        return names


def some(
    subjects: Sequence[str], *groups: Sequence[str], stages: int = 4, chunks: int = 3, **axes: Sequence[Any]
) -> Iterator[Case]:
    """Cases that have every combination of each group of options, and of each option and subject.

    ``axes`` has the values of an option where they are not all.
    """
    each = [["subject", option] for option in WAYS]
    for subject, *way in covering(
        {"subject": subjects, **WAYS, **axes}, [*groups, *each],
        lambda subject, **its: Case(subject, stages, chunks, **its).possible,
    ):
        yield Case(subject, stages, chunks, *way)


def layers(names: Sequence[str], autocast: bool = False) -> Iterator[Case]:
    """The transparency grid of layers: all sizes, checkpoint modes, engines and schedules."""
    axes: dict[str, Sequence[Any]] = {
        "name": names, "way": ((None, 3), ("1f1b", 3), ("zb-h1", 3), ("zb-v", 4)),
        **{name: WAYS[name] for name in ("checkpoint", "backward", "own", "given")},
        "sizes": ((7, 3),) if autocast else AXES["sizes"],
    }
    groups = [["name", "way"], ["name", "sizes"], ["name", "checkpoint", "backward"], ["way", "checkpoint", "backward"]]
    for name, (schedule, stages), *way, given, (rows, chunks) in covering(
        axes, [*groups, *pairs([*axes][1:])],
        lambda name, way, **_: way[0] is None or not name.endswith("reentrant"),  # Which a schedule refuses.
    ):
        yield Case(name, stages, chunks, way[0], way[1], schedule, way[2], given=given, rows=rows, autocast=autocast)


@lru_cache(None)
def cases() -> dict[str, list[Case]]:
    """All of them by subject: a path between stages with two, four and eight of them, a layer in the grid's ways.

    A path is seen with every schedule in every checkpoint mode; what is compiled only with each option once.
    """
    plain, engine = [name for name in PATHS if name not in COMPILED], ["checkpoint", "backward", "schedule"]
    found: dict[str, list[Case]] = {name: [] for name in SUBJECTS}
    for case in (
        *some(plain, ["subject", "checkpoint", "schedule"], engine, *pairs([*WAYS])), *some(COMPILED),
        *some(PATHS, engine, stages=2), *some(EIGHT, engine[:2], stages=8, chunks=4),
        *layers([name for name in SUBJECTS if name not in PATHS]), *layers(CAST, autocast=True),
    ):
        found[case.subject].append(case)
    return found


class Outcome(NamedTuple):
    """What a case has shown."""

    hazards: list[str]  # Accesses to memory without an order, which the fake runtime finds.
    fault: str  # What differs from the unwrapped module.


def wrong(them: Iterable[Case]) -> dict[Case, Outcome]:
    """What is wrong with each."""
    return {case: found for case in them if any(found := run(case))}


def run(case: Case) -> Outcome:
    """Trains for some steps, as the unwrapped module is trained on the CPU."""
    with exact() if case.double else nullcontext(), warnings.catch_warnings():
        # Two stages with streams of their own use one weight, whose node has one stream; a layer on a stream of its own
        # has the transpose of its weight there, and the weight itself is the stage's.
        if case.subject == "ties" or case.subject.startswith("elsewhere"):
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        torch.manual_seed(0)
        subject = SUBJECTS[case.subject]
        module = subject.make(case.stages)
        batch = subject.value(case.chunks * ROWS if case.rows is None else case.rows)
        target = torch.randn(subject.rows(batch))
        options: dict[str, Any] = {
            **subject.borders(case.stages), "chunks": case.chunks, "checkpoint": case.checkpoint,
            "backward": case.backward, "devices": case.devices(), **subject.options,
        }
        if case.schedule is not None:
            options |= {"schedule": case.schedule, "loss_fn": mean}
        plain: nn.Module = copy.deepcopy(module)
        first = last = torch.device("cpu")
        if subject.measure == "cpu":
            plain = SplitPipe(plain, **{**options, "devices": ["cpu"] * case.ranks})
        elif subject.measure == "never":
            plain = SplitPipe(plain, **{**options, "checkpoint": "never"})
            first, last = plain.devices[0], plain.devices[-1]
        torch.manual_seed(1)
        model = SplitPipe(module, **options)
        # In some cases nothing is little, as in large models, and more W runs during B.
        little = 0 if case.own or case.rows is not None else stash._LITTLE
        with (
            callers(torch.cuda.device_count()) if case.own else nullcontext([]) as others,
            mock.patch.object(stash, "_LITTLE", little),
        ):
            settle()
            steps = _steps(case, model, batch, _put(target, case.given, model.devices[-1]), model.devices[0], others)
            hazards = softcuda.hazards() if softcuda is not None else []
        torch.manual_seed(1)
        # oneDNN has bfloat16's LSTM for some CPUs only; torch's own is everywhere.
        with torch.backends.mkldnn.flags(enabled=False) if case.autocast else nullcontext():
            expected = _steps(case, plain, batch, target.to(last), first)
        close: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}
        if case.autocast:
            close = {"rtol": 0.02, "atol": 0.002}
        elif case.double and all(p.dtype != torch.float32 for p in module.parameters()):
            close = {}  # No layer rounds more than doubles do, which each device does its own way.
        try:
            torch.testing.assert_close(steps, expected, check_device=False, **close)
        except AssertionError as error:
            return Outcome(hazards, str(error))
        return Outcome(hazards, "")


def _put(x: Tensor, given: str, home: torch.device) -> Tensor:
    """The tensor where it comes from."""
    if given in ("cpu", "pinned"):
        return x.detach().cpu().pin_memory() if given == "pinned" else x.cpu()
    return x.to(home if given == "there" else f"{home.type}:{torch.accelerator.device_count() - 1}")


def _steps(
    case: Case, model: nn.Module, batch: Any, target: Tensor, device: torch.device,
    others: Sequence[stream.Stream] | None = None,
) -> list[dict[str, Tensor | None]]:
    """Trains the pipeline or what it is compared with; gives all there is after each step.

    On ``others`` somebody else computes meanwhile; None: of what is compared with, whose batch is on the device.
    """
    given = "there" if others is None else case.given
    scheduled = isinstance(model, SplitPipe) and case.schedule is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[dict[str, Tensor | None]] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        leaves = tree_map(
            lambda x: _put(x, given, device).detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x,
            fresh(batch) if SUBJECTS[case.subject].differentiable else batch,
        )
        # No leaves, unless they are copied: the first layer may work in place.
        value = leaves if given == "pinned" else tree_map(
            lambda x: x * 1 if isinstance(x, Tensor) and x.requires_grad else x, leaves
        )
        with torch.autocast(device.type, dtype=torch.bfloat16) if case.autocast else nullcontext():
            loss = model(value, target=target) if scheduled else mean(model(value), target)
        for other in others or ():  # What others do has nothing to do with the caller's memory.
            with stream.use(other):
                torch.ones(1, device=other.device)
        loss.backward()
        told: dict[str, Tensor | None] = {"the loss": loss.detach()}
        own = [leaf for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor)]
        told |= {f"the gradient of input {number}": leaf.grad for number, leaf in enumerate(own)}
        told |= {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}
        optimizer.step()
        told |= model.state_dict()
        # Copies, as the next step writes to them; on the device, as the host would wait for one that leaves it.
        found.append({name: x if x is None else x.detach().clone() for name, x in told.items()})
        del loss
    return found
