"""Private names of torch: three modules own them all, and say in one sentence what a torch lacks."""
from __future__ import annotations

import ast
import configparser
import inspect
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import pipelining

from splitpipe.core import torch_private

ROOT = Path(__file__).resolve().parents[2]
CORE = Path(str(torch_private.__file__))
DISTRIBUTED = ROOT / "splitpipe" / "distributed" / "torch_private.py"
COMPILED = ROOT / "splitpipe" / "compiled" / "torch_private.py"
FILES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
         for path in sorted((ROOT / "splitpipe").rglob("*.py")) if path not in (CORE, DISTRIBUTED, COMPILED)}
#: Attributes that are read with a default, or from nodes and from classes that torch imports late.
LATE = {"_raw_saved_input", "_raw_saved_indices", "_raw_saved_mat1", "_raw_saved_self",
        "_saved_input", "_saved_weight", "_saved_indices", "_saved_mat1", "_saved_self", "_saved_weight_sym_argsize_0",
        "_saved_padding_idx", "_saved_sparse", "_saved_scale_grad_by_freq", "_saved_stride", "_saved_padding",
        "_saved_dilation", "_saved_transposed", "_saved_output_padding", "_saved_groups", "_saved_alpha", "_saved_beta",
        "_saved_dim0", "_saved_dim1", "_saved_dims", "_boxed_call", "_torchdynamo_orig_callable"}


def is_private(name: str) -> bool:
    """Whether a name, or a part of a dotted one, begins with a single underscore."""
    return any(part.startswith("_") and not part.startswith("__") and part != "_" for part in name.split("."))


def taken(path: Path) -> Iterator[tuple[str, str]]:
    """The module and the name of all that a file imports from torch."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def listed(*paths: Path) -> set[str]:
    """Names of the attributes that modules require, read as text: torch 2.11 can't import that of distributed."""
    calls = [node for path in paths or (CORE, DISTRIBUTED) for node in ast.walk(ast.parse(path.read_text("utf-8")))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "require"]
    return LATE.union(*[ast.literal_eval(node.args[1]).split() for node in calls])


def ours(tree: ast.AST) -> set[str]:
    """Private names that a file gives to its own: functions, attributes of self, slots, fields."""
    found = {"_asdict", "_replace", "_DummyThread", "_hf_hook", "_old_forward", "_runtime"}  # Others.
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            found.update(ast.literal_eval(node.value))
    return found


def faults(source: str, attributes: set[str]) -> list[str]:
    """The private names of torch in a file that are not imported from the modules that own them, nor listed there."""
    tree = ast.parse(source)
    known = attributes | ours(tree)
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            whole = ast.unparse(node)
            if whole.startswith("torch.") or not whole.startswith(("self.", "cls.")) and node.attr not in known:
                names = [whole]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names = [node.value] if node.value not in known else []
        found += [f"line {node.lineno}: {name}" for name in names if is_private(name)]
    return found


@pytest.mark.thorough
def test_no_other_file_names_what_is_private_to_torch() -> None:
    attributes = listed()
    found = {file: names for file, source in FILES.items() if (names := faults(source, attributes))}
    assert not found, (
        f"{found}: import them in a torch_private.py with what they are for, or add attributes of torch's objects to "
        "splitpipe/core/torch_private.py, or to LATE here"
    )


def overridden(kind: type, attributes: set[str]) -> list[str]:
    """The private methods of torch that a class overrides, and that are not listed: if torch renames one, it is silent.

    Those of pipelining's stages have no documentation: all count as private.
    """
    theirs = {name for base in kind.__mro__ if base.__module__.split(".")[0] == "torch" for name in vars(base)}
    undocumented = issubclass(kind, pipelining.PipelineStage)
    return [f"{kind.__qualname__}.{name}" for name, own in vars(kind).items()
            if inspect.isroutine(own) and name in theirs - attributes
            and not (name.startswith("__") and name.endswith("__")) and (undocumented or is_private(name))]


def heirs(module: Any) -> list[type]:
    """The classes of a module that inherit from torch's."""
    kinds = [x for x in vars(module).values() if inspect.isclass(x) and x.__module__ == module.__name__]
    return [kind for kind in kinds if any(base.__module__.split(".")[0] == "torch" for base in kind.__mro__)]


