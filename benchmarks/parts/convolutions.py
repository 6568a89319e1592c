"""Convolutions that a CPU gains by splitting: chains of equal ones in a pipeline, all of them split or none.

The constants in splitpipe/deferral/convolution.py follow from it.

Example:
    python -m benchmarks.parts.convolutions --threads 1 --save benchmarks/results/convolutions-cpu.json
    python -m benchmarks.parts.convolutions --sizes 1x64x8x3 4x64x16x3 --passes 5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.harness import measure, script
from benchmarks.harness.measure import Row
from splitpipe import SplitPipe
from splitpipe.deferral.convolution import Convolution

KiB, Mi = 2**10, 2**20
SIZES = (
    "1x64x8x3 1x128x4x3 1x256x2x3 1x32x16x3 1x128x8x1 1x256x4x1 1x512x2x1 1x256x8x1 1x512x4x1 1x64x16x3 1x128x8x3 "
    "1x256x4x3 1x512x2x3 1x32x32x3 1x512x4x3 4x64x16x3 2x64x32x3 4x128x16x3 4x256x8x3"
)


@dataclass(frozen=True)
class Size:
    """A convolution of one microbatch, with as many channels out as in.

    Attributes:
        samples: of a microbatch.
        channels: of input and output.
        side: of the image, in pixels.
        kernel: side of the kernel.
    """

    samples: int
    channels: int
    side: int
    kernel: int

    @staticmethod
    def of(text: str) -> Size:
        """Samples, channels, side and kernel, as in 1x64x8x3.

        Example:
            >>> Size.of("1x64x8x3").side
            8
        """
        try:
            samples, channels, side, kernel = map(int, text.split("x"))
        except ValueError as error:
            expected = "expected samples x channels x side x kernel, as in 1x64x8x3"
            raise argparse.ArgumentTypeError(f"{text!r}: {expected}") from error
        return Size(samples, channels, side, kernel)

    @property
    def row(self) -> Row:
        """The numbers that the choice depends on."""
        weight, image = self.channels**2 * self.kernel**2, self.samples * self.channels * self.side**2
        return {
            "samples": self.samples, "channels": self.channels, "side": self.side, "kernel": self.kernel,
            "Mi multiplications": weight * self.samples * self.side**2 / Mi,
            "weight, KiB": 4 * weight / KiB,
            "input and output, KiB": 8 * image / KiB,
        }

    def layers(self, length: int) -> nn.Sequential:
        """A chain of them, the same every time."""
        torch.manual_seed(0)
        chain: list[nn.Module] = []
        for _ in range(length):
            around = self.kernel // 2
            chain += [nn.Conv2d(self.channels, self.channels, self.kernel, padding=around, bias=False), nn.ReLU()]
        return nn.Sequential(*chain)


def steps(size: Size, length: int, chunks: int) -> dict[str, Callable[[], None]]:
    """A training step by each engine, drop-in and scheduled."""
    count = size.samples * chunks
    x, target = torch.randn(count, size.channels, size.side, size.side), torch.zeros(count)

    def loss_fn(y: Tensor, _: Tensor) -> Tensor:
        return y.square().mean()

    def step(backward: str, schedule: str) -> Callable[[], None]:
        model = SplitPipe(
            size.layers(length), [length, length], devices=["cpu"] * 2, chunks=chunks, checkpoint="never",
            backward=backward, schedule=schedule, loss_fn=loss_fn,  # type: ignore[arg-type]
        )

        def run() -> None:
            model.zero_grad()
            (model(x).square().mean() if schedule == "gpipe" else model(x, target=target)).backward()

        return run

    return {
        "autograd": step("autograd", "gpipe"), "split": step("split", "gpipe"),
        "1f1b": step("autograd", "1f1b"), "zb-h1": step("split", "zb-h1"),
    }


def compare(sizes: Sequence[Size], length: int, chunks: int, passes: int) -> list[Row]:
    """A row for each size: processor time of a step, all convolutions split, over that of autograd's own."""
    rows = []
    with mock.patch.object(Convolution, "pays", lambda *_: True):
        for size in sizes:
            found = measure.interleaved(steps(size, length, chunks), passes)
            times = {name: timings.cpu for name, timings in found.items()}
            rows.append({
                **size.row,
                "autograd, us": min(times["autograd"]) / length / chunks * 1e6,
                "drop-in, split / autograd": measure.ratio(times["split"], times["autograd"]),
                "zb-h1, split / 1f1b, autograd": measure.ratio(times["zb-h1"], times["1f1b"]),
            })
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("convolutions", __doc__)
    add = parser.add_argument
    add("--sizes", type=Size.of, nargs="+", default=[Size.of(text) for text in SIZES.split()], metavar="SIZE",
        help="samples x channels x side x kernel")
    add("--length", type=int, default=16, help="convolutions in a chain")
    add("--chunks", type=int, default=8, help="microbatches")
    add("--passes", type=int, default=9, help="how often each step is timed")
    add("--threads", type=int, help="of torch's; unset: as many as it takes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; the exit code."""
    options = make_parser().parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = script.environment()
    tables = {"all convolutions split": compare(options.sizes, options.length, options.chunks, options.passes)}
    return script.finish(options, found, tables)


if __name__ == "__main__":
    script.run(main)
