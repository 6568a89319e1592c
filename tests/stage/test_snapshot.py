"""Parameters and buffers are put back for a recomputation, and only for it."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from splitpipe.stage.inventory import Inventory, Parameters
from splitpipe.stage.snapshot import Clones, Snapshot


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("nothing", None)


def taken(module: nn.Module, clones: Clones | None = None) -> tuple[Snapshot, Clones]:
    clones = clones or Clones()
    inventory = Inventory([("0", module)])
    return Snapshot(inventory, Parameters(inventory), clones), clones


def clone(module: nn.Module, clones: Clones, fresh: bool = False) -> list[Tensor]:
    """The clones that a microbatch takes."""
    inventory = Inventory([("0", module)])
    return clones.take(inventory.buffers(inventory.slots()), fresh).clones


def test_tensors_and_their_names_are_as_they_were_inside() -> None:
    holder = Holder()
    snapshot, _ = taken(holder)
    count, weight = holder.count, holder.weight
    holder.weight = other = nn.Parameter(torch.zeros(3))
    for _ in range(2):
        holder.count = now = torch.ones(3)
        with snapshot.restored():
            assert holder.count is count and holder.weight is weight
            holder.count = holder.count + 7
        assert holder.count is now and holder.weight is other
    del holder.count
    holder.register_buffer("later", torch.zeros(1))
    holder.register_buffer("counted", count)
    with snapshot.restored():
        assert list(holder._buffers) == ["count", "nothing"] and holder.count is count
        holder.register_parameter("inside", nn.Parameter(torch.ones(1)))
    assert list(holder._buffers) == ["nothing", "later", "counted"] and list(holder._parameters) == ["weight"]


def test_a_buffer_that_stays_is_cloned_once() -> None:
    holder = Holder()
    snapshot, clones = taken(holder)
    snapshot.compare()
    (first,) = clone(holder, clones)
    assert clone(holder, clones)[0] is first and clone(holder, clones, fresh=True)[0] is not first
    holder.count.add_(1)
    (second,) = clone(holder, clones)
    assert second.tolist() == [1, 1, 1]
    holder.count = torch.ones(3)  # Another buffer, at the version that the first one had.
    assert clone(holder, clones)[0] is not second


def test_statistics_in_eval_are_cloned_once() -> None:
    norm, clones = nn.BatchNorm1d(3).eval(), Clones()
    snapshot, _ = taken(norm, clones)
    snapshot.compare()
    first = clone(norm, clones)
    assert all(x is y for x, y in zip(first, clone(norm, clones)))
    norm.train()
    norm(torch.rand(4, 3))
    norm.eval()
    assert all(x is not y for x, y in zip(first, clone(norm, clones)))
    with snapshot.restored():
        assert norm.running_mean.tolist() == [0, 0, 0]  # type: ignore[union-attr]
