"""Layers that stash and pop skips: the decorator, and the two commands."""
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from types import new_class
from typing import Any, ClassVar

from torch import nn
from typing_extensions import Self

from splitpipe.skip.box import Key, Namespace, current


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
        RuntimeError: in a call, a skip that it pops wasn't stashed, or ``forward`` didn't follow its declared names. It
            leaves nothing stashed then, and the skips that it should pop are lost.
        TypeError: in a call, ``forward`` yielded something other than ``stash`` or ``pop``.

    Example:
        >>> Stash = skippable(stash=["skip"])(nn.Identity)
        >>> list(Stash().stashable())
        [(None, 'skip')]
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not hasattr(type(self), "module_cls"):
            raise TypeError(
                "Skippable was called directly: expected a class decorated with @skippable. "
                'Write @skippable(stash=["skip"]) above a class derived from nn.Module.'
            )
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}  # The namespace of each isolated name.

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> Key:
        """The name with its namespace, or with None if it isn't isolated."""
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
        names, faults = (declared, []) if only is None else _names("only", only)
        if ns is not None and not isinstance(ns, Namespace):
            faults.insert(0, f"found {ns!r} as namespace: expected a Namespace. Write isolate(Namespace()).")
        if unknown := sorted(names - declared):
            faults.append(
                f"found {unknown} in only, which {type(self).__name__} doesn't declare: expected some of "
                f"{sorted(declared)}. Correct the name, or declare it in @skippable."
            )
        _refuse(faults)
        for name in names:
            self.namespaces.pop(name, None)
            if ns is not None:
                self.namespaces[name] = ns
        return self

    def forward(self, input: Any) -> Any:
        """Runs the decorated module, and carries out the commands that it yields."""
        here = type(self).__name__
        if missing := [name for ns, name in self.poppable() if (ns, name) not in current()]:
            raise RuntimeError(
                f"{here} pops {missing}, which weren't stashed in this forward: expected an earlier layer to stash "
                "each under the same name and namespace. verify_skippables(model) lists what is missing."
            )
        arrived = {name: current().pop((ns, name)) for ns, name in self.poppable()}
        stashed: set[str] = set()
        try:
            output = self._run(input, arrived, stashed)
            left = {"stash": sorted(self.stashable_names - stashed), "pop": sorted(arrived)}
            if unused := [f"{kind}={names}" for kind, names in left.items() if names]:
                raise RuntimeError(
                    f"{here} declares {' and '.join(unused)} but didn't yield them: expected each name "
                    "once in every forward. Stash None if there is no value, or remove the name from @skippable."
                )
        except BaseException:
            for name in stashed:
                current().pop(self.namespaced(name), None)
            raise
        return output

    def _run(self, input: Any, arrived: dict[str, object], stashed: set[str]) -> Any:
        """The output. Pops from ``arrived``, and adds to ``stashed`` the names that it puts into the box."""
        generator = self.module(input)
        if not isinstance(generator, Generator):
            return generator
        answer = None
        with closing(generator):
            while True:
                try:
                    command = generator.send(answer)
                except StopIteration as stop:
                    return stop.value
                answer = None
                if isinstance(command, stash):
                    self._check("stash", command.name, self.stashable_names, self.stashable_names - stashed)
                    stashed.add(command.name)
                    # Now rather than at the end, since a layer inside this one may pop it.
                    current()[self.namespaced(command.name)] = command.tensor
                elif isinstance(command, pop):
                    self._check("pop", command.name, self.poppable_names, arrived.keys())
                    answer = arrived.pop(command.name)
                else:
                    raise TypeError(
                        f"{type(self).__name__} yielded a value of type {type(command).__name__}: expected "
                        "stash(name, value) or pop(name). Return the output instead of yielding it."
                    )

    def _check(self, kind: str, name: str, declared: frozenset[str], left: Iterable[str]) -> None:
        found = f"{type(self).__name__} yielded {kind}({name!r})"
        if not isinstance(name, str) or name not in declared:
            raise RuntimeError(
                f"{found}, which it doesn't declare: expected one of {sorted(declared)}. Correct the name, "
                f"or add it to {kind}= in @skippable."
            )
        if name not in left:
            raise RuntimeError(
                f"{found} twice in one forward: expected one {kind} per name. Keep the value in a "
                "variable, or declare a second name."
            )


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
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
    stashable, faults = _names("stash", stash)
    poppable, more = _names("pop", pop)
    _refuse(faults + more)

    def decorate(cls: type[nn.Module]) -> type[Skippable]:
        if not isinstance(cls, type) or not issubclass(cls, nn.Module):
            raise TypeError(f"@skippable decorates {cls!r}: expected a class derived from nn.Module.")
        if issubclass(cls, Skippable):
            raise TypeError(
                f"@skippable decorates {cls.__name__}, which is already skippable: expected a single @skippable. "
                "Declare all names in it."
            )
        # pickle finds a class by its name, but the name of the decorated class now refers to the wrapper. So .module
        # has a class that is found through the wrapper; the decorated class stays as it is.
        shared = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        inside = {**shared, "__qualname__": f"{cls.__qualname__}.module_cls"}
        outside = {
            **shared,
            "__qualname__": cls.__qualname__,
            "module_cls": new_class(cls.__name__, (cls,), {}, lambda namespace: namespace.update(inside)),
            "stashable_names": stashable,
            "poppable_names": poppable,
        }
        return type(cls.__name__, (Skippable,), outside)

    return decorate


def _names(argument: str, value: Iterable[str]) -> tuple[frozenset[str], list[str]]:
    """The names in an argument, and the faults in it."""
    form = f'expected a list of names, such as {argument}=["skip"]'
    if isinstance(value, str):
        return frozenset(), [f"found {argument}={value!r}, one string: {form}. Write {argument}=[{value!r}]."]
    if not isinstance(value, Iterable):
        return frozenset(), [f"found {argument}={value!r}: {form}. Put the names into a list."]
    names = list(value)
    if wrong := [name for name in names if not isinstance(name, str)]:
        return frozenset(), [f"found {wrong} in {argument}: {form}. Give each name as a string."]
    return frozenset(names), []


def _refuse(faults: list[str]) -> None:
    if faults:
        raise TypeError("\n".join(faults))
