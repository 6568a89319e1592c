"""``Pipeline``: the stages of this process, in a pipeline of several processes."""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from splitpipe import checks
from splitpipe.compiled.layers import is_compiled
from splitpipe.core.tensors import map_tensors
from splitpipe.distributed.stage import StageModule, runtime, verify_stages
from splitpipe.loss.numbers import Number, Unknown
from splitpipe.loss.objective import Objective
from splitpipe.partition.placement import by_stage
from splitpipe.schedule.op import Schedule, counted
from splitpipe.skip.skippable import verify_skippables


class Pipeline(nn.Module):
    """This process's part of an nn.Sequential that runs as a pipeline over several processes.

    It uses torch.distributed.pipelining, with one process per row of the schedule, which may be any of
    ``splitpipe.schedule.names()``. It has only this process's layers, under their names in the module: all state dicts
    together are the module's, and each process can load its part of that.

    Parameter hooks fire once per microbatch, as in gradient accumulation. If the loss doesn't depend on the output of a
    stage, gradients up to that stage are zeros instead of None.

    All processes must build it in the same way, from the same module with the same values (the same seed, or a
    checkpoint), and call ``step`` with the same batch.

    Args:
        module: the whole nn.Sequential, of which each stage returns a tensor or a tuple of several. Layers of other
            processes aren't kept.
        balance: number of layers of each stage.
        chunks: number of microbatches, which must divide the batch size.
        schedule: a name from ``splitpipe.schedule.names()``, or a Schedule with a row for each process.
        loss_fn: ``loss_fn(output, target)`` returns a number, which is traced as by ``SplitPipe``, or a pair
            (total, count). If counts depend on the target, it is called again for each microbatch, with an output of
            zeros: counts must not depend on the output.
        device: the device of this process. Default: the current accelerator, or else the CPU.
        group: the processes, one per row, in order. Default: all.

    Raises:
        TypeError: the module isn't a plain nn.Sequential, or an argument has a wrong type.
        ValueError: an argument has a wrong value, or this runtime can't run the module: it has skips between stages
            that aren't neighbours, or parameters that processes would share. Every process raises it.
        RuntimeError: torch.distributed isn't initialised.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        >>> model = Pipeline(torch.nn.Sequential(*layers), balance=[3], chunks=2, schedule="1f1b",
        ...                  loss_fn=torch.nn.MSELoss(), device="cpu")
        >>> model.step(torch.randn(4, 4), torch.randn(4, 2)).shape
        torch.Size([])
        >>> list(model.state_dict())
        ['0.weight', '0.bias', '2.weight', '2.bias']
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Sequential, balance: Iterable[int], *, chunks: int = 1, schedule: str | Schedule = "1f1b",
        loss_fn: Callable[[Any, Any], Tensor], device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        checks.verify_module(module)
        numbers = checks.verify_balance(balance, len(module))
        checks.verify_options(chunks=chunks, schedule=schedule, loss_fn=loss_fn)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("torch.distributed isn't initialised: expected init_process_group() in each process.")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is {group!r}: expected a ProcessGroup that this process is in, or None for all.")
        self.device, self._group, rank = checks.resolve_device(device), group, dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group: expected a Pipeline only in processes that are.")
        world = dist.get_world_size(group)
        self.schedule = checks.resolve_schedule(schedule, len(numbers), world, operator.index(chunks))
        verify_skippables(module)
        stages: Any = by_stage(module._modules.items(), numbers)
        verify_stages(module, stages, self.schedule)
        mine = [stage for stage, row in enumerate(self.schedule.placement) if row == rank]
        self._first, self._last = 0 in mine, len(stages) - 1 in mine
        self.training = module.training
        modules = [StageModule(stages, stage) for stage in mine]
        for part in modules:
            part.to(self.device)
            self._modules.update(part._modules)
        others = set(module.state_dict()) - set(self.state_dict())
        self.register_load_state_dict_pre_hook(partial(_without, others))
        self._shapes: dict[tuple[bool, str], str] = {}  # Of the first step, and of the first evaluation.
        self._failed: str | None = None
        # An object of another class, since nn.Module would register a loss that is a module as a layer.
        self._loss = Loss(loss_fn, self.schedule.microbatches)
        build = partial(runtime, modules, self.schedule, self.device, self._group, self._loss)
        self._run, self._run_forward = build().step, build(forward=True).eval

    def step(self, input: Any = None, target: Any = None) -> Tensor | None:
        """Runs forward and backward of a batch, and adds the gradients of this process's parameters to their ``.grad``.

        Args:
            input: a tensor of shape (batch, ...), or a tuple of tensors with the same batch size. The process of the
                first stage needs it; if it is given in every process, every process can check it.
            target: a tensor with the same batch size as the input. The process of the last stage needs it.

        Returns:
            the loss, a tensor without dimensions, in the process of the last stage; None in the others.

        Raises:
            TypeError: the input is neither a tensor nor a tuple of tensors, or the target isn't a tensor.
            ValueError: ``chunks`` doesn't divide the batch size, or shapes differ from the first step's.
            RuntimeError: another process has failed, or torch.distributed's timeout has passed.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step() was called without grad mode: expected it, or evaluate(input, target).")
        return self._through(self._run, input, target)

    def evaluate(self, input: Any = None, target: Any = None) -> Tensor | None:
        """Like ``step``, but runs only the forward of a batch. Call ``eval()`` first for layers in eval mode."""
        with torch.no_grad():
            return self._through(self._run_forward, input, target)

    def _through(self, run: Callable[..., Any], input: Any, target: Any) -> Tensor | None:
        if self._failed is not None:
            raise RuntimeError(
                f"an earlier step has failed ({self._failed}), so the processes are out of sync: expected no step "
                "after that. Restart them from the last checkpoint."
            )
        inputs = input if isinstance(input, tuple) else (input,)
        if isinstance(input, tuple) and len(input) < 2:
            raise ValueError(f"input is a tuple of {len(input)}: expected a tensor, or a tuple of several.")
        for needed, value, what in (self._first, input, "input"), (self._last, target, "target"):
            if needed and value is None:
                raise ValueError(f"found no {what} in the process of the stage that needs it: expected the batch's.")
        self._verify(run is self._run, inputs, target)
        try:  # From here on, an error may occur in this process only.
            given = [value.to(self.device) for value in inputs] if self._first else []
            target = target.to(self.device) if self._last else None
            self._loss.begin(target)
            run(*given, target=target, return_outputs=False)
        except BaseException as error:
            self._failed = repr(error.__cause__ or error)
            raise
        return self._loss.batch_loss.result(None)[0] if self._last else None

    def _verify(self, trains: bool, inputs: tuple[Any, ...], target: Any) -> None:
        """Raises for tensors that can't be divided, or that differ from those that the processes have agreed on."""
        named = {f"input {k}" if len(inputs) > 1 else "input": x for k, x in enumerate(inputs)}
        given = {what: x for what, x in [*named.items(), ("target", target)] if x is not None}
        shapes = dict[tuple[bool, str], str]()
        for what, x in given.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{what} is a {type(x).__name__}: expected a tensor (several inputs as a tuple).")
            rows = x.shape[0] if x.dim() else 0
            if not rows or rows % self.schedule.microbatches:
                raise ValueError(
                    f"{what} has {counted(rows, 'row')} for chunks={self.schedule.microbatches}: expected a multiple "
                    "of it. Use drop_last=True in the DataLoader, or pad the batch."
                )
            shape = shapes[trains, what] = f"{list(x.shape)} of {x.dtype}"
            if shape != (first := self._shapes.get((trains, what), shape)):
                raise ValueError(
                    f"{what} has shape {shape}, but had {first} in the first step: expected the same in all. Build "
                    "another Pipeline for other shapes."
                )
        if len({*map(len, given.values())}) > 1:
            found = ", ".join(f"{what} with {counted(len(x), 'row')}" for what, x in given.items())
            raise ValueError(f"found {found}: expected the same number of rows in all.")
        self._shapes.update(shapes)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm, over all processes, is at most ``max_norm``.

        All processes must call it, and get the norm before scaling. ``torch.nn.utils.clip_grad_norm_`` would only see
        this process's parameters.

        Raises:
            TypeError: ``max_norm`` isn't a number.
            ValueError: ``max_norm`` is negative or nan.
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
            raise TypeError(f"max_norm is {max_norm!r}: expected a number.")
        if not max_norm >= 0:
            raise ValueError(f"max_norm is {max_norm!r}: expected a number, not negative.")
        grads = [x.grad for x in self.parameters() if x.grad is not None]
        squares = nn.utils.get_total_norm(grads).to(self.device, torch.float64).square()
        dist.all_reduce(squares, group=self._group)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def extra_repr(self) -> str:
        return f"schedule={self.schedule.name or 'custom'!r}, chunks={self.schedule.microbatches}, device={self.device}"


