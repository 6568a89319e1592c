"""What every test stands on: one random state, settings given back, no CUDA test without a CUDA device."""
from __future__ import annotations

import gc
import logging
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# Of a process of pytest-xdist. Functions get back the code that is not measured between tests, not at any time: to find
# them, slipcover reads the frames of all threads, which then keep what a function lets go of. A module takes the number
# when it is imported, so the package comes after this.
measuring = getattr(sys.modules.get("slipcover.pytest_plugin"), "_slipcover_instance", None)
if measuring is not None:
    assert "splitpipe" not in sys.modules
    measuring.d_miss_threshold = 2**31 - 1

from splitpipe.runtime import runtime  # noqa: E402
from splitpipe.stage.call import Call  # noqa: E402
from tests.devices.log import settle, softcuda  # noqa: E402
from tests.helpers.covering import mark_essence  # noqa: E402
from tests.helpers.world import World, opened  # noqa: E402

# The same cases every time, however long one takes, and no file left behind.
hypothesis.settings.register_profile("repeats", derandomize=True, deadline=None, database=None, max_examples=40)
# Of the essence: a few of them.
hypothesis.settings.register_profile("few", derandomize=True, deadline=None, database=None, max_examples=5)
# Other cases each time, and many: --hypothesis-profile thorough.
hypothesis.settings.register_profile("thorough", derandomize=False, deadline=None, database=None, max_examples=3000,
                                     print_blob=False)
hypothesis.settings.load_profile("repeats")

#: Folders whose files take longest, so that they are not left to the end of a run by several processes.
LONG = "devices", "gpu", "clients", "compiled", "promise", "benchmarks", "schedule", "doors", "faults", "distributed"


@pytest.hookimpl(tryfirst=True)  # Before items are taken out by their markers.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(LONG)))
    mark_essence(items)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        needs = item.get_closest_marker("devices")
        if item.get_closest_marker("cuda") and not there:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none here"))
        elif item.get_closest_marker("fake") and softcuda is None:
            item.add_marker(pytest.mark.skip(reason="needs the fake CUDA runtime: python -m tests.softcuda tests"))
        elif needs and needs.args[0] > there:
            reason = f"needs {needs.args[0]} CUDA devices, and torch sees {there}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes one runs all files that need a World, whose own processes take ten seconds to start."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneWorld(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "world" if _needs_world(config.rootpath / file) else file

    return OneWorld(config, log)


@cache
def _needs_world(file: Path) -> bool:
    return "from tests.helpers.world import" in file.read_text(encoding="utf-8")


if softcuda is not None:

    @pytest.fixture(autouse=True)
    def ordered(request: pytest.FixtureRequest) -> Iterator[None]:
        """No two accesses to a device's memory without an order, in no test of CUDA."""
        if request.node.get_closest_marker("cuda") is None:
            yield
            return
        settle()
        yield
        assert softcuda.hazards() == []


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What was there before a file stays: neither the collector nor a test that looks for what is left need see it."""
    gc.collect()
    gc.freeze()


class Giving:
    """Gives functions back their code, every half second at first, and at last every ten: it looks at all there is."""

    def __init__(self) -> None:
        self._last, self._pause = 0.0, 0.5

    def pytest_runtest_logfinish(self) -> None:
        if time.monotonic() - self._last > self._pause:
            measuring.deinstrument_seen()
            self._last, self._pause = time.monotonic(), min(10.0, 1.2 * self._pause)


def pytest_configure(config: pytest.Config) -> None:
    # A shell has what it starts in the background ignore interrupts, also those that tests send.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # The tensors are small, and threads that spin for work take others' cores.
    if measuring is not None:
        config.pluginmanager.register(Giving())
    if config.option.markexpr == "not thorough":  # As setup.cfg has it.
        if any("::" in argument for argument in config.args):  # A test that is named runs.
            config.option.markexpr = ""
        else:
            hypothesis.settings.load_profile("few")


def settings() -> dict[str, object]:
    """What a test could leave behind in this thread for the next one."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "device": torch.accelerator.current_device_index() if torch.cuda.is_initialized() else 0,
    }


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Each test draws the same numbers whichever ran before it, and fails if it leaves a setting changed."""
    # As ``torch.manual_seed``, which would also keep a formatted stack for each kind of device that there is not.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    before = settings()
    yield
    assert settings() == before, "the test leaves one of torch's settings changed: restore it in a finally"


class _NotDrawing(Call):
    """A call of a model that is known not to draw before its first call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.watched = self._draw.get(self._kind, False)

    def end(self) -> None:
        """Ends the call; fails if it drew all the same."""
        super().end()
        assert not self._draw[self._kind], "the model draws from the CPU's generator: mark the test with draws"


@pytest.fixture(autouse=True)
def threads_in_first_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call runs op after op, since nobody knows yet whether it draws: a test of one would see no threads."""
    if request.node.get_closest_marker("draws") is None:
        monkeypatch.setattr(runtime, "Call", _NotDrawing)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two processes for all tests that need them: to start them takes longer than most of those."""
    with opened(tmp_path_factory.mktemp("world")) as found:
        yield found


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives the caller's number of threads for ops back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def untraced() -> Iterator[None]:
    """For exceptions set in other threads: until they arrive, a traced thread enters no function in Python 3.11."""
    trace = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(trace)


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides accelerators, so that examples that name no device run on the CPU on every machine."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that the package logs."""
    log, messages = logging.getLogger("splitpipe"), list[str]()
    monkeypatch.setattr(log, "isEnabledFor", lambda level: level >= logging.INFO)
    monkeypatch.setattr(log, "handle", lambda record: messages.append(record.getMessage()))
    return messages
