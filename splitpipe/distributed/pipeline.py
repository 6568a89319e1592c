"""``Pipeline``: the stages of this process, in a pipeline of several processes."""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from numbers import Real
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn

from splitpipe.checks import (
    resolve_device,
    resolve_schedule,
    verify_balance,
    verify_module,
    verify_options,
    verify_ungathered,
)
from splitpipe.distributed.boundary import parts, verify_own, verify_sharing, verify_skips
from splitpipe.distributed.loss import Loss
from splitpipe.distributed.lowering import runtime, verify_order
from splitpipe.partition.blocks import balance_of
from splitpipe.partition.placing import spans
from splitpipe.schedule.op import Schedule
from splitpipe.schedule.plurals import counted
from splitpipe.skip.pairs import verify_skippables


class Pipeline(nn.Module):
    """This process's part of an nn.Sequential that runs as a pipeline over several processes.

    It uses torch.distributed.pipelining, with one process per row of the schedule, which may be any of
    ``splitpipe.schedule.names()``. It contains only this process's layers, with the same names as in the unwrapped
    module. So the state dicts of all processes together are the module's state dict, and each process can load its part
    of that.

    Parameter hooks fire once per microbatch, as in gradient accumulation. If the loss doesn't depend on the output of a
    stage, gradients up to that stage are zeros instead of None, because the processes agree only once on what they
    send.

    All processes must build it in the same way, from the same module with the same values (the same seed, or a
    checkpoint), and call ``step`` with the same batch.

    Args:
        module: the whole nn.Sequential. Layers of other processes aren't kept.
        balance: number of layers of each stage.
        chunks: number of microbatches, which must divide the batch size.
        schedule: a name from ``splitpipe.schedule.names()``, or a Schedule with a row for each process.
        loss_fn: ``loss_fn(output, target)`` returns a number, which is traced as by ``SplitPipe``; pairs aren't
            accepted. If counts depend on the target, it is called again for each microbatch, with an output of zeros:
            counts must not depend on the output.
        device: the device of this process. Default: the current accelerator, or else the CPU.
        group: the processes, one per row, in order. Default: all.
        cuts: names of layers, instead of ``balance``: a stage starts with each of them. Modules other than an
            nn.Sequential aren't supported yet.

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
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        chunks: int = 1,
        schedule: str | Schedule = "1f1b",
        loss_fn: Callable[[Any, Any], Tensor],
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        cuts: Iterable[str] | None = None,
    ) -> None:
        super().__init__()
        if cuts is not None:
            balance = _balance(module, balance, cuts)
        verify_module(module)
        verify_ungathered(module)
        numbers = verify_balance(balance, len(module))
        verify_options(chunks=chunks, schedule=schedule, loss_fn=loss_fn)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed isn't initialised: expected init_process_group() before, in each process, as under "
                "torchrun. In one process, splitpipe.SplitPipe runs the same schedule."
            )
        place = resolve_device(device)
        found = _group(group)
        plan = resolve_schedule(schedule, len(numbers), dist.get_world_size(found), operator.index(chunks))
        verify_order(plan)
        verify_skippables(module)
        verify_own(module)
        layers = list(module._modules.items())
        stages: Any = [layers[start:end] for start, end in spans(numbers)]
        verify_skips(stages)
        verify_sharing(stages, plan.placement)

        rank = dist.get_rank(found)
        mine = [stage for stage, row in enumerate(plan.placement) if row == rank]
        self.training = module.training
        self.schedule = plan
        self._device = place
        self._group = found
        modules = parts(stages, mine)
        for part in modules:
            part.to(self._device)
            self._modules.update(part._modules)
        others = set(module.state_dict()) - set(self.state_dict())
        self.register_load_state_dict_pre_hook(partial(_without, others))
        self._first, self._last = 0 in mine, plan.stages - 1 in mine
        self._shapes: dict[bool, dict[str, tuple[list[int], torch.dtype]]] = {}
        self._failed: str | None = None
        # Inside another object, since nn.Module would register it as a layer: a loss may be a module.
        self._loss = Loss(loss_fn, plan.microbatches)
        made = partial(runtime, modules, plan, rank=rank, device=self._device, group=found, loss_fn=self._loss)
        self._run = made().step
        self._run_forward = made(forward=True).eval

    @property
    def device(self) -> torch.device:
        """The device of this process's stages."""
        return self._device

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
            raise RuntimeError(
                "step() was called without grad mode, as under torch.no_grad(): expected grad mode, since it runs "
                "backward. evaluate(input, target) only runs forward."
            )
        return self._through(self._run, input, target)

    def evaluate(self, input: Any = None, target: Any = None) -> Tensor | None:
        """Runs only the forward of a batch, otherwise like ``step``. Call ``eval()`` first for layers in eval mode.

        Args:
            input: as for ``step``.
            target: as for ``step``.

        Returns:
            the loss, a tensor without dimensions, in the process of the last stage; None in the others.

        Raises:
            TypeError: as for ``step``.
            ValueError: as for ``step``.
            RuntimeError: as for ``step``.
        """
        with torch.no_grad():
            return self._through(self._run_forward, input, target)

    def _through(self, run: Callable[..., Any], input: Any, target: Any) -> Tensor | None:
        if self._failed is not None:
            raise RuntimeError(
                f"an earlier step has failed ({self._failed}), so the processes are out of sync: expected no step "
                "after that. Restart them from the last checkpoint."
            )
        if isinstance(input, tuple) and len(input) < 2:
            raise ValueError(
                f"input is a tuple of {len(input)}: expected a tensor, or a tuple of several, since "
                "torch.distributed.pipelining passes a single tensor to the layer as it is."
            )
        inputs = input if isinstance(input, tuple) else (input,)
        named = [(f"input {number}" if len(inputs) > 1 else "input", value) for number, value in enumerate(inputs)]
        named.append(("target", target))
        shapes = {what: self._verified(what, value) for what, value in named if value is not None}
        if len({shape[0] for shape, _ in shapes.values()}) > 1:
            found = ", ".join(f"{what} with {counted(shape[0], 'row')}" for what, (shape, _) in shapes.items())
            raise ValueError(f"found {found}: expected the same number of rows in all.")
        known = self._shapes.get(run is self._run, {})
        for what, shape in shapes.items():
            if known.get(what, shape) != shape:
                raise ValueError(
                    f"{what} has shape {shape[0]} of {shape[1]}, but had {known[what][0]} of {known[what][1]} in the "
                    "first step: expected the same in all, since the processes have agreed on what they send. "
                    "Build another Pipeline for other shapes."
                )
        if self._first and input is None:
            raise ValueError("found no input in the process of the first stage: expected the batch.")
        if self._last and target is None:
            raise ValueError("found no target in the process of the last stage: expected the batch's target.")
        self._shapes[run is self._run] = {**shapes, **known}
        parts: list[Tensor] = []
        try:  # From here on, an error may occur in this process only.
            given = [self._there(value) for value in inputs] if self._first else []
            more: dict[str, Any] = {"target": self._there(target), "losses": parts} if self._last else {}
            if self._last:
                self._loss.begin(more["target"])
            run(*given, return_outputs=False, **more)
        except BaseException as error:
            cause = error.__cause__ or error
            self._failed = f"{type(cause).__name__}: {cause}"
            raise
        finally:
            self._loss.end()
        return torch.stack([loss.detach() for loss in parts]).sum() if self._last else None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm, over all processes, is at most ``max_norm``.

        It is like ``torch.nn.utils.clip_grad_norm_``, which would only see this process's parameters. All processes
        must call it.

        Args:
            max_norm: the maximum norm of all gradients together.

        Returns:
            the norm before scaling, a tensor without dimensions, the same in every process.

        Raises:
            TypeError: ``max_norm`` isn't a number.
            ValueError: ``max_norm`` is negative or nan.
        """
        if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
            raise TypeError(f"max_norm is {max_norm!r}: expected a number.")
        if not max_norm >= 0:
            raise ValueError(f"max_norm is {max_norm!r}: expected a number, not negative.")
        grads = [x.grad for x in self.parameters() if x.grad is not None]
        squares = torch.zeros((), device=self._device, dtype=torch.float64)
        for grad in grads:
            squares += grad.detach().double().square().sum()
        dist.all_reduce(squares, group=self._group)
        norm = squares.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.detach().mul_(scale.to(grad.dtype))
        return norm

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raises RuntimeError: forward and backward are one here, see ``step``."""
        raise RuntimeError("a Pipeline over several processes has no separate forward: expected step(input, target).")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a Pipeline can't be copied or pickled, since it is bound to communicating processes: expected "
            "its state_dict(), which a Pipeline or the unwrapped module can load."
        )

    def extra_repr(self) -> str:
        name = self.schedule.name or "custom"
        return f"schedule={name!r}, chunks={self.schedule.microbatches}, device={self._device}"

    def _verified(self, what: str, value: Any) -> tuple[list[int], torch.dtype]:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{what} is a {type(value).__name__}: expected a tensor (several inputs as a tuple), since "
                "torch.distributed.pipelining splits no other values into microbatches."
            )
        chunks = self.schedule.microbatches
        if not value.dim() or value.shape[0] % chunks or not value.shape[0]:
            rows = counted(value.shape[0], "row") if value.dim() else "no rows"
            raise ValueError(
                f"{what} has {rows} for chunks={chunks}: expected a multiple, since torch.distributed.pipelining "
                "needs microbatches of the same size. Use drop_last=True in the DataLoader, or pad the batch."
            )
        return list(value.shape), value.dtype

    def _there(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, Tensor) else value


