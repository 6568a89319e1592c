"""A stage of torch.distributed.pipelining: layers, between tensors that arrive and tensors that leave.

    values of the stage before  |  skips      ──>   layers   ──>      values for the next stage  |  skips

That runtime sends tensors from each stage to the next. So a skip is sent after the values, from the stage that stashes
it to the next one, which pops it. A skip that goes further is an error, before any process waits for another.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from splitpipe.core.graph import Identity
from splitpipe.skip.box import Key, opened
from splitpipe.skip.pairs import crossing

Named = tuple[str, nn.Module]
#: The attributes that a module can have as a whole, separate from its layers, and their names in messages.
_OWN = {
    "_parameters": "parameters", "_buffers": "buffers", "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward hooks", "_backward_hooks": "backward hooks", "_backward_pre_hooks": "backward hooks",
}


class Part(nn.Sequential):
    """The layers of one stage, with the same names as in the whole module; its skips arrive and leave in order."""

    def __init__(
        self, layers: Sequence[Named], stage: int, last: bool, arriving: Sequence[Key], leaving: Sequence[Key]
    ) -> None:
        super().__init__()
        self._modules.update(layers)
        self._stage = stage
        self._last = last
        self._arriving = list(arriving)
        self._leaving = list(leaving)
        self._sent: dict[bool, list[tuple[list[int], torch.dtype, bool]]] = {}

    def forward(self, *values: Any) -> Any:
        """The output of the layers: a tensor, or several."""
        arrived = _node if self._stage else torch.clone  # The batch belongs to the caller.
        values = tuple([arrived(x) if isinstance(x, Tensor) else x for x in values])
        count = len(values) - len(self._arriving)
        box: dict[Key, Any] = dict(zip(self._arriving, values[count:]))
        with opened(box):
            output: Any = values[0] if count == 1 else values[:count]
            for layer in self:
                output = layer(output)
        if self._last:
            return output
        several = type(output) is tuple and len(output) > 1
        sent = output if several else (output,)
        self._verify_tensors(sent, f"its output {'holds' if several else 'is'}")
        for key in self._leaving:
            sent = *sent, box.get(key)
            self._verify_tensors(sent[-1:], f"the skip {key[1]!r} is")
        self._verify_shapes(sent)
        sent = tuple([_node(x.contiguous()) for x in sent])  # Others can't be sent.
        return sent if self._leaving or several else sent[0]

    def _verify_shapes(self, sent: Sequence[Tensor]) -> None:
        """Raises for tensors that the next process doesn't expect, because it would misinterpret the bytes."""
        found = [(list(x.shape), x.dtype, x.requires_grad) for x in sent]
        expected = self._sent.setdefault(torch.is_grad_enabled(), found)
        if found != expected:
            raise RuntimeError(
                f"stage {self._stage} would send {_shown(found)}, but sent {_shown(expected)} at first: expected the "
                "same in every step, since the processes have agreed on it. Build another Pipeline after freezing "
                "layers, for another dtype or autocast, or for other shapes."
            )

    def _verify_tensors(self, found: Sequence[Any], what: str) -> None:
        strange = [_kind(x) for x in found if not isinstance(x, Tensor) or (x.is_complex() and x.requires_grad)]
        if strange:
            raise TypeError(
                f"stage {self._stage}: {what} a {strange[0]}, but torch.distributed.pipelining sends tensors: expected "
                "a tensor, or a tuple of several, where a stage ends. Cut elsewhere, or run it on one machine with "
                "splitpipe.SplitPipe, which accepts any nesting."
            )


class _Sent(Identity):
    """The tensor as a node's output; its gradient is made contiguous, as sending requires."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.contiguous()


def _node(x: Tensor) -> Tensor:
    """The tensor as a node's output, so that a layer may write to it, and torch may detach it in place."""
    # So it isn't a view, a parameter, or a tensor that a layer has saved.
    y: Tensor = _Sent.apply(x) if x.requires_grad and torch.is_grad_enabled() else x
    return y


def _kind(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"tensor of {x.dtype} with grad, whose gradient torch doesn't send back"
    return f"{type(x).__name__} of one" if isinstance(x, tuple) and len(x) == 1 else type(x).__name__


def _shown(sent: Sequence[tuple[list[int], torch.dtype, bool]]) -> str:
    return ", ".join(f"{shape} of {dtype}{' with grad' if grad else ''}" for shape, dtype, grad in sent)


def verify_own(module: nn.Sequential) -> None:
    """Raises for attributes that belong to no layer, and for parameters without values."""
    found = sorted({what for name, what in _OWN.items() if vars(module)[name]})
    if found:
        raise ValueError(
            f"the module as a whole has {' and '.join(found)}, but no process runs it as a whole: expected them in its "
            "layers. Put them into the layer that they are for."
        )
    lazy = [name for name, x in (*module.named_parameters(), *module.named_buffers()) if is_lazy(x)]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy)} have no values yet, and processes would draw different ones: expected a module with "
            "initialised parameters. Call the whole module once with an input, or load a checkpoint into it."
        )


def verify_skips(stages: Sequence[Sequence[Named]]) -> None:
    """Raises for skips between stages that aren't neighbours."""
    faults = [
        f"  {key[1]!r} from stage {source} to stage {target}"
        for key, (source, target) in crossing(stages).items()
        if target != source + 1
    ]
    if faults:
        raise ValueError(
            "torch.distributed.pipelining only sends values from each stage to the next, but these skips go "
            "further:\n" + "\n".join(faults) + "\nExpected a balance that puts each skip's ends into one stage or into "
            "neighbours; on one machine, splitpipe.SplitPipe copies skips directly to where they are popped."
        )


def verify_sharing(stages: Sequence[Sequence[Named]], placement: Sequence[int]) -> None:
    """Raises for parameters and buffers that stages of different processes share: each would train its own copy."""
    first: dict[int, tuple[int, str]] = {}
    faults = []
    for stage, layers in enumerate(stages):
        for at, layer in layers:
            for name, x in (*layer.named_parameters(at), *layer.named_buffers(at)):
                home, known = first.setdefault(id(x), (stage, name))
                if placement[home] != placement[stage]:
                    faults.append(f"  {name} of stage {stage} is {known} of stage {home}")
    if faults:
        raise ValueError(
            "stages of different processes share parameters or buffers, but each process would have a separate copy:\n"
            + "\n".join(faults) + "\nExpected a balance that keeps them in one process, or a copy for each stage."
        )


def parts(stages: Sequence[Sequence[Named]], mine: Sequence[int]) -> list[Part]:
    """The modules of some stages."""
    skips = crossing(stages)
    return [
        Part(
            stages[stage], stage, stage + 1 == len(stages),
            arriving=[key for key, (_, target) in skips.items() if target == stage],
            leaving=[key for key, (source, _) in skips.items() if source == stage],
        )
        for stage in mine
    ]
