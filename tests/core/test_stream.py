"""The verbs of streams do nothing on the CPU, and what they say on a device."""
from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from splitpipe.checks import verify_devices
from splitpipe.core import stream

CPU = torch.device("cpu")


def test_the_cpu_has_no_stream_and_every_verb_is_a_no_op_there() -> None:
    assert stream.current(CPU) is None and stream.new(CPU) is None
    x = torch.ones(2)
    stream.wait(None, None)
    stream.hold(x, None)
    with pytest.raises(KeyboardInterrupt), stream.use(), stream.use(None), stream.use(None, None):
        raise KeyboardInterrupt


class Device:
    """A device of two, with one current stream each: what ``torch.accelerator`` keeps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.index = 0
        self.streams: dict[int, object] = {0: "default 0", 1: "default 1"}
        self.fails: object = None
        patch.setattr(torch.accelerator, "current_device_index", lambda: self.index)
        patch.setattr(stream, "_accelerator_maybeExchangeDevice", self.exchange)
        patch.setattr(torch.accelerator, "current_stream", lambda device: Named(int(device), self.streams[int(device)]))
        patch.setattr(torch.accelerator, "set_stream", self.set_stream)

    def set_stream(self, found: Named) -> None:
        if found.name == self.fails:
            raise RuntimeError("no such stream")
        self.index, self.streams[found.device] = found.device, found.name

    def exchange(self, index: int) -> int:
        before, self.index = self.index, index
        return before

    @property
    def state(self) -> tuple[object, ...]:
        return self.index, self.streams[0], self.streams[1]


class Named:
    """A stream with a name; its device is its index."""

    def __init__(self, device: int, name: object) -> None:
        self.device = self.device_index = device
        self.name = name


def named(device: int, name: str) -> stream.Stream:
    found: object = Named(device, name)
    return found


def test_use_switches_and_restores_streams_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    start = device.state
    with stream.use(named(1, "b"), None, named(0, "a")):
        assert device.state == (0, "a", "b")
        with stream.use(named(1, "c")):
            assert device.state == (1, "a", "c")
        assert device.state == (0, "a", "b")
        with pytest.raises(KeyboardInterrupt), stream.use(named(0, "d"), named(0, "e")):
            assert device.state == (0, "e", "b")
            raise KeyboardInterrupt
        assert device.state == (0, "a", "b")
    assert device.state == start


def test_a_stream_that_cannot_be_used_leaves_none_of_them_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    start = device.state
    device.fails = "broken"
    with pytest.raises(RuntimeError, match="no such stream"), stream.use(named(1, "b"), named(0, "broken")):
        pass
    assert device.state == start


class Own(torch.Stream):
    """A device module's own stream, as torch.cuda's: equal to none of another class."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and bool(super().__eq__(other))

    __hash__ = torch.Stream.__hash__


class Point(torch.Event):
    """A device module's own event, with a record beside torch.Event's."""

    made = 0

    def __new__(cls, enable_timing: bool = False) -> Point:
        Point.made += 1
        return super().__new__(cls, "cpu", enable_timing=enable_timing)

    def __init__(self, enable_timing: bool = False) -> None:
        self.at: list[Any] = []

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.at[-1].device

    def record(self, on: Any = None) -> None:
        assert type(on) is Own
        self.at.append(on)

    def wait(self, on: Any = None) -> None:
        assert type(on) is Own
        WAITS.append((on, self.at[-1]))


WAITS: list[tuple[Own, Own]] = []


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = SimpleNamespace(Stream=Own, Event=Point)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    stream._kind.cache_clear()
    WAITS.clear()
    Point.made = 0
    yield
    stream._kind.cache_clear()


def numbered(kind: Any, number: int, device: int = 0) -> Any:
    return kind(stream_id=number, device_index=device, device_type=13)  # A device that nothing here has.


def test_a_stream_of_any_class_is_known_as_one_of_its_devices_own(own: None) -> None:
    class External(Own):
        pass

    for kind in (torch.Stream, Own, External):
        found = stream.of_device_class(numbered(kind, 7, 1))
        assert (type(found), found.stream_id, found.device_index) == (Own, 7, 1)
        assert stream.same(found, numbered(kind, 7, 1))
        assert not stream.same(found, numbered(kind, 7, 0)) and not stream.same(found, numbered(kind, 6, 1))


