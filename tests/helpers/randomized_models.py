"""Random modules: a Sequential of layers with skips, or a forward of its own that takes one statement after another.

Any layer or statement may follow any other, so that cases shrink.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from splitpipe.skip import pop, skippable, stash
from tests.helpers.deferring import Call
from tests.helpers.modules import module_of
from tests.promise.layers import Apply, Cube, first_of

WIDTH = 4


class ByMicrobatch(nn.BatchNorm1d):
    """What a pipeline promises of BatchNorm, for a whole batch: microbatches normalised apart."""

    def __init__(self, chunks: int, deferred: bool) -> None:
        super().__init__(WIDTH)
        self.chunks, self.deferred = chunks, deferred

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        if not self.deferred:
            return torch.cat([super(ByMicrobatch, self).forward(part) for part in x.chunk(self.chunks)])
        with torch.no_grad():
            super().forward(x)
        return torch.cat([F.batch_norm(part, None, None, self.weight, self.bias, True, 0.0, self.eps)
                          for part in x.chunk(self.chunks)])


def totalling(self: Any, x: Tensor) -> Tensor:
    """Sums up in buffers what has passed: in place, and by a new tensor."""
    self.count += len(x)
    self.total = self.total + x.detach().double().reshape(-1, WIDTH).sum(0)
    return x + self.shift  # type: ignore[no-any-return]


def residual(self: Any, x: Tensor) -> Tensor:
    """A layer and what goes past it; ``again``: inside torch.utils.checkpoint."""
    def inner(x: Tensor) -> Tensor:
        return x + self.layer(x)  # type: ignore[no-any-return]

    return checkpoint(inner, x * 1, use_reentrant=False) if self.again else inner(x * 1)  # type: ignore[no-any-return]


def main(value: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The first tensor of a nesting, and what puts another into its place."""
    leaves, spec = tree_flatten(value)
    place = next(k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return leaves[place], lambda x: tree_unflatten([*leaves[:place], x, *leaves[place + 1 :]], spec)


def merged(value: Any) -> Tensor:
    """One tensor of all those in a nesting."""
    first, *others = (x for x in tree_leaves(value) if isinstance(x, Tensor))
    for other in others:
        if other.is_floating_point():
            first = first + 0.5 * other.mean(-1, keepdim=True)
        else:
            first = first * (1 + other.to(first.dtype).reshape(-1, *[1] * (first.dim() - 1)))
    return first


def inside(self: Any, value: Any) -> Any:
    """A layer on the first tensor of a nesting; the rest passes by."""
    x, put = main(value)
    return put(self.layer(x))


class Skipping(nn.Module):
    """Adds what it pops to its input, and stashes its output, under several names."""

    def __init__(self, layer: nn.Module, stashed: list[str], popped: list[str], copied: bool) -> None:
        super().__init__()
        self.layer = layer
        self.stashed, self.popped, self.copied = stashed, popped, copied

    def forward(self, value: Any) -> Any:
        x, put = main(value)
        for name in self.popped:
            skip = yield pop(name)
            x = x + skip["scale"] * skip["x"]
        value = self.layer(put(x))
        for number, name in enumerate(self.stashed):
            kept, _ = main(value)
            yield stash(name, {"x": kept * 1 if self.copied or number else kept, "none": None, "scale": 0.5})
        return value


#: What gives a nesting, of any value.
PACKS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x.tanh(), x * 2),
    "dict": lambda x: {"a": x * 1.5, "b": [x.sin(), None], "c": 3},
    "integers": lambda x: {"x": x * 1, "numbers": x.detach().reshape(len(x), -1)[:, 0].gt(0).long()},
    "detached": lambda x: [x.detach() * 2, x * 1],
    "twice": lambda x: (x, x),
    "views": lambda x: (x, x[..., :2]),
}
IN_PLACE = ("relu_", "mul_")
#: Not for torch.utils.checkpoint: what counts would count twice, and what unpacks twice is an error there.
NOT_TWICE = ("batchnorm", "total", "cube")


def _weight(*shape: int) -> Tensor:
    return torch.randn(*shape) / 2


