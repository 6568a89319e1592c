"""The ablation: every variant computes the same, and what is off shows on simulated devices, in virtual time.

The simulated accelerator needs a process of its own, and that is most of the time: one process tells all.
"""
from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe
from splitpipe.core import transfer

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import json, sys
import torch, ablation, simdev, virtual
from ablated import Training, Variant
from simdev.replay import replay

told = {"exit": ablation.main([*"--models chain hourglass --copies 0 0.25 --schedules zb-h1 zb-v --passes 2".split(),
                               "--save", sys.argv[1]])}
dropin = [Variant("fused", backward="autograd"), Variant("split")]
rows, told["faults"] = virtual.tables("chain", dropin, 4, 4, [0.0], "never", 2)
told["four"] = rows["chain, copies 0"]
told["unet"] = virtual.tables("unet", [Variant("", ("dependency", "streams", "skips"))], 4, 2, [0.0], "never", 1)[1]

def nodes(variant):
    training = Training(variant, virtual.MODELS["chain"](4, 8), [f"sim:{j}" for j in range(4)], 8, "never")
    names, waiting, seen = [], [], set()
    backward, torch.Tensor.backward = torch.Tensor.backward, lambda loss: waiting.append(loss.grad_fn)
    training.step()
    torch.Tensor.backward = backward
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            names.append((node.name(), node._sequence_nr()))
            waiting += [each for each, _ in node.next_functions if each is not None]
    return names

def overlap(variant):
    training = Training(variant, virtual.MODELS["chain"](4, 8), [f"sim:{j}" for j in range(4)], 8, "never")
    training.step()
    simdev.forget()
    training.step()
    cost = lambda each: each.bytes / 512 if each.kind == "copy" else each.multiplications / 256
    spans = replay(simdev.launches(), cost).spans
    return sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a in spans for b in spans
               if (a.device, a.engine, b.engine) == (b.device, "copy", "compute"))

