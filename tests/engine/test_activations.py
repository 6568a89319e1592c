"""What is alive while a schedule runs: as many activations as it says, and nothing once their W is done."""
from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from splitpipe import SplitPipe, is_recomputing, schedule
from splitpipe.schedule import Schedule
from tests.helpers.covering import graded
from tests.helpers.modules import module_of

DEVICES, CHUNKS = 4, 8
#: By stage, how many are alive.
Alive = dict[int, int]


class Census:
    """The memory that stages save and are given, and how much of it was alive at the beginning of each F."""

    def __init__(self) -> None:
        self.saved: dict[int, list[StorageWeakRef]] = defaultdict(list)
        self.given: dict[int, list[StorageWeakRef]] = defaultdict(list)
        self.seen: dict[int, list[tuple[Alive, Alive]]] = defaultdict(list)

    def count(self) -> tuple[Alive, Alive]:
        """How many saved activations, and inputs, are alive now. Right for stages of the device whose worker asks."""
        return _alive(self.saved), _alive(self.given)


def _alive(kept: dict[int, list[StorageWeakRef]]) -> Alive:
    return {stage: sum(not each.expired() for each in list(held)) for stage, held in list(kept.items())}


class Counts(nn.Module):
    """A layer that saves a tensor of its own making, and counts those alive before it does."""

    def __init__(self, stage: int, census: Census) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.stage, self.census = stage, census

    def forward(self, x: Tensor) -> Tensor:
        census = self.census
        if not is_recomputing():
            census.seen[self.stage].append(census.count())
            census.given[self.stage].append(StorageWeakRef(x.untyped_storage()))
        y = x * 1  # What saves nothing, in memory of its own.
        census.saved[self.stage].append(StorageWeakRef(y.untyped_storage()))
        return F.linear(y, self.weight)


def counted(name: str, alone: bool = False, **options: Any) -> tuple[Schedule, Census]:
    """The second step of a model that counts; alone: its stages share a buffer, and so one worker."""
    census, plan, shared = Census(), schedule.build(name, DEVICES, CHUNKS), torch.zeros(1)
    layers = [Counts(stage, census) for stage in range(plan.stages)]
    for layer in layers if alone else []:
        layer.register_buffer("shared", shared)
    model = SplitPipe(nn.Sequential(*layers), [1] * plan.stages, devices=["cpu"] * DEVICES, chunks=CHUNKS,
                      schedule=name, loss_fn=nn.MSELoss(), **options)
    for _ in range(2):  # Whether a stage works in place shows in the first one, which keeps copies.
        for log in (census.saved, census.given, census.seen):
            log.clear()
        loss = model(torch.randn(CHUNKS, 3), target=torch.randn(CHUNKS, 3))
        assert not any(census.count()[0].values()), "all are freed by the end"
        loss.backward()
    return model.schedule, census


def assert_alive(census: Census, plan: Schedule, which: int, begins: str, ends: tuple[str, ...]) -> None:
    """At each F, a device has as many microbatches alive as its row says: from one kind of op to others."""
    wanted: dict[int, list[Alive]] = defaultdict(list)
    for row in plan.rows:
        alive: Alive = defaultdict(int)
        for op in row:
            if op.kind == "F":
                wanted[op.stage].append(dict(alive))
            alive[op.stage] += (op.kind == begins) - (op.kind in ends)
    for stage, moments in census.seen.items():
        # The first stage's input is the batch, which is the caller's.
        mates = [other for other in range(which, plan.stages) if plan.placement[other] == plan.placement[stage]]
        found = [[moment[which].get(mate, 0) for mate in mates] for moment in moments]
        assert found == [[moment.get(mate, 0) for mate in mates] for moment in wanted[stage]], f"stage {stage}"


@graded(
    {"name": schedule.names(), "backward": ["split", "autograd"], "checkpoint": ["never", "always"],
     "alone": [False, True]},
    essence=[["backward", "checkpoint", "alone"]], thorough=[["name", "backward", "alone"], ["name", "checkpoint"]],
)
def test_activations_live_from_f_to_w_or_checkpointed_from_b_to_w_and_inputs_to_b(
    name: str, backward: Any, checkpoint: str, alone: bool
) -> None:
    plan, census = counted(name, alone, backward=backward, checkpoint=checkpoint)
    split = backward == "split"
    if checkpoint == "never":
        assert_alive(census, plan, 0, "F", ("W", "BW") if split else ("B", "BW"))
    else:
        assert_alive(census, plan, 0, "B" if split else "", ("W",) if split else ())
    if alone:  # In a worker of its own, the stage that sent an input might hold it for a moment more.
        assert_alive(census, plan, 1, "F", ("B", "BW"))


def test_in_the_second_half_of_a_drop_in_call_activations_go_with_their_w() -> None:
    census, alive, shared = Census(), list[int](), torch.zeros(1)

    def looking(self: Any, x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda _: alive.append(census.count()[0][1]))
        return y

    layers = nn.Sequential(module_of(looking), Counts(0, census), Counts(1, census))
    for layer in layers:
        layer.register_buffer("shared", shared)  # One worker: B1 of 2, 1; B0 of 2; B1 of 0; B0 of 1, 0.
    model = SplitPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=3, checkpoint="never", stash_limit=0)
    model(torch.randn(3, 3, requires_grad=True)).sum().backward()
    assert alive == [1, 0, 0]
