"""Wrong arguments: an error of the type that is documented, at the door, that says what to do; and nothing is changed.

What is wrong for which argument stands in wrong.py. A new argument of a public function without a row there fails.
"""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from splitpipe.skip.skippable import Skippable
from tests.doors.test_doors import PUBLIC
from tests.helpers import wrong
from tests.helpers.wrong import Door, Wrong

pytestmark = pytest.mark.draws

DOORS = [value for value in vars(wrong).values() if isinstance(value, Door)]
doors = pytest.mark.parametrize("door", DOORS, ids=str)
#: Public callables without a row: what users write or override, or get from others; what is nn.Module's; paths, whose
#: errors are Python's; what tests of the pipeline, of skips and of batch norms refuse.
FREE = {"DoesNotFitError", "Plan", "schedule.Timeline", "schedule.Recording", "schedule.Recording.add",
        "SplitFunction", "DeferredBatchNorm.forward", "distributed.Pipeline.forward", "skippable", "stash", "pop",
        "Plan.to_json", "Plan.to_html", "Plan.from_json", "schedule.Schedule.to_csv", "schedule.from_csv",
        *(f"SplitFunction.{name}" for name in (
            "apply", "forward", "backward_input", "backward_weight", "accumulate", "pays")),
        *(f"SplitPipe.{name}" for name in ("train", "state_dict", "load_state_dict")),
        *(f"schedule.Recording.{name}" for name in ("to_svg", "to_html")),
        "Skippable.isolate", "Skippable.namespaced"}


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def called(door: Door, on: Sequence[Any], arguments: dict[str, Any]) -> Any:
    return (door.call or door.of)(*on, **arguments)


def owner(door: Door) -> list[Any]:
    """What the door is a method of, if it is one."""
    return [] if door.on is None else [door.on()]


@doors
def test_what_the_table_calls_right_is_right(door: Door) -> None:
    called(door, owner(door), door.right())


@doors
def test_a_wrong_argument_is_an_error_that_says_so_and_changes_nothing(door: Door) -> None:
    faults = [f"{argument}: {fault}" for argument, rows in door.wrong.items()
              for row in rows for fault in faults_of(door, argument, row)]
    assert not faults, "\n".join(faults)


def faults_of(door: Door, argument: str, row: Wrong) -> Iterator[str]:
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
        if not re.search("expect|declare", str(error), re.IGNORECASE):
            yield f"{said}\nbut what is expected?"
        if re.search(r"(?<![\d.,-])1 (?!is )[a-z]+s\b", str(error)):
            yield f"{said}\nbut one of a thing is no plural"
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
    names: dict[str, Any] = {"Skippable": Skippable}
    for door in PUBLIC:
        short = door.__name__.rpartition(".")[2]
        front = f"{short}." if short in ("schedule", "distributed") else ""
        names.update({f"{front}{name}": getattr(door, name) for name in sorted(door.__all__)})
    found = {name: value for name, value in names.items() if value is not Skippable}
    for name, value in names.items():
        if inspect.isclass(value):
            found.update({f"{name}.{method}": getattr(value, method) for method in methods(value)})
    return {name: value for name, value in found.items() if parameters(value) and name != "Skippable.forward"}


def methods(cls: type) -> set[str]:
    """The public methods that a class has of the package's, not of torch's or Python's."""
    first = {name: base for base in reversed(cls.__mro__) for name in vars(base)}
    return {name for name, base in first.items()
            if base.__module__.startswith("splitpipe.") and not name.startswith("_")
            and isinstance(vars(base)[name], (FunctionType, classmethod, staticmethod))}


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_each_argument_of_what_is_public_has_wrong_values_here() -> None:
    known = {door.name: {*door.wrong, *door.free} for door in reversed(DOORS)}  # The first Door of a name has them all.
    found = {name: parameters(function) for name, function in offered().items() if name not in FREE}
    assert found.keys() <= known.keys(), f"{found.keys() - known.keys()}: give each a Door in wrong.py"
    unknown = {name: its ^ known[name] for name, its in found.items() if its != known[name]}
    assert unknown == {}, "mend the Doors of these in wrong.py"


@doors
def test_the_errors_that_are_due_are_documented(door: Door) -> None:
    doc = "".join((inspect.getdoc(each) or "").partition("Raises:")[2] for each in (door.of, *door.told))
    for error in {row.error for rows in door.wrong.values() for row in rows}:
        names = {base.__name__ for base in error.__mro__ if base not in (Exception, BaseException, object)}
        assert any(re.search(rf"\b{name}\b", doc) for name in names), f"{error.__name__} is not under Raises"


@pytest.mark.parametrize("name", ["balance", "devices", "chunks", "checkpoint", "schedule"])
def test_what_a_model_was_built_with_is_there_to_read_and_not_to_set(name: str) -> None:
    model = wrong.scheduled()
    before, value = of_module(model), getattr(model, name)
    for other in (value, None, 3, "always", nn.Parameter(torch.ones(2)), nn.Identity()):
        with pytest.raises(AttributeError, match=name):
            setattr(model, name, other)
    assert of_module(model) == before and getattr(model, name) == value
