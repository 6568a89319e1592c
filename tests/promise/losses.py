"""Losses that people write, as functions of an output and a target: what the promise of the batch's loss is tried with.

    EXACT      the loss and gradients of the whole batch, drop-in and scheduled
    SEVERAL    several terms: drop-in exact; scheduled exact if their counts are proportional, else an error
    MIXED      a mean over what is counted plus a sum: drop-in exact; scheduled exact, or said
    SAID       exact, or a warning or an error that says why not
    COMPUTED   of sums and means by any functions: drop-in exact; scheduled as UNKNOWN
    UNKNOWN    one warning that names a function; taken as a mean over rows
    COUPLED    rows are compared with each other: a warning or an error, whatever the value
    PENALTIES  drop-in exact, scheduled as SAID; they are given the module's parameters, too; SAID_PENALTIES as SAID

To add a loss, add a line to one of these tables: its name, the batch that it is for (``BATCHES``), the function.
Outputs are [rows, 5] for batches in ``FLAT``, else [rows, WORDS, 5]; all is float64.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, CLASSES, IGNORED = 4, 5, -100
Loss = Callable[..., Tensor]
Table = dict[str, tuple[str, Loss]]
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5], dtype=torch.float64)


def _tokens(rows: int, even: bool) -> Tensor:
    """Classes of words. Uneven: of three microbatches (3, 3, 1 rows), the second one has nothing that counts."""
    found = torch.randint(CLASSES, (rows, WORDS))
    if even:
        found[:, 1] = IGNORED
    else:
        found[0, 1:] = IGNORED
        found[2, 2:] = IGNORED
        found[3:6] = IGNORED
        found[6, 3:] = IGNORED
    return found


def _some(rows: int, even: bool) -> Tensor:
    """Classes of rows, of which some are ignored."""
    found = torch.randint(CLASSES, (rows,))
    found[[0, 2, 4] if even else [1, 3, 4, 5]] = IGNORED
    return found


def _sparse(rows: int, even: bool) -> Tensor:
    found = torch.full((rows, CLASSES), -1)
    found[:, 0] = torch.randint(CLASSES, (rows,))
    return found


#: Targets of so many rows: (rows, whether all microbatches have as many that count).
BATCHES: dict[str, Callable[[int, bool], Tensor]] = {
    "tokens": _tokens,
    "some": _some,
    "classes": lambda rows, even: torch.randint(CLASSES, (rows,)),
    "labels": lambda rows, even: torch.randint(CLASSES, (rows, WORDS)),
    "values": lambda rows, even: torch.randn(rows, WORDS, CLASSES).double(),
    "flat": lambda rows, even: torch.randn(rows, CLASSES).double(),
    "binary": lambda rows, even: torch.randint(2, (rows, CLASSES)).double(),
    "signs": lambda rows, even: torch.randint(2, (rows, CLASSES)).double() * 2 - 1,
    "sign": lambda rows, even: torch.randint(2, (rows,)).double() * 2 - 1,
    "shares": lambda rows, even: torch.randn(rows, CLASSES).double().softmax(1),
    "sparse": _sparse,
}
FLAT = {"some", "classes", "flat", "binary", "signs", "sign", "shares", "sparse"}


def each(o: Tensor, t: Tensor) -> Tensor:
    """The loss of each word, 0 where it is ignored."""
    return F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="none").view(t.shape)


def counted(t: Tensor) -> Tensor:
    return (t != IGNORED).double()


# torch's own, with each of their reductions. What a module has as its name, its function has, too.

_REDUCED: Table = {
    "l1": ("values", F.l1_loss),
    "mse": ("values", F.mse_loss),
    "smooth_l1": ("values", partial(F.smooth_l1_loss, beta=0.5)),
    "huber": ("values", partial(F.huber_loss, delta=0.5)),
    "bce": ("binary", lambda o, t, **how: F.binary_cross_entropy(o.sigmoid(), t, **how)),
    "bce logits": ("binary", F.binary_cross_entropy_with_logits),
    "bce logits weight": ("binary", partial(F.binary_cross_entropy_with_logits, weight=WEIGHT, pos_weight=WEIGHT)),
    "kl_div": ("shares", lambda o, t, **how: F.kl_div(o.log_softmax(1), t, **how)),
    "poisson": ("binary", F.poisson_nll_loss),
    "gaussian": ("flat", lambda o, t, **how: F.gaussian_nll_loss(o, t, o.exp(), **how)),
    "hinge": ("signs", F.hinge_embedding_loss),
    "soft margin": ("signs", F.soft_margin_loss),
    "multi margin": ("classes", F.multi_margin_loss),
    "multilabel margin": ("sparse", F.multilabel_margin_loss),
    "multilabel soft margin": ("binary", F.multilabel_soft_margin_loss),
    "triplet": ("flat", lambda o, t, **how: F.triplet_margin_loss(o, t, t.flip(1), **how)),
    "triplet distance": ("flat", lambda o, t, **how: F.triplet_margin_with_distance_loss(o, t, t.flip(1), **how)),
    "margin ranking": ("sign", lambda o, t, **how: F.margin_ranking_loss(o[:, 0], o[:, 1], t, **how)),
    "cosine": ("sign", lambda o, t, **how: F.cosine_embedding_loss(o[:, :2], o[:, 2:4], t, **how)),
    "nll": ("classes", lambda o, t, **how: F.nll_loss(o.log_softmax(1), t, **how)),
    "ce": ("classes", F.cross_entropy),
    "ce ignoring": ("some", F.cross_entropy),
    "ce weight": ("some", partial(F.cross_entropy, weight=WEIGHT)),
    "ce smoothing": ("some", partial(F.cross_entropy, label_smoothing=0.1)),
    "ce weight smoothing": ("some", partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1)),
    "ce shares": ("shares", F.cross_entropy),
    "ce tokens": ("tokens", lambda o, t, **how: F.cross_entropy(o.flatten(0, 1), t.flatten(), **how)),
    "ce tokens shifted": ("tokens", lambda o, t, **how: F.cross_entropy(
        o[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1), **how)),
    "ce tokens padded": ("tokens", lambda o, t, **how: F.cross_entropy(
        o.flatten(0, 1), F.pad(t, (0, 1), value=IGNORED)[:, 1:].flatten(), **how)),
    **({"ce of a head": ("some", lambda o, t, **how: F.linear_cross_entropy(o, WEIGHT.diag(), t, **how))}
       if hasattr(F, "linear_cross_entropy") else {}),
}
TORCH: Table = {
    f"{name} {kind}": (batch, partial(loss, reduction=kind))
    for name, (batch, loss) in _REDUCED.items() for kind in ("mean", "sum")
}
for _name in "mse", "bce logits weight", "triplet", "ce", "ce smoothing":
    _batch, _loss = _REDUCED[_name]
    TORCH[f"{_name} none"] = _batch, lambda o, t, loss=_loss: loss(o, t, reduction="none").mean()  # type: ignore[misc]
TORCH |= {
    "mse default": ("values", F.mse_loss),
    "kl_div batchmean": ("shares", lambda o, t: F.kl_div(o.log_softmax(1), t, reduction="batchmean")),
    "module mse": ("values", nn.MSELoss()),
    "module ce": ("some", nn.CrossEntropyLoss()),
    "module ce weight": ("some", nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)),
}


# Around torch's losses.

def without_gradient(o: Tensor, t: Tensor) -> Tensor:
    loss = F.mse_loss(o, t)
    with torch.no_grad():
        more = 0.5 * loss
    return loss + more


class Module(nn.Module):
    """A loss in a module, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", WEIGHT.clone())

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o.flatten(0, 1), t.flatten(), self.weight)  # type: ignore[arg-type]


