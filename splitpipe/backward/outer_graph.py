"""The outer graph: what the caller's autograd sees of a call, and how it gets the call's gradients.

    loss <─ ... <─ outputs <── start <─┬─ release of stage n-1 ── its leaves
                                       ├─ ...
                                       ├─ release of stage 0 ── its leaves
                                       └─ release of the input ── the caller's tensors

    1. A node for each device keeps the gradients of what has left the call: the outputs, or the loss of a schedule.
    2. start computes the call's gradients: drop-in, it runs the second half, B and W; scheduled, it scales what is
       there already.
    3. Each release hands its gradients over; the last stage's comes first, since its node was made last. A
       release doesn't run if its gradients aren't wanted, as in torch.autograd.grad(loss, x).

start and the releases give CPU tensors, so start runs in the thread that called backward. In a device thread of
autograd's, it would wait for workers whose B needs that thread: a deadlock. While a B in the calling thread waits for a
device, this thread may run nodes of the caller's graph that are ready. No release is ready until start has ended.

Nothing in the call refers to these nodes, so it is freed as soon as it is dropped. After a backward, they refer to
nothing in the call, unless the graph is retained: a loss may live longer.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from splitpipe.core import stream
from splitpipe.core.note import uncompiled
from splitpipe.core.torch_private import _get_current_graph_task_keep_graph, _will_engine_execute_node

#: Tensors that get gradients: the leaves of a stage, by its number; or the caller's, by the key of the value.
Groups = Mapping[Any, Sequence[Tensor]]
Gradients = dict[Any, list[Tensor | None]]


@dataclass(eq=False)
class OuterGraph:
    """The outer graph of a call on these devices.

    ``compute`` is given the gradients of outputs by number, the groups that want gradients, and whether the graph is
    retained; it returns the gradients of these groups, for the caller's current streams.
    """

    devices: set[torch.device]
    compute: Callable[[Mapping[int, Tensor], Groups, bool], Gradients] | None  # None: it is at work, or was freed.
    groups: Groups = field(default_factory=dict)
    releases: dict[Any, Any] = field(default_factory=dict)  # Weak references to the nodes.
    #: The gradients of outputs, the outputs' numbers, and the event after which they are there.
    arrived: list[tuple[Sequence[Tensor | None], Sequence[int], torch.Event | None]] = field(default_factory=list)
    gradients: Gradients = field(default_factory=dict)

    def attach(self, outputs: Sequence[Tensor], groups: Groups) -> list[Tensor]:
        """The outputs as those of the outer graph, which leads to these tensors."""
        self.groups, releases = {key: tensors for key, tensors in groups.items() if tensors}, list[Tensor]()
        phony = torch.zeros((), device="cpu")
        for key, tensors in self.groups.items():
            releases += _Node.apply(lambda _, key=key: self.gradients.pop(key), [phony], *tensors)
            self.releases[key] = weakref.ref(releases[-1].grad_fn)
        [start], attached = _Node.apply(self._start, [phony], *releases), [*outputs]
        for device in {x.device for x in outputs}:
            places = [k for k, x in enumerate(outputs) if x.device == device]
            arrive = partial(self._arrive, device, places)
            for k, x in zip(places, _Node.apply(arrive, [outputs[k] for k in places], start)):
                attached[k] = x
        return attached

    def _arrive(self, device: torch.device, places: Sequence[int], grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Keeps the gradients of the outputs at these places, which are on one device."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was passed to a backward through a SplitPipe, whose stages compute their gradients "
                "outside autograd's graph: expected a first derivative. For a second one, compute the loss from "
                "model(x), with SplitPipe(..., backward='autograd')."
            )
        self.arrived.append((grads, places, stream.mark(stream.current(device))))
        return [torch.zeros((), device="cpu")]

    def _start(self, _: Any) -> list[Tensor]:
        """Computes the gradients of the groups that are wanted."""
        phonies = [torch.zeros((), device="cpu")] * len(self.groups)
        compute, self.compute, keep = self.compute, None, _get_current_graph_task_keep_graph()
        arrived, self.arrived, grads = self.arrived, [], dict[int, Tensor]()
        if compute is None:
            raise RuntimeError(
                "Trying to backward through the output or the loss of a SplitPipe a second time: the first backward "
                "freed its graphs (pass retain_graph=True to it), or is still running, in a hook or another thread: "
                "expected one at a time, or SplitPipe(..., backward='autograd')."
            )
        for own, places, event in arrived:
            grads.update({k: grad for k, grad in zip(places, own) if grad is not None})
            if event is not None:
                for device in self.devices:
                    stream.wait_for(stream.current(device), event)
        releases = [(key, node) for key, reference in self.releases.items() if (node := reference()) is not None]
        wanted = {key: self.groups[key] for key, node in releases if _will_engine_execute_node(node)}
        try:
            self.gradients |= compute(grads, wanted, keep)
        finally:
            self.compute, self.groups = (compute, self.groups) if keep else (None, {})
        return phonies


def adds_gradients(reached: Sequence[Tensor]) -> bool:
    """Whether the backward at work, which reaches these, adds to all ``.grad``; torch.autograd.grad adds to none."""
    try:
        return all([_will_engine_execute_node(get_gradient_edge(x).node) for x in reached if x.is_leaf])
    except RuntimeError:  # What torch says of a leaf whose gradient autograd.grad returns.
        return False


class _Node(Function):
    """Tensors as the outputs of a node that leads to others, whose gradients ``give`` returns, given theirs."""

    @staticmethod
    def forward(ctx: Any, give: Callable[..., Sequence[Tensor | None]], made: Sequence[Tensor], *others: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.give = give
        return tuple([x.detach() for x in made])

    @staticmethod
    @uncompiled  # With all that it calls: a compiled function around a step compiles what its backward calls.
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.give(grads)
