"""The batch's loss, made of the microbatches': means by rows, totals by counts, where nothing counts, and faults."""
from __future__ import annotations

from collections import UserDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from splitpipe import SplitPipe
from splitpipe.loss.numbers import Amount, Number, Unknown, amount, batch, quotient
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import mlp, twins
from tests.helpers.twin import assert_same_tensors


def assert_equal(plain: nn.Module, model: SplitPipe, x: Tensor, y: Any, loss_fn: Any) -> None:
    for module in (plain, model):
        module.zero_grad()
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    loss, expected = model(mine, target=y), loss_fn(plain(theirs), y)
    torch.testing.assert_close(loss, expected)
    assert loss.shape == () and loss.dtype == expected.dtype
    (3 * loss).backward()
    (3 * expected).backward()
    assert_same_tensors(model, plain)
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("kind", [
    int, float, lambda n: torch.tensor(n), lambda n: torch.tensor([float(n)]), lambda n: n * 1e-30, lambda n: n * 1e30
])
def test_a_count_is_any_number(kind: Any) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        return (output - target).square().sum().reshape(1), kind(output.numel())

    plain, model = twins(mlp(5), "zb-h1", 2, loss_fn=loss_fn, chunks=3)
    factor = 28 / float(kind(28))
    assert_equal(plain, model, torch.randn(7, 4), torch.randn(7, 4), lambda y, target: F.mse_loss(y, target) * factor)


@pytest.mark.parametrize("loss_fn", [
    F.cross_entropy, lambda o, t: (o.logsumexp(1) * (t > 0)).sum() / (t > 0).sum(),
    lambda o, t: o.mean() + o.exp().mean(),
])
def test_the_host_waits_for_no_count(loss_fn: Any) -> None:
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    plain, model = twins(mlp(3), "1f1b", 2, loss_fn=loss_fn, chunks=2)
    x, y = torch.randn(4, 4), torch.tensor([1, 0, 2, -100])
    with Reads():
        model(x, target=y).backward()
    loss_fn(plain(x), y).backward()
    assert_same_tensors(model, plain)


def test_in_a_single_microbatch_any_loss_is_that_of_the_batch() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).norm()

    plain, model = twins(mlp(4), "1f1b", 2, loss_fn=loss_fn, chunks=1)
    assert_equal(plain, model, torch.randn(3, 4), torch.randn(3, 4), loss_fn)


def test_rows_are_known_in_any_mapping_and_in_objects_that_blocks_return() -> None:
    def loss(o: Tensor, t: Any) -> Tensor:
        return (o - t["y"]).square().sum() / t["m"].sum()

    plain, model = twins(mlp(4), "1f1b", 2, loss_fn=loss, chunks=2)
    assert_equal(plain, model, torch.randn(3, 4), UserDict(y=torch.randn(3, 4), m=torch.arange(3.0)[:, None]), loss)
    counting = module_of(lambda _, x: SimpleNamespace(m=(x > 0).double()))
    own = module_of(lambda self, x: {"loss": self.b(self.a(x)).square().sum() / self.counting(x).m.sum()},
                    counting=counting, **linears("a", "b")).double()
    x, cut = torch.randn(3, 4), SplitPipe(own, cuts=["b"], devices=["cpu"] * 2, chunks=2)
    torch.testing.assert_close(cut(x)["loss"], own(x)["loss"])


def test_a_list_of_targets_has_one_for_each_row_whatever_their_sizes() -> None:
    def loss_fn(output: Tensor, target: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([F.mse_loss(o[:2], own["y"][torch.tensor([1, 0])]) for o, own in zip(output, target)]).mean()

    plain, model = twins(mlp(4), "1f1b", 2, loss_fn=loss_fn, chunks=2)
    with pytest.warns(UserWarning, match="beyond unbind"):  # It is a mean over rows.
        assert_equal(plain, model, torch.randn(4, 4), [{"y": torch.randn(2)} for _ in range(4)], loss_fn)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # The compiler's own.
@pytest.mark.thorough
def test_a_compiled_loss_is_a_mean_over_rows_which_is_said() -> None:
    for loss_fn in (nn.CrossEntropyLoss(), partial(F.cross_entropy)):
        plain, model = twins(mlp(3), "1f1b", 2, loss_fn=torch.compile(loss_fn, backend="eager"), chunks=2)
        with pytest.warns(UserWarning, match="a compiled function"):
            assert_equal(plain, model, torch.randn(4, 4), torch.tensor([1, 1, 2, 3]), loss_fn)
        assert_equal(plain, model, torch.randn(4, 4), torch.tensor([1, 1, 2, 3]), loss_fn)


def test_what_torch_takes_for_one_sample() -> None:
    for loss_fn, y in ((F.cross_entropy, torch.rand(6)), (F.multilabel_margin_loss, torch.zeros(6, dtype=torch.long))):
        _, model = twins(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), "1f1b", 2, loss_fn=loss_fn, chunks=3)
        with pytest.warns(UserWarning, match=f"beyond {loss_fn.__name__}"):
            model(torch.randn(6, 4), target=y)


