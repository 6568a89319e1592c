"""The command for GPUs: its parts by what there is, what becomes of them; what is wrong gets a sentence."""
from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.gpu import __main__ as command
from tests.gpu import parts
from tests.gpu.__main__ import main
from tests.gpu.found import PACKAGES, rate
from tests.gpu.parts import MOST, Outcome, Part, run
from tests.gpu.syncs import syncs


@pytest.mark.thorough
def test_without_a_gpu_the_command_says_what_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        assert main([]) == 2
    assert "found no GPU: expected a CUDA device" in capsys.readouterr().err


def test_what_is_wrong_gets_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [Outcome("tests", "1 of 3 checks hold", 2.0, [f"check {number}: planted" for number in range(MOST + 2)]),
                Outcome("soak", "fine", 1.0, skipped=["one thing: no reason"])]
    monkeypatch.setattr(command, "everything", lambda *_: (told(), outcomes))
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "not tried: soak: one thing: no reason", *(f"wrong: tests: check {number}: planted" for number in range(MOST)),
        "wrong: tests: 2 more like these, which stand in the JSON",
    ]


def ending(how: str, limit: float = 60.0) -> Part:
    """A part that ends in that way."""
    return Part("part", (sys.executable, "-c", f"import os, sys, time; print('last words', flush=True); {how}"), limit)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (ending("os.abort()"), "it was ended by SIGABRT: "),
        (ending("sys.exit(3)"), "it ended with exit code 3: last words"),
        (ending("pass"), "it left no result: last words"),
        (ending("time.sleep(600)", limit=0.5), "it was not done in 0.5 s, and was stopped: "),
        (ending("open(sys.argv[1], 'w').write('{\"wrong\": []}'); sys.exit(2)"), "it ended with exit code 2"),
    ],
    ids=["crash", "exit", "nothing", "hang", "late crash"],
)
@pytest.mark.thorough
def test_a_part_that_does_not_end_well_is_a_row(part: Part, sentence: str, tmp_path: Path) -> None:
    [found] = run(part, tmp_path).wrong
    assert found.startswith(sentence)


@pytest.mark.thorough
def test_tests_are_told_from_those_that_need_more(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_fine(): pass\ndef test_wrong(): assert 0, 'no\\nmore'\n"
        "@pytest.mark.skip(reason='needs 2 CUDA devices')\ndef test_two(): pass\n"
    )
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-c", os.devnull, str(tmp_path), "--junitxml")
    found = run(Part("tests", words, 60.0), tmp_path)
    assert found.result == "1 tests passed, 1 failed, 1 were not run"
    assert len(found.wrong) == 1 and found.wrong[0].startswith("test_it::test_wrong: AssertionError: no")
    assert found.skipped == ["1 tests: needs 2 CUDA devices"]


def told(*missing: str, gib: float = 80.0, rate: float = 20.0) -> dict[str, Any]:
    devices = [{"GiB": gib, "TFLOP/s": each} for each in (20.0, rate)]
    return {"packages": {name: None if name in missing else "1" for name in PACKAGES}, "devices": devices}


@pytest.mark.parametrize(
    ("of", "preset", "steps"),
    [(told(), "large", "200"), (told(gib=16.0), "small", "200"), (told(rate=0.02), "quick", "20")],
    ids=["large", "small", "slow"],
)
def test_sizes_go_by_memory_and_by_how_fast_the_slowest_device_is(of: dict[str, Any], preset: str, steps: str) -> None:
    for asked, count in (None, steps), (7, "7"):
        tests, _, *members = parts.parts(of, asked)
        assert tests.environment == {parts.STEPS: count}
        for part in members:
            assert part.command[-5:] == (part.name, "--steps", count, "--preset", preset)


def test_a_device_is_as_fast_as_its_products() -> None:
    assert 0 < rate(torch.device("cpu")) < 1000


def test_pytest_runs_every_file_with_tests_for_gpus_and_the_sanitizer() -> None:
    tests, sanitizer, *_ = parts.parts(told(), None)
    assert tests.command[1:5] == ("-m", "pytest", "-m", "cuda")
    assert {"tests/gpu/test_checks_cuda.py", "tests/partition/test_placing.py"} <= {*tests.command}
    assert sanitizer.environment["TORCH_CUDA_SANITIZER"] == "1"


def test_without_a_package_tests_are_not_run_and_say_what_is_missing(tmp_path: Path) -> None:
    for part in parts.parts(told("pytest", "hypothesis"), None)[:2]:
        assert run(part, tmp_path).skipped == ["pytest, hypothesis not installed; pip install -e '.[test]'"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--steps", "0"], "--steps is 0: expected 1 or more"), (["--only", "all"], "invalid choice")],
)
def test_wrong_arguments_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert text in capsys.readouterr().err


def test_that_waits_become_errors_is_no_error_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def warns(mode: str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", warns)
    syncs("error")
    assert modes == ["error"]
