"""A tensor with a graph that a block leaves in an attribute: used right after the block, or never, and by no other."""
from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from splitpipe import SplitPipe
from splitpipe.partition.stale import Stale
from tests.engine.models import CHECKPOINTS, SCHEDULES, assert_same_step, piped
from tests.helpers.covering import pairwise
from tests.helpers.twin import assert_same_tensors


class Experts(nn.Module):
    """A layer with a gate, which leaves the balance of its experts, and what it has computed it from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.weights = self.gate(x).softmax(1)
        self.gate.balance = self.weights.var(1).sum()
        self.history = {"weights": [self.weights]}
        return x + self.layer(x) * self.weights[:, :1]


class Mixture(nn.Module):
    """Experts; the loss includes what ``after`` computes right after a block, and what ``last`` computes at the end."""

    def __init__(self, after: Callable[[Any], Any] | None = None, last: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(4))
        self.head = nn.Linear(4, 4)
        self.after, self.last = after, last

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        more: list[Any] = []
        for block in self.blocks:
            x = block(x)
            more += [] if self.after is None else [self.after(block)]
        more += [] if self.last is None else map(self.last, self.blocks)
        y = self.head(x)
        return {"loss": F.mse_loss(y, labels) + 0.1 * sum(more), "y": y}


def batch(rows: int = 7) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 4), "labels": torch.randn(rows, 4)}


#: What the code right after a block computes from what it has left.
AFTER: dict[str, Any] = {
    "unused": None,
    "number": lambda block: block.gate.balance / len(block.weights),
    "rows": lambda block: block.history["weights"][0].mean(),
}


@pairwise(after=[*AFTER], schedule=SCHEDULES, checkpoint=CHECKPOINTS)
def test_a_block_may_leave_tensors_for_the_code_right_after_it(after: str, schedule: str, checkpoint: str) -> None:
    module = Mixture(AFTER[after])
    model = assert_same_step(module, batch(), cuts=["blocks.2"], schedule=schedule, checkpoint=checkpoint)
    left = [vars(part)[own] for part in model.modules() for own in {"weights", "balance", "history"} & {*vars(part)}]
    assert len(left) == 12 and all(type(value) is Stale for value in left)


USES: list[Callable[[Any], Any]] = [
    lambda x: x.mean(), lambda x: x + 1, lambda x: 1 + x, lambda x: torch.ones(2) * x, lambda x: x / torch.ones(2),
    lambda x: torch.stack([x]), lambda x: F.mse_loss(x, target=torch.ones(2)), lambda x: sum([x]), bool, float, len,
    list, lambda x: x[0], lambda x: x @ x, lambda x: x > 0, lambda x: hasattr(x, "grad_fn"), lambda x: -x,
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_later_stage_may_not_use_them_nor_what_comes_after_the_call(schedule: str) -> None:
    model, arguments = piped(Mixture(last=lambda block: block.gate.balance), ["blocks.2"], schedule=schedule), batch()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'blocks.0.gate.balance'.* is used by a later stage") as caught:
            model(**arguments)
        assert "between blocks, stage 1" in str(caught.value.__notes__)
    model.last = None
    model(**arguments)["loss"].backward()
    for use in USES:
        with pytest.raises(RuntimeError, match="'blocks.0.weights'.* or after the call"):
            use(model.blocks[0].weights)


def test_recomputation_leaves_none_either() -> None:
    model = piped(Mixture(), ["blocks.2"], checkpoint="always")
    for _ in range(2):
        model(**batch())["loss"].backward()
        with pytest.raises(RuntimeError, match="'blocks.3.weights'.* or after the call"):
            model.blocks[3].weights.sum()


def test_the_model_can_be_copied_and_saved_after_a_call() -> None:
    model = piped(Mixture(), ["blocks.2"])
    model(**batch())
    for again in (copy.deepcopy(model.inner), pickle.loads(pickle.dumps(model.inner.blocks[0]))):
        block = again.blocks[0] if isinstance(again, Mixture) else again
        assert "of one microbatch" in repr(block.weights)
        with pytest.raises(RuntimeError, match="'blocks.0.weights'"):
            block.weights.sum()


def test_a_single_microbatch_is_the_batch() -> None:
    arguments = batch()
    model = piped(Mixture(), ["blocks.2"])
    model(**arguments)
    model(**{name: x[:1] for name, x in arguments.items()})
    assert isinstance(model.blocks[0].weights, Tensor) and len(model.blocks[0].weights) == 1


class Chain(nn.Module):
    """Blocks, one of which may come twice, and a loss."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.several = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.several:
            x = block(x)
        return {"loss": x.square().mean()}


