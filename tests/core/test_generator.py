"""One thread at a time has the default generator, with a state of its own, and gives it back as it was."""
from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe.core import generator
from splitpipe.core.generator import exclusive_generator, has_drawn, observe


def state_of(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def default() -> Tensor:
    return torch.default_generator.get_state()


def drawn(seed: int) -> Tensor:
    with exclusive_generator(state_of(seed)):
        return torch.rand(3)


def test_the_generator_has_the_given_state_inside_and_the_callers_after() -> None:
    before = default()
    assert torch.equal(drawn(1), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(default(), before)


def test_a_state_that_is_none_is_refused_and_gives_everything_back() -> None:
    before = default()
    with pytest.raises(RuntimeError), exclusive_generator(torch.zeros(3, dtype=torch.uint8)):
        pass
    assert torch.equal(default(), before)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(drawn, 2).result(), drawn(2))


def test_the_lock_is_held_in_contexts_copied_before_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "LOCK_TIMEOUT", 0.01)
    outside = copy_context()
    with exclusive_generator(state_of(1)):
        assert torch.equal(outside.run(drawn, 2), torch.rand(3, generator=torch.Generator().manual_seed(2)))


def test_waiting_too_long_for_the_generator_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "LOCK_TIMEOUT", 0.01)
    before = default()
    with ThreadPoolExecutor(1) as pool, exclusive_generator(state_of(1)):
        with pytest.raises(RuntimeError, match="waited 0 s .*copy_context"):
            pool.submit(drawn, 2).result()
    assert torch.equal(default(), before)
    assert torch.equal(drawn(2), torch.rand(3, generator=torch.Generator().manual_seed(2)))


def test_one_that_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than the others wait for one that stands still, but it does not stand still."""
    monkeypatch.setattr(generator, "LOCK_TIMEOUT", 0.01)
    asked, looks = threading.Event(), list[int]()
    place = generator._Lock.place

    def looked(self: Any) -> Any:
        looks.append(1)
        if len(looks) == 4:
            asked.set()
        return looks.copy() if len(looks) < 4 else place.fget(self)  # type: ignore[attr-defined]

    monkeypatch.setattr(generator._Lock, "place", property(looked))
    with ThreadPoolExecutor(1) as pool:
        with exclusive_generator(state_of(1)):
            waiting = pool.submit(drawn, 2)
            assert asked.wait(60)
        assert torch.equal(waiting.result(), torch.rand(3, generator=torch.Generator().manual_seed(2)))


def test_undisturbed_waits_for_a_thread_that_draws() -> None:
    before, order = default(), list[str]()
    with ThreadPoolExecutor(1) as pool:

        def undisturbed() -> torch.Tensor:
            with generator.undisturbed(), generator.undisturbed():
                order.append("undisturbed")
                return default()

        with exclusive_generator(state_of(1)):
            seen = pool.submit(undisturbed)
            with generator.undisturbed():  # The one that draws may do so itself.
                order.append("drew")
        assert torch.equal(seen.result(), before)
    assert order == ["drew", "undisturbed"]


def test_one_thread_at_a_time_has_the_generator() -> None:
    inside, most = 0, 0
    start = threading.Barrier(4, timeout=60)

    def work(seed: int) -> None:
        nonlocal inside, most
        start.wait()
        for _ in range(50):
            with exclusive_generator(state_of(seed)):
                inside += 1
                most = max(most, inside)
                torch.rand(3)
                inside -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert (inside, most) == (0, 1)


def test_a_thread_draws_in_the_turn_of_one_that_waits_for_it() -> None:
    def waiting() -> Tensor:
        with exclusive_generator(state_of(1)), ThreadPoolExecutor(1) as pool:
            first, lock = torch.rand(3), generator.lock_here()
            torch.testing.assert_close(pool.submit(Context().run, helping, lock).result(), drawn(2))
            return torch.cat([first, torch.rand(3)])

    def helping(lock: Any) -> Tensor:
        generator.inherit_lock(lock)
        return drawn(2)

    torch.testing.assert_close(waiting(), torch.rand(6, generator=torch.Generator().manual_seed(1)))


def test_has_drawn_compares_two_observations() -> None:
    before = observe()
    assert before is not None and has_drawn(before, observe()) is False
    torch.rand(1)
    assert has_drawn(before, observe()) is True
    before = observe()
    with exclusive_generator(state_of(1)):
        assert observe() is not None  # Of the layers inside, which have it.
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(observe).result() is None
    assert has_drawn(before, observe()) is None and has_drawn(None, before) is None


#: Garbage is collected at each place of ``observe`` in turn, and what is freed waits for another thread that observes.
_COLLECTING = """
import faulthandler, gc, threading
import torch
from splitpipe.core.generator import observe

faulthandler.dump_traceback_later(30, exit=True)
gc.disable()
gc.freeze()

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        other = threading.Thread(target=observe)
        other.start()
        other.join(0.05)  # Gives Python's lock away: the other one comes as far as it can.

for count in range(1, 12):
    gc.collect()
    Cycle()
    gc.set_threshold(gc.get_count()[0] + count)
    gc.enable()
    observe()
    gc.disable()
gc.collect()  # Not as the interpreter ends, which starts no threads.
"""


@pytest.mark.thorough
def test_observe_does_not_deadlock_with_garbage_collection() -> None:
    ran = subprocess.run([sys.executable, "-c", _COLLECTING], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_context_copied_inside_a_block_holds_no_lock_after_it() -> None:
    with exclusive_generator(state_of(1)):
        context = copy_context()
        assert context.run(observe) is not None  # Nobody inside has the generator.
    with exclusive_generator(state_of(2)):
        assert context.run(observe) is None
    assert context.run(observe) is not None