def accumulated(start: Callable[[], Any]) -> Loss:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        total = start()
        total += F.cross_entropy(o.flatten(0, 1), t.flatten())
        total += 0.5 * F.cross_entropy(2 * o.flatten(0, 1), t.flatten())
        return total

    return loss


AROUND: Table = {
    "lambda of keywords": ("some", lambda o, t: F.cross_entropy(input=o, target=t)),
    "literal class weights": ("some", lambda o, t: F.cross_entropy(
        torch.cat([o, -o[:, :1]], 1), t, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).double(), label_smoothing=0.1)),
    "own module": ("tokens", Module()),
    "float": ("some", lambda o, t: F.cross_entropy(o.float(), t)),
    "sum of a number": ("some", lambda o, t: F.cross_entropy(o, t).sum()),
    "squeezed": ("some", lambda o, t: F.cross_entropy(o, t).unsqueeze(0).squeeze()),
    "an item of one": ("some", lambda o, t: F.cross_entropy(o, t).view(1)[0]),
    "of an accumulation step": ("some", lambda o, t: F.cross_entropy(o, t) / 4),
    "times 0.5": ("some", lambda o, t: F.cross_entropy(o, t) * 0.5),
    "times a tensor": ("some", lambda o, t: F.cross_entropy(o, t) * WEIGHT[0]),
    "negative": ("some", lambda o, t: -F.cross_entropy(o, t)),
    "1 minus": ("some", lambda o, t: 1 - F.cross_entropy(o, t)),
    "plus a number": ("some", lambda o, t: F.cross_entropy(o, t) + 2.5),
    "from 0": ("tokens", accumulated(lambda: 0)),
    "doubled often": ("flat", lambda o, t: reduce(lambda x, _: x + x, range(20), F.mse_loss(o, t)) / 2**20),
    "sum of a list": ("tokens", lambda o, t: sum([F.cross_entropy(k * o.transpose(1, 2), t) for k in (1, 2, 3)])),
    "mean of a stack of terms": ("tokens", lambda o, t: torch.stack(
        [F.cross_entropy(k * o.transpose(1, 2), t) for k in (1, 2)]).mean()),
    "add with alpha": ("tokens", lambda o, t: torch.add(
        F.cross_entropy(o.transpose(1, 2), t), F.cross_entropy(2 * o.transpose(1, 2), t), alpha=0.5)),
    "if any of ones": ("values", lambda o, t: F.mse_loss(o, t) if torch.ones(len(o), 3).sum() > 0 else o.sum() * 0),
    "if guard": ("some", lambda o, t: F.cross_entropy(o, t) if (t != IGNORED).any() else o.sum() * 0),
    "if guard of a selection": ("some", lambda o, t: (lambda has: o[has].square().mean() if has.any() else o.sum() * 0)(
        t != IGNORED)),
    "at least one, and a penalty": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / counted(t).sum().clamp(
        min=1) + 0.5),
    "at least three, twice": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / counted(t).sum().clamp(
        min=3).clamp(min=1)),
    "a part without a gradient": ("flat", without_gradient),
    "plus 0 times the output": ("some", lambda o, t: F.cross_entropy(o, t) + 0.0 * o.sum()),
    "detached logging": ("some", lambda o, t: (F.cross_entropy(o, t), F.cross_entropy(o, t).detach().item())[0]),
    "rows and elements": ("flat", lambda o, t: F.mse_loss(o, t) + 0.1 * (o - t).pow(2).sum(1).mean()),
}


