"""Random forwards: a module whose code takes one statement after the other."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.randomized_layers import WIDTH
from tests.promise.layers import Cube


@dataclass
class Hidden:
    """A block's output, in a class that pytree doesn't know."""

    y: Tensor
    x: Any = None


@dataclass
class Result:
    """An output with its loss."""

    loss: Tensor | None
    y: Tensor
    hidden: tuple[Tensor, ...]
    numbers: Tensor


@dataclass
class Frame:
    """Where a forward stands: its value, one of those kept, which one, all of them, and what it has by name."""

    h: Tensor
    one: Tensor
    which: int
    kept: list[Tensor]
    names: dict[str, Any]


class Block(nn.Module):
    """A layer, with arguments besides its input, and an output of some nesting."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, extra: Any = None, *, style: str = "", factor: float = 1.0) -> Any:
        if isinstance(extra, dict):
            extra = extra["a"][0] + extra["b"]
        if isinstance(extra, list):
            extra.append(x * factor)
            extra = None
        y = self.layer(x * factor if extra is None else x + factor * extra)
        return {"tuple": (y, None), "dict": {"y": y, "n": 3}, "dataclass": Hidden(y, x)}.get(style, y)


def loss_over(kind: str, each: Tensor, labels: Tensor) -> Tensor:
    """The loss of that kind, of the rows' losses."""
    if kind in ("mean", "sum"):
        return each.mean() if kind == "mean" else each.sum()
    counted = labels > 0
    tokens = (each * counted).sum() / counted.sum().clamp(min=1)
    return tokens if kind == "tokens" else tokens + 0.5 * each.mean()


