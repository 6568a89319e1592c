"""What a model has in its own process alone, and one forward through it.

Threads, copy streams and what the stages have learnt belong to a process: no copy of a model takes them along, and
nobody misses them, since each is made when it is first needed.
"""
from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe import alias, context, microbatch, partition, stream
from splitpipe.batchnorm import Statistics
from splitpipe.checkpoint import Batch
from splitpipe.collective import sharded
from splitpipe.context import State
from splitpipe.deferral.lane import Lane
from splitpipe.deferral.report import DeferralReport, Row, row
from splitpipe.deferral.stash import Stashes, room
from splitpipe.partition import Place
from splitpipe.pipeline import Gates, Pass
from splitpipe.randomness import Manner, Seeds
from splitpipe.skip.skippable import pops
from splitpipe.stage import Memory, Parcel, Stage
from splitpipe.transfer import Port, hand_over
from splitpipe.worker import Pool

Named = tuple[str, nn.Module]


class Runtime:
    """The threads, streams and memories of one model.

    Args:
        places: of the stages.
        spans: first layer of each stage, and the one after its last.
        split: whether weight gradients are deferred.
        stash_limit: how many bytes a stage holds back for them; None: as fits its device.
    """

    def __init__(
        self, places: Sequence[Place], spans: Sequence[tuple[int, int]], split: bool, stash_limit: int | None = None
    ) -> None:
        self._places = places
        self._spans = spans
        self._split = split
        self._stash_limit = stash_limit
        self._pool: Pool | None = None
        self._workers: list[int] = []
        self._memories = [Memory() for _ in places]
        self._streams: dict[tuple[torch.device, str], stream.Stream] = {}

    def __deepcopy__(self, memo: object) -> Runtime:
        return Runtime(self._places, self._spans, self._split, self._stash_limit)

    def __reduce__(self) -> tuple[type[Runtime], tuple[Any, ...]]:
        return Runtime, (self._places, self._spans, self._split, self._stash_limit)

    def forward(self, layers: Sequence[Named], input: Any, chunks: int, spared: int | None) -> Any:
        """The output of the layers for the batch.

        Args:
            layers: name and module of every layer.
            input: the batch.
            chunks: number of microbatches, at most.
            spared: how many of the last microbatches are not checkpointed; None spares all.
        """
        state = context.capture()
        # The user's function modes see the layers' calls, made in the workers, and none of the pipeline's own.
        with context.function_modes(state.function_modes, ()):
            return self._forward(layers, input, chunks, spared, state)

    def _forward(self, layers: Sequence[Named], input: Any, chunks: int, spared: int | None, state: State) -> Any:
        leaves, spec = microbatch.flatten(input, "the input", batch=True)
        rows = microbatch.cuts(microbatch.batch_size(leaves), chunks)
        self._verify_device(leaves)
        stop = 0 if spared is None else max(0, len(rows) - spared)

        pool = self._ready_pool(layers)
        stages = self._stages(layers, checkpointing=stop > 0)
        first, last = stages[0], stages[-1]
        callers = [stream.current(place.device) for place in self._places]
        for stage, caller in zip(stages, callers):
            stream.wait(stage.compute, caller)

        statistics = Statistics()
        with statistics.collecting():
            variables = contextvars.copy_context()
        seeds = Seeds(len(stages), len(rows))
        batch = Batch(leaves)
        run = Pass(
            stages=stages,
            gates=[self._gates(stage) for stage in stages],
            workers=self._workers,
            pool=pool,
            popped={key: stage.index for stage in stages for _, layer in stage.layers for key in pops(layer)},
            state=state,
            seeds=seeds,
            stop=stop,
            batch=batch,
        )
        shared = alias.shared(leaves)
        outputs = run.run(
            [Parcel(_handed(cut, callers[0], first.compute), spec, shared) for cut in microbatch.scatter(leaves, rows)],
            variables,
        )
        batch.close()
        if not seeds.settle():
            self._forget_manners()
        for stage, caller in zip(stages, callers):
            stream.wait(caller, stage.compute)
        read = statistics.commit()
        for stage, caller in zip(stages, callers):
            stream.wait(stage.compute, caller)
        del read  # Freed any sooner, its memory could be reused by a stage's stream that the commit still reads.
        return microbatch.gather(
            [(_handed(parcel.leaves, last.compute, callers[-1]), parcel.spec) for parcel in outputs]
        )

    def report(self, layers: Sequence[Named]) -> DeferralReport:
        """What the stages' forwards have shown of their parameters."""
        rows: list[Row] = []
        seen: set[int] = set()
        for stage, ((start, end), memory) in enumerate(zip(self._spans, self._memories)):
            for name, layer in layers[start:end]:
                for own, parameter in layer.named_parameters(name):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        rows.append(row(own, stage, parameter, memory.sightings.find(parameter), self._unseen()))
        return DeferralReport(tuple(rows))

    def _unseen(self) -> str:
        if not self._split:
            return "backward='autograd'"
        return "no function was seen to use it in a forward with grad mode (compiled code isn't seen)"

    def _verify_device(self, leaves: microbatch.Leaves) -> None:
        there = self._places[0].device
        found = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        # A tensor on the CPU may be meant to be there (lengths of sequences); all of them can't.
        wrong = found - {there, torch.device("cpu")}
        if wrong or there not in found:
            names = ", ".join(sorted(str(device) for device in wrong or found))
            raise ValueError(
                f"the input is on {names}, but the first stage is on {there}: expected it there. Move it first, with "
                "input.to(model.devices[0])."
            )

    def _ready_pool(self, layers: Sequence[Named]) -> Pool:
        pool = self._pool
        modules = [module for _, module in layers]
        stages = [modules[start:end] for start, end in self._spans]
        # A model may be sharded after its first forward.
        if pool is None or not pool.usable or (max(self._workers) and sharded(modules)):
            self._workers = partition.workers(stages, self._places)
            pool = self._pool = Pool([f"splitpipe worker {number}" for number in range(max(self._workers) + 1)])
        on_cpu = {worker for worker, place in zip(self._workers, self._places) if place.device.type == "cpu"}
        pool.share_threads(sorted(on_cpu))
        return pool

    def _stages(self, layers: Sequence[Named], checkpointing: bool) -> list[Stage]:
        stages = []
        for index, (place, (start, end), memory) in enumerate(zip(self._places, self._spans, self._memories)):
            compute = stream.current(place.device) if place.stream is None else place.stream
            stages.append(
                Stage(
                    index=index,
                    place=place,
                    layers=layers[start:end],
                    memory=memory,
                    compute=compute,
                    checkpointing=checkpointing,
                    stashes=self._stashes(place.device, compute),
                )
            )
        return stages

    def _stashes(self, device: torch.device, compute: stream.Stream) -> Stashes | None:
        if not self._split or not torch.is_grad_enabled():
            return None
        limit = room(device) if self._stash_limit is None else self._stash_limit
        return Stashes(Lane(device, compute, self._stream(device, "weights")), limit)

    def _gates(self, stage: Stage) -> Gates:
        device = stage.place.device
        return Gates(
            inlet=Port(device, stage.compute, self._stream(device, "in")),
            outlet=Port(device, stage.compute, self._stream(device, "out"), self._stream(device, "gate")),
        )

    def _stream(self, device: torch.device, use: str) -> stream.Stream:
        if (device, use) not in self._streams:
            self._streams[device, use] = stream.new(device)
        return self._streams[device, use]

    def _forget_manners(self) -> None:
        for memory in self._memories:
            for known in memory.known.values():
                known.manner = Manner.UNKNOWN


def _handed(leaves: list[Any], giver: stream.Stream, taker: stream.Stream) -> list[Any]:
    if giver == taker:
        return leaves
    return [hand_over(leaf, giver, taker) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
