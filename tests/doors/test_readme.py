"""README and docs tell the truth: examples run, commands are those that are checked, pictures and the site fit."""
from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining

from splitpipe.__main__ import main
from splitpipe.engine.rows import OpRows, backward_rows, forward_rows
from splitpipe.schedule import Op, Schedule, build, names, simulate
from splitpipe.schedule.construct.library import options
from tests.doors.test_layers import ROOMS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
TEXT = {page: page.read_text(encoding="utf-8") for page in [*PAGES, *OTHERS]}
INSTALL = "python -m pip install ."
BENCH = 'python -m pip install -e ".[bench]" -c constraints.txt'
TRAIN = "python benchmarks/train_gpt.py"
TESTS = 'python -m pip install -e ".[test]" -c constraints.txt'
TEST = "python -m pytest"
SCHEDULE = "python -m splitpipe schedule"
PLAN = "python -m splitpipe plan"
ACROSS = "torchrun --nproc-per-node 2 benchmarks/train_gpt.py --schedule v-half"
GPU = "python -m tests.gpu --out gpu"
#: A line before code of other libraries, which a page shows and nothing runs.
BEFORE = "<!-- not run -->\n"
#: Libraries without which an example that imports one is left out.
CLIENTS = {"accelerate", "bitsandbytes", "lightning", "peft", "transformers"}


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """A page's blocks of one language, without those that aren't run, each with the line that it starts in."""
    run = [match for match in fences(page, language) if not match[1]]
    return [(TEXT[page].count("\n", 0, match.start(2)) + 1, match[2]) for match in run]


def fences(page: Path, language: str) -> list[re.Match[str]]:
    """A page's blocks of one language: whether it isn't run, and its content."""
    pattern = rf"^({BEFORE})?```{language}\n(.*?)^```$"
    return [*re.finditer(pattern, TEXT[page], flags=re.MULTILINE | re.DOTALL)]


def clients(source: str) -> set[str]:
    """The libraries that an example asks for."""
    named = {alias.name if isinstance(node, ast.Import) else str(node.module) for node in ast.walk(ast.parse(source))
             if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    return {each.partition(".")[0] for each in named} & CLIENTS


def missing(source: str) -> set[str]:
    """Those that are not installed."""
    return {name for name in clients(source) if find_spec(name) is None}


def known(page: Path) -> str:
    """A page's name, by which -k clients finds those with examples of libraries."""
    return page.stem + "-clients" * any(clients(source) for _, source in blocks(page, "python"))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The only process of those that torchrun would start."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.draws
@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=known)
@pytest.mark.filterwarnings("default:::transformers", "default:::lightning")
@pytest.mark.filterwarnings("default:`torch.jit.script_method` is deprecated")  # bitsandbytes, when it is imported.
@pytest.mark.filterwarnings("ignore:no accelerator is available")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # The compiler's own, which it hides from users.
def test_the_examples_run_from_top_to_bottom(page: Path, no_accelerator: None, alone: None) -> None:
    # One namespace for a page: a reader types them in one after the other.
    namespace: dict[str, object] = {"__name__": page.stem}
    for line, source in blocks(page, "python"):
        if missing(source):
            continue
        # Empty lines in front, so that a traceback names the page's own lines.
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)


@pytest.mark.cuda
@pytest.mark.devices(2)
@pytest.mark.thorough
def test_the_readmes_examples_run_on_gpus() -> None:
    def on_gpus(found: re.Match[str]) -> str:
        count = found[0].count('"cpu"') * int(found[1] or 1)
        return str([f"cuda:{number % torch.cuda.device_count()}" for number in range(count)])

    namespace: dict[str, object] = {"__name__": "readme"}
    for _, source in blocks(README, "python"):
        if not missing(source):
            exec(re.sub(r'\["cpu"(?:, "cpu")*\](?: \* (\d+))?', on_gpus, source), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_the_examples_name_their_devices_since_a_machine_may_have_fewer_than_stages(page: Path) -> None:
    makers = {"SplitPipe", "GPipe", "Pipeline", "plan", "balance_by_time", "balance_by_size"}
    for _, source in blocks(page, "python"):
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).rpartition(".")[2] in makers:
                assert {word.arg for word in call.keywords} & {"devices", "device", None}, ast.unparse(call)


