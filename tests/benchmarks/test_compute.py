"""The benchmark of real compute: all contenders train alike, the arithmetic is right. Nothing is timed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]
TINY = "--preset tiny --chunks 4 --passes 1 --no-memory".split()

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of a process is read from /proc")
gloo = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="this build of torch has no gloo"
)


models = pytest.mark.parametrize("model", ["gpt", "resnet101", "unet", "amoebanet"])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; the number of threads is put back."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("compute")
    torch.set_num_threads(threads)


def subject(script: ModuleType, model: str = "gpt", chunks: int = 4) -> Any:
    return script.Subject(model, "tiny", chunks)


def known(script: ModuleType, model: str = "gpt") -> list[Any]:
    return script.contenders.contenders(subject(script, model))


def losses(contender: Any, subject: Any, steps: int = 3) -> list[float]:
    step = contender.start(subject)
    return [step() for _ in range(steps)]


@models
def test_contenders_of_one_process_train_alike(script, model):
    what = subject(script, model, chunks=2)
    alone = [each for each in known(script, model) if each.processes == each.threads == 1 and not each.missing(what)]
    found = {each.name: losses(each, what) for each in alone}
    expected = found["unwrapped, by microbatch" if what.its.normed else "unwrapped, whole batch"]
    assert expected[-1] < expected[0] * (1 - 100 * what.close)  # So gradients, too, agree to a hundredth.
    for name, its in found.items():
        assert its == pytest.approx(expected, rel=what.close), name


def test_microbatches_need_not_be_even(script):
    for model in ("gpt", "resnet101"):
        names = ("unwrapped, whole batch", "unwrapped, by microbatch", "splitpipe, drop-in, split", "splitpipe, v-half")
        first, *others = [
            losses(each, subject(script, model, chunks=3)) for each in known(script, model) if each.name in names
        ]
        assert len(others) == 2
        for its in others:
            assert its == pytest.approx(first, rel=1e-5)


@linux
@gloo
def test_torch_s_stages_hand_on_tuples(script):
    what = subject(script, "amoebanet", chunks=2)
    (peer,) = [each for each in known(script, "amoebanet") if each.name == "torch.distributed, 1F1B"]
    (alone,) = [each for each in known(script, "amoebanet") if each.name == "unwrapped, by microbatch"]
    turns = script.Turns()
    with script.turns.Company(peer, what) as company:
        company.wait()
        for _ in range(2):
            company.step(turns, timed=False)
    assert turns.losses == pytest.approx(losses(alone, what, steps=2), rel=1e-5)


@linux
@gloo
def test_peers_in_two_processes_train_as_the_module_does(script, capsys, tmp_path):
    path = tmp_path / "compute.json"
    words = ["ZBV", "unwrapped, whole batch, 2", "splitpipe, zb-h2"]
    assert script.main([*TINY, "--contenders", *words, "--save", str(path)]) == 0
    printed = capsys.readouterr()
    assert "losses: the same" in printed.out
    saved = json.loads(path.read_text())
    assert {"date", "command", "cpu", "cores", "torch", "left_out"} <= saved["environment"].keys()
    roles = {row["contender"]: row["as"] for row in saved["tables"]["compute, gpt"]}
    assert roles == {
        "splitpipe, zb-h2": "own",
        "torch.distributed, ZBVZeroBubble": "peer",
        "unwrapped, whole batch, 2 threads": "bound",
    }
    assert [row["against"] for row in saved["tables"]["best, gpt"]] == ["the best pipelined peer", "the bound"]
    for row in saved["tables"]["compute, gpt"]:
        assert row["tokens a second"] > 0 and row["peak, MiB (default)"] > 0


@linux
def test_exact_peak_is_measured_in_processes_of_its_own(script, capsys):
    options = [option for option in TINY if option != "--no-memory"]
    assert script.main([*options, "--contenders", "unwrapped, whole batch, 2"]) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| contender"))
    assert "peak, MiB (exact)" in header


def test_a_process_that_ends_is_an_error_with_what_it_said(script):
    nobody = script.Contender("nobody", "nowhere", "own")
    with pytest.raises(RuntimeError, match=r"(?s)nobody, nowhere: process 0 has ended.*StopIteration"):
        with script.turns.Company(nobody, subject(script)) as company:
            company.wait()


@pytest.fixture
def companies(script, monkeypatch) -> list[tuple[str, str]]:
    """What is asked of whom, by companies without processes."""
    asked = []

    class Company:
        def __init__(self, contender, subject, environment=None):
            self.contender = contender
            self.environment = environment

        def __enter__(self):
            return self

        def __exit__(self, *_):
            asked.append((self.contender.name, "end"))

        def wait(self):
            asked.append((self.contender.name, "wait"))

        def step(self, turns, timed):
            asked.append((self.contender.name, "timed" if timed else "step"))
            turns.losses.append(1.0)
            if timed:
                turns.wall.append(2.0)
                turns.cpu.append(3.0)

        def ask(self, word):
            asked.append((self.contender.name, word))

        def peak(self):
            return 5 if self.environment is None else 7

    monkeypatch.setattr(script.turns, "Company", Company)
    return asked


def some(script: ModuleType, count: int) -> list[object]:
    return known(script)[:count]


def test_a_turn_is_an_untimed_and_a_timed_step_and_ends_with_rest(script, companies):
    who = some(script, 3)
    found = script.turns.rounds(who, subject(script), passes=20, warm_up=1)
    assert companies[:3] == [(each.name, "wait") for each in who]
    turns = [companies[start : start + 3] for start in range(3, 3 + 3 * 21 * 3, 3)]
    for number, turn in enumerate(turns):
        assert [word for _, word in turn] == ["step", "step" if number < 3 else "timed", "rest"]
        assert len({name for name, _ in turn}) == 1
    order = [turn[0][0] for turn in turns]
    rounds = {tuple(order[start : start + 3]) for start in range(0, len(order), 3)}
    assert {frozenset(each) for each in rounds} == {frozenset(each.name for each in who)}
    assert len(rounds) == 6  # All orders there are.
    for its, peak in found.values():
        assert (len(its.wall), len(its.cpu), len(its.losses), peak) == (20, 20, 42, 5)


def test_exact_peak_steps_in_a_process_that_gives_memory_back(script, companies):
    (who,) = some(script, 1)
    assert script.turns.exact_peak(who, subject(script), passes=2) == 7
    assert [word for _, word in companies] == ["wait", "step", "step", "end"]


def turns(script: ModuleType, *wall: float) -> object:
    return script.Turns(wall=list(wall), cpu=[1.5 * each for each in wall], losses=[3.0, 2.0])


def test_row_gives_tokens_a_second_and_busy_cores(script):
    (who,) = some(script, 1)
    found = script.row(who, turns(script, 2.0, 4.0, 8.0), subject(script), 3 * 2**20, 2**20)
    assert (found["tokens a second"], found["tokens a second: 25%"], found["tokens a second: 75%"]) == (8.0, 6.0, 12.0)
    assert (found["tokens a second"], found["step, ms"], found["fastest, ms"]) == (8.0, 4000.0, 2000.0)
    assert found["cores busy"] == 1.5
    assert (found["peak, MiB (exact)"], found["peak, MiB (default)"], found["last loss"]) == (1.0, 3.0, "2.00000")


def test_row_of_a_schedule_tells_its_bubble(script):
    who = [each for each in known(script) if each.name in ("splitpipe, 1f1b", "splitpipe, zb-h1")]
    what = subject(script, chunks=8)
    found = [script.row(each, turns(script, 2.0), what, 0, None)["cores its schedule fills"] for each in who]
    assert found == pytest.approx([2 * 24 / 27, 2 * 24 / 25])


def test_verdict_is_of_the_best_in_each_role(script):
    names = {
        "splitpipe, zb-h1": (3.0, 3.0, 3.0),
        "splitpipe, zb-v": (2.0, 2.0, 4.0),
        "splitpipe, zb-v, torch's products": (4.0, 4.0, 4.0),
        "torch.distributed, GPipe": (6.0, 6.0, 6.0),
        "torch.distributed, 1F1B": (3.0, 4.0, 4.0),
        "unwrapped, whole batch, 2 threads": (1.0, 1.0, 1.0),
        "torchgpipe, GPipe, 2 threads": (0.1, 0.1, 0.1),
    }
    who = [each for each in known(script) if each.name in names]
    rows = script.verdict(who, {name: turns(script, *wall) for name, wall in names.items()}, subject(script))
    assert [(row["is"], row["which is"], row["ratio"]) for row in rows] == [
        ("splitpipe, zb-v", "torch.distributed, 1F1B", 1.5),
        ("splitpipe, zb-v", "unwrapped, whole batch, 2 threads", 0.5),
        ("splitpipe, zb-v, torch's products", "torch.distributed, 1F1B", 1.0),
        ("splitpipe, zb-v, torch's products", "unwrapped, whole batch, 2 threads", 0.25),
    ]
    assert (rows[0]["of medians"], rows[0]["of minima"]) == (2.0, 1.5)
    assert [script.say(row).rsplit(", ", 1)[1] for row in rows] == ["at least equal", "slower"] * 2
    assert script.say({**rows[0], "ratio": 0.99}).endswith("SLOWER")


def test_verdict_without_peers_is_empty(script):
    who = some(script, 2)
    assert script.verdict(who, {each.name: turns(script, 1.0) for each in who}, subject(script)) == []


@pytest.mark.parametrize("loss", [2.1, float("nan")])
def test_another_loss_is_exit_code_1_and_is_not_saved(script, companies, capsys, monkeypatch, tmp_path, loss):
    path = tmp_path / "compute.json"
    step = script.turns.Company.step

    def strange(self, turns, timed):
        step(self, turns, timed)
        turns.losses[-1] = loss if self.contender.name == "splitpipe, gpipe" else 2.0

    monkeypatch.setattr(script.turns.Company, "step", strange)
    assert script.main([*TINY, "--contenders", "splitpipe", "--save", str(path)]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"splitpipe, gpipe: loss {loss:.6f} at step 0; expected 2.000000, that of splitpipe, drop")
    assert not path.exists()


def test_missing_peer_is_left_out_and_said(script, companies, capsys, monkeypatch):
    monkeypatch.setattr(script.contenders, "find_spec", lambda _: None)
    assert script.main([*TINY, "--contenders", "torchgpipe", "splitpipe, zb-v"]) == 0
    printed = capsys.readouterr()
    assert "left out: gpt, torchgpipe, GPipe; gpt, torchgpipe, GPipe, 2 threads: torchgpipe is not" in printed.err
    assert "pip install -e '.[bench]' -c constraints.txt" in printed.err
    assert "torchgpipe" not in printed.out


@models
def test_names_tell_the_contenders_apart(script, model):
    names = [each.name for each in known(script, model)]
    assert len(set(names)) == len(names)


def test_a_word_that_is_a_name_takes_no_longer_ones(script):
    what = subject(script)
    found = script.chosen([what], ["splitpipe, zb-v", "zb-h1"])[what]
    assert [each.name for each in found] == [
        "splitpipe, zb-h1", "splitpipe, zb-v", "splitpipe, zb-h1, torch's products"
    ]


def test_a_pipeline_without_skips_is_left_out_where_they_are(script):
    what = [subject(script, "unet"), subject(script, "resnet101")]
    here, left_out = script.present(script.chosen(what, ["distributed, 1F1B"]))
    assert left_out == ["unet, torch.distributed, 1F1B: its stages hand values to the next stage alone, and the skips "
                        "of a U-Net bypass stages"]
    assert [len(its) for its in here.values()] == [0, 1]


def test_on_a_gpu_there_are_neither_threads_nor_processes_to_compare(script):
    what = script.Subject("gpt", "tiny", 4, "cuda:1")
    left = [each for each in script.contenders.contenders(what) if not each.missing(what)]
    assert {each.package for each in left} <= {"splitpipe", "torchgpipe", "unwrapped"}
    assert {each.threads for each in left} == {1}
    assert script.contenders.places("cuda:1", 2) == ["cuda:1"] * 2


def test_torchgpipe_is_left_out_on_parts_of_a_gpu(script, monkeypatch):
    monkeypatch.setattr(script.contenders, "find_spec", lambda _: True)
    what = script.Subject("unet", "tiny", 4, "parts")
    (peer,) = [each for each in script.contenders.contenders(what) if each.package == "torchgpipe"]
    assert "takes no streams" in peer.missing(what)


def test_stages_of_ranks_are_all_there_are(script):
    ranks = importlib.import_module("ranks")
    for places in ranks.PLACES.values():
        stages = sorted(stage for mine in places for stage in mine)
        assert stages == list(range(len(stages)))


def test_member_refuses_an_unknown_word(script):
    with pytest.raises(ValueError, match="found 'dance': expected step, rest or peak"):
        importlib.import_module("member").answer("dance", lambda: 0.0, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--preset", "huge"], "invalid choice: 'huge'"), (["--contenders", "zb-w"], "no contender has 'zb-w'"),
     (["--device", "tpu"], "invalid device value: 'tpu'")],
)
def test_bad_options_are_refused(script, capsys, options, said):
    with pytest.raises(SystemExit) as stopped:
        script.main(options)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_script_runs_from_the_root_of_the_repository():
    command = [sys.executable, "benchmarks/compute.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "--contenders" in done.stdout) == (0, True), done.stderr
