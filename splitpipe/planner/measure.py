"""Takes the measurements for a plan: of the layers on each kind of device, the devices, and the links between them.

The model, its gradients and buffers, the sample, the random state and the numbers of threads are only read.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, TextIO

from torch import nn

from splitpipe.balance.copies import measuring
from splitpipe.balance.layers import Layers, state_of
from splitpipe.balance.survey import Surveyed
from splitpipe.core.stream import Place
from splitpipe.planner.machine import gap, kinds_of, link, shared_threads, usable_bytes, workspace
from splitpipe.planner.profile import Device, Kind, Link, Profile
from splitpipe.planner.work import Progress, Work

# Columns of the progress bar.
_WIDTH = 12


def profile(
    module: nn.Module,
    of: Layers | Surveyed,
    target: Any,
    loss_fn: Callable[..., Any] | None,
    places: Sequence[Place],
    chunks: Sequence[int],
    *,
    compile: bool | Mapping[str, Any] = False,
    memory: Sequence[float] | None,
    optimizer_state: float,
    seconds: float,
    progress: Progress,
) -> Profile:
    """The costs of a module's layers on some devices, for each number of chunks that layers and memory allow.

    ``of``: its layers, or parts between cuts; ``compile``: as for ``SplitPipe``.
    """
    groups = kinds_of(places)
    work = Work(of, target, loss_fn, seconds, len(groups) * len(chunks), progress, compile)
    by_cuts = isinstance(of, Surveyed)
    kinds = []
    for name, members in groups.items():
        own = [places[row] for row in members]
        with shared_threads(len(members) if own[0].device.type == "cpu" else 1):
            measured = work.kind(own, chunks)
            with measuring(own[0].device):
                between = gap(own[0], by_cuts)
        costs = {count: tuple(row) for count, row in measured.items()}
        kinds.append(Kind(name, costs, between, workspace(own[0].device)))
    if not set.intersection(*(set(kind.layers) for kind in kinds)):
        each = "; ".join(f"{kind.name}: {sorted(kind.layers)}" for kind in kinds)
        raise ValueError(
            f"no number of chunks can be run everywhere ({each}): expected one that can. Give more to choose from."
        )
    largest = max(layer.input for kind in kinds for row in kind.layers.values() for layer in row)
    home = {place: kind for kind, members in enumerate(groups.values()) for place in members}
    free = usable_bytes(module, places, memory)
    with measuring(places[0].device):
        slowest = link(places, largest) if len(places) > 1 else Link()
    return Profile(
        names=of.names,
        kinds=tuple(kinds),
        devices=tuple(Device(str(place), home[row], free[row]) for row, place in enumerate(places)),
        link=slowest,
        optimizer_state=optimizer_state,
        tied=() if by_cuts else tuple(_tied(module)),
        blockwise=by_cuts,
        compile=compile,
        own_compute=sum(place.device.type == "cpu" for place in places) < 2,
    )


def _tied(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Pairs of layers that share a parameter or buffer."""
    own = [{id(tensor) for _, tensor in state_of(layer)} for layer in module.children()]
    return (pair for pair in combinations(range(len(own)), 2) if own[pair[0]] & own[pair[1]])


@contextmanager
def bar(shown: bool | None = None, file: TextIO | None = None) -> Iterator[Progress]:
    """A progress bar: one line on standard error, if that is a terminal, which is removed at the end of the block."""
    out = sys.stderr if file is None else file
    if out is None or not (out.isatty() if shown is None else shown):  # None if it was closed.
        yield lambda done, total, what: None
        return
    longest = 0

    def show(done: int, total: int, what: str) -> None:
        nonlocal longest
        full = _WIDTH * done // total if total else _WIDTH
        line = f"profiling [{'#' * full}{'-' * (_WIDTH - full)}] {done}/{total} {what}"
        longest = max(longest, len(line))
        out.write("\r" + line.ljust(longest))
        out.flush()

    try:
        yield show
    finally:
        if longest:
            out.write("\r" + " " * longest + "\r")
            out.flush()