def anchors(page: Path) -> set[str]:
    """What a link to a part of a page may name: its headings, as GitHub writes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_are_words_that_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)\s]*)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        name, _, anchor = target.partition("#")
        there = (page.parent / name) if name else page
        assert there.exists() and (not anchor or anchor in anchors(there)), target
    assert re.findall(r"\[[\w/-]+\.(?:md|ipynb)\]\(", page.read_text(encoding="utf-8")) == [], "a name of a page"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_code_says_its_language_is_as_wide_as_the_site_shows_it_and_is_python(page: Path) -> None:
    marks = re.findall(r"^```(.*)$", TEXT[page], flags=re.MULTILINE)
    assert {*marks[::2]} <= {"python", "diff", "sh", "text"} and {*marks[1::2]} <= {""}
    code = re.findall(r"^```\w+\n(.*?)^```$", TEXT[page], flags=re.MULTILINE | re.DOTALL)
    assert [line for source in code for line in source.splitlines() if len(line) > 80] == []
    for match in fences(page, "python"):
        ast.parse(match[2])
    for match in fences(page, "diff"):
        ast.parse("\n".join(line[2:] for line in match[2].splitlines()))
    assert page in OTHERS or "<!-- value:" not in TEXT[page]  # Numbers of a reader's pages are held by tests.


@pytest.mark.parametrize(("page", "most"), [("README.md", 200), ("CONTRIBUTING.md", 150), ("docs/architecture.md", 120),
                                            ("docs/limits.md", 120), ("CHANGELOG.md", 50)])
def test_a_page_that_is_read_from_top_to_bottom_is_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_the_architecture_names_files_and_functions_that_are_there() -> None:
    page = TEXT[ROOT / "docs/architecture.md"]
    files = {name: [path for path in (ROOT / "splitpipe" / name, ROOT / name) if path.exists()] for name in
             re.findall(r"`([\w./]+/[\w./]*|\w+\.py)`", page)}
    assert [name for name, found in files.items() if not found] == []
    described = re.findall(r"`([\w/]+\.py)`(?:\s+\(|,\s+)((?:`(?!__)[\w.]+`(?:,\s+)?)+)\)", page)
    assert described
    for name, words in described:
        source = files[name][0].read_text(encoding="utf-8")
        for word in re.findall(r"\w+", words):
            assert re.search(rf"^\s*(?:def|class) {word}\b|^{word}\b", source, flags=re.MULTILINE), f"{name}: {word}"


def test_the_architecture_has_all_rooms_from_the_ground_up() -> None:
    table = TEXT[ROOT / "docs/architecture.md"].split("## The folders")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    shown = [{name.strip("/").removesuffix(".py") for name in re.findall(r"`([\w./]+)`", row)} for row in rows]
    assert [{"" if name == "__init__" else name for name in row} for row in shown] == ROOMS


def commands(*pages: Path) -> list[str]:
    sources = [source.replace("\\\n   ", "") for page in pages for _, source in blocks(page, "sh")]
    return [line for source in sources for line in source.splitlines()]


def test_the_commands_are_these_and_those_of_schedules_and_plans() -> None:
    shown = [line for line in commands(*PAGES) if not line.startswith((SCHEDULE, PLAN))]
    assert shown == [INSTALL, BENCH, TRAIN, TESTS, TEST, GPU, ACROSS]


@pytest.mark.thorough
@pytest.mark.parametrize("command", [line for line in commands(*PAGES) if line.startswith(PLAN)])
def test_a_command_of_plans_does_what_it_says(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(
        "from torch import nn\nmodel = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16), nn.Linear(16, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    assert main([*shlex.split(command)[3:], "--seconds", "0", "--devices", "cpu", "--chunks", "2"]) == 0
    assert "SplitPipe(module, balance=" in capsys.readouterr().out
    assert "<html" in (tmp_path / "plan.html").read_text().lower()
    monkeypatch.delitem(sys.modules, "train", raising=False)


@pytest.mark.parametrize("command", [line for line in commands(*PAGES) if line.startswith(SCHEDULE)])
def test_a_command_of_schedules_does_what_it_says(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[3:]) == 0
    picture = re.search(r"--svg (\S+)", command)
    if picture is None:
        assert set(names()) <= set(capsys.readouterr().out.split())
    else:
        assert (tmp_path / picture[1]).read_bytes() == (ROOT / picture[1]).read_bytes()


def test_the_table_of_schedules_has_what_a_simulation_finds() -> None:
    page = TEXT[ROOT / "docs/schedules.md"]
    rows = re.findall(r"^\| `([\w-]+)`(, `split=True`)? \| ([\d.]+) \| ([\d.]+) \|", page, flags=re.MULTILINE)
    assert {name for name, *_ in rows} == set(names()), "the table in docs/schedules.md"
    missing = {option for name in names() for option in options(name) if f"`{option}" not in page}
    assert not missing, f"docs/schedules.md doesn't have the options {missing}"
    for name, split, makespan, memory in rows:
        timeline = simulate(build(name, 4, 8, split=True if split else None))
        assert (timeline.makespan, max(timeline.peak_activations)) == (float(makespan), float(memory)), name


def test_the_page_on_migrating_names_schedules_that_torch_and_splitpipe_have() -> None:
    rows = re.findall(r'^\| `(Schedule\w+)` \| `"([\w-]+)"`', TEXT[ROOT / "docs/migrating.md"], flags=re.MULTILINE)
    assert rows and {theirs for theirs, _ in rows} <= set(pipelining.__all__)
    assert {ours for _, ours in rows} <= set(names())


def test_the_check_of_the_project_runs_the_commands_of_the_readme() -> None:
    check = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(f"run '{line}'\n" in check for line in (BENCH, TRAIN, TESTS, TEST))
    pinned = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.findall(r"pip install torch==(\S+)", TEXT[README]) == pinned


def drawn(rows: OpRows) -> str:
    """A simulation of a drop-in call's rows as text: three characters for each unit of time."""
    ops = [[Op(run.kind, run.stage, i) for run in row if run.kind != "R" for i in run.microbatches] for row in rows]
    timeline = simulate(Schedule(ops, range(len(ops))))
    lines = []
    for device, row in enumerate(timeline.spans):
        cells = ["   "] * round(timeline.makespan)
        for op, start, _ in row:
            cells[round(start)] = f"{op.kind}{op.microbatch}".ljust(3)
        lines.append(f"stage {device}  {''.join(cells)}")
    return "\n".join(lines)


