"""A random forward run: the module and its pipeline take the same steps, and are compared in everything."""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from splitpipe import SplitPipe
from tests.helpers.randomized import planned, stages_a_device
from tests.helpers.randomized_layers import WIDTH, ByMicrobatch
from tests.helpers.randomized_models import IN_PLACE, NOT_TWICE, Builder, kinds
from tests.helpers.randomized_runs import _largest, _same, mode
from tests.helpers.scripted import CALLS, SOMETIMES, Scene, Step
from tests.helpers.scripted_models import Scripted, loss_over

#: Statements after which rounding is that of bfloat16.
ROUGH = {"autocast"}


def module_of(scene: Scene, reference: bool = False) -> Scripted:
    """The module of a scene.

    Args:
        scene: that it is of.
        reference: whether it stands for a pipeline, whose microbatches it knows.
    """
    torch.manual_seed(scene.seed)
    one = scene.chunks == 1 or all(step.rows == 1 for step in scene.steps)

    def norm(features: int) -> nn.Module:
        return ByMicrobatch(features, scene.chunks, scene.deferred) if reference else nn.BatchNorm1d(features)

    rough = ROUGH & {act.kind for act in scene.acts}
    builder = Builder(scene.flat, torch.float32 if rough else torch.float64, norm, one)
    builder.copied = any(kind in IN_PLACE for kind in kinds(scene.blocks))
    before = torch.get_default_dtype()
    torch.set_default_dtype(builder.dtype)
    try:
        blocks = [builder.made(block) for block in scene.blocks]
        chunks = scene.chunks if reference else 1
        return Scripted(blocks, scene.acts, scene.output, scene.loss, chunks)
    finally:
        torch.set_default_dtype(before)


def pipeline_of(scene: Scene, kind: str = "cpu") -> SplitPipe:
    """The pipeline of a scene; ``kind``: of its devices, three of them if they are no CPUs."""
    count, options = len(scene.cuts) + 1, {}
    if scene.schedule:
        plan = planned(scene.schedule, count // stages_a_device(scene.schedule), scene.chunks)
        count, options = plan.devices, {"schedule": plan}
        if inside(scene):
            options["loss_fn"] = partial(loss_of, scene.loss)
    return SplitPipe(
        module_of(scene), cuts=scene.cuts, devices=devices_of(kind, count), chunks=scene.chunks,
        checkpoint=scene.checkpoint,
        backward=scene.backward, stash_limit=scene.stash_limit, deferred_batch_norm=scene.deferred,
        batched={"mask": False, "states": 1}, reduction=scene.loss if scene.said else None, **options,
    )


def devices_of(kind: str, count: int) -> list[str]:
    """So many devices, of which those of an accelerator are three."""
    return [kind if kind == "cpu" else f"{kind}:{number % 3}" for number in range(count)]


def inside(scene: Scene) -> bool:
    """Whether the loss is a function of output and target: a tuple has no field of that name."""
    return scene.function or scene.output == "tuple"


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
    return loss_over(kind, found, y, target)


def batch_of(scene: Scene, step: Step, number: int, device: torch.device | None = None) -> dict[str, Any]:
    """The arguments of a call."""
    generator = torch.Generator().manual_seed(100 * scene.seed + number)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = numbers(step.rows, WIDTH) if scene.flat else numbers(step.rows, WIDTH, WIDTH)
    found: dict[str, Any] = {"x": x, "mask": numbers(WIDTH), "labels": numbers(step.rows),
             "states": numbers(2, step.rows, WIDTH)}
    found["labels"][-1] = 1.5  # In each batch something counts.
    pieces = [numbers(2 + row % 3, WIDTH) for row in range(step.rows)]
    if ROUGH & {act.kind for act in scene.acts}:
        found = {name: value.float() for name, value in found.items()}
        pieces = [piece.float() for piece in pieces]
    found = {name: value.to(device) for name, value in found.items()}
    for name in ("x", "mask"):
        found[name].requires_grad_(scene.input_grad)
    found["pieces"] = [piece.to(device) for piece in pieces]
    return {**found, "rows": (torch.arange(step.rows) + number).to(device)}


class Party:
    """One of the two that are compared: the module, or its pipeline."""

    def __init__(self, scene: Scene, module: nn.Module) -> None:
        self.scene, self.module = scene, module
        self.log: dict[str, list[Tensor]] = {}
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD([p for _, p in trained], lr=0.02, momentum=0.9)
        for name, parameter in trained if scene.hooks else ():
            parameter.register_hook(lambda grad, name=name: self._seen(name, grad))

    def _seen(self, name: str, grad: Tensor) -> Tensor:
        self.log.setdefault(name, []).append(grad.clone())
        return grad if self.scene.hooks == "count" else grad * 2

    def run(self, step: Step, number: int) -> dict[str, Any]:
        """Takes a step, and gives what there is to compare after it."""
        scene, module = self.scene, self.module
        ends: Any = (torch.device("cpu"),) if not isinstance(module, SplitPipe) else module.devices
        given = batch_of(scene, step, number, ends[0])
        target = given["labels"].to(ends[-1])
        if inside(scene):
            del given["labels"]
        self.log.clear()
        torch.manual_seed(number)
        if step.kind == "train":
            module.zero_grad()
        scheduled = isinstance(module, SplitPipe) and scene.schedule
        found: dict[str, Any] = {}
        with mode(module, step.kind):
            training = step.kind not in ("no grad", "eval", "eval grad")
            if scheduled and inside(scene) and training:
                loss = module(**given, target=target)
            else:
                output = module(**given)
                loss = loss_of(scene.loss, output, target) if inside(scene) else field(output, "loss")
                shown = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, seen(output))
                if not (scene.schedule and inside(scene) and training):
                    found["output"] = shown
            found["loss"], found["differentiable"] = loss.detach(), loss.requires_grad
            if loss.requires_grad and step.kind != "thrown":
                (loss * 3).backward()
        found["gradients of the input"] = [given["x"].grad, given["mask"].grad]
        found["gradients"] = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        found["hooks"] = dict(sorted(self.log.items()))
        if step.kind == "train":
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            self.optimizer.step()
        found["state"] = dict(module.state_dict())
        on_cpu: dict[str, Any] = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, found)
        return on_cpu


