"""Every stash meets its pop, or the one report tells every mistake."""
from __future__ import annotations

import pytest
from torch import nn

from splitpipe.skip import Namespace, skippable, verify_skippables
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


@pytest.mark.parametrize(("layers", "faults"), [
    ([StashFoo()], ["- layer '0' (StashFoo) stashes 'foo', which no later layer pops: declare it as pop= in one."]),
    ([nn.Sequential(nn.ReLU(), PopFoo())], ["- layer '0.1' (PopFoo) pops 'foo', which no earlier layer stashes"]),
    ([PopFoo(), StashFoo()], ["- layer '0' (PopFoo) pops 'foo', which no earlier layer stashes"]),
    ([StashFoo(), PopFoo(), StashFoo(), PopFoo()],
     ["- layer '2' (StashFoo) stashes 'foo', as layer '0' (StashFoo) does: rename",
      "- layer '3' (PopFoo) pops 'foo', as layer '1' (PopFoo) does: rename"]),
    ([same := StashFoo(), same, PopFoo()], ["- layer '1' (StashFoo) stashes 'foo', as layer '0'"]),
    ([skip(stash=["foo"], pop=["foo"])], ["- layer '0' (Identity) pops 'foo', which no earlier layer stashes"]),
    ([PopFoo(), StashFoo(), skip(stash=["a"]), skip(pop=["b"])],
     ["- layer '0' (PopFoo) pops 'foo', which no", "- layer '3' (Identity) pops 'b', which no",
      "- layer '2' (Identity) stashes 'a', which no"]),
])
def test_every_mistake_is_told_with_its_place(layers, faults):
    lines = told(*layers)
    assert len(lines) == len(faults) and all(map(str.startswith, lines, faults)), lines


def test_ends_in_different_namespaces_are_told():
    ns = Namespace()
    never_stashed, never_popped = told(StashFoo().isolate(ns), PopFoo())
    assert "pops 'foo', which no earlier layer stashes" in never_stashed
    assert f"stashes 'foo' of {ns!r}, which no later layer pops" in never_popped


def test_layer_inside_a_skippable_may_pop_what_that_stashes_but_not_the_reverse():
    outer = StashFoo()
    outer.module.inner = PopFoo()
    verify_skippables(nn.Sequential(outer))
    outer = PopFoo()
    outer.module.inner = StashFoo()
    (fault,) = told(outer)
    assert "layer '0' (PopFoo) pops 'foo', which no earlier layer stashes" in fault
