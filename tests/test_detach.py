"""splitpipe.detach: the plain module comes back, and can become a pipeline again."""
from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe, detach
from splitpipe.partition import placement
from tests.helpers.modules import linears, module_of
from tests.helpers.twin import assert_same

GIVEN: dict[str, Any] = {"devices": ["cpu", "cpu"], "chunks": 2}


class Net(nn.Module):
    """A forward of its own, with a hidden norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).relu() * scale)
        return out


def layers() -> nn.Sequential:
    return nn.Sequential(OrderedDict(first=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), last=nn.Linear(4, 2)))


#: What makes a module, and a pipeline of it.
WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "balance": (layers, partial(SplitPipe, balance=[1, 2], **GIVEN)),
    "cuts": (Net, partial(SplitPipe, cuts=["last"], **GIVEN)),
    "attach": (Net, partial(splitpipe.attach, cuts=["last"], **GIVEN)),
}
attached = WAYS["attach"][1]
ways = pytest.mark.parametrize("way", [*WAYS])


@ways
@pytest.mark.parametrize("options", [
    {}, {"checkpoint": "always"}, {"schedule": "1f1b", "loss_fn": F.mse_loss}, {"deferred_batch_norm": True},
    pytest.param({"compile": {"backend": "aot_eager"}}, marks=[
        pytest.mark.compiles, pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    ]),
], ids=lambda how: "-".join(map(str, how)) or "drop-in")
def test_the_plain_module_comes_back_after_training(way: str, options: dict[str, Any]) -> None:
    make, wrap = WAYS[way]
    given = make()
    twin, parameters, names = copy.deepcopy(given), [*given.parameters()], set(vars(given))
    model, x = wrap(given, **options), torch.randn(6, 4)
    if "schedule" in options:
        model(x, target=torch.randn(6, 2)).backward()
    else:
        model(x).square().sum().backward()
    state = copy.deepcopy(model.state_dict())
    plain = detach(model)
    assert plain is given and type(plain) is type(twin) and set(vars(plain)) == names
    assert all(one is other for one, other in zip(plain.parameters(), parameters, strict=True))
    assert all(parameter.grad is not None for parameter in parameters)
    assert [type(part) for part in plain.modules()] == [type(part) for part in twin.modules()]
    assert all(part._compiled_call_impl is None for part in plain.modules())
    twin.load_state_dict(state)
    for mode in True, False:
        assert_same(plain.train(mode)(x), twin.train(mode)(x), "output")
    assert_same(dict(plain.state_dict()), dict(twin.state_dict()), "state")
    again = wrap(plain, **options)
    assert_same(again.eval()(x), twin.eval()(x), "output of the pipeline made again")


@ways
def test_the_mode_and_later_changes_of_a_pipeline_are_the_plain_modules(way: str) -> None:
    make, wrap = WAYS[way]
    for mode in True, False:
        model, seen = wrap(make()).train(mode), list[int]()
        model.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        plain = detach(model)
        assert plain.training is mode
        plain(torch.randn(4, 4))
        assert seen == [1]


def test_a_forward_of_the_instance_comes_back() -> None:
    module = Net()
    own = vars(module)["forward"] = MethodType(lambda self, x: Net.forward(self, x, 2.0), module)
    x = torch.randn(4, 4)
    expected = module.eval()(x)
    assert_same(attached(module)(x), expected, "output")
    splitpipe.attach(module, ["norm"], **GIVEN)
    assert detach(module) is module and vars(module)["forward"] is own
    assert_same(module(x), expected, "output")


@pytest.mark.compiles
def test_what_the_user_has_compiled_stays_compiled() -> None:
    module = Net().eval()
    module.first.compile(backend="eager")
    own = module.first._compiled_call_impl
    attached(module)(torch.randn(4, 4))
    assert module.first._compiled_call_impl is not own
    assert detach(module).first._compiled_call_impl is own


@ways
def test_what_is_no_pipeline_or_none_any_more_says_where_there_is_one(way: str) -> None:
    make, wrap = WAYS[way]
    parent = nn.ModuleDict({"body": nn.Sequential(model := wrap(make()))})
    with pytest.raises(TypeError, match="is a ModuleDict, not a pipeline: expected a SplitPipe"):
        detach(parent)
    detach(model)
    gone = "is a SplitPipe that was detached"
    if way == "attach":
        gone = "is a Net, not a pipeline: expected a SplitPipe, or an attached module"
    else:
        with pytest.raises(RuntimeError, match="expected calls of the module that splitpipe.detach returned"):
            model(torch.randn(4, 4))
    with pytest.raises(TypeError, match=gone):
        detach(model)


def forward_mode(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).primal


#: What takes plain modules alone, each with an input.
USES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module()(x),
    "trace": lambda model, x: torch.jit.trace(model, x)(x),
    "vmap": lambda model, x: torch.vmap(model)(x[None])[0],
    "forward mode": forward_mode,
    "fx": lambda model, x: torch.fx.symbolic_trace(model)(x),
}
uses = pytest.mark.parametrize("use", [  # A strict export compiles.
    pytest.param(name, marks=[pytest.mark.compiles] * (name == "strict export")) for name in USES
])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:.*:FutureWarning")
@uses
@ways
def test_what_a_pipeline_refuses_the_plain_module_does(way: str, use: str) -> None:
    make, wrap = WAYS[way]
    model, x = wrap(make()).eval(), torch.randn(4, 4)
    expected = model(x)
    if "export" in use and way == "attach":  # A block of it is a plain module.
        assert_same(USES[use](model.first, x), model.first(x), "output")
    if use != "fx" or way != "attach":  # torch.fx runs the class's forward: that of the plain module.
        with pytest.raises(Exception, match=r"SplitPipe was called .*splitpipe\.detach\(model\)"):
            USES[use](model, x)
    assert_same(model(x), expected, "output")
    assert_same(USES[use](detach(model), x), expected, "output")


def test_after_a_move_that_fails_detach_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model, x, calls = SplitPipe(layers, [1, 1], devices=["cpu"] * 2), torch.randn(3, 4), list[Tensor]()
    expected, real = model(x), placement.moved

    def failing(value: Tensor, device: torch.device) -> Tensor:
        calls.append(value)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        return real(value, device)

    monkeypatch.setattr(placement, "moved", failing)
    with pytest.raises(torch.OutOfMemoryError):
        detach(model, device="cpu")
    torch.testing.assert_close(model(x), expected)
    assert detach(model, device="cpu") is layers


def test_printing_an_attached_module_shows_its_pipeline_until_it_is_detached() -> None:
    net = Net()
    before = repr(net)
    for each in (attached(net, schedule="1f1b"), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert repr(each).startswith(
            "Net(\n  cuts=['last'], devices=[cpu, cpu], chunks=2, checkpoint='never', schedule='1f1b'\n")
        assert repr(detach(each)) == before


def test_an_attached_module_says_that_it_is_not_moved_and_its_parent_is() -> None:
    for net in (attached(Net()), copy.deepcopy(attached(Net())), pickle.loads(pickle.dumps(attached(Net())))):
        with pytest.warns(UserWarning, match=r"stages stay on cpu, cpu .*: expected no .*splitpipe.detach\(model, dev"):
            assert net.to("meta").half() is net
        parent = nn.ModuleDict({"net": net, "head": nn.Linear(2, 2)}).to("meta", torch.float32)
        assert parent["head"].weight.is_meta and net.first.weight.dtype == torch.float32
        net(torch.randn(4, 4)).sum().backward()
        assert detach(net).to("meta").first.weight.is_meta  # As the warning says.


def test_a_model_that_was_changed_is_detached_without_a_trace() -> None:
    net = module_of(lambda net, x: net.b(net.a(x)), **linears("a", "b"))
    model = SplitPipe(net, cuts=["b"], devices=["cpu"] * 2, chunks=2)
    for layer in (net.a, nn.Linear(4, 4)):
        net.a = layer
        model(torch.rand(4, 4))
    assert not any(vars(part).get("_compiled_call_impl") for part in detach(model).modules())
