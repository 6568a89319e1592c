"""Single-process pipeline parallelism for PyTorch modules, on the devices of one machine."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitpipe.attaching import attach, deferral_report, detach, record
    from splitpipe.backward.split_function import SplitFunction
    from splitpipe.balance.balances import device_map
    from splitpipe.batchnorm import DeferredBatchNorm
    from splitpipe.checking.check import check
    from splitpipe.core.phase import is_checkpointing, is_recomputing
    from splitpipe.pipe import SplitPipe
    from splitpipe.planner.plan import Plan
    from splitpipe.planner.planning import DoesNotFitError, plan

__version__ = "0.1.0.dev0"

__all__ = [
    "DeferredBatchNorm", "DoesNotFitError", "Plan", "SplitFunction", "SplitPipe", "is_checkpointing", "is_recomputing",
    "attach", "check", "deferral_report", "detach", "device_map", "plan", "record",
]

# Imported on first use: importing torch takes seconds, and schedules don't need it.
_OWNERS = {
    "DeferredBatchNorm": "batchnorm", "DoesNotFitError": "planner.planning", "Plan": "planner.plan",
    "SplitFunction": "backward.split_function", "SplitPipe": "pipe", "attach": "attaching", "check": "checking.check",
    "deferral_report": "attaching", "detach": "attaching", "device_map": "balance.balances",
    "is_checkpointing": "core.phase", "is_recomputing": "core.phase", "plan": "planner.planning", "record": "attaching",
}
_DOORS = "balance", "distributed", "schedule", "skip"

if not TYPE_CHECKING:  # Hidden from type checkers, so that they report unknown names.

    def __getattr__(name):
        if name in _DOORS:
            return import_module(f"splitpipe.{name}")
        if name not in _OWNERS:
            raise AttributeError(f"module 'splitpipe' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"splitpipe.{_OWNERS[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWNERS, *_DOORS})
