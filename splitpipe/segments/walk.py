"""One microbatch's way through the stages. A *segment* is what is done for it on one stage.

Two kinds of forward take it: the code of any module, which comes to the border of a stage somewhere on its way
(``code``), and the loop over the stages of a Sequential (``chain``).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from splitpipe.core.graph import LAST, Edge, rank, reserve
from splitpipe.core.thread_state import Hooks
from splitpipe.core.torch_private import _get_sequence_nr, tree_leaves
from splitpipe.loss.terms import Number, Unknown
from splitpipe.segments.stages import Run
from splitpipe.stage.call import Activation


class Walk:
    """A microbatch: the stage that it is on, and what its segments have made."""

    #: Whether its forward is one call, which stays on its thread's stack between two stages.
    parked = False

    def __init__(self, run: Run, i: int, activation: Activation) -> None:
        self.run = run
        self.i = i
        self.stage = 0
        #: The numbers from which on autograd's nodes are made in each segment, and those at which segments end.
        self.firsts: list[int] = []
        self._ends: list[int] = []
        #: The nodes by which values have come to a stage, with that stage; where the graph is to be cut.
        self.crossed: dict[Any, int] = {}
        self._ranked: dict[Any, int] = {}
        #: True if a value has crossed that no plain tensor can stand in for.
        self.odd = False
        #: The caller's tensors, by the edges at which the stages' parts of the graph end; where these are to be cut.
        self.inputs: dict[Edge, Tensor] = {}
        self._given: Any = activation
        #: What the numbers among the output's leaves are made of, by their identity.
        self.numbers: dict[int, Number | Unknown] = {}
        self._value: Any = None
        self._transfer: Any
        #: Called at the end, in the last stage, with the module's output; gives what is kept of it.
        self.finish: Callable[[Any], Any]
        #: Called at the start, in the first stage, with the flat arguments; gives those to go on with.
        self.opening: Callable[[Sequence[Any]], Sequence[Any]] = lambda leaves: leaves
        #: Gives hooks that count what a stage saves, where a recording asks for it.
        self.counting: Callable[[int], Hooks | None] = lambda stage: None
        #: Called at the end of each segment.
        self.leaving: Callable[[Walk], None] | None = None

    def connect(self, transfer: Any) -> None:
        """Says how values come to later stages."""
        self._transfer = transfer

    def taken(self) -> Any:
        """What is kept of the output, once it is there."""
        value, self._value = self._value, None
        return value

    def forget(self) -> None:
        """Takes the microbatch out of its cycles: what it refers to lives no longer than the call, collector or not."""
        vars(self).clear()

    def _begin(self, stage: int) -> None:
        """A segment begins."""
        self.stage = stage
        call = self.run.call
        if call.state.grad:  # The numbers that nodes between stages are ranked by.
            reserve(LAST + 1 + len(call.rows) * len(self.run.stages))
        self.firsts.append(_get_sequence_nr())

    def _end(self) -> None:
        """The segment is over."""
        self._ends.append(_get_sequence_nr())
        if self.leaving is not None:
            self.leaving(self)

    def rank(self, tree: Any) -> None:
        """Nodes that leave a stage rank below all others: so a device goes through one microbatch after another."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                node = leaf.grad_fn
                stage = self.maker(node)
                if stage is not None and node not in self.crossed:
                    self._ranked[node] = stage  # Its number tells no more.
                    rank(leaf, LAST + 1 + self.i * len(self.run.stages) + stage)

    def maker(self, node: Any, likely: int | None = None) -> int | None:
        """The stage whose segment has made a node, or to which it brings a value; None if it was made elsewhere.

        Autograd counts nodes by thread: where segments had several, it may be one or the other. Then it is the
        ``likely`` one (None: the present one).
        """
        found = self.crossed.get(node, self._ranked.get(node))
        if found is not None:
            return found
        number: int = node._sequence_nr()
        return self._made(number, self.stage if likely is None else likely)

    def _made(self, number: int, likely: int) -> int | None:
        """The stage whose segment has made the node of a number."""
        raise NotImplementedError
