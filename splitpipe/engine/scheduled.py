"""Scheduled: one step of any module. The loss is loss_fn's, or the module's own: its output, or a field of that."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from splitpipe.batch import outputs
from splitpipe.batch.division import Division
from splitpipe.core import microbatch, stream
from splitpipe.core.note import add_note
from splitpipe.core.thread_state import Hooks
from splitpipe.core.transfer import Routes
from splitpipe.core.worker import Pool
from splitpipe.deferral.accumulator import Sums
from splitpipe.engine.code import CodeForward
from splitpipe.engine.detaching import CodeDetachedTransfer, DetachedTransfer
from splitpipe.engine.dropin import Events
from splitpipe.engine.executor import Executor
from splitpipe.engine.forward import MicrobatchForward
from splitpipe.engine.ops import StageOps, do
from splitpipe.loss.terms import Number, Unknown
from splitpipe.loss.tracing import numbers_of
from splitpipe.partition.homes import Homes
from splitpipe.stage.call import Activation
from splitpipe.stage.stage import Stage
from splitpipe.training.capture import Capture
from splitpipe.training.ledger import Ledger
from splitpipe.training.loss import TARGET, Losses, Objective
from splitpipe.training.op_rows import Execution, OpRun
from splitpipe.training.record import StageTrace
from splitpipe.training.step import Shared


class StepWork:
    """What the threads do in a step of any model.

    Args:
        routes: those between the stages; None if all are on the CPU.
        threads: the threads that run the step.
        stage_of: makes a stage for its ledger.
        run_of: makes the run for all stages.
    """

    recomputes = False

    def __init__(
        self, routes: Routes | None, threads: Pool, stage_of: Callable[[int, Ledger | None], Stage],
        run_of: Callable[[list[Any]], Any],
    ) -> None:
        self._routes = routes
        self._threads = threads
        self._stage_of = stage_of
        self._run_of = run_of
        self._ops: list[StageOps] = []
        self._execution: Execution
        self._traces: list[StageTrace] = []
        self._targets: list[Activation] = []
        self._run: Any
        self.stages: list[Any] = []
        self.forwards: list[Any] = []
        self.transfers: list[DetachedTransfer] = []

    def ops(
        self, j: int, sums: Sums, ledger: Ledger | None, capture: Capture, shared: Shared, trace: StageTrace | None
    ) -> StageOps:
        """The ops of a stage."""
        stage = self._stage_of(j, ledger)
        self.stages.append(stage)
        if trace is not None:
            self._traces.append(trace)
        self._ops.append(StageOps(stage, sums, ledger, capture, shared, trace, self.forwards, self.transfers))
        return self._ops[-1]

    def start(self, target: Division) -> None:
        """Makes the microbatches, once all stages exist, and lets them start."""
        run = self._run = self._run_of(self.stages)
        self._targets = run.call.cut_detached(target, len(self.stages) - 1)
        for i, activation in enumerate(run.call.cut_detached(run.call.input, 0)):
            self.forwards.append(self._forward(i, activation))
            self.transfers.append(self.forwards[-1].transfer)

    def _forward(self, i: int, activation: Activation) -> MicrobatchForward:
        """A microbatch."""
        raise NotImplementedError

    def transfer(self, forward: Any) -> DetachedTransfer:
        """How a microbatch's values reach later stages."""
        raise NotImplementedError

    def finish(self, forward: Any, output: Any) -> Losses:
        """The loss of a microbatch, from the output of the last stage."""
        raise NotImplementedError

    def counting(self, i: int, stage: int) -> Hooks | None:
        """Hooks that count what a microbatch saves on a stage, if a recording needs it."""
        trace = self._traces[stage] if self._traces else None
        return trace.counting() if trace is not None and trace.measured_microbatch == i else None

    def run(self, execution: Execution) -> None:
        """Runs all ops; raises the first error."""
        self._execution = execution
        parked = self.forwards[0].parked
        Executor(execution.rows, self, execution.around, self._run.call.variables, parked=parked).run(self._threads)

    def whole(self, i: int, pause: Callable[[], None]) -> None:
        """The whole forward of a microbatch."""
        self.forwards[i].whole(pause)

    def forward(self, op: OpRun) -> None:
        """F of a stage."""
        self.begin(op)
        self.forwards[op.microbatches[0]].step(op.stage)
        self.end(op)

    def begin(self, op: OpRun) -> None:
        """Begins F of a stage."""
        self._ops[op.stage].begin()

    def end(self, op: OpRun) -> None:
        """Ends F of a stage."""
        self._ops[op.stage].end(*op.microbatches)

    def other(self, op: OpRun) -> None:
        """B, W or BW, on the stage's device."""
        ops = self._ops[op.stage]
        with stream.use(ops.stage.compute):
            do(op, ops)

    def failed(self, op: OpRun, error: BaseException) -> None:
        """Records where an error was raised."""
        add_note(error, f"in {op}, {self.stages[op.stage]}")

    def done(self, complete: bool) -> None:
        """Called when all threads have ended."""
        for ops in self._ops:
            if complete:
                ops.close()
            ops.leave()
        self._execution.done()

    def leave(self) -> None:
        """Ends the step."""
        self._run.verify_copies()

    def bring_home(self, sums: Sequence[Sums]) -> None:
        """Adds the gradients of copied parameters to those of the parameters, on the parameters' devices."""


