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

    def note(frame: Any, event: str, _: Any) -> None:
        callers = []
        while frame is not None:
            code, frame = frame.f_code, frame.f_back
            callers.append((code.co_filename, code.co_name, code.co_firstlineno))
        ours = [x for x in callers if x[0].startswith(ROOT) and x[1][0] != "<"]
        if event == "call" and ours[:1] == callers[:1]:
            entered[ours[0]] = max(len(ours), entered.get(ours[0], 0))

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    options: Any = {"checkpoint": "never"} if schedule is None else {"schedule": schedule, "loss_fn": nn.MSELoss()}
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        model = SplitPipe(module, devices=["cpu", "cpu"], chunks=4, **where, **options)
        for _ in range(3):
            entered.clear()
            (model(x).square().mean() if schedule is None else model(x, target=y)).backward()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
    found = len({file for file, *_ in entered}), len(entered), max(entered.values())
    assert all(count <= limit for count, limit in zip(found, most)), f"{found} of at most {most}: {sorted(entered)}"
