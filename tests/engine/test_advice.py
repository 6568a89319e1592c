"""What errors and warnings say to write is right: it has the unwrapped module's gradients."""
from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd import Function
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import register_pytree_node, tree_leaves
from torch.utils.checkpoint import checkpoint

from splitpipe import SplitPipe, check, is_recomputing
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same
from tests.promise.layers import Apply

X = torch.arange(28.0).view(7, 4).sin()
Y, Z = X.cos(), X.cos().repeat(2, 1)[:9]


def of(*args: Any) -> Callable[[Any], Tensor]:
    """A loss of what a model returns for these arguments."""
    return lambda model: sum([y.square().mean() for y in tree_leaves(model(*args)) if getattr(y, "requires_grad", 0)])


squared = of(X)


def against(loss_fn: Any) -> Callable[[Any], Tensor]:
    """A loss of output and target; with a schedule, the pipeline has it."""
    def loss(model: Any) -> Tensor:
        inside = isinstance(model, SplitPipe) and model.schedule.name != "gpipe"
        return model(X, target=Y) if inside else loss_fn(model(X), Y)  # type: ignore[no-any-return]

    return loss


def checked(loss: Callable[[Any], Tensor], /, *args: Any, **given: Any) -> Callable[[Any], Tensor]:
    """A loss, if splitpipe.check finds no difference."""
    def found(model: Any) -> Tensor:
        if isinstance(model, SplitPipe):
            check(model, *args, **given).raise_if_different()
        return loss(model)

    return found


class Use(NamedTuple):
    """A forward, or the layers of a Sequential; a loss that is run backward; the pipeline's options; other blocks."""

    forward: Any
    loss: Callable[[Any], Tensor] = squared
    options: Mapping[str, Any] = {}
    blocks: Mapping[str, Any] = {}

    def made(self) -> tuple[nn.Module, dict[str, Any]]:
        """A module, and the options of its pipeline."""
        if isinstance(self.forward, list):
            where: dict[str, Any] = {"balance": [1] * len(self.forward), "devices": ["cpu"] * len(self.forward)}
            return copy.deepcopy(nn.Sequential(*self.forward)), {**where, "chunks": 3, **self.options}
        module = module_of(self.forward, **{**linears("one", "two"), **copy.deepcopy({**self.blocks})})
        devices = ["cpu"] * (len(self.options.get("cuts", "1")) + 1)
        return module, {"cuts": ["two"], "devices": devices, "chunks": 3, **self.options}


def chain(self: Any, x: Tensor, *_: Any) -> Any:
    return self.two(self.one(x).tanh())


def leaving(self: Any, x: Tensor) -> Any:
    self.h = self.one(x).tanh()
    return self.two(self.h)


def same(x: Tensor) -> Tensor:
    return x


def steep(self: Any, x: Tensor, copied: Callable[[Tensor], Tensor] = same) -> Any:
    y = self.two(h := copied(self.one(x)))
    return y + torch.autograd.grad(y.square().sum(), h, create_graph=True)[0]


def viewed(self: Any, x: Tensor, copied: Callable[[Tensor], Tensor] = same) -> Any:
    """Writes to what an earlier stage has made a view of, which is an output."""
    h = self.one(x) * 1
    view, y = h[:, :2], self.two(x)
    return y + copied(h).mul_(2), view


def writing(self: Any, x: Tensor, copied: Callable[[Tensor], Tensor] = same) -> Any:
    return self.two(h := self.one(x)) + copied(h).mul_(2)


def drawing(self: Any, x: Tensor) -> Any:
    return chain(self, x) + 0 * torch.rand(1)


def adding(copied: Callable[[Tensor], Tensor] = same, returned: Callable[[Tensor], Tensor] = same) -> list[nn.Module]:
    return [nn.Linear(4, 4), Apply(lambda x: (returned(x), x)), Apply(lambda xs: copied(xs[0]).mul_(2) + xs[1])]


def folded(self: Any, x: Tensor, m: Any) -> Any:
    return chain(self, x) + torch.stack([*m]).view(len(x), -1).sum(1, keepdim=True)


def whole(self: Any, x: Tensor, m: Tensor) -> Any:
    return chain(self, x) + m.sum()


def penalty(model: Any) -> Tensor:
    [grad] = torch.autograd.grad(squared(model), [*model.parameters()][:1], create_graph=True)
    return grad.square().sum()


def caching(model: Any) -> Tensor:
    with parametrize.cached():
        squared(model).backward()
    return squared(model)