def module_of(file: str) -> Any:
    try:
        return import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    except ImportError as error:
        pytest.skip(str(error))  # Of pipelining, with torch 2.11.


@pytest.mark.thorough
def test_no_class_overrides_what_is_private_to_torch_unlisted() -> None:
    attributes, files = listed(), [file for file in FILES if "\nclass " in FILES[file]]
    assert [fault for file in files for kind in heirs(module_of(file)) for fault in overridden(kind, attributes)] == []


def test_what_is_private_to_torch_is_seen() -> None:
    for line in ("torch._C._current_graph_task_id()", "import torch._dynamo", "from torch._C import name",
                 "x._unlisted", "from torch import _C", "super()._unlisted()", "getattr(x, '_unlisted', None)"):
        assert faults(f"def f(x):\n    {line}", {"_listed"}) != [], line
    assert faults("import torch.nn\nx._listed\nself._mine\nx.__dict__", {"_listed"}) == []
    kind = type("Layer", (torch.nn.Module,), dict.fromkeys(["_apply", "_get_name", "forward"], lambda self: None))
    assert overridden(kind, {"_apply"}) == ["Layer._get_name"]


def test_what_is_listed_is_used() -> None:
    source = "\n".join(FILES.values())
    words = set(re.findall(r"\w+", source))
    names = {name for path in (CORE, DISTRIBUTED) for module, name in taken(path) if is_private(f"{module}.{name}")}
    assert (names | listed()) - words == set()


def test_the_package_needs_at_most_75_private_names_none_of_them_mangled() -> None:
    """What nodes save isn't counted: torch's notes on autograd describe it, and without a name, nothing is deferred."""
    names = {f"{module}.{name}" for path in (CORE, DISTRIBUTED, COMPILED) for module, name in taken(path)}
    names = {name for name in names if is_private(name)} | listed(CORE, DISTRIBUTED, COMPILED)
    names = {name for name in names if not name.startswith(("_saved_", "_raw_saved_"))}
    paths = {ast.unparse(node) for node in ast.walk(ast.parse(CORE.read_text())) if isinstance(node, ast.Attribute)}
    names |= {path for path in paths if is_private(path)}
    assert len(names) <= 75, f"{len(names)}: a public name, a simpler mechanism, or one mechanism less?"
    own = [path.read_text() for path in (CORE, DISTRIBUTED, COMPILED)]
    assert not re.search(r"_Z\w*\d", "\n".join([*FILES.values(), *own]))


def missing(error: pytest.ExceptionInfo[ImportError], name: str) -> bool:
    """Whether an error is the sentence, about this name."""
    version = re.escape(torch.__version__)
    gone = rf"found torch {version} without a private name that splitpipe needs to .* \(.*{name}.*\)"
    return re.match(f"{gone}; expected torch>=", str(error.value)) is not None and "\n" not in str(error.value)


PRIVATE = [(module, name) for module, name in taken(CORE) if is_private(f"{module}.{name}")]


@pytest.mark.thorough
def test_an_import_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in PRIVATE:
        with monkeypatch.context() as patch, pytest.raises(ImportError) as error:
            patch.delattr(import_module(module), name)
            runpy.run_path(str(CORE))
        assert missing(error, name)


def test_an_attribute_that_is_gone_is_said() -> None:
    with pytest.raises(ImportError) as error:
        torch_private.require(Path, "exists _gone", "to see whether it is there")
    assert missing(error, "_gone")


def test_a_name_that_a_later_torch_made_public_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd.graph, "queue_callback", None, raising=False)
    assert runpy.run_path(str(CORE))["queue_callback"] == torch.autograd.Variable._execution_engine.queue_callback
    monkeypatch.setattr(torch.autograd.graph, "queue_callback", print)
    assert runpy.run_path(str(CORE))["queue_callback"] is print
    monkeypatch.delattr(torch.autograd.Variable, "_execution_engine")
    with pytest.raises(ImportError) as error:
        runpy.run_path(str(CORE))
    assert missing(error, "_execution_engine")


def test_the_sentence_and_the_installer_expect_the_same_torch() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert torch_private.EXPECTED in setup["options"]["install_requires"].split()
