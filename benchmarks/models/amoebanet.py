"""AmoebaNet-D (L, D) as a flat nn.Sequential: a cell takes and gives its two forerunners' outputs as a tuple."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe.skip

States = tuple[Tensor, Tensor]
Sizes = tuple[int, int]


def conv(inputs: int, outputs: int, size: Sizes = (1, 1), stride: int | Sizes = 1) -> nn.Sequential:
    """ReLU, convolution and norm, in this order; the image keeps its size up to the stride."""
    padding = size[0] // 2, size[1] // 2
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inputs, outputs, size, stride, padding, bias=False), nn.BatchNorm2d(outputs)
    )


def conv_3x3(channels: int, stride: int) -> nn.Module:
    """A 3x3 convolution on a quarter of the channels."""
    few = channels // 4
    return nn.Sequential(conv(channels, few), conv(few, few, (3, 3), stride), conv(few, channels))


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """A 7x7 convolution in two factors, on a quarter of the channels."""
    few = channels // 4
    wide, high = conv(few, few, (1, 7), (1, stride)), conv(few, few, (7, 1), (stride, 1))
    return nn.Sequential(conv(channels, few), wide, high, conv(few, channels))


def average(channels: int, stride: int) -> nn.Module:
    """The mean of 3x3 pixels, or of those inside the image."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


class Halve(nn.Module):
    """Halves an image: one half of the channels sees its even pixels, the other its odd ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        result: Tensor = self.norm(torch.cat((self.even(x), self.odd(shifted)), dim=1))
        return result


#: A cell's operations by name, each made of channels and stride. The genotype's 3x3 maximum is an average in
#: torchgpipe's benchmark. So it is here: a maximum also keeps indices, and memory could not be compared.
OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda channels, stride: nn.Identity(),
    "1x1": lambda channels, stride: conv(channels, channels, (1, 1), stride),
    "3x3": conv_3x3,
    "1x7_7x1": conv_1x7_7x1,
    "avg_pool_3x3": average,
    "max_pool_2x2": lambda channels, stride: nn.MaxPool2d(2, stride),
    "max_pool_3x3": average,
}


@dataclass(frozen=True)
class Genotype:
    """How a cell is wired: node k + 2 is the sum of two operations, each on an earlier node; 0 and 1 are the inputs."""

    sums: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    outputs: tuple[int, ...]
    stride: int


#: The cells of Real et al., arXiv 1802.01548, as in tensorflow/tpu's amoeba_net: there a normal cell gives nodes 0, 3,
#: 4 and 6, and GPipe's published numbers of parameters are those of such cells.
NORMAL = Genotype(
    (
        (("1x1", 1), ("max_pool_3x3", 1)),
        (("none", 1), ("1x7_7x1", 0)),
        (("1x1", 0), ("1x7_7x1", 0)),
        (("max_pool_3x3", 2), ("none", 2)),
        (("avg_pool_3x3", 1), ("1x1", 5)),
    ),
    (0, 3, 4, 6),
    1,
)
REDUCTION = Genotype(
    (
        (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
        (("none", 2), ("3x3", 1)),
        (("1x7_7x1", 2), ("max_pool_3x3", 2)),
        (("none", 3), ("max_pool_2x2", 1)),
        (("avg_pool_3x3", 2), ("1x1", 3)),
    ),
    (4, 5, 6),
    2,
)


class Cell(nn.Module):
    """One cell: from the outputs of the last layer and of the one before to its own output and the last one's.

    After the stem, where there is one output, that takes both places.
    """

    def __init__(self, genotype: Genotype, last: int, before: int, channels: int, halve: bool) -> None:
        """Takes channels of both inputs and of a node; ``halve`` says that the older input has twice the size."""
        super().__init__()
        self.genotype = genotype
        self.last = conv(last, channels)
        self.before: nn.Module = nn.Identity()
        if halve:
            self.before = Halve(before, channels)
        elif before != channels:
            self.before = conv(before, channels)
        chosen = [operation for pair in genotype.sums for operation in pair]
        self.operations = nn.ModuleList(
            OPERATIONS[name](channels, genotype.stride if node < 2 else 1) for name, node in chosen
        )

    def forward(self, states: Tensor | States) -> States:
        last, before = states if isinstance(states, tuple) else (states, states)
        nodes = [self.last(last), self.before(before)]
        operations = iter(self.operations)
        for (_, left), (_, right) in self.genotype.sums:
            nodes.append(next(operations)(nodes[left]) + next(operations)(nodes[right]))
        return torch.cat([nodes[k] for k in self.genotype.outputs], dim=1), last


class Classify(nn.Module):
    """The mean over the image, and a linear layer to logits (batch, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(channels, classes)

    def forward(self, states: States) -> Tensor:
        logits: Tensor = self.logits(states[0].mean((2, 3)))
        return logits


def amoebanetd(*, layers: int, filters: int, classes: int = 10, skip: Any = splitpipe.skip) -> nn.Sequential:
    """An AmoebaNet-D (L, D) for images (batch, 3, height, width), sizes multiples of 32, with ``layers + 6`` children.

    The shape of GPipe's and torchgpipe's benchmarks (Huang et al., arXiv 1811.06965, table 1): a stem with two
    reduction cells, then three times ``layers / 3`` normal cells with a reduction cell between any two.

    Args:
        layers: L, the number of normal cells; a multiple of 3.
        filters: D, four times the channels of the stem; a multiple of 8.
        classes: length of an output row.
        skip: taken so that all models are built by the same call; cells pass tuples, nothing is stashed.

    Raises:
        ValueError: ``layers`` is no multiple of 3, or ``filters`` none of 8.

    Example:
        >>> model = amoebanetd(layers=3, filters=16)
        >>> len(model), model(torch.zeros(2, 3, 32, 32)).shape
        (9, torch.Size([2, 10]))
    """
    if layers < 3 or layers % 3 or filters < 8 or filters % 8:
        raise ValueError(
            f"found layers {layers}, filters {filters}: expected a multiple of 3 and one of 8. Change what is neither."
        )
    channels = last = before = filters // 4
    children: list[nn.Module] = [conv(3, channels, (3, 3), stride=2)]
    normal = [NORMAL] * (layers // 3)
    halved = False
    for genotype in [REDUCTION, REDUCTION, *normal, REDUCTION, *normal, REDUCTION, *normal]:
        channels *= genotype.stride
        children.append(Cell(genotype, last, before, channels, halved))
        last, before = channels * len(genotype.outputs), last
        halved = genotype.stride == 2
    return nn.Sequential(*children, Classify(last, classes))
