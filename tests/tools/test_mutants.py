"""Mutation testing: what its tool does with a function, and that what it has not killed is explained."""
from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

from tests.tools.mutants.children import LATE, tried
from tests.tools.mutants.explained import FILE, Explained, explained
from tests.tools.mutants.replacing import Functions

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = explained(FILE.read_text())


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("file", sorted({each.file for each in EXPLAINED}))
def test_what_is_explained_is_there(file: str) -> None:
    source = flat((ROOT / file).read_text())
    gone = [str(each) for each in EXPLAINED if each.file == file and flat(each.before) not in source]
    assert gone == [], "edited since: judge again, with python -m tests.tools.mutants"


def test_a_reason_counts_for_all_below_it() -> None:
    text = "[a.py]\n# Two lines\n# of reason.\nf: a  ->  b\nf: c  ->  \n\n# Another.\nG.f: a: b  ->  pass\n"
    assert explained(text) == {
        Explained("a.py", "f", "a", "b"): "Two lines of reason.",
        Explained("a.py", "f", "c", ""): "Two lines of reason.",
        Explained("a.py", "G.f", "a: b", "pass"): "Another.",
    }


@pytest.mark.parametrize("text", ["f: a  ->  b", "[a.py]\nf: a  ->  b", "[a.py]\n# Why.\nf a"])
def test_a_line_that_explains_nothing_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"line \d: expected FUNCTION"):
        explained(text)


def test_each_task_is_done_by_a_child_and_one_that_ends_or_is_late_is_known() -> None:
    def does(task: str) -> int:
        if task == "late":
            signal.pause()
        if task == "ends":
            os._exit(3)
        if task == "fails":
            raise KeyboardInterrupt("it")
        return os.getpid()

    tasks = ["late", "ends", "fails", "pid"]
    found = dict(tried(does, tasks, lambda task: 0.1 if task == "late" else 60.0, 2))
    assert [*tried(str, [None], lambda _: 60.0, 1)] == [(None, "None")]
    assert found.pop("pid") != os.getpid()
    assert found == {"late": LATE, "ends": "it ended with 3", "fails": "KeyboardInterrupt: it"}


def test_a_function_is_replaced_wherever_it_has_been_taken_to(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    names: dict[str, object] = {}
    exec(compile("class A:\n    @staticmethod\n    def f(): return 1\n", str(file), "exec"), names)
    taken = names["A"].f  # type: ignore[attr-defined]
    with pytest.raises(LookupError, match="expected the package to be imported"):
        Functions(f"{tmp_path / 'other'}/")
    gc.freeze()  # As the tests' own setting does.
    functions = Functions(f"{tmp_path}/")
    assert functions.called(taken) == {("made.py", "A.f")} == set(functions.keys())
    functions.replace(("made.py", "A.f"), (lambda: 2).__code__)
    assert taken() == 2


def test_operators_do_what_their_examples_say() -> None:
    pytest.importorskip("cosmic_ray", reason='needs the extra "mutants"')
    from cosmic_ray.mutating import mutate_code

    from tests.tools.mutants.operators import OWN, operators

    assert len([*operators()]) > len(OWN)
    for operator in OWN:
        for example in operator.examples():
            assert mutate_code(example.pre_mutation_code, operator(), example.occurrence) == example.post_mutation_code


def test_mutants_are_named_by_function_line_and_change(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason='needs the extra "mutants"')
    from tests.tools.mutants.changes import mutants, results

    (tmp_path / "a.py").write_text("class A:\n    def f(self, x: int | None):\n        with x:\n            return 1\n")
    assert [str(each) for each in mutants(tmp_path, "a.py")] == [
        "a.py:4 A.f: return 1  ->  pass", "a.py:3 A.f: with x:  ->  if True:", "a.py:4 A.f: return 1  ->  return 2",
        "a.py:4 A.f: return 1  ->  return 0",
    ]
    first = next(mutants(tmp_path, "a.py"))
    assert results(f"{first.result('a test')}\n") == {first.name: "a test"}
