"""Plain tensors, and values between stages that share a storage: to read them is right, to write to one is an error."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from splitpipe.core.tensors import is_plain, sharing, storage_of


class Own(Tensor):
    pass


def test_plain_are_dense_tensors_and_parameters_and_no_others() -> None:
    x = torch.eye(3)
    assert is_plain(x) and is_plain(nn.Parameter(x)) and is_plain(x.t()) and is_plain(nn.Buffer(x))
    nested = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
    assert not any(map(is_plain, (x.to_sparse(), nested, x.as_subclass(Own))))


def test_a_storage_is_that_of_all_its_views_and_of_no_other_tensor() -> None:
    x = torch.rand(4, requires_grad=True)
    assert storage_of(x) == storage_of(x.detach()) == storage_of(x.data[2:]) == storage_of(x.detach().view(torch.int32))
    assert storage_of(x) not in (storage_of(x.clone()), storage_of(torch.rand(4)), 0)
    assert storage_of(x.to_sparse()) == storage_of(x.as_subclass(Own)) == 0


def test_sharing_finds_tensors_with_a_common_or_tainted_storage() -> None:
    x, y = torch.rand(4), torch.rand(4)
    assert sharing([x, y, None, 3]) == sharing([x]) == sharing([]) == frozenset()
    assert sharing([x, y, x[1:], None]) == {0, 2} and sharing([*x.chunk(2)]) == {0, 1}
    assert sharing([x], [x[:1]]) == {0} and sharing([y, x], [x[:1], x[1:]]) == {1}
    assert sharing([x, x[5:]]) == sharing([x, x.as_subclass(Own)]) == frozenset(), "empty, or not known to share"