def computing(model: Any) -> Tensor:
    weights = {name: x * 2 for name, x in [*model.named_parameters()][:1]}
    return functional_call(model, weights, (X,)).square().mean()  # type: ignore[no-any-return]


class Pair:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Known(Pair):
    """One that torch's pytree knows."""


register_pytree_node(Known, lambda pair: ([pair.x, pair.y], None), lambda parts, _: Known(*parts))


class Overwriting(Function):
    """A function whose backward writes to its gradient, or to what its forward saw."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: bool) -> Tensor:
        ctx.x = x.detach() if given else None
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result = grad * 2
        (grad if ctx.x is None else ctx.x).mul_(3)
        return result, None


def overwriting(given: bool) -> list[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.one(x)
        return Overwriting.apply(h, given) + self.two(h)  # type: ignore[no-any-return, no-untyped-call]

    return [module_of(forward, **linears("one", "two")), nn.Linear(4, 4)]


class Counting(nn.Linear):
    """A layer whose number of calls decides what it does; ``written``: by its first run alone, if a buffer."""

    calls, again, written = 0, True, False

    def __init__(self, **options: bool) -> None:
        super().__init__(4, 4)
        vars(self).update(options)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.again or not is_recomputing()
        if self.written and not is_recomputing():
            self.seen.add_(1)
        return super().forward(x)[:, : 2 if self.calls > 3 and not self.written else None].tanh()


def gather_in(self: Any, x: Tensor, kept: list[Tensor] | None = None) -> Any:
    y = self.layer(x)
    return y.tanh() if kept is None else kept.append(y.tanh()) or y


def force(self: Any, x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(chain(self, x).square().sum(), x, create_graph=True)[0]


def filled(self: Any, x: Tensor) -> Any:
    kept: list[Tensor] = []
    self.two(self.one(x), kept)
    return kept[0]


def written_late(model: Any) -> Tensor:
    loss = squared(model)
    with torch.no_grad():
        ([*model.buffers()] or [*model.parameters()])[-1].add_(1)
    return loss


def grown(model: Any) -> Tensor:
    inner = getattr(model, "inner", model)
    if len(inner) < 3:
        inner.append(nn.Tanh())
    return squared(model)


def unhooked(model: Any) -> Tensor:
    with [*model.modules()][-1].register_forward_hook(lambda module, args, output: output * 3):
        return squared(model)


def squares(x: Tensor, y: Tensor) -> Tensor:
    """A sum, which isn't traced."""
    return (x - y).square().cumsum(0)[-1].sum()


def rate(x: Tensor, y: Tensor) -> Tensor:
    return squares(x, y) / (y[:, 0] < 0.8).sum()


def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return squares(x, y), (y[:, 0] < 0.8).sum()


def scheduled(loss_fn: Any, plain: Any = None, **options: Any) -> Use:
    return Use(LAYERS, against(plain or loss_fn), {**SCHEDULED, "loss_fn": loss_fn, **options})


both = Use(lambda self, x: (self.two(h := self.one(x).tanh()), h))
packed = partial(Use, lambda self, x, m, sizes: chain(self, x) + torch.stack([y.sum(0) for y in m.split(sizes)]))
steeper = Use(lambda self, x: self.three(steep(self, x, Tensor.clone)), blocks={"three": nn.Linear(4, 4)})
products = Use([Apply(lambda pair: pair.x * pair.y), nn.Linear(4, 4)], of(Pair(X, Y)))
tupled = Use([Apply(lambda xs: xs[0] * xs[1]), nn.Linear(4, 4)], of((X, Y)))
normed = Use([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)], of(X[:3]), {"deferred_batch_norm": True})
other = module_of(lambda self, x: functional_call(self.layer, {"bias": self.layer.bias * 2}, (x,)), **linears("layer"))
halving = module_of(lambda self, x: self.layer(x) * 0.5 ** self.step.item(), step=nn.Buffer(torch.ones(())),
                    **linears("layer"))
