"""``SplitPipe``: a module that runs as a pipeline, and otherwise behaves like the module that it wraps."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from splitpipe import checks
from splitpipe.balance.balances import chosen_balance, chosen_cuts
from splitpipe.batchnorm import defer
from splitpipe.checks import Checkpoint
from splitpipe.microbatch.chunk_spec import verify_batched
from splitpipe.partition.placement import by_stage, move_stages
from splitpipe.partition.resident import Resident, untraced
from splitpipe.piped import Arguments, complete, described, options_of, piped, with_arguments
from splitpipe.runtime.runtime import Batch, Runtime
from splitpipe.schedule.construct.library import build
from splitpipe.schedule.op import Schedule
from splitpipe.skip.skippable import verify_skippables


class SplitPipe(Resident):
    """Runs a module as a pipeline of stages on several devices of one machine, in one process.

    A batch is split into microbatches, and the stages work on different ones at the same time (GPipe,
    arXiv 1811.06965). Outputs, losses, gradients, parameter hooks and the keys of ``state_dict()`` are those of the
    unwrapped module; buffers are, unless a forward writes to them. The training loop stays as it is.

    Args:
        module: an nn.Sequential, whose layers take and return a tensor or any nesting of tensors and other values; or
            any other module, which runs its own forward. Layers are moved to their stage's device now; parameters of
            other modules are, in the first call.
        balance: for an nn.Sequential, the number of layers of each stage. Default, if ``cuts`` isn't given either:
            chosen as ``splitpipe.attach`` chooses cuts.
        cuts: names of submodules, instead of ``balance``: stage j+1 starts where ``cuts[j]`` is called.
        devices: one per stage, or one per row of the schedule: a ``torch.device``, an index, a string, or a
            ``torch.Stream`` to compute on. A device may be repeated. Default: all accelerators, or else the CPU.
        chunks: number of microbatches. Batches are split as by ``torch.chunk``, so there may be fewer. Default: those
            of a given Schedule, or else four per device.
        checkpoint: which microbatches drop what autograd saves, and recompute it in backward: ``"always"``,
            ``"except_last"`` or ``"never"``. Default: ``"except_last"`` without a schedule and for gpipe, ``"never"``
            for other schedules. Nothing is checkpointed in eval mode or without grad mode.
        deferred_batch_norm: whether BatchNorm layers become ``DeferredBatchNorm`` layers, which keep the running
            statistics of the whole batch instead of those of each microbatch.
        backward: ``"split"`` computes the input gradient of a stage first and its weight gradients later, for several
            microbatches together (2BP, arXiv 2405.18047); a schedule that separates W from B decides when.
            ``"autograd"`` leaves both to autograd.
        stash_limit: without a schedule, how many bytes of layer inputs and output gradients a stage may keep for its
            weight gradients. Above this limit, they are computed at once. Default: the bytes of the stage's weights,
            or a quarter of that with checkpointing.
        schedule: None (drop-in): ``loss.backward()`` runs backward, after all forwards. Otherwise, a name from
            ``splitpipe.schedule.names()``, or a ``splitpipe.schedule.Schedule``: forward and backward both run inside
            the call, which needs ``loss_fn`` or, with ``cuts``, the field ``loss`` of the module's output.
        loss_fn: for a schedule: ``loss_fn(output, target)`` returns a number. It is traced while it is computed, so
            that the loss is that of the whole batch for sums and means over any count. Or it returns a pair (total,
            count); the loss is then the sum of totals divided by the sum of counts.
        grad_scaler: the training loop's ``torch.amp.GradScaler``, for a schedule under float16 autocast, which needs
            the scale before ``loss.backward()``.
        batched: how the input is split: a nesting that matches the outer levels of the input's, with True (along the
            first dimension), an int (along this dimension), ``"rows"`` (a list with one entry per row), ``"groups"`` (k
            entries per row) or False (not split): ``(True, False)`` for ``model((x, mask))``. With ``cuts``, a dict by
            argument name; the target's key is ``"target"``. Default: tensors and lists are split that have as many
            entries as the first tensor.
        split: ``split(args, kwargs, chunks)`` returns (args, kwargs) for each microbatch, for inputs that ``batched``
            can't describe.
        reduction: how numbers returned by microbatches, such as losses, are combined: ``"mean"`` weighted by rows,
            ``"sum"``, or (drop-in only) a function of the list of values and the list of row counts. Default: as the
            trace of the computation shows; numbers that an nn.Sequential returns are stacked.
        sample: the arguments of a call (keyword arguments in a dict, positional ones in a tuple), on which stages are
            timed if they are chosen. With ``cuts``, a forward on one row (with ``split``, on all) moves parameters now.
        compile: True compiles layers (with ``cuts``: blocks) with torch.compile, equal ones only once. Their backward
            has two halves, so that all weight gradients are deferred. A dict sets options: backend, dynamic, mode,
            options.

    Raises:
        TypeError: ``balance`` is given for a module that isn't a plain nn.Sequential, skips don't match, or an argument
            has a wrong type.
        ValueError: an argument has a wrong value (the message reports what was found and what was expected), or the
            devices can't hold the module.

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

    _runtime: Runtime

    @with_arguments
    def __init__(
        self, module: nn.Module, balance: Iterable[int] | None = None, *, cuts: Iterable[str] | None = None,
        **options: Unpack[Arguments],
    ) -> None:
        """Splits the module (layers move to their devices). help(splitpipe.SplitPipe) explains all arguments."""
        super().__init__()
        if cuts is not None and balance is not None:
            raise ValueError("both balance and cuts are given: expected one of them.")
        given = complete("SplitPipe", options)
        if cuts is not None or balance is None and isinstance(module, nn.Module) and not checks.is_layered(module):
            cuts, given = chosen_cuts(module, cuts, given)
            forward = piped(module, cuts, given)
            vars(self).update(_runtime=forward.runtime, forward=forward)
        else:
            checks.verify_module(module)
            assert isinstance(module, nn.Sequential)
            if balance is None:
                balance, given = chosen_balance(module, given)
            self._runtime = chained(module, checks.verify_balance(balance, len(module)), given)
        self._places = self._runtime.options.places
        self._wrap(module)

    @property
    def cuts(self) -> list[str]:
        """The names of the modules with whose calls stages 1, 2, ... start; empty for an nn.Sequential."""
        return list(self._runtime.options.cuts)

    @property
    def balance(self) -> list[int]:
        """The number of layers of each stage; empty for a module with cuts."""
        return list(self._runtime.options.balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage."""
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
        """The order of ops on each device; drop-in, gpipe's, but B begins with the last microbatch, and W may wait."""
        options = self._runtime.options
        return build("gpipe", len(options.places), options.chunks) if options.schedule is None else options.schedule

    def forward(self, input: Any, target: Any = None) -> Any:
        """Runs the batch through the pipeline: returns the output, or, given a target, the loss.

        Args:
            input: a tensor of shape (batch, ...), or a nesting of such tensors with the same batch size and of lists
                with one entry per row, on any device. All other values are passed to every microbatch.
            target: for ``loss_fn``, a nesting with the same batch size as the input. Forward and backward are then run,
                and ``loss.backward()`` hands over the finished gradients. If the loss is dropped, no ``.grad`` changes.

        Returns:
            the output on the last stage's device, joined along the batch dimension, where numbers are stacked unless
            ``reduction`` is given; or the loss, a tensor without dimensions.

        Raises:
            TypeError: the input or the target can't be split into microbatches.
            ValueError: a target is given without a ``loss_fn``, or has a different batch size; or the loss can't be
                computed from those of microbatches.
            BaseException: whatever a layer raises, with a note that names stage, layer and microbatch. The model stays
                usable.
        """
        return untraced((input,), self._runtime.run, Batch(self, (input,), {}, target))

    def extra_repr(self) -> str:
        return described(self._runtime.options)


def chained(module: nn.Sequential, balance: list[int], given: Arguments) -> Runtime:
    """What runs an nn.Sequential, with all arguments checked and all layers moved."""
    options = options_of(given, balance, batched=verify_batched(given["batched"]))
    verify_skippables(module)
    stages = by_stage(module._modules.values(), balance)
    devices = [place.device for place, stage in zip(options.places, stages) for _ in stage]
    move_stages(stages, options.places)
    defer(module, options.chunks, given["deferred_batch_norm"])
    vars(module)["hf_device_map"] = dict(zip(module._modules, devices))  # For accelerate, as of other modules.
    return Runtime(options)
