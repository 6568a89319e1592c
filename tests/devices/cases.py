"""Training on devices beside the unwrapped module: what ``subjects`` has, in every way that streams are used."""
from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from splitpipe import SplitPipe
from splitpipe.core import stream
from tests.helpers.covering import covering, pairs
from tests.helpers.twin import fresh

from .log import settle, softcuda
from .subjects import SUBJECTS, mean

#: How many there are at least.
DEVICES = 4
#: Of a microbatch, where a case does not say how many rows the batch has.
ROWS = 2
STEPS = 2
#: What has been made for the paths between stages.
PATHS = tuple(name for name in SUBJECTS if not name.startswith("layers"))
#: Those that torch.compile is in.
COMPILED = tuple(name for name in PATHS if "compiled" in name)
#: Those that are tried with eight stages.
EIGHT = ("chain", "pairs", "skips", "module: carried")
#: Layers whose ops autocast treats alike on the CPU and on other devices.
CAST = ("layers: linear", "layers: linear 3d", "layers: lstm", "layers: torch.utils.checkpoint")
#: How the grid's layers are run: rows of the batch and chunks.
SIZES = ((4, 1), (4, 4), (5, 2), (7, 3), (3, 8), (1, 4))
#: Options of a case, and what there is of each.
WAYS: dict[str, Sequence[Any]] = {
    "checkpoint": ("never", "except_last", "always"), "backward": ("split", "autograd"),
    "schedule": (None, "1f1b", "zb-h1", "zb-v"), "own": (False, True), "parts": (False, True),
    "given": ("there", "cpu", "pinned", "elsewhere"),
}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        subject: its name.
        stages: number of them.
        chunks: microbatches.
        checkpoint: of SplitPipe.
        backward: of SplitPipe.
        schedule: its name; None: the drop-in.
        own: whether the caller is on streams of its own, not on the default ones.
        parts: whether the devices are streams, two on each device, of one class and the other.
        given: where the batch and the target come from: where they belong, the CPU, its pinned memory, another device.
        rows: of the batch; None: so many a microbatch.
        autocast: whether the module runs under it, to bfloat16.
    """

    subject: str
    stages: int
    chunks: int
    checkpoint: Any
    backward: Any
    schedule: str | None
    own: bool
    parts: bool = False
    given: str = "there"
    rows: int | None = None
    autocast: bool = False

    def __str__(self) -> str:
        how = self.schedule or "drop-in"
        return (
            f"{self.subject}, {self.stages} stages, {self.chunks} chunks, {self.checkpoint}, {self.backward}, {how}"
            f"{', own streams' if self.own else ''}{', parts of devices' if self.parts else ''}"
            f"{'' if self.given == 'there' else f', given {self.given}'}"
            f"{'' if self.rows is None else f', {self.rows} rows'}{', autocast' if self.autocast else ''}"
        )

    @property
    def double(self) -> bool:
        """Whether it is computed in doubles, where what differs in more than the last digits is no rounding."""
        return self.subject.startswith("layers") and not self.autocast

    @property
    def ranks(self) -> int:
        """How many devices it is for."""
        return self.stages // 2 if self.schedule == "zb-v" else self.stages

    def devices(self) -> list[Any]:
        """Of SplitPipe: each another one, as far as there are some."""
        names = [f"cuda:{index % torch.cuda.device_count()}" for index in range(self.ranks)]
        if self.parts:
            classes: Any = torch.Stream, torch.cuda.Stream
            return [classes[index % 2](device=names[index // 2]) for index in range(self.ranks)]
        return names

    def batch(self) -> Any:
        """Its input."""
        return SUBJECTS[self.subject].value(self.chunks * ROWS if self.rows is None else self.rows)


def grid(
    stages: Sequence[int] = (2, 4), chunks: Sequence[int] = (1, 3, 4),
    subjects: Sequence[str] = ("chain", "pairs", "skips"),
) -> Iterator[Case]:
    """All cases with these numbers."""
    ways = product(subjects, stages, chunks, *WAYS.values())
    return (case for way in ways if possible(case := Case(*way)))


def some(
    subjects: Sequence[str], *groups: Sequence[str], stages: int = 4, chunks: int = 3, **axes: Sequence[Any]
) -> Iterator[Case]:
    """Cases that have every combination of each group of options, and of each option and subject.

    Args:
        subjects: their names.
        groups: names of options, and "subject".
        stages: number of them.
        chunks: microbatches.
        axes: values of an option, if they are not all.
    """
    values = {"subject": subjects, **WAYS, **axes}

    def allowed(subject: str, **way: Any) -> bool:
        return possible(Case(subject, stages, chunks, **way))

    each = [["subject", option] for option in WAYS]
    for subject, *way in covering(values, [*groups, *each], allowed):
        yield Case(subject, stages, chunks, *way)


def paths(few: bool = False) -> Iterator[Case]:
    """Each of the modules made for the paths between stages.

    Args:
        few: whether only each option once; else each with every schedule in every checkpoint mode.
    """
    if few:
        return some(PATHS)
    return some(PATHS, ["subject", "checkpoint", "schedule"], ["checkpoint", "backward", "schedule"], *pairs([*WAYS]))


@lru_cache(None)
def _every(layer: bool, few: bool) -> tuple[Case, ...]:
    if layer:
        return (*layers(),)
    return (
        *paths(few), *some(PATHS, ["checkpoint", "backward", "schedule"], stages=2),
        *some(EIGHT, ["checkpoint", "backward"], stages=8, chunks=4),
    )


def of(subject: str, few: bool = False) -> list[Case]:
    """The cases of a path between stages, with two, four and eight stages, or of a layer.

    Args:
        subject: its name.
        few: whether only each option once, of a path.
    """
    return [case for case in _every(subject.startswith("layers"), few) if case.subject == subject]


def possible(case: Case) -> bool:
    """What two stages share has to be on one device, as it is with parts of devices, which modules with cuts refuse.

    These let a part of the batch be on a later stage's device, where by a schedule it may have no graph: it is given
    on the last device, which few stages leave alone.
    """
    if case.subject.startswith("module"):
        return not case.parts and (case.given != "elsewhere" or case.ranks < DEVICES)
    return case.subject != "ties" or case.parts and case.schedule != "zb-v"


def layers(whole: bool = False) -> Iterator[Case]:
    """The transparency grid: all layers, checkpoint modes, engines and schedules.

    Args:
        whole: whether each is run in all sizes, with the caller on both kinds of streams.
    """
    axes: dict[str, Sequence[Any]] = {
        "name": [name for name in SUBJECTS if name.startswith("layers")],
        "way": ((None, 3), ("1f1b", 3), ("zb-h1", 3), ("zb-v", 4)),
        **{name: WAYS[name] for name in ("checkpoint", "backward", "own", "given")}, "sizes": SIZES,
    }
    others = [name for name in axes if name != "name"]
    groups: list[Sequence[str]] = [list(axes)]
    if not whole:
        groups = [["name", "way"], ["name", "sizes"], ["name", "checkpoint", "backward"], *pairs(others)]
    for name, (schedule, stages), checkpoint, backward, own, given, (rows, chunks) in covering(axes, groups, _taken):
        yield Case(name, stages, chunks, checkpoint, backward, schedule, own, given=given, rows=rows)


def _taken(name: str, way: tuple[str | None, int], **_: Any) -> bool:
    """Whether it is no reentrant checkpoint in a schedule, which is refused."""
    return way[0] is None or not name.endswith("reentrant")


def cast() -> Iterator[Case]:
    """Some layers under autocast."""
    axes: dict[str, Sequence[Any]] = {
        "name": CAST, "way": ((None, 3), ("zb-h1", 3), ("zb-v", 4)), "checkpoint": ("never", "always"),
        "backward": WAYS["backward"], "own": WAYS["own"],
    }
    for name, (schedule, stages), *options in covering(axes, [["way", "checkpoint", "backward"], *pairs([*axes])]):
        checkpoint, backward, own = options
        yield Case(name, stages, 3, checkpoint, backward, schedule, own, rows=7, autocast=True)


@dataclass(frozen=True)
class Outcome:
    """What a case has shown.

    Attributes:
        hazards: accesses to memory without an order, which the fake runtime finds.
        faults: what differs from the unwrapped module.
    """

    hazards: list[str]
    faults: list[str]


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _streams(devices: Sequence[torch.device]) -> Iterator[list[torch.Stream]]:
    """The caller on streams of its own; the default ones."""
    before = [torch.accelerator.current_stream(device) for device in dict.fromkeys(devices)]
    try:
        for each in before:
            torch.accelerator.set_stream(torch.Stream(device=each.device))
        torch.accelerator.set_device_index(0)
        yield before
    finally:
        for each in before:
            torch.accelerator.synchronize(each.device)  # Others look at what was computed there.
            torch.accelerator.set_stream(each)
        torch.accelerator.set_device_index(0)


def wrong(them: Iterable[Case]) -> dict[str, list[str]]:
    """What is wrong with each."""
    found = {str(case): [*out.hazards, *out.faults] for case in them for out in [run(case)]}
    return {case: its for case, its in found.items() if its}


def run(case: Case) -> Outcome:
    """Trains for some steps, as the unwrapped module is trained on the CPU."""
    with _dtype(torch.float64 if case.double else torch.float32), warnings.catch_warnings():
        # Two stages with streams of their own use one weight, whose node has one stream; a layer on a stream of its own
        # has the transpose of its weight there, and the weight itself is the stage's.
        if case.subject == "ties" or case.subject.startswith("elsewhere"):
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        torch.manual_seed(0)
        subject = SUBJECTS[case.subject]
        module = subject.make(case.stages)
        batch = case.batch()
        target = torch.randn(subject.rows(batch))
        scheduled: dict[str, Any] = {} if case.schedule is None else {"schedule": case.schedule, "loss_fn": mean}
        options: dict[str, Any] = {
            **subject.borders(case.stages), "chunks": case.chunks, "checkpoint": case.checkpoint,
            "backward": case.backward, **scheduled, **dict(subject.options),
        }
        plain: nn.Module = copy.deepcopy(module)
        at = torch.device("cpu")
        if subject.measure == "cpu":
            plain = SplitPipe(plain, **options, devices=["cpu"] * len(case.devices()))
        elif subject.measure == "never":
            plain = SplitPipe(plain, **{**options, "checkpoint": "never"}, devices=case.devices())
            at = plain.devices[0]
        torch.manual_seed(1)
        model = SplitPipe(module, **options, devices=case.devices())
        with _streams(model.devices) if case.own else nullcontext([]) as others:
            settle()
            last = _put(target, case.given, model.devices[-1])
            steps = _steps(case, model, batch, last, model.devices[0], case.given, others)
            found = softcuda.hazards() if softcuda is not None else []
        torch.manual_seed(1)
        there = plain.devices[-1] if isinstance(plain, SplitPipe) else at
        # oneDNN has bfloat16's LSTM for some CPUs only; torch's own is everywhere.
        with torch.backends.mkldnn.flags(enabled=False) if case.autocast else nullcontext():
            expected = _steps(case, plain, batch, target.to(there), at, "there", [])
        exact = case.double and all(p.dtype != torch.float32 for p in module.parameters())
        faults = [
            f"{what} of step {number}" for number, (one, other) in enumerate(zip(steps, expected))
            for what in one if not _same(one[what], other[what], case, exact)
        ]
        return Outcome(found, faults)


def _put(x: Tensor, given: str, home: torch.device) -> Tensor:
    """The tensor where it comes from."""
    if given in ("cpu", "pinned"):
        return x.detach().cpu().pin_memory() if given == "pinned" else x.cpu()
    return x.to(home if given == "there" else f"{home.type}:{torch.accelerator.device_count() - 1}")


def _same(found: Tensor | None, expected: Tensor | None, case: Case, exact: bool) -> bool:
    """Whether they are close; ``exact``: no layer rounds more than doubles do, which each device does its own way."""
    if found is None or expected is None:
        return found is expected
    close: dict[str, float] = {"rtol": 0.02, "atol": 0.002} if case.autocast else {}
    if not exact and not case.autocast:
        close = {"rtol": 1e-4, "atol": 1e-5}
    try:
        torch.testing.assert_close(found.cpu(), expected.cpu(), **close)
    except AssertionError:
        return False
    return True


def _leaf(x: Tensor, like: Tensor) -> Tensor:
    return x.detach().requires_grad_(like.requires_grad)


def _steps(
    case: Case, model: nn.Module, batch: Any, target: Tensor, device: torch.device, given: str,
    others: Sequence[torch.Stream],
) -> list[dict[str, Tensor | None]]:
    """Trains; gives all there is after each step."""
    scheduled = isinstance(model, SplitPipe) and case.schedule is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[dict[str, Tensor | None]] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        own = fresh(batch) if SUBJECTS[case.subject].differentiable else batch
        leaves = tree_map(lambda x: _leaf(_put(x, given, device), x) if isinstance(x, Tensor) else x, own)
        # No leaves, unless they are copied: the first layer may work in place.
        value = leaves if given == "pinned" else tree_map(
            lambda x: x * 1 if isinstance(x, Tensor) and x.requires_grad else x, leaves
        )
        cast: AbstractContextManager[object] = nullcontext()
        if case.autocast:
            cast = torch.autocast(device.type, dtype=torch.bfloat16)
        with cast:
            loss = model(value, target=target) if scheduled else mean(model(value), target)
        for other in others:  # What others do has nothing to do with the caller's memory.
            with stream.use(other):
                torch.ones(1, device=other.device)
        loss.backward()
        told: dict[str, Tensor | None] = {"the loss": loss.detach()}
        for number, leaf in enumerate(tree_leaves(leaves)):
            told[f"the gradient of input {number}"] = leaf.grad if isinstance(leaf, Tensor) else None
        told |= {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}
        optimizer.step()
        found.append({**told, **model.state_dict()})
        # Copies, as the next step writes to them; on the device, as the host would wait for one that leaves it.
        found[-1] = {name: x if x is None else x.detach().clone() for name, x in found[-1].items()}
        del loss
    return found
