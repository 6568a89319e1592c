"""What a user installs and may import, and nothing else; each of it explained by an example that runs."""
from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
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
    failed, _ = doctest.testmod(importlib.import_module(name), extraglobs={**known, "torch": torch, "nn": torch.nn},
                                optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
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


ROOT = Path(__file__).parents[2]
BUILD = "from setuptools.build_meta import build_editable; build_editable('built')"


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """What ``pip install -e`` puts beside other packages; of a copy, since a build writes into its folder."""
    pytest.importorskip("setuptools")
    checkout = tmp_path_factory.mktemp("around") / "splitpipe"
    (checkout / "splitpipe").mkdir(parents=True)
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE", "splitpipe/__init__.py"):
        shutil.copy(ROOT / name, checkout / name)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(checkout.glob("built/*.whl"))) as built:
        yield built


def test_what_is_installed_has_the_version_and_the_description_of_the_package(editable: zipfile.ZipFile) -> None:
    metadata = editable.read(next(name for name in editable.namelist() if name.endswith("/METADATA"))).decode()
    described = (splitpipe.__doc__ or "").rstrip(".")
    assert f"\nVersion: {splitpipe.__version__}\n" in metadata and f"\nSummary: {described}\n" in metadata


def test_a_checkout_is_found_from_the_folder_that_holds_it(editable: zipfile.ZipFile, tmp_path: Path) -> None:
    editable.extractall(tmp_path)
    around = Path(str(editable.filename)).parents[2]
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import splitpipe; print(splitpipe.__version__)"
    # -S: what is installed for this interpreter stays out, which may be this package.
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=around, capture_output=True, text=True, env={})
    assert done.stdout == f"{splitpipe.__version__}\n", done.stderr
