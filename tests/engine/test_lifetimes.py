"""Modules, batches, graphs and threads go when nobody has them any more, without the garbage collector."""
from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from splitpipe import SplitPipe, attach
from tests.engine.models import Stack, batch
from tests.helpers.scheduled import inside, loss_of
from tests.helpers.twin import stages
from tests.promise.layers import Apply

OPTIONS = pytest.mark.parametrize("options", [
    {"checkpoint": "never"}, {"checkpoint": "always"}, {"schedule": "1f1b"},
    {"schedule": "zb-h1", "checkpoint": "always"}, {"backward": "autograd", "checkpoint": "always"},
], ids=str)


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
def test_what_layers_save_goes_with_a_dropped_call_or_with_backward_though_the_loss_lives_on(
    by: str, options: dict[str, Any]
) -> None:
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
