"""Losses that people write, as functions of an output and a target: what the promise of the batch's loss is tried with.

    EXACT      the loss and gradients of the whole batch, drop-in and scheduled
    SEVERAL    several terms: drop-in exact; scheduled exact if their counts are proportional, else an error
    MIXED      a mean over what is counted plus a sum: drop-in exact; scheduled exact, or said
    SAID       exact, or a warning or an error that says why not
    UNKNOWN    one warning that names a function; taken as a mean over rows
    COUPLED    rows are compared with each other: a warning or an error, whatever the value
    PENALTIES  as EXACT; the function is given the module's parameters, too

To add a loss, add a line to one of these tables: its name, the batch that it is for (``BATCHES``), the function.
Outputs are [rows, 5] for batches in ``FLAT``, else [rows, WORDS, 5]; all is float64.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
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


def _letters(rows: int, even: bool) -> Tensor:
    found = torch.randint(1, CLASSES, (rows, 2))
    found[::2, 1] = 0
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
    "letters": _letters,
}
FLAT = {"some", "classes", "flat", "binary", "signs", "sign", "shares", "sparse"}


def each(o: Tensor, t: Tensor) -> Tensor:
    """The loss of each word, 0 where it is ignored."""
    return F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="none").view(t.shape)


def counted(t: Tensor) -> Tensor:
    return (t != IGNORED).double()


# torch's own, with each of their reductions. What a module has as its name, its function has, too.

def _ctc(o: Tensor, t: Tensor, **how: Any) -> Tensor:
    lengths = torch.full((len(o),), WORDS)
    return F.ctc_loss(o.log_softmax(-1).transpose(0, 1), t, lengths, (t > 0).sum(1), **how)


_REDUCED: Table = {
    "l1": ("values", F.l1_loss),
    "mse": ("values", F.mse_loss),
    "smooth_l1": ("values", partial(F.smooth_l1_loss, beta=0.5)),
    "huber": ("values", partial(F.huber_loss, delta=0.5)),
    "bce": ("binary", lambda o, t, **how: F.binary_cross_entropy(o.sigmoid(), t, **how)),
    "bce weight": ("binary", lambda o, t, **how: F.binary_cross_entropy(o.sigmoid(), t, WEIGHT, **how)),
    "bce logits": ("binary", F.binary_cross_entropy_with_logits),
    "bce logits weight": ("binary", partial(F.binary_cross_entropy_with_logits, weight=WEIGHT, pos_weight=WEIGHT)),
    "kl_div": ("shares", lambda o, t, **how: F.kl_div(o.log_softmax(1), t, **how)),
    "kl_div log": ("shares", lambda o, t, **how: F.kl_div(o.log_softmax(1), t.log(), log_target=True, **how)),
    "poisson": ("binary", F.poisson_nll_loss),
    "gaussian": ("flat", lambda o, t, **how: F.gaussian_nll_loss(o, t, o.exp(), **how)),
    "hinge": ("signs", F.hinge_embedding_loss),
    "soft margin": ("signs", F.soft_margin_loss),
    "multi margin": ("classes", F.multi_margin_loss),
    "multi margin weight": ("classes", partial(F.multi_margin_loss, weight=WEIGHT)),
    "multilabel margin": ("sparse", F.multilabel_margin_loss),
    "multilabel soft margin": ("binary", F.multilabel_soft_margin_loss),
    "triplet": ("flat", lambda o, t, **how: F.triplet_margin_loss(o, t, t.flip(1), **how)),
    "triplet distance": ("flat", lambda o, t, **how: F.triplet_margin_with_distance_loss(o, t, t.flip(1), **how)),
    "margin ranking": ("sign", lambda o, t, **how: F.margin_ranking_loss(o[:, 0], o[:, 1], t, **how)),
    "cosine": ("sign", lambda o, t, **how: F.cosine_embedding_loss(o[:, :2], o[:, 2:4], t, **how)),
    "nll": ("classes", lambda o, t, **how: F.nll_loss(o.log_softmax(1), t, **how)),
    "nll ignoring": ("some", lambda o, t, **how: F.nll_loss(o.log_softmax(1), t, **how)),
    "nll weight": ("some", lambda o, t, **how: F.nll_loss(o.log_softmax(1), t, WEIGHT, **how)),
    "ctc": ("letters", _ctc),
    "ctc zero infinity": ("letters", partial(_ctc, zero_infinity=True)),
    "ce": ("classes", F.cross_entropy),
    "ce ignoring": ("some", F.cross_entropy),
    "ce ignoring another": ("classes", partial(F.cross_entropy, ignore_index=0)),
    "ce weight": ("some", partial(F.cross_entropy, weight=WEIGHT)),
    "ce smoothing": ("some", partial(F.cross_entropy, label_smoothing=0.1)),
    "ce weight smoothing": ("some", partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1)),
    "ce shares": ("shares", F.cross_entropy),
    "ce shares weight": ("shares", partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1)),
    "ce tokens": ("tokens", lambda o, t, **how: F.cross_entropy(o.flatten(0, 1), t.flatten(), **how)),
    "ce tokens view": ("tokens", lambda o, t, **how: F.cross_entropy(o.view(-1, CLASSES), t.view(-1), **how)),
    "ce tokens transposed": ("tokens", lambda o, t, **how: F.cross_entropy(o.transpose(1, 2), t, **how)),
    "ce tokens shifted": ("tokens", lambda o, t, **how: F.cross_entropy(
        o[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1), **how)),
    "ce tokens padded": ("tokens", lambda o, t, **how: F.cross_entropy(
        o.flatten(0, 1), F.pad(t, (0, 1), value=IGNORED)[:, 1:].flatten(), **how)),
}
TORCH: Table = {
    f"{name} {kind}": (batch, partial(loss, reduction=kind))
    for name, (batch, loss) in _REDUCED.items() for kind in ("mean", "sum")
}
for _name in "mse", "bce logits weight", "triplet", "ce", "ce smoothing", "ctc":
    _batch, _loss = _REDUCED[_name]
    TORCH[f"{_name} none"] = _batch, lambda o, t, loss=_loss: loss(o, t, reduction="none").mean()  # type: ignore[misc]
TORCH |= {
    "ce default": ("classes", F.cross_entropy),
    "mse default": ("values", F.mse_loss),
    "kl_div batchmean": ("shares", lambda o, t: F.kl_div(o.log_softmax(1), t, reduction="batchmean")),
    "module mse": ("values", nn.MSELoss()),
    "module mse sum": ("values", nn.MSELoss(reduction="sum")),
    "module l1": ("values", nn.L1Loss()),
    "module smooth_l1": ("values", nn.SmoothL1Loss()),
    "module huber": ("values", nn.HuberLoss()),
    "module bce logits": ("binary", nn.BCEWithLogitsLoss(pos_weight=WEIGHT)),
    "module ce": ("some", nn.CrossEntropyLoss()),
    "module ce sum": ("some", nn.CrossEntropyLoss(reduction="sum")),
    "module ce weight": ("some", nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)),
    "module multilabel": ("binary", nn.MultiLabelSoftMarginLoss()),
}


# Around torch's losses.

class Criterion:
    """A loss in a class of Python's."""

    def __init__(self, scale: float = 0.5) -> None:
        self.inner, self.scale = nn.CrossEntropyLoss(), scale

    def __call__(self, o: Tensor, t: Tensor) -> Tensor:
        return self.scale * self.inner(o.flatten(0, 1), t.flatten())

    def method(self, o: Tensor, t: Tensor) -> Tensor:
        return self(o, t) / 2


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
    "lambda": ("some", lambda o, t: F.cross_entropy(o, t)),
    "lambda of keywords": ("some", lambda o, t: F.cross_entropy(input=o, target=t)),
    "literal class weights": ("some", lambda o, t: F.cross_entropy(
        torch.cat([o, -o[:, :1]], 1), t, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).double(), label_smoothing=0.1)),
    "lambda of tokens": ("tokens", lambda o, t: F.cross_entropy(o.reshape(-1, o.size(-1)), t.reshape(-1))),
    "class": ("tokens", Criterion()),
    "method": ("tokens", Criterion().method),
    "own module": ("tokens", Module()),
    "partial of a function": ("tokens", partial(
        lambda o, t, scale: scale * F.cross_entropy(o.transpose(1, 2), t), scale=3)),
    "float": ("some", lambda o, t: F.cross_entropy(o.float(), t)),
    "to a dtype and back": ("some", lambda o, t: F.cross_entropy(o.to(torch.float32), t).to(o.dtype)),
    "double": ("some", lambda o, t: F.cross_entropy(o.float(), t).double()),
    "type_as": ("some", lambda o, t: F.cross_entropy(o.float(), t).type_as(o)),
    "to a device": ("some", lambda o, t: F.cross_entropy(o, t).to("cpu")),
    "contiguous clone": ("some", lambda o, t: F.cross_entropy(o, t).contiguous().clone()),
    "mean of a number": ("some", lambda o, t: F.cross_entropy(o, t).mean()),
    "sum of a number": ("some", lambda o, t: F.cross_entropy(o, t).sum()),
    "squeezed": ("some", lambda o, t: F.cross_entropy(o, t).unsqueeze(0).squeeze()),
    "viewed": ("some", lambda o, t: F.cross_entropy(o, t).view(1).reshape(())),
    "an item of one": ("some", lambda o, t: F.cross_entropy(o, t).view(1)[0]),
    "of an accumulation step": ("some", lambda o, t: F.cross_entropy(o, t) / 4),
    "div in place": ("some", lambda o, t: F.cross_entropy(o, t).div_(4)),
    "times 0.5": ("some", lambda o, t: F.cross_entropy(o, t) * 0.5),
    "mul in place": ("some", lambda o, t: F.cross_entropy(o, t).mul_(0.5)),
    "times a tensor": ("some", lambda o, t: F.cross_entropy(o, t) * WEIGHT[0]),
    "divided by a tensor": ("some", lambda o, t: torch.div(F.cross_entropy(o, t), torch.tensor(4.0))),
    "torch.mul": ("some", lambda o, t: torch.mul(F.cross_entropy(o, t), 2)),
    "negative": ("some", lambda o, t: -F.cross_entropy(o, t)),
    "1 minus": ("some", lambda o, t: 1 - F.cross_entropy(o, t)),
    "plus a number": ("some", lambda o, t: F.cross_entropy(o, t) + 2.5),
    "from 0": ("tokens", accumulated(lambda: 0)),
    "from zeros": ("tokens", accumulated(lambda: torch.zeros((), dtype=torch.float64))),
    "from a tensor": ("tokens", accumulated(lambda: torch.tensor(0.0, dtype=torch.float64))),
    "from new_zeros": ("tokens", accumulated(lambda: WEIGHT.new_zeros(()))),
    "sum of a list": ("tokens", lambda o, t: sum([F.cross_entropy(k * o.transpose(1, 2), t) for k in (1, 2, 3)])),
    "mean of a list": ("tokens", lambda o, t: sum([F.cross_entropy(k * o.transpose(1, 2), t) for k in (1, 2)]) / 2),
    "stack of terms": ("tokens", lambda o, t: torch.stack(
        [F.cross_entropy(k * o.transpose(1, 2), t) for k in (1, 2)]).sum()),
    "mean of a stack of terms": ("tokens", lambda o, t: torch.stack(
        [F.cross_entropy(k * o.transpose(1, 2), t) for k in (1, 2)]).mean()),
    "add with alpha": ("tokens", lambda o, t: torch.add(
        F.cross_entropy(o.transpose(1, 2), t), F.cross_entropy(2 * o.transpose(1, 2), t), alpha=0.5)),
    "subtracted": ("tokens", lambda o, t: F.cross_entropy(o.transpose(1, 2), t) - 0.1 * F.cross_entropy(
        -o.transpose(1, 2), t)),
    "where guard": ("some", lambda o, t: torch.where((t != IGNORED).any(), F.cross_entropy(o, t), o.sum() * 0)),
    "nan_to_num": ("some", lambda o, t: F.cross_entropy(o, t).nan_to_num()),
    "torch.nan_to_num": ("some", lambda o, t: torch.nan_to_num(F.cross_entropy(o, t), nan=0.0)),
    "if guard": ("some", lambda o, t: F.cross_entropy(o, t) if (t != IGNORED).any() else o.sum() * 0),
    "plus 0 times the output": ("some", lambda o, t: F.cross_entropy(o, t) + 0.0 * o.sum()),
    "detached logging": ("some", lambda o, t: (F.cross_entropy(o, t), F.cross_entropy(o, t).detach().item())[0]),
    "two of the same counts": ("values", lambda o, t: F.mse_loss(o, t) + 0.1 * F.l1_loss(o, t)),
    "rows and elements": ("flat", lambda o, t: F.mse_loss(o, t) + 0.1 * (o - t).pow(2).sum(1).mean()),
}


