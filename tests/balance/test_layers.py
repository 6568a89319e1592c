"""What layers cost is measured on copies of them, and nothing else notices."""
from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from splitpipe.balance import copies, layers
from splitpipe.balance.layers import Layers
from splitpipe.skip.box import Namespace
from tests.devices.log import softcuda
from tests.helpers.copied import TICK, Clock, Log
from tests.helpers.skipping import Pop, Stash, popping, stashing
from tests.helpers.twin import Failing
from tests.promise.layers import Apply

CPU = torch.device("cpu")
Run = Callable[[nn.Sequential, object], list[float]]


class TurnBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now += ctx.seconds
        return grad, None, None


class Work(nn.Module):
    """Takes the next of the given times in each forward, the last one over and over."""

    def __init__(self, clock: Clock, *forward: float, backward: float = 0.0) -> None:
        super().__init__()
        self.clock, self.forward_times, self.backward_time = clock, forward, backward
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.forward_times[min(self.runs, len(self.forward_times) - 1)]
        self.runs += 1
        return TurnBack.apply(x, self.clock, self.backward_time)


class Record(nn.Module):
    """Logs what it is given, and whatever else is asked of the copy."""

    def __init__(self, log: Log, function: Any = lambda layer, x: x) -> None:
        super().__init__()
        self.log, self.function = log, function

    def forward(self, x: Any) -> Any:
        result = self.function(self, x)
        self.log.append(result)
        return x


class Pair(NamedTuple):
    left: Tensor
    right: dict[str, Any]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(layers, "perf_counter", clock)
    return clock


def whole(module: nn.Sequential, sample: object) -> Layers:
    """Layers that get all of a sample, which need not be a batch."""
    return Layers(module, sample, 10**6)


def times(module: nn.Sequential, sample: object, timeout: float = 0.001) -> list[float]:
    return layers.times(whole(module, sample), timeout, CPU)


def sizes(module: nn.Sequential, input: object, param_scale: float = 0.0) -> list[float]:
    return layers.sizes(whole(module, input), 1, param_scale, CPU)


@pytest.fixture(params=[times, sizes])
def run(request: pytest.FixtureRequest) -> Run:
    """Each measurement for tests of what both have in common."""
    found: Run = request.param
    return found


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(("works", "timeout", "expected"), [
    pytest.param([((1.0,), 2.0), ((4.0,), 8.0)], 40, [3, 12], id="forward and backward"),
    pytest.param([((50.0, 1.0), 0.0)], 1.5, [1], id="not of the first run, which warms up"),
    pytest.param([((1.0, 3.0, 2.0, 64.0, 2.5, 2.25), 0.0)], 73, [2.5], id="the median of the runs"),
    pytest.param([((8.0, 5.0), 0.0), ((7.0, 6.0), 0.0)], 1, [5, 7], id="without time left, of the first run"),
])
def test_a_time_is_that_of(clock: Clock, works: Any, timeout: float, expected: list[float]) -> None:
    module = nn.Sequential(*(Work(clock, *forward, backward=backward) for forward, backward in works))
    assert times(module, leaf(1), timeout) == [time + TICK for time in expected]


def test_runs_stop_once_the_timeout_is_over(clock: Clock) -> None:
    log = Log()
    module = nn.Sequential(Work(clock, 1.0), Record(log, lambda layer, x: clock.now), Work(clock, 1.0))
    times(module, leaf(1), timeout=30.0)
    # A first run of each layer, and 30 seconds of runs, of which the last of each layer may go over.
    assert 30.0 <= clock.now <= 30.0 + 2 + 2


def test_layers_share_the_timeout_and_leave_the_rest_to_those_behind(clock: Clock) -> None:
    logs = [Log(), Log(), Log()]
    # A run looks at the clock three times, so each takes a second in all.
    layers = [Record(log, lambda layer, x: setattr(clock, "now", clock.now + 1 - 3 * TICK)) for log in logs]
    times(nn.Sequential(*layers), leaf(1), timeout=30.0)
    assert [len(log) for log in logs] == [11, 11, 11]
    logs[1].clear()
    logs[2].clear()
    times(nn.Sequential(Work(clock, 14.0), *layers[1:]), leaf(1), timeout=30.0)
    assert [len(log) for log in logs[1:]] == [1 + 8, 1 + 8]


