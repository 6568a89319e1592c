"""torch's own losses with a schedule: that of the whole batch, whatever is ignored, weighted, smoothed or summed."""
from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.core.note import add_note
from tests.helpers.covering import graded, pairs
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mlp, twins
from tests.helpers.twin import assert_same_tensors

REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum"])
#: Rows of a batch, microbatches: even, uneven, of single rows, undivided.
SIZES = [(8, 4), (7, 3), (5, 4), (3, 8), (4, 1)]
CLASSES = 4
WEIGHT = torch.tensor([0.5, 2.0, 0.25, 1.0], dtype=torch.float64)


class Shaped(nn.Module):
    """Rows of numbers as rows of classes, for targets of some more dimensions."""

    def __init__(self, *more: int) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        spread = x.reshape(len(x), CLASSES, *[1] * len(self.more)).expand(-1, -1, *self.more)
        factor = torch.linspace(0.5, 1.5, math.prod(self.more), dtype=x.dtype).reshape(self.more)
        return (spread * factor).log_softmax(1)


class Case(NamedTuple):
    """A loss, and what it is given."""

    kind: str
    weighted: bool
    ignored: int
    smoothing: float
    more: tuple[int, ...] = ()
    chances: bool = False


CASES = [
    Case(kind, weighted, ignored, smoothing, more)
    for kind, more in (("module", ()), ("module", (3,)), ("partial", ()))
    for weighted in (False, True)
    for ignored in (-100, 1)
    for smoothing in (0.0, 0.1)
]
CASES += [
    Case("module", True, 1, smoothing, more) for smoothing in (0.0, 0.1) for more in ((2, 3), (2, 1, 2))
]
CASES += [
    Case("module", weighted, -100, smoothing, more, chances=True)
    for weighted in (False, True) for smoothing in (0.0, 0.1) for more in ((), (3,))
]


def made(case: Case, reduction: str, nll: bool = False) -> Any:
    """The loss of a case."""
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": case.ignored}
    if case.weighted:
        options["weight"] = WEIGHT
    if not nll:
        options["label_smoothing"] = case.smoothing
    if case.kind == "module":
        return (nn.NLLLoss if nll else nn.CrossEntropyLoss)(**options)
    return partial(F.nll_loss if nll else F.cross_entropy, **options)


