"""A skip goes from the layer that stashes it to the one that pops it; every mistake is told by name."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from threading import Barrier

import pytest
import torch
from torch import nn

from splitpipe.skip import Namespace, pop, skippable, stash
from splitpipe.skip.box import current, opened
from splitpipe.skip.pairs import pops, stashes

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


class Fail(nn.Module):
    def forward(self, input):
        raise KeyError("on purpose")


def layer(forward, stash=(), pop=(), name="Layer"):
    return skippable(stash=stash, pop=pop)(type(name, (nn.Module,), {"forward": forward}))()


def stash_all(*names, value=None):
    def forward(self, input):
        for name in names:
            yield stash(name, value)
        return input

    return layer(forward, stash=names, name="StashAll")


def pop_all(*names):
    def forward(self, input):
        values = []
        for name in names:
            values.append((yield pop(name)))
        return values

    return layer(forward, pop=names, name="PopAll")


@pytest.fixture(autouse=True)
def box():
    with opened({}) as box:
        yield box


def test_value_passes_the_layers_in_between_and_its_gradient_comes_back(box):
    model = nn.Sequential(StashFoo(10.0), nn.ReLU(), PopFoo())
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = model(x)
    assert y.tolist() == [11.0, 22.0] and not box
    y.sum().backward()
    assert x.grad.tolist() == [11.0, 11.0]


@pytest.mark.parametrize(
    "value",
    [torch.tensor([1, 2]), torch.rand(2), torch.tensor(True), None, [None, (torch.rand(1), {"a": 3})]],
    ids=["integer", "float", "bool", "None", "nesting"],
)
def test_any_value_arrives_as_it_is(value, box):
    (arrived,) = nn.Sequential(stash_all("foo", value=value), pop_all("foo"))(0)
    assert arrived is value
    assert not box


def test_layer_without_yield_gives_its_value():
    plain = layer(lambda self, input: input + 1)
    assert plain(1) == 2


def test_one_layer_stashes_and_pops_different_names(box):
    def forward(self, input):
        foo = yield pop("foo")
        yield stash("bar", foo + 1)
        return input

    both = layer(forward, stash=["bar"], pop=["foo"])
    assert nn.Sequential(stash_all("foo", value=1), both, pop_all("bar"))(0) == [2]
    assert not box


def test_commands_can_come_from_a_helper():
    def helper(input):
        foo = yield pop("foo")
        return foo + input

    def forward(self, input):
        return (yield from helper(input))

    assert nn.Sequential(stash_all("foo", value=1), layer(forward, pop=["foo"]))(5) == 6


def test_opened_box_holds_what_arrives_and_what_leaves():
    with opened({FOO: torch.tensor(1.0)}) as box:
        assert PopFoo()(torch.tensor(2.0)) == 3.0
        assert box == {}
        StashFoo()(torch.tensor(5.0))
        assert box == {FOO: torch.tensor(5.0)}


def test_popped_value_is_out_of_the_box_while_the_layer_runs(box):
    seen = []

    def forward(self, input):
        yield pop("foo")
        seen.append(dict(box))
        return input

    box[FOO] = 1
    layer(forward, pop=["foo"])(0)
    assert seen == [{}]


def test_layer_inside_a_skippable_pops_what_that_stashes(box):
    def forward(self, input):
        yield stash("foo", input)
        return self.inner(input * 10)

    outer = layer(forward, stash=["foo"])
    outer.module.inner = PopFoo()
    assert outer(1) == 11
    assert not box


def test_unwrapped_models_run_in_several_threads_at_once():
    both = Barrier(2, timeout=60)

    def meet(self, input):
        both.wait()
        return input

    model = nn.Sequential(StashFoo(10.0), layer(meet), PopFoo())

    def run(value):
        return Context().run(lambda: (model(torch.tensor(value)).item(), current()))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, [1.0, 2.0])) == [(11.0, {}), (22.0, {})]


def test_stale_skip_of_a_failed_forward_is_replaced():
    def run():
        with pytest.raises(KeyError):
            nn.Sequential(StashFoo(), Fail(), PopFoo())(torch.tensor(1.0))
        assert nn.Sequential(StashFoo(10.0), PopFoo())(torch.tensor(2.0)) == 22.0
        assert not current()

    Context().run(run)


def test_popping_what_was_not_stashed_names_all_of_it(box):
    box[(None, "b")] = "stays"
    with pytest.raises(RuntimeError, match=r"PopAll pops \['a', 'c'\], which weren't stashed"):
        pop_all("c", "b", "a")(0)
    assert box == {(None, "b"): "stays"}


def test_namespace_of_another_does_not_count_as_stashed(box):
    box[(Namespace(), "foo")] = 1
    with pytest.raises(RuntimeError, match=r"pops \['foo'\]"):
        PopFoo()(torch.tensor(1.0))


def test_declared_but_unused_names_are_told_together(box):
    box.update({(None, name): 1 for name in "cd"})
    idle = layer(lambda self, input: input, stash=["b", "a"], pop=["d", "c"])
    with pytest.raises(RuntimeError, match=r"Layer declares stash=\['a', 'b'\] and pop=\['c', 'd'\] but didn't"):
        idle(0)


def yields(*commands):
    def forward(self, input):
        for command in commands:
            answer = yield command
        return answer

    return forward


@pytest.mark.parametrize(
    ("commands", "error", "told"),
    [
        ([stash("bar", 1)], RuntimeError, r"Layer yielded stash\('bar'\), .* one of \['foo'\]"),
        ([pop("foo")], RuntimeError, r"Layer yielded pop\('foo'\), .* one of \['baz'\]"),
        ([stash("foo", 1), stash("foo", 2)], RuntimeError, r"Layer yielded stash\('foo'\) twice"),
        ([pop("baz"), pop("baz")], RuntimeError, r"Layer yielded pop\('baz'\) twice"),
        ([torch.zeros(1)], TypeError, "Layer yielded a value of type Tensor"),
        ([stash], TypeError, "Layer yielded a value of type type"),
    ],
)
def test_wrong_yield_is_told(commands, error, told, box):
    box[(None, "baz")] = 0
    with pytest.raises(error, match=told):
        layer(yields(*commands), stash=["foo"], pop=["baz"])(0)


def test_failed_layer_leaves_nothing_of_its_own_in_the_box(box):
    def forward(self, input):
        yield stash("bar", 2)
        raise KeyboardInterrupt

    box.update({FOO: 1, (None, "other"): 3})
    with pytest.raises(KeyboardInterrupt):
        layer(forward, stash=["bar"], pop=["foo"])(0)
    assert box == {(None, "other"): 3}


@pytest.mark.parametrize(("command", "kind"), [(pop("unknown"), RuntimeError), (3, TypeError)])
def test_generator_is_closed_when_an_error_passes(command, kind):
    def forward(self, input):
        with torch.no_grad():
            yield command

    # The error holds the frame that holds the generator: only a close ends it now.
    with pytest.raises(kind) as error:
        layer(forward)(0)
    assert torch.is_grad_enabled()
    assert error.tb is not None


def test_pairs_of_one_name_in_namespaces_do_not_meet(box):
    ns1, ns2 = Namespace(), Namespace()
    model = nn.Sequential(
        stash_all("foo", value=1).isolate(ns1),
        stash_all("foo", value=2).isolate(ns2),
        pop_all("foo").isolate(ns1),
    )
    assert model(0) == [1]
    assert box == {(ns2, "foo"): 2}


@pytest.mark.thorough
@pytest.mark.compiles
def test_compiled_model_gives_the_same(box):
    model = nn.Sequential(StashFoo(10.0), nn.ReLU(), PopFoo())
    compiled = torch.compile(model, backend="eager")
    for value in (1.0, 2.0):
        x = torch.tensor([value])
        assert compiled(x).tolist() == model(x).tolist() == [11 * value]
        with opened({}) as inner:
            assert compiled(x).tolist() == [11 * value]
        assert not inner
    assert not box


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # The compiler's own, since torch 2.14.
def test_layers_compiled_one_by_one_find_the_box_of_each_run():
    first, last = torch.compile(StashFoo(10.0), backend="eager"), torch.compile(PopFoo(), backend="eager")
    for value in (1.0, 2.0):
        with opened({}) as box:
            y = first(torch.tensor([value]))
            skip = box[FOO]
        with opened({FOO: skip}) as box:
            assert last(y).tolist() == [11 * value]
        assert not box


def test_skips_of_a_layer_include_those_inside_it():
    ns = Namespace()
    inner = nn.Sequential(stash_all("b", "a"), nn.Sequential(PopFoo(), StashFoo().isolate(ns)))
    assert stashes(inner) == [(None, "a"), (None, "b"), (ns, "foo")]
    assert pops(inner) == [FOO]
    assert stashes(nn.ReLU()) == pops(nn.ReLU()) == []
