"""``SplitPipe``: a module that runs as a pipeline, and otherwise behaves like the module that it wraps."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch
from torch import nn

from splitpipe import checks
from splitpipe.balance.defaults import chosen_balance, chosen_cuts
from splitpipe.batch.custom_split import Split
from splitpipe.batch.flags import verify_batched
from splitpipe.batch.layout import warn_of_layout
from splitpipe.batchnorm import DeferredBatchNorm, log_undeferred
from splitpipe.checks import Checkpoint
from splitpipe.core.stream import Device
from splitpipe.deferral.report import DeferralReport
from splitpipe.loss.reducing import Reduce
from splitpipe.partition import placing
from splitpipe.partition.blocks import balance_of
from splitpipe.partition.homes import verify_filled
from splitpipe.partition.resident import Shell
from splitpipe.piped import Given, Sample, options_of, piped
from splitpipe.runtime.chain import ChainRuntime
from splitpipe.runtime.code import CodeRuntime
from splitpipe.runtime.guards import called, outside_of_compilers, refuse_export, refuse_transforms
from splitpipe.schedule.construct.library import build
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.skip.pairs import verify_skippables


class SplitPipe(Shell):
    """Runs a module as a pipeline of stages on several devices of one machine, in one process.

    A batch is split into microbatches, and the stages work on different ones at the same time (GPipe,
    arXiv 1811.06965). Outputs, losses, gradients, buffers, parameter hooks and the keys of ``state_dict()`` are those
    of the unwrapped module. The training loop stays as it is.

    Args:
        module: an nn.Sequential, or any other module, which runs its own forward. The layers of a Sequential take and
            return a tensor, or any nesting of tuples, lists, dicts and namedtuples with tensors and other values in it.
            They are moved to their stage's device now; parameters of other modules are, in the first call.
        balance: for an nn.Sequential, the number of layers of each stage. Default, if ``cuts`` isn't given either:
            stages whose weights, gradients and Adam states fill the same share of their device's free memory, or, with
            ``sample``, stages that take the same time. For other modules, cuts are then chosen as by
            ``splitpipe.attach``.
        devices: one per stage, or one per row of the schedule: a ``torch.device``, an index, a string, or a
            ``torch.Stream`` to compute on. A device may be repeated. Default: all accelerators; without any, the CPU
            for every stage (two stages, if their number isn't given).
        chunks: number of microbatches. Batches are split as by ``torch.chunk``, so there may be fewer. Default: those
            of a given Schedule, or else four per device.
        checkpoint: which microbatches drop what autograd saves, and recompute it in backward: ``"always"``,
            ``"except_last"`` or ``"never"``. Default: ``"except_last"`` for gpipe, ``"never"`` for other schedules.
            Nothing is checkpointed in eval mode or without grad mode.
        deferred_batch_norm: whether BatchNorm layers keep the running statistics of the whole batch, as nn.BatchNorm
            would, instead of those of each microbatch. If so, they become ``DeferredBatchNorm`` layers.
        backward: ``"split"`` computes the input gradient of a stage first and its weight gradients later, for several
            microbatches together (2BP, arXiv 2405.18047). ``"autograd"`` leaves both to autograd. If the schedule
            separates W from B, it decides when weight gradients are computed.
        stash_limit: how many bytes of layer inputs and output gradients a stage may keep for its weight gradients.
            Above this limit, weight gradients are computed earlier, those that keep the most memory first. With
            checkpointing, nothing is kept while a microbatch is recomputed. Default: for each weight, as many bytes as
            its gradient takes, which autograd would need by then; and, on an accelerator, a sixteenth of its memory.
        schedule: a name from ``splitpipe.schedule.names()``, or a ``splitpipe.schedule.Schedule`` with the same numbers
            of stages and microbatches. All but ``"gpipe"`` run backward inside the forward, and so need ``loss_fn``
            or, with ``cuts``, the field ``loss`` of the module's output. For a schedule with several stages per device,
            the balance has one number for each of its stages.
        loss_fn: ``loss_fn(output, target)`` returns a number. It is traced while it is computed, so that the loss is
            that of the whole batch for sums and means over any count. Or it returns a pair (total, count); the loss is
            then the sum of totals divided by the sum of counts.
        grad_scaler: the training loop's ``torch.amp.GradScaler``, for a schedule under float16 autocast, which needs
            the scale before ``loss.backward()``.
        batched: how the input is split: a nesting that matches the outer levels of the input's, with True (tensors are
            split along their first dimension), an int (along this dimension), ``"rows"`` (a list with one entry per
            row) or False (every microbatch gets the whole value): ``(True, False)`` for ``model((x, mask))``. With
            ``cuts``, a dict by argument name; the target's key is ``"target"``. Default: all tensors, and lists with
            one entry per row, are split.
        split: ``split(args, kwargs, chunks)`` returns (args, kwargs) for each microbatch, for inputs that ``batched``
            can't describe.
        cuts: names of submodules, instead of ``balance``: stage j+1 starts where ``cuts[j]`` is called.
        reduction: how numbers returned by microbatches, such as losses, are combined: ``"mean"`` weighted by rows,
            ``"sum"``, or (drop-in only) a function of the list of values and the list of row counts. Default: as the
            trace of the computation shows; numbers that an nn.Sequential returns are stacked.
        sample: the arguments of a call (keyword arguments in a dict, positional ones in a tuple). With ``cuts``, it is
            used to move the parameters to their devices now; otherwise, the first call does. With neither ``cuts`` nor
            ``balance``, stages are timed on it.
        compile: True compiles layers (with ``cuts``: blocks) with torch.compile, equal ones only once. Their backward
            has two halves, so that all weight gradients are deferred. A dict sets options: backend, dynamic, mode,
            options.

    Raises:
        TypeError: ``balance`` is given for a module that isn't a plain nn.Sequential, skips don't match, or an argument
            has a wrong type.
        ValueError: an argument has a wrong value (the message reports what was found and what was expected), or the
            devices can't hold the module.
        IndexError: there are fewer devices than stages (this exception is a ValueError too).

    Example:
        >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        >>> model = SplitPipe(torch.nn.Sequential(*layers), balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
        >>> loss = model(torch.randn(10, 4)).square().mean()
        >>> loss.backward()
        >>> list(model.state_dict())
        ['0.weight', '0.bias', '2.weight', '2.bias']
        >>> model = SplitPipe(torch.nn.Sequential(*layers), balance=[2, 1], devices=["cpu", "cpu"], chunks=4,
        ...                   schedule="zb-h1", loss_fn=torch.nn.MSELoss())
        >>> model(torch.randn(10, 4), target=torch.randn(10, 2)).backward()
    """

    _runtime: ChainRuntime | CodeRuntime

    def __init__(
        self,
        module: nn.Module,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int | None = None,
        checkpoint: Checkpoint | None = None,
        deferred_batch_norm: bool = False,
        backward: Literal["split", "autograd"] = "split",
        schedule: str | Schedule = "gpipe",
        loss_fn: Callable[..., Any] | None = None,
        grad_scaler: object | None = None,
        stash_limit: int | None = None,
        batched: Any = None,
        split: Split | None = None,
        cuts: Iterable[str] | None = None,
        reduction: Literal["mean", "sum"] | Reduce | None = None,
        sample: Sample | None = None,
        compile: bool | Mapping[str, Any] = False,
    ) -> None:
        """Moves the layers to the devices of their stages. help(splitpipe.SplitPipe) explains all arguments."""
        super().__init__()
        if cuts is not None and balance is not None:
            raise ValueError(
                "both balance and cuts are given: expected one of them, numbers of layers or names of submodules."
            )
        given = Given(
            devices=devices, chunks=chunks, checkpoint=checkpoint, deferred_batch_norm=deferred_batch_norm,
            backward=backward, schedule=schedule, loss_fn=loss_fn, grad_scaler=grad_scaler, stash_limit=stash_limit,
            split=split, reduction=reduction, compile=compile,
        )
        self._balance = list[int]()
        if cuts is not None or balance is None and not checks.is_layered(module) and isinstance(module, nn.Module):
            cuts, given["devices"] = chosen_cuts(module, cuts, devices, schedule, sample)
            plain = sample is None and not isinstance(batched, dict)
            balance = balance_of(module, cuts) if plain else None
        if cuts is not None and balance is None:
            forward = piped(module, cuts, given, batched=batched, sample=sample)
            self._runtime = forward.runtime
            self.wrap(module, forward)
        else:
            layers = verified(module)
            if balance is None:
                balance, given["devices"] = chosen_balance(layers, devices, schedule, sample)
            self._runtime, self._balance = chained(layers, balance, given, batched)
            self._stand_for(layers)
            # Not by nn.Module's __setattr__, which would register a loss as a layer, with its parameters in the
            # state_dict.
            self.__dict__.update(_loss_fn=loss_fn, _grad_scaler=grad_scaler)
        self._places = self._runtime.options.places
        if not deferred_batch_norm:
            log_undeferred(module, self.chunks)

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """The devices of layers, or of a module's blocks, by name, for accelerate and transformers' Trainer."""
        if isinstance(self._runtime, CodeRuntime):
            return self._runtime.device_map()
        stages = [device for device, count in zip(self.devices, self._balance) for _ in range(count)]
        return dict(zip(self._modules, stages))

    @property
    def cuts(self) -> list[str]:
        """The names of the modules with whose calls stages 1, 2, ... start; empty for an nn.Sequential."""
        return list(self._runtime.options.cuts) if isinstance(self._runtime, CodeRuntime) else []

    @property
    def balance(self) -> list[int]:
        """The number of layers of each stage; empty for a module with cuts."""
        return list(self._balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage: inputs are copied to the first, outputs are on the last."""
        return [place.device for place in self._places]

    @property
    def chunks(self) -> int:
        """The number of microbatches of a batch with at least this many rows."""
        return self._runtime.options.chunks

    @property
    def checkpoint(self) -> Checkpoint:
        """Which microbatches are checkpointed: "always", "except_last" or "never"."""
        return self._runtime.options.checkpoint

    @property
    def schedule(self) -> Schedule:
        """The order of the ops on each device."""
        options = self._runtime.options
        return build("gpipe", len(options.places), options.chunks) if options.schedule is None else options.schedule

    def forward(self, input: Any, target: Any = None) -> Any:
        """Runs the batch through the pipeline: returns the output, or, given a target, the loss.

        Args:
            input: a tensor of shape (batch, ...), or a nesting of such tensors with the same batch size and of lists
                with one entry per row. Values that ``batched`` marks False, tensors without dimensions, and other
                values are passed to every microbatch as they are. Tensors on other devices are copied to the first
                stage's.
            target: for ``loss_fn``, a nesting with the same batch size as the input. The whole schedule is then run,
                forward and backward, and ``loss.backward()`` hands over the finished gradients, scaled by the gradient
                of the loss. If the loss is dropped, no ``.grad`` changes.

        Returns:
            the output on the last stage's device, joined along the batch dimension. Numbers that an nn.Sequential
            returns are stacked, one per microbatch, unless ``reduction`` is given; with ``cuts`` they are combined.
            Given a target: the loss, a tensor without dimensions.

        Raises:
            TypeError: the input or the target can't be split into microbatches.
            ValueError: a target is given without a ``loss_fn``, or has a different batch size; or the counts that terms
                of the loss are divided by aren't proportional.
            BaseException: whatever a layer raises, with a note that names stage, layer and microbatch. The model stays
                usable.
        """
        refuse_export(input)
        return (outside_of_compilers if "torch._dynamo" in sys.modules else called)(self._run, input, target)

    def _run(self, input: Any, target: Any) -> Any:
        refuse_transforms()
        if "torch.distributed.fsdp" in sys.modules:
            checks.verify_ungathered(self)
        runtime = self._runtime
        assert isinstance(runtime, ChainRuntime)
        layers = runtime.layers(self)
        if target is None:
            return runtime.forward(layers, input, self.training)
        loss_fn: Any = self._loss_fn
        if loss_fn is None:
            raise ValueError(
                "a second argument, the target, was given, but the model has no loss_fn to pass it to. For a second "
                "input, expected model((x, mask)), one tuple, which the layers take; for a target, "
                "SplitPipe(..., loss_fn=criterion), or model(input) and the loss computed from its output."
            )
        return runtime.train(layers, input, target, self.training, loss_fn, self._grad_scaler)

    def extra_repr(self) -> str:
        devices = ", ".join(map(str, self._places))
        options = self._runtime.options
        named = "" if options.schedule is None else f", schedule={options.schedule.name or 'custom'!r}"
        parts = f"cuts={self.cuts}" if self.inner else f"balance={self._balance}"
        return f"{parts}, devices=[{devices}], chunks={options.chunks}, checkpoint={options.checkpoint!r}{named}"

    def record(self) -> AbstractContextManager[Recording]:
        """Records the training steps of a ``with`` block, as a timeline that can be read after it.

        Steps are completed calls that computed a loss and its gradients. Stages on the CPU are timed by the host's
        clock, others by their streams. The host waits for the devices only at the end of the block.

        Returns:
            a context manager that yields the timeline: ``print`` shows the bottleneck, ``to_html`` draws the timeline
            above the planned one, and ``costs()`` returns what ``schedule.simulate`` and ``schedule.search`` need.

        Raises:
            RuntimeError: on entry, if the model has neither a schedule nor a ``loss_fn``, or is being recorded already.

        Example:
            >>> layers = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            >>> model = SplitPipe(torch.nn.Sequential(*layers), balance=[1, 1], devices=["cpu", "cpu"], chunks=2,
            ...                   schedule="1f1b", loss_fn=torch.nn.MSELoss())
            >>> with model.record() as timeline:
            ...     model(torch.randn(4, 4), target=torch.randn(4, 4)).backward()
            >>> timeline.steps, len(timeline.utilisation)
            (1, 2)
        """
        return self._runtime.recording()

    def deferral_report(self) -> DeferralReport:
        """Lists which parameters have their gradients deferred, and why others don't, according to the steps so far.

        Returns:
            a row for each parameter: its name, stage and number of elements, whether it is deferred, and by which
            function, or why not. ``print`` shows the rows as a table.

        Example:
            >>> layers = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)
            >>> model = SplitPipe(torch.nn.Sequential(*layers), balance=[1, 1], devices=["cpu", "cpu"])
            >>> output = model(torch.randn(2, 4))
            >>> print(model.deferral_report())
            parameter  stage  deferred  why
            0.weight   0      yes       Linear
            0.bias     0      yes       Linear
            1.weight   1      no        layer_norm has no rule
            1.bias     1      no        layer_norm has no rule
            deferred: 2 of 4 parameters, 71.4% of the elements
        """
        return self._runtime.report(self)


def verified(module: nn.Module) -> nn.Sequential:
    """The module, if it is an nn.Sequential whose layers can be moved."""
    checks.verify_module(module)
    checks.verify_ungathered(module)
    verify_filled(module)
    return cast(nn.Sequential, module)


def chained(
    module: nn.Sequential, balance: Iterable[int], given: Given, batched: Any
) -> tuple[ChainRuntime, list[int]]:
    """Checks all arguments for an nn.Sequential, and moves its layers; returns what runs it, and the balance."""
    numbers = checks.verify_balance(balance, len(module))
    options = options_of(given, len(numbers), "balance", (), verify_batched(batched))
    if batched is None and given["split"] is None and options.chunks > 1:
        warn_of_layout(module)
    verify_skippables(module)
    spans = placing.spans(numbers)
    layers = list(module._modules.values())
    stages = [layers[start:end] for start, end in spans]
    placing.verify_stages(stages, options.places)

    undo, deferred = placing.move(stages, options.places), given["deferred_batch_norm"]
    try:
        if deferred:
            DeferredBatchNorm.convert_deferred_batch_norm(module)
    except BaseException:
        undo()
        raise
    runtime = ChainRuntime(spans, options._replace(loss_fn=None, grad_scaler=None), deferred)
    runtime.layers(module)
    return runtime, numbers
