"""The same Sequential, balance, chunks and schedule over several processes: equal to the module without a pipeline."""
from __future__ import annotations

import contextlib
import copy
import os
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import schedule
from splitpipe.distributed import Pipeline
from splitpipe.distributed.pipeline import Loss
from splitpipe.distributed.stage import StageModule
from splitpipe.schedule.op import Op
from tests.backward.test_weight_grad_store import Logged
from tests.helpers.covering import graded
from tests.helpers.deferring import scale
from tests.helpers.modules import Pop, Stash, module_of
from tests.helpers.scheduled import NAMES
from tests.helpers.world import SIZE, World, both
from tests.promise.layers import Apply

CHUNKS = 4


def layers() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(),
                           nn.Linear(8, 8), nn.Linear(8, 2))
    return module.double()


def small(module: nn.Module | None = None, **more: Any) -> Pipeline:
    """Of two layers, in two stages."""
    given = {"chunks": 2, "loss_fn": nn.MSELoss(), "device": "cpu", **more}
    return Pipeline(module or nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), [1, 1], **given)


def assert_trained_alike(rank: int, module: nn.Sequential, balance: list[int], name: str, steps: int = 2,
                         buffers: bool = True) -> None:
    """Losses and summed gradients of some steps are those of the whole module."""
    plain = copy.deepcopy(module)
    model = Pipeline(module, balance, chunks=CHUNKS, schedule=name, loss_fn=nn.MSELoss(), device="cpu")
    for _ in range(steps):
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
        expected = nn.functional.mse_loss(plain(x.clone()), y)
        expected.backward()
        loss = model.step(x, y)
        last = schedule.build(name, SIZE, CHUNKS).placement[-1] if isinstance(name, str) else SIZE - 1
        assert (loss is not None) is (rank == last)
        if loss is not None:
            torch.testing.assert_close(loss, expected.detach())
    theirs = dict(plain.named_parameters())
    own = dict(model.named_parameters())
    assert (own or not buffers or rank == 0) and set(own) <= set(theirs)
    for key, parameter in own.items():
        expected_grad = theirs[key].grad
        if expected_grad is None:  # Of a stage that the loss does not come from: torch sends zeros.
            assert parameter.grad is None or not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad, expected_grad, rtol=1e-6, atol=1e-9)
    assert set(model.state_dict()) >= set(own)
    if not buffers:  # A call for each microbatch.
        assert all(int(buffer) == CHUNKS * steps for buffer in model.buffers())


