"""Layers that the pipeline compiles: what is compiled when, what runs as it is, and what stays as it was."""
from __future__ import annotations

import copy
import pickle
import shutil
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe
from splitpipe.compiled.backend import verify_compile
from splitpipe.compiled.layers import CompiledCall, fit
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import graphs as graphs
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.covering import few, graded
from tests.helpers.deferring import double as double
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same, assert_same_tensors

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled", "double"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # Torch's, which it hides from users.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
]
ALWAYS: dict[str, Any] = {"checkpoint": "always"}
SCHEDULED: dict[str, Any] = {"schedule": "zb-h1", "loss_fn": F.mse_loss}
WAYS = pytest.mark.parametrize("way", [pytest.param(ALWAYS, id="always"),
                                       pytest.param(SCHEDULED, id="zb-h1", marks=pytest.mark.thorough)])


class Block(nn.Module):
    """Norm, two linear layers, and a sum."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Breaking(Block):
    """Compiled in two pieces."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        torch._dynamo.graph_break()
        return self.scale * self.down(self.up(y))


def asks(self: Any, x: Tensor) -> Tensor:
    """A layer that looks at a number: no single graph."""
    y: Tensor = self.layer(x)
    return y if y.sum().item() < 1e9 else 2 * y


def blocks(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(count)])


def piped(module: nn.Sequential, **options: Any) -> SplitPipe:
    half = len(module) // 2
    given = {"devices": ["cpu"] * 2, "chunks": 2, "compile": EAGER, **options}
    return SplitPipe(module, [half, len(module) - half], **given)


def twins(plain: nn.Sequential, **options: Any) -> tuple[nn.Sequential, SplitPipe]:
    """The module, and a pipeline of a copy."""
    return plain, piped(copy.deepcopy(plain), **options)


def x(rows: int = 6) -> Tensor:
    return torch.linspace(-1, 1, 4 * rows).reshape(rows, 4).sin()


def step(model: nn.Module, given: Tensor) -> Tensor:
    """Forward and backward; the loss."""
    scheduled = isinstance(model, SplitPipe) and model._runtime.options.loss_fn is not None
    loss: Tensor = model(given, target=0 * given) if scheduled else F.mse_loss(model(given), 0 * given)
    loss.backward()
    return loss.detach()


def assert_right(model: SplitPipe, plain: nn.Sequential, rows: int = 6) -> None:
    for each in (plain, model):
        each.zero_grad()
    assert_same(step(model, x(rows)), step(plain, x(rows)), "loss")
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("way", few(1, [SCHEDULED, ALWAYS, {"checkpoint": "never"}]), ids=["zb-h1", "always", "never"])
def test_equal_blocks_are_compiled_once_and_train(way: dict[str, Any], graphs: list[str]) -> None:
    plain, model = twins(blocks(8), **way)
    assert "not known yet" in str(splitpipe.deferral_report(model))
    assert_right(model, plain)
    assert len(graphs) == 2  # The first block's input needs no gradient.
    assert {(row.deferred, row.why) for row in splitpipe.deferral_report(model)} == {(True, "compiled")}
    assert "100.0% of the elements" in str(splitpipe.deferral_report(model))
    called = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    for each in (plain, model):
        step(each, x())
    assert_same_tensors(model, plain)  # Gradients add up.
    assert len(graphs) == 2 and sorted(called) == sorted(2 * [name for name, _ in model.named_parameters()])


@pytest.mark.thorough
def test_for_a_second_size_a_graph_of_all_sizes_is_compiled(graphs: list[str]) -> None:
    plain, model = twins(blocks())
    for rows in (6, 5, 7, 8, 9, 11, 6, 20):
        assert_right(model, plain, rows)
    # With and without a gradient of the input, of one size and of all; and torch tells a first microbatch, which begins
    # where its memory does, from others.
    assert len(graphs) <= 6


