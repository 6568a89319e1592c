"""The package as it is installed: one version, and a checkout that is found from the folder around it."""
from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import splitpipe

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
