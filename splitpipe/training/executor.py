"""Scheduled: each worker walks its row of a schedule, and forward and backward interleave inside one call of the model.

On the CPU autograd's backward runs in the worker that calls it, so that stages go backward side by side.

Guarantees: a worker that fails stops all others, and the first failure is the one that is raised. Nobody waits for a
value that will not come (see mailbox). When ``run`` returns or raises, no worker is at work any more; an interrupt in
the caller's thread stops the workers after the op that each is in.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial

from splitpipe.core import thread_state
from splitpipe.core.mailbox import Exchange, Stopped
from splitpipe.core.note import add_note, raise_first
from splitpipe.core.thread_state import State
from splitpipe.core.worker import Pool
from splitpipe.training.ops import StageOps
from splitpipe.training.rows import OpRun


@dataclass
class Execution:
    """The workers' part of one call.

    Args:
        stages: the ops of each stage.
        names: of the stages, for messages.
        rows: the ops of each worker.
        pool: the workers.
        exchange: of values between the stages.
        around: the thread-local state for what is no forward.
        done: called by the last worker to end its row. No interrupt ever reaches a worker.
    """

    stages: Sequence[StageOps]
    names: Sequence[str]
    rows: Sequence[Sequence[OpRun]]
    pool: Pool
    exchange: Exchange
    around: State
    done: Callable[[], None]
    _doing: dict[int, OpRun] = field(default_factory=dict)
    _errors: list[BaseException] = field(default_factory=list)
    _stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: int = 0

    def run(self, variables: Context) -> None:
        """Walks all rows to their ends.

        Args:
            variables: the caller's context variables.

        Raises:
            BaseException: the first that was raised in any worker, or one that was raised here.
        """
        # The first stage's last: it starts at once, and the others' threads should be waiting for it by then.
        workers = reversed(range(len(self.rows)))
        walks = [(worker, partial(variables.copy().run, self._walk, worker)) for worker in workers]
        try:
            self.pool.run(walks, self._stop)
            raise_first(self._errors)
        except BaseException:
            self._errors = []  # A traceback holds this frame.
            raise

    def _stop(self, error: BaseException) -> None:
        """Ends the rows: the caller was interrupted, or a worker's thread has died."""
        add_note(error, f"while the workers did {', '.join(map(str, self._doing.values())) or 'nothing yet'}")
        self._stopped = True
        self.exchange.stop()

    def _fail(self, error: BaseException, note: str) -> None:
        add_note(error, note)
        self._errors.append(error)
        self._stopped = True
        self.exchange.stop()

    def _walk(self, worker: int) -> None:
        """The row of a worker, in it."""
        op = None
        try:
            with thread_state.entered(self.around):
                for op in self.rows[worker]:
                    if self._stopped:
                        return
                    self._doing[worker] = op
                    self._do(op)
                for stage, ops in enumerate(self.stages):
                    if any(op.stage == stage for op in self.rows[worker]):
                        ops.close()
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error, "before its first op" if op is None else f"in {op}, {self.names[op.stage]}")
        finally:
            with self._lock:
                self._ended += 1
                last = self._ended == len(self.rows)
            if last:
                self.done()

    def _do(self, op: OpRun) -> None:
        ops = self.stages[op.stage]
        if op.kind == "F":
            ops.forward(op.microbatches[0])
        elif op.kind == "W":
            ops.backward_weight(op.microbatches)
        else:
            ops.backward(op.microbatches[0])
            if op.kind == "BW":
                ops.backward_weight(op.microbatches)
        if ops.trace is not None:
            ops.trace.note(op)
