"""What layers and blocks cost is measured on a copy of the module, and nothing else notices."""
from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from splitpipe.balance import rig
from splitpipe.balance.rig import Layer, Rig, measure
from splitpipe.balance.survey import survey
from splitpipe.core.stream import Place
from tests.doors.test_bad_input import of_module
from tests.helpers.faults import throws
from tests.helpers.modules import Net, Pop, Stash, batch, module_of, popping, stashing
from tests.promise.layers import Apply

pytestmark = pytest.mark.draws

CPU = Place(torch.device("cpu"))
FLOAT = 4
ROW = 8 * FLOAT  # Bytes of a row of eight floats.


def layers(module: nn.Module, sample: Any, **options: Any) -> list[Layer]:
    return measure(survey(module, sample), [CPU], **options)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))


def test_times_are_those_above_what_an_empty_unit_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([[(1.0, 8.0, 0.5)] * 3, [(9.0, 7.0, 5.0)] * 3])
    monkeypatch.setattr(rig, "times_of", lambda _: next(found))
    assert {(layer.forward, layer.backward_input, layer.backward_weight) for layer in layers(mlp(), leaf(8, 64))} == {
        (8.0, 0.0, 4.5)
    }


def test_bytes_are_those_of_a_microbatch() -> None:
    one, two, three = layers(mlp(), torch.randn(8, 64), chunks=2)
    assert (one.input, two.input, three.input) == (4 * 64 * FLOAT, 4 * 32 * FLOAT, 4 * 32 * FLOAT)
    assert (one.saved, two.saved, three.saved) == (4 * 64 * FLOAT, 4 * 32 * FLOAT, 4 * 32 * FLOAT)
    assert (one.kept, two.kept, three.kept) == (4 * (64 + 32) * FLOAT, 0, 4 * (32 + 16) * FLOAT)
    assert (one.shared, two.shared, three.shared) == (4 * 64 * FLOAT, 0, 4 * 32 * FLOAT)


def test_blocks_have_the_costs_of_stages() -> None:
    one, *others = layers(Net(), batch(), seconds=0.1)
    scale, block = 4 * 5 * FLOAT, 2 * 8 * 16 * FLOAT + 16 * FLOAT + 8 * FLOAT
    # The tied head is the embedding's. All blocks save the scale.
    assert (one.parameters, one.state) == (12 * 8 * FLOAT, FLOAT)
    assert {(layer.parameters, layer.state, layer.input) for layer in others} == {(block, 0, 4 * 5 * ROW)}
    assert all(layer.saved and layer.kept and layer.time for layer in others)
    assert [layer.shared >= scale for layer in others] == [False, True, True]


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


#: Layers, and of how many inputs' size is what each saves first. A Linear, sin and cos save their input, tanh, exp and
#: ReLU their output.
SAVED: dict[str, tuple[list[nn.Module], list[int]]] = {
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
    "once, if it is a skip and a value": (
        [stashing("skip")(lambda x, layer: 2 * (x + 1,)), Apply(torch.cos), nn.Identity(), pop_sine()], [0, 1, 0, 0]),
    "a storage whole, in all its views": ([plus(), Apply(lambda x: x[:1].sin() + x[2:4].cos())], [0, 1]),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_counts(name: str) -> None:
    own, inputs = SAVED[name]
    found = layers(nn.Sequential(*own), leaf(5, 8))
    assert [layer.saved - layer.repeated for layer in found] == [count * 5 * ROW for count in inputs]


def test_shared_state_counts_for_the_first_layer_that_has_it() -> None:
    layer, tied, frozen = (nn.Linear(8, 8, bias=False) for _ in range(3))
    tied.weight = layer.weight
    frozen.requires_grad_(False)
    found = layers(nn.Sequential(layer, nn.ReLU(), layer, tied, nn.BatchNorm1d(8, affine=False), frozen), leaf(2, 8))
    assert [layer.parameters for layer in found] == [8 * ROW, 0, 0, 0, 0, 0]
    assert [layer.state for layer in found] == [0, 0, 0, 0, 2 * ROW + 8, 8 * ROW]


def test_skips_reach_the_layer_that_pops_them_and_count_as_its_input() -> None:
    found = layers(nn.Sequential(Stash(), nn.Linear(4, 4), Pop()), leaf(8, 4), chunks=2)
    assert found[2].input == 2 * 4 * 4 * FLOAT


def test_the_loss_counts_for_the_last_layer_and_gets_its_target() -> None:
    seen = list[Any]()

    class Loss(nn.MSELoss):
        def forward(self, output: Tensor, target: Any) -> Tensor:
            seen.append(target)
            return super().forward(output, target)

    plain = layers(mlp(), torch.randn(8, 64), chunks=2)
    found = layers(mlp(), torch.randn(8, 64), chunks=2, loss_fn=Loss(), target=torch.ones(8, 16))
    assert [two.saved - one.saved for one, two in zip(plain, found)] == [0, 0, 2 * 4 * 16 * FLOAT]
    assert {target.shape for target in seen} == {(4, 16)}


def record(log: list[Any], function: Any) -> nn.Module:
    """A layer that logs what a function of its copy, which is measured, and of its input returns."""
    return module_of(lambda self, x: (log.append(function(self, x)), x)[1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "asked", "expected"), [
    pytest.param(torch.no_grad, lambda layer, x: x.requires_grad, True, id="with gradients"),
    pytest.param(torch.inference_mode, lambda layer, x: x.requires_grad, True, id="with gradients, in inference mode"),
    pytest.param(partial(torch.autocast, "cpu", torch.bfloat16), lambda layer, x: x.dtype, torch.bfloat16,
                 id="under the caller's autocast"),
    pytest.param(nullcontext, lambda layer, x: layer.training, True, id="in train mode"),
])
def test_layers_are_measured(mode: Any, asked: Any, expected: object) -> None:
    log = list[Any]()
    with mode():
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(record(log, asked))).eval()
        before = torch.is_grad_enabled()
        layers(module, torch.ones(2, 2))
        assert torch.is_grad_enabled() is before
    assert set(log) == {expected} and not any(part.training for part in module.modules())


