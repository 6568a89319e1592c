"""The homes of a module's parameters and buffers: the stage that is the first to call their module.

The first call finds them, microbatch by microbatch in one thread: before a stage calls a module, it moves the module to
its device. So nothing is run twice, and a model that is too large for any device goes from the CPU to the devices piece
by piece. Given a sample, the homes are found beforehand, by a rehearsal on one row, after which random states, buffers,
modes and plain attributes of modules are restored.
"""
from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from splitpipe.compiled.layers import rehearsing
from splitpipe.core import stream
from splitpipe.core.stream import Place
from splitpipe.core.tensors import is_plain, version_of
from splitpipe.core.thread_state import Bound, unobserved
from splitpipe.core.torch_private import DisableTorchFunction, _NormBase, tree_leaves, tree_map_only
from splitpipe.partition.moving import moved


class Homes:
    """The stage of each module, and thus of its parameters and buffers."""

    def __init__(self, places: Sequence[Place], module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._devices = [place.device for place in places]
        #: Whether the stages are on more than one device, or stream.
        self.several = len({(place.device, place.stream and place.stream.stream_id) for place in places}) > 1
        self._known = {*self._devices}
        # Weak references, since the module's forward refers to this.
        self.stage_of: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        #: The modules that each stage has called.
        self.called: list[WeakKeyDictionary[nn.Module, None]] = [WeakKeyDictionary() for _ in places]
        #: Where parameters live, and buffers that several modules share: with the first of these modules.
        self._living: dict[int, tuple[Tensor, torch.device]] = {}
        #: The tables of tensors of what was assigned to a stage, by the called module's identity and the stage.
        self._settled: dict[tuple[int, int], list[dict[str, Tensor | None]]] = {}
        #: Opened modules whose own buffers the code between blocks writes to: all stages with such code share them.
        self.written: WeakSet[nn.Module] = WeakSet()
        #: True when a call has completed: everything that it used is in place.
        self.complete = False
        #: True when a call in training mode has completed: its writes are known. In eval mode, forwards write less.
        self.trained = False

    @cached_property
    def _shared(self) -> dict[int, Tensor]:
        """The buffers that several modules share. Computed late: while a module is copied, it has no buffers yet."""
        module = self._module()
        found = [] if module is None else [x for part in module.modules() for x in part._buffers.values()]
        counts = Counter(map(id, found))
        return {id(x): x for x in found if x is not None and counts[id(x)] > 1}

    @property
    def in_turn(self) -> bool:
        """True if ops must run one after another: in the first calls, and if code on several devices may assign one
        buffer, because some updates would be lost if it ran concurrently."""
        return not self.trained or self.several and bool(self.written)

    def note_writes(self, before: Mapping[nn.Module, list[tuple[Tensor, int | None]]]) -> None:
        """At the end of the first call, finds modules that wrote to their buffers, given the versions before it."""
        for part, versions in before.items():
            now = buffer_versions(part)
            if len(now) != len(versions) or any(x is not y or new != old for (x, new), (y, old) in zip(now, versions)):
                self.written.add(part)
                for called in self.called:
                    called[part] = None

    def settle(self, module: nn.Module, parts: Iterable[nn.Module], stage: int) -> bool:
        """Assigns those parts of a module that have no home yet to the stage that calls it.

        Returns True if all their tensors are on the stage's device.
        """
        key, device, local = (id(module), stage), self._devices[stage], True
        known = self._settled.get(key)
        if known is not None and self._at_home(known, device):
            return True
        self.called[stage][module] = None
        tables: list[Any] = []
        for part in parts:
            tables += part._parameters, part._buffers
            home = self.stage_of.get(part)
            if self.several:
                self._bring(part, self._devices[stage if home is None else home])
                local = local and all(x.device == device for x in _own(part))
            if home is None:  # Only now, so that what couldn't be moved has no home.
                self.stage_of[part] = stage
        self._settled[key] = tables
        return local

    def _at_home(self, tables: Iterable[dict[str, Tensor | None]], device: torch.device) -> bool:
        """True if all tensors are on a device, and live there."""
        if not self.several:
            return True
        with DisableTorchFunction():  # The mode Follow would see each question.
            return all([
                x is None or x.device == device and self._living.get(id(x), (x, device))[1] == device
                for table in tables for x in table.values()
            ])

    def restructured(self) -> None:
        """The model's modules or parameters may have changed: looks at each part again."""
        self._settled.clear()

    def gather(self) -> None:
        """If there is one device, moves the whole module there, including parts that are never called."""
        module = None if self.several else self._module()
        first = None if module is None else next(module.parameters(), None)
        if module is not None and (not self.stage_of or first is not None and first.device != self._devices[0]):
            self._living.clear()
            for part in module.modules():
                self._bring(part, self._devices[0])

    def forget_all_but(self, identities: Collection[int]) -> None:
        """Forgets parameters that the module no longer has because they were replaced."""
        if len(self._living) > len(identities) + len(self._shared):
            for key in self._living.keys() - identities - self._shared.keys():
                del self._living[key]

    def _bring(self, part: nn.Module, device: torch.device) -> None:
        homes: dict[int, torch.device] = {}
        for x in _own(part):
            kept = isinstance(x, Parameter) or id(x) in self._shared
            home = self._living.setdefault(id(x), (x, device))[1] if kept else device
            if x.device != home:
                homes[id(x)] = home
        if homes:
            with unobserved():  # The mode Follow would ask where the tensors live.
                part._apply(lambda x: moved(x, homes.get(id(x), x.device)), recurse=False)

    def adopt(self, x: Tensor, stage: int) -> bool:
        """Assigns to the stage a tensor of a module that is never called, if it isn't on any stage's device."""
        if x.device in self._known:
            return False
        moved(x, self._devices[stage])
        return True

    def elsewhere(self, x: Tensor, stage: int) -> bool:
        """True for a tensor on another stage's device, and for a parameter on no stage's device."""
        if not self.several or x.device == self._devices[stage]:
            return False
        return x.device in self._known or isinstance(x, Parameter)

    def stage_on(self, device: torch.device, before: int) -> int:
        """The last stage before the given one that is on a device, or else the first after it."""
        found = [stage for stage, own in enumerate(self._devices) if own == device]
        earlier = [stage for stage in found if stage < before]
        return earlier[-1] if earlier else found[0]

    def brought(self, part: nn.Module, value: Any) -> Any:
        """A nesting with its tensors moved to the device of a part's stage."""
        stage = self.stage_of.get(part)
        if stage is None:
            return value
        device = self._devices[stage]

        def bring(x: Tensor) -> Tensor:
            if x.device == device or x.device not in self._known:
                return x
            stream.hold(x, stream.current(x.device))  # The backward's thread uses different streams.
            return x.to(device)

        return tree_map_only(Tensor, bring, value)


def buffer_versions(part: nn.Module) -> list[tuple[Tensor, int | None]]:
    """A module's own buffers and their versions."""
    return [(x, version_of(x)) for x in part._buffers.values() if x is not None]


def _own(part: nn.Module) -> Iterator[Tensor]:
    for table in (part._parameters, part._buffers):
        for x in table.values():
            if x is not None:
                yield x


def verify_filled(module: nn.Module) -> None:
    """Raises for a module with parameters or buffers that have no data yet."""
    empty = [
        name for name, x in (*module.named_parameters(), *module.named_buffers()) if x.is_meta
    ]
    if empty:
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise ValueError(
            f"{', '.join(map(repr, empty[:3]))}{more} are on meta and have no data: expected a module with values on "
            "the CPU or a device, from where its stages are moved to their devices. Load it without device_map and "
            "meta first, or fill it (module.to_empty(device='cpu') and load_state_dict)."
        )


def arguments_of(sample: object, whose: str = "sample") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, positional ones and by name, that a user has given as one value."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, Tensor)):
        return sample if isinstance(sample, tuple) else (sample,), {}
    raise TypeError(
        f"{whose} is a {type(sample).__name__}: expected the arguments of a call, keyword arguments in a dict, "
        "positional ones in a tuple, or one tensor."
    )


def rehearse(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    module: nn.Module,
    sample: Any,
    devices: Sequence[torch.device],
    first: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]],
) -> None:
    """Runs ``call`` on the first row of a sample, which ``first`` selects."""
    args, kwargs = arguments_of(sample)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not any(x.dim() for x in tensors):
        raise ValueError(
            "sample contains no tensor: expected the arguments of a call, keyword arguments in a dict or positional "
            "ones in a tuple."
        )
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), first(args, kwargs))
    with without_trace(module, devices):
        call(args, kwargs)


