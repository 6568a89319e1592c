"""Random numbers inside torch.utils.checkpoint, where a schedule has other stages draw while it recomputes."""
from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from splitpipe import SplitPipe, schedule
from splitpipe.core import generator
from splitpipe.schedule.op import Op, Schedule

Where = Callable[[str], None]
X = torch.linspace(-2, 2, 6 * 16).view(6, 16)


class Meeting:
    """Where two threads wait for each other, unless the one keeps the other from the default generator."""

    def __init__(self) -> None:
        self.lock = generator._Lock()
        self.waiting = 0
        self.there: set[str] = set()
        self.changed = threading.Condition()

    def acquire(self, timeout: float) -> bool:
        if self.lock.acquire(0):
            return True
        self._wait(1)
        got = self.lock.acquire(timeout)
        self._wait(-1)
        return got

    @property
    def place(self) -> object:
        return self.lock.place

    def _wait(self, more: int) -> None:
        with self.changed:
            self.waiting += more
            self.changed.notify_all()

    def release(self) -> None:
        self.lock.release()

    def come(self, here: str, there: str) -> None:
        """Says that one is here, and waits for another to be there."""
        with self.changed:
            self.there.add(here)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: there in self.there or self.waiting, 60)


class Told(torch.autograd.Function):
    """Tells of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Where) -> Tensor:
        ctx.tell = tell
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.tell("backward")
        return grad, None


class Layer(nn.Module):
    """Calls a function of its input and its parameter, checkpointed or not, and tells of what it does."""

    def __init__(self, function: Callable[[Tensor], Tensor], checkpointed: bool, tell: Where) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.function = function
        self.checkpointed = checkpointed
        self.tell = tell

    def forward(self, x: Tensor) -> Any:
        y = checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)
        return Told.apply(y, self.tell)

    def run(self, x: Tensor) -> Tensor:
        self.tell("begin")
        y = self.function(x * self.weight)
        self.tell("end")
        return y


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def nowhere(what: str) -> None:
    pass


def first(meeting: Meeting, call: int) -> Where:
    """Tells as the first stage, in one of whose calls the second one's BW1 is to recompute."""
    begun: list[str] = []

    def tell(what: str) -> None:
        if what == "begin":
            begun.append(what)
        if what != "backward" and len(begun) == call:
            meeting.come(*(("drawing", "recomputing") if what == "begin" else ("drawn", "drawn")))

    return tell


def second(meeting: Meeting) -> Where:
    """Tells as the second stage."""
    backward: list[str] = []

    def tell(what: str) -> None:
        if what == "backward":
            backward.append(what)
            if len(backward) == 2:
                meeting.come("backward", "drawing")
        elif what == "begin" and len(backward) == 2:
            meeting.come("recomputing", "drawn")

    return tell


#: The first stage's forward of microbatch 2 and the second one's backward of 1 have nothing to wait for but each other.
ROWS = ["F0 F1 BW0 F2 BW1 BW2", "F0 F1 BW0 BW1 F2 BW2"]


def crossing() -> Schedule:
    def ops(stage: int) -> list[Op]:
        kinds = [(word.rstrip("012"), int(word[-1])) for word in ROWS[stage].split()]
        return [Op(kind, stage, i) for kind, i in kinds]  # type: ignore[arg-type]

    return Schedule(rows=[ops(0), ops(1)], placement=[0, 1])


def trained(layers: list[Layer], steps: int, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Losses and gradients of some steps, and the default generator after them."""
    torch.manual_seed(3)
    model = SplitPipe(nn.Sequential(*layers), balance=[1] * len(layers), chunks=3, **options)
    found = []
    for _ in range(steps):
        x = X.clone().requires_grad_()
        if "loss_fn" in options:
            loss = model(x, target=X)
        else:
            loss = F.mse_loss(model(x), X)
        loss.backward()
        found += [loss.detach(), x.grad]
    return [*found, *(layer.weight.grad for layer in layers)], torch.default_generator.get_state()


def compare(
    functions: tuple[Any, Any], checkpointed: tuple[bool, bool], told: tuple[Where, Where], steps: int
) -> None:
    both = list(zip(functions, checkpointed))
    expected, state = trained([Layer(*one, nowhere) for one in both], steps, devices=["cpu"] * 2, checkpoint="never")
    layers = [Layer(*one, tell) for one, tell in zip(both, told)]
    found, after = trained(layers, steps, devices=["cpu"] * 2, schedule=crossing(), loss_fn=F.mse_loss)
    torch.testing.assert_close(found, expected)
    assert torch.equal(after, state)


def drawing(x: Tensor) -> Tensor:
    return torch.ops.aten.bernoulli(torch.full_like(x, 0.5)) * x


@pytest.mark.parametrize(("functions", "checkpointed", "call"), [
    ((dropped, dropped), (True, True), 4),  # The first stage calls its layer in F0, F1, BW0 and F2.
    ((drawing, torch.tanh), (False, True), 3),
])
def test_a_recomputation_draws_beside_another_stage(
    functions: Any, checkpointed: Any, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting()
    monkeypatch.setattr(generator, "_process_lock", SimpleNamespace(lock=meeting))
    compare(functions, checkpointed, (first(meeting, call), second(meeting)), steps=2)
    assert meeting.there == {"backward", "drawing", "recomputing", "drawn"}


@pytest.mark.parametrize("workers", [2, 1])
def test_beginning_to_draw_in_a_checkpoint_is_an_error_once(workers: int) -> None:
    """Of two workers; one alone draws as ever."""
    begun = []

    def later(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) if begun else x.tanh()

    layers = nn.Sequential(Layer(later, True, nowhere), Layer(torch.tanh, False, nowhere))
    plan = crossing() if workers == 2 else schedule.build("interleaved-1f1b", 1, 3, stages_per_device=2)
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * workers, chunks=3, schedule=plan, loss_fn=F.mse_loss)

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        layers.zero_grad()
        model(X, target=X).backward()
        return [layer.weight.grad.clone() for layer in layers]

    step()
    begun.append(True)
    if workers == 2:
        with pytest.raises(RuntimeError, match="begun to draw random numbers inside torch.utils.checkpoint"):
            step()
    else:
        step()  # Not known to draw yet, it draws other numbers than in later ones.
    assert all(map(torch.equal, step(), step()))


def test_a_turn_ends_in_another_thread_than_it_began() -> None:
    begun: list[bool] = []
    one = generator.LockOnRecompute(generator._process_lock, lambda: begun.append(True))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: hash(one), range(8)))  # As autograd's threads of two devices.
        assert begun == [True] and generator._process_lock.lock is not one.lock
        torch.rand(3)
        one.end()
        pool.submit(Context().run, hash, one).result()
        assert one.lock is generator._process_lock.lock
        with generator.exclusive_generator(torch.default_generator.get_state()):
            pass
        assert generator._process_lock.lock.acquire(timeout=0)
        generator._process_lock.lock.release()


def test_a_pipeline_inside_of_a_recomputation_draws_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "LOCK_TIMEOUT", 5.0)
    inner = SplitPipe(
        nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), balance=[1, 1], devices=["cpu"] * 2, chunks=2,
    )
    weight = torch.ones(16, requires_grad=True)
    x = checkpoint(lambda t: inner(t).tanh(), X * weight, use_reentrant=False)
    with generator.lock_on_recompute(lambda: None):
        x.sum().backward()
    assert weight.grad is not None
