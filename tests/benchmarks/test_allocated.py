"""The count of allocated bytes: what is known by hand is found, whichever thread allocates or frees it."""

from __future__ import annotations

import importlib
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe

ROOT = Path(__file__).resolve().parents[2]
#: Elements of a block, and its bytes.
MANY = 1000
SIZE = 4 * MANY

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch's threads join its profiler there")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; threads that other tests have left don't matter."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    it = importlib.import_module("allocated")
    monkeypatch.setattr(it.Watch, "unseen", lambda self: [])
    return it


@pytest.fixture
def peak(script: ModuleType) -> Callable[..., int]:
    """Bytes in all."""
    return lambda step, **options: script.peak(step, **options).total


def block() -> Tensor:
    return torch.empty(MANY)


class Worker:
    """A thread that starts with its first call, and stays."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def __call__(self, call: Callable[[], object]) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, daemon=True)
            self.thread.start()
        self.calls.put(call)
        self.done.get()

    def work(self) -> None:
        while (call := self.calls.get()) is not None:
            call()
            del call
            self.done.put(None)


@pytest.fixture
def worker() -> Iterator[Worker]:
    it = Worker()
    yield it
    it.calls.put(None)
    if it.thread is not None:
        it.thread.join()


def test_what_is_there_at_once_is_added_up(peak):
    assert peak(lambda: block().exp().neg()) == 2 * SIZE


def test_what_is_there_in_turns_is_not(peak):
    def step() -> None:
        for _ in range(3):
            block()

    assert peak(step) == SIZE


def test_a_step_without_tensors_takes_nothing(peak):
    assert peak(lambda: None) == 0


def test_what_stays_counts(peak):
    kept: list[Tensor] = []
    assert peak(lambda: kept.append(block())) == SIZE


def test_what_the_step_before_has_left_makes_room_when_it_is_freed(peak):
    kept: list[Tensor] = []

    def step() -> None:
        kept.clear()
        kept.extend([block(), block()])

    assert peak(step, warm_up=1) == 0


def freeing() -> int:
    """What a step takes that frees a block from before it, and asks for another."""
    kept = [block()]

    def step() -> None:
        kept.clear()
        block()

    found: int = importlib.import_module("allocated").peak(step, warm_up=0).total
    return found


def test_what_was_there_before_all_steps_is_not_missed_when_it_is_freed(script):
    # In a process of its own: of blocks that were freed after an earlier test's count, torch still has the addresses.
    memory = importlib.import_module("memory")
    assert memory.fresh(freeing) == SIZE


def test_preparing_is_not_counted(peak):
    kept: list[Tensor] = []
    assert peak(lambda: block(), prepare=lambda: kept.extend([block(), block()])) == SIZE
    assert len(kept) == 2 * 3  # Once before each step.


def test_threads_of_a_step_are_seen(peak):
    kept: list[Tensor] = []

    def step() -> None:
        kept.clear()
        threads = [threading.Thread(target=lambda: kept.append(block())) for _ in range(3)]
        for thread in threads:
            thread.start()
            thread.join()
        kept.append(block())
        kept.clear()

    assert peak(step) == 4 * SIZE


def test_a_thread_that_stays_is_seen_in_later_steps(peak, worker):
    def step() -> None:
        worker(lambda: block().exp())

    assert peak(step) == 2 * SIZE


def test_memory_is_given_back_by_other_threads_too(peak, worker):
    kept: list[Tensor] = []

    def step() -> None:
        worker(lambda: kept.append(block()))
        kept.clear()
        kept.append(block())
        worker(kept.clear)
        block()

    assert peak(step) == SIZE


def test_backward_is_counted(peak):
    weight = torch.ones(MANY, requires_grad=True)

    def step() -> None:
        weight.grad = None
        weight.exp().backward(block())  # The exponential, its gradient, and the weight's.

    assert peak(step, warm_up=0) == 3 * SIZE


def test_workers_of_a_pipeline_are_seen(peak):
    layers = [nn.Linear(16, 16) for _ in range(8)]
    x = torch.randn(64, 16)

    def step_of(model: nn.Module) -> int:
        return peak(lambda: model(x).sum().backward(), prepare=lambda: model.zero_grad(set_to_none=True))

    alone = step_of(nn.Sequential(*layers))
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], "chunks": 1, "backward": "autograd"}
    assert alone > 8 * x.nbytes
    # It gathers its output, a tensor as large as x.
    assert alone <= step_of(SplitPipe(nn.Sequential(*layers), [4, 4], **options)) < alone + 2 * x.nbytes


def test_threads_of_torchgpipe_are_seen(peak):
    torchgpipe = pytest.importorskip("torchgpipe")
    x = torch.randn(64, 16)
    layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
    model = torchgpipe.GPipe(layers, [4, 4], devices=["cpu", "cpu"], chunks=2, checkpoint="never")
    assert peak(lambda: model(x).sum().backward()) > 8 * x.nbytes


def test_threads_that_started_before_are_an_error(script, monkeypatch, worker):
    worker(lambda: None)
    monkeypatch.undo()
    name = re.escape(worker.thread.name)
    with pytest.raises(RuntimeError, match=rf"is not seen: found \[.*'{name}'.*\]\. Expected none"):
        script.peak(lambda: worker(block))


def test_threads_of_the_first_step_are_no_error(script, monkeypatch, worker):
    others = threading.enumerate()
    monkeypatch.undo()
    unseen = script.Watch.unseen
    monkeypatch.setattr(script.Watch, "unseen", lambda self: set(unseen(self)) - {thread.name for thread in others})
    assert script.peak(lambda: worker(block)).total == SIZE


def test_a_profiler_that_runs_is_an_error(peak):
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="a profiler runs already"):
        peak(block)


def test_a_step_that_fails_ends_the_count(peak):
    def step() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        peak(step)
    assert threading.getprofile() is None
    assert peak(block) == SIZE


def test_an_address_may_have_been_that_of_another_block(script):
    blocks = [script.Block(time, *rest) for time, rest in enumerate(
        [(1, 4, 4), (1, -4, 0), (2, 50, 50), (1, 4, 54), (3, 20, 74), (3, -20, 54), (2, -50, 4), (4, 4, 8)]
    )]
    assert script.highest(blocks, first=1, last=4) == 20


def test_devices_are_added_up(script):
    assert script.Peak({"cuda:0": 3, "cuda:1": 4}).total == 7


def test_a_torch_that_no_thread_can_join_is_an_error(script, monkeypatch):
    monkeypatch.setattr(script, "_LIBRARIES", ("none.so",))
    script._join.cache_clear()
    try:
        with pytest.raises(OSError, match=r"expected .*enableProfilerInChildThread.* in one of none\.so"):
            script.peak(block)
    finally:
        script._join.cache_clear()


@pytest.mark.cuda
def test_on_cuda_the_allocator_counts(script):
    found = script.peak(lambda: torch.empty(2**20, device="cuda").exp(), device="cuda")
    assert found.devices["cuda:0"] == 8 * 2**20
