"""The verbs of streams do nothing on the CPU, and what they say on a device."""
from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from splitpipe import stream

CPU = torch.device("cpu")


def test_the_cpu_has_no_stream() -> None:
    assert stream.current(CPU) is None and stream.new(CPU) is None


def test_every_verb_is_a_no_op_there() -> None:
    x = torch.ones(2)
    stream.wait(None, None)
    stream.hold(x, None)
    with stream.use(), stream.use(None), stream.use(None, None):
        assert torch.equal(x + x, torch.full((2,), 2.0))


def test_using_no_stream_lets_exceptions_through() -> None:
    with pytest.raises(KeyboardInterrupt), stream.use(None):
        raise KeyboardInterrupt


class Device:
    """A device of two, with one current stream each: what ``torch.accelerator`` keeps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.index = 0
        self.streams: dict[int, object] = {0: "default 0", 1: "default 1"}
        self.fails: object = None
        patch.setattr(torch.accelerator, "current_device_index", lambda: self.index)
        patch.setattr(torch.accelerator, "current_stream", lambda device: Named(int(device), self.streams[int(device)]))
        patch.setattr(torch.accelerator, "set_stream", self.set_stream)
        patch.setattr(torch.accelerator, "set_device_index", self.set_device)

    def set_stream(self, found: Named) -> None:
        if found.name == self.fails:
            raise RuntimeError("no such stream")
        self.index, self.streams[found.device] = found.device, found.name

    def set_device(self, index: int) -> None:
        self.index = index

    @property
    def state(self) -> tuple[object, ...]:
        return self.index, self.streams[0], self.streams[1]


class Named:
    """A stream with a name; its device is its index."""

    def __init__(self, device: int, name: object) -> None:
        self.device, self.name = device, name


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


GPU = torch.device("cuda", 0)
CYCLES = 50_000_000


def late(size: int, value: float) -> Tensor:
    """A tensor that the current stream fills after a while."""
    x = torch.zeros(size, device=GPU)
    torch.cuda._sleep(CYCLES)
    return x.fill_(value)


@pytest.mark.cuda
def test_what_a_stream_is_given_starts_after_what_it_waits_for() -> None:
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