def test_layers_before_the_first_trained_one_have_no_backward(clock: Clock) -> None:
    module = nn.Sequential(Work(clock, 1.0, backward=8.0), nn.Linear(1, 1), Work(clock, 1.0, backward=8.0))
    found = times(module, torch.ones(1), timeout=40)
    assert (found[0], found[2]) == (1.0 + TICK, 9.0 + TICK)


def test_every_run_is_given_the_same_input(clock: Clock) -> None:
    log = Log()
    module = nn.Sequential(Work(clock, 0.25), Record(log, lambda layer, x: x.add_(1).tolist()))
    times(module, torch.ones(2), timeout=4)
    assert len(log) > 2 and set(map(tuple, log)) == {(2.0, 2.0)}


def test_values_of_any_nesting_pass_from_layer_to_layer(run: Run) -> None:
    log = Log()
    module = nn.Sequential(
        Apply(lambda x: [x[0] * 2, {"name": "text", "x": (x[1]["y"], None)}]),
        Apply(lambda x: Pair(x[0], {"x": x[1]["x"][0], "name": x[1]["name"], 3: 7})),
        Record(log),
    )
    run(module, (leaf(2), {"y": torch.arange(3), "none": None}))
    assert isinstance(log[0], Pair)
    assert log[0].left.requires_grad and not log[0].right["x"].requires_grad
    assert log[0].right["name"] == "text" and log[0].right[3] == 7 and log[0].right["x"].tolist() == [0, 1, 2]


def test_packed_sequences_pass_between_layers(run: Run) -> None:
    pack = Apply(lambda x: nn.utils.rnn.pack_padded_sequence(x, [3, 1], batch_first=True))
    first = Apply(lambda outputs: outputs[0])
    assert len(run(nn.Sequential(pack, nn.LSTM(2, 2), first, nn.GRU(2, 2)), leaf(2, 3, 2))) == 4


def test_integers_in_and_no_gradient_out_are_fine(run: Run) -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), Apply(lambda x: x.argmax(-1)), nn.Identity())
    assert len(run(module, torch.tensor([[1, 2], [3, 4]]))) == 4


def test_skips_reach_the_layer_that_pops_them(run: Run) -> None:
    outer = Namespace()
    module = nn.Sequential(
        Stash().isolate(outer), Stash(), nn.Sequential(Pop(), Stash()), nn.ReLU(), Pop(), Pop().isolate(outer),
        nn.Sequential(Stash(), Pop()),  # Its own.
    )
    assert len(run(module, leaf(2))) == 7


def test_skips_carry_whether_they_require_grad_and_any_nesting(run: Run) -> None:
    def take(x: Tensor, scale: Tensor, skip: Any) -> Tensor:
        log.append((x.requires_grad, skip["a"][0].requires_grad, skip["a"][1], skip["b"].tolist()))
        return skip["a"][0]

    log = Log()
    give = stashing("skip")(lambda x, layer: ({"a": [x * 2, None], "b": torch.arange(2)}, x.detach()))
    run(nn.Sequential(give, nn.Identity(), popping("skip")(take)), leaf(2))
    assert set(map(repr, log)) == {repr((False, True, None, [0, 1]))}


def test_the_backward_of_a_stashed_value_is_timed(clock: Clock) -> None:
    give = stashing("skip")(lambda x, layer: (TurnBack.apply(x, clock, 4.0), x.detach()))
    module = nn.Sequential(give, Work(clock, 1.0), Pop())
    assert times(module, leaf(1), timeout=40)[0] == 4.0 + TICK


def test_a_module_may_stand_in_two_places(run: Run) -> None:
    layer = nn.Linear(3, 3)
    assert len(run(nn.Sequential(layer, nn.ReLU(), layer), leaf(2, 3))) == 3


