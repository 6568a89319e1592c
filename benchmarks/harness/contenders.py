"""Who trains: splitpipe in several ways, its peers, and the module without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

import splitpipe.skip
from benchmarks.harness.subject import Case, Step, Subject, case, sgd
from splitpipe import SplitPipe, schedule

#: What has the parameters, and a forward and backward of the whole batch, which gives the loss.
Pass = tuple[nn.Module, Callable[[], Tensor]]


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
    """

    package: str
    way: str
    role: Literal["own", "peer", "bound", "aside"]
    make: Callable[[Case], Pass] | None = None
    processes: int = 1
    threads: int = 1

    @property
    def name(self) -> str:
        """As in the tables."""
        return f"{self.package}, {self.way}{', 2 threads' if self.threads == 2 else ''}"

    def missing(self, subject: Subject) -> str | None:
        """The reason why it can't run here, if there is one."""
        if self.package == "torchgpipe":
            if find_spec("torchgpipe") is None:
                return "torchgpipe is not installed: pip install -e '.[bench]' -c constraints.txt"
            if subject.device == "parts":
                return "torchgpipe takes no streams as devices: compare with --device cuda"
        if self.package == "torch.distributed":
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
        return self.make(case(subject, skip))

    def start(self, subject: Subject, rank: int = 0) -> Step:
        """The step of the process with that rank, with the optimizer's."""
        if self.make is None:
            from benchmarks.harness import torch_pipelining

            return torch_pipelining.step(case(subject), rank, self.way)
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


def places(device: str, count: int) -> list[Any]:
    """A device for each of so many, for what a subject calls its device."""
    if device == "parts":
        from benchmarks.harness.device_parts import parts

        return parts("cuda", count)
    if device == "cuda" and torch.cuda.device_count() >= count:
        return [f"cuda:{index}" for index in range(count)]
    return ["cuda:0" if device == "cuda" else device] * count


def backward(loss: Tensor) -> Tensor:
    """Goes back from the loss, and gives it."""
    loss.backward()
    return loss.detach()


def unwrapped(case: Case) -> Pass:
    """The module as it is; one with BatchNorm by microbatch, since that is what all the others normalise."""
    device = "cuda:0" if case.subject.device == "parts" else places(case.subject.device, 1)[0]
    layers, rows = case.layers.to(device), len(case.input)
    pieces = case.subject.chunks if case.subject.spec.normed else 1
    batches = list(zip(case.input.to(device).chunk(pieces), case.target.to(device).chunk(pieces)))

    def compute() -> Tensor:
        losses = [backward(case.subject.spec.loss(layers(x), y) * (len(x) / rows)) for x, y in batches]
        return torch.stack(losses).sum()

    return layers, compute


def dropin(case: Case, *, backward_by: Literal["split", "autograd"], checkpoint: str = "never") -> Pass:
    """SplitPipe with the loss outside."""
    more: dict[str, Any] = {"chunks": case.subject.chunks, "checkpoint": checkpoint, "backward": backward_by}
    return outside(case, SplitPipe(case.layers, case.balance(2), devices=places(case.subject.device, 2), **more))


def torchgpipe(case: Case, *, checkpoint: str = "never") -> Pass:
    """torchgpipe's GPipe."""
    from torchgpipe import GPipe

    more: dict[str, Any] = {"chunks": case.subject.chunks, "checkpoint": checkpoint}
    return outside(case, GPipe(case.layers, case.balance(2), devices=places(case.subject.device, 2), **more))


def outside(case: Case, model: Any) -> Pass:
    """A pipeline that gives its output, with the loss after it."""
    x, y = case.input.to(model.devices[0]), case.target.to(model.devices[-1])
    return model, lambda: backward(case.subject.spec.loss(model(x), y))


def scheduled(case: Case, *, name: str, backward_by: Literal["split", "autograd"] = "split") -> Pass:
    """SplitPipe with the loss inside, by the schedule of that name."""
    built = schedule.build(name, 2, case.subject.chunks)
    more: dict[str, Any] = {"chunks": case.subject.chunks, "checkpoint": "never", "schedule": built}
    more["backward"] = backward_by
    devices = places(case.subject.device, 2)
    model = SplitPipe(case.layers, case.balance(built.stages), devices=devices, loss_fn=case.subject.spec.loss, **more)
    x, y = case.input.to(model.devices[0]), case.target.to(model.devices[-1])
    return model, lambda: backward(model(x, target=y))


def drop_ins(checkpoint: str = "never") -> list[Contender]:
    """splitpipe's two engines and torchgpipe, in the same checkpoint mode."""
    more = "" if checkpoint == "never" else f", {checkpoint}"
    engines: tuple[Literal["split", "autograd"], ...] = ("split", "autograd")
    found = [
        Contender(
            "splitpipe", f"drop-in, {engine}{more}", "own", partial(dropin, backward_by=engine, checkpoint=checkpoint)
        )
        for engine in engines
    ]
    return [*found, Contender("torchgpipe", f"GPipe{more}", "peer", partial(torchgpipe, checkpoint=checkpoint))]


def by_schedule(names: tuple[str, ...]) -> list[Contender]:
    """splitpipe by schedules."""
    return [Contender("splitpipe", name, "own", partial(scheduled, name=name)) for name in names]


def contenders(subject: Subject) -> list[Contender]:
    """All of them, in the order of the tables."""
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
