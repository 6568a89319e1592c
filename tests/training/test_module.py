"""A SplitPipe with a schedule as an nn.Module: arguments, state, copies, threads, and what torch does to modules."""
from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, schedule
from tests.helpers.deferring import Unruled, deferred, left
from tests.helpers.deferring import double as double
from tests.helpers.scheduled import mean, mlp, stages_of, twins
from tests.helpers.twin import assert_same, assert_same_tensors

CPU = ["cpu"] * 2


def pair(name: str = "zb-v", **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    return twins(mlp(4), name, 2, loss_fn=F.mse_loss, chunks=3, **options)


def batch(rows: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randn(rows, 4)


def wrap(balance: Any = (1, 1, 1, 1), **options: Any) -> SplitPipe:
    return SplitPipe(mlp(4), balance, **{"devices": CPU, "chunks": 4, "loss_fn": F.mse_loss, **options})


# Arguments


def test_an_unknown_schedule_is_told_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="'zb-h3'") as info:
        wrap(schedule="zb-h3")
    assert "zb-h1" in str(info.value)


def test_a_schedule_needs_a_loss_function() -> None:
    for plan in ("zb-v", schedule.build("zb-v", 2, 4)):
        with pytest.raises(ValueError, match=r"'zb-v' goes backward inside the forward.*expected loss_fn"):
            wrap(schedule=plan, loss_fn=None)


@pytest.mark.parametrize("wrong", [3, None, ["1f1b"], schedule.Op("F", 0, 0)])
def test_a_schedule_is_a_name_or_a_schedule(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected a name, one of"):
        wrap(schedule=wrong)


def test_a_loss_function_and_a_scaler_are_what_they_are_called() -> None:
    with pytest.raises(TypeError, match="loss_fn is 'mse': expected a function"):
        wrap(schedule="zb-v", loss_fn="mse")
    with pytest.raises(TypeError, match=r"grad_scaler is 3: expected the loop's torch\.amp\.GradScaler"):
        wrap(schedule="zb-v", grad_scaler=3)
    with pytest.raises(ValueError, match="grad_scaler is given without loss_fn"):
        SplitPipe(mlp(4), [2, 2], devices=CPU, grad_scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("name", "balance", "text"),
    [
        ("zb-v", [2, 2], r"2 stages for 2 devices: schedule 'zb-v' expects 2 stages for each device.*balance of 4"),
        ("1f1b", [1, 1, 1, 1], "4 stages for 2 devices: schedule '1f1b' expects one stage for each device"),
        ("interleaved-1f1b", [2, 1, 1], "3 stages for 2 devices.*a multiple of the devices"),
    ],
)
def test_a_balance_that_does_not_go_with_the_devices_is_told_what_does(name: str, balance: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wrap(balance, schedule=name)


def test_a_schedule_of_other_sizes_is_told_all_that_does_not_fit() -> None:
    with pytest.raises(ValueError) as info:
        wrap([2, 2], schedule=schedule.build("1f1b", 3, 8))
    for part in ("3 stages: expected 2", "3 rows: expected 2", "8 microbatches: expected as many chunks, not 4"):
        assert part in str(info.value)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    rows = [[schedule.Op("F", 0, 0), schedule.Op("BW", 0, 0)], [schedule.Op("BW", 1, 0), schedule.Op("F", 1, 0)]]
    with pytest.raises(ValueError, match="1BW0"):
        wrap([2, 2], schedule=schedule.Schedule(rows, [0, 1]), chunks=1)


def test_a_refusal_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    layers = list(module)
    with pytest.raises(ValueError):
        SplitPipe(module, [1, 1], devices=CPU, schedule="zb-v", loss_fn=F.mse_loss, deferred_batch_norm=True)
    assert list(module) == layers


def test_devices_default_to_the_cpu_for_every_row(no_accelerator: None) -> None:
    model = wrap(schedule="zb-v", devices=None)
    assert model.devices == [torch.device("cpu")] * 4 and model.schedule.devices == 2


@pytest.mark.parametrize("name", schedule.names())
def test_options_can_be_read(name: str) -> None:
    model = twins(mlp(4), name, 4 // stages_of(name), chunks=4)[1]
    assert model.schedule == schedule.build(name, 4 // stages_of(name), 4)
    assert model.checkpoint == ("except_last" if name == "gpipe" else "never")
    assert f"schedule={name!r}" in repr(model)


# State


def test_state_dict_keys_are_the_unwrapped_modules_and_states_move_both_ways() -> None:
    plain, model = pair()
    x, y = batch()
    model(x, target=y).backward()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    other = mlp(4)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x, target=y), F.mse_loss(other(x), y))
    plain.load_state_dict(model.state_dict())


def test_copies_train_on_their_own() -> None:
    plain, model = pair()
    x, y = batch()
    model(x, target=y).backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    F.mse_loss(plain(x), y).backward()
    for other in copies:
        assert other[0].weight is not model[0].weight and other.schedule == model.schedule
        other.zero_grad()
        other(x, target=y).backward()
        assert_same_tensors(other, plain)
    assert_same_tensors(model, plain)


def test_a_parameter_of_another_dtype_after_a_step() -> None:
    plain, model = pair()
    x, y = batch()
    model(x, target=y)
    for module in (plain, model):
        module.to(torch.float32)
    model(x.float(), target=y.float()).backward()
    F.mse_loss(plain(x.float()), y.float()).backward()
    assert_same_tensors(model, plain)


def test_layers_parameters_and_their_data_may_be_replaced_between_steps() -> None:
    plain, model = pair()
    x, y = batch()

    def replace_layer(module: Any) -> None:
        torch.manual_seed(1)
        setattr(module, "2", nn.Linear(4, 4))

    def replace_parameter(module: Any) -> None:
        module[0].weight = nn.Parameter(torch.ones(4, 4) / 3)

    def replace_data(module: Any) -> None:
        module[0].weight.data = torch.ones(4, 4) / 2

    def freeze(module: Any) -> None:
        module[0].weight.requires_grad_(False)

    def thaw(module: Any) -> None:
        module[0].weight.requires_grad_(True)

    for change in (replace_layer, replace_parameter, replace_data, freeze, thaw):
        for module in (plain, model):
            change(module)
            module.zero_grad()
        model(x, target=y).backward()
        F.mse_loss(plain(x), y).backward()
        assert_same_tensors(model, plain)


def test_deferral_report_after_a_scheduled_step() -> None:
    _, model = twins(nn.Sequential(nn.Linear(4, 4), Unruled(4), nn.Linear(4, 4), nn.Tanh()), "zb-v", 2,
                     loss_fn=F.mse_loss)
    x, y = batch()
    model(x, target=y)
    assert set(deferred(model)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert left(model) == {"1.weight": "sin has no rule"}


# What torch does to a model


def test_functional_call() -> None:
    plain, model = pair()
    x, y = batch()
    found = []
    for module, run in ((plain, lambda p: F.mse_loss(torch.func.functional_call(plain, p, (x,)), y)),
                        (model, lambda p: torch.func.functional_call(model, p, (x,), {"target": y}))):
        leaves = {name: (value.detach() * 2).requires_grad_() for name, value in module.named_parameters()}
        computed = {name: leaf * 0.5 for name, leaf in leaves.items()}
        found.append(list(torch.autograd.grad(run(computed), list(leaves.values()))))
        assert all(parameter.grad is None for parameter in module.parameters())
    assert_same(found[1], found[0], "gradients")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_are_refused() -> None:
    _, model = pair()
    parameters, (x, y) = dict(model.named_parameters()), batch()
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,), {"target": y}))(parameters)
    model(x, target=y).backward()


def test_anomaly_mode() -> None:
    plain, model = pair()
    x, y = batch()
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        model(x, target=y).backward()
    F.mse_loss(plain(x), y).backward()
    assert_same_tensors(model, plain)


def test_saved_tensor_hooks_of_the_caller_see_what_is_saved() -> None:
    plain, model = pair()
    x, y = batch()
    packed: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        loss = model(x, target=y)
    assert torch.Size([3, 4]) in packed
    loss.backward()
    F.mse_loss(plain(x), y).backward()
    assert_same_tensors(model, plain)


def test_torch_checkpoint_around_a_model_runs_the_schedule_again() -> None:
    plain, model = pair()
    x, y = batch()
    torch.utils.checkpoint.checkpoint(lambda v: model(v, target=y) * 2, x.requires_grad_(), use_reentrant=True
                                      ).backward()
    found, x.grad = x.grad, None
    (F.mse_loss(plain(x), y) * 2).backward()
    torch.testing.assert_close(found, x.grad)
    assert_same_tensors(model, plain)


def test_two_threads_train_one_model_and_another_asks_for_outputs() -> None:
    plain, model = pair()
    batches = [batch(rows) for rows in (7, 3)]
    barrier = threading.Barrier(3, timeout=60)
    outputs: list[Tensor] = []

    def train(x: Tensor, y: Tensor) -> None:
        for _ in range(4):
            barrier.wait()
            model(x, target=y).backward()

    def ask(x: Tensor) -> None:
        for _ in range(4):
            barrier.wait()
            outputs.append(model(x).detach())

    threads = [threading.Thread(target=train, args=each) for each in batches]
    threads.append(threading.Thread(target=ask, args=batches[0][:1]))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for x, y in batches * 4:
        F.mse_loss(plain(x), y).backward()
    assert_same_tensors(model, plain)
    assert_same(outputs, [plain(batches[0][0]).detach()] * 4, "outputs")


# Compiled layers


@pytest.fixture
def _nothing_compiled() -> Iterator[None]:
    dynamo = pytest.importorskip("torch._dynamo", reason="needs torch.compile, which torch does not have here")
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"backward": "autograd"}],
                         ids=["split", "checkpointed", "autograd"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.compiles
@pytest.mark.thorough
def test_compiled_layers_train_and_are_compiled_once(backend: str, options: dict[str, Any]) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.down(self.up(x).tanh())
            return y

    counter: Any = CompileCounterWithBackend(backend)
    plain = nn.Sequential(nn.Linear(4, 4), Block(), nn.Tanh(), nn.Linear(4, 4))
    module = copy.deepcopy(plain)
    module[1] = torch.compile(module[1], backend=counter)
    model = SplitPipe(module, [1, 1, 1, 1], devices=CPU, chunks=2, schedule="zb-v", loss_fn=F.mse_loss, **options)
    compiled: list[int] = []
    for _ in range(4):
        x, y = batch(8)
        model(x, target=y).backward()
        F.mse_loss(plain(x), y).backward()
        compiled.append(counter.frame_count)
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(p.grad, q.grad)
                p -= 0.1 * p.grad
                q -= 0.1 * q.grad
    assert compiled[-1] == compiled[1], "later passes take what was compiled"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.thorough
def test_a_compiled_model_runs_its_schedule() -> None:
    plain, model = pair()
    x, y = batch()
    compiled = torch.compile(model, backend="eager")
    compiled(x, target=y).backward()
    F.mse_loss(plain(x), y).backward()
    assert_same_tensors(model, plain)
    torch.testing.assert_close(compiled(x), plain(x))


def test_the_mean_of_outputs_is_no_part_of_the_models_loss() -> None:
    plain, model = pair()
    x, y = batch()
    for module, loss in ((plain, F.mse_loss(plain(x), y)), (model, model(x, target=y))):
        (loss + mean(module(x), 1.0)).backward()
    assert_same_tensors(model, plain)