def test_lazy_layers_are_initialised_on_the_copy_only(run: Run) -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    run(module, leaf(3, 7))
    assert module[0].has_uninitialized_params() and module[1].has_uninitialized_params()
    assert type(module[0]) is nn.LazyLinear and type(module[1]) is nn.LazyBatchNorm1d
    module(leaf(3, 5))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.thorough
def test_layers_with_tensors_made_by_autograd_are_copied(run: Run) -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.last: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.last.append(x * self.weight)
            return self.last[-1]

    norms = nn.utils.weight_norm(nn.Linear(3, 3)), nn.utils.spectral_norm(nn.Linear(3, 3))
    module = nn.Sequential(*norms, Cache())
    prune.l1_unstructured(module[1], "bias", 1)
    module(leaf(2, 3))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(module)
    run(module, leaf(2, 3))
    assert len(module[2].last) == 1


@pytest.mark.parametrize(("mode", "asked", "expected"), [
    pytest.param(torch.no_grad, lambda layer, x: x.requires_grad, True, id="with gradients"),
    pytest.param(torch.inference_mode, lambda layer, x: x.requires_grad, True, id="with gradients, in inference mode"),
    pytest.param(partial(torch.autocast, "cpu", torch.bfloat16), lambda layer, x: x.dtype, torch.bfloat16,
                 id="under the caller's autocast"),
    pytest.param(nullcontext, lambda layer, x: layer.training, True, id="in train mode"),
])
def test_layers_are_measured(run: Run, mode: Any, asked: Any, expected: object) -> None:
    log = Log()
    with mode():
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(Record(log, asked))).eval()
        before = torch.is_grad_enabled()
        run(module, torch.ones(2, 2))
        assert torch.is_grad_enabled() is before
    assert set(log) == {expected}
    assert not any(part.training for part in module.modules())


def state(module: nn.Sequential) -> list[Any]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    grads = [(name, None if tensor.grad is None else tensor.grad.tolist()) for name, tensor in tensors]
    values = [(id(tensor), tensor._version, tensor.tolist(), tensor.requires_grad) for _, tensor in tensors]
    parts = [(id(part), part.training, sorted(part.__dict__)) for part in module.modules()]
    hooks = [list(part._forward_hooks.items()) for part in module.modules()]
    return [values, grads, parts, hooks]


@pytest.mark.parametrize("failing", [False, True])
def test_the_model_and_its_gradients_stay_as_they_are(run: Run, failing: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3, bias=False))
    model[0].bias.requires_grad_(False)
    model[2].eval()
    model[1].register_forward_hook(lambda *_: None)
    model(leaf(4, 3)).sum().backward()
    if failing:
        model.append(Apply(lambda x: x @ torch.ones(7)))
    before = state(model)
    try:
        run(model, leaf(4, 3))
    except RuntimeError:
        assert failing
    assert state(model) == before


def test_the_sample_and_its_gradient_stay_as_they_are_though_layers_work_in_place(run: Run) -> None:
    sample = leaf(2, 3)
    made, plain = sample * 2, torch.ones(2, 3)
    sample.grad = torch.ones(2, 3)
    before = sample.tolist(), sample._version, made._version, plain._version
    first = Apply(lambda x: x[0].mul_(x[1]).add_(x[2].mul_(2)))
    run(nn.Sequential(first, nn.ReLU(inplace=True), nn.Linear(3, 3)), (sample, made, plain))
    assert (sample.tolist(), sample._version, made._version, plain._version) == before
    assert sample.grad.tolist() == torch.ones(2, 3).tolist()
    made.sum().backward()


@pytest.mark.parametrize("failing", [False, True])
def test_the_random_state_and_that_of_a_generator_of_the_layers_own_stay_as_they_are(run: Run, failing: bool) -> None:
    layer = Record(Log(), lambda layer, x: torch.rand(1, generator=layer.generator))
    layer.generator = torch.Generator()
    module = nn.Sequential(nn.Dropout(), layer, nn.LazyLinear(3), Apply(lambda x: 1 / 0 if failing else x))
    sample = leaf(2, 3)
    before = torch.get_rng_state(), layer.generator.get_state()
    try:
        run(module, sample)
    except ZeroDivisionError:
        assert failing
    assert layer.log and all(map(torch.equal, (torch.get_rng_state(), layer.generator.get_state()), before))


