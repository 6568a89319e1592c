"""The subjects of training: four models with a batch and a loss each, in named sizes, cut the same for everyone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe.skip
from benchmarks.models import resnet, text
from benchmarks.models.amoebanet import Cell, amoebanetd
from benchmarks.models.gpt import gpt
from benchmarks.models.resnet import resnet101
from benchmarks.models.unet import unet

#: One step of training. Gives the loss, or None in a process that does not see it.
Step = Callable[[], "float | None"]
Loss = Callable[[Tensor, Tensor], Tensor]


def even(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as equal as they can be.

    Example:
        >>> even(7, 3)
        [2, 2, 3]
    """
    return [layers * (stage + 1) // stages - layers * stage // stages for stage in range(stages)]


@dataclass(frozen=True)
class Preset:
    """The sizes of a model and of its batch.

    Attributes:
        build: gives the model; takes the module with ``skippable``, ``stash`` and ``pop``, if the model has skips.
        sample: shape of one row of the input.
        rows: of the batch.
        rate: what the optimizer multiplies gradients with. As low as it takes for the loss to fall smoothly, so that
            rounding does not grow from step to step.
        dtype: of the weights.
    """

    build: Callable[..., nn.Sequential]
    sample: tuple[int, ...]
    rows: int
    rate: float
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Model:
    """One of the four, in all its sizes.

    Attributes:
        batch: gives the input and the target, drawn with the CPU's default generator.
        loss: the mean over the first dimension of a batch, or of a microbatch.
        unit: what is counted in a batch.
        presets: its sizes, by name.
        costs: of each layer, in any unit.
        normed: whether it has BatchNorm, which makes a microbatch something else than a part of a batch.
    """

    batch: Callable[[Preset], tuple[Tensor, Tensor]]
    loss: Loss
    unit: str
    presets: dict[str, Preset]
    costs: Callable[[nn.Sequential, Preset], list[float]]
    normed: bool = False


@dataclass(frozen=True)
class Subject:
    """The task of a contender: a model, its size and its devices.

    Attributes:
        model: name of the model.
        preset: name of its sizes.
        chunks: number of microbatches.
        device: "cpu"; "cuda" for a GPU a stage, or the first for all; "cuda:1" for that one.
    """

    model: str
    preset: str
    chunks: int
    device: str = "cpu"

    @property
    def spec(self) -> Model:
        """The model in all its sizes."""
        return MODELS[self.model]

    @property
    def size(self) -> Preset:
        """The sizes."""
        return self.spec.presets[self.preset]

    @property
    def count(self) -> int:
        """Units in a batch."""
        return self.size.rows * (self.size.sample[0] if self.spec.unit == "tokens" else 1)

    @property
    def close(self) -> float:
        """How far losses may be apart, relatively.

        They are means over a batch or over its microbatches, after steps whose gradients were summed in any order. On a
        GPU, products of float32 have TF32's eleven bits.
        """
        if self.size.dtype == torch.bfloat16:
            return 5e-3
        return 1e-5 if self.device == "cpu" else 1e-3


@dataclass(frozen=True)
class Case:
    """A model with a batch: the same weights and the same batch every time.

    Attributes:
        subject: which model, how large.
        layers: the model, on the CPU.
        input: the batch.
        target: of the whole batch.
        skip: what the model's skips are made with.
    """

    subject: Subject
    layers: nn.Sequential
    input: Tensor
    target: Tensor
    skip: Any

    def balance(self, stages: int) -> list[int]:
        """Layers a stage, the same for all contenders: costs as even as can be, with no residual block cut."""
        costs = self.subject.spec.costs(self.layers, self.subject.size)
        ends = list(accumulate(whole(self.layers, self.skip)))
        sums = [0.0, *accumulate(costs)]
        counts = divided([sums[end] - sums[start] for start, end in zip([0, *ends], ends)], stages)
        cuts = [ends[last - 1] for last in accumulate(counts)]
        return [end - start for start, end in zip([0, *cuts], cuts)]


def case(subject: Subject, skip: Any = splitpipe.skip) -> Case:
    """Builds the model.

    Args:
        subject: which one, how large.
        skip: a module with ``skippable``, ``stash``, ``pop`` and ``Namespace``: splitpipe's or torchgpipe's.
    """
    if subject.device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32, as convolutions have it anyway.
    torch.manual_seed(0)
    more = {} if subject.model == "gpt" else {"skip": skip}
    layers = subject.size.build(**more).to(subject.size.dtype)
    calm(layers, skip)
    return Case(subject, layers, *subject.spec.batch(subject.size), skip)


def calm(layers: nn.Sequential, skip: Any) -> None:
    """Sets eps to 0.01 in all norms, and weight to 0.2 in those that end a ResNet block or are in an AmoebaNet cell.

    Otherwise norms of few values, a hundred layers deep, make the gradient of float32 mostly rounding, and losses could
    be compared before the first update alone. Steps take as long as before. (Goyal et al., arXiv 1706.02677, section
    5.1, let norms that end a block begin with zeros.)
    """
    norms = [layer for layer in layers.modules() if isinstance(layer, nn.BatchNorm2d)]
    ends = [norm for norm, layer in pairwise(layers) if isinstance(layer, resnet.ends(skip)[1])]
    sums = [each for cell in layers if isinstance(cell, Cell) for each in cell.operations.modules()]
    for norm in norms:
        norm.eps = 1e-2
        if norm in ends or norm in sums:
            nn.init.constant_(norm.weight, 0.2)


def sgd(subject: Subject, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of that module."""
    return torch.optim.SGD(module.parameters(), lr=subject.size.rate)


def divided(costs: Sequence[float], parts: int) -> list[int]:
    """Lengths of the most even runs: of the least largest sum, then the least squares of sums, then those of lengths.

    Example:
        >>> divided([1, 1, 1, 3], 2)
        [3, 1]
    """
    sums = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, float, int, list[int]]] = {0: (0.0, 0.0, 0, [])}
    for _ in range(parts):
        ways: dict[int, list[tuple[float, float, int, list[int]]]] = {}
        for start, (most, squares, spread, lengths) in best.items():
            for end in range(start + 1, len(sums)):
                cost, length = sums[end] - sums[start], end - start
                way = max(most, cost), squares + cost**2, spread + length**2, [*lengths, length]
                ways.setdefault(end, []).append(way)
        best = {end: min(those) for end, those in ways.items()}
    return best[len(costs)][3]


def whole(layers: nn.Sequential, skip: Any) -> list[int]:
    """Lengths of the runs of layers that stay together: a ResNet's blocks, which cost a copy where they are cut; or 1.

    So stages hand on one tensor, and pipelines without skips can have the same ones.
    """
    keep, add = resnet.ends(skip)
    lengths: list[int] = []
    inside = False
    for layer in layers:
        lengths[-1:] = [lengths[-1] + 1] if inside else [*lengths[-1:], 1]
        inside = isinstance(layer, keep) or (inside and not isinstance(layer, add))
    return lengths


def blocks(layers: nn.Sequential, preset: Preset) -> list[float]:
    """One for each layer but the first and the last, which embed and classify."""
    return [0.0, *[1.0] * (len(layers) - 2), 0.0]


@torch.no_grad()
def operations(layers: nn.Sequential, preset: Preset) -> list[float]:
    """Multiplications in each layer's convolutions and linear layers, for one row.

    torch.utils.flop_counter finds twice as many, and loads a compiler for it.
    """
    counts: list[float] = []

    def count(layer: nn.Module, inputs: object, output: Tensor) -> None:
        assert isinstance(layer.weight, Tensor)
        counts[-1] += output.numel() * layer.weight[0].numel()

    heavy = [layer for layer in layers.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in heavy]
    value = torch.zeros(1, *preset.sample)
    layers.eval()  # The norms' statistics stay as they are.
    for layer in layers:
        counts.append(0.0)
        value = layer(value)
    layers.train()
    for hook in hooks:
        hook.remove()
    return counts


def sentences(preset: Preset) -> tuple[Tensor, Tensor]:
    """Windows of a text, and the byte that follows each of theirs."""
    return text.batch(text.load()[0], preset.rows, *preset.sample)


def classified(preset: Preset) -> tuple[Tensor, Tensor]:
    """Noise, and a class for each image."""
    return torch.randn(preset.rows, *preset.sample), torch.randint(CLASSES, (preset.rows,))


def masked(preset: Preset) -> tuple[Tensor, Tensor]:
    """Noise, and a mask of where it is bright over five pixels by five."""
    images = torch.randn(preset.rows, *preset.sample)
    bright = F.avg_pool2d(images.mean(1, keepdim=True), 5, stride=1, padding=2) > 0
    return images, bright.float()


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every byte."""
    return F.cross_entropy(output.flatten(0, -2).float(), target.flatten())


CLASSES = 10
GPTS = {
    "tiny": Preset(partial(gpt, width=8, heads=2, layers=4, context=4, dropout=0.0), (4,), 8, 0.01),
    "quick": Preset(partial(gpt, width=256, heads=4, layers=4, context=64, dropout=0.0), (64,), 32, 0.01),
    "small": Preset(partial(gpt, width=256, heads=4, layers=8, context=128, dropout=0.0), (128,), 32, 0.01),
    "large": Preset(
        partial(gpt, width=1024, heads=16, layers=24, context=1024, dropout=0.0), (1024,), 32, 0.01, torch.bfloat16
    ),
}
RESNETS = {
    "tiny": Preset(partial(resnet.resnet, (1, 1, 1, 1), width=4, classes=CLASSES), (3, 64, 64), 8, 1e-3),
    "quick": Preset(partial(resnet101, width=16, classes=CLASSES), (3, 64, 64), 16, 1e-5),
    "small": Preset(partial(resnet101, width=32, classes=CLASSES), (3, 64, 64), 16, 1e-5),
    "large": Preset(partial(resnet101, classes=CLASSES), (3, 224, 224), 64, 1e-5),
}
UNETS = {
    "tiny": Preset(partial(unet, 2, 1, 4, dropout=0.0), (3, 16, 16), 8, 0.01),
    "quick": Preset(partial(unet, 5, 2, 8, dropout=0.0), (3, 96, 96), 16, 1e-3),
    "small": Preset(partial(unet, 5, 2, 16, dropout=0.0), (3, 96, 96), 16, 1e-3),
    "large": Preset(partial(unet, 5, 5, 64, dropout=0.0), (3, 192, 192), 32, 1e-3),
}
AMOEBANETS = {
    "tiny": Preset(partial(amoebanetd, layers=3, filters=16, classes=CLASSES), (3, 64, 64), 8, 1e-3),
    "quick": Preset(partial(amoebanetd, layers=9, filters=32, classes=CLASSES), (3, 64, 64), 16, 1e-6),
    "small": Preset(partial(amoebanetd, layers=18, filters=64, classes=CLASSES), (3, 64, 64), 16, 1e-6),
    "large": Preset(partial(amoebanetd, layers=18, filters=256, classes=CLASSES), (3, 224, 224), 64, 1e-6),
}
MODELS = {
    "gpt": Model(sentences, of_tokens, "tokens", GPTS, blocks),
    "resnet101": Model(classified, F.cross_entropy, "images", RESNETS, operations, normed=True),
    "unet": Model(masked, F.binary_cross_entropy_with_logits, "images", UNETS, operations),
    "amoebanet": Model(classified, F.cross_entropy, "images", AMOEBANETS, operations, normed=True),
}
PRESETS = sorted(GPTS)
WHERE = "cpu; cuda: a GPU a stage, or the first for all; cuda:1: that one (cpu)"


def device(text: str) -> str:
    """Checks the option of that name.

    Raises:
        ValueError: it is none.

    Example:
        >>> device("cuda:1")
        'cuda:1'
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError(text)
    return text
