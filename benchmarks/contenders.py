"""Who trains the GPT in compute.py: splitpipe in several ways, its peers, and the module without a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from subject import Case, Preset, Step, case, loss_of, sgd
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed works, too

import products

from splitpipe import SplitPipe, schedule


@dataclass(frozen=True)
class Contender:
    """One way to train the model.

    Attributes:
        package: whose code runs the step.
        way: which of its ways.
        role: "own" for splitpipe, "peer" for others' pipelines, "bound" for the module with both cores and no pipeline;
            "aside" for what tells something of these.
        make: gives the step of a process, by its rank.
        processes: how many there are.
        threads: intra-op threads of each process.
        plain: multiply matrices as torch does.
    """

    package: str
    way: str
    role: Literal["own", "peer", "bound", "aside"]
    make: Callable[[Case, int], Step]
    processes: int = 1
    threads: int = 1
    plain: bool = False

    @property
    def name(self) -> str:
        """As in the tables."""
        more = ", torch's products" if self.plain else ""
        return f"{self.package}, {self.way}{more}{', 2 threads' if self.threads == 2 else ''}"

    @property
    def missing(self) -> str | None:
        """What this machine lacks for it."""
        if self.package == "torchgpipe" and find_spec("torchgpipe") is None:
            return "torchgpipe is not installed: pip install -e '.[peers]' -c constraints.txt"
        if self.processes > 1 and not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
            return "this build of torch has no gloo"
        return None

    def start(self, preset: Preset, chunks: int, rank: int = 0) -> Step:
        """The step of the process with that rank."""
        step = self.make(case(preset, chunks), rank)
        return products.without()(step) if self.plain else step


def trained(module: nn.Module, compute: Callable[[], Tensor]) -> Step:
    """Forward, loss, backward and the optimizer's step, as a training loop does them."""
    optimizer = sgd(module)

    def step() -> float:
        optimizer.zero_grad()
        loss = compute()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def unwrapped(it: Case, rank: int) -> Step:
    """The module as it is."""
    return trained(it.layers, lambda: loss_of(it.layers(it.input), it.target))


def dropin(backward: Literal["split", "autograd"]) -> Callable[[Case, int], Step]:
    """SplitPipe with the loss outside."""

    def make(it: Case, rank: int) -> Step:
        more: dict[str, Any] = {"chunks": it.chunks, "checkpoint": "never", "backward": backward}
        model = SplitPipe(it.layers, it.balance(2), devices=["cpu", "cpu"], **more)
        return trained(model, lambda: loss_of(model(it.input), it.target))

    return make


def scheduled(name: str, **options: Any) -> Callable[[Case, int], Step]:
    """SplitPipe with the loss inside, by the schedule of that name."""

    def make(it: Case, rank: int) -> Step:
        built = schedule.build(name, 2, it.chunks, **options)
        more: dict[str, Any] = {"chunks": it.chunks, "checkpoint": "never", "loss_fn": loss_of, "schedule": built}
        model = SplitPipe(it.layers, it.balance(built.stages), devices=["cpu", "cpu"], **more)
        return trained(model, lambda: model(it.input, target=it.target))

    return make


def torchgpipe(it: Case, rank: int) -> Step:
    """torchgpipe's GPipe."""
    from torchgpipe import GPipe

    more: dict[str, Any] = {"chunks": it.chunks, "checkpoint": "never"}
    model = GPipe(it.layers, it.balance(2), devices=["cpu", "cpu"], **more)
    return trained(model, lambda: loss_of(model(it.input), it.target))


def ranked(name: str) -> Callable[[Case, int], Step]:
    """torch.distributed.pipelining's schedule of that name, in a process a device."""

    def make(it: Case, rank: int) -> Step:
        import ranks

        return ranks.step(it, rank, name)

    return make


def contenders() -> list[Contender]:
    """All of them, in the order of the tables."""
    own = [Contender("splitpipe", f"drop-in, {engine}", "own", dropin(engine)) for engine in ("split", "autograd")]
    names = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v", "v-zb", "v-half")
    own += [Contender("splitpipe", name, "own", scheduled(name)) for name in names]
    without = ("drop-in, split", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "v-half")
    plain = [replace(each, plain=True) for each in own if each.way in without]
    torchs = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    peers = [Contender("torchgpipe", "GPipe", "peer", torchgpipe)]
    peers += [Contender("torch.distributed", name, "peer", ranked(name), processes=2) for name in torchs]
    bound = Contender("unwrapped", "whole batch", "bound", unwrapped, threads=2)
    aside = [replace(bound, role="aside", threads=1)]
    aside += [replace(each, role="aside", threads=2) for each in (own[0], peers[0])]
    return [*own, *plain, *peers, bound, *aside]
