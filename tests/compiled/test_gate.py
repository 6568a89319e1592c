"""The gate: many pass at once, one compiles alone, and nobody waits for somebody who waits."""
from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from splitpipe.compiled.gate import Gate, gate


def started(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"


def test_calls_pass_at_the_same_time_and_inside_of_each_other() -> None:
    own, meeting = Gate(), threading.Barrier(2, timeout=60)

    def passes() -> None:
        with own.passing(), own.passing():
            meeting.wait()

    joined(started(passes), started(passes))


def test_who_compiles_waits_for_those_inside_and_those_who_come_later_wait_for_it() -> None:
    own, order = Gate(), list[str]()
    inside, go, alone, done = (threading.Event() for _ in range(4))

    def passes() -> None:
        with own.passing():
            inside.set()
            assert go.wait(60)
            with own.passing():  # It is inside already.
                order.append("passed")

    def compiles() -> None:
        with own.alone():
            order.append("alone")
            alone.set()
            assert done.wait(60)
            order.append("compiled")

    def passes_later() -> None:
        with own.passing():
            order.append("passed later")

    first = started(passes)
    assert inside.wait(60)
    second = started(compiles)
    while not own._waiting:
        pass
    third = started(passes_later)
    assert not alone.wait(0.05) and third.is_alive()  # Those who wait to compile go first.
    go.set()
    assert alone.wait(60)
    third.join(0.05)
    assert third.is_alive()
    done.set()
    joined(first, second, third)
    assert order == ["passed", "alone", "compiled", "passed later"] and not own._waiting


def test_two_that_are_inside_and_have_to_compile_do_not_wait_for_each_other() -> None:
    own, meeting, alone = Gate(), threading.Barrier(2, timeout=60), list[int]()

    def compiles() -> None:
        with own.passing():
            meeting.wait()
            with own.alone():
                alone.append(1)
                assert sum(alone) == 1
                with own.alone():  # A layer that is compiled inside of another one's compilation.
                    assert sum(alone) == 1
                alone.append(-1)
        assert own._passing.get(threading.get_ident()) is None

    joined(started(compiles), started(compiles))
    assert sum(alone) == 0 and not own._passing


def test_an_error_leaves_it_open() -> None:
    own = Gate()
    for enter in (own.passing, own.alone):
        with pytest.raises(ZeroDivisionError), enter():
            raise ZeroDivisionError
    joined(started(lambda: own.alone().__enter__()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, and this platform has none")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_gate_of_its_own() -> None:
    inside, go = threading.Event(), threading.Event()

    def compiles() -> None:
        with gate().alone():
            inside.set()
            go.wait(60)

    thread = started(compiles)
    assert inside.wait(60)
    child = os.fork()
    if not child:
        try:
            with gate().passing():
                os._exit(7)
        finally:
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    go.set()
    joined(thread)