# Means by hand.

def smoothed(o: Tensor, t: Tensor) -> Tensor:
    logs = o.log_softmax(-1)
    right = -logs.gather(1, t.unsqueeze(1)).squeeze(1)
    return (0.9 * right + 0.1 * -logs.mean(-1)).mean()


def vae(o: Tensor, t: Tensor) -> Tensor:
    mean, log = o[:, :2], o[:, 2:4]
    recon = F.mse_loss(o, t, reduction="sum")
    kl = -0.5 * torch.sum(1 + log - mean.pow(2) - log.exp())
    return recon + kl


def smoothed_sum(logs: Tensor, t: Tensor) -> Tensor:
    """A sum whose second factor is 1 / 42: as well as a constant, it may be made from a number of rows."""
    right, rest = -logs.gather(-1, t.clamp(min=0)[..., None])[..., 0] * counted(t), -logs.sum(-1) * counted(t)
    return right.sum() * (41 / 42) + rest.sum() * (4 / 42 / (logs.size(-1) - 1))


def in_place(o: Tensor, t: Tensor) -> Tensor:
    """Two means, added up, divided and multiplied in place."""
    found = F.cross_entropy(o.flatten(0, 1), t.flatten())
    found += o.square().mean()
    found /= 3
    found *= 2
    found -= 0.1 * o.mean()
    return found.neg_().neg_().div_(2)


def two_views(halves: Callable[[Tensor, int], Any]) -> Loss:
    """Of one batch with two views of each row, as for a discriminator, and SimSiam."""

    def loss(o: Tensor, t: Tensor) -> Tensor:
        one, other = halves(torch.cat([o, t]).tanh(), o.size(0))
        total = 0
        for view in (one, other):
            total += F.softplus(view).mean()
            total += (one * other.detach()).sum(-1).mean()
        total /= 6
        return total  # type: ignore[return-value]

    return loss


def masked_by_index(o: Tensor, t: Tensor) -> Tensor:
    mask = torch.zeros(t.shape, dtype=o.dtype)
    mask[t != IGNORED] = 1
    return (each(o, t) * mask).sum() / mask.sum()


