"""A random case run: the unwrapped module and its pipeline take the same steps, and are compared in everything."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from splitpipe import SplitPipe
from tests.helpers.randomized import CALLS, LOSSES, SOMETIMES, Case, Step, planned, stages_a_device
from tests.helpers.randomized_forwards import Scripted, loss_over
from tests.helpers.randomized_layers import WIDTH, ByMicrobatch
from tests.helpers.randomized_models import IN_PLACE, NOT_TWICE, WHOLE, Builder, kinds


def module_of(case: Case, reference: bool = False, plain: bool = False) -> nn.Module:
    """The module of a case.

    Args:
        case: that it is of.
        reference: knowing of microbatches, as its pipeline does.
        plain: without torch.utils.checkpoint.
    """
    torch.manual_seed(case.seed)
    one = case.chunks == 1 or all(step.rows == 1 for step in case.steps)

    def norm(features: int) -> nn.Module:
        return ByMicrobatch(features, case.chunks, case.deferred) if reference else nn.BatchNorm1d(features)

    builder = Builder(case.flat, norm, one, plain)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        if not case.acts:
            return builder.model(case.layers, case.skips, bool(case.loss))
        builder.copied = bool(kinds(case.layers) & {*IN_PLACE})
        blocks = [builder.made(block) for block in case.layers]
        return Scripted(blocks, case.acts, case.output, case.loss or "mean", case.chunks if reference else 1)
    finally:
        torch.set_default_dtype(before)


def pipeline_of(case: Case, plain: bool = False, kind: str = "cpu", **options: Any) -> SplitPipe:
    """The pipeline of a case, by other options.

    Args:
        case: that it is of.
        plain: without torch.utils.checkpoint.
        kind: of its devices, three of them if they are no CPUs.
        options: that take the place of the case's.
    """
    given: dict[str, Any] = {"cuts": case.cuts} if case.acts else {"balance": case.balance}
    count = len(case.cuts) + 1 if case.acts else len(case.balance)
    if case.schedule:
        plan = planned(case.schedule, count // stages_a_device(case.schedule), case.chunks)
        count = plan.devices
        given |= {"schedule": plan, **({"loss_fn": objective(case)} if inside(case) else {})}
    if case.acts:
        given |= {"batched": {"mask": False, "states": 1}, "reduction": case.loss or "mean" if case.said else None}
    elif case.layers[0].kind in WHOLE:
        whole = {"mask": False, "flags": False} if case.layers[0].kind == "whole dict" else (True, False)
        given["batched"] = whole
    devices = [kind if kind == "cpu" else f"{kind}:{number % 3}" for number in range(count)]
    return SplitPipe(module_of(case, plain=plain), devices=devices, chunks=case.chunks,
                     deferred_batch_norm=case.deferred, backward=case.backward,  # type: ignore[arg-type]
                     stash_limit=case.stash_limit, **{"checkpoint": case.checkpoint, **given, **options})


def inside(case: Case) -> bool:
    """Whether the loss is a function of output and target: a tuple has no field of that name."""
    return not case.acts or case.function or case.output == "tuple"


def field(output: Any, name: str) -> Any:
    """A field of an output of any kind."""
    if isinstance(output, tuple):
        return dict(zip(("y", "hidden", "numbers", "loss"), output)).get(name)
    return output.get(name) if isinstance(output, dict) else getattr(output, name)


def loss_of(kind: str, output: Any, target: Tensor) -> Tensor:
    """The loss of a function, of all that is in the output."""
    y = field(output, "y").to(target.device)
    found = (y.flatten(1).mean(1) - target).square()
    for x in field(output, "hidden"):
        found = found + x.to(y.device, y.dtype).flatten(1).square().mean(1)
    return loss_over(kind, found, target)


def objective(case: Case) -> Any:
    """The loss function: torch's own, a mean, or a total and a count of the rows whose target is positive."""
    if case.acts:
        return partial(loss_of, case.loss or "mean")
    if case.loss:
        return LOSSES[case.loss]

    def loss_fn(output: Any, target: Tensor) -> Any:
        losses = torch.zeros_like(target)
        for number, x in enumerate(tree_leaves(output)):
            if isinstance(x, Tensor) and x.is_floating_point():
                y = x.double().reshape(len(x), -1)
                weight = torch.linspace(0.5, 1.5, y.shape[1], dtype=y.dtype)
                losses = losses + (number + 1) * (y * weight - target.unsqueeze(1)).square().mean(1)
        if not case.counted:
            return losses.mean()
        used = target > 0
        return (losses * used).sum(), used.sum()

    return loss_fn


