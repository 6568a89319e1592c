"""Wrong arguments: an error of the type that is documented, at the door, that says what to do; and nothing is changed.

What is wrong for which argument stands in wrong.py. A new argument of a public function without a row there fails.
"""
from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from splitpipe import Plan, SplitPipe
from splitpipe.schedule import build
from splitpipe.skip.skippable import Skippable
from tests.doors.test_doors import PUBLIC
from tests.helpers import wrong
from tests.helpers.wrong import Door, Wrong

DOORS = [found for found in vars(wrong).values() if isinstance(found, Door)]
CASES = [pytest.param(door, argument, id=f"{door}-{argument}") for door in DOORS for argument in door.wrong]
#: Public callables without a row, and why.
FREE = {
    "DoesNotFitError": "raised, not called",
    "SplitFunction": "a base of static methods",
    "SplitFunction.forward": "of the user's own",
    "SplitFunction.backward_input": "of the user's own",
    "SplitFunction.backward_weight": "of the user's own",
    "SplitFunction.accumulate": "for those who override it",
    "SplitFunction.pays": "for those who override it",
    **{f"SplitPipe.{name}": "nn.Module's" for name in (
        "train", "apply", "requires_grad_", "zero_grad", "parameters", "named_parameters", "state_dict",
        "load_state_dict")},
    "SplitPipe.wrap": "for the constructor",
    "SplitPipe.to": "nn.Module's; a device is refused, see test_pipe",
    "SplitPipe.cpu": "refused, see test_pipe",
    "SplitPipe.cuda": "refused, see test_pipe",
    "SplitPipe.xpu": "refused, see test_pipe",
    "distributed.Pipeline.forward": "refused, see distributed/test_pipeline",
    "Plan": "what splitpipe.plan gives",
    "schedule.Timeline": "what simulate gives",
    **{f"schedule.Recording.{name}": "Timeline's" for name in ("to_svg", "to_html", "to_chrome_trace", "curve")},
    "schedule.Tiling.to_csv": "Schedule's",
    "Skippable.namespaced": "for the pipeline",
}


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with files that can be read."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def files() -> None:
    wrong.planned().to_json("plan.json")
    build("1f1b", 2, 2).to_csv("schedule.csv")


def called(door: Door, on: Sequence[Any], arguments: dict[str, Any]) -> Any:
    return (door.call or door.of)(*on, **arguments)


def owner(door: Door) -> list[Any]:
    """What the door is a method of, if it is one."""
    return [] if door.on is None else [door.on()]


@pytest.mark.parametrize("door", DOORS, ids=str)
def test_what_the_table_calls_right_is_right(door: Door) -> None:
    files()
    called(door, owner(door), door.right())


@pytest.mark.parametrize(("door", "argument"), CASES)
def test_a_wrong_argument_is_an_error_that_says_so_and_changes_nothing(door: Door, argument: str) -> None:
    faults = [fault for row in door.wrong[argument] for fault in found(door, argument, row)]
    assert not faults, "\n".join(faults)


def found(door: Door, argument: str, row: Wrong) -> Iterator[str]:
    """What is wrong with how a wrong value is refused."""
    on, arguments = owner(door), {**door.right(), argument: row.make()}
    value = repr(arguments[argument])[:60]
    before = shown((*on, *arguments.values())), torch.get_rng_state().tolist(), sorted(Path().iterdir())
    try:
        called(door, on, arguments)
    except Exception as error:
        said = f"{value}: {type(error).__name__}: {error}"
        if type(error) is not row.error:
            yield f"{said}\nbut {row.error.__name__} is due"
        if row.says.lower() not in str(error).lower():
            yield f"{said}\nwithout {row.says!r}"
        if not door.plain and not re.search("expect|declare", str(error), re.IGNORECASE):
            yield f"{said}\nbut what is expected?"
    else:
        yield f"{value} is taken, but {row.error.__name__} is due"
    if (shown((*on, *arguments.values())), torch.get_rng_state().tolist(), sorted(Path().iterdir())) != before:
        yield f"{value} changes a module, a tensor, the random state or a file"


def shown(values: Iterable[Any]) -> list[Any]:
    """All there is to see of the modules and tensors among some values."""
    return [of_module(value) if isinstance(value, nn.Module) else of_tensor(value)
            for value in values if isinstance(value, (nn.Module, Tensor))]


def of_module(module: nn.Module) -> list[Any]:
    parts: list[Any] = []
    for name, part in module.named_modules():
        hooks = {key: list(value) for key, value in vars(part).items() if key.endswith("_hooks")}
        parts.append((name, id(part), type(part), part.training, hooks, sorted(vars(part))))
    state = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return parts + [(name, of_tensor(tensor)) for name, tensor in state]


def of_tensor(x: Tensor) -> tuple[Any, ...]:
    lazy = torch.nn.parameter.is_lazy(x)
    values = None if lazy or x.is_meta or x.is_sparse else x.detach().tolist()
    return id(x), type(x), x.requires_grad, x.grad is None, None if lazy or x.is_sparse else x._version, values


def offered() -> dict[str, Callable[..., Any]]:
    """What takes arguments at the doors: classes, their methods, and functions."""
    found: dict[str, Callable[..., Any]] = {}
    for door, names in PUBLIC.items():
        for name in sorted(names):
            whole = label(door, name)
            found[whole] = value = getattr(door, name)
            if inspect.isclass(value):
                found.update({f"{whole}.{own}": method for own, method in methods(value)})
    found.update({f"Skippable.{own}": method for own, method in methods(Skippable) if own != "forward"})
    return {name: value for name, value in found.items() if parameters(value)}


