"""Layers that the pipeline compiles: what is compiled when, what runs as it is, and what else stays as it was."""
from __future__ import annotations

import copy
import gc
import pickle
import shutil
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe, attach
from splitpipe.compiled import backend as backends
from splitpipe.compiled import gate as gates
from splitpipe.compiled.layers import Code, CompiledCall, fit
from splitpipe.compiled.options import verify_compile
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import codes as codes
from tests.helpers.compiling import graphs as graphs
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.covering import few
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_same, assert_same_tensors

pytestmark = pytest.mark.usefixtures("nothing_compiled", "double")
#: What torch warns of where its user compiles.
TORCHS = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
ALWAYS: dict[str, Any] = {"checkpoint": "always"}
SCHEDULED: dict[str, Any] = {"schedule": "zb-h1", "loss_fn": F.mse_loss}
WAYS = pytest.mark.parametrize("way", [
    pytest.param(ALWAYS, id="always"), pytest.param(SCHEDULED, id="zb-h1", marks=pytest.mark.thorough),
])


class Block(nn.Module):
    """Norm, two linear layers, and a sum."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Asks(nn.Module):
    """A layer that looks at a number: no single graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
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
    scheduled = isinstance(model, SplitPipe) and model._loss_fn is not None
    loss: Tensor = model(given, target=0 * given) if scheduled else F.mse_loss(model(given), 0 * given)
    loss.backward()
    return loss.detach()


def assert_right(model: SplitPipe, plain: nn.Sequential, rows: int = 6) -> None:
    for each in (plain, model):
        each.zero_grad()
    assert_same(step(model, x(rows)), step(plain, x(rows)), "loss")
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("way", few(1, [SCHEDULED, ALWAYS, {"checkpoint": "never"}]), ids=["zb-h1", "always", "never"])
def test_equal_blocks_are_compiled_once_and_train(way: dict[str, Any], graphs: list[str], codes: list[Code]) -> None:
    plain, model = twins(blocks(8), **way)
    assert "not known yet" in str(model.deferral_report())
    assert_right(model, plain)
    assert len(graphs) == 2 and len(codes) == 1  # The first block's input needs no gradient.
    assert {(row.deferred, row.why) for row in model.deferral_report()} == {(True, "compiled")}
    assert "100.0% of the elements" in str(model.deferral_report())
    called = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    for each in (plain, model):
        step(each, x())
    assert_same_tensors(model, plain)  # Gradients add up.
    assert len(graphs) == 2 and sorted(called) == sorted(2 * [name for name, _ in model.named_parameters()])


@pytest.mark.thorough
def test_what_torch_has_missed_is_looked_for_again_alone(graphs: list[str], codes: list[Code]) -> None:
    """Its lookup may miss what is compiled while other threads look: with the others gone, it is found."""
    plain, model = twins(blocks(), checkpoint="never")
    assert_right(model, plain)
    made, alone = codes[0]._made, list[bool]()

    def misses(*given: Any) -> Any:
        alone.append(gates.gate().is_alone)
        if not alone[-1]:
            with codes[0].compiling():  # As torch does for what it takes for new.
                raise AssertionError("compiled beside others")
        return made(*given)

    codes[0]._made = misses
    assert_right(model, plain)
    assert len(graphs) == 2 and alone.count(True) == alone.count(False) == 8


class Sometimes(nn.Module):
    """Layers that are built equally, of which some look at a number, and each has a constant of its own."""

    def __init__(self, asks: bool = False, number: int = 0) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.asks, self.number = asks, number

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layer(x)) + self.number
        return y * float(y.sum() < 1e9) if self.asks else y


@pytest.mark.thorough
def test_one_of_equal_layers_that_can_not_be_compiled_is_alone_in_that(codes: list[Code]) -> None:
    torch.manual_seed(0)
    plain, model = twins(nn.Sequential(*[Sometimes(asks=number == 2) for number in range(4)]), **ALWAYS, chunks=4)
    for _ in range(2):
        assert_right(model, plain, 8)
    assert len(codes) == 1
    assert {row.parameter[0] for row in model.deferral_report() if row.why == "compiled"} == set("013")