@NAMES
@both
def test_every_schedule_gives_the_loss_and_gradients_of_the_module(rank: int, name: str) -> None:
    stages = schedule.build(name, SIZE, CHUNKS).stages
    assert_trained_alike(rank, layers(), [len(layers()) // stages] * stages, name)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@both
def test_skips_to_the_next_stage_and_tuples_are_sent(rank: int, name: str) -> None:
    give, take = Apply(lambda x: (x.sin(), x.cos())), Apply(lambda x: x[0] * x[1])
    module = nn.Sequential(nn.Linear(6, 6), Stash(), nn.Linear(6, 6), give, take, Pop(), nn.Linear(6, 2))
    assert_trained_alike(rank, module.double(), [4, 3], name)


@both
def test_a_split_function_is_deferred(rank: int) -> None:
    log: list[tuple[str, str]] = []
    scales = [scale(6, Logged, log=log, name="") for _ in range(4)]
    module = nn.Sequential(nn.Linear(6, 6), *scales, nn.Linear(6, 2)).double()
    assert_trained_alike(rank, module, [3, 3], "zb-h1", steps=1)
    kinds = "".join(kind for kind, _ in log)  # First those of the module. Torch runs all of the first stage in W.
    assert kinds.startswith("BW" * 4) and ("BBWW" in kinds) is (rank == 1)


@both
def test_what_the_runtime_can_not_run_is_refused_in_every_process(rank: int) -> None:
    layer, hooked = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    hooked.register_forward_hook(print)
    hooked.register_buffer("count", torch.zeros(()))
    far = nn.Sequential(Stash(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), Pop())
    ops = [Op(kind, stage, 0) for kind, stage in (("F", 0), ("F", 1), ("BW", 1), ("BW", 0))]
    rows = [[Op(kind, stage, number) for kind in ("F", "BW") for number in (1, 0)] for stage in range(2)]
    for module, balance, name, message in (
        (far, [1, 1, 1, 2], "interleaved-1f1b", "'skip' from stage 0 to stage 3"),
        (nn.Sequential(layer, layer), [1, 1], "1f1b", r"weight of stage 1 .process 1. is also in stage 0 .process 0."),
        (nn.Sequential(layer), [1], "1f1b", "the model has 1 stage for 2 devices"),
        (nn.Sequential(layer, nn.Linear(6, 6)), [1, 1], schedule.Schedule([ops, []], [0, 0]),
         "no ops on device 1: expected ops in every process"),
        (hooked, [1, 1], "1f1b", "the module itself has buffers and forward_hooks: expected them in the layers"),
        (nn.Sequential(layer, nn.Linear(6, 6)), [1, 1], schedule.Schedule(rows, [0, 1]),
         r"in the order \[1, 0\]: expected \[0, 1\]"),
    ):
        chunks = name.microbatches if isinstance(name, schedule.Schedule) else 2
        with pytest.raises(ValueError, match=message):
            Pipeline(module, balance, chunks=chunks, schedule=name, loss_fn=nn.MSELoss(), device="cpu")


@both
def test_a_batch_that_does_not_fit_is_refused_and_the_next_one_runs(rank: int) -> None:
    model = small()
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"without grad mode.*evaluate\(input, target\)"):
        model.step(x, y)
    model.step(x, y)
    for input, target, message in (
        (x if rank else None, None if rank else y, "found no (input|target) in the process of"),
        (x[:7], y[:7], r"input has 7 rows for chunks=2.*drop_last"),
        ((x,), y, "input is a tuple of 1: expected a tensor, or a tuple of several"),
        (x[:4], y[:4], r"input has shape \[4, 6\] of torch.float32, but had \[8, 6\]"),
        (x.double(), y, r"input has shape .8, 6. of torch.float64, but had .8, 6. of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            model.step(input, target)
    with pytest.raises(TypeError, match="target is a dict: expected a tensor"):
        model.step(x, {"y": y})
    model.evaluate(x[:4], y[:4])  # Its processes agree apart.
    model.step(x, y)
    frozen = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 2))
    for another in small(), small(frozen):  # As errors say: for other shapes, and after freezing.
        another.step(x[:4], y[:4])


def test_without_processes_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), [1], loss_fn=nn.MSELoss())


def fatal(self: Any, output: Tensor, target: Tensor) -> Tensor:
    """A loss that ends its process when it is asked for the second step."""
    self.calls += 1
    if self.calls > 2 * CHUNKS:  # The first run of all is for the shapes.
        os._exit(1)
    return nn.functional.mse_loss(output, target)


def bereft(rank: int, name: str) -> None:
    stages = schedule.build(name, SIZE, CHUNKS).stages
    last = schedule.build(name, SIZE, CHUNKS).placement[-1]
    assert last == SIZE - 1
    model = Pipeline(layers(), [8 // stages] * stages, chunks=CHUNKS, schedule=name, device="cpu",
                     loss_fn=module_of(fatal, calls=0))
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        for _ in range(3):
            model.step(x, y)


@pytest.mark.parametrize("name", ["zb-h1", "gpipe"])
def test_a_process_that_is_killed_makes_the_others_end_with_an_error(world: World, name: str) -> None:
    world.lose(bereft, name)


def keeping(self: Any, x: Tensor) -> Tensor:
    """Keeps its first value, in a buffer that was None, and in one that was not there."""
    if self.mean is None:
        self.mean = x.detach().mean() + 1
        self.register_buffer("other", self.mean * 2)
    return x * self.mean + self.other  # type: ignore[no-any-return]


def keeper() -> nn.Module:
    made: nn.Module = module_of(keeping)
    made.register_buffer("mean", None)
    return made


@pytest.mark.parametrize("what", ["buffers that change", "buffers that layers make"])
@both
def test_finding_out_the_shapes_leaves_buffers_alone(rank: int, what: str) -> None:
    kind, count = (keeper, 2) if what == "buffers that layers make" else (lambda: nn.BatchNorm1d(6), 3)
    module = nn.Sequential(nn.Embedding(9, 6), kind(), nn.Linear(6, 6), kind()).double()
    plain = copy.deepcopy(module)
    model = Pipeline(module, [2, 2], chunks=2, schedule="1f1b", loss_fn=nn.MSELoss(), device="cpu")
    for _ in range(2):
        x, y = torch.randint(9, (8,)), torch.randn(8, 6, dtype=torch.float64)
        model.step(x, y)
        for rows in x.chunk(2):
            plain(rows)
    assert len(list(model.buffers())) == count
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name))