def label(door: ModuleType, name: str) -> str:
    short = door.__name__.rpartition(".")[2]
    return f"{short}.{name}" if short in ("schedule", "distributed") else name


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    for owner in cls.__mro__:
        for name, value in vars(owner).items():
            if owner.__module__.startswith("splitpipe.") and (not name.startswith("_") or name == "__getitem__"):
                if isinstance(value, (FunctionType, classmethod, staticmethod)) and owner is first(cls, name):
                    yield name, getattr(cls, name)


def first(cls: type, name: str) -> type:
    return next(owner for owner in cls.__mro__ if name in vars(owner))


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


@pytest.mark.parametrize(("name", "function"), offered().items())
def test_each_argument_of_what_is_public_has_wrong_values_here(name: str, function: Callable[..., Any]) -> None:
    if name in FREE:
        return
    door = next((door for door in DOORS if door.name == name), None)
    assert door is not None, f"give {name} a Door in wrong.py"
    known = set(door.wrong) | set(door.free)
    assert parameters(function) == known, f"{parameters(function) ^ known}: mend the Door named {name!r} in wrong.py"


@pytest.mark.parametrize("door", [door for door in DOORS if door is not wrong.ITEM], ids=str)
def test_the_errors_that_are_due_are_documented(door: Door) -> None:
    doc = "".join((inspect.getdoc(each) or "").partition("Raises:")[2] for each in (door.of, *door.told))
    for error in {row.error for rows in door.wrong.values() for row in rows}:
        names = {base.__name__ for base in error.__mro__ if base not in (Exception, BaseException, object)}
        assert any(re.search(rf"\b{name}\b", doc) for name in names), f"{error.__name__} is not under Raises"


def test_wrapped_rightly_after_all_that_is_wrong_a_module_trains() -> None:
    module, right = wrong.layers(), wrong.PIPE.right()
    for argument, rows in wrong.PIPE.wrong.items():
        for row in rows if argument != "module" else ():
            with pytest.raises(row.error):
                SplitPipe(**{**right, "module": module, argument: row.make()})
    SplitPipe(**{**right, "module": module})(wrong.x(), target=wrong.x()).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_after_all_batches_that_are_wrong_a_model_trains() -> None:
    model = wrong.scheduled()
    before = of_module(model)
    for argument, rows in wrong.TRAIN.wrong.items():
        for row in rows:
            with pytest.raises(row.error):
                model(**{**wrong.TRAIN.right(), argument: row.make()})
    assert of_module(model) == before
    model(wrong.x(), target=wrong.x()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["balance", "devices", "chunks", "checkpoint", "schedule"])
def test_what_a_model_was_built_with_is_there_to_read_and_not_to_set(name: str) -> None:
    model = wrong.scheduled()
    before, value = of_module(model), getattr(model, name)
    for other in (value, None, 3, "always", nn.Parameter(torch.ones(2))):
        with pytest.raises((AttributeError, KeyError), match=name):
            setattr(model, name, other)
    assert of_module(model) == before and getattr(model, name) == value


def test_a_module_under_the_name_of_an_argument_is_a_layer_too_many() -> None:
    model = wrong.model()
    model.chunks = nn.Identity()  # type: ignore[misc, assignment]
    with pytest.raises(RuntimeError, match="has 5 layers now.*expected the same number"):
        model(wrong.x())
    del model._modules["chunks"]
    assert model(wrong.x()).shape == (4, 3) and model.chunks == 2


@pytest.mark.parametrize("method", [SplitPipe.forward, SplitPipe.record, SplitPipe.deferral_report])
def test_surplus_arguments_are_refused(method: Callable[..., Any]) -> None:
    model = wrong.scheduled()
    for more in ({"targets": wrong.x()}, {"chunks": 2}, {"mask": None}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            method(model, **({"input": wrong.x()} if method is SplitPipe.forward else {}), **more)


class Saves(wrong.Scale):
    """Saves what is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        ctx.save_for_weight(options["saved"])
        return x * 1


class Scaled(nn.Module):
    """A layer that calls a split function."""

    def __init__(self, saved: Any) -> None:
        super().__init__()
        self.weight, self.saved = nn.Parameter(torch.ones(3)), saved

    def forward(self, x: Tensor) -> Tensor:
        return Saves.apply(x, self.weight, saved=self.saved)


@pytest.mark.parametrize("saved", [2, "x", [torch.ones(2)], True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_split_function_that_saves_what_is_no_tensor_is_a_type_error(saved: Any, inside: bool) -> None:
    layer = Scaled(saved)
    model = SplitPipe(nn.Sequential(layer), [1], devices=["cpu"]) if inside else layer
    with pytest.raises(TypeError, match="can only save variables, but argument 0 is of type"):
        model(wrong.x())


FIELDS = ("splitpipe plan", "balance", "cuts", "devices", "chunks", "checkpoint", "way", "dropin", "own_loss",
          "compile", "step_time", "peak_bytes", "layers", "schedule", "costs", "memory", "runners_up")


@pytest.mark.parametrize("field", FIELDS)
def test_a_file_that_holds_no_plan_is_refused_or_prints(field: str) -> None:
    wrong.planned().to_json("plan.json")
    text = json.loads(Path("plan.json").read_text())
    assert set(text) == set(FIELDS)
    for value in (None, -1, 0.5, True, "x", "", [], {}, [None], ["x"], [-1], [[]], {"x": 1}, 10**400):
        Path("plan.json").write_text(json.dumps({**text, field: value}))
        try:
            found = Plan.from_json("plan.json")
        except ValueError as error:
            assert "plan.json doesn't contain a plan" in str(error), value
        else:
            assert str(found)
