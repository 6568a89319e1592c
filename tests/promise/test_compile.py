"""Layers under torch.compile beside layers whose weight gradients are deferred. No C++ compiler is needed."""
from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from tests.helpers.covering import few, graded, pairs
from tests.helpers.deferring import Scale
from tests.helpers.modules import module_of
from tests.helpers.twin import assert_same_tensors, step, twins

# The compiler's own.
pytestmark = [
    pytest.mark.compiles,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]

GRID = [
    ("aot_eager", "always"),
    *(pytest.param(*way, marks=pytest.mark.thorough)
      for way in (("eager", "never"), ("eager", "always"), ("aot_eager", "never"))),
]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    dynamo = pytest.importorskip("torch._dynamo", reason="needs torch.compile, which torch does not have here")
    dynamo.reset()
    dynamo.utils.counters.clear()
    # What is compiled is compiled again for another number of threads, and the caller has more of them than a worker.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    dynamo.reset()


class Dense(nn.Linear):
    """A layer that is not torch's own: compile() has no effect on those."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = Dense(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return y


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Block(), nn.Tanh(), Block(), nn.Linear(6, 6)).double()


def wrapper(module: nn.Sequential, backend: Any) -> None:
    module[1] = torch.compile(module[1], backend=backend)


def method(module: nn.Sequential, backend: Any) -> None:
    module[1].compile(backend=backend)


def inner(module: nn.Sequential, backend: Any) -> None:
    module[1].up.compile(backend=backend)


def stage(module: nn.Sequential, backend: Any) -> None:
    for number in range(3):
        module[number] = torch.compile(module[number], backend=backend)


HOW = [wrapper, method, inner, stage]
AXES = {"change": HOW, "backend": ["eager", "aot_eager"], "checkpoint": ["never", "always"]}
WAYS = graded(AXES, essence=[["backend"]], thorough=pairs([*AXES]))


class Counted:
    """A backend that counts its graphs."""

    def __init__(self, name: str) -> None:
        from torch._dynamo.testing import CompileCounterWithBackend

        self.backend: Any = CompileCounterWithBackend(name)

    @property
    def graphs(self) -> tuple[int, int, int]:
        """Compiled graphs, operations in them, and graph breaks."""
        from torch._dynamo.utils import counters

        return self.backend.frame_count, self.backend.op_count, sum(counters["graph_break"].values())


def pipes(
    change: Callable[[nn.Sequential, Any], None], backend: str, **options: Any
) -> tuple[nn.Sequential, SplitPipe, Counted]:
    """A module, and a pipeline of a copy that was compiled in part."""
    plain = layers()
    compiled, counted = copy.deepcopy(plain), Counted(backend)
    change(compiled, counted.backend)
    return plain, SplitPipe(compiled, [3, 2], devices=["cpu"] * 2, chunks=2, **options), counted


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 6, dtype=torch.float64)


def assert_equal(model: SplitPipe, plain: nn.Module, x: Tensor) -> None:
    for module in (model, plain):
        module.zero_grad()
    torch.testing.assert_close(step(model, x), step(plain, x))
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@WAYS
def test_compiled_layers_give_the_same(change: Any, backend: str, checkpoint: str) -> None:
    plain, model, _ = pipes(change, backend, checkpoint=checkpoint)
    for rows in (8, 7, 3, 8):
        assert_equal(model, plain, batch(rows))


@WAYS
@pytest.mark.thorough
def test_nothing_is_compiled_again_nor_in_more_pieces_than_without_deferral(
    change: Any, backend: str, checkpoint: str
) -> None:
    found = []
    for engine in ("autograd", "split"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        _, model, counted = pipes(change, backend, checkpoint=checkpoint, backward=engine)
        for _ in range(4):
            step(model, batch())
            found.append(counted.graphs)
    assert set(found) == {found[0]} and found[0][0] == (3 if change is stage else 1) and not found[0][2]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("engine", ["autograd", "split"])
def test_a_layer_of_torchs_own_is_compiled_where_torch_does_so_without_a_pipeline(engine: Any, checkpoint: Any) -> None:
    """Before torch 2.14 it left such layers alone."""
    alone, counted = nn.Linear(6, 6).double(), Counted("eager")
    alone.compile(backend=counted.backend)
    alone(batch())
    expected = counted.graphs
    torch._dynamo.reset()

    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    plain, model = twins(module, chunks=2, checkpoint=checkpoint, backward=engine)
    counted = Counted("eager")
    model[0].compile(backend=counted.backend)
    for _ in range(2):
        assert_equal(model, plain, batch())
    # The compiler could take up what such a layer calls: neither the mode nor the hooks of a checkpoint are for it.
    assert counted.graphs == expected
    assert all(row.deferred == (engine == "split") for row in model.deferral_report())


@pytest.mark.thorough
def test_train_and_eval_are_compiled_once_each() -> None:
    _, model, counted = pipes(method, "aot_eager")
    found = []
    for _ in range(3):
        step(model.train(), batch())
        with torch.no_grad():
            model.eval()(batch())
        found.append(counted.graphs)
    assert [graphs for graphs, _, _ in found] == [2, 2, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_layer_that_breaks_is_compiled_in_the_pieces_it_has_without_deferral(checkpoint: Any) -> None:
    def breaking(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        y: Tensor = self.second(x)
        return y

    found = []
    for engine in ("autograd", "split"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        layer = module_of(breaking, first=nn.Linear(6, 6), second=nn.Linear(6, 6))
        plain, model = twins(nn.Sequential(layer, nn.Linear(6, 6)).double(), chunks=2, checkpoint=checkpoint,
                             backward=engine)
        counted = Counted("aot_eager")
        model[0].compile(backend=counted.backend)
        for _ in range(3):
            assert_equal(model, plain, batch())
        found.append(counted.graphs)
    assert found[0] == found[1] and found[0][0] == 2


def test_neighbours_are_deferred_and_the_report_says_that_compiled_code_is_not() -> None:
    _, model, _ = pipes(method, "aot_eager")
    step(model, batch())
    rows = {row.parameter: row for row in model.deferral_report()}
    for name in ("0.weight", "0.bias", "3.up.weight", "3.down.bias", "4.weight"):
        assert rows[name].deferred, rows[name]
    for name in ("1.up.weight", "1.up.bias", "1.norm.weight"):
        assert not rows[name].deferred and rows[name].why == "compiled_function has no rule", rows[name]


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "checkpoint"), GRID)
def test_a_compiled_pipeline(backend: str, checkpoint: str) -> None:
    plain, model = twins(layers(), chunks=2, checkpoint=checkpoint)
    compiled, counted = torch.compile(model, backend=backend), []
    for _ in range(3):
        x = batch()
        for module in (model, plain):
            module.zero_grad()
        torch.testing.assert_close(step(compiled, x), step(plain, x))
        assert_same_tensors(model, plain)
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(counted)) == 1
    assert {row.parameter for row in model.deferral_report() if not row.deferred} == {
        "1.norm.weight", "1.norm.bias", "3.norm.weight", "3.norm.bias"
    }


class Meeting:
    """The last stage compiles its layer while the first one runs its second microbatch."""

    def __init__(self) -> None:
        self.compiling = threading.Event()
        self.ran = threading.Event()
        self.called = 0
        self.soon = False

    def backend(self, graph: Any, inputs: Any) -> Any:
        if self.soon:
            self.compiling.set()
            assert self.ran.wait(60)
        return graph.forward


class Meets(nn.Module):
    """A layer that runs its second microbatch while another thread compiles."""

    def __init__(self, meeting: Meeting, layer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.meeting = meeting
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        meeting = self.meeting
        meeting.called += meeting.soon
        if meeting.called != 2:
            return self.layer(x)
        assert meeting.compiling.wait(60) and torch.compiler.is_compiling()
        y = self.layer(x)
        meeting.ran.set()
        return y


def meeting_of(layer: Any, checkpoint: Any) -> SplitPipe:
    meeting = Meeting()
    last = Dense(6, 6).double()
    last.compile(backend=meeting.backend)
    model = SplitPipe(nn.Sequential(Meets(meeting, layer), last), [1, 1], devices=["cpu"] * 2, chunks=2,
                      checkpoint=checkpoint)
    # A first run, which may draw random numbers, keeps the others from drawing meanwhile; so does a call of a new kind
    # of a layer that the user has compiled. Later ones are compiled again beside others.
    for x in (batch(), batch().requires_grad_()):
        model(x)
    torch._dynamo.reset()
    meeting.soon = True
    return model


WEIGHT = nn.Parameter(torch.rand(6, dtype=torch.float64))
LAYERS = {"layer": nn.Linear(6, 6).double(), "function": lambda x: Scale.apply(x, WEIGHT)}


@pytest.mark.thorough
@pytest.mark.parametrize("layer", LAYERS)
def test_a_stage_defers_while_another_one_compiles(layer: str) -> None:
    model = meeting_of(LAYERS[layer], "never")
    model(batch()).sum().backward()
    assert all(row.deferred for row in model.deferral_report() if "compiled" not in row.why), model.deferral_report()


@pytest.mark.thorough
def test_a_recomputation_is_the_forward_though_another_stage_compiled_meanwhile() -> None:
    model = meeting_of(nn.Linear(6, 6).double(), "always")
    x = batch().requires_grad_()
    plain = nn.Sequential(model[0].layer, model[1])
    model(x).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plain(x).square().sum().backward()
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])


@pytest.mark.thorough
def test_random_numbers_repeat_though_another_stage_compiled_meanwhile() -> None:
    kept: list[Tensor] = []

    def drop(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5)
        kept.append(y.detach() != 0)
        return y

    model = meeting_of(drop, "always")
    kept.clear()
    model(batch().requires_grad_()).square().sum().backward()
    first, again = kept[:2], kept[2:]
    assert len(again) == 2 and all(any(torch.equal(x, y) for y in again) for x in first)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1", "loss_fn": F.mse_loss}], ids=["drop-in", "scheduled"])
def test_compiled_autograd_is_told_to_leave_deferred_weight_gradients_alone(
    options: dict[str, Any], checkpoint: str
) -> None:
    from torch._dynamo import compiled_autograd

    def loss(module: nn.Module) -> Tensor:
        if options and module is model:
            found: Tensor = module(x, target=target)
            return found
        return F.mse_loss(module(x), target)

    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = SplitPipe(copy.deepcopy(plain), [1, 2], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint, **options)
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    with compiled_autograd._enable(lambda graph: graph):
        with pytest.raises(RuntimeError, match="(?s)compiled autograd.*backward='autograd'"):
            loss(model).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    loss(model).backward()
    loss(plain).backward()
    assert_same_tensors(model, plain)


@pytest.mark.parametrize("checkpoint", few(1, ["always", "never"]))
@pytest.mark.thorough
def test_compiled_autograd_runs_the_backward_of_a_pipeline_that_defers_nothing(checkpoint: str) -> None:
    from torch._dynamo import compiled_autograd

    plain, model = twins(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), chunks=2, checkpoint=checkpoint,
                         backward="autograd")
    x = torch.randn(6, 4)
    with compiled_autograd._enable(lambda graph: graph):
        model(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert_same_tensors(model, plain)
