"""Overlap of memory is told exactly, from layouts."""
from __future__ import annotations

import itertools

import torch

from splitpipe.core.tensors import overlap, shared


def test_overlap_is_what_writing_shows() -> None:
    base = torch.zeros(24)
    views = [
        base, base[:12], base[12:], base[::2], base[1::2], base.view(4, 6)[:, :3], base.view(4, 6)[:, 3:],
        base.view(4, 6)[1], base.view(4, 6).t(), base[5:5], base[7].expand(3), base[3:4],
    ]
    for x, y in itertools.product(views, repeat=2):
        base.zero_()
        if x.numel():
            x.reshape(-1)[:0]
            for index in itertools.product(*map(range, x.shape)):
                x[index] = 1
        assert overlap(x, y) == bool(y.any()), (x.shape, x.stride(), y.shape, y.stride())


def test_tensors_of_their_own_do_not_overlap_and_detached_ones_do() -> None:
    x = torch.rand(3, requires_grad=True)
    assert overlap(x, x.detach()) and overlap(x, x.data) and overlap(x, x.detach().view(torch.int32))
    assert not overlap(x, x.clone()) and not overlap(x, torch.rand(3)) and not overlap(x, torch.eye(3).to_sparse())


def test_shared_are_those_that_overlap_another_or_a_tainted_one() -> None:
    x, y = torch.rand(4), torch.rand(4)
    assert shared([x, y, None, 3]) == frozenset()
    assert shared([x, y, x[1:], None]) == {0, 2}
    assert shared([x]) == frozenset() and shared([x], [x[:1]]) == {0}
    assert shared([*x.chunk(2)]) == frozenset()


def test_elements_of_different_sizes_in_one_block_are_taken_to_overlap() -> None:
    x = torch.zeros(4)
    assert overlap(x[:1], x[2:].view(torch.int16)) and shared([x, x.view(torch.int16)]) == {0, 1}
