"""Layers that stash and pop skips: the decorator, the two commands, and the pairs that such layers form."""
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from typing_extensions import Self

from splitpipe.skip.tracker import Key, Namespace, current


@dataclass(frozen=True, eq=False)
class stash:
    """Sends a value to the layer that pops it, in ``yield stash(name, tensor)``.

    Args:
        name: one of the names that the layer declares as ``stash``.
        tensor: a tensor of any shape and dtype, None, or any nesting of these.

    Example:
        >>> stash("skip", None).name
        'skip'
    """

    name: str
    tensor: Any


@dataclass(frozen=True, eq=False)
class pop:
    """Receives the value that an earlier layer stashed, in ``value = yield pop(name)``.

    Args:
        name: one of the names that the layer declares as ``pop``.

    Example:
        >>> pop("skip").name
        'skip'
    """

    name: str


class Skippable(nn.Module):
    """A module whose ``forward`` may stash and pop. ``skippable`` makes it; it wraps the decorated ``module``.

    Raises:
        RuntimeError: in a call, a skip that it pops wasn't stashed, or ``forward`` didn't follow its declared names.
        TypeError: in a call, ``forward`` yielded something other than ``stash`` or ``pop``.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace | None] = {}  # That of each name; without an entry, it is None.

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> Key:
        return self.namespaces.get(name), name

    def stashable(self) -> Iterable[Key]:
        """The keys that this layer stashes, sorted by name."""
        return [self.namespaced(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> Iterable[Key]:
        """The keys that this layer pops, sorted by name."""
        return [self.namespaced(name) for name in sorted(self.poppable_names)]

    def isolate(self, ns: Namespace | None, *, only: Iterable[str] | None = None) -> Self:
        """Puts skips of this layer into a namespace, separate from equal names of other layers.

        Args:
            ns: the namespace, the same for both ends of a skip. None removes them from their namespace.
            only: names to isolate. Default: all that the layer declares.

        Returns:
            The layer itself.

        Raises:
            TypeError: ``ns`` isn't a Namespace, or ``only`` isn't a list of names that the layer declares.

        Example:
            >>> Stash, Pop = skippable(stash=["skip"])(nn.Identity), skippable(pop=["skip"])(nn.Identity)
            >>> outer, inner = Namespace(), Namespace()
            >>> verify_skippables(nn.Sequential(
            ...     Stash().isolate(outer), Stash().isolate(inner), Pop().isolate(inner), Pop().isolate(outer)
            ... ))
        """
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else _names("only", only)
        if ns is not None and not isinstance(ns, Namespace):
            raise TypeError(f"found {ns!r} as namespace: expected a Namespace. Write isolate(Namespace()).")
        if unknown := sorted(names - declared):
            raise TypeError(f"found {unknown} in only: expected some of {sorted(declared)}, as @skippable declares.")
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def forward(self, input: Any) -> Any:
        """Runs the decorated module, and carries out the commands that it yields."""
        here, box = type(self).__name__, current()
        if absent := [name for ns, name in self.poppable() if (ns, name) not in box]:
            raise RuntimeError(f"{here} pops {absent}, which no earlier layer stashed: see verify_skippables(model).")
        arrived = {name: box.pop((ns, name)) for ns, name in self.poppable()}
        unused = {stash: {*self.stashable_names}, pop: {*self.poppable_names}}
        output = self.module(input)
        if isinstance(output, Generator):
            with closing(output):
                output = self._run(output, arrived, unused)
        if left := [*sorted(unused[stash]), *sorted(unused[pop])]:
            raise RuntimeError(f"{here} didn't yield {left}: expected each declared name once. None is a value.")
        return output

    def _run(self, generator: Any, arrived: dict[str, Any], unused: dict[type, set[str]]) -> Any:
        """The output of a forward, each of whose commands uses a name up."""
        here, answer = type(self).__name__, None
        while True:
            try:
                command = generator.send(answer)
            except StopIteration as stop:
                return stop.value
            kind = type(command)
            if kind not in unused:
                raise TypeError(f"{here} yielded a {kind.__name__}: expected stash(name, value) or pop(name).")
            name = command.name
            if name not in unused[kind]:
                known = sorted(self.stashable_names if kind is stash else self.poppable_names)
                raise RuntimeError(
                    f"{here} yielded {kind.__name__}({name!r}): expected each of {known} once in a forward."
                )
            unused[kind].remove(name)
            if kind is stash:  # Now rather than at the end, since a layer inside this one may pop it.
                current()[self.namespaced(name)] = command.tensor
            answer = arrived.pop(name) if kind is pop else None


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Makes a module class whose ``forward`` may send values to later layers, past those in between.

    ``forward`` takes one input and is a generator: it yields ``stash(name, value)`` and ``pop(name)``, and returns its
    output. It works the same in a plain nn.Sequential and in a SplitPipe, which copies a skip directly to the device
    where it is popped. Instances hold the decorated module as ``.module``. They can be pickled if the decorated class
    is found under its own name, as it is with decorator syntax.

    Args:
        stash: names under which the layer stashes values, each once in every forward.
        pop: names that the layer pops, each once in every forward.

    Returns:
        The decorator.

    Raises:
        TypeError: ``stash`` or ``pop`` isn't a list of strings; or the decorated object isn't an nn.Module class, or is
            decorated already.

    Example:
        >>> import torch
        >>> from splitpipe.skip import pop, skippable, stash
        >>> @skippable(stash=["skip"])
        ... class Encode(nn.Module):
        ...     def forward(self, input):
        ...         yield stash("skip", input)
        ...         return input * 10
        >>> @skippable(pop=["skip"])
        ... class Decode(nn.Module):
        ...     def forward(self, input):
        ...         skip = yield pop("skip")
        ...         return input + skip
        >>> nn.Sequential(Encode(), nn.ReLU(), Decode())(torch.tensor([1.0, 2.0]))
        tensor([11., 22.])
    """
    stashable, poppable = _names("stash", stash), _names("pop", pop)

    def decorate(cls: type[nn.Module]) -> type[Skippable]:
        if not isinstance(cls, type) or not issubclass(cls, nn.Module) or issubclass(cls, Skippable):
            raise TypeError(f"@skippable decorates {cls!r}: expected a class derived from nn.Module, and not twice.")
        # pickle finds a class by its name, but the name of the decorated class now refers to the wrapper. So .module
        # has a class that is found through the wrapper; the decorated class stays as it is.
        shared = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
        inside = {**shared, "__qualname__": f"{cls.__qualname__}.module_cls"}
        module_cls = type(cls.__name__, (cls,), inside)
        names = {"stashable_names": stashable, "poppable_names": poppable}
        return type(cls.__name__, (Skippable,), {**shared, **names, "module_cls": module_cls})

    return decorate


def _names(argument: str, value: Iterable[str]) -> frozenset[str]:
    """The names in an argument."""
    names = None if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f'found {argument}={value!r}: expected a list of names, such as {argument}=["skip"].')
    return frozenset(names)


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