def _without(names: set[str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Leaves out what other processes have, so that each process can load its part of a whole state dict."""
    for name in names:
        state.pop(prefix + name, None)


def _balance(module: object, balance: object, cuts: Iterable[str]) -> list[int]:
    """The balance that is equivalent to cuts at an nn.Sequential's layers."""
    if balance is not None:
        raise ValueError("both balance and cuts are given: expected one of them, numbers of layers or names.")
    found = balance_of(module, cuts)
    if found is None:
        raise TypeError(
            f"cuts were given for a {type(module).__name__}: expected an nn.Sequential and the names of its layers. "
            "For now, other modules with cuts run in a single process, SplitPipe(module, cuts=[...]): the runtime "
            "of torch.distributed.pipelining sends what a stage returns, with shapes known beforehand, and not what "
            "a module's own code carries past a cut."
        )
    return found


def _group(group: object) -> dist.ProcessGroup:
    found: Any = dist.group.WORLD if group is None else group
    outside = found is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(found, dist.ProcessGroup):
        raise TypeError(
            f"group is a {type(found).__name__}: expected a ProcessGroup, such as from dist.new_group(ranks) or "
            "mesh.get_group(), or None for all processes."
        )
    if outside or dist.get_rank(found) < 0:
        raise ValueError("this process is not in the group: expected a Pipeline only in processes that are.")
    process_group: dist.ProcessGroup = found
    return process_group
