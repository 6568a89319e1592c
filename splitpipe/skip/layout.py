"""Pairs of layers, one that stashes a skip and one that pops it: verification, and the skips between stages."""
from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from splitpipe.skip.skippable import Skippable
from splitpipe.skip.tracker import Key


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that every skip is stashed by one layer and popped by one later layer. SplitPipe checks this too.

    Args:
        module: the model; skippable layers are found at any depth, in module order.

    Raises:
        TypeError: ``module`` isn't an nn.Sequential, or a skip has no such pair. The message lists all of these.

    Example:
        >>> Stash = skippable(stash=["skip"])(nn.Identity)
        >>> verify_skippables(nn.Sequential(Stash()))
        Traceback (most recent call last):
            ...
        TypeError: the layers' skips do not fit:
        - layer '0' (Identity) stashes 'skip', which no later layer pops: declare it as pop= in one.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {module!r}: expected an nn.Sequential with its layers.")
    stashed: dict[Key, str] = {}
    popped: dict[Key, str] = {}
    faults: list[str] = []
    for path, layer in module.named_modules(remove_duplicate=False):
        if not isinstance(layer, Skippable):
            continue
        where = f"layer {path!r} ({type(layer).__name__})"
        for ends, keys, verb in ((popped, layer.poppable(), "pops"), (stashed, layer.stashable(), "stashes")):
            for key in keys:
                if key in ends:
                    hint = f"as {ends[key]} does: rename it, or give each pair a namespace, .isolate(Namespace())."
                    faults.append(f"{where} {verb} {_shown(key)}, {hint}")
                elif verb == "pops" and key not in stashed:
                    hint = "which no earlier layer stashes: declare it as stash= in one."
                    faults.append(f"{where} pops {_shown(key)}, {hint}")
                ends.setdefault(key, where)
    for key in [key for key in stashed if key not in popped]:
        faults.append(f"{stashed[key]} stashes {_shown(key)}, which no later layer pops: declare it as pop= in one.")
    if faults:
        raise TypeError("the layers' skips do not fit:\n" + "\n".join(f"- {fault}" for fault in faults))


def _shown(key: Key) -> str:
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} of {namespace!r}"


def crossing(stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> dict[Key, tuple[int, int]]:
    """The stages that each skip goes from and to, except for skips within a stage."""
    parts = [(stage, part) for stage, layers in enumerate(stages) for _, layer in layers for part in layer.modules()]
    skippables = [(stage, part) for stage, part in parts if isinstance(part, Skippable)]
    stashed = {key: stage for stage, part in skippables for key in part.stashable()}
    popped = {key: stage for stage, part in skippables for key in part.poppable()}
    return {key: (source, popped[key]) for key, source in stashed.items() if popped.get(key, source) != source}
