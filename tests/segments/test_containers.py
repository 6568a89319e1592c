"""Lists and dicts that a forward hands to its blocks: what blocks do to them its code sees."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.segments.models import CHECKPOINTS, SCHEDULES, assert_same_step


class Keeper(nn.Module):
    """A block that changes what it is given, besides what it returns."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(4, 4), way

    def forward(self, x: Tensor, kept: list[Any], *, names: dict[str, Any]) -> Tensor:
        y = self.layer(x).tanh()
        if self.way == "append":
            kept.append(y)
        elif self.way == "replace":
            kept[0] = kept[0] + y
        elif self.way == "pop":
            y = y + kept.pop() if len(kept) > 1 else y
        elif self.way == "reverse":
            kept.insert(0, kept.pop())
        elif self.way == "nested":
            names["inner"]["of"].append((y, None))
            names["new"] = y * 2
            names.pop("old", None)
        return y


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeper(each) for each in ("append", way, "append", way))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        kept, names = [x * 2], {"inner": {"of": [(x, None)]}, "old": x}
        for block in self.blocks:
            x = block(x, kept, names=names)
        hidden = [x, *kept, *(pair[0] for pair in names["inner"]["of"]), *(names.get(k, x) for k in ("old", "new"))]
        loss = sum((k + 1) * (each - labels).square().mean() for k, each in enumerate(hidden))
        return {"loss": loss, "hidden": hidden, "keys": [*names]}


@pytest.mark.parametrize("way", ["append", "replace", "pop", "reverse", "nested"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_what_a_block_does_to_a_list_or_dict_its_caller_sees(way: str, schedule: str, checkpoint: str) -> None:
    assert_same_step(
        Model(way), {"x": torch.randn(6, 4), "labels": torch.randn(6, 4)}, cuts=["blocks.1", "blocks.3"],
        schedule=schedule, checkpoint=checkpoint,
    )