def targets(case: Case, rows: int) -> Tensor:
    """Targets of a batch: the first half of the rows has none that counts, the others have some."""
    if case.chances:
        return torch.rand(rows, CLASSES, *case.more).softmax(1)
    y = torch.randint(CLASSES, (rows, *case.more))
    y[y == case.ignored] = 2
    y[: rows // 2] = case.ignored if case.ignored >= 0 else 3
    y[-1, ...] = 0
    return y


def assert_equal(plain: nn.Module, model: SplitPipe, x: Tensor, y: Any, loss_fn: Any) -> None:
    for module in (plain, model):
        module.zero_grad()
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    loss, expected = model(mine, target=y), loss_fn(plain(theirs), y)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert loss.shape == () and loss.dtype == expected.dtype
    (3 * loss).backward()
    (3 * expected).backward()
    assert_same_tensors(model, plain)
    torch.testing.assert_close(mine.grad, theirs.grad)


LOSSES: dict[str, list[Any]] = {
    "name": ["1f1b", "zb-h1"], "reduction": ["mean", "sum"], "which": ["cross_entropy", "nll"]
}


@graded(LOSSES, essence=[["which"]], thorough=pairs([*LOSSES]))
@pytest.mark.thorough
def test_losses_of_classes_are_those_of_the_whole_batch(name: str, reduction: str, which: str) -> None:
    nll = which == "nll"
    for number, case in enumerate(CASES):
        if nll and (case.smoothing or case.chances):
            continue
        loss_fn = made(case, reduction, nll)
        rows, chunks = SIZES[(number + (name == "zb-h1")) % len(SIZES)]
        plain, model = twins(nn.Sequential(*mlp(3), Shaped(*case.more)), name, 2, loss_fn=loss_fn, chunks=chunks)
        try:
            assert_equal(plain, model, torch.randn(rows, 4), targets(case, rows), loss_fn)
        except BaseException as error:
            add_note(error, f"{case}, {rows} rows, {chunks} chunks")
            raise


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, F.nll_loss], ids=["cross_entropy", "nll"])
def test_the_functions_themselves_ignore_what_they_ignore_by_default(loss_fn: Any) -> None:
    plain, model = twins(nn.Sequential(*mlp(3), Shaped()), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
    y = torch.tensor([-100, -100, -100, 1, -100, 2, 3])
    assert_equal(plain, model, torch.randn(7, 4), y, loss_fn)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch is older")
def test_a_loss_with_the_last_layer_inside_is_that_of_the_whole_batch() -> None:
    for options in {"ignore_index": 1, "label_smoothing": 0.1}, {"weight": WEIGHT}, {"reduction": "sum"}, {}:
        loss_fn: Any = nn.LinearCrossEntropyLoss(4, CLASSES, bias=True, **options)
        weights = []
        plain, model = twins(mlp(3), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
        x, y = torch.randn(7, 4), torch.tensor([1, 1, 1, 0, 1, 2, 3])
        for run in (lambda: model(x, target=y), lambda: loss_fn(plain(x), y)):  # noqa: B023
            loss_fn.zero_grad()
            run().backward()
            weights.append([parameter.grad.clone() for parameter in loss_fn.parameters()])
        torch.testing.assert_close(*weights)
        assert_equal(plain, model, x, y, loss_fn)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.NLLLoss(WEIGHT)])
