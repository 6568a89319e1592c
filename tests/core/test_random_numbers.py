"""R draws what F drew, and the generator is then where it was, also after an error."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from splitpipe.core.random_numbers import Draws, RNGStates

CPU = torch.device("cpu")


def default() -> Tensor:
    return torch.default_generator.get_state()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_r_that_raises_leaves_the_generator(error: type[BaseException]) -> None:
    draws = Draws({True: True}, True)
    rng_states = RNGStates(draws, CPU)
    with rng_states.first(recomputed=True):
        first = torch.rand(3)
    torch.rand(5)  # Others draw meanwhile.
    before = default()
    with pytest.raises(error), rng_states.repeated():
        assert torch.equal(torch.rand(3), first)
        raise error
    assert torch.equal(default(), before)


@pytest.mark.cuda
def test_a_device_repeats_its_draws_and_is_as_it_was_after_also_with_another_seed() -> None:
    device = torch.device("cuda", 0)
    rng_states = RNGStates(Draws({True: False}, True), device)
    with rng_states.first(recomputed=True):
        first = torch.rand(9, device=device)
    torch.cuda.manual_seed(2**64 - 3)
    torch.rand(5, device=device)
    before = torch.cuda.get_rng_state(device)
    with pytest.raises(KeyError), rng_states.repeated():
        assert torch.equal(torch.rand(9, device=device), first)
        raise KeyError
    assert torch.equal(torch.cuda.get_rng_state(device), before)