class Builder:
    """Makes the modules of one model from descriptions; ``norm`` makes a BatchNorm, plain is without checkpoints."""

    def __init__(self, layers: Sequence[Any], norm: Callable[[], nn.Module], plain: bool = False) -> None:
        self.layers, self.norm, self.plain = layers, norm, plain
        self.copied = bool(kinds(layers) & {*IN_PLACE})
        self._shared: dict[str, Any] = {}

    def shared(self, kind: str, make: Callable[[], Any]) -> Any:
        """The same module or parameter for all that ask for it."""
        return self._shared.setdefault(kind, make())

    def layer(self, part: Any) -> nn.Module:
        """A layer that takes and gives a tensor of the same shape, frozen as its description says."""
        parts = [self.layer(inner) for inner in part.inside]
        containers: dict[str, Callable[[], nn.Module]] = {
            "nested": lambda: nn.Sequential(*parts),
            "residual": lambda: module_of(residual, layer=nn.Sequential(*parts), again=False),
            "checkpointed": lambda: module_of(residual, layer=nn.Sequential(*parts), again=not self.plain),
        }
        layer = containers[part.kind]() if part.kind in containers else LEAVES[part.kind](self)
        parameters = [*layer.parameters()]
        for parameter in {"all": parameters, "first": parameters[:1], "": []}[part.frozen]:
            parameter.requires_grad_(False)
        return layer

    def sequential(self, skips: Sequence[Any]) -> nn.Sequential:
        """The layers one after the other, with skips between them."""
        layers: list[nn.Module] = []
        for part in self.layers:
            if part.kind in PACKS:
                pack = PACKS["tuple" if self.copied and part.kind in ("twice", "views") else part.kind]
                layers.append(Apply(lambda value, pack=pack: pack(merged(value))))
            else:
                layers.append(Apply(merged) if part.kind == "merge" else module_of(inside, layer=self.layer(part)))
        for number, layer in enumerate(layers):
            stashed = [f"skip {k}" for k, skip in enumerate(skips) if skip.start == number]
            popped = [f"skip {k}" for k, skip in enumerate(skips) if skip.end == number]
            if stashed or popped:
                layers[number] = skippable(stash=stashed, pop=popped)(Skipping)(layer, stashed, popped, self.copied)
        return nn.Sequential(*layers)


def kinds(parts: Sequence[Any]) -> set[str]:
    """All kinds of layers there are, nested ones too."""
    return {part.kind for part in parts} | {kind for part in parts for kind in kinds(part.inside)}


def _queries(b: Builder) -> nn.Module:
    # A view of a parameter that requires grad may not be written to.
    return Call(lambda x, w: w.expand_as(x).clone() if b.copied else w.expand_as(x), w=_weight(WIDTH))


