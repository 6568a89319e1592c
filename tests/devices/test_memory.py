"""Memory of devices: what is used again, what is counted, what a stream brings along."""
from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import SplitPipe
from splitpipe.core import stream
from splitpipe.deferral.pending import WeightGroup
from splitpipe.deferral.stash import Stash
from tests.devices.log import settle, softcuda
from tests.gpu.checks import squared

pytestmark = [pytest.mark.cuda, pytest.mark.devices(2), pytest.mark.thorough]
DEVICES = ["cuda:0", "cuda:1"]
WIDTH, ROWS = 16, 8


def linears(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


@pytest.mark.fake
def test_weight_gradients_that_the_engine_drops_are_done_before_their_memory_has_another_use(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does after an error in another thread, when the caller may be in its next step already."""
    flush = Stash._flush

    def dropped(self: Stash, group: WeightGroup) -> Any:
        shapes = [total.value.shape for total in flush(self, group) if total is not None]
        with stream.use(self._streams.compute):
            for shape in shapes:
                torch.zeros(shape, device=self._streams.device)
        raise ValueError("dropped")

    monkeypatch.setattr(Stash, "_flush", dropped)
    model = SplitPipe(linears(2), [1, 1], devices=DEVICES, chunks=2)
    loss = squared(model(torch.randn(ROWS, WIDTH, device=DEVICES[0])), torch.zeros((), device=DEVICES[1]))
    settle()
    with pytest.raises(ValueError, match="dropped"):
        loss.backward()
    assert softcuda.hazards() == []


class Own(torch.Stream):
    """A stream that keeps what it is of no use without, such as a green context."""

    context: nn.Module


def test_a_model_keeps_the_stream_object_that_it_was_given() -> None:
    own = Own(device=DEVICES[0])
    own.context = nn.Module()
    context = weakref.ref(own.context)
    model = SplitPipe(linears(1), [1], devices=[own], chunks=2)
    del own
    with torch.no_grad():  # Autograd's threads would let go of the stream at some later time.
        model(torch.randn(ROWS, WIDTH, device=DEVICES[0]))
    assert context() is not None
    del model
    gc.collect()
    assert context() is None


@pytest.mark.parametrize("device", DEVICES)  # One each: of two, a plan may leave out one by the times it has measured.
def test_a_plan_knows_what_is_free(device: str) -> None:
    torch.empty(2**26, dtype=torch.uint8, device=DEVICES[0])  # Freed, it is kept for later.
    plan = splitpipe.plan(
        linears(4), torch.randn(ROWS, WIDTH), target=torch.randn(ROWS, WIDTH), loss_fn=squared,
        devices=[device], chunks=2, schedules=["1f1b"], seconds=0.1, progress=False,
    )
    free = torch.cuda.get_device_properties(device).total_memory - torch.cuda.memory_allocated(device)
    assert plan.devices == (device,) and abs(plan.memory[0] - 0.9 * free) < 2**24
