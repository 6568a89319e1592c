"""The loss is that of the batch, whatever it is made of; what can't be known is said.

Each loss of ``tests/promise/losses.py`` is the ``loss_fn`` of a Sequential, the ``loss_fn`` of a module with cuts, and
a module's own loss, drop-in and scheduled. One model sees an even batch and one whose microbatches count unequally (in
one of them nothing counts), in either order: what is found out in one must not settle the next one.
"""
from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.covering import few
from tests.helpers.modules import module_of
from tests.helpers.twin import Looped
from tests.promise import losses
from tests.promise.layers import Apply

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}:UserWarning") for message in (
    "reduction. 'mean' divides the total loss", "size_average and reduce args", "reduction='elementwise_mean'",
    "Using a non-tuple sequence for multidimensional indexing",
)]

CHUNKS, EVEN, UNEVEN = 3, 6, 7
Step = Callable[[Tensor, Tensor], Tensor]
#: A module, its pipeline, and a step of each from input and target to the loss.
Sides = tuple[nn.Module, nn.Module, Step, Step]


class Own(nn.Module):
    """A module with a loss of its own, which may want the module's parameters."""

    def __init__(self, loss: losses.Loss, penalised: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 5)
        self.loss, self.penalised = loss, penalised

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.last(self.first(x).tanh())
        more = [list(self.parameters())] if self.penalised else []
        return {"loss": self.loss(y, labels, *more), "y": y}


def cut(module: nn.Module, **options: Any) -> SplitPipe:
    where: dict[str, Any] = {"cuts": ["last"], "devices": ["cpu"] * 2, "chunks": CHUNKS}
    return SplitPipe(copy.deepcopy(module).double(), **{**where, **options})


def ends() -> dict[str, nn.Module]:
    return {"first": nn.Linear(3, 6), "last": nn.Linear(6, 5)}


def own(loss: losses.Loss, penalised: bool, options: dict[str, Any], **how: Any) -> Sides:
    plain = Own(loss, penalised).double()
    model = cut(plain, **how, **options)
    return plain, model, lambda x, y: plain(x, labels=y)["loss"], lambda x, y: model(x, labels=y)["loss"]


