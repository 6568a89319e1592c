"""One microbatch's way through the stages. A *segment* is what is done for it on one stage.

There are two kinds of forward: the code of any module, which reaches the borders of stages somewhere on its way
(``code``), and the loop over the stages of a Sequential (``chain``).
"""
from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from splitpipe.core.graph import LAST, Edge, rank, reserve
from splitpipe.core.thread_state import Hooks
from splitpipe.core.torch_private import _get_sequence_nr, tree_leaves
from splitpipe.engine.run import Run
from splitpipe.loss.terms import Number, Unknown
from splitpipe.stage.call import Activation


class Host(Protocol):
    """What the forwards of a call's microbatches have in common."""

    def transfer(self, forward: Any) -> Any:
        """How a microbatch's values reach later stages."""

    def finish(self, forward: Any, output: Any) -> Any:
        """What to keep of the module's output. Called at the end of a microbatch, in the last stage."""

    def counting(self, i: int, stage: int) -> Hooks | None:
        """Hooks that count what a microbatch saves on a stage, if a recording needs it."""


class MicrobatchForward:
    """A microbatch: the stage that it is on, and what its segments have made."""

    #: Whether its forward is one call, which stays on its thread's stack between two stages.
    parked = False

    def __init__(self, run: Run, i: int, activation: Activation, host: Host) -> None:
        self.run = run
        self.i = i
        self._host = host
        self.stage = 0
        #: The numbers of autograd's nodes at which each segment starts, and at which it ends.
        self.firsts: list[int] = []
        self._ends: list[int] = []
        #: The nodes with which values have reached a stage, with that stage, if the graph is to be cut.
        self.crossed: dict[Any, int] = {}
        self._ranked: dict[Any, int] = {}
        #: True if a value has crossed that a plain tensor can't represent.
        self.odd = False
        #: The caller's tensors, by the edges at which the stages' parts of the graph end, if these are to be cut.
        self.inputs: dict[Edge, Tensor] = {}
        self._given: Any = activation
        #: What the numbers among the output's leaves consist of, by their identity.
        self.numbers: dict[int, Number | Unknown] = {}
        self._value: Any = None
        self.transfer = host.transfer(self)

    def taken(self) -> Any:
        """What was kept of the output, once it is there."""
        value, self._value = self._value, None
        return value

    def forget(self) -> None:
        """Breaks the microbatch's reference cycles, so that its contents are freed with the call."""
        vars(self).clear()

    def _begin(self, stage: int) -> None:
        """Begins a segment."""
        self.stage = stage
        call = self.run.call
        if call.state.grad:  # Numbers for ranking the nodes between stages.
            reserve(LAST + 1 + len(call.rows) * len(self.run.stages))
        self.firsts.append(_get_sequence_nr())

    def _end(self) -> None:
        """Ends the segment."""
        self._ends.append(_get_sequence_nr())
        self.transfer.leaving(self)

    def rank(self, tree: Any) -> None:
        """Ranks nodes that leave a stage below all others, so that a device runs one microbatch after another."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                node = leaf.grad_fn
                stage = self.maker(node)
                if stage is not None and node not in self.crossed:
                    self._ranked[node] = stage  # Its number no longer shows the stage.
                    rank(leaf, LAST + 1 + self.i * len(self.run.stages) + stage)

    def maker(self, node: Any, likely: int | None = None) -> int | None:
        """The stage whose segment has made a node, or to which it brings a value; None if it was made elsewhere.

        Autograd counts nodes per thread: if segments had several threads, it may be one or the other. Then it is the
        ``likely`` one (None: the current one).
        """
        found = self.crossed.get(node, self._ranked.get(node))
        if found is not None:
            return found
        number: int = node._sequence_nr()
        return self._made(number, self.stage if likely is None else likely)

    def span(self, stage: int) -> range:
        """The numbers of nodes that the segment on a stage has made."""
        raise NotImplementedError

    def _made(self, number: int, likely: int) -> int | None:
        """The stage whose segment has made the node with a number."""
        raise NotImplementedError
