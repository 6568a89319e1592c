"""SplitPipe as an nn.Module: arguments, state, devices, hooks, exceptions, threads, copies."""
from __future__ import annotations

import contextvars
import copy
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from splitpipe import SplitPipe, attach
from tests.helpers.scheduled import flat
from tests.helpers.twin import assert_same, assert_same_tensors, fresh, twins
from tests.promise.layers import Apply, First

CPU = ["cpu"] * 4


def mlp(width: int = 6, layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) if k % 2 == 0 else nn.Tanh() for k in range(layers)])


class Raises(nn.Module):
    """Raises an exception in forward, for one of its microbatches."""

    def __init__(self, error: BaseException, at: int = 0) -> None:
        super().__init__()
        self.error, self.at, self.calls = error, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at + 1:
            raise self.error
        return x * 1


# Arguments


@pytest.mark.parametrize(("wrong", "found"), [
    ({"chunks": 0}, "chunks is 0"), ({"checkpoint": "sometimes"}, "checkpoint is 'sometimes'"),
    ({"backward": "no"}, "backward is 'no'"), ({"schedule": "1f1b"}, "schedule '1f1b' runs backward"),
])
def test_a_wrong_option_is_named(wrong: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        SplitPipe(mlp(), [2, 2], devices=CPU, **wrong)


@pytest.mark.parametrize("wrap", [SplitPipe, attach])
def test_an_argument_that_does_not_exist_is_named(wrap: Any) -> None:
    with pytest.raises(TypeError, match=rf"{wrap.__name__}\(\) got an unexpected keyword argument 'chunk'"):
        wrap(mlp(), devices=CPU, chunk=2)


def test_a_refusal_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    layers, state = list(module), copy.deepcopy(module.state_dict())
    for options in ({"chunks": 0}, {"balance": [1]}, {"devices": ["cpu"], "balance": [1, 1]}):
        with pytest.raises(ValueError):
            SplitPipe(module, **{"balance": [2], "devices": CPU, "deferred_batch_norm": True, **options})  # type: ignore[arg-type]
    assert list(module) == layers
    assert_same(module.state_dict(), state, "state")


def test_options_can_be_read() -> None:
    model = SplitPipe(mlp(), iter([3, 1]), devices=iter(CPU), chunks=3, checkpoint="never")
    assert (model.balance, model.devices, model.chunks, model.checkpoint) == (
        [3, 1], [torch.device("cpu")] * 2, 3, "never")
    assert SplitPipe(mlp(), [4], devices=CPU).checkpoint == "except_last"
    assert "balance=[3, 1]" in repr(model) and "(2): Linear" in repr(model)


def test_without_a_schedule_the_training_loop_runs_backward() -> None:
    model = SplitPipe(mlp(), [2, 2], devices=CPU, schedule=None)
    assert "schedule" not in repr(model) and model.schedule.name == "gpipe"
    model(torch.rand(4, 6)).sum().backward()
    with pytest.raises(ValueError, match="loss_fn is given without a schedule"):
        SplitPipe(mlp(), [2, 2], devices=CPU, loss_fn=nn.functional.mse_loss)


# Input


def test_a_second_input_in_the_targets_place_says_how_to_pass_two() -> None:
    model = SplitPipe(mlp(), [2, 2], devices=CPU, chunks=2)
    with pytest.raises(ValueError, match=r"expected model\(\(x, mask\)\).*loss_fn=criterion"):
        model(torch.rand(4, 6), torch.rand(4, 6))


def test_packed_sequences_pass_between_stages_but_are_no_batch() -> None:
    pack = Apply(lambda xs: nn.utils.rnn.pack_padded_sequence(*xs, batch_first=True, enforce_sorted=False))
    recur = First(nn.GRU(6, 6, batch_first=True))
    unpack = Apply(lambda packed: nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=5)[0])
    plain, model = twins(nn.Sequential(pack, recur, unpack), [1, 1, 1], chunks=2, checkpoint="always")
    x = torch.rand(4, 5, 6), torch.tensor([5, 2, 3, 1])
    for m in (plain, model):
        y = m(x)
        y.square().sum().backward()
    assert_same(y.detach(), plain(x).detach(), "output")
    assert_same_tensors(model, plain)
    packed = nn.utils.rnn.pack_sequence([torch.rand(5, 6)])
    with pytest.raises(TypeError, match="the input holds tensors in a PackedSequence"):
        SplitPipe(nn.Sequential(recur, unpack), [1, 1], devices=CPU)(packed)
    with pytest.raises(ValueError, match="a PackedSequence and a PackedSequence as the output"):
        SplitPipe(nn.Sequential(pack, recur), [1, 1], devices=CPU)(x)


