"""The command line of schedules: each option does what it says, and each error is one line."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from splitpipe import __main__
from splitpipe.schedule import Costs, Schedule, build, command, names, simulate
from splitpipe.schedule.construct.library import options
from splitpipe.schedule.draw import html, svg, text
from tests.helpers.faults import throws

ROOT = Path(__file__).resolve().parents[2]
# What the command line does where nothing of torch can be imported.
WITHOUT_TORCH = """
import sys, types
sys.modules["torch"] = None
package = types.ModuleType("splitpipe")
package.__path__ = [sys.argv.pop(1)]
sys.modules["splitpipe"] = package
from splitpipe.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda line, *more: Ran(__main__.main(["schedule", *line.split(), *map(str, more)]), *capsys.readouterr())


def drawn(*schedules: Schedule) -> str:
    return text.draw([simulate(schedule) for schedule in schedules], 100) + "\n"


def process(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    line = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, str(ROOT / "splitpipe"), *arguments]
    return subprocess.Popen(line, text=True, stderr=subprocess.PIPE, **more)


@pytest.mark.parametrize(("line", "schedules"), [
    ("zb-h1", [build("zb-h1", 4, 8)]),
    *((f"{name} --devices 3 --chunks 12", [build(name, 3, 12)]) for name in names()),
    ("zb-v --chunks 12 --compare 1f1b zb-h1", [build(name, 4, 12) for name in ("zb-v", "1f1b", "zb-h1")]),
    ("gpipe --split --compare 1f1b zb-h1",  # Each takes the options that it has.
     [build("gpipe", 4, 8, split=True), build("1f1b", 4, 8, split=True), build("zb-h1", 4, 8)]),
], ids=lambda value: value if isinstance(value, str) else "")
def test_names_are_drawn_for_four_devices_and_eight_chunks_or_as_said(run, line, schedules):
    assert run(line) == Ran(code=0, out=drawn(*schedules), err="")


def test_every_file_is_written_and_nothing_printed(run: Any, tmp_path: Path) -> None:
    found = run("zb-h1 --compare 1f1b --costs 3 4 2 1", "--svg", tmp_path / "a.svg", "--html", tmp_path / "a.html")
    assert found == Ran(code=0, out="", err="")
    timelines = [simulate(build(name, 4, 8), Costs(3, 4, 2, 1)) for name in ("zb-h1", "1f1b")]
    written = {path.suffix: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert written[".svg"] == svg.draw(timelines)
    assert written[".html"] == html.draw(timelines)


def test_the_list_has_a_line_a_name(run: Any) -> None:
    lines = run("--list").out.splitlines()
    assert [line.split()[0] for line in lines] == names()
    assert all(len(line.split()) > 3 for line in lines)
    assert next(line for line in lines if line.startswith("1f1b ")).endswith("[--split]")


@pytest.mark.parametrize("name", [name for name in names() if options(name)])
def test_each_option_of_a_schedule_is_passed_on(name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def built(name: str, devices: int, chunks: int, **given: Any) -> Schedule:
        asked.update(given)
        return build("1f1b", devices, chunks)

    monkeypatch.setattr(command, "build", built)
    flags = [f"--{option.replace('_', '-')}" + " 3" * (option != "split") for option in options(name)]
    found = run(name, *" ".join(flags).split())
    assert found.code == 0, f"{found.err.strip()}: add it to parser() in schedule/command.py"
    assert asked == {option: option == "split" or 3 for option in options(name)}


def test_the_examples_of_the_help_are_understood() -> None:
    lines = [line.split()[4:] for line in command.EXAMPLES.splitlines() if "python -m" in line]
    assert len(lines) == 4
    for line in lines:
        command.parser().parse_args(line)


def test_alone_it_prints_help_and_an_unknown_command_is_an_error_in_one_line(capsys):
    for arguments in ([], ["-h"], ["--help"]):
        assert __main__.main(arguments) == 0 and "schedule" in capsys.readouterr().out
    for word in ("Plan", "plans", "", "--version", "-x"):
        assert __main__.main([word]) == 2
        said = f"splitpipe: unknown command {word!r}: expected plan or schedule. See --help.\n"
        assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(("line", "message"), [
    ("", "one of the arguments NAME --list is required"),
    ("zb-h1 --list", "not allowed with argument"),
    ("zb-h9", "there is no schedule named 'zb-h9'"),
    ("zb-h1 --dev 4", "unrecognized arguments: --dev"),
    ("zb-h1 --devices four", "argument --devices: invalid int value: 'four'"),
    ("zb-h1 --devices 0", "devices=0: expected"),
    ("zb-h1 --costs 1 1 1", "argument --costs: expected 4 arguments"),
    ("zb-h1 --costs -1 1 1 0", "forward=-1.0: expected"),
    ("zb-h1 --costs 1e308 1e308 1e308 0", "the makespan of inf has no scale"),
    ("zb-h1 --split", "zb-h1 has no option 'split'"),
    ("looped-bfs --stages-per-device 1000000", "expected at most"),
    ("zb-h1 --svg absent/a.svg", "No such file or directory: 'absent/a.svg'"),
    ("zb-h1 --html .", "Is a directory: '.'"),
])
def test_an_error_is_one_line(run, monkeypatch, tmp_path, line, message):
    monkeypatch.chdir(tmp_path)
    found = run(line)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("splitpipe schedule: ") and message in found.err
    assert found.err.count("\n") == 1 and found.err.endswith("\n") and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("error", "code", "said"), [
    (MemoryError(), 2, "splitpipe schedule: the numbers are too big.\n"),
    (KeyboardInterrupt(), 130, ""),
])
def test_numbers_beyond_the_machine_and_control_c_end_it(run, monkeypatch, error, code, said):
    monkeypatch.setattr(command, "build", throws(error))
    assert run("zb-h1") == Ran(code=code, out="", err=said)


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [["schedule", "zb-h1"], [], ["schedule", "--list"], ["schedule", "--help"]])
def test_nobody_reading_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with process(*arguments, stdout=writer) as done:
        os.close(writer)
        _, err = done.communicate()
    assert (done.returncode, err) == (141, "")


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full, process("schedule", "zb-h1", stdout=full) as done:
        _, err = done.communicate()
    assert (done.returncode, err) == (2, "splitpipe schedule: [Errno 28] No space left on device\n")
