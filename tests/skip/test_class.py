"""A decorated class keeps its name, copies and pickles; what is declared wrongly is told, of a class and of a model."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from splitpipe.skip import Namespace, skippable, stash, verify_skippables
from splitpipe.skip.skippable import Skippable
from tests.skip.test_skippable import PopFoo, StashFoo
from tests.skip.test_skippable import box as box


class Outer:
    @skippable(stash=["foo"])
    class Nested(nn.Module):
        def forward(self, input):
            yield stash("foo", input)
            return input


@pytest.mark.parametrize(("arguments", "told"), [
    ({"stash": "skip"}, "found stash='skip': expected a list of names"),
    ({"pop": ["a", 3, None]}, r"found pop=\['a', 3, None\]: expected a list of names"),
])
def test_wrong_declaration_is_told(arguments, told):
    with pytest.raises(TypeError, match=told):
        skippable(**arguments)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_namespace_equals_its_copies_alone(copied):
    namespace = Namespace()
    assert {namespace: "found"}[copied(namespace)] == "found" and namespace != Namespace()


def test_isolate_names_all_or_only_some():
    ns1, ns2 = Namespace(), Namespace()
    both = skippable(stash=["a", "b"], pop=["c"])(nn.Identity)()
    assert both.isolate(ns1) is both
    both.isolate(ns2, only=["c"])
    assert (list(both.stashable()), list(both.poppable())) == ([(ns1, "a"), (ns1, "b")], [(ns2, "c")])
    both.isolate(None, only=["a"])
    assert list(both.stashable()) == [(None, "a"), (ns1, "b")]


@pytest.mark.parametrize(("ns", "only", "told"), [
    (Namespace(), "foo", "found only='foo': expected a list of names"),
    (Namespace(), ["foo", "bar"], r"found \['bar'\] in only: expected some of \['foo'\]"),
    ("foo", None, "found 'foo' as namespace"),
])
def test_wrong_isolation_is_told_and_changes_nothing(ns, only, told):
    one = StashFoo()
    with pytest.raises(TypeError, match=told):
        one.isolate(ns, only=only)
    assert one.namespaces == {}


def test_layer_and_model_copied_apart_still_meet(box):
    ns = Namespace()
    first, last = StashFoo(10.0).isolate(ns), PopFoo().isolate(ns)
    assert nn.Sequential(copy.deepcopy(first), last)(torch.tensor(1.0)) == 11.0
    assert copy.deepcopy(nn.Sequential(first, last))(torch.tensor(1.0)) == 11.0
    assert not box


def test_pickled_model_is_the_same():
    model = nn.Sequential(StashFoo(3.0), Outer.Nested().isolate(Namespace()), PopFoo())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert repr(loaded) == repr(model)
        assert [list(x.stashable()) for x in loaded] == [list(x.stashable()) for x in model]
        assert loaded[0](torch.tensor(1.0)) == 3.0


def test_decorated_class_keeps_name_module_and_doc():
    assert StashFoo.__doc__ == "Stashes its input." and issubclass(StashFoo, Skippable)
    assert (Outer.Nested.__module__, Outer.Nested.__qualname__) == (__name__, "Outer.Nested")
    assert repr(plain := skippable()(nn.Identity)()) == "@skippable(Identity())" and plain(3) == 3


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
    verify_skippables(nn.Sequential(StashFoo().isolate(ns1), StashFoo().isolate(ns2), StashFoo(), PopFoo().isolate(ns2),
                                    PopFoo(), PopFoo().isolate(ns1)))


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
