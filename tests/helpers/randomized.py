"""Random cases: a module, how it is cut, and what it goes through; both sides of it run, and compared in everything.

A case is a plain value: what hypothesis prints of a failing one can be pasted as an @example. Every value of a field
goes with every other, so that a case shrinks far.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from splitpipe import SplitPipe, schedule
from tests.helpers import randomized_models as models
from tests.helpers.scheduled import stages_of
from tests.helpers.twin import assert_same

STEPS = ("train", "accumulate", "eval", "no grad", "eval grad", "thrown", "retained")
SCHEDULES = (*[""] * 5, *schedule.names())


@dataclass(frozen=True)
class Layer:
    """A layer: its kind, which of its parameters are frozen, and the layers that it contains."""

    kind: str
    frozen: str = ""
    inside: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Skip:
    """What the layer ``start`` gives is added to what the layer ``end`` is given."""

    start: int
    end: int


@dataclass(frozen=True)
class Step:
    """One batch; its kind is one of STEPS: with retained the graph is differentiated twice."""

    kind: str = "train"
    rows: int = 4


@dataclass(frozen=True)
class Act:
    """A statement of a forward: its kind, and which block or kept value it is about."""

    kind: str
    which: int = 0


@dataclass(frozen=True)
class Case:
    """A module, how it is cut, and what it goes through.

    Without ``acts`` it is an nn.Sequential of the layers, cut by a balance; with them a module whose own forward calls
    the layers as blocks, cut by names. The forward computes its loss itself, unless its output is a tuple.
    """

    layers: tuple[Layer, ...]
    balance: tuple[int, ...] = ()
    acts: tuple[Act, ...] = ()
    cuts: tuple[str, ...] = ()
    schedule: str = ""
    chunks: int = 1
    steps: tuple[Step, ...] = (Step(),)
    checkpoint: str | None = None
    backward: str = "split"
    stash_limit: int | None = None
    skips: tuple[Skip, ...] = ()
    input_grad: bool = False
    deferred: bool = False
    hooks: bool = False
    seed: int = 0
    output: str = "dict"

    @property
    def inside(self) -> bool:
        """Whether the loss is a function of output and target."""
        return not self.acts or self.output == "tuple"


def stages_per_device(name: str) -> int:
    return stages_of(name) if name else 1


@st.composite
def _layer(draw: Any, simple: tuple[str, ...], depth: int = 1) -> Layer:
    kind = draw(st.sampled_from(simple + models.CONTAINERS * bool(depth)))
    inside: tuple[Layer, ...] = ()
    if kind in models.CONTAINERS:
        within = tuple(k for k in simple if kind != "checkpointed" or k not in models.IN_PLACE + models.NOT_TWICE)
        inside = tuple(draw(st.lists(_layer(within, depth - 1), min_size=1, max_size=3)))
    return Layer(kind, draw(st.sampled_from(["", "", "", "first", "all"])), inside)


def borders(acts: Sequence[Act], blocks: int) -> list[str]:
    """The names of blocks that may be cuts, in the order of their first calls.

    A block that only some microbatches call may be one if it is called once: its first call comes at one place.
    """
    calls: dict[str, int] = {}
    unsure: set[str] = set()
    for act in acts:
        if act.kind == "part":
            names = ["part.blocks.0", "part.blocks.1"]
        else:
            names = [f"blocks.{act.which % blocks}"] if act.kind in models.CALLS + models.SOMETIMES else []
        for name in names:
            calls[name] = calls.get(name, 0) + 1
        unsure.update(names if act.kind in models.SOMETIMES else [])
    return [name for name in calls if name not in unsure or calls[name] == 1]


def _common(draw: Any) -> dict[str, Any]:
    """What both kinds of cases have."""
    step = st.builds(Step, st.sampled_from(STEPS), st.integers(1, 9))
    return {"chunks": draw(st.integers(1, 6)), "steps": tuple(draw(st.lists(step, min_size=1, max_size=4))),
            "checkpoint": draw(st.sampled_from([None, "always", "except_last", "never"])),
            "backward": draw(st.sampled_from(["split", "autograd"])),
            "stash_limit": draw(st.sampled_from([None, 0, 300])), "input_grad": draw(st.booleans()),
            "deferred": draw(st.booleans()), "hooks": draw(st.booleans()), "seed": draw(st.integers(0, 3))}


@st.composite
def chains(draw: Any, more: tuple[str, ...] = ()) -> Case:
    """Any nn.Sequential, and any balance of it; ``more``: kinds of layers that are not there otherwise."""
    name = draw(st.sampled_from(SCHEDULES))
    each = stages_per_device(name)
    kind = _layer(models.SIMPLE + more) | st.sampled_from([*models.PACKS, "merge"]).map(Layer)
    layers = draw(st.lists(kind, min_size=each, max_size=max(7, each + 1)))
    stages = each * draw(st.integers(1, min(3, len(layers) // each)))
    cuts = draw(st.sets(st.integers(1, max(1, len(layers) - 1)), min_size=stages - 1, max_size=stages - 1))
    ends, last = [*sorted(cuts), len(layers)], len(layers) - 1
    skip = st.integers(0, max(0, last - 1)).flatmap(lambda k: st.builds(Skip, st.just(k), st.integers(k + 1, last)))
    return Case(tuple(layers), tuple(end - start for start, end in zip([0, *ends], ends)), schedule=name,
                skips=tuple(draw(st.lists(skip, max_size=3)) if last else []), **_common(draw))


@st.composite
def forwards(draw: Any, more: tuple[str, ...] = ()) -> Case:
    """Any module with a forward of its own, and any cuts of it; ``more``: as of ``chains``."""
    blocks = draw(st.lists(_layer(models.SIMPLE + more), min_size=1, max_size=6))
    act = st.builds(Act, st.sampled_from([*models.CALLS * 3, *models.SOMETIMES, *models.BETWEEN]), st.integers(0, 5))
    acts = draw(st.lists(act, min_size=2, max_size=14))
    possible = borders(acts, len(blocks))
    name = draw(st.sampled_from([each for each in SCHEDULES if stages_per_device(each) <= len(possible) + 1]))
    each = stages_per_device(name)
    count = each * draw(st.integers(1, min(4, (len(possible) + 1) // each))) - 1
    chosen = draw(st.sets(st.sampled_from(possible), min_size=count, max_size=count)) if count else set()
    return Case(tuple(blocks), acts=tuple(acts), cuts=tuple(border for border in possible if border in chosen),
                schedule=name, output=draw(st.sampled_from(["dict", "dataclass", "tuple"])), **_common(draw))


def module_of(case: Case, reference: bool = False, plain: bool = False) -> nn.Module:
    """The module of a case; as a reference it knows of microbatches, and plain it has no torch.utils.checkpoint."""
    def norm() -> nn.Module:
        return models.ByMicrobatch(case.chunks, case.deferred) if reference else nn.BatchNorm1d(models.WIDTH)

    torch.manual_seed(case.seed)
    builder, before = models.Builder(case.layers, norm, plain), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        if not case.acts:
            return builder.sequential(case.skips)
        blocks = [builder.layer(block) for block in case.layers]
        return models.Scripted(blocks, case.acts, case.output, case.chunks if reference else 1)
    finally:
        torch.set_default_dtype(before)


def pipeline_of(case: Case, plain: bool = False, kind: str = "cpu", **options: Any) -> SplitPipe:
    """The pipeline of a case, on three devices of a kind if they are not CPUs; options take the place of its own."""
    own: dict[str, Any] = {"balance": case.balance}
    count = len(case.balance)
    if case.acts:
        own, count = {"cuts": case.cuts, "batched": {"mask": False}}, len(case.cuts) + 1
    if case.schedule:
        count //= stages_per_device(case.schedule)
        own |= {"schedule": case.schedule, **({"loss_fn": loss_of} if case.inside else {})}
    if case.acts or case.schedule:  # A number that the forward reads may hide what it is.
        own["reduction"] = "mean"
    devices = [kind if kind == "cpu" else f"{kind}:{number % 3}" for number in range(count)]
    return SplitPipe(module_of(case, plain=plain), devices=devices, chunks=case.chunks,
                     deferred_batch_norm=case.deferred, backward=case.backward,  # type: ignore[arg-type]
                     stash_limit=case.stash_limit, **{"checkpoint": case.checkpoint, **own, **options})


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A loss of each float tensor in an output, weighted in its own way."""
    total = torch.zeros_like(target)
    for number, x in enumerate(tree_leaves(output)):
        if isinstance(x, Tensor) and x.is_floating_point():
            y = x.to(target).flatten(1)
            weight = torch.linspace(0.5, 1.5, y.shape[1], dtype=y.dtype, device=y.device)
            total = total + (number + 1) * (y * weight - target.unsqueeze(1)).square().mean(1)
    return total.mean()


