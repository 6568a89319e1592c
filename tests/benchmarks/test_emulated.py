"""The benchmark on emulated devices: every pass sleeps once, and the arithmetic is right. Nothing is timed."""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from splitpipe import schedule

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--ops 0.01 --devices 2 --chunks 3 --passes 1 --sleeps 1 --schedules 1f1b zb-v --bare zb-v "
    "--host-ops 0 --host-passes 1 --host-chunks 2".split()
)


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts can be imported; the number of threads is put back."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def emulation(benchmarks: None) -> ModuleType:
    return importlib.import_module("emulation")


@pytest.fixture
def script(benchmarks: None) -> ModuleType:
    return importlib.import_module("emulated")


@pytest.fixture
def alone(benchmarks: None) -> Iterator[ModuleType]:
    """The peers' module, and this process the only one of theirs."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo, and this build of torch has none")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield importlib.import_module("peers_emulated")
    dist.destroy_process_group()


def runner(script, name, wall, side="splitpipe"):
    """One that took as long as we say."""
    naps = slept(*((kind, 0.02) for kind in "FBW"))
    runs = [script.Took(wall, [naps])]
    return script.Runner(name, schedule.build("1f1b", 4, 8), None, side, runs=runs)


def slept(*naps):
    """Sleeps of a kind, for so many seconds, one after the other."""
    emulation = importlib.import_module("emulation")
    found, clock = [], 0.0
    for kind, seconds in naps:
        found.append(emulation.Nap(kind, 0, clock, clock + seconds))
        clock += seconds
    return emulation.Naps(found)


@pytest.mark.parametrize("form", ["Layer", "Parted"])
def test_each_half_of_backward_sleeps_once(emulation, form):
    naps = emulation.Naps()
    layer = getattr(emulation, form)(0, 0, naps)
    x = torch.zeros(3, emulation.WIDTH, requires_grad=True)
    y = layer(x)
    assert naps.count() == {"F": 1}
    y.sum().backward()
    assert naps.count() == {"F": 1, "B": 1, "W": 1}
    assert x.grad.tolist() == torch.ones_like(x).tolist()
    assert layer.weight.grad.tolist() == [3.0] * emulation.WIDTH


def test_peers_layer_sleeps_only_for_what_is_asked_for(emulation):
    naps = emulation.Naps()
    layer = emulation.Parted(0, 0, naps)
    x = torch.zeros(1, emulation.WIDTH, requires_grad=True)
    y = layer(x).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    assert naps.count() == {"F": 1, "B": 1}
    torch.autograd.grad(y, layer.weight)
    assert naps.count() == {"F": 1, "B": 1, "W": 1}


def test_first_stage_of_a_peer_has_a_backward_of_its_input_too(emulation):
    naps = emulation.Naps()
    emulation.Parted(0, 0, naps)(torch.zeros(1, emulation.WIDTH)).sum().backward()
    assert naps.count() == {"F": 1, "B": 1, "W": 1}


def test_measured_costs_are_means_of_a_whole_device(emulation):
    first = slept(("F", 1.0), ("B", 4.0), ("W", 6.0))
    other = slept(("F", 3.0))
    costs = emulation.measured([first, other], stages=2)
    assert (costs.forward, costs.backward_input, costs.backward_weight) == (4.0, 8.0, 12.0)
    assert first.total() == 11.0


def test_ideal_of_a_late_first_stage_moves_its_input_gradient(emulation):
    plan = schedule.build("zb-h1", 1, 1)
    assert emulation.ideal(plan, schedule.Costs(1, 2, 4)) == emulation.ideal(plan, schedule.Costs(1, 2, 4), late=True)
    chain = schedule.Schedule([plan.rows[0], []], placement=[0])
    assert emulation.ideal(chain, schedule.Costs(1, 2, 4), late=True) == 7.0


@pytest.mark.parametrize("number", range(5))
def test_every_pass_of_a_peer_sleeps_once(alone, number):
    peer = alone.PEERS[number]
    step, plan = alone._ready(peer, alone.Work(chunks=4, seconds=0), rank=0, devices=1)
    step()  # The first one asks the layers for their shapes, too.
    for _ in range(2):
        (naps,) = step().naps
        assert naps.count() == dict.fromkeys("FBW", 4 * peer.stages)
    assert (plan.stages, plan.microbatches) == (peer.stages, 4)
    assert any(op.kind == "B" for op in plan.rows[0]) is peer.splits


def test_peers_place_a_v_as_splitpipe_does(alone):
    places = {str(peer): tuple(peer.places(3)) for peer in alone.PEERS}
    assert places["ZBVZeroBubble"] == schedule.build("zb-v", 3, 3).placement
    assert places["InterleavedZeroBubble, 2 stages a device"] == schedule.build("interleaved-1f1b", 3, 3).placement
    assert places["1F1B"] == schedule.build("1f1b", 3, 3).placement


def test_process_that_fails_says_why(alone):
    with alone.started(1) as processes, pytest.raises(RuntimeError, match="(?s)process 0, GPipe:.*KeyError"):
        processes.step(alone.Peer("GPipe"))  # Nothing is prepared.


def test_best_compares_with_the_bound_and_with_the_best_peer(script):
    case = script.Case(0.02, devices=4, chunks=8)
    found = [runner(script, "a", 0.6), runner(script, "b", 0.51)]
    found += [runner(script, "c", 0.68, "torch"), runner(script, "d", 0.7, "torch")]
    row = script.best(case, found)
    assert (row["best"], row["torch's best"], row["bound, ops"]) == ("b", "c", 25.5)
    assert row["best / bound"] == pytest.approx(1.0)
    assert row["best / torch's best"] == pytest.approx(0.75)


def test_row_has_both_ideals(script, monkeypatch):
    monkeypatch.setattr(script.host, "between", lambda *_: 0.0)
    one = runner(script, "a", 0.66)
    one.runs[0] = script.Took(0.66, [slept(("F", 0.04), ("B", 0.02), ("W", 0.02))])  # F was told 0.02.
    row = one.row(script.Case(0.02, devices=4, chunks=8))
    assert row["wall / ideal"] == pytest.approx(1.0)
    assert row["wall / ideal of measured sleeps"] == pytest.approx(0.66 / (11 * (0.04 + 0.02 + 0.02)))


def test_targets_take_nominal_ops_when_they_are_long_and_measured_ones_when_they_are_short(script):
    line = {"schedule": "a", "devices": 4, "chunks": 8, "side": "splitpipe"}
    line |= {"wall / ideal": 1.03, "wall / ideal of measured sleeps": 1.05}
    peer = line | {"schedule": "torch: GPipe", "side": "torch", "wall / ideal": 9.0}
    best = {"devices": 4, "chunks": 8, "best": "a", "best / bound": 1.06, "best / torch's best": 0.9}
    tables = {
        "steps": [line | {"op, ms": 20.0}, line | {"op, ms": 5.0}, peer | {"op, ms": 20.0}],
        "best": [best | {"op, ms": 20.0}, best | {"op, ms": 5.0}],
        "host": [{"schedule": "a", "op, ms": "0", "between ops, us": 60.0},
                 {"schedule": "unwrapped", "op, ms": "0", "between ops, us": 99.0}],
    }
    found = {row["target"]: (row["found"], row["met"]) for row in script.targets(tables)}
    assert found == {
        "wall / ideal, 20 ms, 4 devices": (1.03, True),
        "wall / ideal of measured sleeps, 5 ms, 4 devices": (1.05, False),
        "best / bound, 20 ms, 4 devices, 8 microbatches": (1.06, False),
        "best / torch's best, 20 ms, 4 devices, 8 microbatches": (0.9, True),
        "host, us between ops of 0 ms": (60.0, False),
    }


def test_target_is_for_the_worst(script):
    line = {"op, ms": 20.0, "devices": 4, "chunks": 8, "side": "splitpipe"}
    steps = [line | {"schedule": "a", "wall / ideal": 1.0}, line | {"schedule": "b", "wall / ideal": 1.1}]
    (found,) = script.targets({"steps": steps, "best": [], "host": []})
    assert (found["found"], found["where"], found["met"]) == (1.1, "b, 8 microbatches", False)


def test_summary_has_a_line_for_each_schedule_and_a_column_for_each_case(script):
    line = {"schedule": "a", "wall / ideal": 1.0, "wall / ideal of measured sleeps": 2.0, "chunks": 8}
    steps = [line | {"op, ms": op, "devices": devices} for op in (20.0, 5.0) for devices in (4, 8)]
    assert script.summaries(steps) == {
        "wall / ideal, 20 ms": [{"schedule": "a", "4 x 8": 1.0, "8 x 8": 1.0}],
        "wall / ideal of measured sleeps, 5 ms": [{"schedule": "a", "4 x 8": 2.0, "8 x 8": 2.0}],
    }


def test_every_schedule_runs_and_sleeps_once_a_pass(script):
    case = script.Case(0, devices=2, chunks=4)
    found = list(script.runners(case, schedule.names(), [], None))
    assert [one.name for one in found] == schedule.names()
    for one in found:
        one.run()
        (naps,) = one.runs[0].naps
        assert naps.count() == dict.fromkeys("FBW", 4 * one.plan.stages), one.name


def test_bare_threads_run_every_schedule(script):
    case = script.Case(0, devices=3, chunks=4)
    for one in script.runners(case, [], schedule.names(), None):
        one.run()
        (naps,) = one.runs[0].naps
        assert (one.side, naps.count()) == ("bare", dict.fromkeys("FBW", 4 * one.plan.stages)), one.name


def test_steps_of_the_warm_up_do_not_count(script, monkeypatch):
    one = runner(script, "a", 0.66, "torch")
    took = one.runs.pop()
    one.step = lambda: took
    monkeypatch.setattr(script, "runners", lambda *_: iter([one]))
    script.compare(script.Case(0.02, 4, 8), script.parser().parse_args(["--passes", "3"]), None)
    assert len(one.runs) == 3


def test_host_cost_is_what_lies_between_the_sleeps(script):
    naps = script.Naps([script.host.Nap("F", 0, 2.0, 3.0), script.host.Nap("B", 0, 3.5, 4.0)])
    clock = script.host._Clock(lambda: script.Took(4.5, [naps], began=1.0))
    clock.run()
    assert (clock.inside, clock.around) == ([0.5e6], [2.5e6])


def test_between_counts_what_is_neither_sleep_nor_waiting(script):
    """The clock, in seconds; F of stage 1 waits until 2, and starts at 3.

    0   F   F   .   .   .   .   .   BW  BW
    1   .   .   .   F   F   BW  BW
    """
    naps = [(0, "F", 0, 2), (1, "F", 3, 5), (1, "B", 5, 6), (1, "W", 6, 7), (0, "B", 8, 9), (0, "W", 9.5, 10)]
    taken = [script.host.Nap(kind, stage, began, ended) for stage, kind, began, ended in naps]
    took = script.Took(11.0, [script.Naps(taken)], began=-0.5)
    lost = {"before the first": 0.5, "between the stages, there": 1.0, "and back": 1.0, "within BW": 0.5}
    assert script.host.between(schedule.build("1f1b", 2, 1), took) == sum(lost.values()) / 4


def test_between_goes_by_the_order_in_which_ops_ran(script):
    row = [("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("W", 1, 0), ("B", 0, 0), ("W", 0, 0)]
    ran = [("F", 0), ("F", 1), ("B", 1), ("B", 0), ("W", 1), ("W", 0)]  # Both W at the end.
    naps = [script.host.Nap(kind, stage, clock, clock + 1.0) for clock, (kind, stage) in enumerate(ran)]
    assert script.host.between(schedule.Schedule([row], [0, 0]), script.Took(6.0, [script.Naps(naps)])) == 0.0


def test_all_is_measured_printed_and_saved(script, capsys, tmp_path):
    platform.processor()  # It asks a process, the first time.
    path = tmp_path / "emulated.json"
    assert script.main([*TINY, "--save", str(path)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "| 0.010 | 2 | 3 | zb-v |", "| 0.010 | 2 | 3 | torch: ZBVZeroBubble |", "| bare threads: zb-v |",
        "| best / torch's best |", "| gpipe | 0 | 4 |", "| unwrapped | 0 | 4 |", "| told, ms |", "| met |",
        "| schedule | 2 x 3 |",
    ):
        assert text in printed
    saved = json.loads(path.read_text())
    assert {"date", "command", "cpu", "cores", "threads", "python", "torch"} <= saved["environment"].keys()
    assert list(saved["tables"]) == [
        "targets", "wall / ideal of measured sleeps, 0.01 ms", "host", "sleeps", "best", "steps"
    ]


def test_help_names_what_can_be_varied(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--ops", "--devices", "--chunks", "--schedules", "--alone", "--save"):
        assert option in printed


@pytest.mark.parametrize("options", [["--schedules", "fast"], ["--ops", "long"], ["--devices"]])
def test_bad_options_are_refused(script, capsys, options):
    with pytest.raises(SystemExit) as stopped:
        script.main(options)
    assert stopped.value.code == 2
    assert "emulated.py" in capsys.readouterr().err