# Means by hand.

def looped(o: Tensor, t: Tensor) -> Tensor:
    total: Any = 0
    for row, target in zip(o, t):
        total = total + F.mse_loss(row, target)
    return total / len(o)  # type: ignore[no-any-return]


def indexed(o: Tensor, t: Tensor) -> Tensor:
    total = torch.zeros((), dtype=o.dtype)
    for i in range(o.shape[0]):
        total += F.cross_entropy(o[i], t[i])
    return total / o.shape[0]


def focal(o: Tensor, t: Tensor) -> Tensor:
    ce = F.cross_entropy(o, t, reduction="none")
    return (0.25 * (1 - torch.exp(-ce)) ** 2 * ce).mean()


def focal_of_words(o: Tensor, t: Tensor) -> Tensor:
    ce, mask = each(o, t), counted(t)
    return ((1 - torch.exp(-ce)) ** 2 * ce * mask).sum() / mask.sum().clamp(min=1)


def smoothed(o: Tensor, t: Tensor) -> Tensor:
    logs = o.log_softmax(-1)
    right = -logs.gather(1, t.unsqueeze(1)).squeeze(1)
    return (0.9 * right + 0.1 * -logs.mean(-1)).mean()


def smoothed_words(o: Tensor, t: Tensor) -> Tensor:
    logs, mask = -o.log_softmax(-1), t.eq(IGNORED)
    right = logs.gather(2, t.clamp(min=0).unsqueeze(2)).masked_fill(mask.unsqueeze(2), 0.0)
    rest = logs.sum(2, keepdim=True).masked_fill(mask.unsqueeze(2), 0.0)
    count = mask.numel() - mask.long().sum()
    return 0.9 * right.sum() / count + 0.1 * rest.sum() / (count * logs.shape[-1])


def vae(o: Tensor, t: Tensor) -> Tensor:
    mean, log = o[:, :2], o[:, 2:4]
    recon = F.mse_loss(o, t, reduction="sum")
    kl = -0.5 * torch.sum(1 + log - mean.pow(2) - log.exp())
    return recon + kl