def batch_of(case: Case, step: Step, number: int, device: torch.device) -> tuple[dict[str, Any], list[Tensor], Tensor]:
    """Arguments by name, those of them that require grad if anything does, and a target."""
    generator = torch.Generator().manual_seed(100 * case.seed + number)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    x, mask, target = numbers(step.rows, models.WIDTH, models.WIDTH), numbers(models.WIDTH), numbers(step.rows)
    leaves = [each.requires_grad_(case.input_grad) for each in ([x, mask] if case.acts else [x])]
    if not case.acts:
        return {"input": x.clone() if models.kinds(case.layers) & {*models.IN_PLACE} else x}, leaves, target
    rows = (torch.arange(step.rows) + number).to(device)
    return {"x": x, "rows": rows, "mask": mask, **({} if case.inside else {"labels": target})}, leaves, target


@contextmanager
def mode(module: nn.Module, kind: str) -> Iterator[None]:
    """In eval mode, without grad mode, or neither."""
    before = [(part, part.training) for part in module.modules()]
    if kind.startswith("eval"):
        module.eval()
    try:
        with torch.set_grad_enabled(kind not in ("eval", "no grad")):
            yield
    finally:
        for part, training in before:
            part.training = training


class Side:
    """One of the two that are compared: the module, or its pipeline."""

    def __init__(self, case: Case, module: nn.Module) -> None:
        self.case, self.module = case, module
        self.log: dict[str, list[Tensor | None]] = {}
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD([p for _, p in trained], lr=0.02, momentum=0.9) if trained else None
        for name, parameter in trained if case.hooks else ():
            parameter.register_hook(lambda grad, name=name: self._double(f"{name}, hook", grad))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._note(f"{name}, after", p.grad))

    def _double(self, name: str, grad: Tensor | None) -> Tensor | None:
        self._note(name, grad)
        return grad if grad is None else grad * 2

    def _note(self, name: str, grad: Tensor | None) -> None:
        self.log.setdefault(name, []).append(grad if grad is None else grad.clone())

    def run(self, step: Step, number: int) -> dict[str, Any]:
        """Takes a step, and gives what there is to compare after it."""
        case, module = self.case, self.module
        ends = module.devices if isinstance(module, SplitPipe) else [torch.device("cpu")]
        arguments, leaves, target = batch_of(case, step, number, ends[0])
        found: dict[str, Any] = {}
        self.log.clear()
        if step.kind == "train":
            module.zero_grad()
        torch.manual_seed(number)
        with mode(module, step.kind):
            by_schedule = bool(case.schedule) and case.inside and step.kind not in ("no grad", "eval", "eval grad")
            if isinstance(module, SplitPipe) and by_schedule:
                loss = module(*arguments.values(), target=target) if not case.acts else module(
                    **arguments, target=target.to(ends[-1]))
            else:
                output = module(**arguments)
                loss = loss_of(output, target) if case.inside else _fields(output)["loss"]
                if not by_schedule:
                    if not case.acts:
                        found["which require grad"] = [
                            isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
                            for x in tree_leaves(output)
                        ]
                    # A copy: of a module, not of a pipeline, it may be a view of a parameter, which a step changes.
                    found["output"] = tree_map(
                        lambda x: x.detach().clone() if isinstance(x, Tensor) else x, _fields(output))
                del output
            found["loss"], found["differentiable"] = loss.detach(), loss.requires_grad
            if loss.requires_grad and step.kind != "thrown":
                # In the mode of its forward, which a checkpoint runs again.
                if step.kind == "retained":
                    (loss * 2).backward(retain_graph=True)
                (loss * 3).backward()
            del loss
        found["gradients of the input"] = [x.grad for x in leaves]
        found["generator"] = torch.get_rng_state().tolist()
        found["gradients"] = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        found["hooks"] = dict(sorted(self.log.items()))
        if step.kind == "train" and self.optimizer is not None:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)  # A model that explodes shows nothing.
            self.optimizer.step()
        found["state"] = dict(module.state_dict())
        if all(end.type == "cpu" for end in ends):
            return found
        on_cpu: dict[str, Any] = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, found)
        return on_cpu