@both
def test_gradients_are_clipped_by_the_norm_over_all_processes(rank: int) -> None:
    module = layers()
    plain = copy.deepcopy(module)
    model = Pipeline(module, [4, 4], chunks=CHUNKS, loss_fn=nn.MSELoss(), device="cpu")
    x, y = torch.randn(8, 6, dtype=torch.float64) * 9, torch.randn(8, 2, dtype=torch.float64)
    model.step(x, y)
    nn.functional.mse_loss(plain(x), y).backward()
    for most in (1e9, 0.1):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), most)
        torch.testing.assert_close(model.clip_grad_norm_(most), expected)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


@both
def test_losses_of_torch_are_those_of_the_whole_batch(rank: int) -> None:
    for loss_fn in (nn.CrossEntropyLoss(ignore_index=0), nn.NLLLoss(torch.tensor([0.5, 2.0, 1.0])),
                    nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1), nn.CrossEntropyLoss()):
        module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        plain = copy.deepcopy(module)
        model = Pipeline(module, [1, 1], chunks=4, schedule="zb-h1", loss_fn=loss_fn, device="cpu")
        for y in ([0, 0, 1, 2, 0, 1, 2, 2], [2, 2, 1, 1, 0, 0, 1, 0], [loss_fn.ignore_index] * 8):
            x, target = torch.randn(8, 6), torch.tensor(y)
            expected = loss_fn(plain(x), target)
            expected.backward()
            loss = model.evaluate(x, target)
            again = model.step(x, target)
            if rank:
                torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
                torch.testing.assert_close(again, expected.detach(), equal_nan=True)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


@both
def test_what_is_no_mean_is_warned_of(rank: int) -> None:
    model = small(loss_fn=lambda output, target: nn.functional.mse_loss(output, target).sqrt())
    with pytest.warns(UserWarning, match="not be traced beyond sqrt") if rank else contextlib.nullcontext():
        model.step(torch.randn(8, 6), torch.randn(8, 2))


def unfit(rank: int) -> None:
    model = small(loss_fn=lambda output, target: output)
    error, message = (TypeError, "loss_fn returned a tensor of shape") if rank else (RuntimeError, ".")
    with pytest.raises(error, match=message):
        model.step(torch.randn(8, 6), torch.randn(8, 2))
    if rank:
        os._exit(0)  # The other one waits for a gradient, and ends with this one.


def test_a_loss_that_is_no_mean_is_an_error(world: World) -> None:
    world.lose(unfit)


@pytest.mark.parametrize("loss_fn", [
    lambda output, target: output.mean() if target.any() else output.sum(),
    lambda output, target: (output * target).sum() / target.sum() if target.any() else output.sum(),
], ids=["a mean or a sum", "a count or none"])
def test_a_loss_whose_terms_depend_on_the_microbatch_is_an_error(loss_fn: Any) -> None:
    loss, target = Loss(loss_fn, 2), torch.tensor([[1.0], [0.0]])
    loss.begin(target)
    with pytest.raises(ValueError, match="terms of different kinds"):
        for part in target.chunk(2):
            loss((torch.ones(1, 1, requires_grad=True),), part)


