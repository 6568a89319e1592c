"""Layers of every kind, and inputs for them: what the promise is tried with."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.helpers.modules import module_of


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


def first_of(layer: nn.Module, count: int = 1) -> nn.Module:
    """A layer whose output is the first of a tuple."""
    return module_of(lambda self, x: self.layer(*[x] * count)[0], layer=layer)  # type: ignore[no-any-return]


def padded(self: Any, value: tuple[Tensor, list[Tensor], list[int], list[str]]) -> Tensor:
    """Sequences of several lengths, with a number and a name for each row, and a tensor with all rows."""
    x, sequences, numbers, names = value
    found = [self.project(own).sum(0) * number * len(name) for own, number, name in
             zip(sequences, numbers, names, strict=True)]
    return x + torch.stack(found)


def spread(self: Any, xs: tuple[Tensor, ...]) -> Any:
    """Takes a tuple as a layer's arguments."""
    return self.layer(*xs)


def checkpointing(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed(layer: nn.Module) -> nn.Module:
    made: nn.Module = module_of(checkpointing, layer=layer)
    return made


def forced(self: Any, x: Tensor) -> Tensor:
    """A layer that differentiates inside its forward."""
    if not x.requires_grad:
        x = x.requires_grad_()
    (force,) = torch.autograd.grad(self.layer(x).tanh().square().sum(), x, create_graph=True)
    return x + force


class Hooking(nn.Linear):
    """Makes the gradient of its input twice as large."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 2)
        return super().forward(x).tanh()


def affine() -> nn.Module:
    """A layer that reads a buffer."""
    parts = {"weight": nn.Parameter(torch.rand(6)), "shift": nn.Buffer(torch.rand(6))}
    return module_of(lambda self, x: x * self.weight + self.shift, **parts)  # type: ignore[no-any-return]


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
    "conv2d": (lambda: [nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, dilation=2)],
               rows(3, 7, 7)),
    "conv_transpose2d": (lambda: [nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), nn.Tanh(),
                                  nn.ConvTranspose2d(4, 2, 2, groups=2)], rows(3, 4, 4)),
    "embedding": (lambda: [nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 6), nn.Sigmoid()], tokens),
    "norms": (lambda: [nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6), nn.Unflatten(1, (6, 1)), nn.GroupNorm(2, 6)],
              rows(6)),
    "batch norm, eval": (lambda: [nn.BatchNorm1d(6).eval(), nn.Linear(6, 6), nn.BatchNorm1d(6).eval()], rows(6)),
    "lstm": (lambda: [first_of(nn.LSTM(6, 5, batch_first=True, bidirectional=True)), nn.Linear(10, 4)], rows(3, 6)),
    "attention": (lambda: [first_of(nn.MultiheadAttention(8, 2, batch_first=True), 3), nn.Linear(8, 4)], rows(4, 8)),
    "transformer": (lambda: [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
                             nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)],
                    rows(4, 8)),
    "weight norm": (lambda: [parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2)], rows(6)),
    "custom function": (lambda: [nn.Linear(6, 6), Apply(Cube.apply), nn.Linear(6, 6), Apply(Cube.apply)], rows(6)),
    "in place": (lambda: [nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)], rows(6)),
    "in place, first in every stage": (
        lambda: [Apply(lambda x: x.mul_(2)), nn.Linear(6, 6), Apply(lambda x: x.add_(1)), nn.Linear(6, 6)], rows(6)),
    "integers": (lambda: [Apply(lambda x: x + 1), nn.Embedding(12, 4), Apply(lambda x: (x, x.argmax(-1))),
                          Apply(lambda p: (p[0] * 2, p[1] + 1))], tokens),
    "no gradient through a stage": (
        lambda: [nn.Linear(6, 6), Apply(lambda x: x.detach() * 2), nn.Linear(6, 6), nn.Tanh()], rows(6)),
    "nothing to train": (lambda: [Apply(lambda x: x * 2), nn.Tanh(), nn.Softmax(-1)], rows(6)),
    "complex": (lambda: [Apply(lambda x: torch.complex(x, x * 2)), nn.Linear(6, 4, dtype=torch.complex128),
                         Apply(lambda x: x * x.conj())], rows(6)),
    "a weight that is cast": (lambda: [nn.Linear(6, 6), module_of(lambda self, x: torch.fft.irfft(
        torch.fft.rfft(x) @ self.layer.weight.to(torch.complex128), n=6), layer=nn.Linear(4, 4)), nn.Tanh()], rows(6)),
    "torch.utils.checkpoint": (lambda: [checkpointed(nn.Linear(6, 6)), nn.Tanh(),
                                        checkpointed(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))], rows(6)),
    "gradient inside forward": (lambda: [nn.Linear(6, 6), *[module_of(forced, layer=nn.Linear(6, 6)) for _ in range(2)],
                                         nn.Tanh()], rows(6)),
    "buffers": (lambda: [affine(), nn.Linear(6, 6), affine()], rows(6)),
    "tuple": (lambda: [Apply(lambda x: (x, x * 2)), Apply(lambda p: (p[0].sin(), p[1] + p[0])),
                       Apply(lambda p: p[0] * p[1])], rows(6)),
    "dict": (lambda: [Apply(lambda x: {"a": x, "b": [x * 2, None]}), Apply(lambda d: {**d, "c": d["a"] * 3}),
                      Apply(lambda d: (d["a"] + d["b"][0], d["c"]))], rows(6)),
    "one thing per row": (lambda: [module_of(padded, project=nn.Linear(6, 6)), nn.Linear(6, 2)], lambda size: (
        torch.randn(size, 6), [torch.randn(2 + i % 3, 6) for i in range(size)], [*range(1, size + 1)],
        ["ab" * (1 + i % 2) for i in range(size)],
    )),
    "time first": (lambda: [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), first_of(nn.LSTM(8, 5)), nn.Linear(5, 4),
                            Apply(lambda x: x.transpose(0, 1))],  # As the losses of these tests want it.
                   lambda size: torch.randn(9, size, 8)),
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
    "hooks on inputs": (lambda: [nn.Linear(6, 6), Hooking(6, 6), Hooking(6, 6), nn.Linear(6, 6)], rows(6)),
    "in place, later": (lambda: [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6),
                                 Apply(lambda x: x.mul_(2).sin())], rows(6)),
    "tied": (tied, tokens),
    "a layer in two places": (lambda: [nn.Linear(6, 6), nn.Tanh()] * 2, rows(6)),
}
#: Where the batch is not the first dimension: ``batched=``.
BATCHED: dict[str, Any] = {"time first": 1, "states": {"states": 1}}


def batched_of(name: str, by: str) -> Any:
    """``batched=`` for the layers of that name; by cuts their value is an argument."""
    found = BATCHED.get(name)
    return {"value": found} if by == "cuts" and found is not None else found
