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


def test_stash_without_pop_is_told():
    assert told(StashFoo()) == [
        "- layer '0' (StashFoo) stashes 'foo', which no layer pops: declare pop=['foo'] in a later layer."
    ]


def test_pop_without_stash_is_told_with_its_place_at_any_depth():
    (fault,) = told(nn.Sequential(nn.ReLU(), PopFoo()))
    assert fault.startswith("- layer '0.1' (PopFoo) pops 'foo', which no layer stashes: declare stash=")


def test_pop_before_stash_is_told():
    assert told(PopFoo(), StashFoo()) == [
        "- layer '0' (PopFoo) pops 'foo' before layer '1' (StashFoo) stashes it: move it after that layer."
    ]


def test_name_used_by_two_pairs_is_told():
    stash_again, pop_again = told(StashFoo(), PopFoo(), StashFoo(), PopFoo())
    assert stash_again.startswith("- layer '2' (StashFoo) stashes 'foo', as layer '0' (StashFoo) does: give")
    assert pop_again.startswith("- layer '3' (PopFoo) pops 'foo', as layer '1' (PopFoo) does: give")


def test_layer_that_occurs_twice_is_told():
    same = StashFoo()
    (fault,) = told(same, same, PopFoo())
    assert "layer '1' (StashFoo) stashes 'foo', as layer '0'" in fault


def test_name_stashed_and_popped_by_one_layer_is_told():
    (fault,) = told(skip(stash=["foo"], pop=["foo"]))
    assert fault.startswith("- layer '0' (Identity) both stashes and pops 'foo'")


def test_ends_in_different_namespaces_are_told():
    ns = Namespace()
    unknown, never_popped = told(StashFoo().isolate(ns), PopFoo())
    assert "pops 'foo', which no layer stashes: declare" in unknown
    assert f"stashes 'foo' of {ns!r}, which no layer pops" in never_popped
    assert never_popped.endswith("isolated by the same namespace.")


def test_all_mistakes_are_told_together():
    lines = told(PopFoo(), StashFoo(), skip(stash=["a"]), skip(pop=["b"]), skip(stash=["c"], pop=["c"]))
    assert len(lines) == 4


def test_layer_inside_a_skippable_may_pop_what_that_stashes_but_not_the_reverse():
    outer = StashFoo()
    outer.module.inner = PopFoo()
    verify_skippables(nn.Sequential(outer))
    outer = PopFoo()
    outer.module.inner = StashFoo()
    (fault,) = told(outer)
    assert "layer '0' (PopFoo) pops 'foo' before layer '0.module.inner' (StashFoo)" in fault


class Forgot(nn.Module):
    def forward(self, input):
        foo = yield pop("foo")
        return input + foo


def test_a_layer_that_forgot_the_decorator_is_named_at_any_depth():
    fault = "yields in its forward but isn't skippable: put @skippable(stash=[...], pop=[...]) above class Forgot."
    assert told(nn.ReLU(), nn.Sequential(Forgot()), nn.Linear(2, 2)) == [f"- layer '1.0' (Forgot) {fault}"]


def test_a_stash_whose_pop_forgot_the_decorator_names_both():
    stashes, forgot = told(StashFoo(), Forgot())
    assert stashes.startswith("- layer '0' (StashFoo) stashes 'foo'") and forgot.startswith("- layer '1' (Forgot) ")


def test_a_module_that_yields_inside_a_layer_is_that_layers_own_business():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Forgot()

        def forward(self, input):
            return (yield from self.inner(input))

    verify_skippables(nn.Sequential(StashFoo(), skippable(pop=["foo"])(Outer)()))