def test_an_empty_batch() -> None:
    plain, model = twins(mlp(), chunks=2)
    assert_same(model(torch.rand(0, 6)), plain(torch.rand(0, 6)), "output")


# The module


def test_state_dict_keys_are_the_unwrapped_modules_and_states_move_both_ways() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(OrderedDict(
            chunks=nn.Linear(3, 3), balance=nn.BatchNorm1d(3), devices=nn.Linear(3, 3), checkpoint=nn.Tanh()))

    plain, model = build(), SplitPipe(build(), [2, 2], devices=CPU, chunks=2)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    model.load_state_dict(plain.state_dict())
    assert_same(model.state_dict(), plain.state_dict(), "state")
    other = build()
    other.load_state_dict(model.state_dict())
    assert model.chunks == 2


def test_length_indexing_slicing_and_iteration() -> None:
    module = mlp()
    layers = list(module)
    model = SplitPipe(module, [1, 3], devices=CPU)
    assert len(model) == 4 and list(model) == layers
    assert [model[k] for k in range(-4, 4)] == [layers[k] for k in range(-4, 4)]
    for part in (slice(1, 3), slice(None, None, 2), slice(-2, None)):
        assert type(model[part]) is nn.Sequential
        assert list(model[part]) == layers[part]
    assert list(model[1:3].state_dict()) == list(nn.Sequential(*layers)[1:3].state_dict())
    for index in (4, -5):
        with pytest.raises(IndexError, match="out of range"):
            model[index]
    with pytest.raises(TypeError):
        model["0"]  # type: ignore[call-overload]


def test_direct_moves_between_devices_are_refused_and_a_parents_is_survived() -> None:
    model = SplitPipe(mlp(), [2, 2], devices=CPU)
    for move in (lambda: model.to("meta"), lambda: model.to(torch.device("meta")), lambda: model.to(device="meta"),
                 lambda: model.to(torch.rand(1, device="meta")), lambda: model.to("meta", torch.float64), model.cuda):
        with pytest.raises(TypeError, match="stay on cpu, cpu"):
            move()
    for stay in (lambda: model.to("cpu"), lambda: model.to(torch.rand(1)), model.cpu):
        assert stay() is model, "all stages are there"
    assert model.to(torch.float64)[0].weight.dtype == torch.float64
    assert model.half()[0].weight.dtype == torch.float16
    parent = nn.ModuleDict({"model": model}).to("meta", torch.float32)
    assert parent["model"] is model
    assert model[0].weight.dtype == torch.float32 and model[0].weight.device.type == "cpu"


def test_hooks_and_attributes_of_the_sequential_stay() -> None:
    module = mlp()
    seen: list[torch.Size] = []
    handle = module.register_forward_hook(lambda m, args, output: seen.append(output.shape))
    module.register_buffer("table", torch.rand(3))
    module.eval()
    keys = list(module.state_dict())
    model = SplitPipe(module, [2, 2], devices=CPU, chunks=2)
    model(torch.rand(4, 6))
    assert seen == [torch.Size([4, 6])]
    assert not model.training and list(model.state_dict()) == keys
    handle.remove()
    model(torch.rand(4, 6))
    assert len(seen) == 1


# The caller's state


