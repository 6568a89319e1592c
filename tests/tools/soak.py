"""Many steps of many models, with faults of all sorts: gradients stay right, and nothing is left behind.

    python -m tests.tools.soak --steps 2000

Beside each pipeline its module is trained. After a step without a fault both have the same gradients, after one with
a fault the pipeline's are as they were. Whenever a model is dropped, threads, file handles, tensors and the package's
own objects are counted: after a while, no more of them may come.
"""
from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import pickle
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, schedule
from tests.helpers.faults import ERRORS, SIGNALS, Fault, Loss, Place, fragile, throws, watch

SCHEDULES = [None, None, None, "gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "v-half"]
WIDTH = 8
#: How much of a gradient's largest element rounding may change.
ROUNDING = {False: 1e-4, True: 5e-2}


def _tasks(most: float) -> int:
    """Threads as the system counts them. Above the most, one that Python has done with may take a moment to go."""
    end = time.monotonic() + 1
    while (found := len(os.listdir("/proc/self/task"))) > most and time.monotonic() < end:
        time.sleep(0.001)
    return found


class Count(NamedTuple):
    """What could grow."""

    threads: int
    tasks: int
    handles: int
    tensors: int
    own: int
    mib: float

    @classmethod
    def now(cls, tasks: float = math.inf) -> Count:
        """What there is; of tasks, once they are no more than so many, or after a second."""
        gc.collect()
        kinds = Counter(map(type, gc.get_objects()))
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return cls(
            threads=threading.active_count(),
            tasks=_tasks(tasks),
            handles=len(os.listdir("/proc/self/fd")),
            tensors=sum(number for kind, number in kinds.items() if issubclass(kind, Tensor)),
            own=sum(number for kind, number in kinds.items() if kind.__module__.split(".")[0] == "splitpipe"),
            mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        )


@dataclass
class Report:
    """What was done, and what was left behind after each model.

    Attributes:
        did: how often what was done.
        counts: after each model.
        kept: tensors that each model had more at the end of its life than before.
        seconds: it took.
    """

    did: Counter[str] = field(default_factory=Counter)
    counts: list[Count] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def grown(self) -> list[str]:
        """What is more at the end than after the warm-up, the first quarter of the models."""
        warm = max(1, len(self.counts) // 4)
        first, last = self.counts[:warm], self.counts[-1]
        names = ("threads", "tasks", "handles", "tensors", "own")
        grown = [name for name in names if getattr(last, name) > max(getattr(count, name) for count in first)]
        return grown + ["tensors of a model"] * any(kept > 0 for kept in self.kept[warm:])

    def __str__(self) -> str:
        warm, last = self.counts[max(1, len(self.counts) // 4) - 1], self.counts[-1]
        lines = [f"{sum(self.did.values())} steps with {len(self.counts)} models in {self.seconds:.0f} s:"]
        lines += [f"  {number:5} {what}" for what, number in sorted(self.did.items())]
        lines += [f"{'':12}{'warm':>10}{'most':>10}{'last':>10}"]
        for at, name in enumerate(Count._fields):
            most = max(count[at] for count in self.counts)
            lines.append(f"{name:12}{warm[at]:10.0f}{most:10.0f}{last[at]:10.0f}")
        lines.append(f"more tensors at the end of a model's life, at most: {max(self.kept, default=0)}")
        lines.append("grown: " + ", ".join(self.grown) if self.grown else "flat")
        return "\n".join(lines)


class Pair:
    """A pipeline and its module, side by side."""

    def __init__(self, draw: random.Random, device: str) -> None:
        self._draw = draw
        name = draw.choice(SCHEDULES)
        each = 1 if name is None else schedule.build(name, 1, 1).stages
        devices = draw.choice([1, 2]) if each > 1 else draw.choice([2, 3])
        module, balance, fault = fragile(devices * each, WIDTH)
        self.plain = copy.deepcopy(module).to(device)
        options: dict[str, Any] = {} if name is None else {"loss_fn": Loss(fault, devices * each - 1), "schedule": name}
        places = [torch.device(device, None if device == "cpu" else at % torch.accelerator.device_count())
                  for at in range(devices)]
        self.scheduled, self.device, self.autocast = name is not None, device, draw.random() < 0.3
        self.model = SplitPipe(
            module, balance, devices=places, chunks=draw.choice([1, 2, 3, 4]), deferred_batch_norm=True,
            checkpoint=draw.choice(["always", "except_last", "never"]), backward=draw.choice(["split", "autograd"]),
            stash_limit=draw.choice([None, None, 0]), **options,
        )
        self.settle()

    def settle(self) -> None:
        """What a copy has not: its hooks; and where its fault is."""
        layer: Any = self.model[0]
        self.fault: Fault = layer.meets.fault
        self._handles = watch(self.model, self.fault)
        self.same()
        self.batch()
        self.places: list[Place] = []

    def same(self) -> None:
        """Puts the module in the state of the pipeline."""
        self.plain.load_state_dict(self.model.state_dict())

    def batch(self) -> None:
        """Another batch; a norm needs two rows of each microbatch."""
        chunks = self.model.chunks
        sizes = [rows for rows in range(2, 5 * chunks) if torch.arange(rows).chunk(chunks)[-1].numel() > 1]
        rows = self._draw.choice(sizes)
        self.rows = torch.arange(rows)
        self.x, self.y = (torch.randn(rows, WIDTH, device=self.device) for _ in range(2))

    def clear(self) -> None:
        for leaf in (*self.plain.parameters(), *self.model.parameters()):
            leaf.grad = None

    def loss(self, module: nn.Module) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            if self.scheduled and module is self.model:
                loss: Tensor = module((self.x, self.rows), target=self.y)
                return loss
            output = module((self.x, self.rows))[0]
        return F.mse_loss(output.to(self.y.device, self.y.dtype), self.y)

    def compare(self) -> None:
        """The tensors of both."""
        tolerance = ROUNDING[self.autocast]
        found = {**dict(self.model.named_buffers()), **{k: p.grad for k, p in self.model.named_parameters()}}
        for name, wanted in [*self.plain.named_buffers(), *((k, p.grad) for k, p in self.plain.named_parameters())]:
            tensor = found[name]
            assert tensor is not None and wanted is not None, name
            tensor = tensor.to(wanted.device)
            largest = max(1e-3, wanted.abs().max().item())
            wrong = (tensor - wanted).abs().max().item() / largest
            assert wrong <= tolerance, f"{name} is wrong by {wrong:.3g} of {largest:.3g}"

    def step(self) -> str:
        """A step of both; they are equal."""
        self.clear()
        self.batch()
        with self.fault.listening() as heard:
            self.loss(self.model).backward()
        self.places = sorted(heard, key=repr)  # The order of threads is not drawn.
        self.loss(self.plain).backward()
        self.compare()
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
        self.same()
        self.clear()
        return "without a fault"

    def thrown_away(self) -> str:
        self.loss(self.model)
        assert all(parameter.grad is None for parameter in self.model.parameters())
        self.same()
        return "thrown away"

    def fails(self) -> str:
        """A step that fails at some place of the last one; what the call leaves is as it was."""
        while not self.places:
            self.step()
        self.clear()
        place = self._draw.choice(self.places)
        error: type[BaseException]
        if self._draw.random() < 0.25 and threading.current_thread() is threading.main_thread():
            way, error = self._draw.choice(list(SIGNALS)), KeyboardInterrupt
            act = SIGNALS[way]
        else:
            error = self._draw.choice(ERRORS)
            way, act = error.__name__, throws(error("no"))
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        called = raised = False
        self.fault.arm(place, act)
        del act
        try:
            loss = self.loss(self.model)
            called = True
            loss.backward()
        except error:
            raised = True
        assert raised and self.fault.fired == place, f"{way} at {place} was not raised"
        state = self.model.state_dict()
        if not called:
            assert all(parameter.grad is None for parameter in self.model.parameters())
            assert all(state[name].equal(before[name]) for name in before), f"{way} at {place} has changed the model"
        assert all(state[name].equal(before[name]) for name, _ in self.model.named_parameters())
        self.same()
        self.clear()
        return f"{way} raised"

    def copied(self) -> str:
        self.model = copy.deepcopy(self.model)
        self.settle()
        return "deepcopy"

    def pickled(self) -> str:
        for handle in self._handles:
            handle.remove()
        self.model = pickle.loads(pickle.dumps(self.model))
        self.settle()
        return "pickle"

    def loaded(self) -> str:
        state = {name: tensor * 0.99 if tensor.is_floating_point() else tensor
                 for name, tensor in self.plain.state_dict().items()}
        self.model.load_state_dict(state)
        self.same()
        return "load_state_dict"

    def evaluated(self) -> str:
        self.model.eval()
        self.plain.eval()
        self.batch()
        with torch.no_grad():
            loss, expected = self.loss(self.model), self.loss(self.plain)
        assert abs(loss.item() - expected.item()) <= ROUNDING[self.autocast] * max(1.0, expected.item())
        self.model.train()
        self.plain.train()
        self.places = []
        return "eval"

    def elsewhere(self) -> str:
        """A step in a thread of its own, with a fault or without."""
        found: list[str | BaseException] = []

        def run(call: Callable[[], str]) -> None:
            try:
                found.append(call())
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run, args=(self._draw.choice([self.step, self.fails]),))
        thread.start()
        thread.join()
        [what] = found
        if isinstance(what, BaseException):
            raise what
        return f"{what}, in another thread"

    def any(self) -> str:
        """One of all these."""
        return self._draw.choices(
            [self.step, self.fails, self.thrown_away, self.copied, self.pickled, self.loaded, self.evaluated,
             self.elsewhere],
            [10, 10, 1, 1, 1, 1, 1, 2],
        )[0]()


def _ended(before: set[threading.Thread]) -> None:
    """Waits for the workers of models that are gone; a thread that is ending may hold what is to be collected."""
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        for _ in range(60):
            thread.join(0.5)
            if not thread.is_alive():
                break
            gc.collect()


def soak(steps: int, seed: int = 0, device: str = "cpu") -> Report:
    """Takes the steps.

    Args:
        steps: how many.
        seed: of what is drawn.
        device: of all stages; with "cuda", those devices that there are, in turn.

    Raises:
        AssertionError: a gradient is wrong, a failed step has changed something, an error was not raised.
    """
    draw = random.Random(seed)
    report, start, tasks = Report(), time.monotonic(), len(os.listdir("/proc/self/task"))
    threads = set(threading.enumerate())
    life = max(8, min(40, steps // 10))
    random_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    gc.freeze()  # What was there before is not counted, and not looked through each time.
    try:
        done = 0
        while done < steps:
            pair = Pair(draw, device)
            tensors = 0
            for _ in range(2):
                for _ in range(min(life // 2, steps - done)):
                    report.did[pair.any()] += 1
                    done += 1
                pair.step()
                before, tensors = tensors, Count.now().tensors
            report.kept.append(tensors - before)
            if draw.random() < 0.5:
                vars(pair.model)["itself"] = pair.model  # Garbage, for the collector to find.
            del pair
            _ended(threads)
            report.counts.append(Count.now(report.counts[0].tasks if report.counts else tasks))
    finally:
        gc.unfreeze()
        torch.random.set_rng_state(random_state)
    report.seconds = time.monotonic() - start
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the stages (default: %(default)s)")
    given = parser.parse_args(arguments)
    report = soak(given.steps, given.seed, given.device)
    print(report)
    return 1 if report.grown else 0


if __name__ == "__main__":
    sys.exit(main())
