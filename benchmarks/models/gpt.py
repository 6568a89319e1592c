"""A small GPT as a plain nn.Sequential: embedding, pre-norm blocks, head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embed(nn.Module):
    """Tokens (batch, length) to vectors (batch, length, width): what the token is plus where it stands."""

    def __init__(self, vocab: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        return vectors


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values together."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    """One transformer block: attention and a four times wider MLP, each normalised before and added back."""

    def __init__(self, width: int, heads: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        narrow = nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), narrow)
        self.dropout = nn.Dropout(dropout)

        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        # All blocks add to one stream, twice each: smaller last projections keep its variance at one block's.
        for last in (self.attention.output, narrow):
            nn.init.normal_(last.weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class Head(nn.Module):
    """Vectors (batch, length, width) to logits (batch, length, vocab)."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits


def gpt(
    *, vocab: int = 256, context: int, width: int, heads: int, layers: int, dropout: float
) -> nn.Sequential:
    """A decoder of ``layers`` blocks, ``layers + 2`` children with the embedding and the head.

    Args:
        vocab: number of tokens; 256 for bytes.
        context: longest sequence, in tokens.
        width: length of a token's vector; a multiple of ``heads``.
        heads: attention heads a block.
        layers: number of blocks.
        dropout: probability in [0, 1), after the embedding, inside attention and after each half of a block.

    Raises:
        ValueError: ``width`` is no multiple of ``heads``.

    Example:
        >>> model = gpt(context=16, width=32, heads=4, layers=2, dropout=0.0)
        >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
        torch.Size([3, 16, 256])
    """
    if width % heads:
        raise ValueError(f"width must be a multiple of heads; found width {width} and {heads} heads")
    blocks = [Block(width, heads, layers, dropout) for _ in range(layers)]
    return nn.Sequential(Embed(vocab, context, width, dropout), *blocks, Head(width, vocab))
