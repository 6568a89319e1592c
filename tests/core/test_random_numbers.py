"""R draws what F drew; every generator is then where it was; and a call knows whether it draws."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
