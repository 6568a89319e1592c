"""What can't be right in microbatches, or in stages with graphs of their own, is refused, never silently wrong."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe import SplitPipe, attach
from tests.engine.models import piped
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same


def three(forward: Callable[..., Any]) -> Any:
    """Three layers, one a stage; what happens between them is a test's own."""
    return module_of(forward, **linears("a", "b", "c"))


def skip(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Keeps a hidden state in an attribute."""
    net.skip = net.a(x)
    y = net.c(net.b(net.skip) + net.skip)
    return {"loss": y.square().mean(), "y": y}


def masked(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Keeps a mask of its rows in an attribute."""
    net.mask = x > 0
    y = net.c(net.b(net.a(x)) * net.mask)
    return {"loss": y.square().mean(), "y": y}


def force(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Differentiates through what earlier stages have computed."""
    h = net.a(x)
    y = net.c(net.b(h).tanh() * h) + h
    (force,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
    return {"loss": (y - 0.1 * force).square().mean(), "y": y}


def view(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Writes to a view of a hidden state, and uses the whole two stages on."""
    h = net.a(x) * 1
    view = h[:, :2]
    y = net.b(x)
    view.mul_(y[:, :2].sigmoid())
    y = net.c(y) + view.sum(1, keepdim=True) + h
    return {"loss": y.square().mean(), "y": y}


def base(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Writes to a hidden state, and uses a view that was made before."""
    h = net.a(x) * 1
    view = h[:, :2]
    y = net.b(x)
    h.mul_(y.sigmoid())
    y = net.c(y) + view.sum(1, keepdim=True)
    return {"loss": y.square().mean(), "y": y}


def statistic(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Gives a value that is another one for each microbatch, and has no rows."""
    y = net.c(net.b(net.a(x)))
    return {"loss": y.square().mean(), "largest": y.amax(0)}


def contrast(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Compares each row with all others."""
    y = net.c(net.b(net.a(x)))
    return {"loss": y.square().mean(), "logits": y @ y.T}


def made(net: nn.Module, **options: Any) -> SplitPipe:
    return SplitPipe(net, cuts=["b", "c"], devices=["cpu"] * 3, chunks=2, **options)


def sparse(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Makes a hidden state sparse, and uses it a stage on."""
    h = net.a(x).to_sparse()
    y = net.c(net.b(x)) + h.to_dense()
    return {"loss": y.square().mean(), "y": y}


@pytest.mark.parametrize(("module", "words"), [
    (3, "expected an nn.Module"), (torch.jit.ScriptModule(), "module is a torch.jit.ScriptModule: expected"),
    (nn.ModuleDict({"b": torch.jit.ScriptModule()}), "'b' is a torch.jit.ScriptModule: expected modules whose forward"),
])
def test_attach_refuses_torchscript_and_other_objects(module: Any, words: str) -> None:
    for cuts in (["b"], None):
        with pytest.raises(TypeError, match=words):
            attach(module, cuts)


def test_a_sequential_with_a_layer_of_torchscript_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(torch.jit.ScriptModule()))
    with pytest.raises(TypeError, match=r"'1\.0' is a torch\.jit\.ScriptModule: expected modules whose forward"):
        SplitPipe(layers, balance=[1, 1], devices=["cpu"] * 2)


def hooked(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Asks for facts of a hidden state that it has changed in place."""
    h = net.a(x) * 1
    y = net.b(x)
    h.unsqueeze_(1).mul_(2)
    assert h.dim() == 3 and h.shape[1] == 1
    h.register_hook(lambda grad: 3 * grad)
    y = net.c(y) + h.squeeze(1)
    return {"loss": y.square().mean(), "y": y}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_questions_and_hooks_are_about_what_a_value_has_become(schedule: str) -> None:
    plain, x = three(hooked).double(), torch.randn(8, 4, dtype=torch.float64)
    model = made(copy.deepcopy(plain), schedule=schedule)
    plain(x)["loss"].backward()
    model(x)["loss"].backward()
    for (name, one), other in zip(plain.named_parameters(), model.parameters()):
        torch.testing.assert_close(other.grad, one.grad, msg=lambda text, name=name: f"{name}: {text}")


def two(net: Any, x: Tensor, use_cache: bool = False, **more: Any) -> Tensor:
    """One layer is named as a cut and never called; takes any keyword, and a cache by its place."""
    y: Tensor = net.c(net.a(x)) * (2 if use_cache else 1) * more.get("target", 1)
    return y


def test_a_cut_that_is_never_called_is_warned_of() -> None:
    plain, x = three(two), torch.randn(8, 4)
    model = made(copy.deepcopy(plain))
    with pytest.warns(UserWarning, match="block 'b' .Linear.: named in cuts=, but not called"):
        found = model(x, True, target=3)
    torch.testing.assert_close(found, plain(x, True, target=3))


def recurrent_net(keep: Any) -> Any:
    """Keeps something of [layers, rows, width] in an attribute, as a recurrent state is."""
    def forward(self: Any, x: Tensor) -> Tensor:
        y, state = self.rnn(x, self.state if keep == "state" else None)
        self.state = tuple(s.detach() for s in state) if keep == "state" else keep(x.detach())
        return self.head(y)  # type: ignore[no-any-return]

    return module_of(forward, rnn=nn.LSTM(4, 4, 2, batch_first=True), head=nn.Linear(4, 4), state=None)


@pytest.mark.parametrize("rows", [6, 8, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("keep", [
    "state", lambda x: x.sum(1).t(), lambda x: [None, x[None]], lambda x: {"a": x.sum(2)},
])
def test_a_state_of_a_microbatchs_rows_is_warned_of(keep: Any, schedule: str, rows: int) -> None:
    options = {} if schedule == "gpipe" else {"loss_fn": nn.MSELoss()}
    model = piped(recurrent_net(keep), ["head"], schedule=schedule, **options)
    x = torch.randn(rows, 5, 4)
    with pytest.warns(UserWarning, match="the forward left 'state.*as a microbatch has, in an attribute"):
        try:
            model(x, target=torch.randn(rows, 5, 4)) if options else model(x)
        except RuntimeError as error:  # The last microbatch has other rows than the state.
            assert rows == 8 and keep == "state" and "Expected hidden" in str(error)


@pytest.mark.parametrize("keep", [
    lambda x: torch.zeros(5, 2, 4), lambda x: torch.zeros(2, 3), lambda x: torch.arange(x.shape[1]).view(1, -1, 1),
])
def test_a_table_of_that_size_by_chance_is_not(keep: Any) -> None:
    piped(recurrent_net(keep), ["head"])(torch.randn(6, 2, 4))


def conditioned(net: Any, x: Tensor) -> Tensor:
    """Sets a condition for the layers, and takes it away afterwards."""
    net.condition = net.a(x).tanh()
    y: Tensor = net.c(net.b(x)) * net.condition
    net.condition = None
    return y


def recurrent(net: Any, x: Tensor) -> Tensor:
    """Keeps a pair of states for each layer."""
    h = net.a(x)
    net.states = [(h, h.tanh())]
    y: Tensor = net.c(net.b(h)) * net.states[0][1]
    return y


@dataclass(slots=True)
class State:
    name: str
    hidden: Tensor


def recorded(net: Any, x: Tensor) -> Tensor:
    """Keeps a state in a dataclass."""
    net.state = State("hidden", net.a(x))
    y: Tensor = net.c(net.b(net.state.hidden)) + net.state.hidden
    return y


def doubled(net: Any, x: Tensor) -> Tensor:
    """Calls a layer with other weights."""
    weights = {name: 2 * x for name, x in net.b.named_parameters()}
    y: Tensor = net.c(torch.func.functional_call(net.b, weights, (net.a(x),)))
    return y


#: What no schedule can run, and what only those that go backward themselves can't.
NEVER: list[tuple[Any, type[Exception], str]] = [
    (skip, RuntimeError, "'skip', which was a tensor with a graph, is used by a later stage"),
    (statistic, ValueError, "no dimension of the batch"),
    (contrast, ValueError, "its second dimension is the batch too"),
    (conditioned, RuntimeError, "'condition', which was a tensor with a graph, is used by a later stage"),
    (recurrent, RuntimeError, "'states', which was a tensor with a graph, is used by a later stage"),
    (recorded, RuntimeError, "'state', which was a tensor with a graph, is used by a later stage"),
    (doubled, RuntimeError, "another tensor replaces the parameter 'b.weight'"),
]
BACKWARD: list[tuple[Any, type[Exception], str]] = [
    (force, RuntimeError, "runs backward between blocks"), (view, RuntimeError, "written to in place"),
    (base, RuntimeError, "written to in place"), (sparse, RuntimeError, "with a schedule, expected dense tensors"),
]


@pytest.mark.parametrize(("net", "error", "says", "schedule"), [
    *[(*row, schedule) for row in NEVER for schedule in ("gpipe", "1f1b")], *[(*row, "1f1b") for row in BACKWARD]])
def test_what_stages_would_mix_or_lose_is_an_error_each_time(
    net: Any, error: type[Exception], says: str, schedule: str
) -> None:
    plain, own_loss = three(net), net not in (conditioned, recurrent, recorded, doubled)
    more: dict[str, Any] = {} if own_loss or schedule == "gpipe" else {"loss_fn": nn.MSELoss()}
    model, state = made(plain, schedule=schedule, **more), copy.deepcopy(plain.state_dict())
    for _ in range(2):
        with pytest.raises(error, match=says):
            model(torch.randn(8, 4), **({"target": torch.randn(8, 4)} if more else {}))["loss"].backward()
    assert_same(dict(plain.state_dict()), dict(state), "state")


def lengths(net: Any, x: Tensor) -> Tensor:
    net.lengths = x.argmax(1).tolist()
    y: Tensor = net.c(net.b(net.a(x)))
    return y * torch.tensor(net.lengths)[:, None]


def frozen(net: Any, x: Tensor) -> Tensor:
    net.b.requires_grad_(False)
    y = net.b(net.a(x))
    net.b.requires_grad_(True)
    return y + net.c(y)  # type: ignore[no-any-return]


def evaluated(net: Any, x: Tensor) -> Tensor:
    net.b.eval()
    y = net.b(net.a(x))
    net.b.train()
    return y + net.c(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("net", "says"), [
    (masked, "left 'mask', a tensor of 4 rows"),
    (lengths, r"sets 'lengths' to \[0, 1, 2, 3\] in one microbatch and to \[3, 2, 1, 0\] in the next"),
    (frozen, "changes 'b.bias.requires_grad', 'b.weight.requires_grad', and takes that back after a later stage"),
    (evaluated, "changes 'b.training', and takes that back after a later stage has started"),
])
def test_attributes_set_for_one_microbatch_are_warned_of(net: Any, says: str) -> None:
    model, x = made(three(net)), torch.cat([torch.eye(4), torch.eye(4).flip(0)])
    with pytest.warns(UserWarning, match=says):
        model(x)


def counted(net: Any, x: Tensor) -> Tensor:
    net.calls, net.width, net.names = getattr(net, "calls", 0) + 1, x.shape[1], ["a", "b"]
    y: Tensor = net.c(net.b(net.a(x)))
    return y


@pytest.mark.filterwarnings("error")
def test_attributes_that_are_equal_or_counters_are_not_warned_of() -> None:
    made(three(counted))(torch.randn(8, 4))
