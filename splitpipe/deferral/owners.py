"""The nodes of a graph that own a weight: one of their edges leads to a leaf, directly or through casts and views.

    leaf <── cast <── transpose <── addmm        the owner, with a rule; the nodes between it and the leaf are the
    *tail*

W computes the gradient where the tail begins, and the tail is run through afterwards, including hooks of its tensors.
If anything else also leads to a leaf, the leaf is B's, with all of its owners: autograd returns its gradient as one
sum.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from splitpipe.core.graph import Edge
from splitpipe.core.tensors import is_plain
from splitpipe.core.torch_private import AccumulateGrad
from splitpipe.deferral.function import WeightGradients
from splitpipe.deferral.pending import Kind, WeightGroup
from splitpipe.deferral.rules import RULES, GainsOf, Rule

_TRANSPOSED = "TBackward0"
#: For these, any microbatch's nodes can be run through with the sum of all.
_ALIKE = frozenset([_TRANSPOSED, "ToCopyBackward0"])
#: Nodes with one input, which take almost no time and save no tensor.
_TAIL = _ALIKE | frozenset(
    f"{name}Backward{number}" for name in
    "View ReshapeAlias UnsafeView Transpose Permute Unsqueeze Squeeze Slice Select Split SplitWithSizes Unbind Narrow "
    "Expand Alias AsStrided".split() for number in (0, 1)
)
_TURNED = (_TRANSPOSED,)
#: Our own nodes within a stage.
_WITHIN = frozenset(f"{name}Backward" for name in ("Identity", "Enter", "SplitCall", "StandIns", "Arrived"))


class Weight(NamedTuple):
    """Where the gradient of one of an owner's weights goes."""

    leaf: Tensor
    #: Where the tail begins; None if there is none.
    edge: Edge | None
    #: The names of its nodes.
    names: tuple[str, ...]
    #: Whether the gradient is that of the weight as it is given, whatever the tail.
    given: bool = False

    @property
    def turned(self) -> bool:
        """True if the owner uses a transpose of what leads to the leaf, and the gradient isn't transposed."""
        return not self.given and self.names[:1] == _TURNED

    @property
    def alike(self) -> bool:
        """True if another microbatch's tail with these names is equivalent."""
        return _ALIKE.issuperset(self.names)

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the weight as the owner uses it."""
        if self.edge is None:
            return self.leaf.shape
        node, number = self.edge
        found: Sequence[int] = node._input_metadata[number].shape
        return found

    @property
    def kind(self) -> Kind:
        """Those of the gradient to compute."""
        leaf, plain = self.leaf, is_plain(self.leaf)
        if self.alike and not self.given:
            if (self.names.count(_TRANSPOSED) % 2 == 1) is self.turned:
                return leaf.dtype, leaf.shape, leaf if plain else None
            like = leaf.detach().t() if plain else None
            return leaf.dtype, None if like is None else like.shape, like
        if self.edge is None:
            return leaf.dtype, leaf.shape, leaf if plain else None
        node, number = self.edge
        meta = node._input_metadata[number]
        shape = torch.Size(meta.shape[::-1] if self.turned else meta.shape)
        return meta.dtype, shape, torch.empty(shape, device="meta") if plain else None


class Way(NamedTuple):
    """What is known about owners with one rule whose edges lead to the same leaves."""

    group: WeightGroup
    edges: list[int]
    #: The first of the leaves, and whether there is a transpose before it.
    leaf: Tensor
    turned: bool


class Owner(NamedTuple):
    """A node that leaves something for W: its rule, its weights, and the numbers of the edges that lead to them."""

    node: Any
    rule: Rule
    group: WeightGroup
    edges: list[int]
    #: The same for other microbatches; None if that isn't known.
    way: Way | None = None

    @property
    def lone(self) -> bool:
        """True if no other input needs a gradient: then the node doesn't run in B."""
        after = self.node.next_functions
        return all([node is None or number in self.edges for number, (node, _) in enumerate(after)])


class Groups(Protocol):
    """The groups of weights that owners have."""

    @property
    def ways(self) -> dict[Any, Way]:
        """What is known about owners, by their rule and the identities of leaves, which its groups keep alive."""

    def known(self, key: object) -> WeightGroup | None:
        """A group that other microbatches use too."""

    def make(self, key: object | None, function: WeightGradients, weights: Sequence[Weight | None]) -> WeightGroup:
        """A group for W; without a key, for one microbatch. A weight is None if W has no gradient to compute for it."""


class Survey(NamedTuple):
    """The result of a walk through a graph."""

    #: Leaves, and computed parameters, whose gradients B computes.
    leaves: list[Tensor]
    #: Their edges, since a leaf may have been frozen meanwhile.
    edges: list[GradientEdge]
    owners: list[Owner]
    #: True if a node on the way has none of the given numbers.
    others: bool
    #: True if a node's backward is a user's Python code, which may write to its gradient.
    custom: bool
    #: True if a node needs the surrounding graph: a reentrant checkpoint, or a part of another pipeline.
    bound: bool


