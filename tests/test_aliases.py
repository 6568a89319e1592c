"""Parameters on loan: aliases in every place where a layer finds its parameter, and the parameters back afterwards."""
from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe.aliases import Aliases, Loan
from splitpipe.aliases import _recover as recover_in_child
from splitpipe.deferral.sums import Sums


def lend(
    aliases: Aliases, *stages: list[nn.Module], borrowers: tuple[object, ...] = ("it",)
) -> tuple[Loan, list[Sums]]:
    loan, sums = Loan(), [Sums() for _ in stages]
    aliases.lend(loan, stages, sums, borrowers)
    return loan, sums


def test_an_alias_has_the_memory_and_the_version_of_its_parameter() -> None:
    layer = nn.Linear(2, 2)
    real = layer.weight
    loan, _ = lend(Aliases(), [layer])
    alias = layer.weight
    assert alias is not real and alias in loan and real not in loan and isinstance(alias, nn.Parameter)
    with torch.no_grad():
        real.fill_(3.0)
    assert alias.data_ptr() == real.data_ptr() and alias._version == real._version and bool((alias == 3).all())
    loan.give_back()
    assert layer.weight is real


def test_what_autograd_accumulates_goes_to_the_sums_and_touches_no_parameter() -> None:
    layer, fired = nn.Linear(2, 2), []
    real = layer.weight
    real.register_hook(fired.append)
    loan, (sums,) = lend(Aliases(), [layer])
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    found = {id(leaf): total.value for leaf, total in sums}
    assert torch.equal(found[id(layer.weight)], torch.full((2, 2), 2.0))  # type: ignore[arg-type]
    assert layer.weight.grad is None and real.grad is None and not fired
    loan.give_back()


def test_a_gradient_after_the_pass_is_the_parameters() -> None:
    layer, fired = nn.Linear(2, 2), []
    layer.weight.register_hook(fired.append)
    loan, (sums,) = lend(Aliases(), [layer])
    penalty = layer.weight.sum()
    loan.give_back()
    penalty.backward()
    assert layer.weight.grad is not None and bool((layer.weight.grad == 1).all()) and len(fired) == 1
    assert not list(sums)


def test_it_is_the_same_alias_every_time_until_the_parameter_has_other_memory() -> None:
    aliases, layer, seen = Aliases(), nn.Linear(2, 2), []
    for step in range(4):
        loan, _ = lend(aliases, [layer])
        seen.append(layer.weight)
        loan.give_back()
        if step == 1:
            layer.double()
    assert seen[0] is seen[1] and seen[2] is seen[3] and seen[1] is not seen[2] and seen[2].dtype is torch.float64
    assert aliases.of(layer.weight) == [seen[3]] and not aliases.of(torch.ones(1))


def test_frozen_and_lazy_parameters_stay() -> None:
    frozen, lazy = nn.Linear(2, 2).requires_grad_(False), nn.LazyLinear(2)
    before = frozen.weight, lazy.weight
    loan, _ = lend(Aliases(), [frozen, lazy])
    assert (frozen.weight, lazy.weight) == before
    loan.give_back()


def test_each_stage_has_an_alias_of_a_tied_parameter() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    real = first.weight
    loan, _ = lend(Aliases(), [first], [second])
    assert first.weight is not second.weight and first.weight.data_ptr() == second.weight.data_ptr()
    assert [[len(new) for new in layers] for layers in loan.layers] == [[1], [0]], "released once"
    assert [len(own) for own in loan.own] == [1, 1]
    loan.give_back()
    assert first.weight is real and second.weight is real


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.all: list[Any] = [self.w, None, weakref.ref(self.w)]


def test_lists_of_parameters_and_of_weak_references_hold_the_alias() -> None:
    layer = Listed()
    real = layer.w
    loan, _ = lend(Aliases(), [layer])
    assert layer.all[0] is layer.w and layer.all[2]() is layer.w and layer.w is not real
    loan.give_back()
    assert layer.all[0] is real and layer.all[2]() is real and layer.w is real


def test_an_lstm_computes_with_aliases() -> None:
    layer = nn.LSTM(2, 3)
    real = layer.weight_ih_l0
    loan, (sums,) = lend(Aliases(), [layer])
    layer(torch.ones(4, 2))[0].sum().backward()
    assert len(list(sums)) == 4 and real.grad is None
    loan.give_back()
    layer(torch.ones(4, 2))[0].sum().backward()
    assert real.grad is not None


def test_a_class_and_attributes_of_a_parameter_are_the_aliases_too() -> None:
    class Marked(nn.Parameter):
        pass

    layer = nn.Module()
    real = Marked(torch.ones(2))
    real.note = "kept"  # type: ignore[attr-defined]
    layer.w = real
    loan, _ = lend(Aliases(), [layer])
    assert layer.w is not real and type(layer.w) is Marked and layer.w.note == "kept"  # type: ignore[union-attr]
    loan.give_back()


class Interrupting(dict[str, Any]):
    """Raises at the first assignment after it was armed."""

    armed = False

    def __setitem__(self, key: str, value: Any) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        super().__setitem__(key, value)


def test_a_return_that_was_interrupted_is_repeated() -> None:
    layers = [nn.Linear(2, 2) for _ in range(3)]
    reals = [layer.weight for layer in layers]
    loan, _ = lend(Aliases(), layers)
    held = Interrupting(layers[1]._parameters)
    layers[1].__dict__["_parameters"] = held
    held.armed = True
    with pytest.raises(KeyboardInterrupt):
        loan.give_back()
    loan.give_back()
    assert all(layer.weight is real for layer, real in zip(layers, reals))


def test_a_parameter_on_loan_is_lent_only_to_a_layer_of_the_borrower() -> None:
    layer = nn.Linear(2, 2)
    real = layer.weight
    outer, _ = lend(Aliases(), [layer], borrowers=("outer",))
    alias = layer.weight
    with pytest.raises(RuntimeError, match="share layers"):
        lend(Aliases(), [layer], borrowers=("other",))
    assert layer.weight is alias
    inner, _ = lend(Aliases(), [layer], borrowers=("outer", "inner"))
    assert layer.weight is not alias
    inner.give_back()
    assert layer.weight is alias
    outer.give_back()
    assert layer.weight is real


def test_what_a_layer_has_assigned_stays() -> None:
    layer = nn.Linear(2, 2)
    loan, _ = lend(Aliases(), [layer])
    own = nn.Parameter(torch.zeros(2, 2))
    layer.weight = own
    layer.bias.data = torch.full((2,), 5.0)
    loan.give_back()
    assert layer.weight is own and isinstance(layer.bias, Tensor) and layer.bias.tolist() == [5.0, 5.0]


def test_in_a_child_of_a_fork_what_is_on_loan_is_given_back() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    loan, _ = lend(Aliases(), [layer])
    assert layer.weight is not weight
    recover_in_child()
    assert layer.weight is weight
    loan.give_back()
    assert layer.weight is weight


def test_an_alias_without_a_gradient_passes_none_on() -> None:
    layer = nn.Linear(2, 2)
    loan, [sums] = lend(Aliases(), [layer])
    alias = layer.weight
    (hook,) = (alias._post_accumulate_grad_hooks or {}).values()
    hook(alias)
    loan.give_back()
    assert not list(sums) and layer.weight.grad is None