def test_arguments_that_a_loss_of_torch_does_not_take_are_its_own_error() -> None:
    _, model = twins(mlp(3), "1f1b", 2, loss_fn=lambda *_: F.mse_loss(1.0, 2.0), chunks=2)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="'float' object"):
        model(torch.randn(4, 4), target=0)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (lambda y: y, r"tensor of shape \[3, 4\] and type torch.float64, with a graph: expected a tensor of"),
        (lambda y: 3.0, "a float: expected"),
        (lambda y: None, "a NoneType: expected"),
        (lambda y: y.argmax(), r"a tensor of shape \[\] and type torch.int64: expected"),
        (lambda y: (y, 3), r"a tensor of shape \[3, 4\] .* and the count a int: expected"),
        (lambda y: (1.0, 3), "a float and the count a int: expected"),
        (lambda y: (y.sum(), y), r"and the count a tensor of shape \[3, 4\] .* or a pair \(total, count\)"),
        (lambda y: (y.sum(), "3"), "and the count a str: expected"),
        (lambda y: (y.sum(), y.sum()), "and the count a tensor of .*, with a graph: .* which have no graph"),
        (lambda y: (y.sum(), 1, 2), "a tuple: expected"),
    ],
)
def test_an_invalid_return_value_of_loss_fn_is_named(found: Any, text: str) -> None:
    _, model = twins(mlp(5), "zb-v", 2, loss_fn=lambda output, _: found(output), chunks=3)
    with pytest.raises(TypeError, match=f"loss_fn returned .*{text}") as info:
        model(torch.randn(7, 4), target=0)
    assert "loss_fn" in str(info.value)
    assert "layer 'loss_fn'" in " ".join(info.value.__notes__)


def number(above: float, count: Amount = 1.0, grad: bool = False) -> Number:
    """A mean; ``grad``: of entries that nothing has selected."""
    total = torch.tensor(above, requires_grad=grad)
    return quotient(total, count, total, "mean", grad, not grad)


def combined(each: list[Number | Unknown]) -> Tensor | None:
    found = batch(each)
    return None if found is None else found[0].evaluate(found[1])


def nothing() -> Number:
    return amount("", torch.tensor(0.0), constant=True, nothing=True)


def test_a_microbatch_counts_nothing_if_masks_decide_what_counts_in_the_others() -> None:
    counted = [number(above, torch.tensor(count)) for above, count in ((2.0, 2), (12.0, 3))]
    assert combined([*counted, nothing()]) == pytest.approx(14 / 5)
    assert combined([number(1.0, grad=True), nothing()]) is None
    assert combined([nothing()] * 2) == 0


def test_sums_of_whole_numbers_are_whole_numbers() -> None:
    found = combined([amount("sum", torch.tensor(2**40 + k)) for k in range(3)])
    assert found is not None and found.dtype == torch.int64 and int(found) == 3 * 2**40 + 3
    small = combined([amount("sum", torch.tensor(2, dtype=torch.int32))] * 3)
    assert small is not None and small.dtype == torch.int32


def test_half_precision_sums_of_many_microbatches_are_exact() -> None:
    own = module_of(lambda self, x: self.b(self.a(x)).sum(), a=nn.Identity(), b=nn.Identity())
    x = torch.ones(1024, 1, dtype=torch.bfloat16)
    assert SplitPipe(own, cuts=["b"], devices=["cpu"] * 2, chunks=1024)(x).item() == 1024
