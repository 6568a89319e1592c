"""Data parallelism around a pipeline: the streams that DistributedDataParallel's reducer takes gradients from.

It reduces buckets of gradients in one order, each bucket of one device. A bucket that is full waits for those before
it, and whichever of autograd's threads fills the last of these has it reduced: behind the stream that is current *in
that thread* for the bucket's device. That is the default stream, unless it is the thread of that device, and then it is
the stream of the last gradient alone. So where gradients come from other streams than their devices' default ones, the
reduction may read a bucket that nobody has written yet. Nothing of ours comes between: its hook copies the gradient
into the bucket and starts the reduction in one go.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from splitpipe.core.stream import Stream, is_default


def verify_streams(layers: Iterable[nn.Module], streams: Sequence[Stream]) -> None:
    """Refuses a forward whose gradients DistributedDataParallel would reduce behind another stream than theirs.

    Args:
        layers: of the model.
        streams: that its stages compute on, and those of the caller.
    """
    if all(map(is_default, streams)) or not torch.is_grad_enabled():
        return
    if len({(each.device_index, each.stream_id) for each in streams if each is not None}) == 1:
        return
    wrapper: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)  # Whose forward runs, in any thread.
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return
    reduced = {id(parameter) for parameter in wrapper.module.parameters()}
    if any(id(parameter) in reduced for layer in layers for parameter in layer.parameters()):
        found = sorted({f"stream {each.stream_id} of {each.device}" for each in streams if each is not None})
        raise RuntimeError(
            "a SplitPipe inside DistributedDataParallel computes on streams that are not all their devices' default "
            f"ones: {', '.join(found)} (0 is the default). DistributedDataParallel starts to reduce the gradients of "
            "one device in the thread of another, on the default stream, and would read some before they are there. "
            "Expected devices that are named as devices, and a call outside of `with torch.cuda.stream(...)`."
        )
