"""Tensors of one microbatch that the forward leaves in attributes of modules, which all microbatches share."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from splitpipe.partition.stale import Stale

#: A module, and the name of its attribute.
Place = tuple[nn.Module, str]
ABSENT = object()


class Left:
    """The attributes in which the forward leaves tensors with graphs.

    They are withdrawn when the microbatch leaves the stage: so only the code of this stage can use them, and until
    then, no other microbatch is there. A watched call, in which ops run one after another, finds these attributes. The
    next one shows whether another stage sets them, too.
    """

    def __init__(self) -> None:
        self.again = 0  #: How many calls are yet to be watched.
        self._of_stage: dict[int, dict[Place, Stale]] = {}
        #: By block, also those without graphs; True if they differ between microbatches, as a cache doesn't.
        self._of_block: dict[nn.Module, dict[Place, bool]] = {}
        #: In a watched call: the module, its attributes and tensors at the start, and what a stage finds in the places.
        self._module: nn.Module | None = None
        self._before: dict[nn.Module, dict[str, Any]] = {}
        self._tensors: dict[int, Tensor] = {}
        self._begun: dict[Place, Any] = {}
        self._last: dict[Place, Tensor] = {}
        self._holders: dict[int, tuple[Any, int]] = {}  #: By identity, the lists and dicts that hold them, with stages.

    @contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """Finds these attributes in the call inside; if it fails, they are what they were before."""
        self._module, self._before = module, {part: dict(vars(part)) for part in module.modules()}
        self._tensors = {id(x): x for *_, x in kept(module)}
        known = self._count()
        try:
            yield
            self.again = 1 if self._count() > known else max(0, self.again - 1)
            self._clear()
            for block, places in [*self._of_block.items()]:
                self._of_block[block] = {place: True for place, varies in places.items() if varies}
                if not self._of_block[block]:
                    del self._of_block[block]
        except BaseException:
            self.again = 2 if self._count() else self.again
            self._restore()
            raise
        finally:
            self._module, self._before, self._tensors, self._begun = None, {}, {}, {}
            self._last, self._holders = {}, {}

    def _clear(self) -> None:
        """Withdraws, between stages, what the module's own checkpoints may have recomputed."""
        for stage in self._of_stage:
            self.withdraw(stage)

    def _count(self) -> int:
        return sum(map(len, self._of_stage.values()))

    def _restore(self) -> None:
        for part, before in self._before.items():
            for own, value in [*vars(part).items()]:
                graphs = any(x.grad_fn is not None for _, x in inside(value))
                if self._is_new(part, own) and (graphs or isinstance(value, Stale)):
                    if own in before:
                        vars(part)[own] = before[own]
                    else:
                        del vars(part)[own]

    def _is_new(self, part: nn.Module, own: str) -> bool:
        """Whether an attribute was set in the watched call; what torch keeps in some isn't replaced."""
        return own not in _INTERNAL and vars(part)[own] is not self._before.get(part, {}).get(own, ABSENT)

    def __bool__(self) -> bool:
        """Whether there are any, or there may be."""
        return self._module is not None or bool(self._of_block or self._of_stage)

    def following(self, block: nn.Module, stage: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """A block's call, of which is found what it leaves; recomputed, it leaves these attributes as it found them."""
        return _Following(self, block, stage, call) if self._module is not None or block in self._of_block else call

    def find(self, block: nn.Module, stage: int) -> None:
        """Finds, in a watched call, where a block has left tensors."""
        for where, part, own, x in kept(block) if self._module is not None else ():
            if id(x) not in self._tensors:
                value, places, place = vars(part)[own], self._of_block.setdefault(block, {}), (part, own)
                last, self._last[place] = self._last.get(place, x), x
                places[place] = places.get(place, False) or x.grad_fn is not None or last is not x
                _, first = self._holders.setdefault(id(value), (value, stage))
                if first != stage and x.grad_fn is not None and value is not x:
                    raise _set(where.partition(", number ")[0], first, stage)

    def places(self, block: nn.Module) -> list[Place]:
        """Where a block leaves tensors."""
        return [*self._of_block.get(block, ())]

    def tensors(self, block: nn.Module) -> list[Tensor]:
        """The tensors that a block has left."""
        return [x for part, own in self.places(block) for _, x in inside(vars(part).get(own))]

    def begin(self) -> None:
        """Called at the start of a stage of a microbatch."""
        if self._module is not None:
            if self._begun:
                self._clear()
            places = (place for places in self._of_stage.values() for place in places)
            self._begun = {(part, own): vars(part).get(own) for part, own in places}

    def end(self, stage: int) -> None:
        """Called at the end of a stage of a microbatch; raises if another stage uses its attributes, too."""
        if self._module is not None:
            for where, part, own, x in kept(self._module):
                if x.grad_fn is not None and self._is_new(part, own):
                    stale = Stale(where.partition(", number ")[0])
                    self._of_stage.setdefault(stage, {}).setdefault((part, own), stale)
            self._verify(stage)
        self.withdraw(stage)

    def withdraw(self, stage: int) -> None:
        """Withdraws what the code of a stage has left."""
        for (part, own), stale in self._of_stage.get(stage, {}).items():
            if any(inside(vars(part).get(own))):
                vars(part)[own] = stale

    def _verify(self, stage: int) -> None:
        for other, places in self._of_stage.items():
            for (part, own), stale in places.items() if other != stage else ():
                value = vars(part).get(own)
                if value is not self._begun.get((part, own), value):
                    raise _set(stale.place, other, stage)


def _set(where: str, *stages: int) -> RuntimeError:
    return RuntimeError(
        f"the forward sets {where!r}, which was a tensor with a graph, in stages {' and '.join(map(str, stages))}: "
        "code there may get another microbatch's, since all of them share the module. Set it only in the block and "
        "right after it, or use a local variable."
    )


_INTERNAL = frozenset(vars(nn.Module()))
_WITHOUT = _INTERNAL - {"_buffers"}
_SINGLE = int, float, str, type(None)


class _Following:
    """A block's call, which is made again when the block is recomputed."""

    def __init__(self, left: Left, block: nn.Module, stage: int, call: Callable[..., Any]) -> None:
        self._left, self._block, self._stage, self._call = left, block, stage, call
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._called:
            value = self._call(*args, **kwargs)
            self._called = True
            self._left.find(self._block, self._stage)
            return value
        places = self._left.places(self._block)
        before = [(vars(part), own, vars(part).get(own, ABSENT)) for part, own in places]
        held = [(value, copy(value)) for *_, value in before if isinstance(value, (list, deque, dict))]
        try:
            return self._call(*args, **kwargs)
        finally:
            for attributes, own, value in before:
                if value is not ABSENT:
                    attributes[own] = value
                else:
                    attributes.pop(own, None)
            for value, content in held:
                value.clear()
                value.update(content) if isinstance(value, dict) else value.extend(content)


def kept(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """The tensors in plain attributes: their names, modules and attributes."""
    for name, part in module.named_modules():
        for own, value in vars(part).items():
            if own in _WITHOUT or isinstance(value, _SINGLE):  # Most of them.
                continue
            if any(f"{own}_{end}" in part._parameters for end in ("g", "v", "orig")):
                continue  # Computed from these in each call, by weight_norm, spectral_norm or prune of torch.nn.utils.
            for number, x in inside(value):
                yield f"{name}.{own}".strip(".") + (f", number {number}" if number else ""), part, own, x


def inside(value: Any) -> Iterator[tuple[int, Tensor]]:
    """The tensors in a value, with their numbers; not those that were withdrawn."""
    for number, x in enumerate(_leaves(value)):
        if isinstance(x, Tensor) and not isinstance(x, Stale):
            yield number, x


def _leaves(value: Any, depth: int = 3) -> Iterator[Any]:
    """What containers and dataclasses hold, in each other too."""
    if isinstance(value, (list, tuple, deque)):
        held = list(value)
    elif isinstance(value, dict):
        held = list(dict.values(value))
    elif is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        # No property that a subclass has in place of a field is called.
        held = list(vars(value).values()) if hasattr(value, "__dict__") else [
            getattr(value, field.name, None) for field in fields(value)
        ]
    else:
        held = []
    if not held or not depth:
        yield value
    for x in held if depth else ():
        yield from _leaves(x, depth - 1)
