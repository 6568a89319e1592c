"""Where a module is cut that nobody has measured."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from splitpipe.partition.by_bytes import cuts_of_map

A, B, C = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


class Model(nn.Module):
    """An embedding, four layers, and a head that is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("devices", "cuts", "found"),
    [
        ({"embed": A, "layers.0": A, "layers.1": A, "layers.2": B, "layers.3": B, "norm": B, "head": B},
         ["layers.2"], [A, B]),
        ({"embed": A, "layers.0": A, "layers.1": B, "layers.2": B, "layers.3": C, "norm": C, "head": A},
         ["layers.1", "layers.3"], [A, B, C]),  # A head that is tied goes back to the embedding.
        ({"embed": A, "layers": B, "norm": B, "head": B}, ["layers.0"], [A, B]),  # A list is never called.
        ({"layers.2": B, "embed.weight": B, "embed": A}, ["layers.2"], [A, B]),
        ({"": A}, [], []),
    ],
    ids=["halves", "back", "list", "order", "one"],
)
def test_a_stage_begins_where_the_map_has_a_new_device(
    devices: dict[str, torch.device], cuts: list[str], found: list[torch.device]
) -> None:
    model = Model()
    model.hf_device_map = devices  # type: ignore[assignment]
    assert cuts_of_map(model) == (cuts, found)
