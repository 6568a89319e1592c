"""Checkpointing drops what autograd saves, and changes nothing else."""
from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from splitpipe import SplitPipe, is_checkpointing, is_recomputing
from splitpipe.stage.run import SavedInput
from tests.helpers.covering import pairwise
from tests.helpers.modules import linears, module_of
from tests.helpers.scheduled import assert_steps, inside, loss_of
from tests.helpers.skipping import popping, stashing
from tests.helpers.twin import Looped, Nothing, assert_same_tensors, twins
from tests.promise.layers import Apply

ENGINES = pytest.mark.parametrize("backward", ["split", "autograd"])
CHECKPOINT = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])


class Phases(nn.Module):
    """Notes the phase of every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.phases: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.phases.append("checkpointing" if is_checkpointing() else "recomputing" if is_recomputing() else "plain")
        return x * self.weight


def mlp(*, width: int = 6, layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])


@pytest.mark.parametrize(
    ("mode", "rows", "plain"), [("always", 4, 0), ("except_last", 4, 1), ("never", 4, 4), ("except_last", 3, 1),
                                ("except_last", 1, 1), ("always", 1, 0)])
def test_modes_count_the_microbatches_there_are(mode: str, rows: int, plain: int) -> None:
    layer = Phases()
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=4, checkpoint=mode)
    model(torch.rand(rows, 3)).sum().backward()
    assert layer.phases.count("plain") == plain
    assert layer.phases.count("checkpointing") == layer.phases.count("recomputing") == rows - plain


def test_nothing_is_checkpointed_in_eval_mode_or_without_grad() -> None:
    layer = Phases()
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="always")
    with torch.no_grad():
        model(torch.rand(2, 3))
    model.eval()
    model(torch.rand(2, 3)).sum().backward()
    assert layer.phases == ["plain"] * 4
    assert not is_checkpointing() and not is_recomputing()


def test_each_microbatch_is_recomputed_right_before_its_backward() -> None:
    log: list[str] = []

    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: int, microbatch: int) -> Tensor:
            ctx.where = layer, microbatch
            if is_recomputing():
                log.append(f"R{layer}{microbatch}")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            log.append("B{}{}".format(*ctx.where))
            return grad, None, None

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, x: Tensor) -> Tensor:
            return Log.apply(x.sin(), self.index, int(x.detach().flatten()[0].round()) if self.index == 0 else 0)

    model = SplitPipe(nn.Sequential(Layer(0)), [1], devices=["cpu"], chunks=3, checkpoint="always")
    model(torch.tensor([[0.0], [1.0], [2.0]], requires_grad=True)).sum().backward()
    assert log == ["R02", "B02", "R01", "B01", "R00", "B00"]


def test_saved_tensors_are_freed_after_forward_and_backward() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = x * 1
            seen.append(weakref.ref(kept))
            ctx.save_for_backward(kept)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2 * ctx.saved_tensors[0]

    layers = nn.Sequential(*[Apply(lambda x: Square.apply(x.sin())) for _ in range(2)])
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    gc.disable()
    try:
        loss = model(torch.rand(4, 3, requires_grad=True)).sum()
        assert len(seen) == 4 and not any(reference() is not None for reference in seen)
        loss.backward()
        assert len(seen) == 8 and not any(reference() is not None for reference in seen)
    finally:
        gc.enable()


class Keep(torch.autograd.Function):
    """Saves a tensor of its own, and asks for it several times; notes how many are alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[weakref.ref[Tensor]], alive: list[int]) -> Tensor:
        kept = x.detach() * 1
        ctx.save_for_backward(kept, kept * 2)
        ctx.seen, ctx.alive = seen, alive
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first, _ = ctx.saved_tensors
        again, double = ctx.saved_tensors
        assert again.equal(first) and double.equal(again * 2)
        ctx.seen.append(weakref.ref(first))
        ctx.alive.append(sum(reference() is not None for reference in ctx.seen))
        return grad, None, None