def test_copies_hold_no_gradient(run: Run) -> None:
    log = Log()
    layer = Record(log, lambda layer, x: (layer.weight.grad, layer.table.grad, layer.table.requires_grad))
    layer.weight = nn.Parameter(torch.ones(1))
    layer.table = leaf(2)
    layer.weight.grad, layer.table.grad = torch.ones(1), torch.ones(2)
    run(nn.Sequential(layer), torch.ones(1))
    assert set(log) == {(None, None, True)}


def test_each_copy_is_gone_before_the_next_is_made(run: Run) -> None:
    alive: Log = Log()
    most: Log = Log()

    class Counted(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
            most.append(sum(reference() is not None for reference in alive))
            other = Counted(2, 2)
            alive.append(weakref.ref(other))
            return other

    gc.collect()
    gc.disable()
    try:
        run(nn.Sequential(Counted(2, 2), Counted(2, 2), Counted(2, 2)), leaf(2, 2))
    finally:
        gc.enable()
    assert most == [0, 0, 0]


def test_hooks_of_the_user_neither_run_nor_are_copied(run: Run) -> None:
    calls: list[str] = []
    layer = nn.Linear(2, 2)
    inner = nn.Sequential(layer)
    layer.register_forward_pre_hook(lambda *_: calls.append("forward pre"))
    layer.register_forward_hook(lambda *_, **__: calls.append("forward"), with_kwargs=True)
    inner.register_full_backward_pre_hook(lambda *_: calls.append("backward pre"))
    inner.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.weight.register_hook(lambda grad: calls.append("tensor"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulate"))
    inner.register_forward_pre_hook(partial(lambda lock, *_: None, threading.Lock()))  # deepcopy refuses a lock.
    module = nn.Sequential(inner)
    module.register_forward_hook(lambda *_: calls.append("model"))
    run(module, leaf(2, 2))
    assert calls == []
    module(leaf(2, 2)).sum().backward()
    assert len(calls) == len(set(calls)) == 7


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_hooks_that_torch_computes_with_run_on_the_copy(norm: Any) -> None:
    plain, normed = nn.Linear(4, 4), norm(nn.Linear(4, 4))
    assert sizes(nn.Sequential(normed), leaf(2, 4))[0] > sizes(nn.Sequential(plain), leaf(2, 4))[0]


def test_a_hook_of_torchs_is_a_copy_as_well() -> None:
    class Count:
        calls = 0

        def __call__(self, *_: object) -> None:
            self.calls += 1
            log.append(self.calls)

    Count.__module__ = "torch.nn.utils.count"
    log = Log()
    count = Count()
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_pre_hook(count)
    sizes(module, leaf(2, 2))
    assert (count.calls, log) == (0, [1])


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_names_the_layer(run: Run, kind: type[BaseException]) -> None:
    error = kind("no")

    def fail(x: Tensor) -> Tensor:
        raise error

    module = nn.Sequential(nn.Identity())
    module.add_module("middle", Apply(fail))
    with pytest.raises(kind) as caught:
        run(module, torch.ones(1))
    assert caught.value is error
    assert caught.value.__notes__[-1] == (
        "Raised while profiling layer 1 ('middle', Apply), in a copy on cpu. The model is unchanged."
    )


def test_an_error_of_backward_names_the_layer() -> None:
    with pytest.raises(ValueError, match="^backward") as caught:
        times(nn.Sequential(Failing([ValueError("backward")])), leaf(1))
    assert "layer 0 ('0', Failing)" in caught.value.__notes__[-1]


def test_an_error_says_that_hooks_do_not_run() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda layer, inputs: inputs[0].view(1, 2))
    with pytest.raises(RuntimeError) as caught:
        times(nn.Sequential(layer), torch.ones(1, 1, 1))
    assert "whose hooks don't run" in caught.value.__notes__[-1]


@pytest.mark.parametrize(("layers", "error", "says", "where"), [
    pytest.param([nn.Identity(), Apply(threading.Lock())], TypeError, "lock", "layer 1 ('1', Apply)",
                 id="it can't be copied"),
    pytest.param([Apply(lambda x: {x})], TypeError, "the output holds tensors in a set", "layer 0 ('0', Apply)",
                 id="a container that hides tensors"),
    pytest.param([stashing("skip")(lambda x, layer: ({x}, x)), Pop()], TypeError,
                 "skip 'skip' holds tensors in a set", "layer 0 ", id="a skip that hides tensors"),
    pytest.param([Stash(), Pop(), Pop()], RuntimeError, "weren't stashed", "layer 2 ", id="a skip that is gone"),
])
def test_a_layer_that_can_not_be_measured_is_named(
    run: Run, layers: list[nn.Module], error: type[Exception], says: str, where: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        run(nn.Sequential(*layers), torch.ones(1))
    assert where in caught.value.__notes__[-1]


ROW = 4 * 8  # Bytes of a row of eight floats.


def dropping(x: Tensor) -> Tensor:
    """Drops the graph of what it has computed first."""
    x.exp()
    return x + 1


def plus() -> nn.Module:
    """Saves nothing."""
    return Apply(lambda x: x + 1)


def pop_sine() -> nn.Module:
    """A layer that adds the sine of what it pops, for which it saves that."""
    return popping("skip")(lambda x, scale, skip: skip.sin() + x)


def checkpointed() -> nn.Module:
    inner = nn.Sequential(nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid())
    return Apply(lambda x: checkpoint(inner, x, use_reentrant=False))


#: Layers, and of how many inputs' size is what each holds. A Linear, sin and cos save their input, tanh, exp and ReLU
#: their output.
HELD: dict[str, tuple[list[nn.Module], list[int]]] = {
    "what autograd saves": ([nn.Sigmoid()], [1]),
    "not what it doesn't save": ([plus()], [0]),
    "all that one layer saves": ([Apply(lambda x: (x + 1).sin().exp())], [2]),
    "by the first layer that saves it": ([nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)], [0, 1, 1, 0]),
    "once, if it is handed on": (
        [nn.Sigmoid(), nn.Identity(), nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.Linear(8, 8)], [1, 0, 0, 0, 0]),
    "not the caller's input": ([nn.Linear(8, 8), plus()], [0, 0]),
    "not a graph that was dropped": ([Apply(dropping)], [0]),
    "of a layer that checkpoints itself its input": ([plus(), checkpointed()], [0, 1]),
    "a skip by the layer that saves it": ([plus(), Stash(), plus(), pop_sine()], [0, 1, 0, 1]),
    "a skip, and beside it a value": ([plus(), Stash(), plus(), Apply(torch.sin), pop_sine()], [0, 1, 0, 1, 1]),
    "once, if it is a skip and a value": (
        [stashing("skip")(lambda x, layer: 2 * (x + 1,)), Apply(torch.cos), nn.Identity(), pop_sine()], [0, 1, 0, 0]),
}


@pytest.mark.parametrize("name", HELD)
def test_held_is(name: str) -> None:
    made, inputs = HELD[name]
    assert sizes(nn.Sequential(*made), leaf(5, 8)) == [count * 5 * ROW for count in inputs]


def test_nothing_is_held_without_a_gradient() -> None:
    assert sizes(nn.Sequential(nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid()), torch.ones(5, 8)) == [
        0, 5 * ROW, 5 * ROW
    ]


@pytest.mark.parametrize("between", range(6))
def test_memory_that_is_used_again_counts_again(between: int) -> None:
    module = nn.Sequential(nn.Sigmoid(), *(Apply(lambda x: x + 1) for _ in range(between + 1)), Apply(torch.sin))
    assert sizes(module, leaf(5, 1000)) == [4 * 5000, *([0] * (between + 1)), 4 * 5000]


def test_a_storage_counts_once_in_all_its_views_and_whole() -> None:
    def views(x: Tensor) -> Tensor:
        return x[:1].exp() + x.view(-1)[:8].sin() + x[2:4].cos()

    assert sizes(nn.Sequential(plus(), Apply(views)), leaf(5, 8)) == [0, 5 * ROW + ROW]


def test_a_layer_that_differentiates_in_its_forward_is_measured() -> None:
    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]

    assert sizes(nn.Sequential(Apply(lambda x: x + 1), Apply(slope)), leaf(5, 8))[1] >= 5 * ROW


def test_parameters_count_times_their_scale() -> None:
    module = nn.Sequential(nn.Linear(8, 4), Apply(lambda x: x + 1), nn.Linear(4, 2, bias=False))
    assert sizes(module, leaf(1, 8), param_scale=0) == [0, 0, 4 * 4]
    assert sizes(module, leaf(1, 8), param_scale=3) == [3 * 4 * (32 + 4), 0, 4 * 4 + 3 * 4 * 8]


def test_frozen_parameters_and_buffers_count_at_most_once() -> None:
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    layer.register_buffer("table", torch.ones(100))
    module = nn.Sequential(layer)
    found = [sizes(module, torch.ones(1, 8), param_scale=scale) for scale in (0, 0.5, 2, 4)]
    assert found == [[0], [328], [656], [656]]


def test_shared_state_counts_for_the_first_layer_that_has_it() -> None:
    layer, tied = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    tied.weight = layer.weight
    other = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    other[1].weight = other[0].weight
    found = sizes(nn.Sequential(layer, Apply(lambda x: x + 1), layer, tied, other), leaf(1, 8), param_scale=1)
    assert found == [256, 0, ROW, ROW, 256 + 2 * ROW]


def test_lazy_parameters_count_as_initialised() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False))
    found = sizes(module, leaf(3, 8), param_scale=1)
    assert found[0] == 4 * (8 * 4 + 4)
    # The output of the Linear, mean and deviation of the batch; running mean and variance, an int64 counter.
    assert found[1] == 3 * 16 + 2 * 16 + 2 * 16 + 8


