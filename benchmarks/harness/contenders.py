"""Who trains: splitpipe in several ways, its peers, and the module without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from typing import Any, Literal

import torch
from torch import Tensor, nn

import splitpipe.skip
from benchmarks.harness.compiling import COMPILED, compile_layers
from benchmarks.harness.subject import Case, Step, Subject, case, sgd
from benchmarks.models.resnet import in_blocks
from splitpipe import SplitPipe, schedule

#: What has the parameters, and a forward and backward of the whole batch, which gives the loss.
Pass = tuple[nn.Module, Callable[[], Tensor]]
Engine = Literal["split", "autograd"]
ENGINES: tuple[Engine, ...] = "split", "autograd"
NO_TORCHGPIPE = "torchgpipe is not installed: pip install -e '.[bench]' -c constraints.txt"


@dataclass(frozen=True)
class Contender:
    """One way to train a model.

    Attributes:
        package: whose code runs the step.
        way: which of its ways.
        role: "own" for splitpipe, "peer" for others' pipelines, "bound" for the module with both cores and no pipeline;
            "aside" for what tells something of these.
        make: gives what a step computes; None for contenders of several processes.
        processes: how many there are.
        threads: intra-op threads of each process.
        compiled: whether its layers are compiled, each by itself.
    """

    package: str
    way: str
    role: Literal["own", "peer", "bound", "aside"]
    make: Callable[[Case], Pass] | None = None
    processes: int = 1
    threads: int = 1
    compiled: bool = False

    @property
    def name(self) -> str:
        """As in the tables."""
        more = (", compiled" if self.compiled else "") + (", 2 threads" if self.threads == 2 else "")
        return f"{self.package}, {self.way}{more}"

    def missing(self, subject: Subject) -> str | None:
        """The reason why it can't run here, if there is one."""
        if self.package == "torchgpipe" and find_spec("torchgpipe") is None:
            return NO_TORCHGPIPE
        if self.compiled and subject.device == "cpu" and which("g++") is None:
            return "torch has no C++ compiler to compile with: there is no g++"
        if self.package == "torch.distributed":
            if self.compiled and "ZB" in self.way:
                return "its split backward takes no compiled layers (pytorch#143599)"
            if subject.model == "unet":
                return "its stages hand values to the next stage alone, and the skips of a U-Net bypass stages"
            if subject.device != "cpu":
                return "here it runs on the CPU alone, over gloo"
            if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
                return "this build of torch has no gloo"
        return None

    def built(self, subject: Subject) -> Pass:
        """The module, and the computation of a step, for contenders of one process."""
        assert self.make is not None
        skip = import_module("torchgpipe.skip") if self.package == "torchgpipe" else splitpipe.skip
        return self.make(self._case(subject, skip))

    def _case(self, subject: Subject, skip: Any = splitpipe.skip) -> Case:
        copy = case(subject, skip)
        return replace(copy, layers=in_blocks(copy.layers, skip)) if self.compiled else copy

    def start(self, subject: Subject, rank: int = 0) -> Step:
        """The step of the process with that rank, with the optimizer's."""
        if self.make is None:
            from benchmarks.harness import torch_pipelining

            return torch_pipelining.step(self._case(subject), rank, self.way, self.compiled)
        return trained(subject, *self.built(subject))


def trained(subject: Subject, module: nn.Module, compute: Callable[[], Tensor]) -> Step:
    """Forward, loss, backward and the optimizer's step, as a training loop does them."""
    optimizer = sgd(subject, module)

    def step() -> float:
        optimizer.zero_grad()
        loss = compute()
        optimizer.step()
        return loss.item()

    return step


def noting(step: Step, losses: list[float]) -> Callable[[], None]:
    """A step of one process that adds its loss to a list."""

    def run() -> None:
        loss = step()
        assert loss is not None
        losses.append(loss)

    return run


def places(device: str, count: int) -> list[Any]:
    """A device for each of so many, for what a subject calls its device."""
    if device == "cuda" and torch.cuda.device_count() >= count:
        return [f"cuda:{index}" for index in range(count)]
    return ["cuda:0" if device == "cuda" else device] * count


def backward(loss: Tensor) -> Tensor:
    """Goes back from the loss, and gives it."""
    loss.backward()
    return loss.detach()


def unwrapped(case: Case, *, compiled: bool = False) -> Pass:
    """The module as it is; one with BatchNorm by microbatch, since that is what all the others normalise."""
    device = places(case.subject.device, 1)[0]
    layers, rows = case.layers.to(device), len(case.input)
    compile_layers(layers if compiled else ())
    pieces = case.subject.chunks if case.subject.spec.normed else 1
    batches = list(zip(case.input.to(device).chunk(pieces), case.target.to(device).chunk(pieces)))

    def compute() -> Tensor:
        losses = [backward(case.subject.spec.loss(layers(x), y) * (len(x) / rows)) for x, y in batches]
        return torch.stack(losses).sum()

    return layers, compute


