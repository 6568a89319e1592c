"""ResNet with bottleneck blocks as a flat nn.Sequential: each shortcut is a skip, so a cut may go through a block."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

import splitpipe.skip


@cache
def ends(skip: Any) -> tuple[Any, Any]:
    """The two ends of a shortcut, by the skip machinery given."""

    @skip.skippable(stash=["shortcut"])
    class Keep(nn.Module):
        """Keeps a block's input for its end."""

        __qualname__ = "Keep"

        def forward(self, x: Tensor) -> Generator[Any, None, Tensor]:
            yield skip.stash("shortcut", x)
            return x

    @skip.skippable(pop=["shortcut"])
    class Add(nn.Module):
        """Adds a block's input, made fit by ``fit``, to what the block computed."""

        __qualname__ = "Add"

        def __init__(self, fit: nn.Module) -> None:
            super().__init__()
            self.fit = fit

        def forward(self, x: Tensor) -> Generator[Any, Tensor, Tensor]:
            kept = yield skip.pop("shortcut")
            fitting: Tensor = self.fit(kept)
            return x + fitting

    return Keep, Add


#: The names by which pickle finds the classes.
Keep, Add = ends(splitpipe.skip)


def conv_bn(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the image's size up to its stride, and its norm."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(outputs)]


def bottleneck(inputs: int, inner: int, stride: int, skip: Any) -> list[nn.Module]:
    """The layers of a block: 1x1 to ``inner`` channels, 3x3, 1x1 to four times as many, and the shortcut."""
    keep, add = ends(skip)
    outputs = 4 * inner
    same = stride == 1 and inputs == outputs
    fit = nn.Identity() if same else nn.Sequential(*conv_bn(inputs, outputs, 1, stride))
    shortcut = skip.Namespace()
    return [
        keep().isolate(shortcut),
        *conv_bn(inputs, inner, 1),
        nn.ReLU(),
        *conv_bn(inner, inner, 3, stride),
        nn.ReLU(),
        *conv_bn(inner, outputs, 1),
        add(fit).isolate(shortcut),
        nn.ReLU(),
    ]


class Block(nn.Module):
    """A block as one layer.

    Args:
        main: what is added to the shortcut.
        fit: makes the shortcut fit.
    """

    def __init__(self, main: Sequence[nn.Module], fit: nn.Module) -> None:
        super().__init__()
        self.main = nn.Sequential(*main)
        self.fit = fit

    def forward(self, x: Tensor) -> Tensor:
        main: Tensor = self.main(x)
        return (main + self.fit(x)).relu()


def in_blocks(layers: nn.Sequential, skip: Any) -> nn.Sequential:
    """The same layers, each block as one, for who compiles layers; others' are returned as they are.

    Example:
        >>> len(in_blocks(resnet((1, 1), width=4), splitpipe.skip))
        9
    """
    keep, add = ends(skip)
    blocks: list[nn.Module] = []
    inside: list[nn.Module] | None = None
    left = iter(layers)
    for layer in left:
        if isinstance(layer, keep):
            inside = []
        elif inside is None:
            blocks.append(layer)
        elif isinstance(layer, add):
            next(left)  # A ReLU, which the block has itself.
            blocks.append(Block(inside, layer.module.fit))
            inside = None
        else:
            inside.append(layer)
    return nn.Sequential(*blocks)


def resnet(
    blocks: Sequence[int], *, width: int = 64, classes: int = 1000, skip: Any = splitpipe.skip
) -> nn.Sequential:
    """A ResNet for images (batch, 3, height, width) of any size, with eleven children a block and seven more.

    He et al., arXiv 1512.03385, section 4.1, with the stride in a block's 3x3 convolution, as torchvision and
    torchgpipe's benchmark have it.

    Args:
        blocks: blocks in each group; a group has twice the channels of the one before and half its image's size.
        width: channels of the first group's inner convolutions.
        classes: length of an output row.
        skip: a module with ``skippable``, ``stash``, ``pop`` and ``Namespace``: splitpipe's or torchgpipe's.

    Example:
        >>> import torch
        >>> model = resnet((1, 1), width=4, classes=10)
        >>> len(model), model(torch.zeros(2, 3, 32, 32)).shape
        (29, torch.Size([2, 10]))
    """
    layers: list[nn.Module] = [*conv_bn(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = width
    for group, count in enumerate(blocks):
        for number in range(count):
            layers += bottleneck(channels, width << group, 2 if group and number == 0 else 1, skip)
            channels = 4 * width << group
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resnet101(*, width: int = 64, classes: int = 1000, skip: Any = splitpipe.skip) -> nn.Sequential:
    """The ResNet of 101 layers, 370 children.

    Args:
        width: channels of the first group's inner convolutions.
        classes: length of an output row.
        skip: as in ``resnet``.

    Example:
        >>> len(resnet101(width=2))
        370
    """
    return resnet((3, 4, 23, 3), width=width, classes=classes, skip=skip)
