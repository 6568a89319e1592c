"""How much code a step enters, in all threads: as much as can be read in one sitting."""
from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitpipe
from splitpipe import SplitPipe
from tests.helpers.modules import linears, module_of

ROOT = str(Path(splitpipe.__file__).parent)
LAYERS = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)])
MODULE = module_of(lambda self, x: self.d(self.c(self.b(self.a(x).relu()).relu()).relu()), **linears(*"abcd"))


@pytest.mark.parametrize(("module", "where", "schedule", "most"), [
    (LAYERS, {"balance": [2, 2]}, None, (20, 110, 12)), (LAYERS, {"balance": [2, 2]}, "zb-h1", (28, 190, 14)),
    (MODULE, {"cuts": ["c"]}, None, (26, 150, 14)), (MODULE, {"cuts": ["c"]}, "zb-h1", (34, 220, 15)),
])
def test_a_step_enters_few_files_and_functions(module: Any, where: Any, schedule: Any, most: Any) -> None:
    """Files, functions without lambdas and comprehensions, and how deep these call each other, in a third step."""
    entered: dict[tuple[str, str, int], int] = {}

    def ours(frame: Any) -> bool:
        return frame.f_code.co_filename.startswith(ROOT) and frame.f_code.co_name[0] != "<"

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and ours(frame):
            code, depth = frame.f_code, 0
            while frame is not None:
                depth, frame = depth + ours(frame), frame.f_back
            key = code.co_filename, code.co_name, code.co_firstlineno
            entered[key] = max(depth, entered.get(key, 0))

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    options: Any = {"checkpoint": "never"} if schedule is None else {"schedule": schedule, "loss_fn": nn.MSELoss()}
    model = SplitPipe(module, devices=["cpu", "cpu"], chunks=4, **where, **options)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        for _ in range(3):
            entered.clear()
            (model(x).square().mean() if schedule is None else model(x, target=y)).backward()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
    found = len({file for file, *_ in entered}), len(entered), max(entered.values())
    assert all(count <= limit for count, limit in zip(found, most)), f"{found} of at most {most}: {sorted(entered)}"