@pytest.mark.thorough
@WAYS
def test_code_that_torch_can_not_trace_runs_as_it_is(way: dict[str, Any]) -> None:
    odd = [module_of(asks, **linears("layer")) for _ in range(2)]
    plain, model = twins(nn.Sequential(Block(), odd[0], Block(), odd[1]), **way)
    for rows in (6, 5):
        assert_right(model, plain, rows)
    found = {row.parameter: row.why for row in splitpipe.deferral_report(model)}
    assert {found["1.layer.weight"], found["0.up.weight"]} == {"compiled"}


def test_what_is_one_op_is_not_compiled() -> None:
    for layer in (nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.Embedding(2, 2), nn.ReLU(), nn.Dropout(), nn.Flatten(),
                  torch.compile(Block(), backend="eager")):
        assert not fit(layer)
    for layer in (Block(), nn.LayerNorm(2), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU()), nn.MultiheadAttention(2, 1)):
        assert fit(layer)


@pytest.mark.draws
@pytest.mark.thorough
def test_recomputation_draws_what_forward_drew() -> None:
    def drop(self: Any, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale, 0.5) + 0 * x

    layer = module_of(drop, scale=nn.Parameter(torch.ones(4)))
    drops = piped(nn.Sequential(layer, nn.Identity()), **ALWAYS, chunks=3)
    given = torch.ones(60, 4, requires_grad=True)
    output = drops(given)
    output.sum().backward()
    assert given.grad is not None and 40 < int((output == 0).sum()) < 200
    assert_same(given.grad, output.detach(), "gradient: two where the output is, and zero where that is")


