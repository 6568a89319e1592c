"""Tests of what a pipeline compiles: without a C++ compiler, and as if nothing had been compiled before."""
from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from splitpipe.compiled.backend import Backend

#: Runs graphs as they are.
EAGER = {"backend": "aot_eager"}


@pytest.fixture
def nothing_compiled(threads: None) -> Iterator[None]:
    """Nothing is compiled yet, and an op has as many threads everywhere: for other numbers torch compiles again."""
    torch._dynamo.reset()
    torch.set_num_threads(1)
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that have compiled a graph, in order."""
    found: list[str] = []
    call = Backend.__call__

    def noted(self: Backend, *given: object, **options: object) -> object:
        found.append(threading.current_thread().name)
        return call(self, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Backend, "__call__", noted)
    return found
