"""Losses of microbatches on their way to that of the batch: what each is worth, and what gradients start from."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe.loss.reducing import Told
from splitpipe.loss.terms import MEAN, SUM, Divisor, Number, Term, Unknown
from splitpipe.skip.box import opened
from splitpipe.training.loss import TARGET, Losses, Objective, Reduction


def losses(value: float, *count: Any, dtype: torch.dtype = torch.float64) -> Losses:
    """The loss of a microbatch: by rows; with None a sum; with a count, a total; with a count and a word, a mean."""
    x = torch.tensor(value, dtype=dtype, requires_grad=True)
    if not count:
        made: Number | Unknown = Unknown("")
    elif count[0] is None:
        made = Number((Term(x, SUM),))
    else:
        made = Number((Term(x, SUM if len(count) == 1 else MEAN, Divisor(count[0])),))
    return Losses(x, made)


def reduced(rows: list[int], parts: list[tuple[Any, ...]], scale: float | None = None) -> tuple[Any, Any, list[Any]]:
    """Loss, unit and the seed of each microbatch."""
    reduction = Reduction(rows, None if scale is None else torch.tensor(scale))
    seeds = []
    for number, part in enumerate(parts):
        reduction.add(number, losses(*part))
        seeds += reduction.seeds(number)
    return *reduction.result(), seeds


@pytest.mark.parametrize("counts", [[1, 1], [0, 7], [1000, 3], [1e12, 1]])
def test_totals_start_from_one_power_of_two(counts: list[float]) -> None:
    _, unit, seeds = reduced([1, 1], [(1.0, torch.tensor(counts[0])), (1.0, torch.tensor(counts[1]))])
    assert len(set(map(float, seeds))) == 1 and torch.frexp(seeds[0]).mantissa == 0.5
    torch.testing.assert_close(float(seeds[0] * unit), 1 / sum(counts))


@pytest.mark.parametrize("parts", [[(1.0,), (2.0,)], [(1.0, 4), (2.0, 2)]])
def test_a_scale_is_in_the_seeds_and_out_of_the_unit(parts: list[tuple[float, ...]]) -> None:
    value, unit, seeds = reduced([2, 1], parts)
    scaled, scaled_unit, scaled_seeds = reduced([2, 1], parts, scale=1024.0)
    torch.testing.assert_close(scaled, value)
    for seed, other in zip(seeds, scaled_seeds):
        torch.testing.assert_close(other, seed * 1024)
        torch.testing.assert_close(float(other * scaled_unit), float(seed * (1 if unit is None else unit)))


def test_microbatches_may_come_in_any_order() -> None:
    reduction = Reduction([1, 3], None)
    reduction.add(1, losses(4.0))
    reduction.add(0, losses(8.0))
    assert reduction.result()[0] == (8 + 3 * 4) / 4


def test_means_are_weighted_by_what_they_counted() -> None:
    value, unit, seeds = reduced([3, 3, 1], [(1.0, 2, ""), (float("nan"), 0, ""), (5.0, torch.tensor(1), "")])
    torch.testing.assert_close(value, torch.tensor((2 * 1.0 + 5.0) / 3, dtype=torch.float64))
    assert [float(seed * unit) for seed in seeds] == pytest.approx([2 / 3, 0, 1 / 3])
    *_, seeds = reduced([3, 3, 1], [(1.0, 6, ""), (1.0, 6, ""), (5.0, 2, "")])
    assert [float(seed) for seed in seeds] == pytest.approx([3 / 7, 3 / 7, 1 / 7]), "all counted: as by rows"


def test_gradients_need_no_scaling_where_all_is_counted() -> None:
    assert reduced([3, 3, 1], [(1.0, 6, ""), (1.0, 6, ""), (5.0, 2, "")])[1] is None


def test_counts_and_totals_that_half_precision_has_no_number_for() -> None:
    for parts in ([2.0, 100_000, ""], [4.0, 300_000, ""]), ([40_000.0, 90_000], [50_000.0, 90_000]):
        reduction = Reduction([1, 3], None)
        for number, (value, count, *rest) in enumerate(parts):
            reduction.add(number, losses(value, torch.tensor(count), *rest, dtype=torch.float16))
        loss, _ = reduction.result()
        assert loss.dtype is torch.float16
        torch.testing.assert_close(float(loss.detach()), 3.5 if len(parts[0]) == 3 else 0.5, rtol=1e-3, atol=0)


def test_the_objective_takes_its_target_as_a_skip() -> None:
    seen: list[Any] = []

    def loss_fn(output: Tensor, target: Any) -> Tensor:
        seen.append(target)
        return output.mean().reshape(1)

    with opened({TARGET: {"a": 1}}) as box:
        [root], found = Objective(loss_fn, None, Told())(torch.ones(3, requires_grad=True))
        assert root.numel() == 1 and found.value.shape == ()
    assert seen == [{"a": 1}] and not box


def test_the_objective_has_the_loss_functions_parameters() -> None:
    assert len(list(Objective(torch.nn.Linear(2, 2), None, Told()).parameters())) == 2
    assert not list(Objective(torch.nn.functional.mse_loss, None, Told()).parameters())


def test_a_loss_that_only_the_first_microbatches_show_is_an_error() -> None:
    reduction = Reduction([3, 1], None)
    reduction.add(0, losses(4.0, 36))
    value = torch.tensor(8.0, dtype=torch.float64, requires_grad=True) * 1
    reduction.add(1, Losses(value, Unknown("sub")))
    with pytest.raises(ValueError, match="losses of different kinds"):
        reduction.result()
