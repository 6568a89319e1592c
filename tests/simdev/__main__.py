"""What a process with simulated devices finds, as a line of JSON: ``python -m tests.simdev layers --whole``."""
from __future__ import annotations

import argparse
import gc
import io
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

from tests.tools.covered import measured

from . import start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simdev", description="Training on simulated devices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, what, does in (
        ("paths", "modules made for the paths between stages, in every way", paths),
        ("layers", "the transparency grid's layers, each with a skip past all of them", layers),
        ("few", "each option once on each of the paths", few),
        ("places", "what orders streams, taken away one place at a time", places),
        ("rest", "contexts, makespans, memory, checkpoints", rest),
        ("memory", "pinned memory, statistics, what is reserved", memory),
        ("placed", "what holds of modules with cuts beside values", placed),
        ("forwards", "random forwards by cuts, beside the module on the CPU", forwards),
        ("failing", "each allocation of a step fails once", failing),
    ):
        sub = commands.add_parser(command, help=what, description=what)
        sub.set_defaults(does=does)
        if command == "layers":
            sub.add_argument("--whole", action="store_true", help="all sizes, and the caller on both kinds of streams")
        if command == "forwards":
            sub.add_argument("--count", type=int, default=60, help="how many")
            sub.add_argument("--seed", type=int, default=0, help="which ones")
        if command == "paths":
            sub.add_argument("--whole", action="store_true", help="every option with all others")
            sub.add_argument("--stages", type=int, nargs="+", default=[4], help="numbers of stages, of the whole")
            sub.add_argument("--chunks", type=int, nargs="+", default=[3], help="numbers of microbatches, of the whole")
    given = parser.parse_args()
    start(4)
    with measured():
        from . import cases  # noqa: F401  With all that it imports, of which the collector needs to see nothing.

        gc.collect()
        gc.freeze()
        print(json.dumps(given.does(given)), flush=True)
    if given.does is failing:
        # A thread of autograd's may still hold what a failed backward raised, and aborts a process that ends meanwhile,
        # with a module of torch's alone, too.
        os._exit(0)
    return 0


def _trained(them: Iterable[Any]) -> dict[str, Any]:
    from . import cases

    told: dict[str, Any] = {}
    for case in them:
        found = cases.run(case)
        its = told.setdefault(case.subject, {"cases": 0, "hazards": {}, "faults": []})
        its["cases"] += 1
        if found.hazards:
            its["hazards"][str(case)] = found.hazards.most_common(3)
        its["faults"] += [f"{case}: {name}" for name in found.faults]
    return told


def paths(given: argparse.Namespace) -> dict[str, Any]:
    from . import cases

    return _trained([*(cases.grid(given.stages, given.chunks, cases.PATHS) if given.whole else cases.paths()),
                     *cases.cast()])


def layers(given: argparse.Namespace) -> dict[str, Any]:
    from . import cases

    return _trained(cases.layers(given.whole))


def few(given: argparse.Namespace) -> dict[str, Any]:
    from . import cases

    return _trained(cases.paths(few=True))


def places(given: argparse.Namespace) -> dict[str, Any]:
    from . import cases, makespans, sites

    told: dict[str, Any] = {"missed": [], "not slower": []}
    for place, subject in sites.CAUGHT.items():
        with sites.watched(place):
            if not any(cases.run(case).hazards for case in sites.few(subject)):
                told["missed"].append(place)
    before = {way: max(way.taken()) for way in makespans.CHECKED}
    for place in sites.SLOWER:
        with sites.watched(place):
            if not any(max(way.taken()) > before[way] for way in makespans.CHECKED):
                told["not slower"].append(place)
    known = {*sites.CAUGHT, *sites.SLOWER, *sites.EXPLAINED}
    # One place is where a single subject comes by in one way only.
    every = [*sites.few(*cases.PATHS), *sites.few("elsewhere")]
    seen = {place for case in every for place in sites.places(case)}
    told["unknown"] = sorted(seen - known)
    told["gone"] = sorted(known - seen - {sites.READS})
    return told


def rest(given: argparse.Namespace) -> dict[str, Any]:
    from . import binding, makespans, predicted

    return {
        "contexts": binding.found(),  # First: a context, once made, stays.
        "priorities": binding.priorities(),
        "reduced": binding.reduced(),
        "few streams": binding.narrow(),
        "generic streams": binding.generic(),
        "makespans": [[str(way), way.planned(), *way.taken()] for way in makespans.WAYS],
        "makespans again": [[str(way), way.planned(), *way.taken(5)] for way in makespans.DROP_IN],
        "memory": {**dict(predicted.compared()), **dict(predicted.compared(by_cuts=True))},
        "loaded": {str(where): _loaded(where) for where in (None, "cpu", "sim:3")},
    }


def memory(given: argparse.Namespace) -> dict[str, Any]:
    from . import memory

    return {name: getattr(memory, name)() for name in ("pinned", "kept", "recorded", "planned", "pools")}


def placed(given: argparse.Namespace) -> dict[str, Any]:
    from . import placed

    return placed.found()


def forwards(given: argparse.Namespace) -> dict[str, Any]:
    from .forwards import wrong

    return {"wrong": wrong(given.count, given.seed)}


def failing(given: argparse.Namespace) -> dict[str, Any]:
    from . import failing

    return failing.failing()


def _loaded(where: Any) -> list[Any]:
    """The devices of a checkpoint's tensors, and whether a model that has loaded them gives the same."""
    from splitpipe import SplitPipe

    from .subjects import WIDTH, chain

    model = SplitPipe(chain(2), [1, 1], devices=["sim:0", "sim:1"])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location=where, weights_only=True)
    other = SplitPipe(chain(2), [1, 1], devices=["sim:2", "sim:1"])
    other.load_state_dict(state)
    x = torch.randn(3, WIDTH)
    same = torch.equal(model(x.to("sim:0")).cpu(), other(x.to("sim:2")).cpu())
    return [sorted({str(tensor.device) for tensor in state.values()}), same]


if __name__ == "__main__":
    sys.exit(main())
