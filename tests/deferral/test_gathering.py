"""How many microbatches wait for one another, and have their weight gradients computed together."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe
from splitpipe.deferral import stash
from splitpipe.deferral.linear import Linear


def gathered(
    checkpoint: str, rows: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[int]:
    """Of how many microbatches, of so many rows, each weight gradient of a layer is computed."""
    found = []

    def accumulate(totals: Any, parts: Any) -> None:
        found.append(len(parts))
        given(totals, parts)

    given = Linear.accumulate
    monkeypatch.setattr(Linear, "accumulate", accumulate)
    # 4096 bytes, and those of a microbatch are 256 * rows.
    layers = nn.Sequential(nn.Linear(32, 32, bias=False))
    model = SplitPipe(layers, [1], devices=["cpu"], chunks=4, checkpoint=checkpoint, **options)
    for _ in range(2):  # The first step shows what a stage is like that is to be run again.
        found.clear()
        model(torch.randn(4 * rows, 32, requires_grad=True)).sum().backward()
    return found


@pytest.mark.parametrize(("rows", "together"), [(1, [4]), (8, [3, 1]), (16, [2, 1, 1]), (32, [1, 1, 1, 1])])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_weight_gradients_wait_if_they_hold_no_more_than_the_gradient(
    checkpoint: str, rows: int, together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stash, "_SMALL", 0)
    assert gathered(checkpoint, rows, monkeypatch) == together


def test_on_the_cpu_small_weight_gradients_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gathered("never", 64, monkeypatch) == [4]
    assert gathered("never", 128, monkeypatch) == [3, 1]
    assert gathered("always", 64, monkeypatch) == [4]
    monkeypatch.setattr(stash, "_LITTLE", 2**12)
    assert gathered("always", 64, monkeypatch) == [1, 1, 1, 1]


def test_a_limit_of_the_users_grants_nothing_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gathered("never", 1, monkeypatch, stash_limit=0) == [1, 1, 1, 1]
    assert gathered("never", 1, monkeypatch, stash_limit=512) == [3, 1]
    assert gathered("never", 1, monkeypatch, stash_limit=511) == [2, 2]
