"""An nn.Sequential divided into stages by balance: which device and which worker runs each of them."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations

from torch import nn

from splitpipe.core.stream import Place


def spans(balance: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each stage, and the one after its last."""
    return [(end - number, end) for end, number in zip(accumulate(balance), balance)]


def verify_stages(stages: Sequence[Sequence[nn.Module]], places: Sequence[Place]) -> None:
    """Raises for a parameter or buffer that stages on different devices share."""
    first: dict[int, int] = {}  # The first stage of each tensor, by identity.
    for stage, layer in [(stage, layer) for stage, layers in enumerate(stages) for layer in layers]:
        for name, x in (*layer.named_parameters(), *layer.named_buffers()):
            home = first.setdefault(id(x), stage)
            if places[home].device != places[stage].device:
                raise ValueError(
                    f"{type(layer).__name__}.{name} of stage {stage} ({places[stage]}) is also in stage {home} "
                    f"({places[home]}): expected layers that share a tensor in one stage, or in stages on one device. "
                    "Choose another balance, or give each layer a separate copy (copy.deepcopy)."
                )


def workers(
    stages: Sequence[Sequence[nn.Module]], places: Sequence[Place], rows: Sequence[int] | None = None
) -> list[int]:
    """The worker of each stage: one per accelerator; on the CPU one per row, or per set of stages that share state."""
    # Two threads that update one buffer lose updates, and two that call one layer could clash in what it keeps (such as
    # the weight that a hook of weight_norm sets). One thread runs its stages in the order of the clock.
    keys = [_keys(*each) for each in zip(stages, places, range(len(stages)) if rows is None else rows)]
    first = list(range(len(stages)))  # For each stage, the first one with the same worker.
    for stage, other in combinations(range(len(stages)), 2):
        if keys[stage] & keys[other]:  # A stage that shares with several merges their workers.
            into, joined = sorted([first[stage], first[other]])
            first = [into if found == joined else found for found in first]
    return [sorted({*first}).index(found) for found in first]


def _keys(layers: Sequence[nn.Module], place: Place, row: int) -> set[object]:
    if place.device.type != "cpu":
        return {f"row {row}", place.device}
    parts = {part for layer in layers for part in layer.modules()}
    state = [part for part in parts if next(part.parameters(), None) is not None]  # Others keep little.
    return {f"row {row}", *state, *[id(buffer) for layer in layers for buffer in layer.buffers()]}
