"""Plain attributes of modules, which all microbatches of a call share."""
from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitpipe.batch.division import Division
from splitpipe.core.tensors import version_of
from splitpipe.core.torch_private import _NormBase
from splitpipe.partition.left import ABSENT, Left, inside, kept


@contextmanager
def noted(module: nn.Module, traces: list[Any]) -> Iterator[None]:
    """Records the shapes of tensors that the call inside leaves in attributes, and whether it writes to buffers."""
    before = {where: x for where, _, _, x in kept(module)}
    buffers = {name: (x, version_of(x)) for name, x in module.named_buffers()}
    yield
    left = {where: x.shape for where, _, _, x in kept(module) if before.get(where) is not x}
    now = {name: (x, version_of(x)) for name, x in module.named_buffers()}
    same = now.keys() == buffers.keys() and all(
        x is y and one == other for (x, one), (y, other) in zip(now.values(), buffers.values())
    )
    traces.append((left, same))


def _nothing(microbatch: int) -> None:
    """Looks at nothing."""


_log = logging.getLogger("splitpipe")


class Suspect(NamedTuple):
    """A tensor in a plain attribute that may belong to one microbatch; its dimensions with as many elements as rows."""

    where: str
    part: nn.Module
    attribute: str
    before: Any
    shape: torch.Size
    dims: list[int]


class Attributes:
    """Checks plain attributes of modules, which all microbatches share, in a call with several microbatches.

    That is the first such call, and the first one that trains.
    """

    def __init__(self) -> None:
        self.looked: set[bool] = set()  #: Whether to look no more, by whether a call trains.
        self.left = Left()
        #: Tensors that may have the batch as a dimension; a run with another number of rows will show it.
        self.suspects: list[Suspect] = []
        self._look: Callable[[int], None] = _nothing

    def restructured(self) -> None:
        """The model's modules have changed: looks again, and lets go of those that were replaced."""
        self.looked, self.left = set(), Left()

    def watches(self, rows: Sequence[int], trains: bool) -> bool:
        """Whether it looks at a call; then, ops must run one after another. ``rows``: of each microbatch."""
        return len(rows) > 1 and (trains not in self.looked or self.left.again > 0)

    def look(self, microbatch: int) -> None:
        """Looks at them between two stages of a microbatch: the forward may take back later what it has set."""
        self._look(microbatch)

    @contextmanager
    def watched(self, module: nn.Module, rows: list[int], trains: bool) -> Iterator[None]:
        """Looks for what the call inside the block leaves there, even if it fails."""
        if not self.watches(rows, trains) or trains in self.looked:
            with self.left.watched(module) if self.left.again and len(rows) > 1 else nullcontext():
                yield
            return
        tensors = {where: x for where, _, _, x in kept(module)}
        held = [
            (part, {own: value for own, value in vars(part).items() if not _refers(value)}) for part in module.modules()
        ]
        before, between, buffers = _settings(module), dict[int, dict[str, Any]](), _buffers(module)

        def look(microbatch: int) -> None:
            if microbatch < 2 and microbatch not in between:
                between[microbatch] = now = _settings(module)
                _verify_parameters(before, now)
                _verify(module, tensors, rows, held)

        self._look = look
        try:
            with self.left.watched(module):
                yield
        except Exception:
            found = _verify(module, tensors, rows, held)
            _warn([suspect for suspect in found if _likely(suspect, rows[0])], rows[0])  # This says less.
            raise
        finally:
            self._look = _nothing
        self.suspects = _verify(module, tensors, rows, held)
        if 0 in between and 1 in between:
            _warn_changed(before, between[0], between[1], _settings(module))
        _report_written(buffers, _buffers(module))
        self.looked |= {trains, False}

    @contextmanager
    def reported(self, layers: nn.Module, rows: list[int]) -> Iterator[None]:
        """Logs what layers of an nn.Sequential leave there: nothing between them reads it, but their user may.

        This isn't a warning, since it may be right: a penalty on weights is the same for each microbatch.
        """
        if self.looked or len(rows) == 1:
            yield
            return
        tensors, buffers = {where: x for where, _, _, x in kept(layers)}, _buffers(layers)
        yield
        self.looked = {True, False}
        _report_written(buffers, _buffers(layers))
        new = [(where, x) for where, part, own, x in kept(layers) if vars(part)[own] is x is not tensors.get(where)]
        left = [where for where, x in new if x.grad_fn is not None or list(x.shape[:1]) == rows[-1:]]
        if left:
            _log.warning(
                "a layer left %s, a tensor of one microbatch, in an attribute of a module, which all microbatches "
                "share: what reads it later gets that of the last microbatch, and another layer may get any other's. "
                "Return it from the layer, use splitpipe.skip, or collect one per microbatch in a list.",
                ", ".join(map(repr, left[:3])),
            )

    def settle(self, division: Division, rehearsed: Callable[..., object]) -> None:
        """Warns of tensors whose size changes in a run with other rows, or, if there can't be one, of likely ones."""
        suspects, self.suspects = self.suspects, []
        if not suspects:
            return
        rows = [count for _, count in division.rows]
        other = next(count for count in range(1, len(rows) + 2) if count not in rows)
        found: list[Suspect] = []
        if other > sum(rows) or rehearsed(division, other, _again(suspects, found)) is None:
            found = [suspect for suspect in suspects if _likely(suspect, rows[0])]
        _warn(found, rows[0])