def batch_of(
    case: Case, step: Step, number: int, device: Any = None
) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor], Tensor]:
    """Arguments by place and by name, those of them that require grad if anything does, and a target."""
    generator = torch.Generator().manual_seed(100 * case.seed + number)
    shape = (step.rows, WIDTH) if case.flat else (step.rows, WIDTH, WIDTH)
    value: Any
    if case.acts:
        return _named(case, step, number, generator, device)
    if case.layers[0].kind == "embedding":
        value = torch.randint(0, 7, shape[:2], generator=generator)
    else:
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if case.layers[0].kind == "open":
            zero = torch.tensor(0.75, dtype=value.dtype)
            value = {"x": value, "factor": 2, "rest": {0: value.flip(0), 1: None}, "zero": zero}
        if case.layers[0].kind in WHOLE:
            mask = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
            flags = torch.ones(WIDTH, WIDTH).triu(2).bool()
            named = {"x": value, "mask": mask, "flags": flags, "factor": 2}
            value = named if case.layers[0].kind == "whole dict" else (value, mask)
    leaves = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    for x in leaves:
        x.requires_grad_(case.input_grad and x.is_floating_point())
    target = torch.randn(step.rows, generator=generator, dtype=torch.float64)
    target[0] = 0.5
    if case.loss.startswith("values"):
        target = torch.randn(shape, generator=generator, dtype=torch.float64)
    elif case.loss:  # Of classes; one of them may be ignored, in the first rows more often.
        target = torch.randint(0, WIDTH, shape[: len(shape) - 1], generator=generator)
        target[: step.rows // 2] = 1
        target[-1] = 2
    if kinds(case.layers) & set(IN_PLACE):
        value = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)
    return (value,), {}, leaves, target


def _named(
    case: Case, step: Step, number: int, generator: torch.Generator, device: Any
) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor], Tensor]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    found: dict[str, Any] = {
        "x": numbers(step.rows, WIDTH) if case.flat else numbers(step.rows, WIDTH, WIDTH), "mask": numbers(WIDTH),
        "labels": numbers(step.rows), "states": numbers(2, step.rows, WIDTH),
    }
    found["labels"][-1] = 1.5  # In each batch something counts.
    leaves = [found[name].requires_grad_(case.input_grad) for name in ("x", "mask")]
    found["pieces"] = [numbers(2 + row % 3, WIDTH) for row in range(step.rows)]
    found["rows"] = (torch.arange(step.rows) + number).to(device)
    target = found.pop("labels") if inside(case) else found["labels"]
    return (), found, leaves, target


@contextmanager
def mode(module: nn.Module, kind: str) -> Iterator[None]:
    """In eval mode, without grad mode, or neither."""
    before = [(part, part.training) for part in module.modules()]
    if kind.startswith("eval"):
        module.eval()
    try:
        with torch.set_grad_enabled(kind not in ("eval", "no grad")):
            yield
    finally:
        for part, training in before:
            part.training = training


class Side:
    """One of the two that are compared: the module, or its pipeline."""

    def __init__(self, case: Case, module: nn.Module) -> None:
        self.case, self.module = case, module
        self.piped = isinstance(module, SplitPipe)
        self.log: dict[str, list[Tensor | None]] = {}
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD([p for _, p in trained], lr=0.02, momentum=0.9) if trained else None
        self.closed = [x for part in module.modules() for x in getattr(part, "held", ())]
        leaves = trained + [(f"closure {number}", x) for number, x in enumerate(self.closed)]
        for name, parameter in leaves if case.hooks else ():
            parameter.register_hook(lambda grad, name=name: self._seen(f"{name}, hook", grad))
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._note(f"{name}, after", p.grad))

    def _seen(self, name: str, grad: Tensor | None) -> Tensor | None:
        self._note(name, grad)
        return grad if grad is None or self.case.hooks == "count" else grad * 2

    def _note(self, name: str, grad: Tensor | None) -> None:
        # A reentrant checkpoint calls hooks without a gradient, too.
        self.log.setdefault(name, []).append(grad if grad is None else grad.clone())

    def run(self, step: Step, number: int) -> dict[str, Any]:
        """Takes a step, and gives what there is to compare after it."""
        case, module = self.case, self.module
        ends = module.devices if isinstance(module, SplitPipe) else [torch.device("cpu")]
        args, named, leaves, target = batch_of(case, step, number, ends[0])
        found: dict[str, Any] = {}
        self.log.clear()
        if step.kind == "train":
            module.zero_grad(set_to_none=not case.zeros)
            for x in self.closed:
                x.grad = None
        torch.manual_seed(number)
        with mode(module, step.kind):
            by_schedule = bool(case.schedule) and inside(case) and step.kind != "no grad"
            by_schedule = by_schedule and not (case.acts and step.kind.startswith("eval"))
            if self.piped and by_schedule:
                loss = module(*args, **named, target=target.to(ends[-1]))
            else:
                output = module(*args, **named)
                pair = objective(case)(output, target) if inside(case) else field(output, "loss")
                loss = pair[0] / pair[1] if isinstance(pair, tuple) else pair
                if not by_schedule:
                    if not case.acts:
                        found["which require grad"] = [_requires_grad(x, args) for x in tree_leaves(output)]
                    # A copy: of a module, not of a pipeline, it may be a view of a parameter, which a step changes.
                    found["output"] = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x,
                                               _seen(output))
                del output, pair
            found["loss"], found["differentiable"] = loss.detach(), loss.requires_grad
            if loss.requires_grad and step.kind != "thrown":
                # In the mode of its forward, which a checkpoint runs again.
                if step.kind == "retained":
                    loss.backward(retain_graph=True)
                (loss * 3).backward()
            del loss
        found["gradients of the input"] = [x.grad for x in leaves]
        found["gradients of closures"] = [None if x.grad is None else x.grad.clone() for x in self.closed]
        found["generator"] = torch.get_rng_state().tolist()
        found["gradients"] = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        if "reentrant" not in kinds(case.layers):  # Plain autograd fires hooks in each of its passes.
            found["hooks"] = dict(sorted(self.log.items()))
        if step.kind == "train" and self.optimizer is not None:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)  # A model that explodes shows nothing.
            self.optimizer.step()
        found["state"] = dict(module.state_dict())
        if not case.acts:
            return found
        on_cpu: dict[str, Any] = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, found)
        return on_cpu


