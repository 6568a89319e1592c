"""The phase of a forward reaches who works for it, and nobody else."""
from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

import pytest

from splitpipe.core.phase import Phase, in_phase, is_checkpointing, is_recomputing

PHASES: dict[Phase, tuple[bool, bool]] = {
    "plain": (False, False),
    "checkpointing": (True, False),
    "recomputing": (False, True),
}


def found() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


def in_thread(call: Callable[[], tuple[bool, bool]]) -> tuple[bool, bool]:
    values: list[tuple[bool, bool]] = []
    thread = threading.Thread(target=lambda: values.append(call()))
    thread.start()
    thread.join()
    return values[0]


def test_outside_of_any_pass_a_forward_is_an_ordinary_one() -> None:
    assert found() == (False, False)


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_is_told_inside_and_ends_with_the_block(phase: Phase) -> None:
    with in_phase(phase):
        assert found() == PHASES[phase]
    assert found() == (False, False)
    with pytest.raises(KeyboardInterrupt), in_phase(phase):
        raise KeyboardInterrupt
    assert found() == (False, False)


@pytest.mark.parametrize("inner", PHASES)
@pytest.mark.parametrize("outer", PHASES)
def test_phases_nest(outer: Phase, inner: Phase) -> None:
    with in_phase(outer):
        with in_phase(inner):
            assert found() == PHASES[inner]
        assert found() == PHASES[outer]


def test_a_phase_travels_with_its_context_and_no_other_thread_is_in_it() -> None:
    with in_phase("recomputing"):
        variables = contextvars.copy_context()
        assert in_thread(found) == (False, False)
    assert in_thread(lambda: variables.run(found)) == (False, True)
    assert found() == (False, False)


def test_a_phase_entered_in_a_context_stays_there() -> None:
    def enter() -> tuple[bool, bool]:
        with in_phase("checkpointing"):
            return found()

    assert contextvars.copy_context().run(enter) == (True, False)
    assert found() == (False, False)