@pytest.mark.thorough
def test_more_constants_than_graphs() -> None:
    """Torch compiles once for each; beyond its limit layers run as they are."""
    torch.manual_seed(0)
    plain, model = twins(nn.Sequential(*[Sometimes(number=number) for number in range(20)]), **ALWAYS)
    for _ in range(2):
        assert_right(model, plain, 4)
    assert "compiled" in {row.why for row in model.deferral_report()}


@pytest.mark.thorough
def test_copies_that_take_all_that_a_layer_has_compute_with_their_own_weights() -> None:
    class Whole(Block):
        def __getstate__(self) -> dict[str, Any]:
            return self.__dict__

    layer = Whole()
    piped(nn.Sequential(layer, Whole()))(x())
    assert isinstance(layer._compiled_call_impl, CompiledCall)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer._compiled_call_impl))):
        assert getattr(other, "_compiled_call_impl", None) is None


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
def test_what_is_no_single_graph_runs_as_it_is_and_says_why(way: dict[str, Any], codes: list[Code]) -> None:
    plain, model = twins(nn.Sequential(Block(), Asks(), Block(), Asks()), **way)
    for rows in (6, 5):
        assert_right(model, plain, rows)
    [why] = {code.why for code in codes if code.why}
    assert why.startswith("torch.compile: Unsupported: ")
    found = {row.parameter: row.why for row in model.deferral_report()}
    assert found["1.layer.weight"].startswith("Linear") and found["0.up.weight"] == "compiled"
    assert "torch.compile: Unsupported" in found["1.layer.weight"]


def test_what_is_one_op_is_not_compiled() -> None:
    for layer in (nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.Embedding(2, 2), nn.ReLU(), nn.Dropout(), nn.Flatten(),
                  torch.compile(Block(), backend="eager")):
        assert not fit(layer)
    for layer in (Block(), nn.LayerNorm(2), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU()), nn.MultiheadAttention(2, 1)):
        assert fit(layer)


@pytest.mark.thorough
def test_a_graph_that_is_kept_gives_them_again() -> None:
    plain, model = twins(blocks(), checkpoint="never")
    for each in (plain, model):
        loss = each(x()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_tensors(model, plain)


@pytest.mark.thorough
def test_gradients_of_inputs_alone_leave_nothing_behind() -> None:
    plain, model = twins(blocks(), checkpoint="never")
    given = x().requires_grad_()
    found = [torch.autograd.grad(each(given).square().sum(), given)[0] for each in (plain, model)]
    assert_same(*found, "gradient of the input")
    some = [torch.autograd.grad(each(given).sum(), [each[3].scale, each[0].norm.weight]) for each in (plain, model)]
    assert_same(*some, "gradients of some")
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.thorough
@WAYS
def test_frozen_weights_are_left_out(way: dict[str, Any]) -> None:
    plain, model = twins(blocks(), **way)
    assert_right(model, plain)
    for each in (plain, model):
        each.zero_grad()
        for parameter in (each[1].up.weight, each[2].scale):
            parameter.requires_grad_(False)
        each[0].requires_grad_(False)
    assert_right(model, plain)


@pytest.mark.thorough
def test_recomputation_draws_what_forward_drew() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.scale, 0.5) + 0 * x

    drops = piped(nn.Sequential(Drops(), nn.Identity()), **ALWAYS, chunks=3)
    given = torch.ones(60, 4, requires_grad=True)
    output = drops(given)
    output.sum().backward()
    assert given.grad is not None and 40 < int((output == 0).sum()) < 200
    assert_same(given.grad, output.detach(), "gradient: two where the output is, and zero where that is")


@pytest.mark.thorough
def test_statistics_are_those_of_a_loop_over_microbatches() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
                               for _ in range(2)])

    for checkpoint in ("never", "always"):
        plain, model = made(), piped(made(), checkpoint=checkpoint)
        for _ in range(2):
            output, expected = model(x(8)), torch.cat([plain(part) for part in x(8).chunk(2)])
            assert_same(output, expected, "output")
            output.square().mean().backward()
            expected.square().mean().backward()
        assert_same_tensors(model, plain)


