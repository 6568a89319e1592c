"""The caller's tensors go to the stages' devices; which of them stay. Values: tests/devices."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitpipe.batch.division import Division, collected, undivided
from splitpipe.batch.moving import Moves

#: Stands for an accelerator: tensors go there, and have no values.
META = torch.device("meta")
CPU = torch.device("cpu")


def kinds(division: Division) -> list[Any]:
    return [leaf.device.type if isinstance(leaf, Tensor) else leaf for leaf in division.leaves]


def test_a_batch_on_the_cpu_goes_to_the_first_stage_as_a_whole() -> None:
    given = undivided((torch.ones(2, 3), [torch.tensor(2), "kept"]), 2)
    assert kinds(Moves().input(given, [META])) == ["meta", "meta", "kept"]


def test_beside_a_tensor_on_a_stages_device_those_on_the_cpu_stay() -> None:
    given = undivided((torch.ones(2, 3, device=META), torch.tensor([1, 2])), 2)
    assert Moves().input(given, [META]) is given


def test_what_is_where_it_belongs_is_no_copy() -> None:
    given = undivided((torch.ones(2, 3), None), 2)
    moves = Moves()
    assert moves.input(given, [CPU]) is given and moves.target(given, CPU) is given


def test_a_tensor_that_microbatches_have_whole_stays_one() -> None:
    table = torch.ones(5)
    given = collected([(torch.ones(2, 3), table), (torch.ones(1, 3), table)], [2, 1])
    found = Moves().input(given, [META])
    assert found.leaves[1] is found.leaves[3] and found.leaves[0] is not found.leaves[2]
    assert found.whole == given.whole and found.rows == given.rows


def test_a_target_goes_to_the_last_stage_whatever_is_beside_it() -> None:
    given = undivided((torch.ones(2, 3, device=META), torch.tensor([1, 2])), 2)
    assert kinds(Moves().target(given, META)) == ["meta", "meta"]


def test_gradients_come_back() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    [moved] = Moves().input(undivided(x, 2), [META]).leaves
    assert moved.grad_fn.next_functions[0][0].variable is x
