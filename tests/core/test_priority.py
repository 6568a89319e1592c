"""Sequence numbers: what a thread reserves, no node of its own gets."""
from __future__ import annotations

import threading
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.overrides import TorchFunctionMode

from splitpipe.core.graph import rank, rank_of, reserve


def test_a_tensor_s_node_takes_the_number_it_is_given() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert rank_of(x) == 0
    rank(y, 7)
    assert rank_of(y) == 7
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]


def test_a_thread_makes_no_node_with_a_reserved_number() -> None:
    found: list[int] = []

    def work() -> None:
        with torch.no_grad():
            reserve(40)
        found.append(_get_sequence_nr())
        reserve(30)
        found.append(_get_sequence_nr())
        found.append(rank_of(torch.ones(1, requires_grad=True) * 2))

    thread = threading.Thread(target=work)  # A thread counts its own.
    thread.start()
    thread.join()
    assert found == [40, 40, 40]


class Quiet(TorchFunctionMode):
    """Runs every function without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        with torch.no_grad():
            return func(*args, **(kwargs or {}))


def test_reserving_ends_in_inference_mode_and_is_seen_by_no_mode() -> None:
    found: list[int] = []
    quiet = Quiet()

    def work() -> None:
        with torch.inference_mode(), quiet:
            before = quiet.seen
            reserve(9)
            found.extend([_get_sequence_nr(), quiet.seen - before])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [9, 0]