@pytest.mark.parametrize("retain", [False, True])
def test_in_backward_one_nodes_tensors_are_alive(retain: bool) -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    runs: list[bool] = []

    def layer(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        for _ in range(4):
            x = Keep.apply(x, seen, alive)
        return x

    model = SplitPipe(nn.Sequential(Apply(layer)), [1], devices=["cpu"], chunks=1, checkpoint="always")
    loss = model(torch.rand(4, 3, requires_grad=True)).sum()
    loss.backward(retain_graph=retain)
    assert alive == [1, 1, 1, 1]
    if retain:
        alive.clear()
        loss.backward()
        assert alive == [1, 1, 1, 1]
    assert runs == [False, True, *[True] * retain]


@ENGINES
def test_inputs_of_stages_are_freed_by_backward(backward: Any) -> None:
    # Those of other tests may still be there, and may go at any moment: they are held, and not counted.
    others = [thing for thing in gc.get_objects() if type(thing) is SavedInput]
    theirs = set(map(id, others))

    def kept() -> int:
        return sum(type(thing) is SavedInput and id(thing) not in theirs for thing in gc.get_objects())

    model = SplitPipe(mlp(), [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="always", backward=backward)
    gc.disable()
    try:
        loss = model(torch.rand(4, 6)).sum()
        assert kept() == 4
        loss.backward()
        assert kept() == 0
    finally:
        gc.enable()


def test_unused_recomputed_tensors_are_freed_after_backward() -> None:
    seen: list[StorageWeakRef] = []

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        other = x.sin()
        seen.append(StorageWeakRef(other.untyped_storage()))
        return x.cos(), other.square()

    model = SplitPipe(nn.Sequential(nn.Linear(3, 3), Apply(two)), [2], devices=["cpu"], chunks=1, checkpoint="always")
    one, other = model(torch.rand(4, 3))
    one.sum().backward()
    assert len(seen) == 2 and seen[1].expired()
    assert other.requires_grad


@CHECKPOINT
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_retain_graph_and_backward_twice(by: str, checkpoint: Any) -> None:
    plain, model = twins(mlp(), by=by, chunks=3, checkpoint=checkpoint)
    x = torch.rand(5, 6)
    for _ in range(2):
        for module in (plain, model):
            loss = module(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        assert_same_tensors(model, plain)


@ENGINES
def test_a_second_backward_says_what_the_stages_keep(backward: Any) -> None:
    loss = twins(mlp(), chunks=3, checkpoint="always", backward=backward)[1](torch.rand(5, 6)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time.*its (checkpointed )?stages keep.*retain_graph=True"):
        loss.backward()


@CHECKPOINT
@pytest.mark.parametrize("use", [lambda given: given[0], lambda given: given[0] + Nothing.apply(given[1])])
def test_a_layer_whose_output_gets_no_gradient(use: Any, checkpoint: Any) -> None:
    def two(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)

    layers = nn.Sequential(module_of(two, **linears("used", "unused")), Apply(use))
    plain, model = twins(layers, [1, 1], chunks=2, checkpoint=checkpoint)
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: fired.append(name))
    assert_steps(plain, model, torch.rand(5, 4), 1)
    assert sorted(fired) == ["0.used.bias", "0.used.weight"]


LEAF = torch.rand(6, requires_grad=True)


def stepped(model: SplitPipe, x: Tensor) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def data_set(model: SplitPipe, x: Tensor) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 3


def closure_written(model: SplitPipe, x: Tensor) -> None:
    with torch.no_grad():
        LEAF.mul_(2)


@pytest.mark.parametrize(("change", "checkpoint", "words"), [
    *[(stepped, mode, r"modified (in place|by an inplace)") for mode in ("always", "except_last", "never")],
    *[(lambda model, x: x.zero_(), mode, r"modified (in place|by an inplace)")
      for mode in ("always", "except_last", "never")],
    (data_set, "always", r"optimizer\.step"), (closure_written, "always", "modified by an inplace"),
])
def test_tensors_changed_between_forward_and_backward_are_an_error(change: Any, checkpoint: Any, words: str) -> None:
    layers = nn.Sequential(*mlp(layers=3), Apply(lambda x: x * LEAF))
    model, x = SplitPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint), torch.rand(4, 6)
    model(x).sum().backward()
    loss = model(x).square().sum()
    change(model, x)
    with pytest.raises(RuntimeError, match=words):
        loss.backward()
    model.zero_grad()
    model(torch.rand(4, 6)).square().sum().backward()


def test_an_overwritten_input_of_a_later_stage_is_an_error() -> None:
    given: list[Tensor] = []
    _, model = twins(mlp(layers=2), chunks=2, checkpoint="always")
    model[1].register_forward_pre_hook(lambda _, args: given.extend(args))
    model(torch.rand(4, 6))  # The first pass keeps copies, until it is known who writes to what.
    loss = model(torch.rand(4, 6)).sum()
    with torch.no_grad():
        given[-1].mul_(2)
    with pytest.raises(RuntimeError, match=r"the input of stage 1 \(cpu\) was modified in place between the forward"):
        loss.backward()


def test_saved_tensor_hooks_get_the_inputs_of_stages() -> None:
    plain, model = twins(mlp(), chunks=3, checkpoint="always")
    x = torch.rand(6, 6)
    packed: list[torch.Size] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(x).square().sum()
    assert packed.count(torch.Size([2, 6])) == 3 * 2
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        plain(x).square().sum().backward()
    assert_same_tensors(model, plain)


@CHECKPOINT
@pytest.mark.parametrize("how", [
    lambda y: (y, y), lambda y: (y, y[:, :3]), lambda y: (y[:, :3], y[:, 3:]), lambda y: (y, y.detach()),
])
def test_writing_to_memory_that_another_input_has_is_an_error(how: Any, checkpoint: Any) -> None:
    write = Apply(lambda xs: xs[0].relu_() + xs[1].sum(-1, keepdim=True))
    for between in [], [nn.Identity()]:
        layers = nn.Sequential(nn.Linear(6, 6), Apply(how), *between, write)
        model = SplitPipe(layers, [2] + [1] * (len(layers) - 2), devices=["cpu"] * 3, chunks=2, checkpoint=checkpoint)
        with pytest.raises(RuntimeError, match="shares memory"):
            model(torch.rand(4, 6))
    model = SplitPipe(nn.Sequential(write), [1], devices=["cpu"], chunks=2, checkpoint=checkpoint)
    x = torch.rand(4, 6)
    with pytest.raises(RuntimeError, match="shares memory"):
        model((x, x))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_writing_to_memory_that_a_skip_has_is_an_error(checkpoint: Any) -> None:
    def aside(x: Tensor, layer: nn.Module) -> Any:
        """Two values, of which the second shares memory with a skip."""
        y = x * 2
        return y.data[:, :3], (x.exp(), y)  # Which counts its versions apart.

    def write(xs: tuple[Tensor, Tensor], scale: Tensor, part: Tensor) -> Tensor:
        return xs[0][:, :3] + xs[1][:, :3] + part.relu_()

    layers = nn.Sequential(stashing("part")(aside), popping("part")(write))
    model = SplitPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="shares memory"):
        model(torch.rand(4, 6, requires_grad=True))


@pytest.mark.parametrize("change", [lambda module: module.eval(), lambda module: module.requires_grad_(False)])
def test_modes_and_flags_that_change_before_backward(change: Any) -> None:
    class Mode(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * 2 if self.training else x.sin() * 3

    plain, model = twins(nn.Sequential(nn.Linear(3, 3), Mode(), nn.Dropout(0.0)), [1, 2], chunks=2, checkpoint="always")
    x = torch.rand(4, 3)
    for m in (plain, model):
        loss = m(x).square().sum()
        change(m)
        loss.backward()
    assert model[1].training is plain[1].training and model[0].weight.requires_grad is plain[0].weight.requires_grad
    assert_same_tensors(model, plain)


def test_disabled_hooks_are_an_error_with_a_way_out() -> None:
    model = SplitPipe(mlp(), [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises(RuntimeError, match="not here.*checkpoint='never'"):
            model(torch.rand(4, 6))


def test_a_layer_that_writes_to_its_parameters_is_an_error() -> None:
    model = SplitPipe(nn.Sequential(nn.Embedding(10, 6, max_norm=0.5), nn.Linear(6, 6)), [1, 1], devices=["cpu"] * 2,
                      chunks=2, checkpoint="always")
    loss = model(torch.arange(4)).sum()
    with pytest.raises(RuntimeError, match=r"max_norm.*checkpoint='never'"):
        loss.backward()


def hooks_its_input(self: Any, x: Tensor) -> Tensor:
    """Makes the gradient of its input twice as large."""
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    y: Tensor = self.layer(x).tanh()
    return y


@pytest.mark.parametrize("options", [
    {}, {"checkpoint": "except_last"}, {"schedule": "1f1b"}, {"schedule": "zb-h1"}, {"backward": "autograd"},
], ids=str)
@pytest.mark.parametrize("by", ["balance", "cuts"])
def test_hooks_that_a_layer_hangs_on_its_input_count_once(options: dict[str, Any], by: str) -> None:
    hooking = [module_of(hooks_its_input, **linears("layer")) for _ in range(2)]
    layers = nn.Sequential(nn.Linear(4, 4), *hooking, nn.Linear(4, 4))
    assert_steps(*twins(layers, by=by, **{"chunks": 3, "checkpoint": "always", **inside(options)}), torch.rand(6, 4))


@pytest.mark.thorough
def test_odd_strides_are_recomputed_as_they_lay() -> None:
    expand = Apply(lambda y: (y[:, :1].expand(-1, 4), y.repeat(1, 2)[:, 1:5]))

    def reshaped(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return *pair, *[x.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4) for x in pair]

    for options in {"backward": "split"}, {"schedule": "zb-h1"}:
        joined = Apply(lambda several: torch.stack(several).sum(0))
        layers = nn.Sequential(nn.Linear(4, 4), expand, Apply(reshaped), joined)
        assert_steps(*twins(layers, [2, 1, 1], chunks=3, checkpoint="always", **inside(options)), torch.rand(6, 4))


#: Inputs that aren't in one piece: of these, matmul saves the weight first.
LAYOUTS: dict[str, Any] = {
    "slice": lambda x: x[:, -2:],
    "transposed": lambda x: x.transpose(1, 2),
    "expanded": lambda x: x[:, :1].expand(-1, 2, -1),
    "overlapping": lambda x: x.flatten(1).unfold(1, 4, 1)[:, :2],
}


def assert_recomputed_as_it_lay(name: str, by: str = "cuts", hooks: Any = None, **options: Any) -> None:
    made, where = (Looped, {"cuts": ["2"]}) if by == "cuts" else (nn.Sequential, {"balance": [2, 1]})
    plain, x = made(nn.Linear(4, 4), Apply(LAYOUTS[name]), nn.Linear(4, 4)), torch.rand(4, 4, 4)
    model = SplitPipe(copy.deepcopy(plain), **inside({
        "devices": ["cpu"] * 2, "chunks": 2, "checkpoint": "always", **where, **options,
    }))
    loss_of(plain, x).backward()
    with hooks or contextlib.nullcontext():
        loss = loss_of(model, x)
    loss.backward()
    assert_same_tensors(model, plain)


@pairwise(name=[*LAYOUTS], by=["cuts", "balance"], backward=["split", "autograd"], schedule=["gpipe", "1f1b"])
def test_the_first_step_recomputes_an_input_as_it_lay(name: str, by: str, backward: Any, schedule: str) -> None:
    assert_recomputed_as_it_lay(name, by, backward=backward, schedule=schedule)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_input_that_hooks_lay_out_anew_is_recomputed_as_it_lay(name: str) -> None:
    # As save_on_cpu(pin_memory=True) does.
    hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.contiguous, lambda x: x)
    assert_recomputed_as_it_lay(name, hooks=hooks)


def test_no_windows_of_some_rows_are_laid_out_anew() -> None:
    windows = torch.rand(4, 4)[::2, :3].unfold(1, 2, 1)[:0]
    again = SavedInput(windows, (lambda x: torch.empty(x.shape), lambda x: x)).again("a stage")
    assert again.shape == (0, 2, 2) and again.stride() == windows.stride() == (8, 1, 1)


@pytest.mark.parametrize("by", ["cuts", "balance"])
def test_factors_that_a_recomputation_lays_out_otherwise_are_an_error(by: str) -> None:
    # Of such factors, matmul may save the second one first.
    def squared(x: Tensor) -> Tensor:
        return (x.t().contiguous().t() if is_recomputing() else x.clone()) @ x.clone()

    layers = nn.Sequential(nn.Linear(4, 4), Apply(squared), nn.Linear(4, 4))
    _, model = twins(layers, [1, 2], by=by, chunks=2, checkpoint="always", backward="autograd")
    loss = loss_of(model, torch.rand(8, 4))
    with pytest.raises(RuntimeError, match=r"saved .*\(1, 4\)\) as its tensor 1, but the forward saved .*\(4, 1\)\)"):
        loss.backward()


def test_an_input_made_to_require_grad_may_be_handed_on() -> None:
    def slope(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        if not x.requires_grad:
            x.requires_grad_()
        (grad,) = torch.autograd.grad(self.layer(x).tanh().sum(), x, create_graph=True)
        return x, grad

    layers = nn.Sequential(module_of(slope, **linears("layer")), Apply(lambda pair: pair[0] * pair[1]))
    plain, model = twins(layers, [1, 1], chunks=2, checkpoint="always")
    assert_steps(plain, model, torch.rand(6, 4), grad=False)


def sees(self: Any, x: Tensor) -> Tensor:
    """Refers weakly to the tensors that it is given."""
    self.seen.append(weakref.ref(x))
    y: Tensor = self.layer(x)
    return y


def test_the_graph_of_a_checkpointed_input_is_freed() -> None:
    layer = module_of(sees, **linears("layer"), seen=[])
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4), layer), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    gc.collect()
    gc.disable()
    try:
        loss = model(torch.rand(4, 4)).sum()
        assert [ref() for ref in layer.seen] == [None, None]
        loss.backward()
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [
    {}, {"backward": "autograd"}, {"schedule": "1f1b"}, {"schedule": "zb-h1"},
    {"schedule": "1f1b", "backward": "autograd"},
], ids=str)
def test_a_stage_runs_again_once(options: dict[str, Any]) -> None:
    layer = module_of(sees, **linears("layer"), seen=[])
    model = SplitPipe(nn.Sequential(layer, nn.Linear(4, 4)), [1, 1], devices=["cpu"] * 2, chunks=3,
                      checkpoint="always", **inside(options))
    for _ in range(2):
        layer.seen.clear()
        loss_of(model, torch.rand(6, 4)).backward()
        assert len(layer.seen) == 2 * 3
