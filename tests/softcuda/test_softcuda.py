"""The command around the fake runtime: another torch, or half of one, is never taken."""
from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.softcuda import wheel
from tests.softcuda.kept import Missing, whole
from tests.softcuda.parts import WITHOUT

NAME = f"torch-2.13.0-{wheel.TAG}-{wheel.TAG}-manylinux_2_28_x86_64.whl"
CUDA = ("torch/__init__.py", "torch/lib/libtorch_cuda.so", "torch-2.13.0.dist-info/METADATA")


def archive(folder: Path, *files: str, name: str = NAME) -> Path:
    """A wheel with these files."""
    with zipfile.ZipFile(folder / name, "w") as made:
        for file in files:
            made.writestr(file, "Requires-Dist: sympy\nRequires-Dist: triton==3; platform_system == \"Linux\"\n")
    return folder / name


def test_tests_that_are_left_out_are_there() -> None:
    for name in WITHOUT:
        file, test = name.split("::")
        assert f"def {test.split('[')[0]}(" in (wheel.ROOT / file).read_text(encoding="utf-8")


def test_a_folder_is_filled_once_and_again_if_that_was_interrupted(tmp_path: Path) -> None:
    def breaks(room: Path) -> None:
        (room / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        whole(tmp_path / "it", breaks, "fills")
    (tmp_path / "it-killed.part").mkdir()  # Of a process that had no time to clean up.
    for fill in (lambda room: (room / "whole").touch(), breaks):
        assert whole(tmp_path / "it", fill, "fills") == tmp_path / "it"
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["it", "it.lock", "whole"]


def test_a_wheel_is_unpacked_without_libraries_of_nvidias_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "fetch", lambda version, room: archive(room, *CUDA))
    found = wheel.unpacked("2.13.0", tmp_path)
    assert (found / "lib/libtorch_cuda.so").exists() and not [*tmp_path.rglob("*.whl")]
    assert (found.parent / "torch-2.13.0.dist-info/METADATA").read_text() == "Requires-Dist: sympy\n"


@pytest.mark.parametrize(
    ("name", "files", "size", "text"),
    [(NAME, CUDA[:1], None, "has no libtorch_cuda.so: expected torch's CUDA build"),
     (NAME.replace("2.13.0", "2.12.0"), CUDA, None, r"found torch-2\.12\.0.*: expected a wheel of torch 2\.13\.0"),
     (NAME, CUDA, 50, "can't be unpacked.*Expected a whole wheel")],
    ids=["no CUDA", "another version", "half"],
)
def test_another_wheel_is_refused(
    tmp_path: Path, name: str, files: Sequence[str], size: int | None, text: str
) -> None:
    given = archive(tmp_path, *files, name=name)
    given.write_bytes(given.read_bytes()[:size])
    with pytest.raises(Missing, match=text):
        wheel.unpack(given, "2.13.0", tmp_path / "room")