def test_the_pictures_are_a_drop_in_call_with_and_without_the_split_on_one_time_scale() -> None:
    m, workers = 4, (0, 1, 2, 3)
    first = forward_rows(m, workers)
    second = backward_rows(m, workers, lowest=0, checkpointed=0, weights=True)
    split = [[*one, *other] for one, other in zip(first, second)]
    fused = [[run._replace(kind="BW") if run.kind == "B" else run for run in row if run.kind != "W"] for row in split]
    pictures = [[line.rstrip() for line in drawn(rows).splitlines()] for rows in (fused, split)]
    assert [source.splitlines() for _, source in blocks(README, "text")] == pictures


def table(file: str, name: str) -> list[dict[str, Any]]:
    """A table of results."""
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results" / file).read_text())["tables"][name]
    return rows


@pytest.mark.parametrize(("divided_by", "against"), [("the best other pipeline", "the best pipelined peer"),
                                                     ("the plain module, on both cores", "the bound")])
def test_the_readme_has_the_throughput_that_was_measured(divided_by: str, against: str) -> None:
    (shown,) = re.findall(rf"^\| {divided_by} \| (.*) \|$", TEXT[README], flags=re.MULTILINE)
    ratios = [min(row["ratio"] for row in table("compute-cpu.json", f"best, {model}") if row["against"] == against)
              for model in ("gpt", "unet", "resnet101", "amoebanet")]
    assert shown == " | ".join(f"{ratio:.2f}" for ratio in ratios)


def test_the_readme_has_the_time_of_python_that_was_measured() -> None:
    blocks, chunks = 48, 8  # The defaults of benchmarks.parts.host.
    shown = re.findall(r"([\d.]+) ms", TEXT[README])
    wanted = {"devices": 2, "who": "cuts", "how": "drop-in", "backward": "split"}
    found = {row["checkpoint"]: row["ms"] / blocks / chunks for row in table("host-fake.json", "host")
             if {**row, **wanted} == row}
    assert shown == [f"{found[checkpoint]:.2f}" for checkpoint in ("except_last", "never")]


def test_the_best_number_of_chunks_is_the_one_that_was_measured() -> None:
    (row,) = [row for row in table("scaling-cpu.json", "best chunks") if row["contender"] == "splitpipe, 1f1b"]
    assert f"with about\n  {row['best chunks']} microbatches" in TEXT[ROOT / "docs/tuning.md"]


def words(text: str) -> list[str]:
    """The words of a text, in which all numbers are the same."""
    return re.sub(r"\d+(?:\.\d+)?", "#", text).split()


@pytest.mark.parametrize(("example", "first", "compared"), [
    ("class Centred", "8 rows", words), ("deferral_report", "parameter", str),
], ids=["check", "deferral report"])
def test_an_example_prints_what_the_page_shows(example, first, compared, no_accelerator, capsys):
    page = ROOT / "docs/reference.md"
    (imports, *others) = [source for _, source in blocks(page, "python")]
    exec(f"{imports}\n{next(source for source in others if example in source)}", {})
    (printed,) = [source for _, source in blocks(page, "text") if source.startswith(first)]
    assert compared(capsys.readouterr().out) == compared(printed)


OPTION = r'<option(?: value="(\w+)")?(?: selected)?>([^<]+)'


def choices() -> dict[str, list[str]]:
    """The values of each choice on the page."""
    page = (ROOT / "docs" / "playground.md").read_text(encoding="utf-8")
    return {name: [value or text for value, text in re.findall(OPTION, options)]
            for name, options in re.findall(r'<select name="(\w+)">(.*?)</select>', page, flags=re.DOTALL)}


def test_the_playground_has_a_page_for_each_of_its_choices() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "site" / "playground.py"), run_name="playground")
    numbers = {name: [str(each) for each in made[name.upper()]] for name in ("devices", "chunks", "costs")}
    assert choices() == {"name": names(), **numbers}
    for costs in made["COSTS"]:
        assert "zb-v: 4 devices, 8 microbatches" in made["page"]("zb-v", 4, 8, costs)


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (docs/\S+)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = [f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")]
    assert sorted(listed) == sorted(pages)
