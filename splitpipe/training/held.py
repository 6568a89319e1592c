"""A microbatch that is not checkpointed as one node of the graph around it: B goes through the graph of its own run.

    graph around   ... <── BlockNode <── ...
                               ¦
    block's own     input <── layers <── output     made in forward

The first run is an ordinary one in the graph around it, and shows what the block does. What needs that graph (it
writes to its input, say) stays a part of it, as ``StageFacts.apart`` remembers. A stage has its inputs to itself, and
is a node from its first run on.
"""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from splitpipe.core.graph import enter, pairs_of, reached, unleaf
from splitpipe.core.tensors import sharing, version_of
from splitpipe.core.torch_private import (
    _get_current_graph_task_keep_graph,
    _get_sequence_nr,
    _will_engine_execute_node,
)
from splitpipe.loss.facts import tensors
from splitpipe.stage.around import compiled_call
from splitpipe.stage.layers import StageFacts
from splitpipe.training.capture import Graph
from splitpipe.training.node import OPEN, BlockNode, DropinSink, Flight, Ids, used_by


class Held(Flight):
    """Of a microbatch that is not checkpointed: the graph that its run has made."""

    __slots__ = ("_graph", "_roots")

    def __init__(
        self, graph: Graph, roots: Sequence[GradientEdge], sink: DropinSink, i: int, ids: Ids, where: str
    ) -> None:
        super().__init__(sink, i, ids, where)
        self._graph, self._roots = graph, roots

    def backward(self, grads: Sequence[Tensor | None], needed: Sequence[bool], phony: Any) -> list[Tensor | None]:
        graph, keep = self._graph, _get_current_graph_task_keep_graph()
        # Autograd comes to nodes of this graph by another way, and may have been there.
        if not keep and any([_will_engine_execute_node(owner.node) for owner in graph.owners]):
            raise self._shared()
        roots, used = [*self._roots], [grad for grad in grads if grad is not None]
        if len(used) != len(roots):
            roots = [edge for edge, grad in zip(roots, grads) if grad is not None]
        try:
            return self._through(graph, roots, used, needed, self._wanted(phony), keep=keep)
        except RuntimeError as error:
            if not keep and str(error).startswith("Trying to backward through the graph a second time"):
                raise self._shared() from error
            raise

    def _shared(self) -> RuntimeError:
        return RuntimeError(
            f"{self._where}: a backward comes to its graph by its output and by a tensor from inside that a layer (or "
            "a hook) has kept, such as a loss of its own. With backward='split' that graph is gone through in one go: "
            "expected SplitPipe(..., backward='autograd'), retain_graph=True, or the tensor returned by the layer."
        )


class Recorded:
    """What hooks inside of blocks are given in a first call, and whether anybody has kept it.

    Transformers collects router logits so, to make a loss of them. What does so stays in the graph around it.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[StageFacts, weakref.ref[Tensor]]] = []
        self._facts: dict[int, StageFacts] = {}
        self._without: dict[int, StageFacts] = {}  # In this call: others may come with the next.

    def asks(self, facts: StageFacts, modules: Callable[[], Iterable[nn.Module]]) -> bool:
        """True if there are hooks in a block, and it is not known whether they keep anything: to be ``watching``."""
        if facts.hooked is not None or self._without.get(id(facts)) is facts:
            return False
        found = [*modules()]
        # A hook more would have torch compile again.
        compiled = any([compiled_call(each) is not None or type(each).__name__ == "OptimizedModule" for each in found])
        if not compiled and any([module._forward_hooks for module in found]):
            return True
        self._without[id(facts)] = facts
        return False

    @contextmanager
    def watching(self, facts: StageFacts, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Notes what modules with hooks give in a block's run, which stays in the graph around it."""
        hooked = [module for module in modules if module._forward_hooks]
        self._facts[id(facts)] = facts

        def note(module: nn.Module, given: Any, output: Any) -> None:
            self._seen += [(facts, weakref.ref(x)) for x in tensors((output,)) if x.requires_grad]

        handles = [module.register_forward_hook(note) for module in hooked]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def settle(self) -> bool:
        """The forward is over: whose tensors are still referred to, stays in the graph around it; False if any waited.
        """
        seen, self._seen = self._seen, []
        every = [(facts, ref()) for facts, ref in seen]
        found = [(facts, x) for facts, x in every if x is not None]
        del every
        if found:
            alive = [x for _, x in found]
            holders = [each for each in gc.get_referrers(*alive) if each is not alive and not isfunction(each)]
            own = {id(pair) for pair in found}
            referred = {id(x) for each in holders if id(each) not in own for x in gc.get_referents(each)}
            for facts, x in found:
                if id(x) in referred:
                    facts.apart = False
        waited = [*self._facts.values()]
        self._facts.clear()
        for facts in waited:
            facts.hooked = True
        return not waited


