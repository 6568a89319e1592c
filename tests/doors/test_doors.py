"""What a user may import, and nothing else; each of it explained by an example that runs."""
from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import splitpipe
from splitpipe import balance, distributed, schedule, skip

PUBLIC: dict[ModuleType, set[str]] = {
    splitpipe: {"SplitPipe", "SplitFunction", "DeferredBatchNorm", "is_checkpointing", "is_recomputing", "attach",
                "deferral_report", "detach", "device_map", "plan", "Plan", "DoesNotFitError", "record", "check"},
    skip: {"skippable", "stash", "pop", "Namespace", "verify_skippables"},
    balance: {"balance_by_time", "balance_by_size"},
    distributed: {"Pipeline"},
    schedule: {"BuildingBlock", "Costs", "BlockOp", "Op", "Schedule", "Timeline", "build", "check", "Recording",
               "from_csv", "names", "reorder", "search", "simulate"},
}
NAMES = [(door, name) for door, names in PUBLIC.items() for name in sorted(names)]
MODULES = ["splitpipe", *(found.name for found in pkgutil.walk_packages(splitpipe.__path__, "splitpipe."))]


@pytest.mark.parametrize("door", PUBLIC, ids=lambda door: door.__name__)
def test_a_door_offers_exactly_these_names(door: ModuleType) -> None:
    assert set(door.__all__) == PUBLIC[door]
    assert len(door.__all__) == len(PUBLIC[door]), "a name stands twice in __all__"


@pytest.mark.parametrize("door", [skip, balance, distributed, schedule], ids=lambda door: door.__name__)
def test_a_door_holds_imports_and_nothing_else(door: ModuleType) -> None:
    docstring, *rest, listing = ast.parse(Path(str(door.__file__)).read_text(encoding="utf-8")).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in rest)
    assert isinstance(listing, ast.Assign) and ast.unparse(listing.targets[0]) == "__all__"


def test_the_front_door_imports_what_it_says_when_it_is_asked() -> None:
    body = ast.parse(Path(str(splitpipe.__file__)).read_text(encoding="utf-8")).body
    said = {alias.name: node.module for branch in body if isinstance(branch, ast.If)
            for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert said == {name: f"splitpipe.{owner}" for name, owner in splitpipe._OWNERS.items()}
    assert set(said) == set(splitpipe.__all__)
    for name, owner in said.items():
        assert getattr(splitpipe, name) is getattr(importlib.import_module(str(owner)), name)


@pytest.mark.parametrize(("door", "name"), NAMES, ids=lambda part: getattr(part, "__name__", part))
def test_a_public_name_is_explained_by_an_example(door: ModuleType, name: str) -> None:
    doc = vars(getattr(door, name)).get("__doc__") or getattr(door, name).__doc__ or ""
    assert doctest.DocTestParser().get_examples(doc), "its docstring has no line that starts with >>>"


@pytest.mark.draws
@pytest.mark.thorough
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str, no_accelerator: None) -> None:
    known = {name: getattr(door, name) for door in PUBLIC for name in door.__all__}
    failed, _ = doctest.testmod(
        importlib.import_module(name),
        extraglobs={**known, "torch": torch, "nn": torch.nn},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert failed == 0, "the report above, in captured stdout, shows the lines"


IMPORT_ALONE = """
import signal, sys, threading, warnings
import torch

def state():
    return {
        "threads": threading.enumerate(),
        "compiler loaded": "torch._dynamo" in sys.modules,
        "random state": torch.get_rng_state().tolist(),
        "number of threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype and device": (torch.get_default_dtype(), torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "global module hooks": torch.nn.modules.module._has_any_global_hook(),
        "warning filters": list(warnings.filters),
        "hooks": (sys.excepthook, threading.excepthook),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
    }

before = state()
import splitpipe.skip, splitpipe.balance, splitpipe.schedule
from splitpipe import *
after = state()
changed = [name for name in before if before[name] != after[name]]
sys.exit(f"changed by the import: {changed}" if changed else 0)
"""


@pytest.mark.thorough
def test_importing_starts_no_thread_and_leaves_torch_alone() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT_ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
