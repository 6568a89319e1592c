"""``SplitPipe``: a module that runs as a pipeline, and otherwise stays as it is."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from splitpipe import checks
from splitpipe.balance.chosen import chosen_balance, chosen_cuts
from splitpipe.batch.flags import verify_batched
from splitpipe.batch.layout import warn_of_layout
from splitpipe.batch.splitting import Split
from splitpipe.batchnorm import DeferredBatchNorm
from splitpipe.checks import Checkpoint
from splitpipe.core.stream import Device
from splitpipe.deferral.report import DeferralReport
from splitpipe.loss.reducing import Reduce
from splitpipe.partition import placing
from splitpipe.partition.blocks import balance_of
from splitpipe.partition.homes import verify_filled
from splitpipe.partition.resident import Shell
from splitpipe.piped import Sample, options_of, piped
from splitpipe.runtime import Runtime
from splitpipe.schedule.construct.library import build
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.recording.recording import Recording
from splitpipe.segments.runtime import SegmentRuntime
from splitpipe.skip.pairs import verify_skippables
from splitpipe.training.engine import called, outside_of_compilers, refuse_export, refuse_transforms


class SplitPipe(Shell):
    """Runs a module as a pipeline of stages on several devices of one machine, in one process.

    A batch is cut into microbatches, and the stages work on different ones at the same time (GPipe,
    arXiv 1811.06965). Outputs, losses, gradients, buffers and parameter hooks are those of the unwrapped module,
    and so are the keys of ``state_dict()``. The training loop stays as it is.

    Args:
        module: an nn.Sequential, or any other module, whose own forward is run. The layers of a Sequential take and
            give a tensor, or any nesting of tuple, list, dict and namedtuple with tensors and other values in it. They
            are moved to their stage's device, those of another module in the first call.
        balance: number of layers of each stage, of an nn.Sequential. None, without ``cuts``: so that the weights of
            each stage, with gradients and Adam's averages of those that train, fill the same share of its device's
            free memory; with ``sample``, so that stages take the same time. Other modules get cuts in the same way, as
            ``splitpipe.attach`` chooses them.
        devices: one per stage, or as many as the schedule has rows: a ``torch.device``, an index, a string, or a
            ``torch.Stream`` to compute on. Default: all accelerators, else the CPU for every stage (two stages, if it
            is not said how many). A device may be named twice.
        chunks: number of microbatches. A batch is cut as ``torch.chunk`` cuts it, so it may give fewer. None: four per
            device, or those of the Schedule.
        checkpoint: which microbatches drop what autograd saves and compute it again in backward: ``"always"``,
            ``"except_last"`` or ``"never"``. Default: ``"except_last"`` for gpipe, ``"never"`` for other schedules. In
            eval mode or without grad mode: none.
        deferred_batch_norm: whether BatchNorm layers keep the running statistics of the whole batch, as
            nn.BatchNorm would, instead of those of each microbatch. They become ``DeferredBatchNorm`` layers.
        backward: ``"split"`` computes the input gradient of a stage at once and its weight gradients later, many
            microbatches together (2BP, arXiv 2405.18047); ``"autograd"`` leaves all to autograd. With a schedule that
            has W apart from B, it is the schedule that says when.
        stash_limit: how many bytes of layer inputs and output gradients a stage may hold back for its weight
            gradients. Beyond it they are computed earlier, the heaviest first. With checkpointing nothing is held
            back while a microbatch is run again. None: as many bytes for each weight as its gradient takes, which a
            fused backward would have at that time; beyond that none on the CPU, where W runs alone, and a sixteenth
            of the memory of an accelerator.
        schedule: a name of ``splitpipe.schedule.names()``, or a ``splitpipe.schedule.Schedule`` of as many stages and
            microbatches. All but ``"gpipe"`` go backward inside the forward and so need ``loss_fn``. A schedule with
            several stages a device needs a balance of as many numbers as it has stages.
        loss_fn: ``loss_fn(output, target)`` gives a number. It is traced while it is computed, so that the loss is that
            of the batch for sums and means of any count. Or it gives a pair (total, count), for sum of totals / sum of
            counts.
        grad_scaler: the ``torch.amp.GradScaler`` of the loop, where a schedule runs under float16 autocast: its scale
            is needed before ``loss.backward()``.
        batched: how the input is cut, by a nesting that its own begins with, of True (tensors along their first
            dimension), an int (along this one), ``"rows"`` (a list with one entry per row) and False (goes whole into
            every microbatch): ``(True, False)`` for ``model((x, mask))``. With ``cuts`` by the names of arguments; a
            target's key is ``"target"``. None: all tensors, and lists with one entry per row.
        split: ``split(args, kwargs, chunks)`` gives (args, kwargs) for each microbatch, for what no rule can cut.
        cuts: names of submodules in place of ``balance``: stage j+1 begins where ``cuts[j]`` is called.
        reduction: how numbers that microbatches give, such as a loss, make one: ``"mean"`` weighted by rows, ``"sum"``,
            or, drop-in, a function of the list of values and the list of rows. None: as the trace shows; numbers that
            an nn.Sequential returns are stacked.
        sample: the arguments of a call (keywords in a dict, positional ones in a tuple): with ``cuts``, parameters go
            to their devices at once (None: the first call does that); where neither ``cuts`` nor ``balance`` is given,
            stages are timed with it.
        compile: True compiles layers (with ``cuts``: blocks) by torch.compile, equal ones once, with a backward in two
            halves: weight gradients of all ops are deferred. A dict has options: backend, dynamic, mode, options.

    Raises:
        TypeError: with balance, no plain nn.Sequential; skips don't match, or an argument is of a wrong type.
        ValueError: an argument has a wrong value; the message says what was found and expected. Or the devices can't
            hold the module.
        IndexError: fewer devices than stages (the exception is a ValueError too).

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

    _runtime: Runtime | SegmentRuntime

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
        """Moves the layers to the devices of their stages. All arguments are explained by help(splitpipe.SplitPipe)."""
        super().__init__()
        if cuts is not None and balance is not None:
            raise ValueError("balance and cuts are given: expected one of them, numbers of layers or names.")
        if cuts is not None or balance is None and not checks.is_layered(module) and isinstance(module, nn.Module):
            cuts, devices = chosen_cuts(module, cuts, devices, schedule, sample)
            plain = sample is None and not isinstance(batched, dict)
            balance = balance_of(module, cuts) if plain else None
            if balance is None:
                self.wrap(module, forward := piped(
                    module, cuts, devices=devices, chunks=chunks, checkpoint=checkpoint, backward=backward,
                    deferred_batch_norm=deferred_batch_norm, schedule=schedule, loss_fn=loss_fn, sample=sample,
                    grad_scaler=grad_scaler, stash_limit=stash_limit, batched=batched, split=split, reduction=reduction,
                    compile=compile,
                ))
                self._balance, self._runtime = list[int](), forward.runtime
                self._places = self._runtime.options.places
                return
        checks.verify_module(module)
        assert isinstance(module, nn.Sequential)
        checks.verify_ungathered(module)
        verify_filled(module)
        if balance is None:
            balance, devices = chosen_balance(module, devices, schedule, sample)
        numbers = checks.verify_balance(balance, len(module))
        options = options_of(
            len(numbers), "balance", (), verify_batched(batched), devices=devices, chunks=chunks, checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm, backward=backward, schedule=schedule, loss_fn=loss_fn,
            grad_scaler=grad_scaler, stash_limit=stash_limit, split=split, reduction=reduction, compile=compile,
        )
        if batched is None and split is None and options.chunks > 1:
            warn_of_layout(module)
        verify_skippables(module)
        spans = placing.spans(numbers)
        layers = list(module._modules.values())
        stages = [layers[start:end] for start, end in spans]
        placing.verify_stages(stages, options.places)

        undo = placing.move(stages, options.places)
        if deferred_batch_norm:
            try:
                DeferredBatchNorm.convert_deferred_batch_norm(module)
            except BaseException:
                undo()
                raise

        self._stand_for(module)
        self._balance = numbers
        self._places = options.places
        # Past nn.Module, which would take a loss for a layer, and its parameters into the state_dict.
        self.__dict__.update(_loss_fn=loss_fn, _grad_scaler=grad_scaler)
        self._runtime = Runtime(spans, options._replace(loss_fn=None, grad_scaler=None), deferred_batch_norm)
        self._runtime.layers(module)

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """The devices of layers, or of a module's blocks, by name, as accelerate and transformers' Trainer ask."""
        if isinstance(self._runtime, SegmentRuntime):
            return self._runtime.device_map()
        stages = [device for device, count in zip(self.devices, self._balance) for _ in range(count)]
        return dict(zip(self._modules, stages))

    @property
    def cuts(self) -> list[str]:
        """The names of the modules at whose calls the stages but the first begin; none for an nn.Sequential."""
        return list(self._runtime.options.cuts) if isinstance(self._runtime, SegmentRuntime) else []

    @property
    def balance(self) -> list[int]:
        """The number of layers of each stage; none for a module with cuts."""
        return list(self._balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage: inputs go to the first, outputs come on the last."""
        return [place.device for place in self._places]

    @property
    def chunks(self) -> int:
        """The number of microbatches of a batch that has at least as many rows."""
        return self._runtime.options.chunks

    @property
    def checkpoint(self) -> Checkpoint:
        """The microbatches that are checkpointed: always, except_last or never."""
        return self._runtime.options.checkpoint

    @property
    def schedule(self) -> Schedule:
        """The order of the ops on each device."""
        options = self._runtime.options
        return build("gpipe", len(options.places), options.chunks) if options.schedule is None else options.schedule

    def forward(self, input: Any, target: Any = None) -> Any:
        """The output of the module for the batch; given a target, the loss.

        Args:
            input: a tensor of shape (batch, ...), or a nesting of them that agree in batch, and of lists with one entry
                per row; what ``batched`` leaves whole, tensors without dimensions and other values reach every
                microbatch as they are. What is on another device goes to the first stage's.
            target: for ``loss_fn``, a nesting that agrees with the input in batch. The whole schedule is
                run then, forward and backward; ``loss.backward()`` hands the finished gradients over, scaled by the
                gradient of the loss. A loss that is thrown away leaves every ``.grad`` alone.

        Returns:
            the output on the last stage's device, joined along the batch's dimension. Numbers that an nn.Sequential
            gives are stacked, one per microbatch, unless ``reduction`` is given; with ``cuts`` they are combined. Given
            a target: the loss, a tensor without dimensions.

        Raises:
            TypeError: the input or the target can't be cut into microbatches.
            ValueError: a target without a ``loss_fn``, or that disagrees in batch; terms of the loss whose
                counts are not proportional.
            BaseException: what a layer raises, with a note of stage, layer and microbatch. The model stays usable.
        """
        refuse_export(input)
        return (outside_of_compilers if "torch._dynamo" in sys.modules else called)(self._run, input, target)

    def _run(self, input: Any, target: Any) -> Any:
        refuse_transforms()
        if "torch.distributed.fsdp" in sys.modules:
            checks.verify_ungathered(self)
        runtime = self._runtime
        assert isinstance(runtime, Runtime)
        layers = runtime.layers(self)
        if target is None:
            return runtime.forward(layers, input, self.training)
        loss_fn: Any = self._loss_fn
        if loss_fn is None:
            raise ValueError(
                "a second argument was given, the target, but the model has no loss_fn to take it. For a second "
                "input, expected model((x, mask)), one input with layers that take the tuple; for a target, "
                "SplitPipe(..., loss_fn=criterion), or model(input) and the loss computed from its output."
            )
        return runtime.train(layers, input, target, self.training, loss_fn, self._grad_scaler)

    def extra_repr(self) -> str:
        devices = ", ".join(map(str, self._places))
        options = self._runtime.options
        named = "" if options.schedule is None else f", schedule={options.schedule.name or 'of your own'!r}"
        parts = f"cuts={self.cuts}" if self.inner else f"balance={self._balance}"
        return f"{parts}, devices=[{devices}], chunks={options.chunks}, checkpoint={options.checkpoint!r}{named}"

    def record(self) -> AbstractContextManager[Recording]:
        """Records the training steps of a block, as a timeline that can be read after it.

        Steps are calls that went backward, by a schedule, and completed. The clock is the host's for stages on the
        CPU, and the streams' for others; nobody waits for a device before the block ends.

        Returns:
            a context manager that gives the timeline: ``print`` names the bottleneck, ``to_html`` draws it above the
            plan, ``costs()`` are what ``schedule.simulate`` and ``schedule.search`` ask for.

        Raises:
            RuntimeError: when entered: the model has no ``loss_fn``, or is recorded already.

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
        """Lists which parameters have their gradients deferred, and why others have not, as steps have shown so far.

        Returns:
            a row for each parameter: its name, stage and number of elements, whether it is deferred, and by which
            function, or why not. ``print`` shows it as a table.

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
