"""A namespace differs from every other and equals its copies."""
from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from splitpipe.skip import Namespace


def test_namespaces_differ():
    assert Namespace() != Namespace()
    assert len({Namespace(), Namespace()}) == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copy_equals_and_hashes_as_the_original(copied):
    namespace = Namespace()
    assert copied(namespace) == namespace
    assert {namespace: "found"}[copied(namespace)] == "found"


def test_namespace_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Namespace().id = None


def test_repr_is_short():
    namespace = Namespace()
    assert repr(namespace) == f"<Namespace {namespace.id.hex[:8]}>"