def _elements(x: Any) -> Iterable[Any]:
    return chain.from_iterable(x.items()) if isinstance(x, dict) else x


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def without_trace(module: nn.Module, devices: Sequence[torch.device], hooks: bool = True) -> Iterator[None]:
    """Makes a run inside the block leave no trace in the module or random states; without ``hooks``, they don't run."""
    parts = list(module.modules())
    buffers = [{name: None if x is None else x.clone() for name, x in part._buffers.items()} for part in parts]
    versions = {id(x): version_of(x) for x in module.buffers()}
    attributes = [(part, dict(vars(part))) for part in parts]
    contents: list[tuple[Any, Any]] = [
        (x, copy(x)) for part in parts for x in vars(part).values() if isinstance(x, (list, set, dict, deque))
    ]
    modes = [part.training for part in parts]
    owned = [(x, x.get_state()) for part in parts for x in vars(part).values() if isinstance(x, torch.Generator)]
    tables = ("_parameters", "_buffers", "_modules", "_compiled_call_impl", "training")
    drawing = {device.index: device.type for device in devices if device.type != "cpu"}
    try:
        with torch.random.fork_rng([*drawing], device_type=next(iter(drawing.values()), "cuda")):
            for part in parts:
                if isinstance(part, _NormBase):  # It can't compute statistics of one row.
                    part.training = False
                if not hooks:
                    vars(part).update({name: {} for name in _HOOKS})
            with torch.no_grad(), Bound(rehearsing, True):
                yield
    finally:
        for content, before in contents:
            if len(content) != len(before) or not all(map(is_, _elements(content), _elements(before))):
                content.clear()
                (content.extend if isinstance(content, (list, deque)) else content.update)(before)
        for part, mode in zip(parts, modes):
            part.training = mode
        for generator, state in owned:
            generator.set_state(state)
        for part, before in attributes:
            now = vars(part)
            for name in [name for name in now if name not in before]:
                del now[name]
            now.update({name: value for name, value in before.items() if name not in tables})
        with torch.no_grad():
            for part, kept in zip(parts, buffers):
                for name in [name for name in part._buffers if name not in kept]:
                    del part._buffers[name]
                for name, value in kept.items():
                    x = part._buffers.get(name)
                    if x is not None and value is not None and x.shape == value.shape:
                        if version_of(x) != versions.get(id(x)):  # Otherwise, a graph that has saved it would fail.
                            x.copy_(value)
                        elif is_plain(x) and not torch.equal(x, value.to(x.device)):  # Written to through .data.
                            x.data.copy_(value)
                    else:  # The next call moves it to its home.
                        part._buffers[name] = value