#: Records a leaf to which a node leads, whether its gradient is deferred there, and how, or why not.
Note = Callable[[Tensor, bool, str], None]


def survey(
    roots: Iterable[Edge],
    ends: Container[Edge],
    numbers: Container[int],
    computed: Mapping[Edge, Tensor],
    groups: Groups | None = None,
    gains: GainsOf = (True, True),
    note: Note | None = None,
) -> Survey:
    """Walks a graph from its roots.

    Args:
        roots: the edges of its outputs.
        ends: the edges at which it stops; looked up once for each edge that it reaches first.
        numbers: the sequence numbers of the graph's nodes.
        computed: parameters that aren't leaves, by their edges, at which it stops too.
        groups: those of the owners' weights; None: no node is an owner.
        gains: the ``fills`` and ``gathers`` of SplitFunction.pays.
        note: called with each path to a leaf.
    """
    found: dict[int, Tensor] = {}
    edges: list[GradientEdge] = []
    owners: list[Owner] = []
    kinds: dict[Any, tuple[Rule | None, bool, bool, bool]] = {}
    others, custom, bound, seen, stack = False, False, False, set(), list(roots)
    while True:
        while stack:
            edge = stack.pop()
            node = edge[0]
            if node is None or node in seen or edge in ends:
                continue
            if computed and edge in computed:
                if id(computed[edge]) not in found:
                    found[id(computed[edge])] = computed[edge]
                    edges.append(GradientEdge(*edge))
                continue
            seen.add(node)
            kind: Any = type(node)
            if kind is AccumulateGrad:
                x = node.variable
                if id(x) not in found:
                    found[id(x)] = x
                    edges.append(GradientEdge(node, 0))
                continue
            known = kinds.get(kind)
            if known is None:
                known = kinds[kind] = RULES.get(kind.__name__), *about(kind)
            rule, python, tail, refuses = known
            others = others or node._sequence_nr() not in numbers
            bound = bound or refuses
            custom = custom or python
            after, why, partial = node.next_functions, "", False
            if rule is not None and groups is not None:
                owner = _owner(node, rule, after, computed, groups, gains)
                if type(owner) is Owner:
                    owners.append(owner)
                    partial = rule.partial
                    own = () if partial else owner.edges
                    after = [each for number, each in enumerate(after) if number not in own]
                else:
                    why = str(owner)
            if note is not None and not tail and not partial:
                _note_left(note, kind, after, computed, why)
            stack += after
        # Autograd returns a leaf's gradient as one sum, so a leaf to which anything else leads has no owners. And a
        # node that may write to a gradient may do so to one that was captured before a node that didn't run itself.
        wrong = [
            owner for owner in owners
            if not owner.rule.partial
            and (custom and owner.lone or found and any([id(leaf) in found for leaf in owner.group.parameters]))
        ]
        if not wrong:
            break
        gone = {*map(id, wrong)}
        owners = [owner for owner in owners if id(owner) not in gone]
        for owner in wrong:
            for leaf in owner.group.parameters:
                if note is not None and id(leaf) not in found:
                    note(leaf, False, "a layer's own backward may write to the gradient that it receives")
            stack += [owner.node.next_functions[number] for number in owner.edges]
    if note is not None:
        for owner in owners:
            for leaf in owner.group.parameters:
                note(leaf, True, str(getattr(owner.group.function, "__name__", owner.group.function)))
    return Survey([*found.values()], edges, owners, others, custom, bound)


def owners_like(
    known: Sequence[Owner], nodes: Sequence[tuple[Any, list[int]]], groups: Groups, gains: GainsOf
) -> list[Owner] | None:
    """The owners of another graph, at these nodes and edges; ``known``: those of a microbatch of this call, if any.

    None if a node isn't an owner this time, or of other weights.
    """
    found = list[Owner]()
    if not known:
        for node, edges in nodes:
            owner = _owner(node, RULES[type(node).__name__], node.next_functions, {}, groups, gains)
            if type(owner) is not Owner or owner.way is None or owner.edges != edges:
                return None
            found.append(owner)
        return found
    for (node, _), (_, rule, group, edges, way) in zip(nodes, known):
        if way is None or rule.refuses(node, way.leaf, way.turned, gains) is not None:
            return None
        found.append(Owner(node, rule, group, edges, way))
    return found