@pytest.mark.parametrize("failing", [False, True])
def test_the_module_the_sample_and_the_random_state_stay_as_they_are(failing: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(3, 3))
    model.eval()
    model[0].bias.requires_grad_(False)
    model(leaf(4, 3)).sum().backward()
    if failing:
        model.append(nn.Linear(7, 7))
    x = leaf(4, 3)
    before, sample, state = of_module(model), x.detach().clone(), torch.get_rng_state()
    try:
        layers(model, x)
    except RuntimeError:
        assert failing
    assert of_module(model) == before and x.equal(sample) and x.grad is None and x._version == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_of_the_user_neither_run_nor_are_copied() -> None:
    calls: list[str] = []
    layer = nn.Linear(2, 2)
    inner = nn.Sequential(layer)
    layer.register_forward_pre_hook(lambda *_: calls.append("forward pre"))
    layer.register_forward_hook(lambda *_, **__: calls.append("forward"), with_kwargs=True)
    inner.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.weight.register_hook(lambda grad: calls.append("tensor"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulate"))
    inner.register_forward_pre_hook(partial(lambda log, *_: None, iter([])))  # deepcopy refuses some objects.
    layers(nn.Sequential(inner), leaf(2, 2))
    assert calls == []


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_hooks_that_torch_computes_with_run_on_the_copy(norm: Any) -> None:
    [plain], [normed] = (layers(nn.Sequential(each(nn.Linear(4, 4))), leaf(2, 4)) for each in (lambda x: x, norm))
    assert normed.saved > plain.saved


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_names_the_layer_and_says_that_a_copy_was_measured(kind: type[BaseException]) -> None:
    with pytest.raises(kind) as caught:
        layers(nn.Sequential(nn.Identity(), Apply(throws(kind("no")))), torch.ones(1, 1))
    *others, last = caught.value.__notes__
    assert last == (
        "Raised while profiling Sequential, 1 chunk, cpu, in a copy. The model is unchanged. Hooks don't run."
    )
    assert any("layer '1' (Apply)" in note for note in others)


def test_a_module_that_is_too_large_for_a_device_is_measured_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    init: Callable[..., None] = Rig.__init__

    def limited(self: Rig, subject: Any, places: Any, *given: Any) -> None:
        counts.append(len(places))
        if type(subject.module) is Net and len(places) == 1:
            raise torch.OutOfMemoryError("full")
        init(self, subject, [CPU] * len(places), *given)

    monkeypatch.setattr(Rig, "__init__", limited)
    subject, meta = survey(Net(), batch()), Place(torch.device("meta"))
    assert len(measure(subject, [CPU, meta])) == 4 and counts[:2] == [1, 2]
    with pytest.raises(torch.OutOfMemoryError):
        measure(subject, [CPU, CPU])


@pytest.mark.cuda
def test_a_sample_elsewhere_is_measured_on_the_device_and_leaves_nothing_there() -> None:
    device = torch.device("cuda", 0)
    log = list[Any]()
    module = nn.Sequential(nn.Linear(64, 64), record(log, lambda layer, x: x.device), nn.Dropout())
    state = torch.cuda.get_rng_state(device)
    measure(survey(module, torch.randn(8, 64)), [Place(device)])
    gc.collect()
    held = torch.cuda.memory_allocated(device)
    with torch.autocast("cuda", torch.float16):
        measure(survey(module, torch.randn(8, 64)), [Place(device)])
    assert torch.cuda.memory_allocated(device) == held
    assert set(log) == {device} and torch.equal(torch.cuda.get_rng_state(device), state)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
