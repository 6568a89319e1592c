"""U-Net (B, C) as a flat nn.Sequential: the long skips between its two arms bypass all layers in between."""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe.skip


@cache
def ends(skip: Any) -> tuple[Any, Any]:
    """The two ends of a long skip, by the skip machinery given."""

    @skip.skippable(stash=["skip"])
    class Keep(nn.Module):
        """Keeps what a level computed on the way down."""

        __qualname__ = "Keep"

        def forward(self, x: Tensor) -> Generator[Any, None, Tensor]:
            yield skip.stash("skip", x)
            return x

    @skip.skippable(pop=["skip"])
    class Concat(nn.Module):
        """Puts channels kept on the way down beside those that come up, which halving may have left too small."""

        __qualname__ = "Concat"

        def forward(self, x: Tensor) -> Generator[Any, Tensor, Tensor]:
            kept = yield skip.pop("skip")
            missing = [there - here for there, here in zip(kept.shape[2:], x.shape[2:])]
            if any(missing):
                x = F.pad(x, (0, missing[1], 0, missing[0]))
            return torch.cat((x, kept), dim=1)

    return Keep, Concat


#: The names by which pickle finds the classes.
Keep, Concat = ends(splitpipe.skip)


def convolutions(number: int, inputs: int, inner: int, outputs: int, dropout: float) -> list[nn.Module]:
    """The layers of a level: convolutions with a dropout, a norm and an activation each."""
    layers: list[nn.Module] = []
    for before, after in pairwise([inputs] + [inner] * (number - 1) + [outputs]):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.Dropout2d(dropout),
            nn.InstanceNorm2d(after),
            nn.LeakyReLU(),
        ]
    return layers


def unet(
    depth: int,
    num_convs: int,
    base_channels: int,
    input_channels: int = 3,
    output_channels: int = 1,
    *,
    dropout: float = 0.1,
    skip: Any = splitpipe.skip,
) -> nn.Sequential:
    """A U-Net, from images (batch, input_channels, height, width) to (batch, output_channels, height, width).

    Ronneberger et al., arXiv 1505.04597, in the form of torchgpipe's benchmarks, where it is U-Net (B, C) of depth 5::

        level 0   convolutions -> keep                            concat -> convolutions -> output
        level 1           halve   convolutions -> keep    concat -> convolutions   double
        below                             halve   convolutions   double

    Args:
        depth: levels; the image is halved once a level, and at least two pixels are to be left.
        num_convs: B, convolutions a level and arm, and below.
        base_channels: C, channels of level 0, doubled at each level; even.
        input_channels: channels of the input.
        output_channels: channels of the output.
        dropout: probability in [0, 1) that a channel is dropped after a convolution.
        skip: a module with ``skippable``, ``stash``, ``pop`` and ``Namespace``: splitpipe's or torchgpipe's.

    Raises:
        ValueError: ``depth`` or ``num_convs`` is less than 1, or ``base_channels`` is odd.

    Example:
        >>> model = unet(2, 1, 4)
        >>> len(model), model(torch.zeros(3, 3, 16, 16)).shape
        (29, torch.Size([3, 1, 16, 16]))
    """
    if depth < 1 or num_convs < 1 or base_channels % 2:
        raise ValueError(
            f"found depth {depth}, num_convs {num_convs}, base_channels {base_channels}: expected depth and num_convs "
            "of 1 or more, and even base_channels, which the last level halves. Change the one that differs."
        )
    keep, concat = ends(skip)
    namespaces = [skip.Namespace() for _ in range(depth)]
    layers: list[nn.Module] = []
    channels = input_channels
    for level, namespace in enumerate(namespaces):
        inner = base_channels << level
        layers += convolutions(num_convs, channels, inner, inner, dropout)
        layers += [keep().isolate(namespace), nn.MaxPool2d(2)]
        channels = inner
    layers += convolutions(num_convs, channels, 2 * channels, channels, dropout)
    for level, namespace in reversed(list(enumerate(namespaces))):
        layers += [nn.Upsample(scale_factor=2), concat().isolate(namespace)]
        half = (base_channels << level) // 2
        layers += convolutions(num_convs, 2 * channels, half, half, dropout)
        channels = half
    return nn.Sequential(*layers, nn.Conv2d(channels, output_channels, 1, bias=False))