def vae_of_means(o: Tensor, t: Tensor) -> Tensor:
    mean, log = o[:, :2], o[:, 2:4]
    kl = torch.mean(-0.5 * torch.sum(1 + log - mean**2 - log.exp(), dim=1), dim=0)
    return F.mse_loss(o, t) + 0.1 * kl


def smoothed_sum(logs: Tensor, t: Tensor) -> Tensor:
    """A sum whose second factor is 1 / 42: as well as a constant, it may be made from a number of rows."""
    right, rest = -logs.gather(-1, t.clamp(min=0)[..., None])[..., 0] * counted(t), -logs.sum(-1) * counted(t)
    return right.sum() * (41 / 42) + rest.sum() * (4 / 42 / (logs.size(-1) - 1))


def preferred(both: Tensor, chosen: slice, rejected: slice) -> Tensor:
    """The preference of rows to those that were joined to them."""
    scores = both.log_softmax(1)[:, 0]
    return -F.logsigmoid(0.1 * (scores[chosen] - scores[rejected])).mean()


def in_place(o: Tensor, t: Tensor) -> Tensor:
    """Two means, added up, divided and multiplied in place."""
    found = F.cross_entropy(o.flatten(0, 1), t.flatten())
    found += o.square().mean()
    found /= 3
    found *= 2
    found -= 0.1 * o.mean()
    return found.neg_().neg_().div_(2)


def masked_by_index(o: Tensor, t: Tensor) -> Tensor:
    mask = torch.zeros(t.shape, dtype=o.dtype)
    mask[t != IGNORED] = 1
    return (each(o, t) * mask).sum() / mask.sum()


def by_order(o: Tensor, t: Tensor) -> Tensor:
    """Losses of words with weights by their rank in the row, as in the Lovasz loss."""
    losses, order = each(o, t).sort(1, descending=True)
    rows = torch.arange(len(t))
    wide, flat = rows[:, None].expand(len(t), WORDS), rows.reshape(-1, 1).repeat(1, WORDS).reshape(-1)
    sums = t[wide, order] + t[flat, order.view(-1)].view(t.shape)
    sums = sums + t[rows.repeat_interleave(2)].view(len(t), 2, WORDS).sum(1)
    return (losses * sums.cumsum(1)).sum(1).mean()


def rows_with_words(o: Tensor, t: Tensor) -> Tensor:
    """A mean over rows, of which those without words have a 0."""
    found = []
    for a, b in zip(o, t):
        has = b != IGNORED
        has[0] = False
        found.append(F.cross_entropy(a[has], b[has]) if has.any() else torch.tensor(0).double())
    return torch.stack(found).mean(dim=0, keepdim=True).mean()


def by_word(o: Tensor, t: Tensor) -> Tensor:
    """A mean over words with a weight for each place, whatever the number of rows."""
    weight = o.new_ones(o.shape[1])
    return (((o - t).square().mean(-1) * weight).sum(-1) / weight.sum()).mean()


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


def variation(o: Tensor, t: Tensor) -> Tensor:
    """The total variation of SRGAN: divided by sizes without rows, then by the number of rows."""
    below = o[:, 1:] - o[:, :-1]
    right, size = o[:, :, 1:] - o[:, :, :-1], below.size()
    total = below.square().sum() / (size[1] * size[2]) + right.square().sum() / (right.size()[1] * 3)
    return F.mse_loss(o, t) + total / o.size()[0]


def areas(o: Tensor, t: Tensor) -> Tensor:
    """Boxes of words that count, as many as there are, in one tensor."""
    boxes = torch.cat([a[b != IGNORED, 1:4] for a, b in zip(o, t)])
    return boxes.prod(1).sum() / max(len(boxes), 1)


def matched(o: Tensor, t: Tensor) -> Tensor:
    """Words that NumPy has matched in each row, as in DETR: no word of a row without any."""
    chosen = [np.argsort(np.asarray(a.detach()[:, 0]))[: int((b != IGNORED).sum())] for a, b in zip(o, t)]
    words = [torch.as_tensor(each, dtype=torch.int64) for each in chosen]
    rows = torch.cat([torch.full_like(each, i) for i, each in enumerate(words)])
    found = o[rows, torch.cat(words)]
    return 5 * (found - 1).abs().mean() + 2 * (found + 1).square().mean()