def test_sparse_tensors_count_by_their_parts() -> None:
    class Graph(nn.Module):
        def __init__(self, edges: Tensor) -> None:
            super().__init__()
            self.register_buffer("edges", edges)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.edges, x)

    module = nn.Sequential(Apply(lambda x: x + 1), Graph(torch.eye(8).to_sparse_coo()))
    assert sizes(module, leaf(8, 2), param_scale=0) == [0, 0]
    assert sizes(module, leaf(8, 2), param_scale=1) == [0, 8 * 2 * 8 + 8 * 4]


def test_saved_casts_of_weights_count() -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False))
    with torch.autocast("cpu", torch.bfloat16):
        assert sizes(module, leaf(1, 8)) == [2 * 64 + 2 * 8]


@pytest.mark.cuda
def test_a_sample_elsewhere_is_measured_on_the_device_and_leaves_nothing_there() -> None:
    device = torch.device("cuda", 0)
    log = Log()
    module = nn.Sequential(nn.Linear(64, 64), Record(log, lambda layer, x: x.device), nn.Dropout())
    sample = torch.randn(8, 64)
    states = [torch.cuda.get_rng_state(device)]
    torch.ones(1, device=device)
    before = softcuda.unbound() if softcuda is not None else 0
    layers.times(whole(module, sample), 0.01, device)
    assert softcuda is None or softcuda.unbound() == before  # On a GPU that is a warning.
    layers.sizes(whole(module, sample), 1, 2.0, device)
    gc.collect()
    held = torch.cuda.memory_allocated(device)
    with torch.autocast("cuda", torch.float16):
        layers.times(whole(module, sample), 0.01, device)
        layers.sizes(whole(module, sample), 1, 2.0, device)
        assert torch.cuda.memory_allocated(device) == held
    assert set(log) == {device}
    assert torch.equal(torch.cuda.get_rng_state(device), states[0])
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


def test_random_numbers_are_kept_as_older_torch_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.13 None is no type of device."""
    fork, given = torch.random.fork_rng, []

    def older(devices: Any, device_type: str = "cuda") -> Any:
        given.append(torch.device(device_type))
        return fork(devices=devices, device_type=device_type)

    monkeypatch.setattr(torch.random, "fork_rng", older)
    with copies.measuring(torch.device("cpu")):
        pass
    assert len(given) == 1
