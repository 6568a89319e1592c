"""One command for all results: the list of parts is whole, one that fails harms no other and no older result."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
#: Scripts whose --save is for something else than a result that is measured here.
OTHERS = {
    "train_gpt.py": "the model that it has trained",
    "published.py": "what torchgpipe's pages say",
    "growth.py": "what is simulated, on no machine",
}
GOOD = """
import json, sys
tables = {"steps": [{"ms": 1.5}]}
json.dump({"environment": {"command": " ".join(sys.argv)}, "tables": tables}, open(sys.argv[-1], "w"))
"""
HALF = """
import sys
open(sys.argv[-1], "w").write('{"tables": {"ste')
print(*range(100), sep="\\n")
sys.exit("no room")
"""
Fake = Callable[..., Any]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module; the number of threads is put back."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("run")
    torch.set_num_threads(threads)


@pytest.fixture
def fake(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Gives a part that runs the source it is given, and has the list be of such parts, with no pictures after them."""
    monkeypatch.setattr(script, "PARTS", ())
    monkeypatch.setattr(script, "closing", lambda into: {})

    def make(name: str, source: str) -> Any:
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        part = script.Part(name, str(path), script.Way("--passes 3", 1), None, "--tiny")
        monkeypatch.setattr(script, "PARTS", (*script.PARTS, part))
        return part

    return make


def test_every_script_that_saves_a_result_has_a_part(script: ModuleType) -> None:
    saving = {path.name for path in (ROOT / "benchmarks").glob("*.py") if '("--save"' in path.read_text()}
    assert {part.command.split()[0] for part in script.PARTS} == saving - OTHERS.keys()


