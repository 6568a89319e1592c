"""Parameters lent to a pass that goes backward inside the forward: layers compute with aliases of them.

An alias has its parameter's memory and a ``.grad`` of its own. So what the pass computes touches no ``.grad`` of the
user's, and fires none of the hooks that are set on parameters: the finished gradients reach those with the user's own
``loss.backward()``.

    layer._parameters["weight"]   parameter ── lend ──> alias ── give_back ──> parameter

There is one alias a parameter and stage, kept from pass to pass: torch.compile takes a new one for another module.
Guarantee: ``give_back`` leaves every slot as ``lend`` found it, whatever has happened in between. A slot to which a
layer has assigned meanwhile keeps what was assigned.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class Lent:
    """A parameter on loan.

    Attributes:
        real: the parameter.
        aliases: the alias of each stage that has one.
    """

    real: Tensor
    aliases: dict[int, nn.Parameter] = field(default_factory=dict)

Kept = dict[tuple[int, int], tuple[Tensor, nn.Parameter]]


class Loan:
    """The parameters lent for one pass.

    Attributes:
        layers: those of each layer of each stage that no earlier one has.
        lent: all, by the parameter's id.
        ids: of the aliases.
    """

    def __init__(self) -> None:
        self.layers: list[list[list[Lent]]] = []
        self.lent: dict[int, Lent] = {}
        self.ids: set[int] = set()
        self._slots: list[tuple[Any, Any, Any, Any]] = []

    def place(self, holder: Any, key: Any, alias: Any) -> None:
        """Puts an alias into a dict or list."""
        self._slots.append((holder, key, holder[key], alias))  # First of all: whatever happens, it goes back.
        holder[key] = alias

    def give_back(self) -> None:
        """Puts the parameters back. The aliases lose their gradients."""
        for holder, key, real, alias in self._slots:
            with suppress(LookupError):  # A layer has removed it.
                if holder[key] is alias:
                    holder[key] = real
        for lent in self.lent.values():
            for alias in lent.aliases.values():
                alias.grad = None
        self._slots = []


class Aliases:
    """The aliases of one model."""

    def __init__(self) -> None:
        self._kept: Kept = {}  # By stage and the parameter's id.

    def of(self, parameter: Tensor) -> list[nn.Parameter]:
        """The aliases of a parameter that the last pass has used."""
        return [alias for real, alias in self._kept.values() if real is parameter]

    def lend(self, stages: Sequence[Sequence[nn.Module]]) -> Loan:
        """Puts an alias in the place of every parameter that requires grad.

        Args:
            stages: the layers of each.
        """
        loan, kept = Loan(), self._kept
        self._kept = {}
        try:
            seen: set[nn.Module] = set()
            for stage, layers in enumerate(stages):
                loan.layers.append([[] for _ in layers])
                for layer, new in zip(layers, loan.layers[-1]):
                    for module in layer.modules():
                        if module not in seen:
                            seen.add(module)
                            self._lend(loan, kept, stage, module, new)
        except BaseException:
            loan.give_back()
            raise
        return loan

    def _lend(self, loan: Loan, kept: Kept, stage: int, module: nn.Module, new: list[Lent]) -> None:
        if type(module._parameters) is not dict:
            return  # A ScriptModule's own, which can't be changed: what it computes with are the parameters themselves.
        own: dict[int, nn.Parameter] = {}
        for name, real in module._parameters.items():
            if real is None or not real.requires_grad or is_lazy(real):
                continue
            lent = loan.lent.get(id(real))
            if lent is None:
                lent = loan.lent[id(real)] = Lent(real)
                new.append(lent)
            if stage not in lent.aliases:
                before, alias = kept.get((stage, id(real)), (None, None))
                if alias is None or before is not real or not _fits(alias, real):
                    alias = _alias(real)
                self._kept[stage, id(real)] = real, alias
                lent.aliases[stage] = alias
                loan.ids.add(id(alias))
            own[id(real)] = lent.aliases[stage]
            loan.place(module._parameters, name, own[id(real)])
        for holder, index, alias in _elsewhere(module, own) if own else ():
            loan.place(holder, index, alias)


def _alias(real: Tensor) -> nn.Parameter:
    alias = nn.Parameter(real.detach())  # In the same memory, at the same version.
    if type(alias) is not type(real) and isinstance(real, nn.Parameter):
        with suppress(TypeError):  # A layer may ask for a parameter's class.
            alias.__class__ = type(real)
    vars(alias).update(vars(real))
    return alias


def _fits(alias: Tensor, real: Tensor) -> bool:
    if type(real) not in (Tensor, nn.Parameter):
        return type(alias) is type(real) and alias._version == real._version
    same = alias.untyped_storage()._cdata == real.untyped_storage()._cdata and alias.dtype == real.dtype
    return same and alias.shape == real.shape and alias.stride() == real.stride()


def _elsewhere(module: nn.Module, own: dict[int, nn.Parameter]) -> Iterator[tuple[list[Any], int, Any]]:
    """Where else a module holds its parameters: in lists, as an LSTM does, or weak references to them."""
    for held in vars(module).values():
        if type(held) is list:
            for index, entry in enumerate(held):
                if isinstance(entry, weakref.ref) and id(entry()) in own:
                    yield held, index, weakref.ref(own[id(entry())])
                elif id(entry) in own:
                    yield held, index, own[id(entry)]