def test_autocast_reaches_workers_and_recomputation_and_ends_there() -> None:
    dtypes: list[torch.dtype] = []

    def note(x: Tensor) -> Tensor:
        dtypes.append(x.dtype)
        return x

    for checkpoint in ("always", "never"):
        plain, model = twins(nn.Sequential(nn.Linear(6, 6), Apply(note), nn.Linear(6, 6), Apply(note)), [2, 2],
                             chunks=2, checkpoint=checkpoint)
        x = torch.rand(4, 6)
        for m in (plain, model):
            dtypes.clear()
            with torch.autocast("cpu", torch.bfloat16):
                loss = m(x).float().square().sum()
            loss.backward()
            assert set(dtypes) == {torch.bfloat16}
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05)
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            dtypes.clear()
            loss = model(x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        assert set(dtypes) == {torch.float32}


def test_grad_mode_and_inference_mode_are_the_callers() -> None:
    seen: list[tuple[bool, bool]] = []

    def note(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x * 1

    model = SplitPipe(nn.Sequential(nn.Linear(6, 6), Apply(note)), [1, 1], devices=CPU, chunks=2)
    x = torch.rand(4, 6)
    with torch.inference_mode():
        assert model(x).is_inference()
    with torch.no_grad():
        assert not model(x).requires_grad
    assert model(x).requires_grad
    assert seen == [(False, True)] * 2 + [(False, False)] * 2 + [(True, False)] * 2


def test_modes_hooks_context_variables_and_default_device_are_the_callers() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen: list[Any] = []

    def note(x: Tensor) -> Tensor:
        seen.append((variable.get(), torch.empty(0).device.type))
        return x.sin()

    class Functions(TorchFunctionMode):
        names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.sin:
                self.names.append("sin")
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.sin.default:
                self.names.append("sin")
            return func(*args, **(kwargs or {}))

    packed: list[int] = []
    layers = nn.Sequential(Apply(note), Apply(note))
    model = SplitPipe(layers, [1, 1], devices=CPU, chunks=2, checkpoint="never")
    x = torch.rand(4, 6, requires_grad=True)
    token = variable.set("set")
    with Functions() as functions, Ops() as ops, torch.device("meta"):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
            y = model(x)
    variable.reset(token)
    assert seen == [("set", "meta")] * 4
    assert functions.names == ops.names == ["sin"] * 4
    assert len(packed) == 4
    y.sum().backward()


def test_a_context_variable_set_by_a_stage_reaches_the_next_ones_of_its_microbatch() -> None:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable")

    def sets(x: Tensor) -> Tensor:
        variable.set(float(x.detach().sum()))
        return x * 2

    plain = nn.Sequential(Apply(sets), Apply(lambda x: x + variable.get()))
    model = SplitPipe(copy.deepcopy(plain), [1, 1], devices=CPU, chunks=3)
    x = torch.rand(3, 2)
    assert_same(model(x), torch.cat([plain(row) for row in x.chunk(3)]), "output")


# Exceptions


def test_an_exception_that_would_end_a_generator_arrives_as_it_is_with_a_note_and_the_model_works_on() -> None:
    layer = Raises(error := StopIteration(1), at=1)
    model = SplitPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), layer), [1, 2], devices=CPU, chunks=3)
    with pytest.raises(StopIteration) as info:
        model(torch.rand(6, 3))
    assert info.value is error
    notes = " ".join(error.__notes__)
    for part in ("stage 1", "layer '2' (Raises)", "microbatch 1 of 3", "forward"):
        assert part in notes
    before = set(threading.enumerate())
    model(torch.rand(6, 3)).sum().backward()
    assert not set(threading.enumerate()) - before


@pytest.mark.draws
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_passes_leave_no_thread_and_no_tensor_behind(checkpoint: Any) -> None:
    model = SplitPipe(nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.BatchNorm1d(6), nn.Linear(6, 6)), [2, 2],
                      devices=CPU, chunks=3, checkpoint=checkpoint)
    x = torch.rand(6, 6)

    def train() -> None:
        model.zero_grad()
        model(x).sum().backward()

    assert flat(train)


def test_a_forward_whose_loss_is_thrown_away_leaves_nothing_behind() -> None:
    model = SplitPipe(mlp(), [2, 2], devices=CPU, chunks=2, checkpoint="always")
    assert flat(lambda: model(torch.rand(4, 6)))


def test_two_threads_train_one_model_at_once() -> None:
    plain, model = twins(mlp(), chunks=3, checkpoint="always")
    inputs = [torch.rand(5, 6) for _ in range(4)]
    results: dict[int, Tensor] = {}
    barrier = threading.Barrier(4, timeout=60)

    def work(number: int) -> None:
        x = fresh(inputs[number])
        for _ in range(5):
            barrier.wait()
            (results[number],) = torch.autograd.grad(model(x).square().sum(), x)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for number, value in enumerate(inputs):
        x = fresh(value)
        torch.testing.assert_close(results[number], torch.autograd.grad(plain(x).square().sum(), x)[0])


# What torch does to a model