class Loss:
    """A microbatch's part of the loss of the batch; all have the same size."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], chunks: int) -> None:
        self._objective, self._chunks = Objective(loss_fn, None, set()), chunks
        self.begin(None)

    def begin(self, target: Any) -> None:
        """Begins a step with the target of the whole batch."""
        self._parts = [] if target is None else target.chunk(self._chunks)
        self._objective.begin([len(part) for part in self._parts] or [1] * self._chunks)
        self._objective.compiled = is_compiled(self._objective.loss_fn)
        self.batch_loss = self._objective.batch_loss

    def __call__(self, output: Any, target: Any) -> Tensor:
        output = output[0] if isinstance(output, tuple) and len(output) == 1 else output
        # Before the first step, torch also calls it to learn what backward needs.
        i = next((i for i, part in enumerate(self._parts) if part.data_ptr() == target.data_ptr()), 0)
        return self.batch_loss.part(i, *self._objective.loss(i, output, target), partial(self._count, output))

    def _count(self, output: Any) -> list[Number | Unknown]:
        """Numbers like those of all microbatches in their counts, which may only depend on targets."""
        with torch.no_grad():
            empty = map_tensors(torch.zeros_like, output)
            return [self._objective.loss(i, empty, part)[1] for i, part in enumerate(self._parts)]


def _without(names: set[str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Leaves out what other processes have, so that each process can load its part of a whole state dict."""
    for name in names:
        state.pop(prefix + name, None)
