"""Real text that every CPython ships, as bytes to predict: the help topics of pydoc."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor


def load() -> tuple[Tensor, Tensor]:
    """The text as uint8, cut in two: what to train on, and the last tenth, held out.

    The topics come in sorted order, so the text depends only on the Python version.

    Example:
        >>> train, held_out = load()
        >>> len(train) > 8 * len(held_out) > 0
        True
    """
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(data) - len(data) // 10
    return data[:cut], data[cut:]


def batch(data: Tensor, rows: int, context: int) -> tuple[Tensor, Tensor]:
    """Random windows of ``data`` and, for each of their bytes, the byte that follows.

    Args:
        data: bytes, more than ``context`` of them.
        rows: number of windows.
        context: length of a window, in bytes.

    Returns:
        Inputs and targets, int64, both (rows, context); drawn with the CPU's default generator.

    Example:
        >>> inputs, targets = batch(torch.arange(100), rows=4, context=8)
        >>> torch.equal(targets, inputs + 1)
        True
    """
    windows = data.unfold(0, context + 1, 1)
    chosen = windows[torch.randint(len(windows), (rows,))].long()
    return chosen[:, :-1], chosen[:, 1:]


def windows(data: Tensor, rows: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """All of ``data`` once, in order, as inputs and targets of at most ``rows`` windows each.

    What is left over when the windows are full is dropped.

    Example:
        >>> [inputs.shape[0] for inputs, _ in windows(torch.arange(41), rows=4, context=8)]
        [4, 1]
    """
    count = (len(data) - 1) // context
    inputs = data[: count * context].view(count, context).long()
    targets = data[1 : count * context + 1].view(count, context).long()
    return list(zip(torch.split(inputs, rows), torch.split(targets, rows), strict=True))
