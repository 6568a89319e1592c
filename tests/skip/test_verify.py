"""Every stash meets its pop, or the one report tells every mistake."""
from __future__ import annotations

import pytest
from torch import nn

from splitpipe.skip import Namespace, pop, skippable, verify_skippables
from tests.skip.test_skippable import PopFoo, StashFoo


def skip(stash=(), pop=()):
    return skippable(stash=stash, pop=pop)(nn.Identity)()


def told(*layers):
    with pytest.raises(TypeError) as error:
        verify_skippables(nn.Sequential(*layers))
    return str(error.value).splitlines()[1:]


def test_matching_pairs_are_accepted():
    verify_skippables(nn.Sequential(nn.ReLU()))
    verify_skippables(nn.Sequential(skip(stash=["a", "b"]), nn.Sequential(skip(pop=["b"])), skip(pop=["a"])))
    ns1, ns2 = Namespace(), Namespace()
    verify_skippables(nn.Sequential(
        StashFoo().isolate(ns1), StashFoo().isolate(ns2), StashFoo(), PopFoo().isolate(ns2), PopFoo(),
        PopFoo().isolate(ns1),
    ))


FORGOT = "yields in its forward but isn't skippable: put @skippable(stash=[...], pop=[...]) above class Forgot."


class Forgot(nn.Module):
    def forward(self, input):
        foo = yield pop("foo")
        return input + foo


@pytest.mark.parametrize(("layers", "faults"), [
    ([StashFoo()],
     ["- layer '0' (StashFoo) stashes 'foo', which no layer pops: declare pop=['foo'] in a later layer."]),
    ([nn.Sequential(nn.ReLU(), PopFoo())],
     ["- layer '0.1' (PopFoo) pops 'foo', which no layer stashes: declare stash="]),
    ([PopFoo(), StashFoo()],
     ["- layer '0' (PopFoo) pops 'foo' before layer '1' (StashFoo) stashes it: move it after that layer."]),
    ([StashFoo(), PopFoo(), StashFoo(), PopFoo()],
     ["- layer '2' (StashFoo) stashes 'foo', as layer '0' (StashFoo) does: give",
      "- layer '3' (PopFoo) pops 'foo', as layer '1' (PopFoo) does: give"]),
    ([same := StashFoo(), same, PopFoo()], ["- layer '1' (StashFoo) stashes 'foo', as layer '0'"]),
    ([skip(stash=["foo"], pop=["foo"])], ["- layer '0' (Identity) both stashes and pops 'foo'"]),
    ([nn.ReLU(), nn.Sequential(Forgot()), nn.Linear(2, 2)], [f"- layer '1.0' (Forgot) {FORGOT}"]),
    ([StashFoo(), Forgot()], ["- layer '0' (StashFoo) stashes 'foo'", "- layer '1' (Forgot) "]),
    ([PopFoo(), StashFoo(), skip(stash=["a"]), skip(pop=["b"]), skip(stash=["c"], pop=["c"])],
     ["- layer '0' (PopFoo) pops 'foo' before", "- layer '3' (Identity) pops 'b', which no",
      "- layer '4' (Identity) both stashes and pops 'c'", "- layer '2' (Identity) stashes 'a', which no"]),
])
def test_every_mistake_is_told_with_its_place(layers, faults):
    lines = told(*layers)
    assert len(lines) == len(faults) and all(map(str.startswith, lines, faults)), lines


def test_ends_in_different_namespaces_are_told():
    ns = Namespace()
    unknown, never_popped = told(StashFoo().isolate(ns), PopFoo())
    assert "pops 'foo', which no layer stashes: declare" in unknown
    assert f"stashes 'foo' of {ns!r}, which no layer pops" in never_popped
    assert never_popped.endswith("isolated by the same namespace.")


def test_layer_inside_a_skippable_may_pop_what_that_stashes_but_not_the_reverse():
    outer = StashFoo()
    outer.module.inner = PopFoo()
    verify_skippables(nn.Sequential(outer))
    outer = PopFoo()
    outer.module.inner = StashFoo()
    (fault,) = told(outer)
    assert "layer '0' (PopFoo) pops 'foo' before layer '0.module.inner' (StashFoo)" in fault


def test_a_module_that_yields_inside_a_layer_is_that_layers_own_business():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Forgot()

        def forward(self, input):
            return (yield from self.inner(input))

    verify_skippables(nn.Sequential(StashFoo(), skippable(pop=["foo"])(Outer)()))
