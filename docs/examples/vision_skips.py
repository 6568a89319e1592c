"""A small U-Net as an nn.Sequential, whose long skips go from one stage to another past those in between.

    python docs/examples/vision_skips.py

It learns to find discs in noisy images. It needs only splitpipe. Without GPUs it runs on two CPU stages and warns.

On GPUs with a real model: put your layers into `unet`, with a `Keep` and a `Concat` for each skip, and return your
images from `batch`. ``SplitPipe`` uses all GPUs; ``devices=[0, 1]`` names them. If there are BatchNorm layers, add
``deferred_batch_norm=True``, which keeps the running statistics of whole batches. A module with skips in its own
forward needs no `Keep` and `Concat`: ``splitpipe.attach(model, cuts=[...])`` runs it as it is.
"""
from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitpipe import SplitPipe
from splitpipe.skip import Namespace, pop, skippable, stash


@skippable(stash=["skip"])
class Keep(nn.Module):
    """Stashes its input, which also goes on to the next layer."""

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Concat(nn.Module):
    """Appends the channels that were stashed."""

    def forward(self, x: Tensor) -> Any:
        return torch.cat([x, (yield pop("skip"))], dim=1)


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """The layers of one level."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]


def unet(channels: int = 16, depth: int = 2) -> nn.Sequential:
    """Images go down ``depth`` levels, each half as large and with twice as many channels, and up again."""
    levels = [(channels << level, Namespace()) for level in range(depth)]  # Namespaces tell the skips apart.
    layers = convolution(1, channels)
    for width, namespace in levels:
        layers += [Keep().isolate(namespace), nn.MaxPool2d(2), *convolution(width, 2 * width)]
    for width, namespace in reversed(levels):
        layers += [nn.Upsample(scale_factor=2), Concat().isolate(namespace), *convolution(3 * width, width)]
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 1))


def batch(rows: int = 16, size: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy images with a disc each, and the masks of the discs."""
    x, y = torch.arange(size), torch.arange(size)[:, None]
    (x0, y0), radius = torch.randint(8, size - 8, (2, rows, 1, 1, 1)), torch.randint(4, 9, (rows, 1, 1, 1))
    masks = ((x - x0) ** 2 + (y - y0) ** 2 < radius**2).float()
    return masks + torch.randn_like(masks), masks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model = SplitPipe(unet(), chunks=4, sample=batch()[0])  # The sample is run, to find stages of equal time.
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        images, masks = batch()
        optimizer.zero_grad()
        output = model(images)
        loss = F.binary_cross_entropy_with_logits(output, masks.to(output.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