HAND: Table = {
    "areas": ("tokens", areas),
    "entries by a count times their number": ("flat", lambda o, t: (lambda x: x.square().sum() / max(
        int((t[:, :2] > -9).sum()), 1) * x.shape[1])(torch.cat([o, t, o * t], 1)[:, :12])),
    "words that NumPy matches": ("tokens", matched),
    "numbers joined with nothing": ("flat", lambda o, t: torch.cat([o.new_empty(0), F.mse_loss(o, t).view(1)]).sum()),
    "singular values of rows": ("values", lambda o, t: (
        torch.linalg.svdvals(o).square().mean() + F.mse_loss(torch.linalg.svd(o).S, t[:, :, 0]))),
    "halves by chunk": ("flat", two_views(lambda x, rows: x.chunk(2))),
    "halves by split": ("flat", two_views(lambda x, rows: x.split(rows))),
    "halves by sizes": ("flat", two_views(lambda x, rows: x.split([rows, rows], dim=0))),
    "halves by slices": ("flat", two_views(lambda x, rows: (x[:rows], x[rows:]))),
    "halves by slices of half the size": ("flat", two_views(lambda x, rows: (
        x[: x.shape[0] // 2], x[x.size(0) // 2 :]))),
    "halves by slices to the end": ("flat", two_views(lambda x, rows: (x[:-rows], x[rows : 2 * rows]))),
    "variation": ("values", variation),
    "rows of which some have no words": ("tokens", rows_with_words),
    "weights of words": ("values", by_word),
    "twice a mean": ("values", lambda o, t: 2 * F.mse_loss(o.reshape(o.shape[0], -1), t.reshape(t.shape[0], -1))),
    "index by where": ("some", lambda o, t: F.cross_entropy(
        o[torch.where(t != IGNORED)[0]], t[torch.where(t != IGNORED)[0]])),
    "index_select by where": ("some", lambda o, t: F.cross_entropy(*[
        x.index_select(0, (t != IGNORED).nonzero().view(-1)) for x in (o, t)])),
    "gather by where": ("some", lambda o, t: (lambda rows: F.cross_entropy(
        o.gather(0, rows.expand(-1, CLASSES)), t.gather(0, rows[:, 0])))((t != IGNORED).nonzero())),
    "mask by index": ("tokens", masked_by_index),
    "mask of ones": ("classes", lambda o, t: (F.cross_entropy(o, t, reduction="none") * torch.ones(
        len(o)).double()).sum() / torch.ones(len(o)).double().sum()),
    "count as a tensor": ("flat", lambda o, t: (o - t).square().sum() / torch.tensor(len(o))),
    "count as a new tensor": ("flat", lambda o, t: (o - t).square().sum() / o.new_tensor(o.shape[0])),
    "rows by slices": ("values", lambda o, t: sum(
        F.mse_loss(o[i : i + 1], t[i : i + 1]) for i in range(len(o))) / len(o)),
    "length of a selection": ("tokens", lambda o, t: (lambda e: e.sum() / max(len(e), 1))(each(o, t)[t != IGNORED])),
    "rows by their own counts": ("tokens", lambda o, t: sum(
        a.sum() / b.sum().clamp(min=1) for a, b in zip(each(o, t), counted(t))) / len(o)),
    "divided before the sum": ("flat", lambda o, t: ((o - t).square() / len(o)).sum()),
    "named arguments": ("flat", lambda o, t: torch.flatten(input=(o - t).square()).mean()),
    "masked": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / counted(t).sum()),
    "masked bool": ("tokens", lambda o, t: (each(o, t) * (t != IGNORED)).sum() / (t != IGNORED).sum()),
    "torch.sum": ("tokens", lambda o, t: torch.sum(each(o, t) * counted(t)) / torch.sum(counted(t))),
    "torch.div": ("tokens", lambda o, t: torch.div(each(o, t).sum(), (t != IGNORED).sum())),
    "clamped": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / counted(t).sum().clamp(min=1)),
    "clamp_min": ("tokens", lambda o, t: each(o, t).sum() / counted(t).sum().clamp_min(1.0)),
    "torch.clamp": ("tokens", lambda o, t: each(o, t).sum() / torch.clamp((t != IGNORED).sum(), min=1)),
    "torch.maximum": ("tokens", lambda o, t: each(o, t).sum() / torch.maximum(counted(t).sum(), WEIGHT[1])),
    "max": ("tokens", lambda o, t: each(o, t).sum() / max(counted(t).sum(), 1)),  # type: ignore[call-overload]
    "item": ("tokens", lambda o, t: each(o, t).sum() / counted(t).sum().item()),
    "max of item": ("tokens", lambda o, t: each(o, t).sum() / max((t != IGNORED).sum().item(), 1)),
    "int": ("tokens", lambda o, t: each(o, t).sum() / max(int((t != IGNORED).sum()), 1)),
    "plus epsilon": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / (counted(t).sum() + 1e-8)),
    "count_nonzero": ("tokens", lambda o, t: each(o, t).sum() / torch.count_nonzero(t != IGNORED)),
    "reciprocal": ("tokens", lambda o, t: each(o, t).sum() * (1.0 / counted(t).sum())),
    "normalised weights": ("tokens", lambda o, t: (each(o, t) * (counted(t) / counted(t).sum())).sum()),
    "normalised, guarded": ("tokens", lambda o, t: (each(o, t) * (counted(t) / counted(t).sum().clamp(min=1))).sum()),
    "weighted": ("labels", lambda o, t: (each(o, t) * WEIGHT[t]).sum() / WEIGHT[t].sum()),
    "weighted words": ("tokens", lambda o, t: (each(o, t) * WEIGHT[t.clamp(min=0)] * counted(t)).sum() / (
        WEIGHT[t.clamp(min=0)] * counted(t)).sum()),
    "boolean index": ("tokens", lambda o, t: each(o, t)[t != IGNORED].mean()),
    "masked_select": ("tokens", lambda o, t: each(o, t).masked_select(t != IGNORED).mean()),
    "nonzero index": ("tokens", lambda o, t: each(o, t)[(t != IGNORED).nonzero(as_tuple=True)].mean()),
    "selected first": ("tokens", lambda o, t: F.cross_entropy(o[t != IGNORED], t[t != IGNORED])),
    "ratio of means": ("tokens", lambda o, t: (each(o, t) * counted(t)).mean() / counted(t).mean()),
    "sum in torch's loss": ("tokens", lambda o, t: F.cross_entropy(
        o.flatten(0, 1), t.flatten(), reduction="sum") / (t != IGNORED).sum()),
    "ignore_index and a count": ("tokens", lambda o, t: F.nll_loss(
        o.log_softmax(-1).flatten(0, 1), t.flatten(), reduction="sum") / t.ne(IGNORED).sum()),
    "mean of word means": ("tokens", lambda o, t: (each(o, t).sum(1) / counted(t).sum(1).clamp(min=1)).mean()),
    "two means of the same words": ("tokens", lambda o, t: each(o, t).sum() / counted(t).sum() + 0.1 * (
        o.square().sum(-1) * counted(t)).sum() / counted(t).sum()),
    "one times a sum": ("flat", lambda o, t: 0.0 * o.shape[0] + 1.0 * (o - t).square().sum()),
    "one minus a mean": ("flat", lambda o, t: 1 - F.cosine_similarity(o, t).sum() / len(t)),
    "stack of negated rows": ("classes", lambda o, t: torch.stack([
        -a.log_softmax(0)[b] for a, b in zip(o, t)]).mean()),
    "stack of sums of rows": ("flat", lambda o, t: torch.stack([
        F.mse_loss(a, b) + 0.1 * F.l1_loss(a, b) for a, b in zip(o, t)]).mean()),
    "dice of rows": ("shares", lambda o, t: torch.stack([
        1 - 2 * (a * b).sum() / (a.sum() + b.sum()) for a, b in zip(o.softmax(1), t)]).mean()),
    "divided by minus the count": ("flat", lambda o, t: (o * t).sum() / -len(o)),
    "einsum to a number": ("flat", lambda o, t: torch.einsum("bk,bk->", o, t) / o.shape[0]),
    "exp of an einsum": ("flat", lambda o, t: torch.einsum("bk,bk->b", o, t).exp().mean()),
    "transposed and flattened": ("values", lambda o, t: (
        o - t).square().transpose(0, 1).reshape(WORDS, -1).sum(-1).mean()),
    "an array of weights": ("flat", lambda o, t: (
        (o - t).square() * torch.as_tensor(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))).mean()),
    "keywords alone": ("flat", lambda o, t: torch.mean(input=torch.stack(tensors=[(o - t).square(), o.abs()]))),
    "zeros as the target": ("flat", lambda o, t: F.binary_cross_entropy_with_logits(
        o[:, :1], torch.zeros(len(o), 1).double())),
    "a share halved": ("tokens", lambda o, t: (each(o, t) * (counted(t) / counted(t).sum() * 2.0 / 4.0)).sum()),
    "times a reciprocal": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() * counted(t).sum().reciprocal()),
    "stack times weights": ("flat", lambda o, t: (torch.stack([
        (o - t)[:, k].square().mean() for k in range(CLASSES)]) * WEIGHT).sum()),
    "stack times a number": ("flat", lambda o, t: (torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)]) * 0.3).sum()),
    "stack times one": ("flat", lambda o, t: (torch.stack([
        F.mse_loss(o, t), F.l1_loss(o, t)]) * WEIGHT[:1]).sum()),
    "stack from an index": ("flat", lambda o, t: torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)])[:2].sum()),
    "mean of numbers": ("flat", lambda o, t: torch.where(t > 0, (o - t).square(), math.nan).nanmean()),
    "mean of rows' numbers": ("flat", lambda o, t: torch.where(t > 0, (o - t).square(), math.nan).nanmean(1).nanmean()),
    "one of a stack": ("flat", lambda o, t: torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)])[1]),
    "both of a stack": ("flat", lambda o, t: sum(torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)]).unbind())),
    "two terms times a constant": ("flat", lambda o, t: (F.mse_loss(o, t) + F.l1_loss(o, t)) * WEIGHT[3]),
    "dot": ("flat", lambda o, t: torch.dot(o.flatten(), t.flatten()) / len(o)),
    "if more than a tensor": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / (
        counted(t).sum() if counted(t).sum() > torch.tensor(0.0) else 1.0)),
    "by size": ("flat", lambda o, t: (o - t).square().sum() / o.size(0)),
    "by len": ("flat", lambda o, t: (o - t).square().sum() / len(o)),
    "by shape": ("values", lambda o, t: (o - t).square().sum() / (o.shape[0] * o.shape[1])),
    "by unpacked shape": ("values", lambda o, t: F.mse_loss(o, t, reduction="sum") / (o.shape[0] * o.size(1))),
    "by numel": ("values", lambda o, t: (o - t).abs().sum() / o.numel()),
    "by target's numel": ("values", lambda o, t: F.l1_loss(o, t, reduction="sum") / t.numel()),
    "by sizes in turn": ("values", lambda o, t: F.mse_loss(o, t, reduction="sum") / o.size(0) / o.size(1)),
    "by float of len": ("flat", lambda o, t: (o - t).square().sum() * (1.0 / float(len(o)))),
    "loop over rows": ("values", looped),
    "loop over numbers": ("labels", indexed),
    "stack of rows": ("values", lambda o, t: torch.stack([F.mse_loss(a, b) for a, b in zip(o, t)]).mean()),
    "sum of a stack of rows": ("values", lambda o, t: torch.stack([F.mse_loss(a, b) for a, b in zip(o, t)]).sum()),
    "mean": ("values", lambda o, t: (o - t).square().mean()),
    "index into all": ("classes", lambda o, t: -o.log_softmax(1).view(-1)[
        torch.arange(len(o)) * o.shape[1] + t].mean()),
    "index of rows, moved": ("classes", lambda o, t: -o.log_softmax(1)[
        torch.arange(0, len(o)).to(t).unsqueeze(1), t[:, None]].mean()),
    "weights of elements": ("flat", lambda o, t: (
        torch.linspace(0, 1, o[0].numel()).reshape(o.shape[1:]) * (o - t).square()).mean()),
    "index of classes": ("flat", lambda o, t: (torch.linspace(0, 1, o.shape[1]) * (o - t).square()).mean()),
    "product with ones": ("flat", lambda o, t: (torch.ones(len(o)).double() @ (o - t).square()).mean()),
    "index of rows": ("classes", lambda o, t: -o.log_softmax(1)[torch.arange(len(o)), t].mean()),
    "index of rows that count": ("some", lambda o, t: F.cross_entropy(
        o[(t != IGNORED).nonzero()[:, 0]], t[t != IGNORED])),
    "index of words": ("values", lambda o, t: (o - t)[:, torch.tensor([0, 2])].square().mean()),
    "words of rows": ("labels", lambda o, t: -o.log_softmax(-1)[
        torch.arange(len(o))[:, None], torch.arange(WORDS), t].mean()),
    "sum": ("values", lambda o, t: (o - t).square().sum()),
    "sum by a constant": ("values", lambda o, t: (o - t).square().sum() / 64),
    "mean of mean": ("values", lambda o, t: (o - t).square().mean().mean()),
    "mean(1).mean": ("values", lambda o, t: (o - t).square().mean(1).mean()),
    "mean(-1).mean(-1).mean": ("values", lambda o, t: (o - t).square().mean(-1).mean(-1).mean()),
    "mean of dims": ("values", lambda o, t: (o - t).square().mean(dim=(0, 1, 2))),
    "mean of dims, then rows": ("values", lambda o, t: (o - t).square().mean(dim=(1, 2)).mean()),
    "sum(1).mean": ("values", lambda o, t: (o - t).square().sum(1).mean()),
    "sum(-1).sum(-1).mean(0)": ("values", lambda o, t: (o - t).square().sum(-1).sum(-1).mean(0)),
    "sum(0).mean": ("flat", lambda o, t: (o - t).square().sum(0).mean()),
    "sum(dim=0).sum": ("flat", lambda o, t: (o - t).square().sum(dim=0).sum()),
    "mean(0).sum": ("flat", lambda o, t: (o - t).square().mean(0).sum()),
    "mean(0).mean": ("flat", lambda o, t: (o - t).square().mean(0).mean()),
    "stacked heads": ("flat", lambda o, t: torch.stack([(o - t).square(), o.square()]).sum(0).mean()),
    "mean of stacked heads": ("flat", lambda o, t: torch.stack([(o - t).square(), o.abs()]).mean(0).sum(-1).mean()),
    "stacked behind": ("flat", lambda o, t: torch.stack([o, t], -1).prod(-1).mean()),
    "words first": ("values", lambda o, t: (o - t).square().transpose(0, 1).sum(0).mean()),
    "permuted": ("values", lambda o, t: (o - t).square().permute(1, 2, 0).mean(0).sum(0).mean()),
    "each word": ("values", lambda o, t: sum(F.mse_loss(o[:, i], t[:, i]) for i in range(o.shape[1]))),
    "each word of words first": ("values", lambda o, t: sum(
        F.mse_loss(a, b) for a, b in zip(o.transpose(0, 1), t.transpose(0, 1)))),
    "unsqueezed": ("flat", lambda o, t: (o - t).square()[None].sum(0).mean()),
    "unsqueeze": ("flat", lambda o, t: (o - t).square().unsqueeze(0).mean(0).sum(1).mean()),
    "norm of rows": ("flat", lambda o, t: (o - t).norm(dim=1).mean()),
    "cosine similarity": ("flat", lambda o, t: 1 - F.cosine_similarity(o, t).mean()),
    "einsum of rows": ("flat", lambda o, t: torch.einsum("bi,bi->b", o, t).mean()),
    "logsumexp": ("classes", lambda o, t: (o.logsumexp(1) - o.gather(1, t[:, None])[:, 0]).mean()),
    "z loss": ("classes", lambda o, t: F.cross_entropy(o, t) + 1e-2 * o.logsumexp(-1).square().mean()),
    "entropy": ("classes", lambda o, t: F.cross_entropy(o, t) + 0.1 * (
        o.softmax(1) * o.log_softmax(1)).sum(1).mean()),
    "policy gradient": ("classes", lambda o, t: -(
        o.log_softmax(1).gather(1, t[:, None]).squeeze(1) * (t - 1.5)).mean()),
    "distillation": ("shares", lambda o, t: F.kl_div(
        F.log_softmax(o / 2, dim=1), F.softmax(t / 2, dim=1), reduction="batchmean") * 4),
    "distillation and labels": ("shares", lambda o, t: 0.3 * F.cross_entropy(o, t.argmax(1)) + 0.7 * F.kl_div(
        o.log_softmax(1), t, reduction="batchmean")),
    "clamped elements": ("values", lambda o, t: torch.clamp((o - t).abs() - 0.1, min=0).mean()),
    "ppo": ("flat", lambda o, t: -torch.min(o.exp() * t, o.exp().clamp(0.8, 1.2) * t).mean()),
    "hinge by hand": ("signs", lambda o, t: F.relu(1 - o * t).mean()),
    "quantile": ("flat", lambda o, t: torch.max(0.9 * (t - o), -0.1 * (t - o)).mean()),
    "focal": ("classes", focal),
    "focal of words": ("tokens", focal_of_words),
    "smoothing by hand": ("classes", smoothed),
    "smoothing of words": ("tokens", smoothed_words),
    "vae": ("flat", vae),
    "vae by rows": ("flat", lambda o, t: vae(o, t) / o.size(0)),
    "vae by len": ("flat", lambda o, t: vae(o, t) / len(o)),
    "vae of means": ("flat", vae_of_means),
    "from a zero": ("flat", lambda o, t: (torch.zeros(()) + (o - t) - torch.tensor(0.0)).square().mean()),
    "vae of distributions": ("flat", lambda o, t: F.mse_loss(o, t) + sum(
        kl_divergence(Normal(o, o.exp()), Normal(0.0, scale)).sum(1).mean() for scale in (1.0, 2.0))),
    "mean of all by the mean of a mask": ("tokens", lambda o, t: o[..., 0].square().mean() / counted(t).mean()),
    "sum of all by a count": ("tokens", lambda o, t: o.square().sum() / (t != IGNORED).sum()),
    "sums by a count": ("tokens", lambda o, t: (each(o, t).sum() + 0.1 * o.square().sum()) / counted(t).sum()),
    "sum by a count times a tensor": ("tokens", lambda o, t: 2 * (o.square().sum() / counted(t).sum() * WEIGHT[0])),
    "weighted times a tensor": ("some", lambda o, t: F.cross_entropy(o, t, WEIGHT) * WEIGHT[0]),
    "by torch's deprecated options": ("values", lambda o, t: (
        F.l1_loss(o, t, size_average=False) / len(o) + F.mse_loss(o, t, True, False).mean()
        + F.mse_loss(o, t, reduction="elementwise_mean"))),
    "a label that is expanded": ("flat", lambda o, t: F.mse_loss(
        o, torch.tensor(1.0).double().requires_grad_(False).expand_as(o))),
    "words in the order of their losses": ("labels", by_order),
    "differences by a list of slices": ("values", lambda o, t: (
        o[[slice(None), slice(1, None)]] - t[[slice(None), slice(None, -1), ...]]).square().mean()),
    "weighted in place": ("some", lambda o, t: F.cross_entropy(o, t, WEIGHT).mul_(3).div_(2)),
    "preference": ("flat", lambda o, t: preferred(torch.cat([o, t]), slice(o.shape[0]), slice(o.shape[0], None))),
    "preference by halves": ("flat", lambda o, t: (lambda both: preferred(
        both, slice(both.shape[0] // 2), slice(len(both) // 2, None)))(torch.cat((o, o * t), dim=0))),
    "thirds of joined rows": ("flat", lambda o, t: (lambda rows: torch.concat([o, t, o * t])[rows:][:rows].mul(
        o).square().mean())(o.size(0))),
    "sum by multiples of a minimal count": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / (
        counted(t).sum().clamp(min=1) * 2 * 3)),
    "sum by a count or a tensor of 1": ("tokens", lambda o, t: (lambda n: (each(o, t) * counted(t)).sum() / n.maximum(
        torch.ones_like(n)))(counted(t).sum())),
    "sum by a count or a full tensor": ("tokens", lambda o, t: (lambda n: (each(o, t) * counted(t)).sum() / torch.max(
        torch.full_like(n, 1), n))(counted(t).sum())),
    "smoothing as in fairseq": ("tokens", lambda o, t: smoothed_sum(o.log_softmax(-1), t) / (t != IGNORED).sum()),
    "smoothing by the number of rows": ("tokens", lambda o, t: smoothed_sum(o.log_softmax(-1), t) / o.size(0)),
    "ppo in one mean": ("flat", lambda o, t: (
        -torch.min(o.exp() * t, o.exp().clamp(0.8, 1.2) * t) + 0.5 * F.mse_loss(o, t) - 0.01 * o.softmax(1)).mean()),
    "rows from a number": ("flat", lambda o, t: (3 + (F.mse_loss(o, t) - o.abs()) + t).mean()),
    "rows and a penalty": ("flat", lambda o, t: (o.square() - (o * t).sum() / len(o) / 7).mean()),
    "several in place": ("labels", in_place),
    "mean of an expanded number": ("tokens", lambda o, t: (lambda x: (x * torch.ones_like(x)).mean())(
        F.cross_entropy(o.flatten(0, 1), t.flatten()))),
    "sum by a third of a minimal count": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / (
        counted(t).sum().clamp(min=1) / 3)),
}
EXACT: Table = {**TORCH, **AROUND, **HAND}

def guarded(o: Tensor, t: Tensor) -> Tensor:
    """A mean over all rows, and one over what counts, if anything does."""
    loss, has = F.mse_loss(o[:, 0, 0], torch.ones_like(o[:, 0, 0])), t != IGNORED
    if has.any():
        loss = loss + F.cross_entropy(o[has], t[has])
    return loss


#: Terms of different counts, and what each of them counts in the three microbatches of the uneven batch.
SEVERAL: dict[str, tuple[str, Loss, list[list[int]]]] = {
    "rows, and tokens if there are any": ("tokens", guarded, [[7, 0, 3], [3, 3, 1]]),
    "tokens and elements": ("tokens", lambda o, t: F.cross_entropy(o.transpose(1, 2), t) + 0.1 * o.square().mean(),
                            [[7, 0, 3], [60, 60, 20]]),
    "tokens and rows": ("tokens", lambda o, t: each(o, t).sum() / counted(t).sum() + F.mse_loss(
        o[:, 0, 0], torch.ones_like(o[:, 0, 0])), [[7, 0, 3], [3, 3, 1]]),
    "two ignored classes": ("tokens", lambda o, t: F.cross_entropy(o[:, 0], t[:, 0]) + F.cross_entropy(
        o[:, 2], t[:, 2]), [[3, 0, 1], [1, 0, 1]]),
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
    "tasks": ("tokens", tasks),
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


def balanced(o: Tensor, t: Tensor) -> Tensor:
    ones = t.sum().item()
    return F.binary_cross_entropy_with_logits(o, t, pos_weight=torch.tensor([(t.numel() - ones + 0.5) / (ones + 0.5)]))


def centred(o: Tensor, t: Tensor) -> Tensor:
    values = t[:, 0].tolist()
    return F.mse_loss(o - sum(values) / len(values), t)


def by_frequency(o: Tensor, t: Tensor) -> Tensor:
    counts = np.bincount(t.numpy(), minlength=CLASSES)
    return F.cross_entropy(o, t, weight=torch.as_tensor((len(t) + 1) / (counts + 1)))


SAID: Table = {
    "weights that NumPy computes": ("classes", by_frequency),
    "a weight from a count": ("binary", balanced),
    "a mean that Python computes": ("flat", centred),
    "multiplied by a keyword": ("flat", lambda o, t: torch.mul((o - t).square().mean(), other=2.0)),
    "divided with an option": ("flat", lambda o, t: torch.div((o - t).square().sum(), 3.0, rounding_mode=None)),
    "added with an option": ("flat", lambda o, t: torch.add((o - t).square().sum(), o.sum(), alpha=2, out=None)),
    "a mean by a count": ("tokens", lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()) / counted(t).sum()),
    "a share of two terms": ("tokens", lambda o, t: (1.0 / counted(t).sum()) * (each(o, t).sum() + o.mean())),
    "stack reshaped": ("flat", lambda o, t: torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)]).reshape(2, 1).sum()),
    "written numbers": ("flat", written),
    "at least": ("flat", lambda o, t: (o - t).square().sum().clamp(min=0.5)),
    "divided by minus at least": ("tokens", lambda o, t: (each(o, t) * counted(t)).sum() / -counted(t).sum().clamp(
        min=1)),
    "weights of elements": ("flat", lambda o, t: F.mse_loss(o, t, weight=o.detach().abs() + 1)),
    "the inverse of the count": ("flat", lambda o, t: (o - t).square().sum() * (1 / o.size(0))),
    "the inverse of twice the count": ("flat", lambda o, t: (1 / (2 * o.shape[0])) * (o - t).square().sum()),
    "twice the count": ("flat", lambda o, t: (o - t).square().sum() / (2 * len(o))),
    "next words": ("values", lambda o, t: (o - t).square().sum() / (o.shape[0] * (o.shape[1] - 1))),
    "weights of the batch": ("binary", lambda o, t: F.binary_cross_entropy_with_logits(
        o, t, pos_weight=(t == 0).sum() / (t == 1).sum())),
    "classes of the batch": ("classes", lambda o, t: F.cross_entropy(
        o, t, weight=len(t) / (5 * torch.bincount(t, minlength=5).clamp(min=1).double()))),
    "by class": ("classes", lambda o, t: torch.zeros(5).double().scatter_add(
        0, t, F.cross_entropy(o, t, reduction="none")).mean()),
    "dice": ("binary", dice),
    "soft iou": ("binary", lambda o, t: 1 - (o.sigmoid() * t).sum() / (o.sigmoid() + t - o.sigmoid() * t).sum()),
    "learned weights": ("flat", lambda o, t: (o.sigmoid() * (o - t).square()).sum() / o.sigmoid().sum()),
    "plus one": ("tokens", lambda o, t: each(o, t).sum() / (counted(t).sum() + 1)),
    "product of means": ("flat", lambda o, t: F.mse_loss(o, t) * F.l1_loss(o, t)),
    "largest": ("flat", lambda o, t: (o - t).square().max()),
    "median": ("flat", lambda o, t: (o - t).square().median()),
    "hardest rows": ("flat", lambda o, t: (o - t).square().mean(1).topk(1).values.mean()),
    "detached balance": ("flat", lambda o, t: F.mse_loss(o, t) / F.mse_loss(o, t).detach()),
    "clamped mean": ("flat", lambda o, t: F.mse_loss(o, t).clamp(max=1.0)),
    "threshold": ("flat", lambda o, t: (F.mse_loss(o, t) - 1.0).abs()),
    "if": ("flat", lambda o, t: F.mse_loss(o, t) if F.mse_loss(o, t) < 2 else F.l1_loss(o, t)),
    "divided by the batch's sum": ("flat", lambda o, t: ((o - t).square() / (o - t).square().sum().detach()).sum()),
}

