"""torch.distributed.pipelining on the same ops: a process a device, over gloo.

The processes wait to be told a schedule, run one step of it between two barriers, and say how long they took. So its
steps and splitpipe's can take turns.
"""

from __future__ import annotations

import csv
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

from benchmarks.parts.emulated.layers import WIDTH, Naps, Parted, Step, Took
from splitpipe.schedule import Schedule, build, from_csv

PATIENCE = 120  # seconds until a process that does not answer counts as hanging


@dataclass(frozen=True)
class Peer:
    """A schedule of torch's.

    Attributes:
        name: of its class, without "Schedule".
        stages: on each device.
    """

    name: str
    stages: int = 1

    def __str__(self) -> str:
        several = "" if self.stages == 1 else "s"
        return f"{self.name}, {self.stages} stage{several} a device" if self.name.startswith("Interl") else self.name

    @property
    def splits(self) -> bool:
        """Says if it has B and W apart."""
        return self.name.endswith("ZeroBubble")

    def places(self, devices: int) -> list[int]:
        """The device of each stage."""
        there = list(range(devices))
        return there + there[::-1] if self.name == "ZBVZeroBubble" else there * self.stages


PEERS = (Peer("GPipe"), Peer("1F1B"), Peer("InterleavedZeroBubble"), Peer("InterleavedZeroBubble", 2),
         Peer("ZBVZeroBubble", 2))


@dataclass(frozen=True)
class Work:
    """The work that all processes get ready for: microbatches, and the seconds of a whole device's op."""

    chunks: int
    seconds: float


class Processes:
    """The processes, as ``started`` gives them."""

    def __init__(self, lines: list[Connection]) -> None:
        self._lines = lines

    def prepare(self, work: Work) -> dict[Peer, Schedule]:
        """Makes the schedules again, with these numbers, as splitpipe's own."""
        found: dict[Peer, Schedule] = self._ask(work)[0]
        return found

    def step(self, peer: Peer) -> Took:
        """Runs a step; its seconds are those of the process that took longest."""
        answers: list[Took] = self._ask(peer)
        return Took(max(took.wall for took in answers), [naps for took in answers for naps in took.naps])

    def _ask(self, question: Work | Peer) -> list[Any]:
        for line in self._lines:
            line.send(question)
        return [_answer(line, rank, question) for rank, line in enumerate(self._lines)]


def _answer(line: Connection, rank: int, question: object) -> Any:
    if not line.poll(PATIENCE):
        raise RuntimeError(f"process {rank} has not answered {question} in {PATIENCE} s")
    try:
        fault, answer = line.recv()
    except EOFError:
        raise RuntimeError(f"process {rank} ended at {question}: see what it printed") from None
    if fault is not None:
        raise RuntimeError(f"process {rank}, {question}:\n{fault}")
    return answer


@contextmanager
def started(devices: int) -> Iterator[Processes]:
    """As many processes as devices, for the time of the block.

    Args:
        devices: number of them.
    """
    context = torch.multiprocessing.get_context("spawn")
    processes, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(devices):
            line, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, devices, f"{folder}/store", other), daemon=True)
            process.start()
            other.close()
            processes.append(process)
            lines.append(line)
        try:
            yield Processes(lines)
        finally:
            for line in lines:
                line.close()
            for process in processes:
                process.kill()
                process.join()


def _serve(rank: int, devices: int, store: str, line: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=devices, timeout=timedelta(seconds=PATIENCE)
    )
    steps: dict[Peer, Step] = {}
    with suppress(EOFError, OSError):  # The other end was closed.
        while True:
            question = line.recv()
            try:
                if isinstance(question, Peer):
                    line.send((None, steps[question]()))
                    continue
                steps, schedules = {}, {}
                for peer in PEERS:
                    ready = _ready(peer, question, rank, devices)
                    if ready is not None:
                        steps[peer], schedules[peer] = ready
                line.send((None, schedules))
            except Exception:
                line.send((traceback.format_exc(), None))


def _ready(peer: Peer, work: Work, rank: int, devices: int) -> tuple[Step, Schedule] | None:
    """A function that runs a step here, and the schedule that all follow; None if the numbers do not go with it."""
    naps, places = Naps(), peer.places(devices)
    share = work.seconds / peer.stages
    layers = {number: Parted(number, share, naps) for number, place in enumerate(places) if place == rank}
    stages = [PipelineStage(layer, number, len(places), torch.device("cpu")) for number, layer in layers.items()]
    make = getattr(pipelining, f"Schedule{peer.name}")
    single = peer.name in ("GPipe", "1F1B")
    try:
        runs = make(stages[0] if single else stages, n_microbatches=work.chunks, loss_fn=F.mse_loss)
    except ValueError:
        return None
    x = torch.zeros(work.chunks, WIDTH)
    given = {"target": torch.ones(work.chunks, WIDTH)} if len(places) - 1 in layers else {}

    def step() -> Took:
        for layer in layers.values():
            layer.zero_grad()
        naps.taken.clear()
        dist.barrier()
        began = time.perf_counter()
        runs.step(*([x] if 0 in layers else []), **given, return_outputs=False)
        wall = time.perf_counter() - began
        dist.barrier()
        return Took(wall, [naps], began)

    # Torch has the order of 1F1B twice: the one to be drawn counts its microbatches otherwise than the one that runs.
    ours = build(peer.name.lower(), devices, work.chunks) if single else _as_ours(runs.pipeline_order)
    return step, ours


def _as_ours(order: dict[int, list[Any]]) -> Schedule:
    """Torch's order of ops, without what it does between them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "order.csv")
        with path.open("w", newline="", encoding="utf-8") as file:
            for rank in sorted(order):
                csv.writer(file).writerow([op for op in order[rank] if op is not None and op.is_compute_op])
        return from_csv(path)