def test_a_step_keeps_no_output_of_the_last_stage() -> None:
    loss, target = Loss(F.cross_entropy, 2), torch.tensor([0, 1, -100, 2])
    loss.begin(target)
    for part in target.chunk(2):
        output = torch.randn(2, 3, requires_grad=True) * 1
        kept = weakref.ref(output)
        loss((output,), part).backward()
        del output
        assert kept() is None


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "v-half"])
@both
def test_evaluating_is_forward_alone_between_steps_and_before(rank: int, name: str) -> None:
    stages = schedule.build(name, SIZE, CHUNKS).stages
    module = layers()
    module[1] = nn.Dropout(0.5)
    plain = copy.deepcopy(module).eval()
    model = Pipeline(module, [8 // stages] * stages, chunks=CHUNKS, schedule=name, loss_fn=nn.MSELoss(), device="cpu")
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    for _ in range(2):
        model.eval()
        loss = model.evaluate(x, y)
        if loss is not None:
            torch.testing.assert_close(loss, nn.functional.mse_loss(plain(x), y).detach())
        assert all(parameter.grad is None for parameter in model.parameters())
        model.train()
        model.step(x, y)
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


@pytest.mark.parametrize(("make", "kind"), [
    (lambda x: (x, "odd"), "str"), (lambda x: {"y": x}, "dict"), (lambda x: (x,), "tuple"), (lambda x: [x, x], "list"),
    (lambda x: x.max(0), "max"),
    (lambda x: torch.complex(x, x).requires_grad_(), "Tensor"), (nn.Linear(2, 2), "NoneType"),  # No skip was stashed.
])
def test_values_that_would_arrive_as_others_are_an_error(make: Any, kind: str) -> None:
    stage = StageModule([[], [], [], [("0", Apply(make))], []], 3)
    stage._leaving = [(None, "skip")] if isinstance(make, nn.Linear) else []
    with pytest.raises(TypeError, match=rf"stage 3 would send a {kind}.*expected a tensor, or a tuple of several"):
        stage(torch.randn(2, 2))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def scaled(self: Any, x: Tensor) -> Tensor:
    """Multiplies by the sum of two parameters, whose gradients are one tensor to autograd."""
    return x * (self.first + self.second)  # type: ignore[no-any-return]


def fresh(self: Any, x: Tensor) -> Tensor:
    """Goes on from its parameter alone."""
    return self.start.sin().expand(x.shape[0], -1)  # type: ignore[no-any-return]


def counting(self: Any, x: Tensor) -> Tensor:
    """Keeps a count that each call puts in a new place, and gives what is in no order of its own."""
    self.calls = self.calls + 1
    return x.reshape(-1, 2, 3).transpose(1, 2)


def frozen() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    module[0].requires_grad_(False)
    return module


#: Layers with one linear layer before and one behind them, or all layers; and their balance.
HARD: dict[str, Any] = {
    "a first stage that is frozen": (frozen, [1, 3]),
    "a first stage without parameters": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)), [1, 2]),
    "parameters that meet": (lambda: module_of(scaled, first=weight(6), second=weight(6)), [1, 2]),
    "a layer that ignores its input": (lambda: module_of(fresh, start=weight(6)), [2, 1]),
    "in place": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)),
                 [2, 2]),
    "a transposed value": (lambda: nn.Sequential(
        nn.Linear(6, 6), module_of(counting, calls=nn.Buffer(torch.zeros(()))), nn.Flatten(), nn.Linear(6, 2)), [2, 2]),
    "an expanded gradient": (
        lambda: nn.Sequential(nn.Linear(6, 12), nn.Unflatten(1, (6, 2)), nn.AvgPool1d(2), nn.Flatten(),
                              nn.Linear(6, 2)), [2, 3]),
}


@graded({"what": [*HARD], "name": ["1f1b", "zb-h1"]}, essence=[["name"]], thorough=[["what"]])
@both
def test_no_gradient_is_lost_or_another_ones(rank: int, what: str, name: str) -> None:
    make, balance = HARD[what]
    made = make()
    module = made if isinstance(made, nn.Sequential) else nn.Sequential(nn.Linear(6, 6), made, nn.Linear(6, 2))
    assert_trained_alike(rank, module.double(), balance, name, steps=3, buffers=what != "a transposed value")


def twofold(self: Any, x: Tensor) -> Any:
    """A value, and one that comes from a parameter alone."""
    return x @ self.weight, self.weight.square().sum()


def raw(self: Any, x: Tensor) -> Any:
    """A parameter as it is, and a value."""
    return self.weight, x.sin()


def saved(self: Any, x: Tensor) -> Any:
    """A value that the layer has need of in W, its view, and what comes from it."""
    y = self.layer(x)
    return y, y.view(-1, 2, 3), self.layer(y)


def joined(x: Any) -> Tensor:
    if len(x) == 3:
        return x[0].sin() + x[1].reshape(-1, 6).cos() * x[2]  # type: ignore[no-any-return]
    first, second = x
    return second @ first if first.shape == (6, 6) else first + second  # type: ignore[no-any-return]


def turns(self: Any, x: Tensor) -> Tensor:
    """Two layers in turns, twice: the way of each leads through the other one."""
    for layer in (self.one, self.two, self.one, self.two):
        x = layer(x).tanh()
    return x