#: With the name of a function of which the warning has one.
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


UNKNOWN: dict[str, tuple[str, Loss, str]] = {
    "kernel": ("flat", Half.apply, "HalfBackward"),  # type: ignore[dict-item]
    "kernel and more": ("flat", lambda o, t: Half.apply(o, t) + 0.1 * F.mse_loss(o, t), "HalfBackward"),
    "rmse": ("values", lambda o, t: F.mse_loss(o, t).sqrt(), "sqrt"),
    "torch.sqrt": ("values", lambda o, t: torch.sqrt(F.mse_loss(o, t) + 1e-6), "sqrt"),
    "power": ("values", lambda o, t: F.mse_loss(o, t) ** 0.5, "pow"),
    "log of a mean": ("values", lambda o, t: (o - t).square().mean().log(), "log"),
    "exp of a mean": ("some", lambda o, t: torch.exp(F.cross_entropy(o, t) / 4), "exp"),
    "norm": ("values", lambda o, t: (o - t).norm(), "norm"),
    "rows and a number, summed": ("values", lambda o, t: ((o - t).square() + F.mse_loss(o, t)).sum(), "sum"),
    "rows and a number, squared": ("values", lambda o, t: ((o - t) + F.mse_loss(o, t)).square().mean(), "square"),
    "rows and a number over rows": ("values", lambda o, t: (o + F.mse_loss(o, t)).mean(0).square().mean(), "mean"),
    "torch.linalg.norm": ("flat", lambda o, t: torch.linalg.matrix_norm(o - t), "norm"),
    "square of a mean": ("flat", lambda o, t: (o - t).mean().square(), "square"),
    "std": ("flat", lambda o, t: F.mse_loss(o, t) + (o - t).std(), "std"),
}