@contextmanager
def _again(suspects: list[Suspect], found: list[Suspect]) -> Iterator[None]:
    """Finds suspects whose size is different in a run with other rows, which starts from the same state."""
    for suspect in suspects:
        if suspect.before is ABSENT:
            vars(suspect.part).pop(suspect.attribute, None)
        else:
            vars(suspect.part)[suspect.attribute] = suspect.before
    yield
    now = {where: x.shape for where, _, _, x in _kept_of(suspects)}
    for suspect in suspects:
        shape = now.get(suspect.where, ())
        if len(shape) == len(suspect.shape) and any(shape[dim] != suspect.shape[dim] for dim in suspect.dims):
            found.append(suspect)


def _refers(value: Any) -> bool:
    """True for weak references, such as nn.LSTM's to its parameters, which can't be moved while there is one."""
    return isinstance(value, list) and any(isinstance(x, weakref.ref) for x in value)


def _likely(suspect: Suspect, rows: int) -> bool:
    """True for a tensor whose shape suggests rows: [rows, ...], or a state of [layers, rows, width]."""
    return 0 in suspect.dims or 1 in suspect.dims and len(suspect.shape) > 2 and rows > 1


def _buffers(module: nn.Module) -> dict[str, tuple[Tensor, int | None]]:
    """Buffers with their versions, but for running statistics, about which there is another message."""
    parts = [(name, part) for name, part in module.named_modules() if not isinstance(part, _NormBase)]
    return {
        f"{name}.{own}".strip("."): (x, version_of(x))
        for name, part in parts for own, x in part._buffers.items() if x is not None
    }


def _report_written(before: dict[str, tuple[Tensor, int | None]], now: dict[str, tuple[Tensor, int | None]]) -> None:
    """Logs which buffers the microbatches have changed: not those that were moved, or made larger as a cache is."""
    changed = []
    for where, (x, version) in before.items():
        y, other = now.get(where, (x, version))
        if (x is not y or version != other) and (x.device, x.shape) == (y.device, y.shape):
            changed.append(where)
    if changed:
        _log.warning(
            "the forward changes the buffer %s, once for each microbatch, of which later ones see what earlier ones "
            "have made of it: results may differ from the unwrapped module's. Change it after the step instead.",
            ", ".join(map(repr, changed[:3])),
        )