@pytest.mark.thorough
def test_eval_and_no_grad_between_steps(graphs: list[str]) -> None:
    plain, model = twins(blocks())
    assert_right(model, plain)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_same(model.eval()(x()), plain(x()), "output")
    model.train()
    assert_right(model, plain)


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
def test_copies_are_compiled_when_they_are_called(copied: Any, codes: list[Code]) -> None:
    plain, model = twins(blocks())
    step(model, x())
    model.zero_grad()
    other = copied(model)
    assert other[0]._compiled_call_impl is None
    assert_right(other, plain)
    assert isinstance(other[0]._compiled_call_impl, CompiledCall) and len(codes) == 2


@pytest.mark.thorough
def test_a_model_that_is_let_go_of_is_gone() -> None:
    model = piped(blocks())
    step(model, x())
    refs = [weakref.ref(model[0]), weakref.ref(model[3].up.weight)]
    del model
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.compiles
@TORCHS
@pytest.mark.parametrize(("how", "way"), [
    ("torch.compile", SCHEDULED), pytest.param("layer.compile", ALWAYS, marks=pytest.mark.thorough),
])
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
    assert {(row.deferred, row.why) for row in model.deferral_report()} == {(True, "compiled")}


@pytest.mark.thorough
@pytest.mark.compiles
@TORCHS
def test_layers_that_the_user_compiles_otherwise_keep_autograds_backward() -> None:
    plain = blocks()
    module = copy.deepcopy(plain)
    module[1].compile(backend="aot_eager")
    model = piped(module, **SCHEDULED)
    assert_right(model, plain)
    assert {row.parameter[0] for row in model.deferral_report() if row.why == "compiled"} == set("023")


