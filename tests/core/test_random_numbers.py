"""R draws what F drew; every generator is then where it was; and a call knows whether it draws."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from splitpipe.core.random_numbers import Draws, Numbers

CPU = torch.device("cpu")


def default() -> Tensor:
    return torch.default_generator.get_state()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_r_that_raises_leaves_the_generator(error: type[BaseException]) -> None:
    draws = Draws({True: True}, True)
    numbers = Numbers(draws, CPU)
    with numbers.first(recomputed=True):
        torch.rand(3)
    before = default()
    with pytest.raises(error), numbers.repeated():
        torch.rand(3)
        raise error
    assert torch.equal(default(), before)


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("seen")


@pytest.mark.parametrize("situation", [FakeTensorMode, lambda: torch.device("meta"), Nothing, torch.inference_mode])
def test_generators_are_looked_at_in_whatever_mode_the_caller_is(situation: Any) -> None:
    with situation():
        draws, idle = Draws({}, True), Draws({True: False}, True)
        with Numbers(draws, CPU).first(recomputed=True):
            pass
        idle.end(recomputes=True)
        assert not draws.drew


@pytest.mark.cuda
def test_a_device_repeats_its_draws_and_is_as_it_was_after() -> None:
    device = torch.device("cuda", 0)
    numbers = Numbers(Draws({True: False}, True), device)
    with numbers.first(recomputed=True):
        first = torch.rand(9, device=device)
    torch.cuda.manual_seed(2**64 - 3)
    torch.rand(5, device=device)
    before = torch.cuda.get_rng_state(device)
    with pytest.raises(KeyError), numbers.repeated():
        assert torch.equal(torch.rand(9, device=device), first)
        torch.cuda.manual_seed(3)
        raise KeyError
    assert torch.equal(torch.cuda.get_rng_state(device), before)
