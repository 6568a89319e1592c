"""Layers of every kind, and inputs for them: what the promise is tried with."""
from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.helpers.modules import module_of

Pair = namedtuple("Pair", ["left", "right"])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x * x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # Twice on purpose: each access unpacks all that was saved.
        return grad * (ctx.saved_tensors[0].square() + 2 * ctx.saved_tensors[1])


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class First(nn.Module):
    """A layer whose output is the first of a tuple."""

    def __init__(self, layer: nn.Module, count: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.count)[0]


def padded(self: Any, value: tuple[Tensor, list[Tensor], list[int], list[str]]) -> Tensor:
    """Sequences of several lengths, with a number and a name for each row, and a tensor with all rows."""
    x, sequences, numbers, names = value
    found = [self.project(own).sum(0) * number * len(name) for own, number, name in
             zip(sequences, numbers, names, strict=True)]
    return x + torch.stack(found)


def spread(self: Any, xs: tuple[Tensor, ...]) -> Any:
    """Takes a tuple as a layer's arguments."""
    return self.layer(*xs)


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer = layer
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch_checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Energy(nn.Module):
    """A layer that differentiates inside its forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x = x.requires_grad_()
        (force,) = torch.autograd.grad(self.layer(x).tanh().square().sum(), x, create_graph=True)
        return x + force


class Affine(nn.Module):
    """Writes to a buffer, whose value it reads, in each forward of its own stage; eval mode reads alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))
        self.register_buffer("shift", torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


class Codebook(nn.Module):
    """Reads a buffer for a choice, which has no gradient, then moves it in place; the choice stays the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.moves = nn.Parameter(torch.rand(5, width))
        self.register_buffer("codes", 3 * torch.randn(5, width))

    def forward(self, x: Tensor) -> Tensor:
        near = (x @ self.codes.T).argmax(-1)  # Which saves the codes for a gradient that nobody asks for.
        with torch.no_grad():
            self.codes.div_(2.0 ** self.codes.abs().max().log2().floor())
        return x + self.moves[near]


def many(self: Any, x: Tensor) -> Any:
    """Parameters in a list and a dict, and one used twice."""
    return x @ self.several[0] @ self.several[1] @ self.several[0] * self.named["a"]


class Sum(nn.Module):
    """Two parameters whose gradients are one memory."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.view = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 3)), view

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.view(self.a) + self.view(self.b))


def tied() -> list[nn.Module]:
    """The embedding is the head, too."""
    embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = embedding.weight
    return [embedding, nn.Linear(6, 6), nn.Tanh(), head]


def rows(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *shape)


def tokens(size: int) -> Tensor:
    return torch.randint(0, 11, (size, 5))