HAND: Table = {
    "repeated words": ("values", lambda o, t: (o.repeat_interleave(2, 1) - t.repeat_interleave(2, 1)).square().mean()),
    "weighted": ("labels", lambda o, t: (each(o, t) * WEIGHT[t]).sum() / WEIGHT[t].sum()),
    "selected first": ("tokens", lambda o, t: F.cross_entropy(o[t != IGNORED], t[t != IGNORED])),
    "rmse": ("values", lambda o, t: F.mse_loss(o, t).sqrt()),
    "product with itself": ("flat", lambda o, t: (lambda x: x * x)(F.mse_loss(o, t))),
    "at least": ("flat", lambda o, t: (o - t).square().sum().clamp(min=0.5)),
    "detached balance": ("flat", lambda o, t: F.mse_loss(o, t) / (1 + F.l1_loss(o, t).detach())),
    "over a mean": ("flat", lambda o, t: 1 / (1 + F.mse_loss(o, t))),
    "one hot by writing": ("classes", lambda o, t: (
        -(torch.full_like(o, 0.02).scatter_(1, t[:, None], 0.92) * o.log_softmax(1)).sum(1).mean())),
    "beside an array": ("some", lambda o, t: (np.asarray(o.detach(), dtype=np.float32), F.cross_entropy(o, t))[1]),
    "of weight 0": ("flat", lambda o, t: torch.tensor(0.0).double() * F.mse_loss(o, t)),
    "two masked, one of weight 0": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / counted(t).sum() + (
        torch.tensor(0.0) * (o.square().mean(-1) * counted(t)).sum() / counted(t).sum())),
    "0 times what may not count": ("flat", lambda o, t: 0.0 * o[t > 0.8].square().mean() + F.mse_loss(o, t)),
    "a masked mean if any": ("tokens", lambda o, t: (
        lambda m: (each(o, t) * m.double()).sum() / m.sum() if m.any() else o.sum() * 0)(t != IGNORED)),
    "resized": ("values", lambda o, t: F.mse_loss(F.interpolate(o, 10), F.interpolate(t, 10))),
    "squeezed rows": ("flat", lambda o, t: F.mse_loss(o[:, :1].squeeze(), t[:, :1].squeeze())),
    "from a zero": ("flat", lambda o, t: (torch.zeros(()) + (o - t) - torch.tensor(0.0)).square().mean()),
    "masked": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / counted(t).sum()),
    "clamped": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / counted(t).sum().clamp(min=1)),
    "plus epsilon": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / (counted(t).sum() + 1e-8)),
    "count_nonzero": ("tokens", lambda o, t: each(o, t).sum() / torch.count_nonzero(t != IGNORED)),
    "reciprocal": ("tokens", lambda o, t: each(o, t).sum() * (1.0 / counted(t).sum())),
    "of a constant": ("flat", lambda o, t: F.poisson_nll_loss(WEIGHT, o.abs()) + o.mean()),
    "boolean index": ("tokens", lambda o, t: each(o, t)[t != IGNORED].mean()),
    "sum in torch's loss": ("tokens", lambda o, t: F.cross_entropy(
        o.flatten(0, 1), t.flatten(), reduction="sum") / (t != IGNORED).sum()),
    "mean of word means": ("tokens", lambda o, t: (each(o, t).sum(1) / counted(t).sum(1).clamp(min=1)).mean()),
    "a masked mean times four": ("values", lambda o, t: o.size(0) * 0 + (o * (t > 0)).sum() / (t > 0).sum() * 4),
    "one times a sum": ("flat", lambda o, t: 0.0 * o.shape[0] + 1.0 * (o - t).square().sum()),
    "zeros as the target": ("flat", lambda o, t: F.binary_cross_entropy_with_logits(
        o[:, :1], torch.zeros(len(o), 1).double())),
    "stack times a number": ("flat", lambda o, t: (torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)]) * 0.3).sum()),
    "one of a stack": ("flat", lambda o, t: torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)])[1]),
    "two terms times a constant": ("flat", lambda o, t: (F.mse_loss(o, t) + F.l1_loss(o, t)) * WEIGHT[3]),
    "weights of elements": ("flat", lambda o, t: (
        torch.linspace(0, 1, o[0].numel()).reshape(o.shape[1:]) * (o - t).square()).mean()),
    "index of rows": ("classes", lambda o, t: -o.log_softmax(1)[torch.arange(len(o)), t].mean()),
    "sum": ("values", lambda o, t: (o - t).square().sum()),
    "sum by a constant": ("values", lambda o, t: (o - t).square().sum() / 64),
    "by rounded halves": ("labels", lambda o, t: (o.sum(-1) * torch.div(t, 2, rounding_mode="floor")).sum()),
    "mean(1).mean": ("values", lambda o, t: (o - t).square().mean(1).mean()),
    "mean of dims": ("values", lambda o, t: (o - t).square().mean(dim=(0, 1, 2))),
    "sum(1).mean": ("values", lambda o, t: (o - t).square().sum(1).mean()),
    "stacked behind": ("flat", lambda o, t: torch.stack([o, t], -1).prod(-1).mean()),
    "each word": ("values", lambda o, t: sum(F.mse_loss(o[:, i], t[:, i]) for i in range(o.shape[1]))),
    "norm of rows": ("flat", lambda o, t: (o - t).norm(dim=1).mean()),
    "cosine similarity": ("flat", lambda o, t: 1 - F.cosine_similarity(o, t).mean()),
    "pieces of words": ("tokens", lambda o, t: sum(
        F.cross_entropy(x.reshape(-1, CLASSES), y.reshape(-1), reduction="sum")
        for x, y in zip(o.tensor_split(2, 1), t.tensor_split(2, dim=1))) / counted(t).sum()),
    "logsumexp": ("classes", lambda o, t: (o.logsumexp(1) - o.gather(1, t[:, None])[:, 0]).mean()),
    "ppo": ("flat", lambda o, t: -torch.min(o.exp() * t, o.exp().clamp(0.8, 1.2) * t).mean()),
    "smoothing by hand": ("classes", smoothed),
    "vae": ("flat", vae),
    "sum by a count times a tensor": ("tokens", lambda o, t: 2 * (o.square().sum() / counted(t).sum() * WEIGHT[0])),
    "sum by a count or a tensor of 1": ("tokens", lambda o, t: (lambda n: (each(o, t) * counted(t)).sum() / n.maximum(
        torch.ones_like(n)))(counted(t).sum())),
    "smoothing as in fairseq": ("tokens", lambda o, t: smoothed_sum(o.log_softmax(-1), t) / (t != IGNORED).sum()),
    "several in place": ("labels", in_place),
    "weights with rows": ("flat", lambda o, t: o.square().sum() + (WEIGHT + torch.zeros_like(o)).square().sum()),
    "by ones of what counts": ("some", lambda o, t: o[t != IGNORED].sum() / torch.ones_like(o[t != IGNORED]).sum()),
    "mean of an expanded number": ("tokens", lambda o, t: (lambda x: (x * torch.ones_like(x)).mean())(
        F.cross_entropy(o.flatten(0, 1), t.flatten()))),
}
EXACT: Table = {**TORCH, **AROUND, **HAND}