told["nodes"] = nodes(Variant("")), nodes(Variant("", ("dependency",)))
told["overlap"] = [overlap(Variant("", off, "autograd")) for off in ((), ("streams",))]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with simulated devices found, and what the benchmark saved there."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs g++, or another C++ compiler named in CXX")
    saved = tmp_path_factory.mktemp("ablation") / "ablation.json"
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, str(saved)], cwd=ROOT / "benchmarks", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return {**found, **json.loads(saved.read_text())}


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; the number of threads is put back."""
    threads, tf32 = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("ablation")
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = tf32


@pytest.fixture
def ablated(ablation: ModuleType) -> ModuleType:
    module: ModuleType = ablation.ablated
    return module


def row(told: dict[str, Any], table: str, variant: str) -> dict[str, Any]:
    (found,) = [row for row in told["tables"][table] if row["variant"] == variant]
    return dict(found)


def test_all_variants_compute_what_the_module_does(told: dict[str, Any]) -> None:
    assert (told["exit"], told["faults"], told["unet"]) == (0, [], [])


def test_there_is_a_table_for_each_model_and_cost_of_a_copy(told: dict[str, Any]) -> None:
    assert list(told["tables"]) == [
        "chain, copies 0", "chain, copies 0.25", "hourglass, copies 0", "hourglass, copies 0.25"
    ]
    assert [row["variant"] for row in told["tables"]["chain, copies 0"]] == [
        "baseline", "+ dependency", "+ streams", "+ skips", "+ split", "+ schedule: zb-h1", "+ schedule: zb-v",
        "split, without dependency", "split, without streams", "split, without skips",
    ]


@pytest.mark.parametrize(("variant", "makespan"), [("+ skips", 33), ("+ split", 30), ("+ schedule: zb-h1", 27),
                                                   ("+ schedule: zb-v", 25.5)])
def test_eight_microbatches_on_four_devices_take_what_theory_says(
    told: dict[str, Any], variant: str, makespan: float
) -> None:
    found = row(told, "chain, copies 0", variant)
    assert found["least"] == found["most"] == found["planned"] == makespan


def test_four_microbatches_on_four_devices_take_what_theory_says(told: dict[str, Any]) -> None:
    assert [(row["least"], row["most"]) for row in told["four"]] == [(21, 21), (18, 18)]


@pytest.mark.parametrize("variant", ["+ skips", "+ split", "+ schedule: zb-h1", "+ schedule: zb-v"])
def test_copies_cost_what_is_planned_for_them(told: dict[str, Any], variant: str) -> None:
    found = row(told, "chain, copies 0.25", variant)
    assert found["least"] == found["most"] == found["planned"]


def test_copies_on_the_streams_that_compute_cost_more(told: dict[str, Any]) -> None:
    without, with_them = (row(told, "chain, copies 0.25", name) for name in ("split, without streams", "+ split"))
    assert without["least"] > with_them["most"]


def test_copies_overlap_with_computing_on_streams_of_their_own_alone(told: dict[str, Any]) -> None:
    with_streams, without = told["overlap"]
    assert with_streams > 1
    assert without == 0


def test_without_dependency_neither_edges_nor_numbers_order_microbatches(told: dict[str, Any]) -> None:
    with_it, without = told["nodes"]
    edges = {"ForkBackward", "JoinBackward"}
    assert edges <= {name for name, _ in with_it} and transfer.FIRST in {number for _, number in with_it}
    assert not edges & {name for name, _ in without} and transfer.FIRST not in {number for _, number in without}


def test_memory_is_that_of_a_microbatch_at_least(told: dict[str, Any]) -> None:
    for found in told["tables"]["chain, copies 0"]:
        assert 1 <= found["peak, values"] <= found["of all devices"]


def names() -> dict[str, object]:
    """All that modules of splitpipe hold, by module and name."""
    modules = {path: module for path, module in sys.modules.items() if path.split(".")[0] == "splitpipe"}
    return {f"{path}.{name}": value for path, module in modules.items() for name, value in vars(module).items()}


@pytest.mark.parametrize(("mechanism", "wanted"), [("dependency", {"fork", "join", "rank"}), ("streams", {"Port"})])
def test_a_mechanism_is_off_inside_its_block_alone(ablated: ModuleType, mechanism: str, wanted: set[str]) -> None:
    before = names()
    with pytest.raises(ZeroDivisionError), ablated.OFF[mechanism]():
        changed = {name for name, value in names().items() if value is not before[name]}
        raise ZeroDivisionError
    assert {f"splitpipe.border.{name}" for name in wanted} <= changed
    assert {name for name, value in names().items() if value is not before[name]} == set()


def hourglass(ablation: ModuleType) -> nn.Sequential:
    layers: nn.Sequential = ablation.virtual.hourglass(2)
    return layers


@pytest.mark.parametrize("piped", [False, True])
def test_skips_handed_through_give_the_same(ablation: ModuleType, piped: bool) -> None:
    layers = hourglass(ablation)
    handed: nn.Module = ablation.ablated.carried(layers)
    if piped:
        handed = SplitPipe(handed, [1] * 4, devices=["cpu"] * 4, chunks=2, checkpoint="always")
    x = torch.randn(4, 8)
    given = []
    for model in (layers, handed):
        y = model(x)
        given.append([y, *torch.autograd.grad(y.square().sum(), list(layers.parameters()))])
    torch.testing.assert_close(given[0], given[1])


def test_skips_handed_through_pass_every_layer_between(ablation: ModuleType) -> None:
    handed = ablation.ablated.carried(nn.Sequential(nn.Identity(), *hourglass(ablation), nn.Identity()))
    assert [len(getattr(layer, "leaving", ())) for layer in handed] == [0, 1, 2, 1, 0, 0]


def test_a_skip_that_stays_in_a_layer_is_handed_to_nobody(ablation: ModuleType) -> None:
    layer = ablation.virtual.hourglass(1)
    assert list(ablation.ablated.carried(nn.Sequential(layer, nn.Identity())))[0] is layer


def test_by_the_clock_every_variant_has_its_time(
    ablation: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "clock.json"
    given = "--device cpu --devices 2 --threads 1 --preset tiny --passes 1 --chunks 2 --schedules zb-v --save".split()
    assert ablation.main([*given, str(saved)]) == 0
    rows = json.loads(saved.read_text())["tables"]["unet, tiny"]
    assert [row["variant"] for row in rows] == [each.name for each in ablation.ablated.variants(["zb-v"])]
    assert all(row["ms"] > 0 for row in rows)
    assert "losses and gradients: those of the unwrapped model" in capsys.readouterr().out


def test_results_that_differ_are_not_saved(
    ablation: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation.ablated, "loss_fn", lambda output, target: (output - target).sum() / len(target))
    monkeypatch.setattr(ablation.ablated, "expected", lambda case, chunks: [
        torch.ones(()), *(torch.ones_like(each) for each in case.layers.parameters())
    ])
    saved = tmp_path / "clock.json"
    given = "--device cpu --devices 2 --threads 1 --preset tiny --passes 1 --chunks 2 --schedules zb-v --save".split()
    assert ablation.main([*given, str(saved)]) == 1
    assert "baseline: the loss is" in capsys.readouterr().out
    assert not saved.exists()


def test_without_a_compiler_tables_are_left_out_by_name(
    ablation: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    saved = tmp_path / "none.json"
    assert ablation.main(["--models", "chain", "--save", str(saved)]) == 0
    found = json.loads(saved.read_text())
    assert found["tables"] == {}
    assert [line.split(":")[0] for line in found["environment"]["left_out"]] == ["chain"]
    assert "left out: chain: found no no-such-compiler" in capsys.readouterr().out


def test_help_names_every_option(ablation: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ablation.main(["--help"])
    text = capsys.readouterr().out
    options = "device devices chunks checkpoint schedules passes models copies preset threads save".split()
    assert all(f"--{option}" in text for option in options)
