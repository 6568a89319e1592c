"""Values are taken by their keys, in any order; nobody waits for one that will not come."""
from __future__ import annotations

import threading

import pytest

from splitpipe.core.mailbox import Mailbox, Stopped


def test_values_are_taken_by_key_in_any_order() -> None:
    mail = Mailbox()
    for key in "abc":
        mail.put(key, key * 2)
    assert [mail.take(key) for key in "cab"] == ["cc", "aa", "bb"]


def test_a_thread_keeps_values_for_itself_beside_those_that_arrive() -> None:
    mail = Mailbox()
    mail.put("b", 2)
    mail.keep("a", 1)
    assert (mail.take("a"), mail.take("b")) == (1, 2)


def test_who_takes_a_value_early_waits_for_it() -> None:
    mail = Mailbox()
    waiting = threading.Event()
    found: list[object] = []

    def work() -> None:
        waiting.set()
        found.append(mail.take("a"))

    thread = threading.Thread(target=work)
    thread.start()
    assert waiting.wait(60) and not found
    mail.put("b", 1)
    mail.put("a", None)
    thread.join(60)
    assert found == [None]


def test_a_value_is_taken_once() -> None:
    mail = Mailbox()
    mail.put("a", 1)
    assert mail.take("a") == 1
    mail.put("a", 2)
    assert mail.take("a") == 2


def test_stop_ends_a_wait() -> None:
    mail = Mailbox()
    waiting = threading.Event()
    raised: list[BaseException] = []

    def work() -> None:
        waiting.set()
        try:
            mail.take("a")
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert waiting.wait(60)
    mail.stop()
    thread.join(60)
    assert [type(error) for error in raised] == [Stopped]


def test_stop_ends_a_wait_that_begins_later() -> None:
    mail = Mailbox()
    mail.put("a", 1)
    mail.stop()
    with pytest.raises(Stopped):
        mail.take("b")
    assert mail.take("a") == 1, "what has arrived before can be taken"


def test_stopping_is_no_exception_that_code_of_users_catches() -> None:
    assert not issubclass(Stopped, Exception)


def test_a_stopped_mailbox_stays_stopped() -> None:
    mail = Mailbox()
    mail.stop()
    for _ in range(2):
        with pytest.raises(Stopped):
            mail.take("never sent")