def guarded(o: Tensor, t: Tensor) -> Tensor:
    """A mean over all rows, and one over what counts, if anything does."""
    loss, has = F.mse_loss(o[:, 0, 0], torch.ones_like(o[:, 0, 0])), t != IGNORED
    if has.any():
        loss = loss + F.cross_entropy(o[has], t[has])
    return loss


#: Terms of different counts.
SEVERAL: Table = {
    "tokens and elements": ("tokens", lambda o, t: F.cross_entropy(o.transpose(1, 2), t) + 0.1 * o.square().mean()),
    "tokens and rows": ("tokens", lambda o, t: each(o, t).sum() / counted(t).sum() + F.mse_loss(
        o[:, 0, 0], torch.ones_like(o[:, 0, 0]))),
}

def tasks(o: Tensor, t: Tensor) -> Tensor:
    """A mean for each task, over the rows that have it; of tasks that no row has, none."""
    loss = o.new_zeros(())
    for k in range(WORDS):
        has = t[:, k] != IGNORED
        if has.any():
            loss = loss + F.cross_entropy((k + 1) * o[has][:, k], t[has][:, k])
    return loss


def weighted(o: Tensor, t: Tensor) -> Tensor:
    """Weights by how many there are of either kind, which are written where a mask says."""
    weights, positive = torch.zeros_like(t), t > 0
    weights[positive] = 1.0 / positive.sum()
    weights[~positive] = 1.0 / (~positive).sum()
    return (F.binary_cross_entropy_with_logits(o, positive.double(), reduction="none") * weights).sum()


MIXED: Table = {
    "mean of words and sum": ("tokens", lambda o, t: F.cross_entropy(o.transpose(1, 2), t) + 0.1 * o.square().sum()),
    "mean and sum": ("values", lambda o, t: F.mse_loss(o, t) + 0.1 * (o - t).abs().sum()),
}


def dice(o: Tensor, t: Tensor) -> Tensor:
    p = o.sigmoid()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def written(o: Tensor, t: Tensor) -> Tensor:
    """Numbers that are written into a vector."""
    found = o.new_zeros(2)
    found[0], found[1] = F.mse_loss(o, t), F.l1_loss(o, t)
    return found.sum()


def centred(o: Tensor, t: Tensor) -> Tensor:
    values = t[:, 0].tolist()
    return F.mse_loss(o - sum(values) / len(values), t)


class Square(torch.autograd.Function):
    """Entries, squared."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.saved_tensors[0]


class Kept:
    """A loss that keeps the last output."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, o: Tensor, t: Tensor) -> Tensor:
        last, self.last = self.last, o.detach().mean(0)
        return (o - (0.0 if last is None else 0.0 * last)).square().mean()


def overwritten(o: Tensor, t: Tensor) -> Tensor:
    """Through a view, rows get others' values."""
    x = o * 1
    view = x[:, 0]
    view.copy_(o[:, 1].flip(0))
    return (x - t).square().mean()


def scaled_view(o: Tensor, t: Tensor) -> Tensor:
    x = o * 1
    x.view(-1).div_(len(o))
    return x.abs().sum()


def logged(o: Tensor, t: Tensor) -> Tensor:
    loss = F.mse_loss(o, t)
    return loss * (2.0 if loss.item() > 1 else 1.0)


def unseen(o: Tensor, t: Tensor) -> Tensor:
    """A write that the graph doesn't see."""
    loss = F.mse_loss(o, t)
    with torch.no_grad():
        loss.mul_(2)
    return loss


def written_later(o: Tensor, t: Tensor) -> Tensor:
    """A constant changes after a loss has been computed of it."""
    offset = torch.zeros(())
    loss = F.mse_loss(o, t) + offset
    offset += 1
    return loss


def left_behind(o: Tensor, t: Tensor) -> Tensor:
    """A write to a number of which another one has been computed."""
    loss = F.mse_loss(o, t)
    twice = loss * 2
    with torch.no_grad():
        loss.zero_()
    return twice


def hooked_then_written(o: Tensor, t: Tensor) -> Tensor:
    """A hook of a number that is written to afterwards."""
    loss = F.mse_loss(o, t) * 2
    loss.register_hook(lambda grad: grad / 2)
    loss += 1
    return loss * 2


def hooked(o: Tensor, t: Tensor) -> Tensor:
    loss = F.mse_loss(o, t) * 2
    loss.register_hook(lambda grad: 2 * grad)
    return loss


def cropped(o: Tensor, t: Tensor) -> Tensor:
    lengths = counted(t).sum(1).long()
    return o[:, :lengths.max()].square().mean()


