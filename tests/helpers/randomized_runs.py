"""A random case run: the unwrapped module and its pipeline take the same steps, and are compared in everything."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from splitpipe import SplitPipe
from tests.helpers.randomized import Case, Step, planned, stages_a_device
from tests.helpers.randomized_layers import WIDTH, ByMicrobatch
from tests.helpers.randomized_models import CASTS, IN_PLACE, WHOLE, Builder, kinds

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
#: Of what a value may be off, as a part of the largest one that it is compared among.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.03}


def module_of(case: Case, reference: bool = False, exact: bool = False, plain: bool = False) -> nn.Sequential:
    """The module of a case.

    Args:
        case: that it is of.
        reference: with BatchNorm layers that know of microbatches.
        exact: in float64.
        plain: without torch.utils.checkpoint.
    """
    torch.manual_seed(case.seed)
    one = case.chunks == 1 or all(step.rows == 1 for step in case.steps)

    def norm(features: int) -> nn.Module:
        return ByMicrobatch(features, case.chunks, case.deferred) if reference else nn.BatchNorm1d(features)

    builder = Builder(case.flat, DTYPES[case.dtype], norm, one, exact, plain)
    model = builder.model(case.layers, case.skips, bool(case.loss))
    if exact:  # The same numbers, rounded.
        model.load_state_dict(module_of(case, reference).state_dict())
    return model


def pipeline_of(case: Case, plain: bool = False, **options: Any) -> SplitPipe:
    """The pipeline of a case, by other options; plain, it is without torch.utils.checkpoint."""
    count, given = len(case.balance), dict(options)
    if case.schedule:
        plan = planned(case.schedule, count // stages_a_device(case.schedule), case.chunks)
        given = {"schedule": plan, "loss_fn": objective(case), **given}
        count = plan.devices
    if case.layers[0].kind in WHOLE:
        whole = {"mask": False, "flags": False} if case.layers[0].kind == "whole dict" else (True, False)
        given["batched"] = whole
    given = {"checkpoint": case.checkpoint, **given}
    return SplitPipe(module_of(case, plain=plain), case.balance, devices=["cpu"] * count, chunks=case.chunks,
                     deferred_batch_norm=case.deferred, backward=case.backward,  # type: ignore[arg-type]
                     stash_limit=case.stash_limit, **given)


def dtype_of(case: Case) -> torch.dtype:
    """What the output has."""
    return [DTYPES[case.dtype], *(CASTS[layer.kind] for layer in case.layers if layer.kind in CASTS)][-1]


def objective(case: Case, exact: bool = False) -> Any:
    """The loss function: torch's own, a mean, or a total and a count of the rows whose target is positive."""
    if case.loss:
        name, *words = case.loss.split()
        options: dict[str, Any] = {"reduction": "sum" if "sum" in words else "mean"}
        if "ignoring" in words:
            options["ignore_index"] = 1
        if "weighted" in words:
            dtype = torch.float64 if exact else dtype_of(case)
            options["weight"] = torch.tensor([0.5, 2.0, 0.25, 1.0], dtype=dtype)
        if "smooth" in words:
            options["label_smoothing"] = 0.125
        kind = {"mse": "MSELoss", "smooth_l1": "SmoothL1Loss", "nll": "NLLLoss", "cross_entropy": "CrossEntropyLoss"}
        functions = {"smooth_l1": F.smooth_l1_loss, "nll": F.nll_loss, "cross_entropy": F.cross_entropy}
        found = partial(functions[name], **options) if "partial" in words else getattr(nn, kind[name])(**options)
        if "two" in words:
            return lambda output, target: found(output, target) + 0.5 * F.l1_loss(output, target)
        if "hand" in words:
            return lambda output, target: (F.cross_entropy(output, target, reduction="none") * (target != 1)).sum() / (
                target != 1).sum().clamp(min=1)
        return (lambda output, target: found(output, target)) if "lambda" in words else found

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