def hooked(self: Any, x: Tensor) -> Tensor:
    """A hook of its own on the way back."""
    y: Tensor = self.layer(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.5)
    return y.sin()


def row(self: Any, x: Tensor) -> Tensor:
    """A parameter whose gradient is the one that arrives, in the memory that it arrives in."""
    return x + (self.rows if len(x) == 2 else self.rows.repeat(len(x) // 2, 1))  # type: ignore[no-any-return]


def linear(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(6, 6) for name in names or ("layer",)}


#: Each for the two stages between, of which one receives its gradients from the other process.
BETWEEN: dict[str, Any] = {
    "weights behind an output of their own": lambda: (module_of(twofold, weight=weight(6, 6)), Apply(joined)),
    "a parameter as an output": lambda: (module_of(raw, weight=weight(6, 6)), Apply(joined)),
    "an output that a layer has saved": lambda: (module_of(saved, **linear()), Apply(joined)),
    "an output that is a view": lambda: (
        nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3))), nn.Sequential(nn.Flatten(), nn.Linear(6, 6))),
    "two layers in turns": lambda: [module_of(turns, **linear("one", "two")) for _ in range(2)],
    "a hook on a value": lambda: [module_of(hooked, **linear()) for _ in range(2)],
    "the memory that arrives": lambda: [module_of(row, rows=weight(2, 6)) for _ in range(2)],
}


@pytest.mark.parametrize("what", BETWEEN)
@both
def test_backward_in_halves_gives_each_gradient_once(rank: int, what: str) -> None:
    module = nn.Sequential(nn.Linear(6, 6), *BETWEEN[what](), nn.Linear(6, 2)).double()
    assert_trained_alike(rank, module, [1, 1, 1, 1], "v-half", steps=3)


def learned(self: Any, output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """A loss with a parameter, of one of two values."""
    return nn.functional.mse_loss(output[0] * self.scale, target)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@both
def test_a_loss_has_parameters_and_takes_several_outputs(rank: int, name: str) -> None:
    twofold = Apply(lambda x: (x, x.detach()))
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2), twofold).double()
    loss_fn = module_of(learned, scale=nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    plain = copy.deepcopy(nn.Sequential(module, loss_fn))
    model = Pipeline(module, [1, 2], chunks=CHUNKS, schedule=name, loss_fn=loss_fn, device="cpu")
    for _ in range(2):
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
        model.step(x, y)
        plain[1](plain[0](x), y).backward()
    if rank == SIZE - 1:
        torch.testing.assert_close(loss_fn.scale.grad, plain[1].scale.grad)
        torch.testing.assert_close(module[1].weight.grad, plain[0][1].weight.grad)


@both
def test_hooks_after_accumulation_fire_in_every_stage(rank: int) -> None:
    model = Pipeline(layers(), [4, 4], chunks=2, schedule="zb-h1", loss_fn=nn.MSELoss(), device="cpu")
    fired = set[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.add(name))
    model.step(torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64))
    assert fired == {name for name, _ in model.named_parameters()}


@both
def test_what_processes_have_not_agreed_on_is_refused(rank: int) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    whole = module.state_dict()
    model = small(module)
    model.load_state_dict(whole)
    with pytest.raises(ValueError, match="found input with 8 rows, target with 4 rows"):
        model.step(torch.randn(8, 6), torch.randn(4, 2))
    model.step(torch.randn(4, 6), torch.randn(4, 2))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if rank == 0:
        with pytest.raises(RuntimeError) as info:
            model.step(torch.randn(4, 6), torch.randn(4, 2))
        assert re.search("stage 0 would send .* Build another Pipeline after freezing", str(info.value.__cause__))
        with pytest.raises(RuntimeError, match="an earlier step has failed .*stage 0 would send.*Restart them"):
            model.step(torch.randn(4, 6), torch.randn(4, 2))


@both
def test_a_step_that_fails_before_anything_is_sent_is_the_last_one(rank: int) -> None:
    model = small()
    model.step(torch.randn(4, 6), torch.randn(4, 2))

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("planted")

    model._run = fails
    with pytest.raises(ValueError, match="planted"):
        model.step(torch.randn(4, 6), torch.randn(4, 2))
    with pytest.raises(RuntimeError, match="an earlier step has failed .*planted"):
        model.step(torch.randn(4, 6), torch.randn(4, 2))
