"""Growth from one machine to many: bubble and traffic of a GPT's step at 4, 64 and 1024 devices, simulated.

Nothing is measured here. A model of many blocks is cut into as many stages as a pipeline has devices; the other devices
have copies of that pipeline, each with a part of the batch (data parallel). Times follow from the FLOPs of a block and
what a device computes in a second; a hop's from its bytes, the bandwidth and the latency between neighbours. The bubble
is that of ``splitpipe.schedule.simulate``.

Example:
    python -m benchmarks.parts.growth
    python -m benchmarks.parts.growth --bandwidth 25 --latency 20 --save benchmarks/results/growth.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import script
from benchmarks.harness.measure import Row
from splitpipe import schedule

GB, GiB = 10**9, 2**30
#: Devices, and how many of them a pipeline has.
PLACES = {4: 4, 64: 8, 1024: 16}


@dataclass(frozen=True)
class Setting:
    """A model, and the devices that train it.

    Attributes:
        width: of a block.
        blocks: how many the model has.
        tokens: of a microbatch.
        size: bytes of a number.
        speed: FLOPs a second of a device, as reached.
        bandwidth: bytes a second from one device to its neighbour.
        latency: seconds until the first byte is there.
    """

    width: int
    blocks: int
    tokens: int
    size: int
    speed: float
    bandwidth: float
    latency: float

    @property
    def weights(self) -> int:
        """Numbers of a block: attention has 4 matrices, and the other half 8 times as much as one of them."""
        return 12 * self.width**2

    def costs(self, devices: int) -> schedule.Costs:
        """Seconds of a device's share of a microbatch, and of a hop. Attention itself is left out."""
        forward = 2 * self.weights * self.tokens * self.blocks / devices / self.speed
        hop = self.latency + self.tokens * self.width * self.size / self.bandwidth
        return schedule.Costs(forward=forward, backward_input=forward, backward_weight=forward, copy=hop)


def row(name: str, devices: int, chunks: int, it: Setting) -> Row:
    """One schedule on so many devices.

    Args:
        name: of the schedule.
        devices: in all.
        chunks: microbatches that each device of a pipeline gets, times their number.
        it: what is trained, and where.
    """
    depth = PLACES[devices]
    copies = devices // depth
    made = schedule.build(name, devices=depth, chunks=chunks * depth)
    costs = it.costs(depth)
    played = schedule.simulate(made, costs)
    hops = sum(made.placement[k] != made.placement[k + 1] for k in range(made.stages - 1))
    sent = 2 * hops * made.microbatches * it.tokens * it.width * it.size
    gradients = it.weights * it.blocks / depth * it.size
    reduced = 2 * (copies - 1) / copies * gradients
    return {
        "devices": devices,
        "pipeline x copies": f"{depth} x {copies}",
        "schedule": name,
        "microbatches": made.microbatches,
        "bubble": played.bubble_longest,
        "step, s": played.longest,
        "between stages, GiB a pipeline": sent / GiB,
        "hop / forward of a device": costs.copy / costs.forward,
        "gradients, GiB a device": reduced / GiB,
        "their time / step": reduced / it.bandwidth / played.longest,
    }


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = script.make_parser("growth", __doc__)
    add = parser.add_argument
    add("--schedules", nargs="+", choices=schedule.names(), default=["1f1b", "zb-h1", "v-half", "zb-v"],
        help="to simulate")
    add("--chunks", type=int, default=4, help="microbatches for each device of a pipeline")
    add("--width", type=int, default=8192, help="of a block")
    add("--blocks", type=int, default=64, help="of the model")
    add("--tokens", type=int, default=4096, help="of a microbatch")
    add("--speed", type=float, default=400, help="TFLOP/s that a device reaches")
    add("--bandwidth", type=float, default=50, help="GB/s from a device to its neighbour")
    add("--latency", type=float, default=10, help="microseconds of a hop")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; the exit code."""
    options = make_parser().parse_args(arguments)
    it = Setting(
        options.width, options.blocks, options.tokens, 2, options.speed * 1e12, options.bandwidth * GB,
        options.latency * 1e-6,
    )
    rows = [row(name, devices, options.chunks, it) for devices in PLACES for name in options.schedules]
    return script.finish(options, script.environment(), {"growth": rows})


if __name__ == "__main__":
    script.run(main)