def given(kind: type[nn.Sequential], loss: losses.Loss, penalised: bool, options: Any, **how: Any) -> Sides:
    plain = kind(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    piped = copy.deepcopy(plain)

    def of(module: nn.Module, loss: losses.Loss) -> losses.Loss:
        own = list(module.parameters())
        return (lambda output, target: loss(output, target, own)) if penalised else loss

    theirs = of(piped, copy.deepcopy(loss))
    model = SplitPipe(piped, devices=["cpu"] * 2, chunks=CHUNKS, loss_fn=theirs, **how, **options)
    mine = of(plain, loss)
    return plain, model, lambda x, y: mine(plain(x), y), lambda x, y: model(x, target=y)


def made(way: str, loss: losses.Loss, penalised: bool = False, **options: Any) -> Sides:
    if way == "sequential":
        return given(nn.Sequential, loss, penalised, options, balance=[2, 1], schedule="zb-h1")
    if way == "cuts":
        return given(Looped, loss, penalised, options, cuts=["2"], schedule="1f1b")
    return own(loss, penalised, options, schedule={"own": "gpipe", "own scheduled": "zb-h1"}[way])


SCHEDULED = ["sequential", "cuts", "own scheduled"]
WAYS = ["own", *SCHEDULED]
ways = pytest.mark.parametrize("way", few(2, [*reversed(SCHEDULED), "own"]))
ORDER = {way: (EVEN, UNEVEN) if way in ("sequential", "own scheduled", "own") else (UNEVEN, EVEN) for way in WAYS}


def in_turn(names: Iterable[str]) -> list[Any]:
    """Each loss in one way, half of them as the module's own, drop-in: what it is made of is seen alike in all.

    Five turns, so that no way has all means, or all sums, of losses that come in both. In the essence are the first.
    """
    turns = cycle(["own", "sequential", "own", "cuts", "own scheduled"])
    return [
        pytest.param(loss, way, marks=[pytest.mark.thorough] if number % 40 > 4 else [])
        for number, (loss, way) in enumerate(zip(names, turns))
    ]


def batch(name: str, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn((rows, 3) if name in losses.FLAT else (rows, losses.WORDS, 3)).double()
    return x, losses.BATCHES[name](rows, rows == EVEN)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [x.grad for x in module.parameters()]


def backward(module: nn.Module, loss: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    module.zero_grad()
    (3 * loss).backward()
    return loss.detach(), gradients(module)


def assert_close(found: Any, expected: Any, equal_nan: bool = False) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, equal_nan=equal_nan)


def verify(name: str, rows: int, plain: nn.Module, model: nn.Module, expected: Step, found: Step) -> None:
    x, y = batch(name, rows)
    assert_close(backward(model, found(x, y)), backward(plain, expected(x, y)))


@pytest.mark.parametrize(("loss", "way"), in_turn(losses.EXACT))
def test_the_loss_and_gradients_are_those_of_the_batch(loss: str, way: str) -> None:
    name, function = losses.EXACT[loss]
    sides = made(way, function)
    for rows in ORDER[way]:
        verify(name, rows, *sides)


def squares(o: Tensor, t: Tensor) -> Tensor:
    return (o - t).square()


#: Sums divided by a number that Python reads, which counts rows: averaged over rows, which is right, and said.
BY_ROWS: dict[str, losses.Loss] = {
    "len": lambda o, t: squares(o, t).sum() / len(o),
    "product": lambda o, t: squares(o, t).sum() / (o.shape[0] * o.shape[1]),
    "inverse": lambda o, t: squares(o, t).sum() * (1 / len(o)),
    "tensor": lambda o, t: squares(o, t).sum() / torch.tensor(len(o)),
    "pieces": lambda o, t: squares(o, t).sum() / len(o.unbind()),
    "two": lambda o, t: (squares(o, t).sum() - 0.5 * o.abs().sum()) / o.size(0),
}


@pytest.mark.parametrize("way", few(2, WAYS))
@pytest.mark.parametrize("loss", BY_ROWS)
def test_a_sum_by_a_number_of_rows_is_averaged_over_rows_which_is_right_and_said(loss: str, way: str) -> None:
    sides = made(way, BY_ROWS[loss])
    with pytest.warns(UserWarning, match="a number that may count rows"):
        for rows in (EVEN, 5, UNEVEN, CHUNKS):
            verify("flat", rows, *sides)


class Logged(Own):
    """Returns what its loss consists of, too."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.last(self.first(x).tanh())
        one, other = F.mse_loss(y, labels), F.l1_loss(y, labels)
        parts = torch.stack([one.detach(), other.detach()])
        return {"loss": one + other, "parts": parts, "root": one.detach().sqrt(), "of rows": y.mean(0)}


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}])
def test_numbers_beside_the_loss_are_those_of_the_batch(options: dict[str, Any]) -> None:
    plain = Logged(F.mse_loss).double()
    model = cut(plain, **options)
    for rows in (EVEN, UNEVEN):
        x, y = batch("flat", rows)
        found, expected = model(x, y), plain(x, y)
        assert_close({**found}, {**expected})
        assert_close(backward(model, found["loss"]), backward(plain, expected["loss"]))


@ways
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_in_the_first_microbatch_of_an_unknown_loss_nothing_may_count(kind: torch.dtype, way: str) -> None:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o.to(kind), t).nan_to_num() if (t != losses.IGNORED).any() else 0 * o.sum()

    plain, model, expected, found = made(way, loss)
    x, y = batch("some", EVEN)
    y[:2] = losses.IGNORED
    with pytest.warns(UserWarning, match="beyond nan_to_num"):
        assert_close(backward(model, found(x, y)), by_rows(plain, expected, x, y))


def test_sizes_of_nothing_are_no_factors() -> None:
    *_, found = made("own", lambda o, t: (lambda size: (o * size).clamp(min=0.0).sum())(o[:, :0].shape[1] + len(t)))
    with pytest.warns(UserWarning, match="a number that may count rows"):
        found(*batch("flat", EVEN))


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}])
def test_what_python_reads_is_an_ordinary_number(options: dict[str, Any]) -> None:
    types: list[type] = []

    def loss(y: Tensor, t: Tensor) -> Tensor:
        read = [y.shape[0], y.size(0), len(y), y.numel(), (t > 0).sum().item(), int((t > 0).sum()), y.sum().item()]
        types[:] = map(type, [*read, y.shape, y.shape[0] * 2.0])
        return F.mse_loss(y, t)

    _, _, _, found = own(loss, False, options)
    found(*batch("flat", EVEN)).backward()
    assert types == [int] * 6 + [float, torch.Size, float]


def test_a_number_that_differs_between_microbatches_is_said() -> None:
    others = iter([2.5, 3.5, 4.5])
    *_, found = made("own", lambda o, t: squares(o, t).sum() / next(others))
    with pytest.warns(UserWarning, match="code that differs between microbatches"):
        found(*batch("flat", EVEN))


@pytest.mark.parametrize(("name", "loss", "rows", "words"), [
    ("flat", lambda o, t: F.mse_loss(*[o.view(2, -1, 5)[k] for k in (0, 1)]), 4 * CHUNKS, "could not be traced beyond"),
    ("flat", lambda o, t: F.mse_loss(*o.unflatten(0, (2, -1))), 4 * CHUNKS, "could not be traced beyond"),
    *[(*losses.COUPLED[loss], CHUNKS, "reduction=") for loss in ("info nce", "matmul", "pairs")],
])
def test_what_is_no_mean_over_rows_is_said(name: str, loss: losses.Loss, rows: int, words: str) -> None:
    *_, found = made("sequential", loss)
    with pytest.warns(UserWarning, match=words):
        found(*batch(name, rows))


@pytest.mark.parametrize("loss", losses.PENALTIES)
def test_drop_in_a_penalty_of_parameters_counts_once_a_batch(loss: str) -> None:
    name, function = losses.PENALTIES[loss]
    sides = made("own", function, penalised=True)
    for rows in (EVEN, UNEVEN):
        verify(name, rows, *sides)


FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean": lambda t: (t > 0).double().mean(),
    "a difference": lambda t: 1 - (t < 0).double().mean(),
    "a quotient": lambda t: (t > 0).sum() / t.shape[1] / (t * (t > 0)).sum(),
}


@pytest.mark.parametrize("way", SCHEDULED)
@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_may_be_0_in_the_first_microbatch_or_the_whole_batch(factor: str, way: str) -> None:
    plain, model, expected, found = made(way, lambda o, t: squares(o, t).mean() * FACTORS[factor](t))
    x, y = batch("flat", EVEN)
    for low in (2, *[EVEN] * (factor != "a quotient")):
        y[:low], y[low:] = -y[:low].abs(), y[low:].abs()
        assert_close(backward(model, found(x, y)), backward(plain, expected(x, y)))


@pytest.mark.parametrize("loss", [*losses.SEVERAL, *losses.MIXED, *losses.DROP_IN])
def test_drop_in_several_terms_or_entries_each_have_their_count(loss: str) -> None:
    name, function = {**losses.SEVERAL, **losses.MIXED, **losses.DROP_IN}[loss][:2]
    sides = made("own", function)
    for rows in (EVEN, UNEVEN, CHUNKS if loss in losses.DROP_IN else EVEN):
        verify(name, rows, *sides)


@pytest.mark.parametrize("way", SCHEDULED)
@pytest.mark.parametrize("loss", losses.SEVERAL)
def test_scheduled_terms_whose_counts_are_not_proportional_are_an_error(loss: str, way: str) -> None:
    name, function = losses.SEVERAL[loss]
    plain, model, expected, found = sides = made(way, function)
    verify(name, EVEN, *sides)
    model.zero_grad()
    for _ in range(2):
        with pytest.raises(ValueError, match="terms whose counts aren't proportional"):
            found(*batch(name, UNEVEN))
        assert gradients(model) == [None] * 4
    verify(name, EVEN, *sides)


@pytest.mark.parametrize(("loss", "way"), [
    *in_turn([*losses.MIXED, *losses.SAID, *losses.SAID_PENALTIES]),
    *[(loss, way) for loss in losses.PENALTIES for way in SCHEDULED],
])
def test_what_is_not_exact_is_said(loss: str, way: str) -> None:
    penalties = {**losses.PENALTIES, **losses.SAID_PENALTIES}
    name, function = {**losses.MIXED, **losses.SAID, **penalties}[loss]
    sides = made(way, function, penalised=loss in penalties)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (*ORDER[way], *[CHUNKS] * (name == "flat")):
            try:
                verify(name, rows, *sides)
            except ValueError as error:
                assert "reduction" in str(error) or "(total, count)" in str(error)
            except (IndexError, RuntimeError):
                assert rows != EVEN, "torch's own error may come of single rows alone"
            except AssertionError:
                said = [str(each.message) for each in caught if "reduction=" in str(each.message)]
                assert said and len({*said}) == len(said)


def by_rows(module: nn.Module, step: Step, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """The loss as a mean over rows, of microbatches as they are cut."""
    parts = zip(x.chunk(CHUNKS), y.chunk(CHUNKS))
    return backward(module, torch.stack([step(a, b).nan_to_num() * (len(a) / len(x)) for a, b in parts]).sum())


@pytest.mark.parametrize(("loss", "way"), [
    *[(loss, way) for loss in losses.UNKNOWN for way in WAYS],
    *[(loss, way) for loss in losses.DROP_IN for way in SCHEDULED],
])
def test_what_is_not_understood_is_a_mean_over_rows_and_is_said_once(loss: str, way: str) -> None:
    name, function, word = {**losses.UNKNOWN, **losses.DROP_IN}[loss]
    plain, model, expected, found = made(way, function)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (EVEN, UNEVEN):
            if name == "some":
                rows = EVEN  # exp of nothing is nan.
            x, y = batch(name, rows)
            assert_close(backward(model, found(x, y)), by_rows(plain, expected, x, y))
    assert [warning.category for warning in caught] == [UserWarning]
    message = str(caught[0].message)
    assert word in message and "reduction=" in message


@pytest.mark.draws
@pytest.mark.parametrize(("loss", "way"), in_turn(losses.COUPLED))
def test_rows_that_are_compared_with_each_other_are_not_claimed_to_be_exact(loss: str, way: str) -> None:
    name, function = losses.COUPLED[loss]
    plain, model, _, found = made(way, function)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (EVEN, UNEVEN):
            try:
                found(*batch(name, rows)).backward()
            except ValueError as error:
                assert "reduction" in str(error) or "compared" in str(error)
                return
    said = [str(warning.message) for warning in caught if "degrees of freedom" not in str(warning.message)]
    assert said and all("reduction=" in message for message in said) and len({*said}) == len(said)


@ways
@pytest.mark.parametrize("loss", ["mse", "rmse"])
def test_reduction_sum_adds(loss: str, way: str) -> None:
    name, function = losses.EXACT["mse sum" if loss == "mse" else loss]
    plain, model, expected, found = made(way, function, reduction="sum")
    for rows in (EVEN, UNEVEN):
        x, y = batch(name, rows)
        parts = [expected(a, b) for a, b in zip(x.chunk(CHUNKS), y.chunk(CHUNKS))]
        assert_close(backward(model, found(x, y)), backward(plain, torch.stack(parts).sum()))


@ways
@pytest.mark.parametrize("loss", ["ce tokens mean", "masked", "sum", "mse mean"])
def test_without_gradients_the_loss_is_that_of_the_batch(loss: str, way: str) -> None:
    name, function = losses.EXACT[loss]
    _, _, expected, found = made(way, function)
    with torch.no_grad():
        for rows in (UNEVEN, EVEN, UNEVEN):
            x, y = batch(name, rows)
            assert_close(found(x, y), expected(x, y))


@ways
@pytest.mark.parametrize("loss", ["ce ignoring mean", "ce tokens mean"])
def test_a_batch_in_which_nothing_counts_is_as_in_torch(loss: str, way: str) -> None:
    """The loss is nan, and the gradients are 0."""
    name, function = losses.EXACT[loss]
    plain, model, expected, found = made(way, function)
    x, y = batch(name, UNEVEN)
    y.fill_(-100)
    assert_close(backward(model, found(x, y)), backward(plain, expected(x, y)), equal_nan=True)
    verify(name, UNEVEN, plain, model, expected, found)


@pytest.mark.parametrize("chunks", [1, 3])
def test_numbers_that_a_sequential_gives_are_reduced_as_said_and_stacked_if_not(chunks: int) -> None:
    plain = nn.Sequential(nn.Linear(3, 3), Apply(lambda x: (x, x.square().mean()))).double()
    x = torch.randn(7, 3).double()
    ways: dict[str, tuple[Any, Any]] = {
        "mean": ("mean", plain(x)[1]), "sum": ("sum", sum(plain(part)[1] for part in x.chunk(chunks))),
        "function": (lambda values, rows: max(values), max(plain(part)[1] for part in x.chunk(chunks))),
        "none": (None, torch.stack([plain(part)[1] for part in x.chunk(chunks)])),
    }
    for reduction, expected in ways.values():
        model = SplitPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=chunks, reduction=reduction)
        y, found = model(x)
        assert_close((y, found), (plain(x)[0], expected))


@pytest.mark.parametrize("number", [lambda y: y.square().mean(), lambda y: y.square().mean(0)], ids=["one", "many"])
def test_a_number_that_a_block_with_parameters_returns_is_said(number: Callable[[Tensor], Tensor]) -> None:
    def numbered(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return (y := self.layer(x)), number(y).reshape(-1)  # In a vector, as a codebook returns its loss.

    def forward(self: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y, found = self.block(self.first(x))
        return {"loss": F.mse_loss(self.last(y), labels) + 3 * found.sum()}

    block = module_of(numbered, layer=nn.Linear(6, 6))
    with pytest.warns(UserWarning, match=r"could not be traced beyond block 'block' \(numbered\)"):
        cut(module_of(forward, block=block, **ends()))(*batch("flat", EVEN))  # More of them than a microbatch has rows.


def test_a_criterion_that_is_a_block_is_traced() -> None:
    sides = made("own", nn.CrossEntropyLoss())
    for rows in (EVEN, UNEVEN):
        verify("some", rows, *sides)


class Sometimes(Own):
    """Returns its loss in some calls only, as that of a regulariser that isn't computed in every step."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {key: y for key, y in super().forward(x, labels).items() if key == "y" or not self.silent}


@pytest.mark.parametrize("calls", ["+-+", "-!+-+"])
def test_a_loss_in_some_calls_only_is_that_of_the_batch(calls: str) -> None:
    """In a call with "-", there is none; in the first after such calls, "!", it is averaged, which is said."""
    plain, x, labels = Sometimes(F.cross_entropy).double(), *batch("some", UNEVEN)
    model = cut(plain)
    for k, call in enumerate(calls * 2):
        plain.train(k < len(calls)), model.train(k < len(calls))  # Those in eval mode are of another kind.
        plain.silent = model.silent = call == "-"
        if call == "+":
            assert_close(backward(model, model(x, labels)["loss"]), backward(plain, plain(x, labels)["loss"]))
        else:
            with pytest.warns(UserWarning, match="no number before") if call == "!" else nullcontext():
                model(x, labels)


def times_a_share(self: Any, x: Tensor) -> Tensor:
    share = torch.tensor(1 / len(x)).double()
    share *= self.last(self.first(x)).square().sum()
    return share


def on_another_stage(self: Any, x: Tensor) -> Tensor:
    share = (y := self.first(x)).square() / len(y)
    return self.last(y).square().mean() + share.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("shares", [on_another_stage, times_a_share])
@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}, {"backward": "autograd"}])
def test_entries_by_their_number_are_said_wherever_they_go(options: dict[str, Any], shares: Any) -> None:
    with pytest.warns(UserWarning, match="a number that may count rows"):
        cut(module_of(shares, **ends()), **options)(batch("flat", EVEN)[0])


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}])
def test_a_block_whose_loss_reads_each_row_is_said(options: dict[str, Any]) -> None:
    """A head that computes the loss, and reads counts of single rows for that, as in YOLOX."""
    def counting(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        found = [(y - t).square()[t > 0] for y, t in zip(self.layer(x), labels) if int((t > 0).sum())]
        errors = torch.cat([*found, x.new_zeros(0)])
        return errors.sum() / max(errors.shape[0], 1)

    def forward(self: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        some = [int((t > -9).sum()) for t in labels]  # Read before the block reads others.
        return {"loss": self.last(self.first(x), labels) + 0 * len(some)}

    module = module_of(forward, first=nn.Linear(3, 6), last=module_of(counting, layer=nn.Linear(6, 5)))
    with pytest.warns(UserWarning, match="could not be traced beyond"):
        cut(module, **options)(*batch("flat", UNEVEN))


def counted(self: Any, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Returns what it has read, too: how many words, how many are positive, and another number."""
    numbers: dict[str, Any] = {"words": int(x.shape[0] * x.shape[1]), "positive": int((x[..., 0] > 0).sum())}
    numbers["others"] = [float(x.detach().std())]
    return self.layer(x), numbers


@pytest.mark.parametrize("loss", [
    lambda y, n: y.abs().sum() / y.shape[0] + y.square().sum() / n["words"],
    lambda y, n: y.abs().sum() / n["positive"],
    lambda y, n: (y / n["others"][0]).mean(),
])
@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}])
def test_numbers_that_a_block_returns_are_said(options: dict[str, Any], loss: Callable[..., Tensor]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y, numbers = self.first(x)
        return loss(self.last(y), numbers)

    module = module_of(forward, first=module_of(counted, layer=nn.Linear(3, 6)), last=nn.Linear(6, 5))
    with pytest.warns(UserWarning, match="could not be traced beyond"):
        cut(module, chunks=2, **options)(torch.randn(8, 5, 3).double())


def test_where_recognition_ends_in_a_checkpointed_criterion_is_said() -> None:
    module = module_of(lambda self, x: self.criterion(self.last(self.first(x))), first=nn.Linear(3, 6),
                       last=nn.Linear(6, 5), criterion=module_of(lambda self, y: y.max()))
    with pytest.warns(UserWarning, match="could not be traced beyond max:"):
        cut(module, chunks=2, checkpoint="always")(torch.randn(8, 3).double())


def test_numbers_that_the_last_layer_returns_are_said() -> None:
    def loss(output: tuple[Tensor, dict[str, Any]], target: Tensor) -> Tensor:
        return (output[0] - target).square().sum() / output[1]["positive"]

    plain = nn.Sequential(nn.Identity(), module_of(counted, layer=nn.Linear(4, 4))).double()
    model = SplitPipe(plain, balance=[1, 1], devices=["cpu"] * 2, chunks=2, schedule="1f1b", loss_fn=loss)
    x = torch.randn(7, 5, 4).double()
    with pytest.warns(UserWarning, match="could not be traced beyond"):
        model(x, target=x)


class Timed(nn.Sequential):
    """Of a batch that is the second dimension; computes its own loss of labels, if it is given any."""

    def __init__(self) -> None:
        super().__init__(*[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = super().forward(x)
        return y if labels is None else {"loss": F.mse_loss(y, labels)}


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}, {"schedule": "1f1b", "loss_fn": F.mse_loss}])
def test_a_mean_over_a_second_dimension_is_right_for_even_microbatches_and_said(options: dict[str, Any]) -> None:
    x, y = torch.randn(2, 5, EVEN, 4, dtype=torch.float64).unbind()
    plain = Timed().double()
    name = "target" if "loss_fn" in options else "labels"
    model = cut(plain, cuts=["2"], batched={"x": 1, name: 1}, **options)
    with pytest.warns(UserWarning, match="could not be traced beyond a batch along dimension 1"):
        found: Any = model(x, **{name: y})
    found = found if isinstance(found, Tensor) else found["loss"]
    expected = plain(x, labels=y)["loss"]
    assert_close(backward(model, found), backward(plain, expected))
