"""A box of skips is found where it was opened, and nowhere else."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context

import pytest

from splitpipe.skip.tracker import current, opened

KEY = (None, "skip")


def put(value: object) -> None:
    current()[KEY] = value


def get() -> object:
    return current().get(KEY)


def take() -> object:
    return current().pop(KEY)


def in_thread(task, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(task, *args).result()


def test_opened_box_is_current_until_the_block_ends():
    outer, inner = {KEY: "outer"}, {}
    with opened(outer) as given:
        assert current() is given is outer
        with pytest.raises(KeyboardInterrupt), opened(inner):
            put(1)
            raise KeyboardInterrupt
        assert get() == "outer" and inner == {KEY: 1}
    assert get() is None


def test_opened_box_reaches_a_copied_context_and_no_other():
    box = {}
    with opened(box):
        context = copy_context()
        in_thread(context.run, put, 1)
        assert in_thread(Context().run, get) is Context().run(get) is None
    assert box == {KEY: 1}


def test_unopened_box_keeps_what_is_put_into_it_until_it_is_taken():
    def run():
        put(1)
        put(2)
        assert take() == 2
        assert not current()

    Context().run(run)


def test_unopened_box_is_no_other_threads():
    def run():
        put("mine")
        context = copy_context()
        assert in_thread(context.run, get) is None
        in_thread(context.run, put, "another's")
        assert take() == "mine"

    Context().run(run)


def test_contexts_that_take_turns_in_one_thread_do_not_share_an_unopened_box():
    def run():
        put("used")
        take()
        one, other = copy_context(), copy_context()
        one.run(put, 1)
        other.run(put, 2)
        assert one.run(take) == 1
        assert other.run(take) == 2

    Context().run(run)


def test_unopened_box_reaches_a_layer_that_runs_in_a_copied_context():
    def run():
        put(1)
        assert copy_context().run(take) == 1
        assert get() is None

    Context().run(run)