@lru_cache
def about(kind: Any) -> tuple[bool, bool, bool]:
    """Whether the backward of nodes of a kind is a user's Python code; whether they are in a weight's tail.

    And whether they need the surrounding graph: reentrant checkpoints, which run backward to all leaves themselves, and
    the nodes of pipelines.
    """
    function = issubclass(kind, BackwardCFunction)
    ours = function and kind._forward_cls.__module__.startswith("splitpipe.")
    bound = ours and kind.__name__ not in _WITHIN or kind.__name__ == "CheckpointFunctionBackward"
    # Those of DTensor don't write to gradients.
    known = ours or function and kind._forward_cls.__module__.startswith("torch.distributed.tensor.")
    return function and not known, kind.__name__ in _TAIL, bound


def _note_left(note: Note, kind: Any, after: Sequence[Edge], computed: Mapping[Edge, Tensor], why: str) -> None:
    # The name of torch's function: layer_norm for NativeLayerNormBackward0, prelu for PreluKernelBackward0.
    name = re.sub(r"Backward\d*$", "", kind.__name__)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    name = re.sub("^native_|_kernel$", "", name)
    for each in after:
        weight = _weight(each, computed)
        if weight is not None:
            note(weight.leaf, False, f"{name}: {why}" if why else f"{name} has no rule")


def _owner(
    node: Any, rule: Rule, after: Sequence[Edge], computed: Mapping[Edge, Tensor], groups: Groups, gains: GainsOf
) -> Owner | str:
    """The node as an owner, or why it isn't one."""
    # Most are like those of other microbatches, and lead to the same leaves.
    way = None if computed or rule.whole else (rule, *[_leaf_of(after, number) for number in rule.weights(node)])
    known = groups.ways.get(way)
    if known is not None:
        why = rule.refuses(node, known.leaf, known.turned, gains)
        return Owner(node, rule, known.group, known.edges, known) if why is None else why
    weights: list[Weight | None] = []
    edges: list[int] = []
    key: list[object] = [rule]
    first: Weight | None = None
    alike = True
    for position, number in enumerate(rule.weights(node)):
        weight = None
        if number is not None and number < len(after) and after[number][0] is not None:
            weight = _weight(after[number], computed)
            if weight is None and (rule.whole or first is None):
                return "what it would defer is computed in forward"
            if weight is not None and position and not rule.fits(position, weight.shape):
                weight = None
        if weight is not None:
            weight = weight._replace(given=rule.whole)
            leaf, names = weight.leaf, weight.names
            first = first or weight
            alike = alike and (not names or names == _TURNED or weight.alike)
            key += (id(leaf), names)
            edges.append(number)  # type: ignore[arg-type]
        elif first is None and not rule.whole:
            return "its weight is frozen"  # Keeping the input isn't worth it for the gradient of a bias.
        else:
            key.append(None)
        weights.append(weight)
    if first is None:
        return "its weights are frozen"
    turned = first[2][:1] == _TURNED
    why = rule.refuses(node, first[0], turned, gains)
    if why is not None:
        return why
    if rule.whole:
        key.append(rule.function(node, first.leaf, turned))
    own = tuple(key) if alike else None
    group = groups.known(own) if alike else None
    if group is None:
        group = groups.make(own, rule.function(node, first.leaf, turned), weights)
    found = None
    if own is not None and way is not None and _FAR not in way:
        found = groups.ways[way] = Way(group, edges, first.leaf, turned)
    return Owner(node, rule, group, edges, found)


#: A leaf, if there is one, behind nodes that each microbatch runs through separately.
_FAR = object()


def _leaf_of(after: Sequence[Edge], number: int | None) -> object:
    """Equal for edges that lead to the same leaf, directly or through transposes and casts."""
    node = None if number is None or number >= len(after) else after[number][0]
    kind, kinds = type(node), []
    while kind is not AccumulateGrad and node is not None:
        if kind.__name__ not in _ALIKE:
            return _FAR
        kinds.append(kind)
        ((node, _),) = node.next_functions
        kind = type(node)
    leaf = None if node is None else id(node.variable)  # Not the node: see ``shape``.
    return (leaf, *kinds) if kinds else leaf


def _weight(edge: Edge, computed: Mapping[Edge, Tensor]) -> Weight | None:
    """The weight that an edge leads to; None if there is none, or if something other than a view lies between."""
    node = edge[0]
    if type(node) is AccumulateGrad:
        return Weight(node.variable, None, ())
    start, names = edge, list[str]()
    while not computed or edge not in computed:
        node = edge[0]
        kind = type(node)
        if kind is AccumulateGrad:
            return Weight(node.variable, start, _TURNED if names == [_TRANSPOSED] else tuple(names))
        name = kind.__name__
        if name not in _TAIL:
            return None
        names.append(name)
        (edge,) = node.next_functions
    return Weight(computed[edge], start if names else None, tuple(names))


def edge_of(weight: Weight) -> GradientEdge:
    """Where the tail of a weight begins."""
    assert weight.edge is not None
    return GradientEdge(*weight.edge)
