"""The outer graph: what the caller's autograd sees of a call, and how it gets the call's gradients.

    loss <─ ... <─ _Output <── start <─┬─ release of stage n-1 ── its leaves        start, release: a _Phony each
                                       ├─ ...
                                       ├─ release of stage 0 ── its leaves
                                       └─ release of the input ── the caller's tensors

    1. _Output keeps the gradients of what has left the call: the outputs, or the loss of a schedule.
    2. start computes the call's gradients: drop-in, it runs the second half, B and W; scheduled, it scales what is
       there already.
    3. Each release hands its gradients over; the last stage's comes first, since its node was made last. A
       release doesn't run if its gradients aren't wanted, as in torch.autograd.grad(loss, x).

Phonies are CPU tensors, so start runs in the thread that called backward. In a device thread of autograd's, it would
wait for workers whose B needs that thread: a deadlock. While a B in the calling thread waits for a device, this thread
may run nodes of the caller's graph that are ready. No release is, until start has ended.

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
        self.groups, phonies = {key: tensors for key, tensors in groups.items() if tensors}, list[Tensor]()
        for key, tensors in self.groups.items():
            phonies.append(_Phony.apply(partial(self.gradients.pop, key), *tensors))
            self.releases[key] = weakref.ref(phonies[-1].grad_fn)
        start, attached = _Phony.apply(self._start, *phonies), [*outputs]
        for device in {x.device for x in outputs}:
            places = [k for k, x in enumerate(outputs) if x.device == device]
            for k, x in zip(places, _Output.apply(self, start, places, *[outputs[k] for k in places])):
                attached[k] = x
        return attached

    def _start(self) -> list[Tensor]:
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


class _Output(Function):
    """What has left a call on one device."""

    @staticmethod
    def forward(ctx: Any, graph: OuterGraph, start: Tensor, places: Sequence[int], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.graph, ctx.places, ctx.device = graph, places, tensors[0].device
        return tuple([x.detach() for x in tensors])

    @staticmethod
    @uncompiled  # As is all below: a compiled function around a step compiles what its backward calls.
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was passed to a backward through a SplitPipe, whose stages compute their gradients "
                "outside autograd's graph: expected a first derivative. For a second one, compute the loss from "
                "model(x), with SplitPipe(..., backward='autograd')."
            )
        ctx.graph.arrived.append((grads, ctx.places, stream.mark(stream.current(ctx.device))))
        return None, torch.zeros((), device="cpu"), None, *[None] * len(grads)


class _Phony(Function):
    """A CPU tensor that depends on others, whose gradients ``give`` returns: start, or a release."""

    @staticmethod
    def forward(ctx: Any, give: Callable[[], Sequence[Tensor | None]], *tensors: Tensor) -> Tensor:
        ctx.give = give
        return torch.zeros((), device="cpu")

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.give()