class Part(nn.Module):
    """Blocks in a module of their own, which keeps what each of them gives in a list of its caller's."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        for block in self.blocks:
            x = block(x) + self.shift
            kept.append(x)
        return x


class Scripted(nn.Module):
    """A module whose forward does what its statements say.

    Args:
        blocks: that it calls.
        acts: the statements.
        output: the class of what it gives.
        loss: one of OWN_LOSSES.
        chunks: into how many parts its batch is cut where it stands for a pipeline.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], acts: Sequence[Any], output: str, loss: str, chunks: int = 1
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, blocks))
        self.part = Part([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("shift", torch.rand(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("sums", torch.zeros(WIDTH))
        self.acts, self.output, self.loss, self.chunks = list(acts), output, loss, chunks

    def forward(
        self, x: Tensor, rows: Tensor, *, pieces: list[Tensor], states: Tensor, mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        h = self.first(x)
        kept: list[Tensor] = []
        names: dict[str, Any] = {"rows": rows, "mask": mask, "derived": self.scale.tanh()}
        names.update(pieces=pieces, states=states)
        names["out"] = h.new_zeros(len(h), 3, *h.shape[1:])
        for act in self.acts:
            h = self._act(act, h, kept, names)
        h = self.last(h + names["out"].sum(1))
        loss = None
        if labels is not None:
            each = (h - labels.reshape(-1, *[1] * (h.dim() - 1))).square().flatten(1).mean(1)
            loss = loss_over(self.loss, each, labels)
        return self._given(loss, h, kept, rows + 1, [piece * 2 for piece in pieces])

    def _given(
        self, loss: Tensor | None, h: Tensor, kept: list[Tensor], numbers: Tensor, pieces: list[Tensor]
    ) -> Any:
        if self.output == "tuple":
            return (h, tuple(kept), numbers) if loss is None else (h, tuple(kept), numbers, loss)
        if self.output == "dict":
            return {"loss": loss, "y": h, "hidden": tuple(kept), "numbers": numbers, "text": "same",
                    "pieces": pieces}
        return Result(loss, h, tuple(kept), numbers)

    def _act(self, act: Any, h: Tensor, kept: list[Tensor], names: dict[str, Any]) -> Tensor:
        block = self.blocks[act.which % len(self.blocks)]
        one = kept[act.which % len(kept)] if kept else h
        kind = act.kind
        if kind.startswith("call"):
            return self._call(kind[5:], block, h, one, kept)
        if kind == "no grad":
            with torch.no_grad():
                extra = block(h * 1)
            return h + extra
        if kind == "checkpoint":
            return checkpoint(block, h * 1, use_reentrant=False)
        if kind == "in training":
            return block(h) if self.training else h
        if kind == "sometimes":
            if not self.training:  # In one microbatch, if the first call shows that rows depend on others.
                return block(h * 1)
            several = self.chunks > 1
            pairs = zip(h.chunk(self.chunks), names["rows"].chunk(self.chunks)) if several else [(h, names["rows"])]
            parts = [block(part * 1) if int(rows[0]) % 3 else part for part, rows in pairs]
            return torch.cat(parts) if several else parts[0]
        if kind == "part":
            return self.part(h, kept)
        return BETWEEN[kind](self, Frame(h, one, act.which, kept, names))

    @staticmethod
    def _call(style: str, block: nn.Module, h: Tensor, one: Tensor, kept: list[Tensor]) -> Tensor:
        if style == "keyword":
            return block(x=h, factor=0.5, extra=one)
        if style == "nested":
            return block(h, {"a": [one, "text"], "b": h})
        if style == "list":
            return block(h, kept)
        found = block(h, style=style)
        if style == "tuple":
            return found[0]
        return found["y"] if style == "dict" else found.y if style == "dataclass" else found


def _set(x: Tensor, function: Callable[[], object]) -> Tensor:
    """The tensor, after something was done."""
    function()
    return x


def _write_view(h: Tensor) -> Tensor:
    h = h.clone()
    h[..., :2] = h[..., 2:] * 2
    return h


def _hook(h: Tensor) -> Tensor:
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 2)
    return h


def _by_row(f: Frame, x: Tensor) -> Tensor:
    """A number of each row, to go with its values."""
    return x.to(f.h.dtype).reshape(-1, *[1] * (f.h.dim() - 1))


#: Statements that call no block: what they make of the value, and do besides.
BETWEEN: dict[str, Callable[[Any, Frame], Tensor]] = {
    "keep": lambda m, f: _set(f.h, lambda: f.kept.append(f.h)),
    "keep view": lambda m, f: _set(f.h, lambda: f.kept.append(f.h.view_as(f.h))),
    "add": lambda m, f: f.h + f.one,
    "pop": lambda m, f: f.h + f.kept.pop() if f.kept else f.h,
    "stack": lambda m, f: f.h + torch.stack([*f.kept, f.h]).mean(0),
    "name": lambda m, f: _set(f.h, lambda: f.names.update(name={"of": [f.h, None]})),
    "use name": lambda m, f: f.h + f.names["name"]["of"][0] if "name" in f.names else f.h,
    "close": lambda m, f: _set(f.h, lambda: f.names.update(closure=lambda x, y=f.h: x + y.sin())),
    "use closure": lambda m, f: f.names["closure"](f.h) if "closure" in f.names else f.h,
    "parameter": lambda m, f: f.h * m.scale,
    "buffer": lambda m, f: f.h + m.shift,
    "derive": lambda m, f: _set(f.h, lambda: f.names.update(derived=f.names["derived"] * m.scale)),
    "use derived": lambda m, f: f.h * f.names["derived"],
    "tied": lambda m, f: F.linear(f.h, m.first.weight, m.first.bias),
    "count": lambda m, f: _set(f.h, lambda: m.count.add_(len(f.h))),
    "total": lambda m, f: _set(f.h, lambda: setattr(m, "sums", m.sums + f.h.detach().reshape(-1, WIDTH).sum(0))),
    "write": lambda m, f: (f.h * 1).mul_(1.5),
    "write kept": lambda m, f: _set(f.h, lambda: f.one.add_(0.5)),
    "write view": lambda m, f: _write_view(f.h),
    "fill": lambda m, f: _set(f.h, lambda: f.names["out"].__setitem__((slice(None), f.which % 3), f.h)),
    "detach": lambda m, f: f.h.detach() * 0.5 + f.h,
    "cube": lambda m, f: Cube.apply(f.h.tanh()),
    "hook": lambda m, f: _hook(f.h),
    "rows": lambda m, f: f.h * (1 + _by_row(f, f.names["rows"])),
    "mask": lambda m, f: f.h if f.names["mask"] is None else f.h * f.names["mask"],
    "pieces": lambda m, f: f.h + _by_row(f, torch.stack([piece.mean() for piece in f.names["pieces"]])),
    "states": lambda m, f: f.h + _by_row(f, f.names["states"].mean((0, 2))),
    "read": lambda m, f: f.h * (2.0 if f.one.detach().abs().max().item() >= 0 and len(f.one) == len(f.h) else 3.0),
}
