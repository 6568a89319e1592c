"""Plans for compiled layers."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import splitpipe
from splitpipe import Plan
from splitpipe.planner.planning import chosen
from tests.compiled.test_layers import Block, blocks
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import graphs as graphs
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.modules import Net, batch
from tests.helpers.planned import emulated

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


@pytest.mark.parametrize("compile", [EAGER, True])
def test_a_plan_for_compiled_layers_is_applied_written_and_read(
    compile: Any, nothing_compiled: None, tmp_path: Path
) -> None:
    found = replace(chosen(emulated(0), ["1f1b"], F.mse_loss, compile=compile), devices=("cpu",) * 3)
    found.to_json(tmp_path / "plan.json")
    again = Plan.from_json(tmp_path / "plan.json")
    assert again == found
    model = again.apply(nn.Sequential(*[Block() for _ in range(8)]), F.mse_loss)
    if compile is not True:
        x = torch.randn(8, 4)
        model(x, target=x).backward()
        assert {row.why for row in splitpipe.deferral_report(model)} == {"compiled"}