def dropin(case: Case, *, backward_by: Engine, checkpoint: str = "never", compiled: bool = False) -> Pass:
    """SplitPipe with the loss outside."""
    more: dict[str, Any] = {"chunks": case.subject.chunks, "checkpoint": checkpoint, "backward": backward_by}
    more["compile"] = COMPILED if compiled else False
    return outside(case, SplitPipe(case.layers, case.balance(2), devices=places(case.subject.device, 2), **more))


def torchgpipe(case: Case, *, checkpoint: str = "never", compiled: bool = False) -> Pass:
    """torchgpipe's GPipe. What is ``compiled`` is so by one thread, before: its workers would do it at once."""
    from torchgpipe import GPipe

    more: dict[str, Any] = {"chunks": case.subject.chunks, "checkpoint": checkpoint}
    model: Any = GPipe(case.layers, case.balance(2), devices=places(case.subject.device, 2), **more)
    if compiled:
        compile_layers(layer for part in model.partitions for layer in part)
        value: Any = case.input.chunk(case.subject.chunks)[0].to(model.devices[0])
        for part, device in zip(model.partitions, model.devices):
            value = part(tuple(x.to(device) for x in value) if isinstance(value, tuple) else value.to(device))
        value.sum().backward()
    return outside(case, model)


def outside(case: Case, model: Any) -> Pass:
    """A pipeline that gives its output, with the loss after it."""
    x, y = case.input.to(model.devices[0]), case.target.to(model.devices[-1])
    return model, lambda: backward(case.subject.spec.loss(model(x), y))


def scheduled(case: Case, *, name: str, backward_by: Engine = "split", compiled: bool = False) -> Pass:
    """SplitPipe with the loss inside, by the schedule of that name."""
    built = schedule.build(name, 2, case.subject.chunks)
    more: dict[str, Any] = {"chunks": case.subject.chunks, "checkpoint": "never", "schedule": built}
    more |= {"backward": backward_by, "compile": COMPILED if compiled else False}
    devices = places(case.subject.device, 2)
    model = SplitPipe(case.layers, case.balance(built.stages), devices=devices, loss_fn=case.subject.spec.loss, **more)
    x, y = case.input.to(model.devices[0]), case.target.to(model.devices[-1])
    return model, lambda: backward(model(x, target=y))


def drop_ins(checkpoint: str = "never") -> list[Contender]:
    """splitpipe's two engines and torchgpipe, in the same checkpoint mode."""
    more = "" if checkpoint == "never" else f", {checkpoint}"
    own = [
        Contender(
            "splitpipe", f"drop-in, {engine}{more}", "own", partial(dropin, backward_by=engine, checkpoint=checkpoint)
        )
        for engine in ENGINES
    ]
    return [*own, Contender("torchgpipe", f"GPipe{more}", "peer", partial(torchgpipe, checkpoint=checkpoint))]


def by_schedule(names: tuple[str, ...]) -> list[Contender]:
    """splitpipe by schedules."""
    return [Contender("splitpipe", name, "own", partial(scheduled, name=name)) for name in names]


def compiled(subject: Subject) -> list[Contender]:
    """Those whose layers are compiled, in the order of the tables."""
    if subject.model == "unet":
        return []  # Its layers stash and pop, which is no graph.
    names = ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
    own = [Contender("splitpipe", name, "own", partial(scheduled, name=name, compiled=True)) for name in names]
    for engine in ENGINES:
        make = partial(dropin, backward_by=engine, compiled=True)
        own.append(Contender("splitpipe", f"drop-in, {engine}", "own", make))
    peers = [Contender("torchgpipe", "GPipe", "peer", partial(torchgpipe, compiled=True))]
    torchs = ("GPipe", "1F1B", "ZBVZeroBubble")  # Not Interleaved1F1B, which receives into what gloo refuses.
    peers += [Contender("torch.distributed", name, "peer", processes=2) for name in torchs]
    alone = Contender(
        "unwrapped", "by microbatch" if subject.spec.normed else "whole batch", "bound",
        partial(unwrapped, compiled=True),
    )
    bounds = [alone] if subject.device != "cpu" else [replace(alone, threads=2), replace(alone, role="aside")]
    return [replace(each, compiled=True) for each in (*own, *peers, *bounds)]


def contenders(subject: Subject) -> list[Contender]:
    """All others, in the order of the tables."""
    deep = subject.model == "gpt"
    *own, gpipe = drop_ins()
    if deep:
        own += by_schedule(("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v", "v-zb", "v-half"))
    else:
        own += by_schedule(("1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "v-half"))
    own.append(Contender("splitpipe", "1f1b, autograd", "own", partial(scheduled, name="1f1b", backward_by="autograd")))
    torchs = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    if not deep:
        torchs = ("GPipe", "1F1B", "ZBVZeroBubble")
    peers = [gpipe, *(Contender("torch.distributed", name, "peer", processes=2) for name in torchs)]
    alone = Contender("unwrapped", "by microbatch" if subject.spec.normed else "whole batch", "bound", unwrapped)
    if subject.device != "cpu":
        return [*own, *peers, alone]
    aside = [replace(alone, role="aside"), *(replace(each, role="aside", threads=2) for each in (own[0], gpipe))]
    return [*own, *peers, replace(alone, threads=2), *aside]