SAID: Table = {
    "columns and rows": ("flat", lambda o, t: (o[:, 0] - t[:, :1]).square().mean()),
    "another loss if nothing counts": ("flat", lambda o, t: (
        o[t > 1].square().mean() if (t > 1).any() else o.square().mean())),
    "rows up to a size": ("flat", lambda o, t: F.mse_loss(o[: len(t)], t)),
    "by a condition in the type of rows": ("flat", lambda o, t: F.mse_loss(o, t) * (1 - ((t > 0).sum() > 99).to(o))),
    "a guard of what doesn't count": ("flat", lambda o, t: (lambda m: F.binary_cross_entropy_with_logits(
        o, m.double(), reduction="sum") / m.sum() if m.any() else o.sum() * 0)(t > 1.5)),
    "by the length of ones": ("flat", lambda o, t: (
        lambda w: ((o - t).square() * w).sum() / len(w))(torch.ones_like(o))),
    "sorted along an axis": ("flat", lambda o, t: (o.sort(axis=0).values - t.sort(axis=0).values).abs().mean()),
    "a constant written after its use": ("flat", written_later),
    "detached in some microbatches": ("flat", lambda o, t: (
        lambda x: x.detach() if x > 2 else x)((o - t).square().mean()) + o.mean()),
    "by class, scattered": ("classes", lambda o, t: torch.zeros(5).double().scatter_add(
        0, t, F.cross_entropy(o, t, reduction="none")).mean()),
    "a hook of a number": ("flat", hooked),
    "up to the longest": ("tokens", cropped),
    "weights by rows": ("classes", lambda o, t: ((WEIGHT / len(o))[t] * F.cross_entropy(o, t, reduction="none")).sum()),
    "where of a share": ("flat", lambda o, t: (torch.where(t > 0, 1 / len(o), 0.0) * o.square()).sum()),
    "max": ("tokens", lambda o, t: each(o, t).sum() / max(counted(t).sum(), 1)),  # type: ignore[call-overload]
    "tasks": ("tokens", tasks),
    "rows, and tokens if there are any": ("tokens", guarded),
    "where guard": ("some", lambda o, t: torch.where((t != IGNORED).any(), F.cross_entropy(o, t), o.sum() * 0)),
    "masked_select": ("tokens", lambda o, t: each(o, t).masked_select(t != IGNORED).mean()),
    "by torch's deprecated options": ("values", lambda o, t: (
        F.l1_loss(o, t, size_average=False) / len(o) + F.mse_loss(o, t, True, False).mean()
        + F.mse_loss(o, t, reduction="elementwise_mean"))),
    "halves by slices": ("flat", two_views(lambda x, rows: (x[:rows], x[rows:]))),
    "length of a selection": ("tokens", lambda o, t: (lambda e: e.sum() / max(len(e), 1))(each(o, t)[t != IGNORED])),
    "item": ("tokens", lambda o, t: each(o, t).sum() / counted(t).sum().item()),
    "mask by index": ("tokens", masked_by_index),
    "for each word and row": ("values", lambda o, t: F.mse_loss(o, t).expand(WORDS, len(o)).sum()),
    "normalised weights": ("tokens", lambda o, t: (each(o, t) * (counted(t) / counted(t).sum())).sum()),
    "padded with a size": ("values", lambda o, t: F.pad((o - t).square(), (0, 1), value=len(o)).sum()),
    "if": ("flat", lambda o, t: F.mse_loss(o, t) if F.mse_loss(o, t) < 2 else F.l1_loss(o, t)),
    "a single piece": ("flat", lambda o, t: 2 * torch.stack([F.mse_loss(o, t)]).unbind()[0]),
    "nothing is 0": ("flat", lambda o, t: o[t > 0].square().mean().nan_to_num() * 2),
    "keywords alone": ("flat", lambda o, t: torch.mean(input=torch.stack(tensors=[(o - t).square(), o.abs()]))),
    "an alpha of entries": ("flat", lambda o, t: torch.add(o.abs(), (o - t).square(), alpha=1 / len(o)).sum()),
    "entries and a share": ("values", lambda o, t: ((o - t).square() + 1 / o.numel()).sum()),
    "padded with a share": ("values", lambda o, t: F.pad((o - t).square(), (0, 1), value=1 / o.numel()).sum()),
    "at most a share": ("values", lambda o, t: (o - t).square().clamp(max=1 / o.numel()).sum()),
    "a size less a count": ("flat", lambda o, t: o[t <= 0].square().sum() / (t.numel() - (t > 0).sum())),
    "a share of two terms": ("tokens", lambda o, t: (1.0 / counted(t).sum()) * (each(o, t).sum() + o.mean())),
    "rows and a penalty": ("flat", lambda o, t: (o.square() - (o * t).sum() / len(o) / 7).mean()),
    "a delta of the errors": ("flat", lambda o, t: F.huber_loss(o, t, delta=(o - t).abs().median().item())),
    "weights of elements": ("flat", lambda o, t: F.mse_loss(o, t, weight=o.detach().abs() + 1)),
    "a share in the shape of rows": ("flat", lambda o, t: (
        torch.broadcast_tensors(torch.tensor(1 / len(o)), o)[0] * o.square()).sum()),
    "a number in the shape of rows": ("flat", lambda o, t: F.mse_loss(o, t).expand_as(o).sum()),
    "by a prior": ("shares", lambda o, t: F.kl_div(WEIGHT.log_softmax(0), t, reduction="batchmean") + o.mean()),
    "where weights are not masked": ("tokens", lambda o, t: (
        (each(o, t) * counted(t)).sum() / o.detach().exp().sum() if counted(t).any() else 0 * o.sum())),
    # Rows meet where it is hard to see, or a number does.
    "by ones over their number": ("flat", lambda o, t: ((o - t).square().T * (torch.ones(len(o)) / len(o))).sum()),
    "gathered rows": ("flat", lambda o, t: o.gather(0, torch.zeros(1, 5).long()).sum()),
    "gram by linear": ("flat", lambda o, t: F.linear(o, t).square().mean()),
    "written through a view": ("flat", overwritten),
    "divided through a view": ("flat", scaled_view),
    "a reading that chooses": ("flat", logged),
    "by a filled tensor in place": ("flat", lambda o, t: (o.square() * torch.empty_like(o).fill_(1 / len(o))).sum()),
    "by a filled tensor": ("flat", lambda o, t: ((o - t).square() * torch.full_like(o, 1 / len(o))).sum()),
    "written without a graph": ("flat", unseen),
    "written after its use": ("flat", left_behind),
    "written after a hook": ("flat", hooked_then_written),
    "times ones of rows": ("flat", lambda o, t: (o.new_ones(len(o)) * F.mse_loss(o, t)).sum()),
    "addcmul": ("flat", lambda o, t: torch.addcmul(
        F.mse_loss(o, t), (o - t).square().sum(), torch.tensor(2.0).double(), value=1 / len(o))),
    "by a count of vmap": ("tokens", lambda o, t: (
        each(o, t).sum() / torch.vmap(lambda x: (x != IGNORED).sum())(t).sum())),
    "a mean if it isn't a number": ("flat", lambda o, t: (
        (lambda x: o.sum() if x.isnan().any() else x)(o[t > 1].square().mean()))),
    "a kept mean": ("flat", Kept()),
    "a kernel of entries": ("flat", lambda o, t: Square.apply(o - t).mean()),  # type: ignore[no-untyped-call]
}


