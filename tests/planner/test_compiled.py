"""Plans for compiled layers."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import splitpipe
from tests.compiled.test_layers import blocks
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import graphs as graphs
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.modules import Net, batch

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")]  # Torch's.


@pytest.mark.draws
@pytest.mark.parametrize("by_cuts", [False, True])
def test_layers_are_compiled_for_each_number_of_chunks(
    by_cuts: bool, nothing_compiled: None, graphs: list[str]
) -> None:
    module = Net() if by_cuts else blocks(4)
    x = torch.randn(8, 4)
    given: dict[str, Any] = {"sample": batch()} if by_cuts else {"sample": x, "target": x, "loss_fn": F.mse_loss}
    before = [x.clone() for x in module.state_dict().values()]
    found = splitpipe.plan(
        module, **given, devices=["cpu"] * 2, chunks=[1, 2], schedules=["1f1b"], seconds=0, compile=EAGER
    )
    assert found.compile == found.arguments()["compile"] == EAGER and "compile={" in str(found)
    assert len(graphs) >= 2
    assert all(part._compiled_call_impl is None for part in module.modules())
    assert all(map(torch.equal, before, module.state_dict().values()))
