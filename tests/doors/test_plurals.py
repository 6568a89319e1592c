"""One device is no devices: messages count in words."""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from splitpipe import SplitPipe, schedule

ONE = nn.Linear(2, 2)


def one(*numbers: int, **options: Any) -> Any:
    return SplitPipe(nn.Sequential(ONE), list(numbers) or [1], **{"devices": ["cpu"], **options})


MESSAGES: dict[str, Callable[[], object]] = {
    "balance": lambda: one(2),
    "rows": lambda: one(1, schedule=schedule.build("1f1b", 1, 1), loss_fn=nn.MSELoss(), chunks=2),
    "devices": lambda: SplitPipe(nn.Sequential(ONE, ONE), [1, 1], devices=["cpu"]),
    "layer index": lambda: one()[1],
    "batched": lambda: one(batched=[True])(torch.rand(2, 2)),
    "costs": lambda: schedule.simulate(schedule.build("1f1b", 2, 2), schedule.Costs([1.0], 1, 1)),
    "copy": lambda: schedule.simulate(schedule.build("1f1b", 2, 2), schedule.Costs(1, 1, 1, copy=[1.0, 1.0])),
    "search": lambda: schedule.search(1, 1, memory=[1, 2]),
    "names": lambda: schedule.Recording(schedule.build("1f1b", 2, 2), ["cpu"]),
    "too many": lambda: schedule.build("1f1b", 1, 10**9),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_one_of_a_thing_is_no_plural(what: str, no_accelerator: None) -> None:
    with pytest.raises((ValueError, IndexError, TypeError)) as info:
        MESSAGES[what]()
    assert re.findall(r"(?<![\d.,-])1 (?!is )[a-z]+s\b", str(info.value)) == [], str(info.value)


def test_a_report_of_one_parameter() -> None:
    assert str(SplitPipe(nn.Sequential(nn.PReLU()), [1], devices=["cpu"]).deferral_report()).endswith(
        "deferred: 0 of 1 parameter, 0.0% of the elements"
    )
