"""README's examples, from top to bottom, with CUDA devices in the place of the CPU."""
from __future__ import annotations

import re
import sys
import traceback

import softcuda
import torch

from tests.doors.test_readme import README, blocks, missing


def main() -> int:
    """Runs them in one namespace, as a reader types them in; the exit status, 1 if anything is wrong."""
    namespace: dict[str, object] = {"__name__": "readme"}
    wrong, left_out, devices = [], [], torch.cuda.device_count()
    for line, source in blocks(README, "python"):
        at = f"README.md, line {line}"
        if lacking := missing(source):
            left_out.append(f"{at}: {', '.join(sorted(lacking))} not installed")
            continue
        try:
            exec(compile("\n" * (line - 1) + on_cuda(source, devices), str(README), "exec"), namespace)
        except Exception as error:
            traceback.print_exc()
            wrong.append(f"{at}: {type(error).__name__}: {error}")
    wrong += [*softcuda.hazards(), *softcuda.kernels()]
    print(*[f"left out: {what}" for what in left_out], *[f"wrong: {what}" for what in wrong], sep="\n")
    return int(bool(wrong))


def on_cuda(source: str, devices: int) -> str:
    """The source with these devices, in turn, in each list of CPUs."""
    def named(found: re.Match[str]) -> str:
        names = [f'"cuda:{number % devices}"' for number in range(found[0].count('"cpu"') * int(found[1] or 1))]
        return f"[{', '.join(names)}]"

    return re.sub(r'\["cpu"(?:, "cpu")*\](?: \* (\d+))?', named, source)


if __name__ == "__main__":
    sys.exit(main())