@pytest.mark.parametrize("rows", [6, 0])
def test_a_batch_that_counts_nothing_has_a_nan_and_gradients_of_zero(loss_fn: Any, rows: int) -> None:
    plain, model = twins(nn.Sequential(*mlp(3), Shaped()), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
    x, y = torch.randn(rows, 4), torch.full((rows,), -100)
    assert loss_fn(plain(x), y).isnan()
    assert_equal(plain, model, x, y, loss_fn)
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_a_microbatch_whose_classes_weigh_nothing_leaves_the_others_alone() -> None:
    loss_fn = nn.CrossEntropyLoss(torch.tensor([0.0, 2.0, 1.0, 0.5]))
    plain, model = twins(nn.Sequential(*mlp(3), Shaped()), "zb-h1", 2, loss_fn=loss_fn, chunks=4)
    loss_fn.double()
    for y in ([0, 0, 1, 2, 0, 0, 0, 3], [1, 0, 3, 3, 0, 0, 2, 2]):
        assert_equal(plain, model, torch.randn(8, 4), torch.tensor(y), loss_fn)


def test_weights_of_zero_with_smoothed_labels_are_those_of_the_batch() -> None:
    loss_fn = nn.CrossEntropyLoss(torch.tensor([0.0, 2.0, 1.0, 0.5]).double(), label_smoothing=0.1)
    plain, model = twins(nn.Sequential(*mlp(3), Shaped()), "zb-h1", 2, loss_fn=loss_fn, chunks=4)
    for y in ([0, 0, 1, 2, 0, 0, 0, 3], [1, 0, 3, 3, 0, 0, 2, 2]):
        assert_equal(plain, model, torch.randn(8, 4), torch.tensor(y), loss_fn)


def signs(rows: int) -> Tensor:
    return torch.randint(2, (rows, 4)) * 2.0 - 1


ELEMENTS: list[tuple[str, str, Callable[[int], Tensor], dict[str, Any]]] = [
    ("MSELoss", "mse_loss", lambda rows: torch.randn(rows, 4), {}),
    ("L1Loss", "l1_loss", lambda rows: torch.randn(rows, 4), {}),
    ("SmoothL1Loss", "smooth_l1_loss", lambda rows: torch.randn(rows, 4), {"beta": 0.5}),
    ("HuberLoss", "huber_loss", lambda rows: torch.randn(rows, 4), {"delta": 0.5}),
    ("BCELoss", "binary_cross_entropy", lambda rows: torch.rand(rows, 4), {"weight": WEIGHT}),
    ("BCEWithLogitsLoss", "binary_cross_entropy_with_logits", lambda rows: torch.rand(rows, 4), {"pos_weight": WEIGHT}),
    ("KLDivLoss", "kl_div", lambda rows: torch.rand(rows, 4), {}),
    ("PoissonNLLLoss", "poisson_nll_loss", lambda rows: torch.rand(rows, 4), {"full": True}),
    ("HingeEmbeddingLoss", "hinge_embedding_loss", signs, {"margin": 2.0}),
    ("SoftMarginLoss", "soft_margin_loss", signs, {}),
    ("MultiLabelSoftMarginLoss", "multilabel_soft_margin_loss", lambda rows: torch.rand(rows, 4), {"weight": WEIGHT}),
    ("MultiMarginLoss", "multi_margin_loss", lambda rows: torch.arange(rows) % 4, {"weight": WEIGHT}),
    ("MultiLabelMarginLoss", "multilabel_margin_loss", lambda rows: torch.tensor([[1, 3, -1, 0]] * rows), {}),
]


@pytest.mark.parametrize(("module", "function", "target", "options"), ELEMENTS, ids=[one[0] for one in ELEMENTS])
def test_other_losses_of_torch_are_those_of_the_whole_batch(
    module: str, function: str, target: Callable[[int], Tensor], options: dict[str, Any]
) -> None:
    for reduction in ("mean", "sum", *["batchmean"] * (module == "KLDivLoss")):
        if (module, reduction) == ("KLDivLoss", "mean"):
            continue  # Torch itself warns of it.
        given = {**options, "reduction": reduction}
        for loss_fn in (getattr(nn, module)(**given), partial(getattr(F, function), **given)):
            for name, rows, chunks in ("zb-h1", 7, 3), ("1f1b", 5, 8):
                layers = nn.Sequential(*mlp(3), nn.Sigmoid())
                plain, model = twins(layers, name, 2, loss_fn=loss_fn, chunks=chunks)
                assert_equal(plain, model, torch.randn(rows, 4), target(rows), loss_fn)


@pytest.mark.parametrize(
    "loss_fn", [nn.MSELoss(reduction="sum"), partial(partial(F.mse_loss, reduction="mean"), reduction="sum")]
)
def test_reductions_are_read_as_torch_reads_them(loss_fn: Any) -> None:
    plain, model = twins(mlp(4), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
    assert_equal(plain, model, torch.randn(7, 4), torch.randn(7, 4), loss_fn)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_a_module_of_the_old_arguments_is_read_by_its_reduction() -> None:
    loss_fn = nn.CrossEntropyLoss(size_average=False)
    plain, model = twins(mlp(4), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
    assert_equal(plain, model, torch.randn(7, 4), torch.arange(7) % 4, loss_fn)


def test_a_function_with_the_old_arguments_is_not_understood_which_is_said() -> None:
    loss_fn = partial(F.mse_loss, size_average=False)
    _, model = twins(mlp(4), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
    with pytest.warns(UserWarning, match="beyond mse_loss.*reduction="):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "size_average and reduce args")
            model(torch.randn(7, 4), target=torch.randn(7, 4))


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # The compiler's own.
@pytest.mark.thorough
def test_a_compiled_loss_is_a_mean_over_rows_which_is_said() -> None:
    for loss_fn in (nn.CrossEntropyLoss(), partial(F.cross_entropy)):
        plain, model = twins(mlp(3), "1f1b", 2, loss_fn=torch.compile(loss_fn, backend="eager"), chunks=2)
        with pytest.warns(UserWarning, match="a compiled function"):
            assert_equal(plain, model, torch.randn(4, 4), torch.tensor([1, 1, 2, 3]), loss_fn)
        assert_equal(plain, model, torch.randn(4, 4), torch.tensor([1, 1, 2, 3]), loss_fn)


def test_hooks_of_a_loss_fire_once_a_microbatch_and_see_its_own_mean() -> None:
    loss_fn, seen = nn.CrossEntropyLoss(ignore_index=0), []
    _, model = twins(nn.Sequential(*mlp(3), Shaped()), "1f1b", 2, loss_fn=loss_fn, chunks=3)

    def hook(module: nn.Module, args: Any, found: Tensor) -> None:
        assert module is loss_fn
        seen.append(F.cross_entropy(*args, ignore_index=0) == found)

    loss_fn.register_forward_hook(hook)
    model(torch.randn(6, 4), target=torch.tensor([0, 1, 2, 3, 1, 1])).backward()
    assert seen == [True] * 3


def test_what_torch_takes_for_one_sample_is_not_claimed_to_be_exact() -> None:
    for loss_fn, y in ((F.cross_entropy, torch.rand(6)), (F.multilabel_margin_loss, torch.zeros(6, dtype=torch.long))):
        _, model = twins(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), "1f1b", 2, loss_fn=loss_fn, chunks=3)
        with pytest.warns(UserWarning, match=f"beyond {loss_fn.__name__}"):
            model(torch.randn(6, 4), target=y)


@REDUCTIONS
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_rows_that_are_broadcast_are_not_claimed_to_be_exact(reduction: str) -> None:
    loss_fn = nn.MSELoss(reduction=reduction)
    _, model = twins(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), "1f1b", 2, loss_fn=loss_fn, chunks=3)
    with pytest.warns(UserWarning, match="beyond mse_loss"):
        model(torch.randn(6, 4), target=torch.randn(6))
    plain, model = twins(mlp(2), "1f1b", 2, loss_fn=loss_fn, chunks=3)
    assert_equal(plain, model, torch.randn(6, 4), torch.tensor(0.5), loss_fn)


def test_a_reduction_that_is_none_is_an_error_as_of_any_loss() -> None:
    _, model = twins(mlp(4), "1f1b", 2, loss_fn=nn.CrossEntropyLoss(reduction="none"), chunks=3)
    with pytest.raises(TypeError, match=r"tensor of shape \[2\] and type torch.float64 as the loss: expected a tensor"):
        model(torch.randn(6, 4), target=torch.arange(6) % 4)


def test_weights_of_classes_that_require_grad_have_gradients_where_torch_has_them() -> None:
    grads = []
    for scheduled in (False, True):
        torch.manual_seed(0)
        weight = WEIGHT.clone().requires_grad_()
        loss_fn = partial(F.cross_entropy, weight=weight)
        plain, model = twins(nn.Sequential(*mlp(3), Shaped()), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
        x, y = torch.randn(7, 4), torch.rand(7, 4)
        (model(x, target=y) if scheduled else loss_fn(plain(x), y)).backward()
        grads.append(weight.grad)
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
            model(x, target=torch.arange(7) % 4)
    torch.testing.assert_close(*grads)


@REDUCTIONS
def test_half_precision_with_a_scaler(reduction: str) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)).float()
    loss_fn = nn.CrossEntropyLoss(ignore_index=0, reduction=reduction)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = SplitPipe(copy.deepcopy(plain), [2, 1], devices=["cpu"] * 2, chunks=3, schedule="zb-h1", loss_fn=loss_fn,
                      grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(7, 16).float(), torch.tensor([0, 0, 0, 3, 4, 0, 5])
    loss_fn(plain(x), y).backward()
    with torch.autocast("cpu", torch.float16):
        loss = model(x, target=y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(loss, loss_fn(plain(x), y), rtol=0.01, atol=0.01)
    for p, q in zip(model.parameters(), plain.parameters()):
        assert p.grad is not None and q.grad is not None and (p.grad - q.grad).norm() <= 0.01 * q.grad.norm()