class Recurrent(nn.Module):
    """Adds what it computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: Any = None
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if self.last is None else y + self.last.sum()


class Remembering(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Collecting(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        self.all.append(super().forward(x))
        return self.all[-1]


@pytest.mark.parametrize(("block", "names", "says"), [
    (Remembering, "abc", "'several.0.last', which was a tensor with a graph, is used by .*another microbatch"),
    (Collecting, "abc", "the forward left 'several.0.all.*, a tensor with a graph"),
    (Experts, "aba", "the forward sets 'several.0.weights', .* in stages . and ."),
], ids=["read by the next microbatch", "added to a list", "called in two stages"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_microbatches_would_mix_is_an_error_each_time(
    block: Callable[[], nn.Module], names: str, says: str, schedule: str
) -> None:
    blocks = {name: block() for name in names}
    model = SplitPipe(
        Chain(blocks[name] for name in names), cuts=["several.1"], devices=["cpu"] * 2, chunks=2,
        schedule=schedule,
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            model(torch.randn(8, 4))


def test_an_error_of_the_forward_is_not_hidden() -> None:
    def failing(block: Any) -> Any:
        raise ZeroDivisionError("of the user's")

    with pytest.raises(ZeroDivisionError, match="of the user's"):
        piped(Mixture(failing), ["blocks.2"])(**batch())


class Reset(Mixture):
    """Sets what blocks leave to another value, at the start or at the end."""

    def __init__(self, when: str, value: Any) -> None:
        super().__init__(lambda block: block.gate.balance)
        self.when, self.value = when, value

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks if self.when == "start" else ():
            block.gate.balance = self.value  # type: ignore[union-attr]
        y = super().forward(x, labels)
        for block in self.blocks if self.when == "end" else ():
            block.gate.balance = self.value  # type: ignore[union-attr]
        return y


@pairwise(schedule=["gpipe", "1f1b"], value=[None, 0.0], when=["start", "end"], rows=[2, 7])
def test_code_on_another_stage_may_not_set_them(schedule: str, value: Any, when: str, rows: int) -> None:
    # With ops in this order, two microbatches may both set it before the block's stage first runs.
    model, errors = piped(Reset(when, value), ["blocks.2"], schedule=schedule), 0
    for _ in range(6):
        try:
            model(**batch(rows))["loss"].backward()
        except RuntimeError as error:
            assert "the forward sets 'blocks." in str(error) and "balance', which was a tensor" in str(error)
            errors += 1
    assert errors >= 3


@pairwise(first=["a sample", "one row", "no grad"], schedule=["gpipe", "1f1b"])
def test_they_are_found_though_parameters_have_their_homes(first: str, schedule: str) -> None:
    module = Mixture(lambda block: block.gate.balance / len(block.weights))
    sample = tuple(batch(3).values()) if first == "a sample" else None
    model = piped(module, ["blocks.2"], schedule=schedule, sample=sample)
    if first == "one row":
        model(**batch(1))["loss"].backward()
    elif first == "no grad":
        with torch.no_grad(), pytest.warns(UserWarning, match="'blocks.0.weights'.* rows"):
            model(**batch())
    arguments = batch()
    model.zero_grad()
    for _ in range(3):
        model(**arguments)["loss"].backward()
        module(**arguments)["loss"].backward()
        assert_same_tensors(model, module)
    assert {type(block.weights) for block in model.blocks} == {Stale}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_the_models_own_checkpoints_recompute_is_of_no_other_stage(schedule: str) -> None:
    class Saving(Mixture):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return {"loss": F.mse_loss(self.head(x), labels)}

    assert_same_step(Saving(), batch(), cuts=["blocks.2"], schedule=schedule, checkpoint="never", steps=3)


def test_without_a_graph_they_are_withdrawn_as_well() -> None:
    model = piped(Mixture(), ["blocks.2"])
    model(**batch())["loss"].backward()
    with torch.no_grad():
        model(**batch())
    assert type(model.blocks[0].weights) is Stale


class Appending(Experts):
    """Adds what it leaves to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(self.gate(x).square().mean())
        return x + self.layer(x)


