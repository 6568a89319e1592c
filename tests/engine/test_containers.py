"""Lists, dicts and other containers that a forward hands to its blocks: what blocks do to them its code sees."""
from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.models import CHECKPOINTS, SCHEDULES, assert_same_step, batch, piped
from tests.helpers.covering import pairwise


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
torch.utils._pytree.register_pytree_node(
    Output, lambda output: ([*output.values()], [*output]), lambda values, names: Output(**dict(zip(names, values)))
)


def replaced(kept: list[Tensor], y: Tensor) -> None:
    kept[0] = kept[0] + y


def popped(kept: list[Tensor], y: Tensor) -> Tensor:
    return y + kept.pop() if len(kept) > 1 else y


def nested(names: dict[str, Any], y: Tensor) -> None:
    names["inner"]["of"].append((y, None))
    names["new"] = y * 2
    names.pop("old", None)


def stated(state: State, y: Tensor) -> None:
    state.h, state.other = state.other + y, state.h
    state.kept.append(y)


def shifted(given: deque[Tensor], y: Tensor) -> None:
    given.append(y)
    given.popleft()


#: By name: a container of a tensor; what a block does to it, who may give another output; the tensors that are in it.
KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Any], Callable[[Any], list[Tensor]]]] = {
    "append": (lambda x: [x * 2], lambda kept, y: kept.append(y), list),
    "replace": (lambda x: [x * 2], replaced, list),
    "pop": (lambda x: [x * 2], popped, list),
    "reverse": (lambda x: [x * 2], lambda kept, y: kept.insert(0, kept.pop()), list),
    "nested": (lambda x: {"inner": {"of": [(x, None)]}, "old": x}, nested, lambda names: [
        *(pair[0] for pair in names["inner"]["of"]), *(names[name] for name in ("old", "new") if name in names)]),
    "dataclass": (lambda x: State(x * 2, x, [x]), stated, lambda state: [state.h, state.other, *state.kept]),
    "deque": (lambda x: deque([x, x * 2, x * 3]), shifted, list),
    "output": (lambda x: Output(y=x * 2), lambda output, y: output.__setitem__("y", output.y + y), lambda o: [o.y]),
    "bag": (lambda x: Bag([x]), lambda given, y: given.values.append(y), lambda given: given.values),
    "returned": (lambda x: [x], lambda given, y: (given.append(y), (y, {"given": given}))[1], list),
    "twice": (lambda x: [x], lambda given, y: given.append(y), list),
}


class Changing(nn.Module):
    """A block that changes a container, which it is given once or twice, besides what it returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor, given: Any, *, kept: list[Tensor], more: Any = None) -> Any:
        y = self.layer(x).tanh()
        kept.append(y)
        found = KINDS[self.kind][1](given, y)
        y = y if found is None else found
        return y if more is None else y + more["given"][-1]


class Kinds(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.kind = nn.ModuleList(Changing(kind) for _ in range(4)), kind

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        make, _, tensors = KINDS[self.kind]
        given, kept = make(x), [x]
        for block in self.blocks:
            if self.kind == "returned":
                x, other = block(x, given, kept=kept)
                assert other["given"] is given
                other["given"].append(x * 2)
            else:
                more = {"more": {"given": given}} if self.kind == "twice" else {}
                x = block(x, given, kept=kept, **more)
        found = [x, *kept, *tensors(given)]
        loss = sum((k + 1) * (each - labels).square().mean() for k, each in enumerate(found))
        return {"loss": loss, "hidden": found, "keys": [*given] if isinstance(given, dict) else []}


@pairwise(kind=[kind for kind in KINDS if kind != "bag"], schedule=SCHEDULES, checkpoint=CHECKPOINTS)
def test_changes_of_a_container_in_a_block_reach_its_caller(kind: str, schedule: str, checkpoint: str) -> None:
    if kind == "twice" and checkpoint != "never":
        model = piped(Kinds(kind), ["blocks.1"], schedule=schedule, checkpoint=checkpoint)
        with pytest.raises(RuntimeError, match="is given one container in two places"):
            model(**batch())
        return
    assert_same_step(
        Kinds(kind), batch(), cuts=["blocks.1", "blocks.3"], schedule=schedule, checkpoint=checkpoint,
    )


@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "never"), ("gpipe", "always")])
def test_a_change_that_can_not_come_back_is_an_error(schedule: str, checkpoint: str) -> None:
    model = piped(Kinds("bag"), ["blocks.1"], schedule=schedule, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="a block has changed the Bag that it was given"):
        model(**batch())
