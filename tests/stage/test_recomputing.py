"""Random numbers inside torch.utils.checkpoint, which recomputes while other stages may draw."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from splitpipe import SplitPipe, schedule
from splitpipe.core import generator
from splitpipe.schedule.op import Op, Schedule

X = torch.linspace(-2, 2, 6 * 16).view(6, 16)


class Layer(nn.Module):
    """Calls a function of its input and its parameter, checkpointed or not."""

    def __init__(self, function: Callable[[Tensor], Tensor], checkpointed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.function, self.checkpointed = function, checkpointed

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)

    def run(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


#: The first stage's forward of microbatch 2 and the second one's backward of 1 have nothing to wait for but each other.
ROWS = ["F0 F1 BW0 F2 BW1 BW2", "F0 F1 BW0 BW1 F2 BW2"]


def crossing() -> Schedule:
    def ops(stage: int) -> list[Op]:
        kinds = [(word.rstrip("012"), int(word[-1])) for word in ROWS[stage].split()]
        return [Op(kind, stage, i) for kind, i in kinds]  # type: ignore[arg-type]

    return Schedule(rows=[ops(0), ops(1)], placement=[0, 1])


@pytest.mark.parametrize("workers", [2, 1])
def test_beginning_to_draw_in_a_checkpoint_is_an_error_once(workers: int) -> None:
    """Of two workers; one alone draws as ever."""
    begun = []

    def later(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) if begun else x.tanh()

    layers = nn.Sequential(Layer(later, True), Layer(torch.tanh, False))
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
