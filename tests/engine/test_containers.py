"""Lists and dicts that a forward hands to its blocks: what blocks do to them its code sees."""
from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.models import CHECKPOINTS, SCHEDULES, assert_same_step, piped
from tests.helpers.covering import pairwise


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


@pairwise(way=["append", "replace", "pop", "reverse", "nested"], schedule=SCHEDULES, checkpoint=CHECKPOINTS)
def test_changes_of_a_list_or_dict_in_a_block_reach_its_caller(way: str, schedule: str, checkpoint: str) -> None:
    assert_same_step(
        Model(way), {"x": torch.randn(6, 4), "labels": torch.randn(6, 4)}, cuts=["blocks.1", "blocks.3"],
        schedule=schedule, checkpoint=checkpoint,
    )


class Output(OrderedDict[str, Any]):
    """A dict whose entries are attributes, too, which refuses to be updated, as transformers' outputs do."""

    def __init__(self, **entries: Any) -> None:
        super().__init__()
        for name, value in entries.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def update(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        raise TypeError("no update")


@dataclass
class State:
    """What blocks change, too."""

    h: Tensor
    other: Tensor
    kept: list[Tensor]


class Bag:
    """A container that its user has told pytree of."""

    def __init__(self, values: list[Tensor]) -> None:
        self.values = values


torch.utils._pytree.register_pytree_node(Bag, lambda bag: (bag.values, None), lambda values, _: Bag([*values]))


class Changing(nn.Module):
    """A block that changes a container of some kind, or returns what it was given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor, given: Any, more: Any = None) -> Any:
        y = self.layer(x).tanh()
        if self.kind == "dataclass":
            given.h, given.other = given.other + y, given.h
            given.kept.append(y)
        elif self.kind == "output":
            given["y"] = given.y + y
        elif self.kind == "bag":
            given.values.append(y)
        else:
            given.append(y)
        if self.kind == "deque":
            given.popleft()
        if self.kind == "twice":
            y = y + more["given"][-1]
        return (y, {"given": given}) if self.kind == "returned" else y


class Kinds(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.kind = nn.ModuleList(Changing(kind) for _ in range(4)), kind

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        made: dict[str, Any] = {
            "dataclass": lambda: State(x * 2, x, [x]), "output": lambda: Output(y=x * 2), "bag": lambda: Bag([x]),
            "deque": lambda: deque([x, x * 2, x * 3]),
        }
        given = made.get(self.kind, lambda: [x])()
        for block in self.blocks:
            if self.kind == "returned":
                x, other = block(x, given)
                assert other["given"] is given
                other["given"].append(x * 2)
            elif self.kind == "twice":
                x = block(x, given, {"given": given})
            else:
                x = block(x, given)
        if self.kind == "dataclass":
            found = [given.h, given.other, *given.kept]
        else:
            found = [given.y] if self.kind == "output" else [*(given.values if self.kind == "bag" else given)]
        loss = sum((k + 1) * (each - labels).square().mean() for k, each in enumerate([x, *found]))
        return {"loss": loss, "hidden": found}


@pairwise(kind=["dataclass", "deque", "output", "returned", "twice"], schedule=SCHEDULES, checkpoint=CHECKPOINTS)
def test_containers_of_all_kinds(kind: str, schedule: str, checkpoint: str) -> None:
    if kind == "twice" and checkpoint != "never":
        with pytest.raises(RuntimeError, match="is given one container in two places"):
            piped(Kinds(kind), ["blocks.1"], schedule=schedule, checkpoint=checkpoint)(
                torch.randn(6, 4), torch.randn(6, 4)
            )
        return
    assert_same_step(
        Kinds(kind), {"x": torch.randn(6, 4), "labels": torch.randn(6, 4)}, cuts=["blocks.1", "blocks.3"],
        schedule=schedule, checkpoint=checkpoint,
    )


@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "never"), ("gpipe", "always")])
def test_a_change_that_can_not_come_back_is_an_error(schedule: str, checkpoint: str) -> None:
    model = piped(Kinds("bag"), ["blocks.1"], schedule=schedule, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="a block has changed the Bag that it was given"):
        model(torch.randn(6, 4), torch.randn(6, 4))


torch.utils._pytree.register_pytree_node(
    Output, lambda output: ([*output.values()], [*output]), lambda values, names: Output(**dict(zip(names, values)))
)