def batch_of(case: Case, step: Step, number: int, exact: bool = False) -> tuple[Any, list[Tensor], Tensor]:
    """An input, its leaves that are tensors, and a target."""
    generator = torch.Generator().manual_seed(100 * case.seed + number)
    shape = (step.rows, WIDTH) if case.flat else (step.rows, WIDTH, WIDTH)
    value: Any
    if case.layers[0].kind == "embedding":
        value = torch.randint(0, 7, shape[:2], generator=generator)
    else:
        value = torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[case.dtype])
        value = value.double() if exact else value
        if case.layers[0].kind == "open":
            zero = torch.tensor(0.75, dtype=value.dtype)
            value = {"x": value, "factor": 2, "rest": [value.flip(0), None], "zero": zero}
        if case.layers[0].kind in WHOLE:
            mask = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).to(DTYPES[case.dtype])
            mask, flags = mask.to(value.dtype), torch.ones(WIDTH, WIDTH).triu(2).bool()
            named = {"x": value, "mask": mask, "flags": flags, "factor": 2}
            value = named if case.layers[0].kind == "whole dict" else (value, mask)
    leaves = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    for x in leaves:
        x.requires_grad_(case.input_grad and x.is_floating_point())
    target = torch.randn(step.rows, generator=generator, dtype=torch.float64)
    target[0] = 0.5
    if case.loss.startswith(("mse", "smooth_l1")):
        target = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype_of(case))
        target = target.double() if exact else target
    elif case.loss:  # Of classes; one of them may be ignored, in the first rows more often.
        target = torch.randint(0, WIDTH, shape[: len(shape) - 1], generator=generator)
        target[: step.rows // 2] = 1
        target[-1] = 2
    if kinds(case.layers) & set(IN_PLACE):
        value = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)
    return value, leaves, target


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

    def __init__(self, case: Case, module: nn.Module, exact: bool = False) -> None:
        self.case, self.module, self.exact = case, module, exact
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
        value, leaves, target = batch_of(case, step, number, self.exact)
        loss_fn, found = objective(case, self.exact), {}
        self.log.clear()
        if step.kind == "train":
            module.zero_grad(set_to_none=not case.zeros)
            for x in self.closed:
                x.grad = None
        torch.manual_seed(number)
        with mode(module, step.kind):
            if self.piped and case.schedule and step.kind != "no grad":
                loss = module(value, target=target)
            else:
                output = module(value)
                pair = loss_fn(output, target)
                loss = pair[0] / pair[1] if isinstance(pair, tuple) else pair
                if not case.schedule or step.kind == "no grad":
                    found["which require grad"] = [_requires_grad(x, value) for x in tree_leaves(output)]
                    # A copy: of a module, not of a pipeline, it may be a view of a parameter, which a step changes.
                    found["output"] = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, output)
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
        return found


class Reference:
    """The module itself, and how exact it is: where numbers are rounded, some models make much of it.

    Args:
        case: what it goes through.
        module: what is right; by default the unwrapped module.
    """

    def __init__(self, case: Case, module: nn.Module | None = None) -> None:
        self.case = case
        self.side = Side(case, module_of(case, reference=True) if module is None else module)
        names = {case.dtype} | {kind.removeprefix("to ") for kind in kinds(case.layers) if kind in CASTS}
        self.tolerance = max(TOLERANCE[DTYPES[name]] for name in names)
        rounded = module is None and names != {"float64"}
        self.exact = Side(case, module_of(case, True, True), True) if rounded else None

    def check(self, other: Side) -> None:
        """Takes all steps on both, and compares after each: nestings, what is no tensor, and tensors up to rounding."""
        for number, step in enumerate(self.case.steps):
            wanted = self.side.run(step, number)
            exact = wanted if self.exact is None else self.exact.run(step, number)
            found = other.run(step, number)
            for key in wanted:
                limit = self.tolerance * max(0.1, _largest(wanted[key])) + 4 * _largest(wanted[key], exact[key])
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


def _largest(value: Any, other: Any = None) -> float:
    """The largest number of any tensor, or the largest difference."""
    tensors = [[x.detach().double() for x in tree_leaves(one)
                if isinstance(x, Tensor) and x.is_floating_point() and x.numel()] for one in (value, other)]
    if other is not None:
        tensors[0] = [x - y for x, y in zip(*tensors)]
    return max([float(x.abs().max()) for x in tensors[0]], default=0.0)


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
    """Whether the module itself goes backward: no layer overwrites what another one has saved."""
    if not kinds(case.layers) & set(IN_PLACE):
        return True
    try:
        reference = Reference(case)
        for side in filter(None, (reference.side, reference.exact)):  # The exact one has no casts, which copy.
            for kind in ("train", "eval grad"):  # Dropout stands between two layers in the one, and not in the other.
                side.run(Step(kind, 2), 0)
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        return False
    return True
