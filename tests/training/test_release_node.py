"""Gradients that exist already reach autograd when the loss goes backward, scaled by the gradient of the loss."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from splitpipe.deferral.accumulator import Total
from splitpipe.training.release import loss, release
from tests.helpers.twin import Nothing


def made(*gradients: Tensor, unit: float | None = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A loss of 3, its tensors, and the gradients that it is to hand over, one release each."""
    reals = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
    kept = [gradient.clone() for gradient in gradients]
    phonies = [
        release([Total.of(gradient)], [real], torch.float32)
        for gradient, real in zip(gradients, reals)
    ]
    value = loss(torch.tensor(3.0), None if unit is None else torch.tensor(unit), phonies)
    return value, reals, kept


def test_gradients_arrive_when_the_loss_goes_backward_and_not_before() -> None:
    value, reals, kept = made(torch.randn(2), torch.randn(3, 3))
    assert value == 3 and all(real.grad is None for real in reals)
    value.backward()
    assert all(torch.equal(real.grad, gradient) for real, gradient in zip(reals, kept))


@pytest.mark.parametrize("unit", [None, 4.0])
def test_they_are_scaled_by_the_gradient_of_the_loss_and_by_the_unit(unit: float | None) -> None:
    value, reals, kept = made(torch.randn(2), unit=unit)
    (value * 0.5).backward()
    torch.testing.assert_close(reals[0].grad, kept[0] * 0.5 * (unit or 1))


def test_a_kept_graph_hands_them_over_again_and_unchanged() -> None:
    value, reals, kept = made(torch.randn(2))
    for factor in (2.0, 1.0, 1.0):
        (value * factor).backward(retain_graph=True)
        reals[0].grad.mul_(1)  # In place: what was handed over is the user's own.
    torch.testing.assert_close(reals[0].grad, kept[0] * 4)


def test_a_second_backward_without_a_kept_graph_raises() -> None:
    value, _, _ = made(torch.randn(2))
    value.backward()
    with pytest.raises(RuntimeError, match="a second time.*retain_graph=True"):
        value.backward()


def test_a_second_derivative_is_refused() -> None:
    value, reals, _ = made(torch.randn(2))
    with pytest.raises(RuntimeError, match="create_graph=True"):
        value.backward(create_graph=True)
    assert reals[0].grad is None


def test_what_is_not_asked_for_is_not_handed_over() -> None:
    value, reals, kept = made(torch.randn(2), torch.randn(3))
    (found,) = torch.autograd.grad(value, [reals[1]])
    assert torch.equal(found, kept[1]) and reals[0].grad is None


def test_memory_is_handed_over_and_not_copied() -> None:
    gradient = torch.randn(2)
    memory = gradient.data_ptr()
    value, reals, _ = made(gradient)
    del gradient  # Autograd takes what nobody else holds.
    (value * 2).backward()
    assert reals[0].grad is not None and reals[0].grad.data_ptr() == memory


def test_a_loss_thrown_away_frees_its_gradients() -> None:
    gc.disable()
    try:
        gradient = torch.randn(2)
        kept = weakref.ref(gradient)
        value, _, _ = made(gradient)
        del gradient
        assert kept() is not None
        del value, _
        assert kept() is None
    finally:
        gc.enable()


def test_a_loss_that_nothing_hangs_on_can_go_backward_all_the_same() -> None:
    value = loss(torch.tensor(3.0), None, [])
    assert value.requires_grad
    value.backward()


def test_a_loss_that_gets_no_gradient_hands_nothing_over() -> None:
    value, reals, kept = made(torch.randn(2), torch.randn(3))
    Nothing.apply(value).backward(retain_graph=True)
    assert all(real.grad is None for real in reals)
    value.backward()
    assert all(torch.equal(real.grad, gradient) for real, gradient in zip(reals, kept))