@pytest.mark.thorough
@WAYS
def test_blocks_of_a_module_with_cuts(way: dict[str, Any], graphs: list[str], codes: list[Code]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.scale = blocks(), nn.Parameter(torch.rand(4))

        def forward(self, given: Tensor) -> Tensor:
            y = given
            for block in self.blocks:
                y = block(y) + given
            return y * self.scale

    plain = Net()
    net = attach(copy.deepcopy(plain), cuts=["blocks.2"], devices=["cpu"] * 2, chunks=2, compile=EAGER, **way)
    for rows in (6, 5):
        for each in (plain, net):
            each.zero_grad()
        step(plain, x(rows))
        loss = net(x(rows), target=0 * x(rows)) if "schedule" in way else F.mse_loss(net(x(rows)), 0 * x(rows))
        loss.backward()
        for (name, one), other in zip(net.named_parameters(), plain.parameters()):
            assert_same(one.grad, other.grad, name)
        assert rows < 6 or len(graphs) == 2
    assert len(codes) == 1 and codes[0].why is None


@pytest.mark.thorough
def test_stages_that_meet_new_sizes_at_once_wait_for_each_other(graphs: list[str]) -> None:
    """Each has layers of its own, and whoever compiles is alone."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(Block(), *[nn.Tanh()] * stage) for stage in range(4)])
    model = SplitPipe(copy.deepcopy(plain), [1, 1, 1, 1], devices=["cpu"] * 4, chunks=4, compile=EAGER)
    for rows in (8, 7, 10, 3):
        assert_right(model, plain, rows)
    assert len({*graphs}) > 1, "the stages' own workers compile"


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", [{}, SCHEDULED], ids=["drop-in", "zb-h1"])
def test_random_numbers_after_a_call_are_those_of_the_caller(schedule: dict[str, Any]) -> None:
    """torch puts the default generator back when it has compiled; another stage may draw meanwhile."""
    found = []
    for compile in (False, EAGER):
        torch.manual_seed(0)
        model = SplitPipe(blocks(4), [2, 2], devices=["cpu"] * 2, chunks=3, compile=compile, **schedule)
        torch.manual_seed(0)
        for rows in (5, 7, 4):
            step(model, x(rows))
            found.append(int(torch.randint(1000, ())))
    assert found[:3] == found[3:]


@pytest.mark.thorough
def test_two_models_compile_in_two_threads() -> None:
    plain, done = blocks(), list[bool]()
    models = [piped(copy.deepcopy(plain)) for _ in range(2)]
    expected = copy.deepcopy(plain)
    step(expected, x())
    meeting = threading.Barrier(2, timeout=60)

    def train(model: SplitPipe) -> None:
        meeting.wait()
        step(model, x())
        for one, other in zip(model.parameters(), expected.parameters()):
            assert_same(one.grad, other.grad, "gradient")
        done.append(True)

    threads = [threading.Thread(target=train, args=(model,), daemon=True) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert done == [True, True]


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class InvalidCxxCompiler(RuntimeError):
        pass

    def fails(self: Any, *_: Any, **__: Any) -> Any:
        raise InvalidCxxCompiler("No working C++ compiler found")

    monkeypatch.setattr("splitpipe.compiled.backend.Backend.__call__", fails)
    model = piped(blocks(), compile=True)
    with pytest.raises(RuntimeError, match=r"no compiler to use: .*No working C\+\+ compiler.* Install"):
        model(x())


@pytest.mark.thorough
def test_what_takes_long_says_so_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("splitpipe.compiled.layers._LONG", 0.0)
    step(piped(blocks()), x())
    assert "splitpipe" not in capsys.readouterr().err
    torch._dynamo.reset()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    step(piped(blocks()), x())
    assert capsys.readouterr().err.startswith("splitpipe: compiled Block in ")


# Gradients of weights that come in unusual ways


class Gives(nn.Module):
    """Gives a view of its weight beside what it computes, with the weight or without."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(given)
        return y * self.scale if self.twice else y, self.scale.unsqueeze(0)


class Takes(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(given[0] * given[1])


class Adds(nn.Module):
    """With microbatches of one row, the gradients of weight and input are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(1, 4))

    def forward(self, given: Tensor) -> Tensor:
        return torch.tanh(2 * (given + self.shift))


class Sums(nn.Module):
    """The gradient of its weight is one number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, given: Tensor) -> Tensor:
        return torch.tanh(given * self.scale.sum())


MADE = {
    "a view of a weight": lambda: [Block(), Gives(False), Takes(), Block()],
    "a weight and a view of it": lambda: [Block(), Gives(True), Takes(), Block()],
    "one tensor for weight and input": lambda: [Adds(), Adds(), Block(), Adds()],
    "one number, expanded": lambda: [Block(), Sums(), Sums(), Block()],
}


@pytest.mark.thorough
@WAYS
@pytest.mark.parametrize("name", MADE)
def test_gradients_that_arrive_in_other_ways(name: str, way: dict[str, Any], codes: list[Code]) -> None:
    torch.manual_seed(0)
    plain, model = twins(nn.Sequential(*MADE[name]()), chunks=6, **way)
    given = [x().requires_grad_() for _ in range(2)]
    for each, batch in zip((plain, model), given):
        step(each, batch)
    assert_same_tensors(model, plain)
    assert_same(given[1].grad, given[0].grad, "gradient of the input")
    assert not [code.why for code in codes if code.why]


# Hooks


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


@pytest.mark.thorough
def test_a_hook_on_one_of_equal_layers_is_its_own() -> None:
    plain = blocks()
    plain[2].register_forward_hook(doubled)
    plain[1].up.register_forward_hook(doubled)
    model = piped(copy.deepcopy(plain), **ALWAYS)
    for _ in range(2):
        assert_right(model, plain)


@pytest.mark.thorough
def test_hooks_that_come_and_go_later_are_seen() -> None:
    plain, model = twins(blocks())
    assert_right(model, plain)
    handles = [module.register_forward_hook(doubled) for each in (plain, model) for module in (each[1], each[2].down)]
    assert_right(model, plain)
    seen: list[nn.Module] = []
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    assert_right(model, plain)
    everywhere.remove()
    assert model[3].norm in seen
    for handle in handles:
        handle.remove()
    assert_right(model, plain)


# What is left as it is


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_second_derivatives_are_an_error_in_every_checkpoint_mode(checkpoint: str) -> None:
    model = piped(blocks(), checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="second derivatives|double backward"):
        grads = torch.autograd.grad(model(x()).square().mean(), [*model.parameters()], create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()  # type: ignore[union-attr]
    step(model, x())


@pytest.mark.thorough
def test_a_layer_that_draws_in_its_own_checkpoint_runs_as_it_is(codes: list[Code]) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, given: Tensor) -> Tensor:
            found: Tensor = torch.utils.checkpoint.checkpoint(
                lambda y: F.dropout(torch.tanh(self.layer(y)), 0.5), given, use_reentrant=False
            )
            return found

    model = piped(nn.Sequential(Draws(), Draws()), **SCHEDULED)
    step(model, x())
    assert [code.why for code in codes if code.why and "random numbers" in code.why]


def test_a_number_that_counts_is_not_lost(codes: list[Code]) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, given: Tensor) -> Tensor:
            self.seen.add_(1)
            found: Tensor = self.layer(given)
            return found

    model = piped(nn.Sequential(Counts(), Counts()))
    step(model, x())
    assert model[0].seen == 2 and not codes