def info_nce(o: Tensor, t: Tensor) -> Tensor:
    o, t = F.normalize(o, dim=1), F.normalize(t, dim=1)
    return F.cross_entropy(o @ t.T / 0.5, torch.arange(len(o)))


def ranked(o: Tensor, t: Tensor) -> Tensor:
    i, j = torch.triu_indices(len(o), len(o), 1)
    return F.relu(1 - o[i, 0] + o[j, 0]).sum()


COUPLED: Table = {
    "info nce": ("flat", info_nce),
    "both ways": ("flat", lambda o, t: (info_nce(o, t) + info_nce(t, o)) / 2),
    "matmul": ("flat", lambda o, t: torch.matmul(o, o.transpose(0, 1)).exp().mean()),
    "torch.mm": ("flat", lambda o, t: F.binary_cross_entropy_with_logits(
        torch.mm(o, o.t()), torch.eye(len(o)).double())),
    "einsum": ("flat", lambda o, t: F.mse_loss(torch.einsum("id,jd->ij", o, o), torch.eye(len(o)).double())),
    "pairs": ("flat", lambda o, t: (o[:, None] - t[None]).square().mean()),
    "cosines": ("flat", lambda o, t: F.cosine_similarity(o[:, None], t[None], dim=-1).exp().mean()),
    "rolled": ("flat", lambda o, t: (o - t.roll(1, 0)).square().mean()),
    "cdist": ("flat", lambda o, t: torch.cdist(o, t).mean()),
    "a part of the rows": ("flat", lambda o, t: F.mse_loss(o.chunk(2)[0], t.chunk(2)[0])),
    "a chosen mean": ("flat", lambda o, t: torch.where(
        o.std() > 100, (o - t).square().mean(), torch.tensor(0.0).double() * o.sum())),
    "a mean times the rows": ("flat", lambda o, t: F.mse_loss(o, t) * (len(o) if len(o) > 1 else 3) + o.std(0).sum()),
    "norm of columns": ("flat", lambda o, t: torch.linalg.norm(o, dim=0).sum()),
    "outer": ("flat", lambda o, t: torch.outer(o[:, 0], t[:, 0]).square().mean()),
    "products over rows": ("flat", lambda o, t: torch.bmm(o.T[None], t[None]).square().mean()),
    "a part of joined rows": ("flat", lambda o, t: torch.cat([o, t])[: o.shape[0] // 2 + 1].square().sum()),
    "every second of joined rows": ("flat", lambda o, t: torch.cat([o, t])[: 2 * o.shape[0] : 2].square().sum()),
    "halves of elements": ("flat", lambda o, t: o[:, :4].reshape(-1)[: o.shape[0] * 2].square().sum()),
    "narrowed": ("flat", lambda o, t: o.narrow(0, 0, 1).square().sum()),
    "chosen rows": ("flat", lambda o, t: o.index_select(0, torch.tensor([0])).square().sum()),
    "pairs of rows": ("flat", ranked),
    "the first rows": ("flat", lambda o, t: o[torch.tensor([0, 0])].square().sum()),
    "rows as classes": ("flat", lambda o, t: F.cross_entropy(o[None, :, 0], torch.tensor([0]))),
    "rows viewed as classes": ("flat", lambda o, t: F.cross_entropy(o[:, 0].view(1, -1), torch.tensor([0]))),
    "columns as samples": ("flat", lambda o, t: F.cross_entropy(o.T, torch.zeros(CLASSES).long())),
    "singular values": ("flat", lambda o, t: torch.linalg.svdvals(o).mean()),
    "a row": ("flat", lambda o, t: F.mse_loss(o[0], t[0])),
    "weights in a mask": ("flat", weighted),
    "shuffled rows": ("flat", lambda o, t: 0.3 * F.mse_loss(o, t) + 0.7 * F.mse_loss(o, t[torch.randperm(len(t))])),
    "rows from the last": ("flat", lambda o, t: F.mse_loss(o, t[torch.arange(len(t) - 1, -1, -1)])),
    "numbers of rows in another order": ("flat", lambda o, t: F.mse_loss(
        o, t[torch.arange(len(t))[torch.randperm(len(t))]])),
    "numbers of rows by a list": ("flat", lambda o, t: F.mse_loss(
        o, t[torch.arange(len(t))[list(range(len(t)))[::-1]]])),
    "numbers of rows by NumPy": ("flat", lambda o, t: F.mse_loss(
        o, t[torch.arange(len(t))[np.random.permutation(len(t))]])),
    "numbers of rows that are turned": ("flat", lambda o, t: F.mse_loss(
        o.repeat(2, 1), t[torch.arange(len(t))[:, None].repeat(1, 2).t().reshape(-1)])),
    "a list of rows": ("flat", lambda o, t: F.mse_loss(o, t[list(range(len(t)))[::-1]])),
    "rows in an order that NumPy finds": ("flat", lambda o, t: F.mse_loss(
        o, t[torch.as_tensor(np.argsort(-np.asarray(t[:, 0])))])),
    "a tensor of rows by NumPy": ("flat", lambda o, t: F.mse_loss(
        o, t[torch.tensor(np.random.permutation(len(t)), dtype=torch.int32).long()])),
    "rows by NumPy": ("flat", lambda o, t: F.mse_loss(o, t[np.random.permutation(len(t))])),
    "the first of a mask": ("flat", lambda o, t: (o - t).square()[torch.arange(len(o)) < 2].sum()),
    "flipped up": ("flat", lambda o, t: F.mse_loss(o, t.flipud())),
    "expanded differences": ("flat", lambda o, t: (
        o.unsqueeze(1).expand(len(o), len(o), -1) - o[None].expand(len(o), len(o), -1)).square().sum(-1).mean()),
    "expanded norms": ("flat", lambda o, t: (lambda n: (n + n.t()).square().mean())(
        o.square().sum(1, keepdim=True).expand(len(o), len(o)))),
    "repeated": ("flat", lambda o, t: (o[:, None] - t.repeat(len(o), 1, 1)).square().mean()),
    "a deviation that Python reads": ("flat", lambda o, t: ((o - t) / t.std().item()).square().mean()),
    "a mean that Python reads": ("flat", lambda o, t: (o - float(t.mean())).square().mean()),
    # Numbers of rows begin again in each microbatch.
    "weights that rise": ("flat", lambda o, t: (torch.linspace(0, 1, len(o))[:, None] * (o - t).square()).mean()),
    "rows by their number": ("flat", lambda o, t: ((o - t).square().mean(1) * torch.arange(len(o)) / len(o)).sum()),
    "decay over the rows": ("flat", lambda o, t: (
        torch.exp(-0.1 * torch.arange(o.shape[0])) * (o - t).square().mean(1)).mean()),
    "einsum of rising weights": ("flat", lambda o, t: torch.einsum(
        "b,bd->", torch.linspace(0, 1, len(o)).double(), (o - t).square())),
    "product with rising weights": ("flat", lambda o, t: (
        torch.linspace(0, 1, len(o)).double() @ (o - t).square()).mean()),
    "where of the first rows": ("flat", lambda o, t: torch.where(
        torch.arange(len(o)) < 2, (o - t).square().mean(1), 0.0).sum()),
    # Of statistics over the rows, which are other ones in a microbatch.
    "correlation": ("flat", lambda o, t: (o.T @ t / len(o) - torch.eye(CLASSES).double()).square().sum()),
    "einsum over the rows": ("flat", lambda o, t: torch.einsum("bi,bj->ij", o, t).square().sum()),
    "variance": ("flat", lambda o, t: F.relu(1 - o.std(0)).mean()),
    "centred": ("flat", lambda o, t: (o - o.mean(0)).square().mean()),
    "softmax of rows": ("flat", lambda o, t: (o.softmax(0) * t).sum()),
    "var": ("flat", lambda o, t: F.mse_loss(o, t) + o.var(dim=0).mean()),
}


def squares(parameters: list[Tensor]) -> Tensor:
    return sum(p.pow(2).sum() for p in parameters)  # type: ignore[return-value]


def penalised(o: Tensor, t: Tensor, own: Any) -> Tensor:
    """A mean and a penalty, or neither if nothing counts."""
    has = t != IGNORED
    return F.cross_entropy(o[has], t[has]) + 0.01 * squares(own) if has.any() else o.new_zeros(())


def two(o: Tensor, t: Tensor) -> Tensor:
    """The losses of two tasks."""
    return torch.stack([F.mse_loss(o, t), F.l1_loss(o, t)])


PENALTIES: Table = {
    "if anything counts": ("tokens", penalised),
    "l2 and words": ("tokens", lambda o, t, own: F.cross_entropy(o.transpose(1, 2), t) + 0.01 * squares(own)),
    "l2 and elements": ("values", lambda o, t, own: F.mse_loss(o, t) + 0.01 * squares(own)),
    "l2 and a sum": ("values", lambda o, t, own: F.mse_loss(o, t, reduction="sum") + 0.01 * squares(own)),
    "l1": ("values", lambda o, t, own: F.mse_loss(o, t) + 0.01 * sum(p.abs().sum() for p in own)),
    "norms": ("values", lambda o, t, own: F.mse_loss(o, t) + 0.01 * torch.stack([p.norm() for p in own]).sum()),
    "mean of a weight": ("values", lambda o, t, own: F.mse_loss(o, t) + 0.1 * own[0].square().mean()),
    "by hand": ("tokens", lambda o, t, own: each(o, t).sum() / counted(t).sum() + 0.01 * squares(own)),
    "clamped": ("tokens", lambda o, t, own: each(o, t).sum() / counted(t).sum().clamp(min=1) + 0.01 * squares(own)),
    "max of int": ("tokens", lambda o, t, own: each(o, t).sum() / max(int((t != IGNORED).sum()), 1) + 0.01 * squares(
        own)),
    "times a weight": ("tokens", lambda o, t, own: F.cross_entropy(o.transpose(1, 2), t) * own[-1].sum().exp()),
    "weighted times a weight": ("some", lambda o, t, own: own[-1][0].exp() * F.cross_entropy(o, t, WEIGHT)),
    "over a weight": ("tokens", lambda o, t, own: F.l1_loss(o[t > 0], o[t > 0] * 0) / own[-1].square().sum()),
    "mean times a weight": ("tokens", lambda o, t, own: own[-1][0] * o[t > 0].square().mean()),
    "two weighed by parameters": ("values", lambda o, t, own: (
        two(o, t) / own[-1][:2].exp() + own[-1][:2]).mean()),
    "two minus numbers": ("values", lambda o, t, own: (0.3 - own[-1][:2].exp() * two(o, t) + own[-1][0]).sum()),
    "a product of two with weights": ("values", lambda o, t, own: two(o, t) @ own[-1][:2].softmax(0)),
    "dot of two with weights": ("values", lambda o, t, own: torch.dot(own[-1][:2], two(o, t) * 2 + own[-1].sum())),
}