@pytest.mark.thorough
def test_autocast() -> None:
    plain, model = twins(blocks().float(), **ALWAYS)
    given, loss = x().float(), []
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss.append(step(each, given))
    torch.testing.assert_close(loss[0], loss[1], rtol=0.02, atol=0.02)
    for one, other in zip(model.parameters(), plain.parameters()):
        assert one.grad is not None and other.grad is not None and one.grad.dtype is torch.float32
        torch.testing.assert_close(one.grad, other.grad, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.thorough
def test_copies_are_compiled_when_they_are_called(copied: Any) -> None:
    plain, model = twins(blocks())
    step(model, x())
    model.zero_grad()
    other = copied(model)
    assert other[0]._compiled_call_impl is None
    assert_right(other, plain)
    assert isinstance(other[0]._compiled_call_impl, CompiledCall)


@pytest.mark.compiles
@pytest.mark.parametrize(("how", "way"), [("torch.compile", SCHEDULED),
                                          pytest.param("layer.compile", ALWAYS, marks=pytest.mark.thorough)])
def test_layers_that_the_user_compiles_by_our_backend_are_the_same(how: str, way: dict[str, Any]) -> None:
    plain = blocks()
    module = copy.deepcopy(plain)
    options: dict[str, Any] = {"backend": "splitpipe", "options": EAGER}
    for number, layer in enumerate(module):
        if how == "layer.compile":
            layer.compile(**options)
        else:
            module[number] = torch.compile(layer, **options)
    model = piped(module, compile=False, **way)
    for each in (plain, model):
        step(each, x())
    for one, other in zip(model.parameters(), plain.parameters()):
        assert_same(one.grad, other.grad, "gradient")
    assert {(row.deferred, row.why) for row in splitpipe.deferral_report(model)} == {(True, "compiled")}


@pytest.mark.compiles
@pytest.mark.parametrize("way", [ALWAYS, SCHEDULED], ids=["always", "zb-h1"])
def test_a_compiled_function_around_a_step_leaves_the_backward_alone(way: dict[str, Any]) -> None:
    plain, model = twins(blocks(), compile=False, **way)
    for each in (plain, model):
        torch.compile(step, backend="eager")(each, x())
    assert_same_tensors(model, plain)


def wrap(layers: nn.Sequential, backend: Any) -> None:
    for number in (0, 2):
        layers[number] = torch.compile(layers[number], backend=backend)


def compile_in_place(layers: nn.Sequential, backend: Any) -> None:
    for layer in layers[::2]:
        layer.compile(backend=backend)


ALL_WAYS: dict[str, dict[str, Any]] = {"never": {"checkpoint": "never"}, "always": ALWAYS,
                                       "zb-h1": {**SCHEDULED, **ALWAYS},
                                       "autograd": {**SCHEDULED, **ALWAYS, "backward": "autograd"}}


@pytest.mark.compiles
@graded({"how": [None, wrap, compile_in_place], "backend": ["eager", "aot_eager"], "name": [*ALL_WAYS]},
        essence=[["how"]], thorough=[["how", "backend"], ["how", "name"]])
def test_layers_of_ours_and_the_users_run_in_the_callers_thread_and_are_compiled_once(how, backend, name, graphs):
    from torch._dynamo.testing import CompileCounterWithBackend

    way = ALL_WAYS[name]
    plain, threads = nn.Sequential(Block(), nn.Linear(4, 4), Breaking(), nn.Linear(4, 4)), set[str]()
    layers, counted, found = copy.deepcopy(plain), CompileCounterWithBackend(backend), []
    if how is not None:
        how(layers, counted)
    for register in (layers[1].register_forward_hook, layers[1].register_full_backward_hook):  # Of one op.
        register(lambda *_: threads.add(threading.current_thread().name))
    model = SplitPipe(layers, [1] * 4, devices=["cpu"] * 4, chunks=2, compile=EAGER if how is None else False, **way)
    for rows in (8, 8, 8, 7):
        for each in (plain, model):
            each.zero_grad()
        assert_same(step(model, x(rows)), step(plain, x(rows)), "loss")
        for one, other in zip(model.parameters(), plain.parameters()):
            assert_same(one.grad, other.grad, "gradient")
        found.append(len(graphs) + counted.frame_count)
    assert found[0] == found[1] == found[2] > 0
    assert threads == {threading.current_thread().name} and {*graphs} <= threads
    if how is compile_in_place and backend == "aot_eager" and name != "autograd":
        why = {row.parameter: row.why for row in splitpipe.deferral_report(model)}
        assert (why["0.up.weight"], why["3.weight"]) == ("CompiledFunctionBackward has no rule", "linear")


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


@pytest.mark.thorough
def test_hooks_on_some_of_equal_layers_are_seen_even_if_they_come_and_go_later() -> None:
    plain, model = twins(blocks())
    assert_right(model, plain)
    handles = [module.register_forward_hook(doubled) for each in (plain, model) for module in (each[1], each[2].down)]
    for _ in range(2):
        assert_right(model, plain)
    seen: list[nn.Module] = []
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    assert_right(model, plain)
    everywhere.remove()
    assert model[3].norm in seen
    for handle in handles:
        handle.remove()
    assert_right(model, plain)


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_second_derivatives_are_an_error_in_every_checkpoint_mode(checkpoint: str) -> None:
    model = piped(blocks(), checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="expected a first derivative"):
        grads = torch.autograd.grad(model(x()).square().mean(), [*model.parameters()], create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()  # type: ignore[union-attr]
    step(model, x())


def test_a_number_that_counts_is_not_lost(graphs: list[str]) -> None:
    def counting(self: Any, given: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.layer(given)  # type: ignore[no-any-return]

    model = piped(nn.Sequential(*[module_of(counting, seen=nn.Buffer(torch.zeros(())), **linears("layer"))
                                  for _ in range(2)]))
    step(model, x())
    assert model[0].seen == 2 and not graphs


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, and there is no g++ here")
def test_by_inductor() -> None:
    from torch._inductor import config

    # Scalar code, of layers with few kernels: torch's headers for vectors take the compiler longer than all the rest.
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]).float()
    plain, model = twins(layers, compile=True, **SCHEDULED)
    given = x().float()
    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        for each in (plain, model):
            step(each, given)
    for (name, one), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert {row.why for row in splitpipe.deferral_report(model)} == {"compiled"}


def test_modes_are_inductors() -> None:
    found = verify_compile({"mode": "max-autotune-no-cudagraphs", "options": {"epilogue_fusion": False}})
    assert found is not None
    assert dict(found.of_inductor()) == {"max_autotune": True, "coordinate_descent_tuning": True,
                                         "epilogue_fusion": False}
    assert verify_compile(False) is None and verify_compile({}) == verify_compile(True)