class Half(torch.autograd.Function):
    """A kernel that returns a number."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, t: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(o - t)
        return 0.5 * (o - t).square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x / x.numel(), None


def two(o: Tensor, t: Tensor) -> Tensor:
    """The losses of two tasks."""
    return torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)])


def balanced_experts(o: Tensor, t: Tensor) -> Tensor:
    """A load-balancing loss: the share of rows of each expert, and its mean probability."""
    chosen = F.one_hot(o.argmax(1), CLASSES).double()
    return F.mse_loss(o, t) + 0.1 * CLASSES * (chosen.mean(0) * o.softmax(1).mean(0)).sum()


UNKNOWN: dict[str, tuple[str, Loss, str]] = {
    "kernel": ("flat", Half.apply, "HalfBackward"),  # type: ignore[dict-item]
    "norm": ("values", lambda o, t: (o - t).norm(), "norm"),
    "rows and a number, summed": ("values", lambda o, t: ((o - t).square() + F.mse_loss(o, t)).sum(), "sum"),
    "rows and a number, squared": ("values", lambda o, t: ((o - t) + F.mse_loss(o, t)).square().mean(), "add"),
    "std": ("flat", lambda o, t: F.mse_loss(o, t) + (o - t).std(), "std"),
    "nan_to_num": ("some", lambda o, t: F.cross_entropy(o, t).nan_to_num(), "nan_to_num"),
    "written numbers": ("flat", written, "setitem"),
    "the larger of two": ("flat", lambda o, t: two(o, t)[two(o, t).detach().argmax()], "getitem"),
}

#: Sums with several entries, and what isn't linear in sums: only drop-in are they exact.
DROP_IN: dict[str, tuple[str, Loss, str]] = {
    "sum(0).mean": ("flat", lambda o, t: (o - t).square().sum(0).mean(), "sum"),
    "mean(0).sum": ("flat", lambda o, t: (o - t).square().mean(0).sum(), "mean"),
    "experts": ("flat", balanced_experts, "mean"),
    "dice": ("binary", dice, "linear"),
}


def info_nce(o: Tensor, t: Tensor) -> Tensor:
    o, t = F.normalize(o, dim=1), F.normalize(t, dim=1)
    return F.cross_entropy(o @ t.T / 0.5, torch.arange(len(o)))


def ranked(o: Tensor, t: Tensor) -> Tensor:
    i, j = torch.triu_indices(len(o), len(o), 1)
    return F.relu(1 - o[i, 0] + o[j, 0]).sum()


COUPLED: Table = {
    "info nce": ("flat", info_nce),
    "matmul": ("flat", lambda o, t: torch.matmul(o, o.transpose(0, 1)).exp().mean()),
    "einsum": ("flat", lambda o, t: F.mse_loss(torch.einsum("id,jd->ij", o, o), torch.eye(len(o)).double())),
    "pairs": ("flat", lambda o, t: (o[:, None] - t[None]).square().mean()),
    "rolled": ("flat", lambda o, t: (o - t.roll(1, 0)).square().mean()),
    "cdist": ("flat", lambda o, t: torch.cdist(o, t).mean()),
    "a part of the rows": ("flat", lambda o, t: F.mse_loss(o.chunk(2)[0], t.chunk(2)[0])),
    "a chosen mean": ("flat", lambda o, t: torch.where(
        o.std() > 100, (o - t).square().mean(), torch.tensor(0.0).double() * o.sum())),
    "a part of joined rows": ("flat", lambda o, t: torch.cat([o, t])[: o.shape[0] // 2 + 1].square().sum()),
    "pairs of rows": ("flat", ranked),
    "rows as classes": ("flat", lambda o, t: F.cross_entropy(o[None, :, 0], torch.tensor([0]))),
    "columns as samples": ("flat", lambda o, t: F.cross_entropy(o.T, torch.zeros(CLASSES).long())),
    "a row": ("flat", lambda o, t: F.mse_loss(o[0], t[0])),
    "as many random numbers as rows": ("flat", lambda o, t: len(o) and o.mean() * (torch.rand(2) < 2).sum()),
    "some rows": ("flat", lambda o, t: F.mse_loss(o[:3], t[:3])),
    "groups of rows": ("values", lambda o, t: o.reshape(4, o.numel() // 4).logsumexp(1).mean()),
    "weights in a mask": ("flat", weighted),
    "shuffled rows": ("flat", lambda o, t: 0.3 * F.mse_loss(o, t) + 0.7 * F.mse_loss(o, t[torch.randperm(len(t))])),
    "numbers of rows in another order": ("flat", lambda o, t: F.mse_loss(
        o, t[torch.arange(len(t))[torch.randperm(len(t))]])),
    "rows in an order that NumPy finds": ("flat", lambda o, t: F.mse_loss(
        o, t[torch.as_tensor(np.argsort(-np.asarray(t[:, 0])))])),
    "the first of a mask": ("flat", lambda o, t: (o - t).square()[torch.arange(len(o)) < 2].sum()),
    "a deviation that Python reads": ("flat", lambda o, t: ((o - t) / t.std().item()).square().mean()),
    # Numbers of rows begin again in each microbatch.
    "weights that rise": ("flat", lambda o, t: (torch.linspace(0, 1, len(o))[:, None] * (o - t).square()).mean()),
    "einsum of rising weights": ("flat", lambda o, t: torch.einsum(
        "b,bd->", torch.linspace(0, 1, len(o)).double(), (o - t).square())),
    # Of statistics over the rows, which are other ones in a microbatch.
    "correlation": ("flat", lambda o, t: (o.T @ t / len(o) - torch.eye(CLASSES).double()).square().sum()),
    "centred": ("flat", lambda o, t: (o - o.mean(0)).square().mean()),
    "softmax of rows": ("flat", lambda o, t: (o.softmax(0) * t).sum()),
}


def squares(parameters: list[Tensor]) -> Tensor:
    return sum(p.pow(2).sum() for p in parameters)  # type: ignore[return-value]


def penalised(o: Tensor, t: Tensor, own: Any) -> Tensor:
    """A mean and a penalty, or neither if nothing counts."""
    has = t != IGNORED
    return F.cross_entropy(o[has], t[has]) + 0.01 * squares(own) if has.any() else o.new_zeros(())


PENALTIES: Table = {
    "over a weight": ("tokens", lambda o, t, own: F.l1_loss(o[t > 0], o[t > 0] * 0) / own[-1].square().sum()),
    "a stack with a mean": ("some", lambda o, t, own: torch.stack([
        F.cross_entropy(o, t), 0.1 * own[0].square().sum()]).sum()),
    "if anything counts": ("tokens", penalised),
    "a term that is turned off": ("tokens", lambda o, t, own: (
        F.cross_entropy(o.transpose(1, 2), t) + torch.tensor(0.0) * o.square().mean() + 0.01 * squares(own))),
    "alone": ("flat", lambda o, t, own: 0.01 * squares(own)),
    "learned weights of two means": ("values", lambda o, t, own: sum(
        (-own[-1][k]).exp() * loss(o, t) + own[-1][k] for k, loss in enumerate((F.mse_loss, F.l1_loss)))),
    "l2 and words": ("tokens", lambda o, t, own: F.cross_entropy(o.transpose(1, 2), t) + 0.01 * squares(own)),
    "times a weight": ("tokens", lambda o, t, own: F.cross_entropy(o.transpose(1, 2), t) * own[-1].sum().exp()),
    "by a count": ("tokens", lambda o, t, own: (each(o, t).sum() + squares(own)) / counted(t).sum()),
    "times a share": ("tokens", lambda o, t, own: (
        each(o, t).sum() / counted(t).sum() + squares(own) * counted(t).double().mean())),
}

SAID_PENALTIES: Table = {
    "a hinge": ("values", lambda o, t, own: F.relu(F.mse_loss(o, t) - 10) + 0.01 * squares(own)),
    "max of int": ("tokens", lambda o, t, own: each(o, t).sum() / max(int((t != IGNORED).sum()), 1) + 0.01 * squares(
        own)),
    "two weighed by parameters": ("values", lambda o, t, own: (
        two(o, t) / own[-1][:2].exp() + own[-1][:2]).mean()),
    "a product of two with weights": ("values", lambda o, t, own: two(o, t) @ own[-1][:2].softmax(0)),
}
