"""A skip goes from the layer that stashes it to the one that pops it; every mistake names it."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from threading import Barrier

import pytest
import torch
from torch import nn

from splitpipe.core.thread_state import bound
from splitpipe.skip import Namespace, pop, skippable, stash
from splitpipe.skip.skippable import crossing
from splitpipe.skip.tracker import current, opened

FOO = (None, "foo")


@skippable(stash=["foo"])
class StashFoo(nn.Module):
    """Stashes its input."""

    def __init__(self, scale: float = 10.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, input):
        yield stash("foo", input)
        return input * self.scale


@skippable(pop=["foo"])
class PopFoo(nn.Module):
    def forward(self, input):
        foo = yield pop("foo")
        return input + foo


def layer(*commands, stashes=(), pops=()):
    """Yields the commands, and returns the answers; meanwhile, grad mode is off."""

    def forward(self, input):
        answers = []
        with torch.no_grad():
            for command in commands:
                answers.append((yield command))
        return answers

    return skippable(stash=stashes, pop=pops)(type("Layer", (nn.Module,), {"forward": forward}))()


def stashing(name, value=None):
    return layer(stash(name, value), stashes=[name])


def popping(*names):
    return layer(*map(pop, names), pops=names)


@pytest.fixture(autouse=True)
def box():
    with bound(opened, {}) as box:
        yield box


def test_value_passes_the_layers_in_between_and_its_gradient_comes_back(box):
    model = nn.Sequential(StashFoo(10.0), nn.ReLU(), PopFoo())
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = model(x)
    assert y.tolist() == [11.0, 22.0] and not box
    y.sum().backward()
    assert x.grad.tolist() == [11.0, 11.0]


def test_layer_inside_a_skippable_pops_what_that_stashes(box):
    @skippable(stash=["foo"])
    class Outer(nn.Module):
        def forward(self, input):
            yield stash("foo", input)
            return PopFoo()(input * 10)

    assert Outer()(1) == 11 and not box


def test_unwrapped_models_run_in_several_threads_at_once():
    both = Barrier(2, timeout=60)

    model = nn.Sequential(StashFoo(10.0), nn.ReLU(), PopFoo())
    model[1].register_forward_hook(lambda *_: (both.wait(), None)[1])

    def run(value):
        return Context().run(lambda: (model(torch.tensor(value)).item(), current()))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, [1.0, 2.0])) == [(11.0, {}), (22.0, {})]


def test_stale_skip_of_a_failed_forward_is_replaced():
    def run():
        with pytest.raises(RuntimeError):
            nn.Sequential(StashFoo(), nn.Linear(2, 2), PopFoo())(torch.tensor([1.0]))
        assert nn.Sequential(StashFoo(10.0), PopFoo())(torch.tensor(2.0)) == 22.0
        assert not current()

    Context().run(run)


def test_popping_what_was_not_stashed_names_all_of_it(box):
    box[(None, "b")] = "stays"
    with pytest.raises(RuntimeError, match=r"Layer pops \['a', 'c'\], which no earlier layer stashed"):
        popping("c", "b", "a")(0)
    assert box == {(None, "b"): "stays"}


@pytest.mark.parametrize(("commands", "error", "told"), [
    ([stash("bar", 1)], RuntimeError, r"Layer yielded stash\('bar'\): expected each of \['foo'\]"),
    ([pop("foo")], RuntimeError, r"Layer yielded pop\('foo'\): expected each of \['baz'\]"),
    ([stash("foo", 1), stash("foo", 2)], RuntimeError, r"Layer yielded stash\('foo'\): expected each"),
    ([pop("baz"), pop("baz")], RuntimeError, r"Layer yielded pop\('baz'\): expected each"),
    ([torch.zeros(1)], TypeError, "Layer yielded a Tensor: expected"),
    ([stash], TypeError, "Layer yielded a type: expected"),
    ([], RuntimeError, r"Layer didn't yield \['foo', 'baz'\]: expected"),
])
def test_wrong_yield_is_told(commands, error, told, box):
    box[(None, "baz")] = 0
    with pytest.raises(error, match=told) as caught:
        layer(*commands, stashes=["foo"], pops=["baz"])(0)
    # The error holds the frame that holds the generator: only a close ends it now.
    assert torch.is_grad_enabled() and caught.tb is not None


def test_pairs_of_one_name_in_namespaces_do_not_meet(box):
    ns1, ns2 = Namespace(), Namespace()
    model = nn.Sequential(
        stashing("foo", None).isolate(ns1), stashing("foo", 2).isolate(ns2), popping("foo").isolate(ns1))
    assert model(0) == [None]
    assert box == {(ns2, "foo"): 2}


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # The compiler's own, since torch 2.14.
def test_layers_compiled_one_by_one_find_the_box_of_each_run():
    first, last = torch.compile(StashFoo(10.0), backend="eager"), torch.compile(PopFoo(), backend="eager")
    for value in (1.0, 2.0):
        with bound(opened, {}) as box:
            y = first(torch.tensor([value]))
            skip = box[FOO]
        with bound(opened, {FOO: skip}) as box:
            assert last(y).tolist() == [11 * value]
        assert not box


def test_skips_between_stages_include_those_inside_layers():
    ns = Namespace()
    inner = nn.Sequential(stashing("a"), nn.Sequential(StashFoo(), StashFoo().isolate(ns), PopFoo()))
    others = popping("a"), nn.ReLU(), nn.Sequential(PopFoo().isolate(ns))
    stages = [[("", part)] for part in (inner, *others)]
    assert crossing(stages) == {(None, "a"): (0, 1), (ns, "foo"): (0, 3)}
