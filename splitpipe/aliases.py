"""Parameters lent to a pass that goes backward inside the forward: layers compute with aliases of them.

    layer._parameters["weight"]   parameter ── lend ──> alias ── give_back ──> parameter

An alias has its parameter's memory. What the pass computes so touches no ``.grad`` of the user's, and fires none of
the hooks that are set on parameters: a gradient that autograd accumulates for an alias goes to its stage's sums at
once, and the finished gradients reach the parameters with the user's own ``loss.backward()``. A graph that outlives
the pass (a penalty that a layer has kept, say) leads to an alias as well: it passes such a gradient on.

A copy of a layer, made in the middle of a pass, has parameters of its own: an alias is copied as its parameter.

There is one alias a parameter and stage, kept from pass to pass: torch.compile takes a new one for another module.

Guarantees: ``give_back`` leaves the parameters where ``lend`` found them, whatever has happened in between, and may be
repeated if it was interrupted. What a layer has done to an alias (other memory, another name) it has done to the
parameter. What would break them: layers that two passes use at once, which is refused.
"""
from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from splitpipe.deferral.sums import Sums
from splitpipe.turn import gate


class Keeper:
    """What becomes of a gradient that autograd accumulates for an alias.

    Args:
        real: the parameter.

    Attributes:
        sums: of the stage, while the alias is lent.
        borrower: who has it then.
    """

    __slots__ = ("borrower", "real", "sums")

    def __init__(self, real: Tensor) -> None:
        self.real = real
        self.sums: Sums | None = None
        self.borrower: object = None

    def __call__(self, alias: Tensor) -> None:
        grad, alias.grad = alias.grad, None
        if grad is None:
            return
        if self.sums is not None:
            self.sums.of(alias).add(grad)
        else:
            torch.autograd.backward([self.real], [grad])

    def copied(self, memo: dict[int, Any]) -> Any:
        """What copy.deepcopy makes of the alias: the copy of the parameter, one for the aliases of all stages."""
        return copy.deepcopy(self.real, memo)

    def reduced(self, protocol: object) -> tuple[Any, ...]:
        """What pickle makes of the alias: the parameter."""
        return _itself, (self.real,)


def _itself(real: Tensor) -> Tensor:
    return real


@dataclass(frozen=True)
class Lent:
    """A parameter on loan.

    Attributes:
        real: the parameter.
        aliases: the alias of each stage that has one.
    """

    real: Tensor
    aliases: dict[int, nn.Parameter] = field(default_factory=dict)


#: By stage and the parameter's id.
Kept = dict[tuple[int, int], tuple[nn.Parameter, Keeper]]


class Loan:
    """The parameters lent for one pass.

    Attributes:
        layers: those of each layer of each stage that no earlier one has.
        own: ids of the aliases that were made for each stage.
    """

    def __init__(self) -> None:
        self.layers: list[list[list[Lent]]] = []
        self.own: list[set[int]] = []
        self._lent: dict[int, Lent] = {}
        self._aliases: dict[int, tuple[nn.Parameter, Keeper]] = {}
        self._modules: list[nn.Module] = []
        self._lists: list[tuple[list[Any], int, Any, Any]] = []

    def __contains__(self, x: Tensor) -> bool:
        """Whether a tensor is one of the aliases."""
        return id(x) in self._aliases

    def give_back(self) -> None:
        """Puts the parameters back."""
        for alias, keeper in self._aliases.values():
            if not _same_memory(alias, keeper.real):
                keeper.real.data = alias.data
            keeper.sums = keeper.borrower = None
            alias.grad = None
        for module in self._modules:
            held = module._parameters
            for name, found in list(held.items()):
                if id(found) in self._aliases:
                    real: Any = self._aliases[id(found)][1].real
                    held[name] = real
        for holder, index, real, alias in self._lists:
            with suppress(LookupError):  # A layer has shortened it.
                if holder[index] is alias:
                    holder[index] = real
        self._modules, self._lists, self._aliases = [], [], {}  # Last: until then, it may be done again.


# Two threads that lend the same layers at once would both find the parameters there.
_gate = gate()
_loans: weakref.WeakSet[Loan] = weakref.WeakSet()


def _recover() -> None:
    for loan in list(_loans):
        loan.give_back()


