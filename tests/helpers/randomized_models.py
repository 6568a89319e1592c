"""Random models: the module that a layer's description stands for. Any may follow any other, so that cases shrink."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from splitpipe.skip import Namespace, skippable
from tests.helpers.randomized_layers import (
    PACKS,
    WIDTH,
    Checkpointed,
    Closing,
    Embed,
    Handing,
    Inside,
    Lifted,
    Own,
    Parallel,
    Residual,
    Skipping,
    Total,
    Weight,
    merged,
)
from tests.promise.layers import Apply, Cube, First

IN_PLACE = ("relu_", "mul_")
#: Not for torch.utils.checkpoint: what counts would count twice, and what unpacks twice is an error there.
NOT_TWICE = ("batchnorm", "total", "spectral norm", "cube")
#: These hand a tensor on that is no part of the batch, which no output of a model may be.
HANDING = ("hand weight", "hand tied", "hand buffer")
#: Inputs of which a part goes whole.
WHOLE = ("whole", "whole dict", "whole on")


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


class Builder:
    """Makes the modules of one model.

    Args:
        flat: rows are vectors, else sequences of them.
        norm: makes a BatchNorm layer of so many features.
        one: whether no batch gives more than one microbatch.
        plain: without torch.utils.checkpoint.
    """

    def __init__(
        self, flat: bool, norm: Callable[[int], nn.Module], one: bool, plain: bool = False
    ) -> None:
        self.flat = flat
        self.plain = plain
        self.copied = False
        self.norm = norm
        self.one = one
        self._shared: dict[Any, Any] = {}

    def shared(self, kind: str, make: Callable[[], Any]) -> Any:
        """The same module or parameter for all that ask for it."""
        return self._shared.setdefault(kind, make())

    def lifted(self, layer: nn.Module, *shape: int) -> nn.Module:
        return Lifted(layer, shape) if self.flat else layer

    def layer(self, kind: str, inside: Sequence[Any] = ()) -> nn.Module:
        """A layer that takes and gives a tensor of the same shape."""
        parts = [self.made(part) for part in inside]
        containers: dict[str, Callable[[], nn.Module]] = {
            "nested": lambda: nn.Sequential(*parts),
            "residual": lambda: Residual(nn.Sequential(*parts)),
            "list": lambda: Parallel([*parts, nn.Identity()]),
            "checkpointed": lambda: Checkpointed(nn.Sequential(*parts), False, self.plain),
            "reentrant": lambda: Checkpointed(nn.Sequential(*parts), True, self.plain),
        }
        return (containers.get(kind) or LEAVES[kind])(*() if kind in containers else (self,))

    def made(self, part: Any) -> nn.Module:
        """The module of a description, frozen as it says."""
        layer = self.layer(part.kind, part.inside)
        parameters = list(layer.parameters())
        for parameter in {"all": parameters, "first": parameters[:1], "rest": parameters[1:], "": []}[part.frozen]:
            parameter.requires_grad_(False)
        return layer

    def model(self, parts: Sequence[Any], skips: Sequence[Any], merge: bool = False) -> nn.Sequential:
        """The whole model: layers, and skips between them; its output may be made one tensor."""
        copied = self.copied = any(kind in IN_PLACE for kind in kinds(parts))
        merge = merge or bool(kinds(parts) & {*HANDING, *WHOLE})
        layers = []
        for number, part in enumerate(parts):
            if part.kind in PACKS:
                pack = PACKS["tuple" if copied and part.kind in ("twice", "views") else part.kind]
                made: nn.Module = Apply(lambda value, pack=pack: pack(merged(value)))
            elif part.kind == "merge":
                made = Apply(merged)
            elif number == 0 and part.kind in FRONT or part.kind in HANDING:
                made = self.made(part)
            else:
                made = Inside(self.made(part))
            layers.append(made if number < len(parts) - 1 or not merge else nn.Sequential(made, Apply(merged)))
        names = _names(skips)
        for number, layer in enumerate(layers):
            stashed = {name: k for k, (skip, name) in enumerate(zip(skips, names)) if skip.start == number}
            popped = {name: k for k, (skip, name) in enumerate(zip(skips, names)) if skip.end == number}
            if stashed or popped:
                make = skippable(stash=[*stashed], pop=[*popped])(Skipping)
                layers[number] = made = make(layer, [*stashed], [*popped], copied)
                for name, k in (*stashed.items(), *popped.items()):
                    if k:  # The first one is in none.
                        made.isolate(self._shared.setdefault(k, Namespace()), only=[name])
        return nn.Sequential(*layers)


def _names(skips: Sequence[Any]) -> list[str]:
    """Names of skips, equal where no layer has both: their namespaces tell them apart."""
    names: list[str] = []
    for skip in skips:
        taken = {name for other, name in zip(skips, names) if {other.start, other.end} & {skip.start, skip.end}}
        names.append(next(name for name in "abcdefgh" if name not in taken))
    return names


def kinds(parts: Sequence[Any]) -> set[str]:
    """All kinds of layers there are, nested ones too."""
    return {part.kind for part in parts} | {kind for part in parts for kind in kinds(part.inside)}


def _spectral(b: Builder) -> nn.Module:
    # Each call in training changes its buffers.
    layer = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return layer if b.one else layer.eval()


def _queries(b: Builder) -> nn.Module:
    # A view of a parameter that requires grad may not be written to.
    if b.copied:
        return Own(lambda x, w: w.expand_as(x).clone(), _parameter(WIDTH))
    return Own(lambda x, w: w.expand_as(x), _parameter(WIDTH))


def _whole(x: Tensor, mask: Tensor) -> Tensor:
    return F.linear(x, torch.tanh(mask)) + x


def _whole_dict(d: dict[str, Any]) -> dict[str, Any]:
    masked = d["mask"].masked_fill(d["flags"], 0)
    return {"x": _whole(d["x"], masked), "rest": [Weight(masked), d["factor"]]}


LEAVES: dict[str, Callable[[Builder], nn.Module]] = {
    "linear": lambda b: nn.Linear(WIDTH, WIDTH),
    "tanh": lambda b: nn.Tanh(),
    "no bias": lambda b: nn.Linear(WIDTH, WIDTH, bias=False),
    "layernorm": lambda b: nn.LayerNorm(WIDTH),
    "groupnorm": lambda b: nn.GroupNorm(1 if b.flat else 2, WIDTH),
    "batchnorm": lambda b: b.lifted(b.norm(2 if b.flat else WIDTH), 2, 2),
    "conv1d": lambda b: b.lifted(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), WIDTH, 1),
    "conv2d": lambda b: Lifted(nn.Conv2d(1, 1, 3, padding=1), (1, 2, 2) if b.flat else (1, WIDTH, WIDTH)),
    "grouped": lambda b: Lifted(nn.Conv2d(2, 2, 1, groups=2), (2, 2, 1) if b.flat else (2, 2, WIDTH)),
    "transposed": lambda b: b.lifted(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1), WIDTH, 1),
    "transposed2d": lambda b: Lifted(nn.ConvTranspose2d(2, 2, 1), (2, 2, 1) if b.flat else (2, 2, WIDTH)),
    "lstm": lambda b: b.lifted(First(nn.LSTM(WIDTH, WIDTH, batch_first=True)), 1, WIDTH),
    "gru": lambda b: b.lifted(First(nn.GRU(WIDTH, 2, 2, batch_first=True, bidirectional=True)), 1, WIDTH),
    "attention": lambda b: b.lifted(First(nn.MultiheadAttention(WIDTH, 2, batch_first=True), 3), 1, WIDTH),
    "transformer": lambda b: b.lifted(nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True), 1, WIDTH),
    "relu_": lambda b: nn.ReLU(inplace=True),
    "mul_": lambda b: Apply(lambda x: x.mul_(1.5)),
    "flatten": lambda b: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (WIDTH,) if b.flat else (WIDTH, WIDTH))),
    "own": lambda b: Own(F.linear, _parameter(WIDTH, WIDTH), _parameter(WIDTH)),
    "matmul": lambda b: Own(lambda x, w, v: x @ w + x @ v.t(), _parameter(WIDTH, WIDTH), _parameter(WIDTH, WIDTH)),
    "scale": lambda b: Own(lambda x, w: x * w, _parameter(WIDTH)),
    "both": lambda b: Own(lambda x, w: F.linear(x, w) * w.sum(), _parameter(WIDTH, WIDTH)),
    "computed": lambda b: Own(lambda x, w: F.linear(x, w.tanh()), _parameter(WIDTH, WIDTH)),
    "tied": lambda b: Own(F.linear, b.shared("tied", lambda: _parameter(WIDTH, WIDTH))),
    "same": lambda b: b.shared("same", lambda: nn.Linear(WIDTH, WIDTH)),
    "unused": lambda b: Own(lambda x, w, v: F.linear(x, w), _parameter(WIDTH, WIDTH), _parameter(3)),
    "constant": lambda b: Own(lambda x, w: w.expand_as(x) * 1, _parameter(WIDTH)),
    "detach": lambda b: Apply(lambda x: x.detach() * 2),
    "identity": lambda b: nn.Identity(),
    "total": lambda b: Total(),
    "weight norm": lambda b: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": _spectral,
    "cube": lambda b: Apply(lambda x: Cube.apply(x.tanh())),
    "queries": _queries,
    "queries own": lambda b: Own(lambda x, w, v: F.linear(v.expand_as(x), w) + v, _parameter(WIDTH, WIDTH),
                                 _parameter(WIDTH)),
    "closure": lambda b: Closing(torch.rand(WIDTH, requires_grad=True)),
    "dropout": lambda b: nn.Dropout(0.3),
    "embedding": lambda b: Embed(b.flat),
    "open": lambda b: Apply(lambda d: d["x"] * d["factor"] + d["rest"][0].sin() * d["zero"]),
    "whole": lambda b: Apply(lambda pair: _whole(*pair)),
    "whole dict": lambda b: Apply(_whole_dict),
    "whole on": lambda b: Apply(lambda pair: (_whole(*pair), Weight(pair[1]))),
    "hand weight": lambda b: Handing(_parameter(WIDTH, WIDTH)),
    "hand tied": lambda b: Handing(b.shared("tied", lambda: _parameter(WIDTH, WIDTH))),
    "hand buffer": lambda b: Handing(torch.randn(WIDTH, WIDTH)),
}
CONTAINERS = ("nested", "residual", "list", "checkpointed", "reentrant")
#: At the front alone, since they take what is no tensor of a model's shape; not by chance.
FRONT = ("embedding", "open", *WHOLE)
SIMPLE = (*[kind for kind in LEAVES if kind not in (*FRONT, *HANDING, "dropout")], *["tied", "same"] * 2)