def test_a_place_keeps_the_users_stream_object(own: None) -> None:
    given = numbered(torch.Stream, 7)
    (place,) = verify_devices([given], 1)
    assert type(place.stream) is Own and place.given is given
    assert copy.deepcopy([place])[0] is place and str(place) == str(place.device)
    again = pickle.loads(pickle.dumps(place))
    assert (again.device, again.stream, again.given) == (place.device, None, None)


def test_events_are_used_again_on_their_device_once_they_were_waited_for(own: None) -> None:
    first, second, third = (numbered(Own, number) for number in (1, 2, 3))
    for _ in range(3):
        stream.wait(second, first)
    assert (Point.made, WAITS) == (1, [(second, first)] * 3)
    one, other = stream.mark(first), stream.mark(second)
    assert (Point.made, one is other) == (2, False)
    for _ in range(2):
        stream.wait_for(third, one)
    stream.wait(third, second)  # Not with one that may yet be waited for.
    assert Point.made == 3
    stream.spent(one)
    assert stream.mark(third) is one and WAITS[3:] == [(third, first)] * 2 + [(third, second)]
    stream.spent(one)
    assert stream.mark(numbered(Own, 1, device=1)) is not one


def test_no_two_threads_record_one_event(own: None) -> None:
    on = numbered(Own, 1)
    for event in [stream.mark(on) for _ in range(64)]:
        stream.spent(event)
    taken: list[Any] = []
    threads = [threading.Thread(target=lambda: taken.extend(stream.mark(on) for _ in range(16))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len({id(event) for event in taken}), Point.made) == (64, 64)


def test_where_a_device_has_no_classes_of_its_own_torchs_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Stream=Own))
    stream._kind.cache_clear()
    try:
        given = numbered(Own, 7)
        assert type(stream.of_device_class(given)) is torch.Stream
    finally:
        stream._kind.cache_clear()


GPU = torch.device("cuda", 0)
CYCLES = 50_000_000


def late(size: int, value: float) -> Tensor:
    """A tensor that the current stream fills after a while."""
    x = torch.zeros(size, device=GPU)
    torch.cuda._sleep(CYCLES)
    return x.fill_(value)


@pytest.mark.cuda
def test_work_of_a_stream_starts_after_the_event_it_waits_for() -> None:
    first, second = stream.new(GPU), stream.new(GPU)
    assert first is not None and second is not None and first != second
    with stream.use(first):
        x = late(1 << 20, 3.0)
    stream.wait(second, first)
    with stream.use(second):
        assert torch.equal(x + 1, torch.full_like(x, 4.0))


@pytest.mark.cuda
def test_a_stream_waits_for_itself_without_an_event() -> None:
    own = stream.current(GPU)
    stream.wait(own, own)
    stream.wait(own, None)
    stream.wait(None, own)


@pytest.mark.cuda
def test_use_restores_the_streams_and_the_device_of_its_thread_alone() -> None:
    one, two = stream.new(GPU), stream.new(GPU)
    before, index = stream.current(GPU), torch.accelerator.current_device_index()
    elsewhere: list[object] = []
    with stream.use(one):
        assert stream.current(GPU) == one
        thread = threading.Thread(target=lambda: elsewhere.append(stream.current(GPU)))
        thread.start()
        thread.join()
        with pytest.raises(KeyError), stream.use(two, None):
            assert stream.current(GPU) == two
            raise KeyError
        assert stream.current(GPU) == one
    assert stream.current(GPU) == before and elsewhere[0] != one
    assert torch.accelerator.current_device_index() == index


@pytest.mark.cuda
def test_memory_held_for_a_stream_is_not_given_away_before_it_has_read_it() -> None:
    size = 1 << 20
    reader = stream.new(GPU)
    x = torch.full((size,), 3.0, device=GPU)
    stream.wait(reader, stream.current(GPU))
    with stream.use(reader):
        torch.cuda._sleep(CYCLES)
        y = x + 1
    stream.hold(x, reader)
    del x
    others = [torch.zeros(size, device=GPU) for _ in range(4)]
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, 4.0)) and len(others) == 4