SPOILT = overwriting(False)
gathering = module_of(gather_in, **linears("layer"))
pairs = Use([Apply(lambda p: p[0] * p[1] if type(p) is tuple else p.x * p.y), nn.Linear(4, 4)], of(Pair(X, Y)))
ALWAYS = {"checkpoint": "always"}
counted, AUTOGRAD = Use([Counting(), nn.Linear(4, 4)], options=ALWAYS), {**ALWAYS, "backward": "autograd"}
LAYERS, SCHEDULED = [nn.Linear(4, 4), nn.Tanh()], {"schedule": "1f1b"}
NEVER = {"backward": "autograd", "checkpoint": "never"}
AVERAGED = {**SCHEDULED, "loss_fn": rate, "reduction": "mean"}
HALVES = [((X[:3], Z[:4], [1, 2, 1]), {}), ((X[3:], Z[4:], [1, 2, 1, 1]), {})]
#: What is an error or a warning, its words, and what it says is to be written: with these options, or in another way.
ADVICE: dict[str, tuple[Use, str, Use | dict[str, Any]]] = {
    "a second derivative": (Use(chain, penalty), r"model\(x\), with SplitPipe\(..., backward='autograd'\)",
                            {"backward": "autograd"}),
    "a graph in an attribute": (Use(leaving), "left 'h'.*or return it", both),
    "computed weights": (Use(chain, computing), "computed from other.*backward='autograd', checkpoint='never'", NEVER),
    "weights in common": (Use([parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)], caching),
                          "graph.*backward='autograd', checkpoint='never'", NEVER),
    "weights of a block": (Use(lambda self, x: functional_call(self.two, {"bias": x[0]}, (self.one(x),))),
                           "functional_call in one block", Use(chain, blocks={"two": other})),
    "cuts": (steeper._replace(options={"cuts": ["three", "two"], **NEVER}), "in the order of the forward",
             {"cuts": ["two", "three"]}),
    "a write": (Use(writing, options={"checkpoint": "always"}), r"Write to a copy \(x.clone",
                Use(lambda self, x: writing(self, x, Tensor.clone))),
    "a write to a base": (Use(viewed, options={"backward": "autograd"}), r"Write to a copy \(x.clone",
                          Use(lambda self, x: viewed(self, x, Tensor.clone))),
    "a write between stages": (Use(adding()), r"copy \(x.clone\(\)\) in the layer", Use(adding(Tensor.clone))),
    "a copy that is returned": (Use(adding()), "or return a copy from", Use(adding(same, Tensor.clone))),
    "a derivative between blocks": (Use(steep), "backward='autograd'", {"backward": "autograd"}),
    "other cuts": (steeper, "cuts= with checkpoint='never'", {"cuts": ["three"], "checkpoint": "never"}),
    "a derivative in a stage": (steeper._replace(options={"cuts": ["three"], **ALWAYS}),
                                "was run backward before its stage was.*checkpoint='never'", {"checkpoint": "never"}),
    "a derivative in a stage of a schedule": (
        Use(steeper.forward, against(mse_loss), {**SCHEDULED, "loss_fn": mse_loss, "cuts": ["three"], **ALWAYS},
            steeper.blocks), "was run backward before its stage was.*checkpoint='never'", {"checkpoint": "never"}),
    "the module's checkpoint": (Use(lambda self, x: checkpoint(drawing, self, x, use_reentrant=False)),
                                "checkpoint='always' in its place", Use(drawing, options={"checkpoint": "always"})),
    "few rows": (normed, "use fewer chunks", {"chunks": 1}),
    "entries of a row": (Use(folded, of(X, Y.view(14, 2))), "'groups'} for the former", {"batched": {"m": "groups"}}),
    "a list of rows": (Use(folded, of(X, [*(X @ Y.T)])), "'rows'} for the former", {"batched": {"m": "rows"}}),
    "entries for all": (Use(whole, of(X, Y.view(14, 2))), "False} for the latter", {"batched": {"m": False}}),
    "another size": (Use(whole, of(X, Y[:5])), "write batched={'m': False}", {"batched": {"m": False}}),
    "a name": (Use(whole, of(X, Y[:5]), {"batched": {"maks": False}}), "some of 'x', 'm'", {"batched": {"m": False}}),
    "packed rows": (packed(of(X, Z, [1, 2, 1, 1, 2, 1, 1])), "write split=", {"split": lambda *_: HALVES}),
    "no tensor": (Use(lambda self, n: chain(self, X[slice(*n)]), of((0, 7))), "or split=",
                  {"split": lambda *_: [(((0, 3),), {}), (((3, 7),), {})]}),
    "two inputs": (tupled._replace(loss=lambda model: model(X, Y)), r"model\(\(x, mask\)\), one tuple", tupled),
    "an object": (products, "register_pytree_node", products._replace(loss=of(Known(X, Y)))),
    "an unpacked object": (products, "Unpack it", tupled),
    "rows in another dimension": (Use(lambda self, x: chain(self, x).T), "expected the batch first", Use(chain)),
    "other widths": (Use(lambda self, x: chain(self, x)[:, :len(x) + 1]), "pad it", Use(chain)),
    "rows compared": (Use(lambda self, x: (y := chain(self, x)) @ y.T), "return the features",
                      Use(chain, lambda model: ((y := model(X)) @ y.T).square().mean())),
    "a number": (Use(lambda self, x: (chain(self, x), int((x > 0).sum()))), "such as mask.sum",
                 Use(lambda self, x: (chain(self, x), (x > 0).sum() * 1.0))),
    "an object in the output": (Use(lambda self, x: (chain(self, x), Pair(x, x))), "or use chunks=1", {"chunks": 1}),
    "a list as long as a microbatch": (Use(lambda self, x: [{"y": y} for y in chain(self, x).T[:3]], of(X[:6]), {
        "chunks": 2}), "choose another number of chunks", {"chunks": 3}),
    "an index": (Use(lambda self, x: (y := chain(self, x), y.argmax())), "or reduction= as a function",
                 {"reduction": lambda values, rows: values[0] * 0.0}),
    "a schedule": (Use(LAYERS, against(mse_loss), SCHEDULED), "loss_fn=criterion.*target=", scheduled(mse_loss)),
    "stages": (Use(LAYERS * 2, against(mse_loss), {"schedule": "zb-v", "loss_fn": mse_loss, "devices": ["cpu"] * 2,
               "balance": [2, 2]}), "Give a balance of 4 numbers", {"balance": [1] * 4}),
    "two losses": (Use(lambda self, x: (self.one(x).mean(), self.two(x).mean()), options=SCHEDULED), "just one such",
                   Use(lambda self, x: self.one(x).mean() + self.two(x).mean(), lambda model: model(X), SCHEDULED)),
    "a target": (Use(LAYERS, lambda model: model(X, target=Y)), "schedule='1f1b', loss_fn=crit", scheduled(mse_loss)),
    "a scaler": (Use(LAYERS, options={"grad_scaler": GradScaler("cpu")}), "scaler.scale.loss. works as usual",
                 Use(LAYERS, lambda model: GradScaler("cpu", 2.0).scale(squared(model)))),
    "rows of a loss": (scheduled(lambda x, y: x - y), r"Reduce it \(loss.mean", scheduled(lambda x, y: (x - y).mean())),
    "a loss of 0": (scheduled(lambda x, y: 0), "start from output.sum", scheduled(lambda x, y: x.sum() * 0)),
    "a mean": (scheduled(lambda x, y: squares(x, y) / x.numel()), "reduction='mean' if that", {"reduction": "mean"}),
    "a sum": (scheduled(squares), "reduction='sum' if it is a sum", {"reduction": "sum"}),
    "a count": (scheduled(rate), "return a pair", scheduled(pair, rate)),
    "a function": (scheduled(rate, reduction=sum), "or a loss_fn that returns a pair", scheduled(pair, rate)),
    "an argument": (Use(whole, checked(of(X, Y[:, 0]), X, Y[:, 0])), "look at batched=", {"batched": {"m": False}}),
    "a block's gradient": (
        Use(lambda self, x: self.three(force(self, x)), options={"cuts": ["three"]}, blocks=linears("three")),
        "Expected these inside a block",
        Use(lambda self, x: self.three(self.inner(x)), options={"cuts": ["three"]}, blocks={
            "inner": module_of(force, **linears("one", "two")), **linears("three")})),
    "other outputs": (counted, "alone, or checkpoint='never'", {"checkpoint": "never"}),
    "other outputs of a block": (Use(chain, options=ALWAYS, blocks={"one": Counting()}),
                                 "alone, or checkpoint='never'", {"checkpoint": "never"}),
    "other saved tensors": (counted._replace(options=AUTOGRAD),
                            "stage 0 .*saved other tensors in a recomputation.*or use checkpoint='never'",
                            {"checkpoint": "never"}),
    "other saved tensors of a block": (
        Use(chain, options=AUTOGRAD, blocks={"one": Counting()}),
        "block 'one'.* saved other tensors in a recomputation.*or use checkpoint='never'", {"checkpoint": "never"}),
    "a state that decides": (counted._replace(options=AUTOGRAD), r"ask splitpipe.is_recomputing\(\)",
                             Use([Counting(again=False), nn.Linear(4, 4)], options=AUTOGRAD)),
    "a buffer written once": (Use([Counting(written=True), nn.Linear(4, 4)], options=ALWAYS),
                              "needn't grow, or use checkpoint='never'", {"checkpoint": "never"}),
    "a late write": (Use(LAYERS, written_late, ALWAYS), "or checkpoint='never'", {"checkpoint": "never"}),
    "a late write to a buffer": (Use([halving, nn.Linear(4, 4)], written_late, ALWAYS), "buffer 'step' of stage.*or ch",
                                 {"checkpoint": "never"}),
    "a hook removed early": (Use(LAYERS, unhooked, ALWAYS), "or a module hook.*or checkpoint", {"checkpoint": "never"}),
    "what a layer has saved": (Use(overwriting(True)), "backward='autograd'. with it", {"backward": "autograd"}),
    "a gradient that is written to": (
        Use(SPOILT, checked(squared, X, loss=lambda y: y.square().mean(), against=nn.Sequential(*SPOILT))),
        "for which try backward='autograd'", {"backward": "autograd"}),
    "more layers": (Use(LAYERS, grown), "build a new SplitPipe", Use([*LAYERS, nn.Tanh()], grown)),
    "a list that is filled": (Use(filled, blocks={"two": gathering}), "blocks that return what they make",
                              Use(chain, blocks={"two": gathering})),
    "rows where an input has them": (Use(lambda self, x: chain(self, x).T), "or where batched names it", Use(
        lambda self, x: chain(self, x.T).T, of(X.T), {"batched": {"x": 1}})),
    "rows last": (Use(lambda self, x: chain(self, x).T), "another number of chunks", {"chunks": 1}),
    "a dict in its place": (Use(lambda self, x: [{"y": y} for y in chain(self, x).T[:3]], of(X[:6]), {"chunks": 2}),
                            "Return a tensor or a dict", Use(lambda self, x: dict(enumerate(chain(self, x).T[:3])))),
    "a loss outside": (Use(lambda self, x: (self.one(x).mean(), self.two(x).mean()), options=SCHEDULED),
                       "a loss_fn and a target", Use(chain, against(mse_loss), {**SCHEDULED, "loss_fn": mse_loss})),
    "no schedule": (Use(lambda self, x: (self.one(x).mean(), self.two(x).mean()), options=SCHEDULED),
                    "leave out the schedule", {"schedule": None}),
    "rows in the second dimension": (Use(lambda self, x, m: chain(self, x) + m.sum(0), of(X, torch.stack([X, Y]))),
                                     "'m': 1} for the former", {"batched": {"m": 1}}),
    "rows of each in a list": (Use(lambda self, x, m: chain(self, x) + sum(m)[:, None], of(X, [*(X @ Y.T)])),
                               "0} for the latter", {"batched": {"m": 0}}),
    "an object that is split": (pairs, "or unpack it in split=", {"split": lambda given, *_: [
        (((given[0].x[at], given[0].y[at]),), {}) for at in (slice(3), slice(3, 7))]}),
    "one microbatch": (Use(LAYERS, checked(of(X), X[:1])), "expected more rows", Use(LAYERS, checked(of(X), X))),
    "one row": (Use(LAYERS, checked(of(X), X[:1])), "or against=plain",
                Use(LAYERS, checked(of(X), X[:1], against=nn.Sequential(*LAYERS)))),
    "a count to be found": (Use(LAYERS, checked(against(rate), X, target=Y), AVERAGED), r"return \(total, count\)",
                            Use(LAYERS, checked(against(rate), X, target=Y), {**SCHEDULED, "loss_fn": pair})),
    "a loss without a schedule": (Use(LAYERS, checked(against(rate), X, target=Y), AVERAGED), "leave out the schedule",
                                  Use(LAYERS, checked(against(rate), X, loss=lambda y: rate(y, Y)))),
    "a reduction": (Use(LAYERS, checked(against(squares), X, target=Y), {**SCHEDULED, "loss_fn": squares,
                    "reduction": "mean"}), "look at reduction=", {"reduction": "sum"}),
}


@pytest.mark.draws
@pytest.mark.parametrize("name", ADVICE)
def test_what_an_error_or_a_warning_says_to_write_is_right(name: str) -> None:
    wrong, words, right = ADVICE[name]
    with warnings.catch_warnings(), pytest.raises((RuntimeError, ValueError, TypeError, UserWarning)) as caught:
        warnings.simplefilter("error")
        module, options = wrong.made()
        wrong.loss(SplitPipe(module, **options)).backward()
    assert re.search(words, str(caught.value) + "".join(getattr(caught.value, "__notes__", ())))
    right = wrong._replace(options={**wrong.options, **right}) if isinstance(right, dict) else right
    plain, options = right.made()
    model = SplitPipe(copy.deepcopy(plain), **options)
    found, expected = ((loss.backward(), loss.detach(), [p.grad for p in each.parameters()]) for each, loss in (
        (each, right.loss(each)) for each in (model, plain)))
    assert_same(found[1:], expected[1:], "loss and gradients")