@pairwise(anew=[False, True], schedule=SCHEDULES, checkpoint=CHECKPOINTS)
def test_a_list_may_be_emptied_right_after(anew: bool, schedule: str, checkpoint: str) -> None:
    def after(block: Any) -> Any:
        found = sum(block.losses)
        if anew:
            block.losses = []
        else:
            block.losses.clear()
        return found

    module = Mixture(after)
    module.blocks = nn.ModuleList(Appending() for _ in range(4))
    model = assert_same_step(module, batch(), cuts=["blocks.2"], schedule=schedule, checkpoint=checkpoint, steps=3)
    assert all(block.losses == [] for block in model.blocks)


def test_a_first_call_that_fails_leaves_attributes_as_they_were() -> None:
    plain = Chain(Remembering() for _ in range(3))
    model = piped(plain, ["several.1"], chunks=2)
    with pytest.raises(RuntimeError, match="another microbatch"):
        model(torch.randn(8, 4))
    assert all(block.last is None for block in model.several)


def test_asking_whether_one_is_a_tensor_says_yes() -> None:
    last: Callable[[Any], Any] = lambda block: block.weights.sum() if isinstance(block.weights, Tensor) else 0  # noqa: E731
    model = piped(Mixture(last=last), ["blocks.2"])
    with pytest.raises(RuntimeError, match="'blocks.0.weights'.* is used by a later stage"):
        model(**batch())


def test_a_list_that_blocks_of_several_stages_add_to_is_an_error() -> None:
    module = Mixture(lambda block: block.losses.pop())
    module.blocks = nn.ModuleList(Appending() for _ in range(4))
    for block in module.blocks:
        block.losses = module.blocks[0].losses  # type: ignore[assignment]
    model = piped(module, ["blocks.2"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the forward left 'blocks.0.losses.*, a tensor with a graph"):
            model(**batch())


class Caching(Experts):
    """Keeps a constant."""

    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.arange(4.0).to(x).cos()
        return x + self.layer(x) * self.scale


class Counting(Experts):
    """Leaves a count, which has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = (x[:, 0] > 0).sum() + 1
        return x + self.layer(x)


def test_a_cache_is_none_of_them() -> None:
    module = Mixture(lambda block: block.scale.sum())
    module.blocks = nn.ModuleList(Caching() for _ in range(4))
    model = assert_same_step(module, batch(), cuts=["blocks.2"], checkpoint="always")
    assert not model.inner.forward.runtime.attributes.left and model.blocks[0].scale.shape == (4,)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_count_that_a_block_leaves_counts(checkpoint: str) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Counting() for _ in range(3)), nn.Linear(4, 4)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            for block in self.blocks:
                x = block(x)
            return {"loss": (self.head(x) - labels).abs().sum() / self.blocks[2].count}  # type: ignore[operator]

    assert_same_step(Counted(), batch(), cuts=["blocks.1"], checkpoint=checkpoint, steps=3)


def test_a_block_that_takes_anothers_place_is_looked_at_and_the_other_is_freed() -> None:
    model = piped(Mixture(), ["blocks.2"])
    model(**batch())["loss"].backward()
    replaced = weakref.ref(model.blocks[0])
    model.blocks[0] = Experts()
    for _ in range(2):
        model(**batch())["loss"].backward()
    gc.collect()
    assert replaced() is None and type(model.blocks[0].weights) is Stale


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_the_code_between_blocks_leaves_is_withdrawn_in_each_call(schedule: str) -> None:
    class Keeping(Chain):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = super().forward(x)
            self.last_loss = y["loss"]
            return {"loss": self.last_loss * 2}

    model = assert_same_step(
        Keeping(nn.Linear(4, 4) for _ in range(3)), {"x": torch.randn(7, 4)}, cuts=["several.1"], schedule=schedule,
        steps=4,
    )
    with pytest.raises(RuntimeError, match="'last_loss', .* or after the call"):
        model.inner.last_loss.backward()