LEAVES: dict[str, Callable[[Builder], nn.Module]] = {
    "linear": lambda b: nn.Linear(WIDTH, WIDTH),
    "tanh": lambda b: nn.Tanh(),
    "layernorm": lambda b: nn.LayerNorm(WIDTH),
    "batchnorm": lambda b: b.norm(),
    "conv1d": lambda b: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "lstm": lambda b: first_of(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "attention": lambda b: first_of(nn.MultiheadAttention(WIDTH, 2, batch_first=True), 3),
    "relu_": lambda b: nn.ReLU(inplace=True),
    "mul_": lambda b: Apply(lambda x: x.mul_(1.5)),
    "matmul": lambda b: Call(lambda x, w, v: x @ w + x @ v.t(), w=_weight(WIDTH, WIDTH), v=_weight(WIDTH, WIDTH)),
    "scale": lambda b: Call(lambda x, w: x * w, w=_weight(WIDTH)),
    "both": lambda b: Call(lambda x, w: F.linear(x, w) * w.sum(), w=_weight(WIDTH, WIDTH)),
    "computed": lambda b: Call(lambda x, w: F.linear(x, w.tanh()), w=_weight(WIDTH, WIDTH)),
    "tied": lambda b: Call(F.linear, w=b.shared("tied", lambda: nn.Parameter(_weight(WIDTH, WIDTH)))),
    "same": lambda b: b.shared("same", lambda: nn.Linear(WIDTH, WIDTH)),
    "unused": lambda b: Call(lambda x, w, v: F.linear(x, w), w=_weight(WIDTH, WIDTH), v=_weight(3)),
    "constant": lambda b: Call(lambda x, w: w.expand_as(x) * 1, w=_weight(WIDTH)),
    "detach": lambda b: Apply(lambda x: x.detach() * 2),
    "identity": lambda b: nn.Identity(),
    "total": lambda b: module_of(totalling, count=nn.Buffer(torch.tensor(0)), shift=nn.Buffer(torch.rand(WIDTH)),
                                 total=nn.Buffer(torch.zeros(WIDTH))),
    "cube": lambda b: Apply(lambda x: Cube.apply(x.tanh())),
    "queries": _queries,
    "dropout": lambda b: nn.Dropout(0.3),
}
CONTAINERS = ("nested", "residual", "checkpointed")
#: What draws nothing.
SIMPLE = tuple(kind for kind in LEAVES if kind != "dropout")


@dataclass
class Hidden:
    """A block's output, in a class that pytree doesn't know."""

    y: Tensor


@dataclass
class Result:
    """An output with its loss."""

    loss: Tensor | None
    y: Tensor
    hidden: tuple[Tensor, ...]
    numbers: Tensor


@dataclass
class Frame:
    """Where a forward stands: its value, and the block, kept value and number that a statement is about; all it has."""

    h: Tensor
    block: nn.Module
    one: Tensor
    which: int
    kept: list[Tensor]
    names: dict[str, Any]


class Block(nn.Module):
    """A layer, with arguments besides its input, and an output of some nesting."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, extra: Tensor | None = None, *, style: str = "", factor: float = 1.0) -> Any:
        y = self.layer(x * factor if extra is None else x + factor * extra)
        return {"dict": {"y": y, "n": 3}, "dataclass": Hidden(y)}.get(style, y)


class Part(nn.Module):
    """Blocks in a module of their own, which keeps what each of them gives in a list of its caller's."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return x


class Scripted(nn.Module):
    """A module whose forward calls blocks as its statements say; with chunks it stands for a pipeline."""

    def __init__(self, blocks: Sequence[nn.Module], acts: Sequence[Any], output: str, chunks: int = 1) -> None:
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
        self.acts, self.output, self.chunks = [*acts], output, chunks

    def forward(self, x: Tensor, rows: Tensor, *, mask: Tensor, labels: Tensor | None = None) -> Any:
        h, kept, loss = self.first(x), list[Tensor](), None
        names: dict[str, Any] = {"rows": rows, "mask": mask, "derived": self.scale.tanh()}
        names["out"] = h.new_zeros(len(h), 3, *h.shape[1:])
        for act in self.acts:
            block, one = self.blocks[act.which % len(self.blocks)], kept[act.which % len(kept)] if kept else h
            h = STATEMENTS[act.kind](self, Frame(h, block, one, act.which, kept, names))
        h = self.last(h + names["out"].sum(1))
        if labels is not None:
            loss = (h - labels[:, None, None]).square().mean()
        if self.output == "tuple":
            return h, tuple(kept), rows + 1
        if self.output == "dict":
            return {"loss": loss, "y": h, "hidden": tuple(kept), "numbers": rows + 1, "text": "same"}
        return Result(loss, h, tuple(kept), rows + 1)

    def sometimes(self, block: nn.Module, h: Tensor, rows: Tensor) -> Tensor:
        """Calls a block in some microbatches; outside of training in one, if rows of its first depend on others."""
        if not self.training:
            return block(h * 1)
        pairs = zip(h.chunk(self.chunks), rows.chunk(self.chunks)) if self.chunks > 1 else [(h, rows)]
        return torch.cat([block(part * 1) if int(own[0]) % 3 else part for part, own in pairs])


def _set(x: Tensor, function: Callable[[], object]) -> Tensor:
    """The tensor, after something was done."""
    function()
    return x


def _no_grad(f: Frame) -> Tensor:
    with torch.no_grad():
        extra = f.block(f.h * 1)
    return f.h + extra


def _write_view(h: Tensor) -> Tensor:
    h = h.clone()
    h[..., :2] = h[..., 2:] * 2
    return h


#: What statements make of the value: those that call a block, those that do so for some microbatches or modes, others.
_CALLS: dict[str, Callable[[Any, Frame], Tensor]] = {
    "call": lambda m, f: f.block(f.h),
    "call keyword": lambda m, f: f.block(x=f.h, factor=0.5, extra=f.one),
    "call dict": lambda m, f: f.block(f.h, style="dict")["y"],
    "call dataclass": lambda m, f: f.block(f.h, style="dataclass").y,
    "no grad": lambda m, f: _no_grad(f),
    "checkpoint": lambda m, f: checkpoint(f.block, f.h * 1, use_reentrant=False),
}
_SOMETIMES: dict[str, Callable[[Any, Frame], Tensor]] = {
    "sometimes": lambda m, f: m.sometimes(f.block, f.h, f.names["rows"]),
    "in training": lambda m, f: f.block(f.h) if m.training else f.h,
}
BETWEEN: dict[str, Callable[[Any, Frame], Tensor]] = {
    "part": lambda m, f: m.part(f.h, f.kept),
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
    "rows": lambda m, f: f.h * (1 + f.names["rows"].to(f.h.dtype)[:, None, None]),
    "mask": lambda m, f: f.h * f.names["mask"],
    "read": lambda m, f: f.h * (2.0 if f.one.detach().abs().max().item() >= 0 and len(f.one) == len(f.h) else 3.0),
}
STATEMENTS = {**_CALLS, **_SOMETIMES, **BETWEEN}
CALLS, SOMETIMES = tuple(_CALLS), tuple(_SOMETIMES)
