"""One call of a module: what its microbatches share."""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from splitpipe.core.tensors import version_of
from splitpipe.loss.tracing import Tracing
from splitpipe.partition.attributes import Attributes
from splitpipe.partition.blocks import Blocks
from splitpipe.partition.homes import Homes
from splitpipe.stage.call import Call
from splitpipe.stage.layers import Structure
from splitpipe.stage.stage import Stage
from splitpipe.training.sink import Keyed


class BlockCalls(Protocol):
    """How checkpointed blocks are called."""

    def checkpointed(
        self, forward: Any, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        follow: bool,
    ) -> Any:
        """The value of a call, and what it has changed in lists and dicts among its arguments."""

    def parameters(self, stage: int) -> list[Keyed]:
        """The parameters of those blocks of a stage that have separate graphs, each with the block's key."""


class Run:
    """One call: what its microbatches share."""

    def __init__(
        self, call: Call, stages: Sequence[Stage], *, ranked: bool, in_turn: bool = False
    ) -> None:
        self.call = call
        self.stages = stages
        #: True if autograd chooses what runs backward next, because there is no schedule.
        self.ranked = ranked
        #: True if ops run one after another.
        self.in_turn = in_turn

    def parameters(self, stage: int) -> list[Keyed]:
        """The parameters of those blocks of a stage that have separate graphs, each with the block's key."""
        return []

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter or buffer of which a stage has a copy, with the copy."""
        return []

    def verify_copies(self) -> None:
        """Raises for copies that were written to, and forgets all copies."""


class CodeRun(Run):
    """One call of any module, by the code of its forward."""

    def __init__(
        self, call: Call, stages: Sequence[Stage], forward: Callable[..., Any], blocks: Blocks, homes: Homes, *,
        ranked: bool, in_turn: bool, one_graph: bool, calls: BlockCalls, tracing: Tracing | None,
        attributes: Attributes, structure: Structure,
    ) -> None:
        super().__init__(call, stages, ranked=ranked, in_turn=in_turn)
        self.calls = calls
        self.tracing = tracing
        self.forward = forward
        self.attributes = attributes
        self.blocks = blocks
        self.homes = homes
        #: True if values need not be found between blocks, because there is one device, and one graph over all stages.
        self.one_graph = one_graph
        self._local: dict[tuple[nn.Module, int], bool] = {}
        self._lock = threading.Lock()
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor, int | None]] = {}
        self._structure = structure
        self._buffers: dict[int, Tensor] | None = None
        self._names: dict[int, str] = {}  # Those of buffers and parameters, if there are copies: some may be replaced.
        self._users: dict[int, int] = {}

    def parameters(self, stage: int) -> list[Keyed]:
        """The parameters of those blocks of a stage that have separate graphs, each with the block's key."""
        return self.calls.parameters(stage)

    def settled(self, module: nn.Module, stage: int) -> bool:
        """Gives a module that a stage calls its home; returns True if its tensors are on the stage's device."""
        key = module, stage
        local = self._local.get(key)
        if local is None:
            with self._lock:
                inside = module in self.blocks.blocks
                if inside and self.call.beside:  # What code between blocks uses is seen there.
                    for x in module.parameters():
                        self.uses(x, stage)
                parts = module.modules() if inside else [module]
                local = self._local[key] = self.homes.settle(module, parts, stage)
        return local

    def uses(self, x: Tensor, stage: int) -> None:
        """Records that a stage uses a parameter. Its gradients come from one stream, so no other stage may use it."""
        user = self._users.setdefault(id(x), stage)
        if user != stage and isinstance(x, Parameter) and x.requires_grad:
            names = {id(own): name for name, own in self.blocks.module.named_parameters()}
            raise ValueError(
                f"{names.get(id(x), 'a parameter')!r} is used by stages {user} and {stage}, and devices names streams: "
                "with cuts=, expected each parameter in one stage then. Choose other cuts=, or name devices."
            )

    def adopted(self, x: Tensor, stage: int) -> bool:
        """Gives a home to a tensor that had none, as its module is never called; returns True if it did."""
        with self._lock:
            return self.homes.adopt(x, stage)

    def verify_cut(self, block: nn.Module, cut: int, stage: int) -> None:
        """Raises for a cut whose first call comes after a later stage has begun."""
        if cut < stage and block not in self.homes.stage_of:
            names = {number: self.blocks.described(part) for part, number in self.blocks.cuts.items()}
            raise ValueError(
                f"{names[stage]}, where stage {stage} starts, was called before {names[cut]}, where stage {cut} "
                "starts: expected cuts= in the order in which the forward calls them."
            )

    def is_buffer(self, x: Tensor) -> bool:
        """True for a buffer of the module."""
        if self._buffers is None:
            self._buffers = {id(buffer): buffer for buffer in self._structure.buffers()}
        return id(x) in self._buffers

    def copied(self, x: Tensor, stage: int, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """A parameter or buffer on another device: one copy per call and device."""
        key = id(x), self.stages[stage].device
        found = self._copies.get(key)
        if found is None:
            with self._lock:
                found = self._copies.get(key)
                if found is None:
                    if not self._names:
                        module = self.blocks.module
                        every = *module.named_parameters(), *module.named_buffers()
                        self._names = {id(own): name for name, own in every}
                    made = copy(x)
                    found = self._copies[key] = x, made, version_of(made)
        return found[1]

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter or buffer with its copy."""
        return [(x, made) for x, made, _ in self._copies.values()]

    def verify_copies(self) -> None:
        """Raises for copies of parameters and buffers that were written to: the originals haven't changed.

        Forgets all copies, since the run itself is part of cycles, and copies of tied embeddings are large.
        """
        copies, self._copies = self._copies, {}
        for x, made, version in copies.values():
            if version_of(made) != version:
                raise RuntimeError(
                    f"{self._names.get(id(x), 'a parameter')!r}, which is on {x.device}, was written to by a stage on "
                    f"{made.device}, which has a copy during a call: expected the modules that write to it in one "
                    "stage, or in stages on one device. Choose other cuts=, or devices."
                )