_STAYS = "its layer needs the graph around it"
_WROTE = "wrote to its input in place"
_ALIAS = "gave tensors that share memory with each other, or with what it was given"
_OBJECT = "was given, or gave, an object that may carry tensors"


def _comes_back(entered: Sequence[GradientEdge], graph: Graph) -> bool:
    """True if the graph around a stage leads to where its B ends by another way, which that B would go, too."""
    ends = {*pairs_of(entered), *pairs_of(graph.edges)}
    before = [edge for node in {edge.node for edge in entered} for edge in node.next_functions]
    return bool(reached(before, ends).ends)


class BlockInputs:
    """The arguments of a block that is not checkpointed, and what has become of them in its run."""

    def __init__(
        self, facts: StageFacts, sink: DropinSink, given: Sequence[Any], writes: bool = False
    ) -> None:
        """Takes what a block is given, on the stage's stream.

        Args:
            facts: of the block.
            sink: of its stage.
            given: the leaves of its arguments; ``leaves`` are what it is to be given in their place.
            writes: whether it may write to them: nobody else has them.
        """
        self._facts, self._sink, self._given = facts, sink, given
        self._writes = writes
        self.inputs: list[Tensor] = []
        known: dict[int, Any] = {}
        #: The caller's tensors, by the identity of what the block is given for them.
        self._own: dict[int, Tensor] = {}
        for x in given:
            if isinstance(x, Tensor) and id(x) not in known:
                y = x
                if x.requires_grad:
                    self.inputs.append(x)
                    if facts.apart:
                        y = enter(x.detach().requires_grad_())
                    elif writes:  # Nobody else has it. Hooks of the caller's tensor are the graph's around.
                        y = unleaf(x)
                known[id(x)] = y
                self._own[id(y)] = x
        self.leaves = [known.get(id(x), x) if isinstance(x, Tensor) else x for x in given]
        self._tensors = [*known.values()]
        self._versions = [*map(version_of, self._tensors)]
        self._entered = [get_gradient_edge(known[id(x)]) for x in self.inputs]
        self._first = _get_sequence_nr()

    @property
    def renewed(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The caller's tensors for which the block is given another, with that."""
        return [(x, y) for y in self._tensors if (x := self._own[id(y)]) is not y]

    def outputs(
        self, i: int, key: object, parameters: Sequence[Tensor], made: list[Any], where: str, device: torch.device,
        may: bool = True,
    ) -> list[Any]:
        """The leaves of the output, with a node for those that require grad if the block has a graph of its own.

        Args:
            i: the number of the microbatch.
            key: of the block.
            parameters: of the block.
            made: the leaves.
            where: that is, for messages.
            device: of the stage.
            may: whether the block may have a graph of its own, as far as its caller knows.

        Raises:
            RuntimeError: the block does what a graph of its own does not allow, which it had not done before.
        """
        facts, sink = self._facts, self._sink
        written = [y for y, version in zip(self._tensors, self._versions) if version_of(y) != version]
        own, wrote = self._own, bool(written) and not self._writes
        for y in written:  # It is another value now.
            own.pop(id(y))
        found = {id(x): x for x in made if isinstance(x, Tensor) and id(x) not in own and x.requires_grad}
        open = all([isinstance(x, OPEN) for x in (*made, *self._given)])
        alias = not self._writes and bool(
            sharing([*found.values()], [x for x in self._tensors if id(x) not in found])
        )
        if facts.apart and (wrote or alias or not open):
            facts.apart = False
            raise RuntimeError(
                f"{where} {_WROTE if wrote else _ALIAS if alias else _OBJECT}, which "
                "it had not done before: its gradient would be lost. It now stays in the graph around it; repeat the "
                "step."
            )
        if not found:
            return [own.get(id(x), x) if isinstance(x, Tensor) else x for x in made]
        roots = [*map(get_gradient_edge, found.values())]
        seen: list[tuple[Tensor, bool, str]] | None = None if facts.apart or sink.note is None else []
        graph = sink.graph(i, roots, self._entered, range(self._first, _get_sequence_nr()), seen)
        if not facts.apart:
            used = used_by(graph)
            here = all([x.device == device for x in used.values()])
            facts.apart = may and open and here and not (wrote or alias or graph.keep_graph or graph.bound)
            for x, deferred, why in seen or ():
                sink.note(x, deferred and facts.apart, why if facts.apart else _STAYS)  # type: ignore[misc]
            if not self._writes or not facts.apart or _comes_back(self._entered, graph):
                return made
        phony, ids = sink.phony_of(key, graph, parameters)
        nodes = BlockNode.apply(Held(graph, roots, sink, i, ids, where), [*found.values()], phony, *self.inputs)
        given = {**own, **dict(zip(found, nodes))}
        return [given.get(id(x), x) if isinstance(x, Tensor) else x for x in made]