def _fields(output: Any) -> Any:
    """What is compared of an output: of a dataclass its name, and all there is in it."""
    return {"class": type(output).__name__, **vars(output)} if is_dataclass(output) else output


class Reference:
    """What is right: another module that goes through the case, by default the unwrapped module."""

    def __init__(self, case: Case, module: nn.Module | None = None) -> None:
        self.case = case
        self.side = Side(case, module_of(case, reference=True) if module is None else module)

    def check(self, other: Side) -> None:
        """Takes all steps on both, and compares after each: nestings, what is no tensor, and tensors up to rounding."""
        for number, step in enumerate(self.case.steps):
            wanted = self.side.run(step, number)
            found = other.run(step, number)
            for key in wanted:
                assert_same(found[key], wanted[key], f"step {number}, {step.kind}: {key}")


def sound(case: Case) -> bool:
    """Whether the module itself goes backward: nothing overwrites what something else has saved."""
    if case.acts and _counts_otherwise(case):
        return False
    if not case.acts and not models.kinds(case.layers) & {*models.IN_PLACE}:
        return True
    try:
        reference = Reference(case)
        for number, step in enumerate(case.steps):
            reference.side.run(replace(step, kind="train") if step.kind == "thrown" else step, number)
    except RuntimeError as error:
        if not case.acts and "inplace operation" not in str(error):
            raise
        return False
    return True


def _counts_otherwise(case: Case) -> bool:
    """Whether a block that is called, run or cut twice changes itself each time, which its reference does not do so."""
    called = [act.which % len(case.layers) for act in case.acts for _ in range(1 + (act.kind == "sometimes"))
              if act.kind in models.CALLS + models.SOMETIMES]
    twice = [case.layers[number] for number in {*called} if called.count(number) > 1]
    again = [case.layers[act.which % len(case.layers)] for act in case.acts if act.kind == "checkpoint"]
    return "batchnorm" in models.kinds(twice) or bool({*models.NOT_TWICE} & models.kinds(again))


def writes(case: Case) -> bool:
    """Whether anything writes to a value that is kept: where another has its memory, this may be refused."""
    return any(act.kind == "write kept" for act in case.acts) or bool(models.kinds(case.layers) & {*models.IN_PLACE})