def seen(output: Any) -> Any:
    """What is compared of an output: its class, and all there is in it."""
    if isinstance(output, (tuple, dict)):
        return output
    return {"class": type(output).__name__, **vars(output)}


def check(scene: Scene, found: Party, wanted: Party | None = None) -> None:
    """Takes all steps on both, and compares after each; what is wanted is the module's if nothing else is given."""
    wanted = Party(scene, module_of(scene, reference=True)) if wanted is None else wanted
    tolerance = 0.05 if ROUGH & {act.kind for act in scene.acts} else 1e-9
    for number, step in enumerate(scene.steps):
        expected, given = wanted.run(step, number), found.run(step, number)
        for key in expected:
            limit = tolerance * max(0.1, _largest(expected[key]))
            _same(given[key], expected[key], limit, f"step {number}, {step.kind}: {key}")


def sound(scene: Scene) -> bool:
    """Whether the module itself goes backward: nothing overwrites what something else has saved.

    A norm that is called twice moves its statistics microbatch by microbatch, which the reference does not.
    """
    called = [act.which % len(scene.blocks) for act in scene.acts if act.kind in CALLS + SOMETIMES]
    twice = {number for number in called if called.count(number) > 1}
    if any("batchnorm" in kinds([scene.blocks[number]]) for number in twice):
        return False
    again = {act.which % len(scene.blocks) for act in scene.acts if act.kind == "checkpoint"}
    if any({*NOT_TWICE} & kinds([scene.blocks[number]]) for number in again):
        return False
    try:
        party = Party(scene, module_of(scene, reference=True))
        for number, step in enumerate(scene.steps):
            party.run(replace(step, kind="train") if step.kind == "thrown" else step, number)
    except RuntimeError:
        return False
    return True


def writes(scene: Scene) -> bool:
    """Whether anything writes to a value that is kept: where another has its memory, this may be refused."""
    return any(act.kind == "write kept" for act in scene.acts) or bool(kinds(scene.blocks) & {*IN_PLACE})