class CodeStep(StepWork):
    """A step of any module. The loss is that of ``objective``, or the module's own.

    Args:
        homes: those of the module's parameters.
        objective: None for the module's own loss.
        losses: those of the objective.
    """

    forwards: list[CodeForward]

    def __init__(
        self, routes: Routes | None, threads: Pool, stage_of: Callable[[int, Ledger | None], Stage],
        run_of: Callable[[list[Any]], Any], *, homes: Homes, objective: Objective | None,
        losses: Callable[[Tensor, Number | Unknown | None], Losses],
    ) -> None:
        super().__init__(routes, threads, stage_of, run_of)
        self._homes = homes
        self._objective = objective
        self._losses = losses
        self._events: list[Events] = []
        #: The flat outputs of microbatches, outside any graph, if the loss is the module's own.
        self.outputs: dict[int, tuple[list[Any], Any]] = {}

    def _forward(self, i: int, activation: Activation) -> CodeForward:
        return CodeForward(self._run, i, activation, self)

    def transfer(self, forward: CodeForward) -> CodeDetachedTransfer:
        """How a microbatch's values reach later stages."""
        self._events.append(Events(self._run.in_turn))
        return CodeDetachedTransfer(forward, self._homes, self._routes, self._events[-1], self._traces)

    def leave(self) -> None:
        """Ends the step."""
        for events in self._events:
            events.spent()
        super().leave()

    def finish(self, forward: CodeForward, output: Any) -> Losses:
        """The loss of a microbatch, from the module's output."""
        transfer = forward.transfer
        if self._objective is None:
            losses = self._own_loss(forward, output)
        else:
            activation = self._targets[forward.i]
            output = forward.values.hand(output)
            target = microbatch.unflatten(transfer.given(activation.leaves, TARGET), activation.spec)
            losses = self._objective.loss(output, target, forward.trace)
        # Terms may also have been made on earlier stages.
        roots, losses = losses.apart()
        transfer.flights[forward.stage].value = [get_gradient_edge(forward.values.here(root)) for root in roots]
        return losses

    def _own_loss(self, forward: CodeForward, output: Any) -> Losses:
        found, values = loss_of(output), forward.values
        made = None if forward.trace is None else forward.trace.number(found)
        loss = values.here(found)
        if made is None and loss.dim() and forward.trace is not None and forward.trace.facts.rows == 1:
            made = Unknown("a loss with a dimension, which may be that of the rows")
        leaves, nesting = outputs.flatten(output)
        numbers = numbers_of(forward.trace, leaves)
        leaves = [values.latest(x).detach() if isinstance(x, Tensor) else x for x in leaves]
        forward.numbers = {id(leaves[k]): number.detached() if isinstance(number, Number) else number
                        for k, number in numbers.items()}
        self.outputs[forward.i] = leaves, nesting
        forward.transfer.given([], TARGET)
        return self._losses(loss.reshape(()) if loss.dim() else loss, made)

    def bring_home(self, sums: Sequence[Sums]) -> None:
        """Adds the gradients of copied parameters to those of the parameters, on the parameters' devices."""
        for x, copy in self._run.copies():
            for own in sums:
                total = own.take(copy)
                if total is not None and total.value is not None:
                    home = self._homes.stage_on(x.device, len(sums))
                    sums[home].of(x).add(total.value.to(x.device), fresh=True)


def loss_of(output: Any) -> Tensor:
    """The field ``loss`` of a module's output, an attribute or a key; or the output, if it is a number itself."""
    if isinstance(output, Tensor) and not output.dim():
        found: Any = output
    else:
        found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        kind = "no" if found is None else f"a {type(found).__name__} as its"
        raise TypeError(
            f"the module's output, a {type(output).__name__}, has {kind} loss: a schedule runs backward inside the "
            "forward, so it needs the field or key 'loss', a number, or the loss alone. Pass the model what it "
            "computes the loss from (labels=...), or use SplitPipe(..., loss_fn=criterion) and a target; if you only "
            "need outputs, use model.eval() or torch.no_grad(). If the caller computes the loss, as Trainer does for "
            "label_smoothing_factor, leave out the schedule."
        )
    return found


def with_loss(output: Any, loss: Tensor) -> Any:
    """The output with another loss in its field; the output itself is changed if possible."""
    if isinstance(output, Tensor):
        return loss
    if isinstance(output, dict):
        output["loss"] = loss  # transformers' ModelOutput is a dict too, and this sets its attribute.
    elif isinstance(output, tuple) and hasattr(output, "_replace"):
        return output._replace(loss=loss)
    else:
        object.__setattr__(output, "loss", loss)
    return output
