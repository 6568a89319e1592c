"""What is alive: while a schedule runs as many activations as it says, and what nobody has any more is gone."""
from __future__ import annotations

import gc
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from splitpipe import SplitPipe, attach, is_recomputing, schedule
from splitpipe.schedule import Schedule
from tests.engine.models import Stack, batch
from tests.helpers.covering import graded
from tests.helpers.modules import module_of
from tests.helpers.scheduled import inside, loss_of
from tests.helpers.twin import stages
from tests.promise.layers import Apply

DEVICES, CHUNKS = 4, 8
#: By stage, how many are alive.
Alive = dict[int, int]


class Census:
    """The memory that stages save and are given, and how much of it was alive at the beginning of each F."""

    def __init__(self) -> None:
        self.saved: dict[int, list[StorageWeakRef]] = defaultdict(list)
        self.given: dict[int, list[StorageWeakRef]] = defaultdict(list)
        self.sent: dict[int, deque[StorageWeakRef]] = defaultdict(deque)  # To that stage.
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
            census.given[self.stage] += [census.sent[self.stage].popleft()] if self.stage else []
        y = x * 1  # What saves nothing, in memory of its own.
        census.saved[self.stage].append(StorageWeakRef(y.untyped_storage()))
        z = F.linear(y, self.weight)
        if not is_recomputing():  # What enters a checkpointed stage is a copy of what has left the one before.
            census.sent[self.stage + 1].append(StorageWeakRef(z.untyped_storage()))
        return z


def counted(name: str, alone: bool = False, by: str = "balance", **options: Any) -> tuple[Schedule, Census]:
    """The second step of a model that counts; alone: its stages share a buffer, and so one worker."""
    census, plan, shared = Census(), schedule.build(name, DEVICES, CHUNKS), torch.zeros(1)
    layers = [Counts(stage, census) for stage in range(plan.stages)]
    for layer in layers if alone else []:
        layer.register_buffer("shared", shared)
    module, where = stages(nn.Sequential(*layers), [1] * plan.stages, by)
    model = SplitPipe(module, devices=["cpu"] * DEVICES, chunks=CHUNKS, schedule=name, loss_fn=nn.MSELoss(), **where,
                      **options)
    for _ in range(2):
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


@graded({"name": schedule.names(), "backward": ["split", "autograd"], "checkpoint": ["never", "always"],
         "alone": [False, True], "by": ["balance", "cuts"]},
        essence=[["backward", "checkpoint", "alone"], ["by"]],
        thorough=[["name", "backward", "alone"], ["name", "checkpoint"], ["by", "backward", "checkpoint", "alone"]])
def test_activations_live_from_f_to_w_or_checkpointed_from_b_and_inputs_to_b(name, backward, checkpoint, alone, by):
    plan, census = counted(name, alone, by, backward=backward, checkpoint=checkpoint)
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


OPTIONS = pytest.mark.parametrize("options", [{"checkpoint": "never"}, {"checkpoint": "always"}, {"schedule": "1f1b"},
                                              {"schedule": "zb-h1", "checkpoint": "always"},
                                              {"backward": "autograd", "checkpoint": "always"}], ids=str)


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("make", [SplitPipe, attach])
@OPTIONS
def test_a_model_its_batches_and_its_threads_go(options: dict[str, Any], make: Any) -> None:
    others = {*threading.enumerate()}
    net, given = Stack(3), batch(4)
    parts = [weakref.ref(net), weakref.ref(net.layers[1]), weakref.ref(net.last.weight)]
    model = make(net, cuts=["layers.1", "layers.2"], devices=["cpu"] * 3, chunks=2, **options)
    model(**given)["loss"].backward()
    kept, started = weakref.ref(given["x"]), {*threading.enumerate()} - others
    output = model(**given)
    output["loss"].backward()
    del output, given
    assert kept() is None, "the batch is kept by the model, or by a cycle"
    assert {*threading.enumerate()} - others == started, "threads are not kept from call to call"
    assert len(started) <= 2 + 3, "more than one thread a microbatch and one a stage"
    del model, net
    assert [part() for part in parts] == [None] * 3, "the module is kept, by a cycle"
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started), "threads are left behind"


def watched(by: str, options: dict[str, Any]) -> tuple[SplitPipe, list[weakref.ref[Tensor]]]:
    """A pipeline, and references to what its layers save."""
    alive: list[weakref.ref[Tensor]] = []

    def watch(x: Tensor) -> Tensor:
        y = x.tanh()
        alive.append(weakref.ref(y))
        return y * y  # Saved.

    layers = nn.Sequential(nn.Linear(4, 4), Apply(watch), nn.Linear(4, 4), Apply(watch))
    module, where = stages(layers, [2, 2], by)
    return SplitPipe(module, devices=["cpu"] * 2, chunks=2, **where, **inside(options)), alive


@OPTIONS
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_what_layers_save_goes_with_a_dropped_call_or_with_backward_though_the_loss_lives_on(by, options):
    model, alive = watched(by, options)
    loss_of(model, torch.randn(4, 4, requires_grad=True) * 1)
    assert alive and not any(ref() is not None for ref in alive)
    alive.clear()
    x = torch.randn(4, 4)
    batch = StorageWeakRef(x.untyped_storage())
    loss = loss_of(model, x * 1)
    saved = sum(ref() is not None for ref in alive)
    assert len(alive) >= 4 and saved == (4 if options == {"checkpoint": "never"} else 0)
    loss.backward()
    del x
    assert not any(ref() is not None for ref in alive) and batch.expired()
