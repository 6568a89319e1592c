"""torch's layers that take the batch as their second dimension unless they are made with ``batch_first``."""
from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import nn

_LAYERS = (
    nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
    nn.TransformerDecoderLayer, nn.MultiheadAttention, nn.RNNBase,
)


def warn_of_layout(module: nn.Sequential) -> None:
    """Warns if a layer of an nn.Sequential takes [length, batch, ...], which would be split along the length."""
    for name, layer in _layers(module, ""):
        if isinstance(layer, _LAYERS) and not _batch_first(layer):
            warnings.warn(
                f"layer {name!r} is a {type(layer).__name__} without batch_first, which takes the batch as its second "
                "dimension, but microbatches are split along the first: expected SplitPipe(..., batched=1) if the "
                "input "
                "is [length, batch, ...], batched=0 if another layer transposes it, or batch_first=True.",
                stacklevel=4,
            )
            return


def _layers(module: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for own, layer in module._modules.items():
        if isinstance(layer, nn.Sequential):
            yield from _layers(layer, f"{prefix}{own}.")
        elif layer is not None:
            yield prefix + own, layer


def _batch_first(layer: nn.Module) -> bool:
    found = [part.batch_first for part in layer.modules() if isinstance(getattr(part, "batch_first", None), bool)]
    return all(found)
