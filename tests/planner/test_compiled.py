"""Plans with layers that may be compiled: they are measured so, too, and what is faster is chosen."""
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
from splitpipe.compiled.layers import CompiledCall, compiled_call, release
from splitpipe.planner import planning
from splitpipe.planner.choose import better, choose
from splitpipe.planner.planning import chosen
from splitpipe.planner.profile import Profile
from tests.compiled.test_layers import Block, blocks
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import codes as codes
from tests.helpers.compiling import graphs as graphs
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.modules import Net, batch
from tests.helpers.planned import MIB, emulated


def faster(profile: Profile, times: float, **more: Any) -> Profile:
    """A profile as if layers that are compiled took so much less."""
    kinds = [
        replace(kind, layers={
            count: tuple([
                replace(each, forward=each.forward / times, backward_input=each.backward_input / times,
                        backward_weight=each.backward_weight / times)
                for each in row
            ])
            for count, row in kind.layers.items()
        }, gap=kind.gap / times)
        for kind in profile.kinds
    ]
    return replace(profile, kinds=tuple(kinds), compile=EAGER, **more)


@pytest.mark.thorough
@pytest.mark.parametrize("times, compile", [
    (2.0, EAGER), (0.5, False), (1.0, False),
])
def test_what_is_faster_is_chosen_and_the_other_one_is_named(times: float, compile: Any) -> None:
    profile = emulated(0)
    found = chosen([profile, faster(profile, times)], ["1f1b", "zb-h1"], F.mse_loss)
    assert found.compile == compile and found.way.endswith(", compiled") is bool(compile)
    assert {other.way.endswith(", compiled") for other in found.runners_up} == {True, False}
    assert ("compile" in found.arguments()) is bool(compile) and ("compile=" in str(found)) is bool(compile)


@pytest.mark.thorough
def test_what_fits_goes_before_what_is_faster() -> None:
    profile = emulated(0, memory=200 * MIB)
    small = faster(emulated(0, memory=MIB), 4.0)
    found = chosen([profile, small], ["1f1b"], F.mse_loss)
    assert not found.compile and "faster, but lacks" in found.runners_up[0].why
    assert chosen([small, profile], ["1f1b"], F.mse_loss).compile is False
    assert better([], choose(profile, ["1f1b"])) and not better([], [])


@pytest.mark.thorough
def test_copies_of_equal_layers_are_compiled_once_for_each_number_of_chunks(
    nothing_compiled: None, graphs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Profile] = []
    choosing = chosen

    def noted(profiles: list[Profile], *given: Any) -> Plan:
        taken.extend(profiles)
        return choosing(profiles, *given)

    monkeypatch.setattr(planning, "chosen", noted)
    module, x = blocks(4), torch.randn(8, 4)
    before = [x.clone() for x in module.state_dict().values()]
    found = splitpipe.plan(
        module, x, target=x, loss_fn=F.mse_loss, devices=["cpu"] * 2, chunks=[2, 4], schedules=["1f1b"], seconds=0,
        compile=EAGER,
    )
    assert len(graphs) == 2 * 2  # With and without a gradient of the input.
    assert [profile.compile for profile in taken] == [False, EAGER]
    # The scale's gradient and the norm's are computed by B if layers run as they are, so that W has less to keep.
    kept = [[layer.kept for layer in profile.kinds[0].layers[4]] for profile in taken]
    assert all(compiled > 0 < plain for plain, compiled in zip(*kept))
    weights = [[layer.parameters for layer in profile.kinds[0].layers[4]] for profile in taken]
    assert weights[0] == weights[1] and all(weights[0])
    assert isinstance(found, Plan) and all(map(torch.equal, before, module.state_dict().values()))
    assert all(part._compiled_call_impl is None for part in module.modules())


@pytest.mark.thorough
@pytest.mark.parametrize("compile", [EAGER, True])
def test_a_plan_for_compiled_layers_is_applied_written_and_read(
    compile: Any, codes: list[Any], nothing_compiled: None, tmp_path: Path
) -> None:
    found = replace(chosen([faster(emulated(0), 2.0)], ["1f1b"], F.mse_loss), compile=compile, devices=("cpu",) * 3)
    found.to_json(tmp_path / "plan.json")
    again = Plan.from_json(tmp_path / "plan.json")
    assert again == found
    text = (tmp_path / "plan.json").read_text()
    assert '"compile"' in text
    model = again.apply(nn.Sequential(*[Block() for _ in range(8)]), F.mse_loss)
    if compile is not True:
        x = torch.randn(8, 4)
        model(x, target=x).backward()
        assert codes and {row.why for row in model.deferral_report()} == {"compiled"}


@pytest.mark.thorough
def test_a_plan_that_an_earlier_version_wrote_compiles_nothing(tmp_path: Path) -> None:
    found = chosen([emulated(0)], ["1f1b"], F.mse_loss)
    found.to_json(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert ' "compile": false,\n' in text
    (tmp_path / "plan.json").write_text(text.replace(' "compile": false,\n', ""))
    assert Plan.from_json(tmp_path / "plan.json") == found


@pytest.mark.thorough
def test_a_module_with_cuts(nothing_compiled: None, graphs: list[str], codes: list[Any]) -> None:
    module = Net()
    found = splitpipe.plan(
        module, batch(), devices=["cpu"] * 2, chunks=[1, 2], schedules=["1f1b"], seconds=0, compile=EAGER,
    )
    assert found.cuts is not None and graphs and [code.why for code in codes if code.why] == []
    assert all(part._compiled_call_impl is None for part in module.modules())


@pytest.mark.thorough
def test_compiled_calls_are_released() -> None:
    module = blocks(2)
    model = splitpipe.attach(nn.Sequential(blocks(2), blocks(2)), cuts=["1"], devices=["cpu"] * 2, compile=EAGER)
    for part in (module, model):
        splitpipe.SplitPipe(module, [1, 1], devices=["cpu"] * 2, compile=EAGER)(torch.ones(2, 4))
        model(torch.ones(2, 4))
        assert any(isinstance(compiled_call(x), CompiledCall) for x in part.modules())
        release(part)
        assert all(compiled_call(x) is None for x in part.modules())