def test_every_part_of_the_split_backwards_script_is_there(script: ModuleType) -> None:
    known = set(importlib.import_module("backward").PARTS) - {"all", "peak"}
    assert known == {part.command.split()[1] for part in script.PARTS if part.command.startswith("backward.py")}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_script_takes_its_options(script: ModuleType, device: str, quick: bool) -> None:
    for part in script.chosen([], device):
        name, *options = part.words(device, quick)
        importlib.import_module(name.removesuffix(".py")).parser().parse_args([*options, "--save", "here"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_together_the_parts_leave_room_in_the_budget(script: ModuleType, device: str) -> None:
    assert sum(part.way(device).seconds for part in script.chosen([], device)) < 60 * script.BUDGETS[device]


def test_names_of_parts_and_their_results_are_their_own(script: ModuleType) -> None:
    assert len({part.result("cpu") for part in script.PARTS}) == len(script.PARTS)


def test_a_part_that_fails_is_reported_and_the_others_still_run(
    script: ModuleType, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("first", HALF), fake("second", GOOD)
    assert script.main(["--into", str(tmp_path / "found")]) == 1
    printed = capsys.readouterr().out
    assert "first: ended with exit code 1" in printed and "    no room" in printed and "failed: first" in printed
    assert "    99\n" in printed and "    50\n" not in printed  # The end of what it said, not all of it.
    assert (tmp_path / "found" / "second-cpu.json").exists()


def test_a_part_that_fails_leaves_the_older_result_as_it_is(script: ModuleType, fake: Fake, tmp_path: Path) -> None:
    fake("half", HALF)
    into = tmp_path / "found"
    into.mkdir()
    (into / "half-cpu.json").write_text("older")
    assert script.main(["--into", str(into), "--only", "half"]) == 1
    assert [path.name for path in into.iterdir() if path.name != "run-cpu.json"] == ["half-cpu.json"]
    assert (into / "half-cpu.json").read_text() == "older"


def test_a_part_that_ends_well_without_a_result_has_failed(
    script: ModuleType, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("silent", "print('nothing')"), fake("broken", "import sys; open(sys.argv[-1], 'w').write('{')")
    assert script.main(["--into", str(tmp_path / "found")]) == 1
    printed = capsys.readouterr().out
    assert "silent: left no result: FileNotFoundError" in printed and "broken: left no result: JSONDecode" in printed


def test_a_part_that_could_measure_nothing_leaves_the_older_result(
    script: ModuleType, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("poor", GOOD.replace('{"steps": [{"ms": 1.5}]}', '{"steps": []}; print("left out: no compiler")'))
    (tmp_path / "poor-cpu.json").write_text("older")
    assert script.main(["--into", str(tmp_path)]) == 1
    assert (tmp_path / "poor-cpu.json").read_text() == "older"
    assert "poor: measured nothing" in capsys.readouterr().out


def test_a_part_is_stopped_at_its_limit(script: ModuleType, fake: Fake) -> None:
    endless = fake("endless", "import threading; print('begun', flush=True); threading.Event().wait()")
    outcome = script.finish([endless.command], limit=1)
    assert outcome.fault == "was stopped after 1 s, all that it has"


def test_what_a_part_has_started_ends_with_it(script: ModuleType, fake: Fake, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    child = f"f = open({str(pipe)!r}, 'w'); print('open', flush=True); import threading; threading.Event().wait()"
    source = f"import subprocess, sys; it = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)"
    parent = fake("parent", f"{source}; it.stdout.readline()")
    assert script.finish([parent.command], limit=60).fault is None
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # Nobody has it open for writing; with a child that lives, this would not return.
    os.close(reader)


def test_a_result_knows_the_command_of_all_parts_and_its_own(script: ModuleType, fake: Fake, tmp_path: Path) -> None:
    fake("good", GOOD)
    into = tmp_path / "found"
    assert script.main(["--into", str(into), "--quick"]) == 0
    saved = json.loads((into / "good-cpu.json").read_text())
    assert saved["tables"] == {"steps": [{"ms": 1.5}]}
    assert saved["environment"]["command"].endswith(f"good.py --passes 3 --tiny --save {into}/good-cpu.json")
    assert saved["environment"]["run"]["command"] == f"python benchmarks/run.py --into {into} --quick"


def test_a_whole_run_says_how_long_each_part_took(script: ModuleType, fake: Fake, tmp_path: Path) -> None:
    fake("a", GOOD), fake("b", HALF)
    into = tmp_path / "found"
    script.main(["--into", str(into), "--only", "a"])
    assert not (into / "run-cpu.json").exists()
    script.main(["--into", str(into)])
    rows = json.loads((into / "run-cpu.json").read_text())["tables"]["parts"]
    assert [(row["part"], row["result"]) for row in rows] == [("a", "`a-cpu.json`"), ("b", "ended with exit code 1")]


@pytest.mark.parametrize(("took", "limits"), [
    # Seconds that the parts take, of 150 for three that need 30, 30 and 60: one of 1.25 for each that is needed.
    ((0, 0, 0), [60, 75, 150]),
    ((60, 30, 60), [60, 30, 60]),
    ((30, 75, 45), [60, 60, 60]),
])
def test_a_part_has_twice_its_share_but_not_what_others_need(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, took: tuple[float, ...], limits: list[float]
) -> None:
    running = importlib.import_module("running")
    now, had = [0.0], []
    monkeypatch.setattr(running, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run(part: Any, limit: float) -> Any:
        now[0] += min(limit, took[len(had)])
        had.append(limit)
        return running.Outcome(limit)

    parts = [script.Part(f"{seconds}", "", script.Way("", seconds), None, "") for seconds in (30, 30, 60)]
    running.in_turn(parts, "cpu", 150, run)
    assert had == limits


@pytest.mark.parametrize(("options", "said"), [
    (["--quick"], "found no --into; expected a folder"),
    (["--device", "cuda"], "found no --into; expected a folder"),
    (["--only", "everything"], "found part everything; expected of those that run on cpu: compute, memory-peers"),
    (["--only", "trace"], "found part trace; expected of those that run on cpu"),
    (["--device", "tpu"], "invalid choice: 'tpu'"),
])
def test_what_makes_no_sense_is_refused(
    script: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main(options)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_list_names_all_parts(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--list", "--device", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [part.name for part in script.PARTS if part.cuda]
    assert lines[-1].startswith("together")


@pytest.mark.parametrize(("own", "expected"), [(True, ["figures.py", "report.py"]), (False, ["figures.py"])])
def test_pictures_follow_and_the_pages_if_the_results_are_theirs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: bool, expected: list[str]
) -> None:
    ran = []
    monkeypatch.setattr(script, "find_spec", lambda name: name)
    monkeypatch.setattr(script, "finish", lambda words, limit: ran.append(words[0]) or script.Outcome(1))
    script.closing(script.RESULTS if own else tmp_path)
    assert ran == expected


def test_without_matplotlib_pictures_are_left_out(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    assert script.closing(tmp_path) == {}
    assert "pictures: left out, they need matplotlib" in capsys.readouterr().out