#: By name: the layers, and an input of so many rows.
LAYERS: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[int], Any]]] = {
    "linear": (lambda: [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)], rows(6)),
    "linear 3d": (lambda: [nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4, bias=False)], rows(3, 6)),
    "bilinear": (lambda: [Apply(lambda x: (x, x * x)), module_of(spread, layer=nn.Bilinear(6, 6, 4)), nn.Linear(4, 2)],
                 rows(6)),
    "conv1d": (lambda: [nn.Conv1d(3, 4, 3, padding=1), nn.SiLU(), nn.Conv1d(4, 2, 2, stride=2)], rows(3, 8)),
    "conv2d": (lambda: [nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, dilation=2)],
               rows(3, 7, 7)),
    "conv3d": (lambda: [nn.Conv3d(2, 3, 2), nn.Hardswish(), nn.Conv3d(3, 2, 2, bias=False)], rows(2, 4, 4, 4)),
    "conv_transpose1d": (lambda: [nn.ConvTranspose1d(3, 4, 3, stride=2), nn.ReLU(), nn.ConvTranspose1d(4, 2, 2)],
                         rows(3, 5)),
    "conv_transpose2d": (lambda: [nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), nn.Tanh(),
                                  nn.ConvTranspose2d(4, 2, 2, groups=2)], rows(3, 4, 4)),
    "conv_transpose3d": (lambda: [nn.ConvTranspose3d(2, 3, 2), nn.Tanh(), nn.ConvTranspose3d(3, 1, 2)],
                         rows(2, 3, 3, 3)),
    "pooling": (lambda: [nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten()], rows(3, 8, 8)),
    "embedding": (lambda: [nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 6), nn.Sigmoid()], tokens),
    "norms": (lambda: [nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6), nn.Unflatten(1, (6, 1)), nn.GroupNorm(2, 6)],
              rows(6)),
    "instance norm": (lambda: [nn.InstanceNorm1d(3, affine=True), nn.LocalResponseNorm(2), nn.Conv1d(3, 3, 1)],
                      rows(3, 6)),
    "batch norm, eval": (lambda: [nn.BatchNorm1d(6).eval(), nn.Linear(6, 6), nn.BatchNorm1d(6).eval()], rows(6)),
    "lstm": (lambda: [First(nn.LSTM(6, 5, batch_first=True, bidirectional=True)), nn.Linear(10, 4)], rows(3, 6)),
    "gru": (lambda: [First(nn.GRU(6, 5, 2, batch_first=True)), nn.Linear(5, 4)], rows(3, 6)),
    "attention": (lambda: [First(nn.MultiheadAttention(8, 2, batch_first=True), 3), nn.Linear(8, 4)], rows(4, 8)),
    "transformer": (lambda: [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
                             nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)],
                    rows(4, 8)),
    "weight norm": (lambda: [parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2)], rows(6)),
    "orthogonal": (lambda: [parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2)], rows(6)),
    "custom function": (lambda: [nn.Linear(6, 6), Apply(Cube.apply), nn.Linear(6, 6), Apply(Cube.apply)], rows(6)),
    "in place": (lambda: [nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)], rows(6)),
    "in place, first in every stage": (
        lambda: [Apply(lambda x: x.mul_(2)), nn.Linear(6, 6), Apply(lambda x: x.add_(1)), nn.Linear(6, 6)], rows(6)),
    "views": (lambda: [nn.Flatten(), Apply(lambda x: x.view(-1, 2, 3).transpose(1, 2)), nn.Linear(2, 4),
                       Apply(lambda x: x[..., 1:])], rows(2, 3)),
    "identity": (lambda: [nn.Identity(), nn.Identity(), nn.Linear(6, 6), nn.Identity()], rows(6)),
    "integers": (lambda: [Apply(lambda x: x + 1), nn.Embedding(12, 4), Apply(lambda x: (x, x.argmax(-1))),
                          Apply(lambda p: (p[0] * 2, p[1] + 1))], tokens),
    "no gradient through a stage": (
        lambda: [nn.Linear(6, 6), Apply(lambda x: x.detach() * 2), nn.Linear(6, 6), nn.Tanh()], rows(6)),
    "nothing to train": (lambda: [Apply(lambda x: x * 2), nn.Tanh(), nn.Softmax(-1)], rows(6)),
    "complex": (lambda: [Apply(lambda x: torch.complex(x, x * 2)), nn.Linear(6, 4, dtype=torch.complex128),
                         Apply(lambda x: x * x.conj())], rows(6)),
    "single": (lambda: [nn.Linear(6, 6).float(), nn.Tanh(), nn.Linear(6, 2).float()],
               lambda size: torch.randn(size, 6, dtype=torch.float32)),
    "torch.utils.checkpoint": (lambda: [Checkpointed(nn.Linear(6, 6), False), nn.Tanh(),
                                        Checkpointed(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), False)], rows(6)),
    "torch.utils.checkpoint, reentrant": (
        lambda: [nn.Linear(6, 6), Checkpointed(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), True), nn.Tanh(),
                 Checkpointed(nn.Linear(6, 6), True)], rows(6)),
    "gradient inside forward": (lambda: [nn.Linear(6, 6), Energy(6), Energy(6), nn.Tanh()], rows(6)),
    "buffers": (lambda: [Affine(6), nn.Linear(6, 6), Affine(6)], rows(6)),
    "codebook": (lambda: [nn.Linear(6, 6), Codebook(6), nn.Linear(6, 6), Codebook(6)], rows(6)),
    "tuple": (lambda: [Apply(lambda x: (x, x * 2)), Apply(lambda p: (p[0].sin(), p[1] + p[0])),
                       Apply(lambda p: p[0] * p[1])], rows(6)),
    "dict": (lambda: [Apply(lambda x: {"a": x, "b": [x * 2, None]}), Apply(lambda d: {**d, "c": d["a"] * 3}),
                      Apply(lambda d: (d["a"] + d["b"][0], d["c"]))], rows(6)),
    "namedtuple": (lambda: [Apply(lambda x: Pair(x.tanh(), 3)), nn.Sequential(Apply(lambda p: p), nn.Identity()),
                            Apply(lambda p: Pair(p.left * p.right, "text"))], rows(6)),
    "nested input": (lambda: [Apply(lambda d: (d["x"] * d["scale"], d["y"][0])), Apply(lambda p: p[0] + p[1])],
                     lambda size: {"x": torch.randn(size, 3), "y": [torch.randn(size, 3), None], "scale": 2}),
    "one thing per row": (lambda: [module_of(padded, project=nn.Linear(6, 6)), nn.Linear(6, 2)], lambda size: (
        torch.randn(size, 6), [torch.randn(2 + i % 3, 6) for i in range(size)], [*range(1, size + 1)],
        ["ab" * (1 + i % 2) for i in range(size)],
    )),
    "time first": (lambda: [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), First(nn.LSTM(8, 5)), nn.Linear(5, 4),
                            Apply(lambda x: x.transpose(0, 1))],  # As the losses of these tests want it.
                   lambda size: torch.randn(3, size, 8)),
    "states": (lambda: [Apply(lambda d: (d["x"], d["states"].tanh())), Apply(lambda p: p[0] + p[1].sum(0)),
                        nn.Linear(6, 4)],
               lambda size: {"x": torch.randn(size, 6), "states": torch.randn(2, size, 6)}),
    "the same tensor twice": (lambda: [nn.Linear(6, 6), Apply(lambda x: (x, x)), Apply(lambda p: p[0] * p[1])],
                              rows(6)),
    "frozen": (lambda: [nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 6),
                        nn.Linear(6, 6).requires_grad_(False)], rows(6)),
}
#: Those whose stages share parameters, which are on one device then, and others that are tried on the CPU alone.
ON_THE_CPU: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[int], Any]]] = {
    "tied": (tied, tokens),
    "embedding bag": (lambda: [nn.EmbeddingBag(11, 6), nn.Linear(6, 6), nn.Tanh()], tokens),
    "a layer in two places": (lambda: [nn.Linear(6, 6), nn.Tanh()] * 2, rows(6)),
    "mixed types": (lambda: [Affine(6), Apply(Tensor.float), Affine(6).float(), Apply(Tensor.double), nn.Linear(6, 2)],
                    rows(6)),
    "lists of parameters": (lambda: [nn.Linear(6, 6), module_of(
        many, several=nn.ParameterList([torch.randn(6, 6) for _ in range(2)]),
        named=nn.ParameterDict({"a": torch.randn(6)})), nn.Tanh()], rows(6)),
    "gradients of one memory": (lambda: [nn.Linear(6, 6), Sum(lambda w: w.view(6)), Sum(lambda w: w.t().reshape(6)),
                                         Sum(torch.flatten)], rows(6)),
}
#: Where the batch is not the first dimension: ``batched=``.
BATCHED: dict[str, Any] = {"time first": 1, "states": {"states": 1}}


def batched_of(name: str, by: str) -> Any:
    """``batched=`` for the layers of that name; by cuts their value is an argument."""
    found = BATCHED.get(name)
    return {"value": found} if by == "cuts" and found is not None else found
