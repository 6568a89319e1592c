"""Pairs of layers, one that stashes a skip and one that pops it: verification, and the skips between stages."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import isgeneratorfunction

from torch import nn

from splitpipe.skip.box import Key
from splitpipe.skip.skippable import Skippable


def stashes(layer: nn.Module) -> list[Key]:
    """The keys that a layer and those inside it stash, in module order."""
    return [key for part in layer.modules() if isinstance(part, Skippable) for key in part.stashable()]


def pops(layer: nn.Module) -> list[Key]:
    """The keys that a layer and those inside it pop, in module order."""
    return [key for part in layer.modules() if isinstance(part, Skippable) for key in part.poppable()]


def verify_skippables(module: nn.Sequential) -> None:
    """Checks that every skip is stashed by one layer and popped by one later layer. SplitPipe checks this too.

    Args:
        module: the model; skippable layers are found at any depth, in module order.

    Raises:
        TypeError: ``module`` isn't an nn.Sequential, a skip has no such pair, or a layer's ``forward`` yields although
            it isn't skippable. The message lists all of these.

    Example:
        >>> Stash = skippable(stash=["skip"])(nn.Identity)
        >>> verify_skippables(nn.Sequential(Stash()))
        Traceback (most recent call last):
            ...
        TypeError: the layers' skips do not fit:
        - layer '0' (Identity) stashes 'skip', which no layer pops: declare pop=['skip'] in a later layer.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {module!r}: expected an nn.Sequential with its layers.")
    layers = [
        (f"layer {path!r} ({type(layer).__name__})", layer)
        for path, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, Skippable)
    ]
    stashers = {key: where for where, layer in reversed(layers) for key in layer.stashable()}
    stashed: dict[Key, str] = {}
    popped: dict[Key, str] = {}
    faults: list[str] = []
    apart = "give each pair a separate namespace, .isolate(Namespace()), or rename it"
    for where, layer in layers:
        both = layer.stashable_names & layer.poppable_names
        for name in sorted(both):
            faults.append(f"{where} both stashes and pops {name!r}: a skip joins two layers. Rename one end.")
        for key in layer.stashable():
            if key[1] not in both and stashed.setdefault(key, where) != where:
                faults.append(f"{where} stashes {_shown(key)}, as {stashed[key]} does: {apart}.")
        for key in layer.poppable():
            if key[1] in both:
                continue
            found = f"{where} pops {_shown(key)}"
            if popped.setdefault(key, where) != where:
                faults.append(f"{found}, as {popped[key]} does: {apart}.")
            elif key not in stashers:
                faults.append(f"{found}, which no layer stashes: {_advice(key, 'stash', 'an earlier')}.")
            elif key not in stashed:
                faults.append(f"{found} before {stashers[key]} stashes it: move it after that layer.")
    for key in [key for key in stashed if key not in popped]:
        found = f"{stashed[key]} stashes {_shown(key)}"
        faults.append(f"{found}, which no layer pops: {_advice(key, 'pop', 'a later')}.")
    faults += _undecorated(module)
    if faults:
        raise TypeError("the layers' skips do not fit:\n" + "\n".join(f"- {fault}" for fault in faults))


def _undecorated(module: nn.Module) -> Iterator[str]:
    """Layers whose forward yields without @skippable: in an nn.Sequential, the next layer would get a generator."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Sequential) and type(part).forward is nn.Sequential.forward:
            for name, layer in part.named_children():
                if not isinstance(layer, Skippable) and isgeneratorfunction(type(layer).forward):
                    kind = type(layer).__name__
                    yield (
                        f"layer {f'{path}.{name}'.lstrip('.')!r} ({kind}) yields in its forward but isn't skippable: "
                        f"put @skippable(stash=[...], pop=[...]) above class {kind}."
                    )


def _shown(key: Key) -> str:
    namespace, name = key
    return repr(name) if namespace is None else f"{name!r} of {namespace!r}"


def _advice(key: Key, kind: str, which: str) -> str:
    namespace, name = key
    end = "" if namespace is None else ", isolated by the same namespace"
    return f"declare {kind}=[{name!r}] in {which} layer{end}"


def crossing(stages: Sequence[Sequence[tuple[str, nn.Module]]]) -> dict[Key, tuple[int, int]]:
    """The stages that each skip goes from and to, except for skips within a stage."""
    stashed = {key: stage for stage, layers in enumerate(stages) for _, layer in layers for key in stashes(layer)}
    popped = {key: stage for stage, layers in enumerate(stages) for _, layer in layers for key in pops(layer)}
    return {key: (source, popped[key]) for key, source in stashed.items() if popped.get(key, source) != source}
