"""Training on devices beside the unwrapped module: what ``subjects`` has, in every way that streams are used."""
from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from splitpipe import SplitPipe
from splitpipe.core import stream
from tests.gpu.checks import callers, exact
from tests.helpers.covering import covering
from tests.helpers.twin import descend, fresh

from .log import settle, softcuda
from .subjects import SUBJECTS, mean

#: How many there are at least.
DEVICES = 4
#: Of a microbatch, where a case does not say how many rows the batch has.
ROWS = 2
STEPS = 2
#: What has been made for the paths between stages; what torch.compile is in.
PATHS = tuple(name for name in SUBJECTS if not name.startswith("layers"))
COMPILED = tuple(name for name in PATHS if "compiled" in name)
#: Rows and microbatches of layers.
SIZES = ((5, 2), (7, 3), (3, 8))
#: Options of a case, and what there is of each.
WAYS: dict[str, Sequence[Any]] = {"checkpoint": ("always", "except_last", "never"), "backward": ("split", "autograd"),
                                  "schedule": (None, "1f1b", "zb-h1", "zb-v"), "own": (False, True, "forward"),
                                  "parts": (False, True), "given": ("there", "cpu", "pinned", "elsewhere")}


@dataclass(frozen=True)
class Case:
    """One way to train."""

    subject: str
    stages: int
    chunks: int
    checkpoint: Any
    backward: Any
    schedule: str | None  # None: the drop-in.
    own: Any  # Whether the caller is on streams of its own, not on the default ones; "forward": for backward, it is.
    parts: bool = False  # Whether the devices are streams, two on each device, of one class and the other.
    given: str = "there"  # Whether batch and target are where they belong, on the CPU, pinned, or elsewhere.
    rows: int | None = None  # Of the batch; None: ROWS a microbatch.

    @property
    def double(self) -> bool:
        """Whether it is computed in doubles, where what differs in more than the last digits is no rounding."""
        return self.subject.startswith("layers")

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
        if self.subject in COMPILED and self.backward == "autograd" and self.schedule is None:
            return False  # Autograd's device threads would enter one context together: torch's own error.
        if self.subject == "module: forces":  # What there are second derivatives for.
            own = self.backward, self.schedule, self.checkpoint, self.parts
            return own == ("autograd", None, "never", False) and self.given != "elsewhere"
        if self.subject.startswith("module"):
            return self.given != "elsewhere" or self.ranks < DEVICES and not self.parts
        return self.subject != "ties" or self.parts and self.schedule != "zb-v"

    def devices(self) -> list[Any]:
        """Of SplitPipe: each another one, as far as there are some."""
        names = [f"cuda:{index % torch.cuda.device_count()}" for index in range(self.ranks)]
        classes: Any = torch.Stream, torch.cuda.Stream
        if self.parts:
            return [classes[index % 2](device=names[index // 2]) for index in range(self.ranks)]
        return names


def cases(subject: str) -> Iterator[Case]:
    """The ways to train a subject: a path between four stages and between two, a layer between others.

    Each has every value of each option, and every schedule in each checkpoint mode and with each backward (of a layer,
    every checkpoint mode with each backward).
    Which values come together is another for each subject.
    """
    turn = [*SUBJECTS].index(subject)
    ways = {name: (*its[turn % len(its):], *its[:turn % len(its)]) for name, its in WAYS.items()}
    each = [[option] for option in WAYS]
    if subject in PATHS:
        groups = each if subject in COMPILED else [*each, ["checkpoint", "schedule"], ["backward", "schedule"]]
        for stages in 4, 2:
            possible = partial(_possible, subject, stages)
            for way in covering(ways, groups if stages == 4 else each, possible):
                yield Case(subject, stages, 3, *way)
    else:
        alone = {**ways, "parts": (False,)}
        for number, way in enumerate(covering(alone, [*each, ["checkpoint", "backward"]])):
            rows, chunks = SIZES[(turn + number) % len(SIZES)]
            yield Case(subject, 4 if "zb-v" in way else 3, chunks, *way, rows=rows)


def _possible(subject: str, stages: int, **way: Any) -> bool:
    return Case(subject, stages, 3, **way).possible


class Outcome(NamedTuple):
    """What a case has shown."""

    hazards: list[str]  # Accesses to memory without an order, which the fake runtime finds.
    fault: str  # What differs from the unwrapped module.


def wrong(subject: str) -> dict[Case, Outcome]:
    """What is wrong with a subject, by how it was trained."""
    return {case: found for case in cases(subject) if any(found := run(case))}


def run(case: Case) -> Outcome:
    """Trains for some steps, as the unwrapped module is trained on the CPU."""
    with exact() if case.double else nullcontext(), warnings.catch_warnings():
        # A weight's node has its stage's stream, and gradients are handed over on the caller's; a layer on a stream of
        # its own has the transpose of its weight there, and the weight itself is the stage's.
        if case.subject == "ties" or case.subject.startswith("elsewhere") or case.parts or case.own == "forward":
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        torch.manual_seed(0)
        subject = SUBJECTS[case.subject]
        module = subject.make(case.stages)
        batch = subject.value(case.chunks * ROWS if case.rows is None else case.rows)
        target = torch.randn(subject.rows(batch))
        options: dict[str, Any] = {**subject.borders(case.stages), "chunks": case.chunks, "checkpoint": case.checkpoint,
                                   "backward": case.backward, "devices": case.devices(), **subject.options}
        if case.own or case.rows is not None:
            options["stash_limit"] = 0  # As in large models, W runs during B.
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
        with callers(torch.cuda.device_count()) if case.own else nullcontext([]) as others:
            settle()
            steps = _steps(case, model, batch, _put(target, case.given, model.devices[-1]), model.devices[0], others)
            hazards = softcuda.hazards() if softcuda is not None else []
        torch.manual_seed(1)
        expected = _steps(case, plain, batch, target.to(last), first)
        close: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}
        if case.double and all(p.dtype != torch.float32 for p in module.parameters()):
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


def _steps(case: Case, model: nn.Module, batch: Any, target: Tensor, device: torch.device,
           others: Sequence[stream.Stream] | None = None) -> list[dict[str, Tensor | None]]:
    """Trains the pipeline or what it is compared with; gives all there is after each step.

    On ``others`` somebody else computes meanwhile; None: of what is compared with, whose batch is on the device.
    """
    given = "there" if others is None else case.given
    scheduled = isinstance(model, SplitPipe) and case.schedule is not None
    found: list[dict[str, Tensor | None]] = []
    for _ in range(STEPS):
        leaves = tree_map(
            lambda x: _put(x, given, device).detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x,
            fresh(batch) if SUBJECTS[case.subject].differentiable else batch,
        )
        # No leaves, unless they are copied: the first layer may work in place.
        value = leaves if given == "pinned" else tree_map(
            lambda x: x * 1 if isinstance(x, Tensor) and x.requires_grad else x, leaves
        )
        loss = model(value, target=target) if scheduled else mean(model(value), target)
        for other in others or ():  # What others do has nothing to do with the caller's memory.
            with stream.use(other):
                torch.ones(1, device=other.device)
        back = others if others and case.own == "forward" else []
        with stream.use(*back):
            loss.backward()
        for other in back:
            stream.wait(stream.current(other.device), other)
        told: dict[str, Tensor | None] = {"the loss": loss.detach()}
        own = [leaf for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor)]
        told |= {f"the gradient of input {number}": leaf.grad for number, leaf in enumerate(own)}
        told |= {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}
        descend(model)
        told |= model.state_dict()
        # Copies, as the next step writes to them; on the device, as the host would wait for one that leaves it.
        found.append({name: x if x is None else x.detach().clone() for name, x in told.items()})
        del loss
    return found