def _seen(output: Any) -> Any:
    """What is compared of an output: of a dataclass its name, and all there is in it."""
    return {"class": type(output).__name__, **vars(output)} if is_dataclass(output) else output


class Reference:
    """The module itself.

    Args:
        case: what it goes through.
        module: what is right; by default the unwrapped module.
    """

    def __init__(self, case: Case, module: nn.Module | None = None) -> None:
        self.case = case
        self.side = Side(case, module_of(case, reference=True) if module is None else module)

    def check(self, other: Side) -> None:
        """Takes all steps on both, and compares after each: nestings, what is no tensor, and tensors up to rounding."""
        for number, step in enumerate(self.case.steps):
            wanted = self.side.run(step, number)
            found = other.run(step, number)
            for key in wanted:
                limit = 1e-9 * max(0.1, _largest(wanted[key]))
                _same(found[key], wanted[key], limit, f"step {number}, {step.kind}: {key}")


def _requires_grad(x: Any, given: Any) -> bool | None:
    """The tensor's requires_grad. Without grad mode it is False for a given tensor that is handed on, and for a view of
    it or of a parameter: a pipeline gives another tensor there, which requires none.
    """
    if not isinstance(x, Tensor):
        return None
    handed_on = any(x is other or x._base is other for other in tree_leaves(given) if isinstance(other, Tensor))
    handed_on = handed_on or isinstance(x._base, nn.Parameter)
    return x.requires_grad and (torch.is_grad_enabled() or not handed_on)


def _largest(value: Any) -> float:
    """The largest number of any tensor."""
    tensors = [x.detach() for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    return max([float(x.abs().max()) for x in tensors], default=0.0)


def _same(found: Any, wanted: Any, limit: float, where: str) -> None:
    assert type(found) is type(wanted), f"{where}: found {found}, expected {wanted}"
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=0, atol=limit, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            _same(found[key], wanted[key], limit, f"{where} {key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), f"{where}: found {found}, expected {wanted}"
        for number, (x, y) in enumerate(zip(found, wanted)):
            _same(x, y, limit, f"{where} {number}")
    else:
        assert found == wanted, f"{where}: found {found}, expected {wanted}"


def sound(case: Case) -> bool:
    """Whether the module itself goes backward: nothing overwrites what something else has saved."""
    if case.acts and _counts_otherwise(case):
        return False
    if not case.acts and not kinds(case.layers) & set(IN_PLACE):
        return True
    try:
        reference = Reference(case)
        if case.acts:
            steps = [replace(step, kind="train") if step.kind == "thrown" else step for step in case.steps]
        else:  # Dropout stands between two layers in the one mode, and not in the other.
            steps = [Step("train", 2), Step("eval grad", 2)]
        for number, step in enumerate(steps):
            reference.side.run(step, number)
    except RuntimeError as error:
        if not case.acts and "inplace operation" not in str(error):
            raise
        return False
    return True


def _counts_otherwise(case: Case) -> bool:
    """Whether a block that is called or run twice changes itself each time, which its reference does not do so."""
    called = [act.which % len(case.layers) for act in case.acts if act.kind in CALLS + SOMETIMES]
    twice = [case.layers[number] for number in {*called} if called.count(number) > 1]
    again = [case.layers[act.which % len(case.layers)] for act in case.acts if act.kind == "checkpoint"]
    return "batchnorm" in kinds(twice) or bool({*NOT_TWICE} & kinds(again))


def writes(case: Case) -> bool:
    """Whether anything writes to a value that is kept: where another has its memory, this may be refused."""
    return any(act.kind == "write kept" for act in case.acts) or bool(kinds(case.layers) & {*IN_PLACE})
