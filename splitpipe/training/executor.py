"""Scheduled: each worker walks its row of a schedule, and forward and backward interleave inside one call of the model.

On the CPU autograd's backward runs in the worker that calls it, so that stages go backward side by side.

Guarantees: a worker that fails stops all others, and the first failure is the one that is raised. Nobody waits for a
value that will not come (see mailbox). When ``run`` returns or raises, no worker is at work any more; an interrupt in
the caller's thread stops the workers after the pass that each is in.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial

from splitpipe.core import thread_state
from splitpipe.core.mailbox import Stopped
from splitpipe.core.note import add_note
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Outcome, Pool, wait
from splitpipe.training.exchange import Exchange
from splitpipe.training.ops import StageOps
from splitpipe.training.rows import OpRun


@dataclass
class Run:
    """The workers' part of one pass.

    Args:
        stages: the ops of each stage.
        names: of the stages, for messages.
        steps: of each worker.
        pool: the workers.
        exchange: of values between the stages.
        around: the thread-local state for what is no forward.
        done: called by the last worker to end its row. No interrupt ever reaches a worker.
    """

    stages: Sequence[StageOps]
    names: Sequence[str]
    steps: Sequence[Sequence[OpRun]]
    pool: Pool
    exchange: Exchange
    around: State
    done: Callable[[], None]
    _doing: dict[int, OpRun] = field(default_factory=dict)
    _error: BaseException | None = None
    _stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: int = 0

    def run(self, variables: Context) -> None:
        """Walks all rows to their ends.

        Args:
            variables: the caller's context variables.

        Raises:
            BaseException: the first that was raised in any worker, or here.
        """
        outcomes: list[Outcome[None]] = []
        try:
            # The first stage's last: it starts at once, and the others' threads should be waiting for it by then.
            for worker in reversed(range(len(self.steps))):
                walk = partial(variables.copy().run, self._walk, worker)
                outcomes.append(self.pool.submit(worker, walk, partial(self._fail, note="before its row was done")))
            wait(outcomes)
        except BaseException as error:
            self._fail(error, f"while the workers did {', '.join(map(str, self._doing.values())) or 'nothing yet'}")
            self.pool.rest()
        outcomes.clear()  # One may hold an error, whose traceback holds this frame.
        failure, self._error = self._error, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # Its traceback holds this frame.

    def _fail(self, error: BaseException, note: str) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
                add_note(error, note)
        self._stopped = True
        self.exchange.stop()

    def _walk(self, worker: int) -> None:
        """All steps of a worker, in it."""
        step = None
        try:
            with thread_state.entered(self.around):
                for step in self.steps[worker]:
                    if self._stopped:
                        return
                    self._doing[worker] = step
                    self._do(step)
                for stage, ops in enumerate(self.stages):
                    if any(step.stage == stage for step in self.steps[worker]):
                        ops.close()
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error, "before its first pass" if step is None else f"in {step}, {self.names[step.stage]}")
        finally:
            with self._lock:
                self._ended += 1
                last = self._ended == len(self.steps)
            if last:
                self.done()

    def _do(self, step: OpRun) -> None:
        ops = self.stages[step.stage]
        if step.kind == "F":
            ops.forward(step.microbatches[0])
        elif step.kind == "W":
            ops.backward_weight(step.microbatches)
        else:
            ops.backward(step.microbatches[0])
            if step.kind == "BW":
                ops.backward_weight(step.microbatches)
        if ops.trace is not None:
            ops.trace.note(step)