if hasattr(os, "register_at_fork"):  # No pass goes on in a child, and nobody there would give its parameters back.
    os.register_at_fork(after_in_child=_recover)


class Aliases:
    """The aliases of one model."""

    def __init__(self) -> None:
        self._kept: Kept = {}

    def of(self, parameter: Tensor) -> list[nn.Parameter]:
        """The aliases of a parameter that the last pass has used."""
        return [alias for alias, keeper in self._kept.values() if keeper.real is parameter]

    def lend(
        self, loan: Loan, stages: Sequence[Sequence[nn.Module]], sums: Sequence[Sums], borrowers: Collection[object]
    ) -> None:
        """Puts an alias in the place of every parameter that requires grad.

        Args:
            loan: a new one, to be given back whatever happens.
            stages: the layers of each.
            sums: of each stage.
            borrowers: the model, behind those that it runs inside of, if it is a layer of theirs.

        Raises:
            RuntimeError: a parameter is on loan to somebody else.
        """
        kept, self._kept = self._kept, {}
        seen: set[nn.Module] = set()
        _loans.add(loan)
        with _gate.lock:
            for stage, layers in enumerate(stages):
                loan.layers.append([[] for _ in layers])
                loan.own.append(set())
                for layer, new in zip(layers, loan.layers[-1]):
                    for module in layer.modules():
                        # A ScriptModule's own can't be changed: what it computes with are the parameters themselves.
                        if module not in seen and type(module._parameters) is dict:
                            seen.add(module)
                            self._lend(loan, kept, stage, sums[stage], module, new, borrowers)

    def _lend(
        self, loan: Loan, kept: Kept, stage: int, sums: Sums, module: nn.Module, new: list[Lent],
        borrowers: Collection[object],
    ) -> None:
        own: dict[int, nn.Parameter] = {}
        loan._modules.append(module)
        for name, real in module._parameters.items():
            if real is None or not real.requires_grad or is_lazy(real):
                continue
            lent = loan._lent.get(id(real))
            if lent is None:
                _verify_free(real, borrowers)
                lent = loan._lent[id(real)] = Lent(real)
                new.append(lent)
            if stage not in lent.aliases:
                alias, keeper = kept.get((stage, id(real)), (None, None))
                if alias is None or keeper is None or keeper.real is not real or not _same_memory(alias, real):
                    alias, keeper = _made(real)
                self._kept[stage, id(real)] = loan._aliases[id(alias)] = alias, keeper
                keeper.sums, keeper.borrower = sums, list(borrowers)[-1]
                lent.aliases[stage] = alias
                loan.own[stage].add(id(alias))
            own[id(real)] = lent.aliases[stage]
            module._parameters[name] = own[id(real)]
        for holder, index, alias in _elsewhere(module, own) if own else ():
            loan._lists.append((holder, index, holder[index], alias))
            holder[index] = alias


def _verify_free(real: Tensor, borrowers: Collection[object]) -> None:
    """Refuses an alias, unless the model is itself a layer of the one that has it on loan."""
    for hook in (real._post_accumulate_grad_hooks or {}).values():
        if isinstance(hook, Keeper) and hook.borrower is not None and hook.borrower not in borrowers:
            raise RuntimeError(
                "two models with a schedule that share layers were called at once, from two threads: expected one "
                "after the other, or layers of their own (copy.deepcopy)."
            )


def _made(real: Tensor) -> tuple[nn.Parameter, Keeper]:
    alias, keeper = nn.Parameter(real.detach()), Keeper(real)  # In the same memory, at the same version.
    if type(alias) is not type(real) and isinstance(real, nn.Parameter):
        with suppress(TypeError):  # A layer may ask for a parameter's class.
            alias.__class__ = type(real)
    vars(alias).update(vars(real), __deepcopy__=keeper.copied, __reduce_ex__=keeper.reduced)
    alias.register_post_accumulate_grad_hook(keeper)
    return alias, keeper


def _same_memory(alias: Tensor, real: Tensor) -> bool:
    if type(real) not in (Tensor, nn.Parameter):
        return type(alias) is type(real) and alias._version == real._version
    same = alias.untyped_storage()._cdata == real.untyped_storage()._cdata and alias.dtype == real.dtype
    same = same and alias.storage_offset() == real.storage_offset()
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