@pytest.mark.thorough
def test_a_layer_that_fails_once_is_compiled_the_next_time(codes: list[Code]) -> None:
    plain, model = twins(blocks())
    with pytest.raises(RuntimeError) as info:
        model(torch.ones(6, 3))
    assert any("layer '0'" in note for note in info.value.__notes__)
    assert_right(model, plain)
    assert [code.why for code in codes] == [None]


@pytest.mark.thorough
def test_layers_that_are_called_by_themselves_have_both_halves_in_backward() -> None:
    plain, model = twins(nn.Sequential(*blocks(2), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()), Block()))
    assert_right(model, plain)
    for each in (plain, model):
        each.zero_grad()
        F.mse_loss(nn.Sequential(*each)(x()), 0 * x()).backward()
    assert_same_tensors(model, plain)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, and there is no g++ here")
def test_by_inductor(codes: list[Code]) -> None:
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
    assert [code.why for code in codes] == [None]
    assert {row.why for row in model.deferral_report()} == {"compiled"}


def test_modes_are_inductors() -> None:
    found = verify_compile({"mode": "max-autotune-no-cudagraphs", "options": {"epilogue_fusion": False}})
    assert found is not None
    assert dict(found.of_inductor()) == {
        "max_autotune": True, "coordinate_descent_tuning": True, "epilogue_fusion": False,
    }
    assert verify_compile(False) is None and verify_compile({}) == verify_compile(True)


class Kept(nn.Module):
    """Keeps its output in an attribute, where it frees the one before, and may count its calls."""

    def __init__(self, counts: int = 0) -> None:
        super().__init__()
        self.layer, self.scale, self.calls = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), 0
        self.last: Tensor | None = None
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        self.last = torch.tanh(self.layer(x)) * self.scale
        return self.last * 2


@pytest.mark.thorough
def test_finalizers_of_what_a_layer_frees_run(codes: list[Code]) -> None:
    freed: list[int] = []
    model = SplitPipe(nn.Sequential(Kept(), Kept()), [1, 1], devices=["cpu"] * 2, chunks=1, compile=EAGER)

    class Told:
        def __init__(self, number: int) -> None:
            self.number = number

        def __call__(self) -> None:
            freed.append(self.number)

    for number in range(4):
        model(x()).sum().backward()
        for layer in model:
            weakref.finalize(layer.last, Told(number))
    for layer in model:
        layer.last = None
    gc.collect()
    assert sorted(freed) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [code.why for code in codes] == [None]


@pytest.mark.thorough
def test_a_layer_that_counts_is_compiled_once(graphs: list[str], codes: list[Code]) -> None:
    """With a graph for each number, it would reach the limit between a forward and its recomputation."""
    model = SplitPipe(
        nn.Sequential(*[Kept(counts=1) for _ in range(4)]), [2, 2], devices=["cpu"] * 2, chunks=4, compile=EAGER,
        checkpoint="except_last",
    )
    for _ in range(12):
        model(x(8)).sum().backward()
    assert [code.why for code in codes] == [None] and len(graphs) < 8


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "halves"), [
    ({"schedule": "1f1b", "loss_fn": F.mse_loss}, False), (SCHEDULED, True), ({}, True),
    ({"backward": "autograd"}, False),
])
def test_a_backward_is_cut_where_something_is_deferred(
    options: dict[str, Any], halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[bool] = []
    whole = backends.halved

    def noted(*given: Any) -> Any:
        cut.append(True)
        return whole(*given)

    monkeypatch.setattr(backends, "halved", noted)
    plain, model = twins(blocks(), **options)
    assert_right(model, plain)
    assert bool(cut) is halves
    assert {row.deferred for row in model.deferral_report()} == {halves}
    whys = {row.why for row in model.deferral_report()}
    none = "the schedule has no W for it" if "schedule" in options else "backward='autograd'"
    assert whys == {"compiled" if halves else none}