def _kept_of(suspects: Iterable[Suspect]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for suspect in suspects:
        for number, x in inside(vars(suspect.part).get(suspect.attribute)):
            if suspect.where.endswith(f", number {number}") or not number and ", number " not in suspect.where:
                yield suspect.where, suspect.part, suspect.attribute, x


def _settings(module: nn.Module) -> dict[str, Any]:
    """What modules hold besides buffers, submodules and hooks, and which of their parameters are frozen."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        plain = {own: value for own, value in vars(part).items() if own not in _INTERNAL and not _refers(value)}
        for own, value in [*plain.items(), *part._parameters.items()]:
            found[f"{name}.{own}".strip(".")] = value
            if isinstance(value, nn.Parameter):
                found[f"{name}.{own}.requires_grad".strip(".")] = value.requires_grad
    return found


_INTERNAL = frozenset(vars(nn.Module())) - {"training"}


def _verify_parameters(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises for parameters that other tensors have replaced since the start of the call."""
    for where, x in now.items():
        if isinstance(before.get(where), nn.Parameter) and isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
            raise RuntimeError(
                f"a later stage starts while another tensor replaces the parameter {where!r}, as inside "
                "torch.func.functional_call; all microbatches share the module, so another one would compute with it. "
                "Expected the whole of such a call inside one block: choose other cuts=."
            )


def _warn_changed(before: dict[str, Any], one: dict[str, Any], other: dict[str, Any], after: dict[str, Any]) -> None:
    """Warns of what the forward takes back after a later stage has started, and of what each microbatch sets anew."""
    back, own = [], []
    for where in sorted({*one, *before}):
        start, first, second, end = (each.get(where, ABSENT) for each in (before, one, other, after))
        if not _same(start, first) and _same(start, end):
            back.append(repr(where))
        elif _plain(first) and not any(_same(first, x) for x in (start, second)) and not _counts(start, first, second):
            own.append(f"{where!r} to {first!r} in one microbatch and to {second!r} in the next")
    for names, how in (back, "changes {}, and takes that back after a later stage has started"), (own, "sets {}"):
        if names:
            warnings.warn(
                f"the forward {how.format(', '.join(names[:3]))}; all microbatches share the module, so code in the "
                "forward that reads it may get another microbatch's. Keep it in a local variable, or use other cuts=.",
                stacklevel=2,
            )


def _same(one: Any, other: Any) -> bool:
    return one is other or type(one) is type(other) and _plain(one) and bool(one == other)


def _plain(value: Any) -> bool:
    """True for numbers and strings, and lists and tuples of these."""
    return isinstance(value, (int, float, str)) or isinstance(value, (list, tuple)) and all(map(_plain, value))


def _counts(*values: Any) -> bool:
    """True for a counter, which has the same difference each time."""
    start, first, second = (x if isinstance(x, (int, float)) else 0 for x in values)
    return bool(second - first == first - start != 0)


_ADVICE = "Keep it in a local variable, or return it from the block"


def _verify(
    module: nn.Module, before: dict[str, Tensor], rows: list[int], held: list[tuple[nn.Module, dict[str, Any]]]
) -> list[Suspect]:
    """Raises for new tensors with a graph; returns others that have as many elements along a dimension as rows."""
    new = [each for each in kept(module) if before.get(each[0]) is not each[3]]
    graphs = [where for where, _, _, x in new if x.grad_fn is not None]
    if graphs:
        raise _shared(graphs)
    attributes = dict(held)
    found = []
    for where, part, own, x in new:
        dims = [dim for dim, size in enumerate(x.shape) if size in rows]
        if dims:
            found.append(Suspect(where, part, own, attributes.get(part, {}).get(own, ABSENT), x.shape, dims))
    return found


def _shared(graphs: list[str]) -> RuntimeError:
    return RuntimeError(
        f"the forward left {', '.join(map(repr, graphs[:3]))}, a tensor with a graph, in an attribute of a module, "
        "which all microbatches share: code in the forward that reads it would get another microbatch's. "
        f"{_ADVICE}; detach it if nothing there reads it."
    )


def _warn(suspects: list[Suspect], rows: int) -> None:
    """Warns of tensors that belong to one microbatch."""
    if suspects:
        named = ", ".join(repr(suspect.where) for suspect in suspects[:3])
        warnings.warn(
            f"the forward left {named}, a tensor of {rows} rows, as many as a microbatch has, "
            "in an attribute of a module, which all microbatches share: code in the forward that reads it may get "
            f"another microbatch's. {_ADVICE}.",
            stacklevel=2,
        )
