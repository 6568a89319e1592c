"""The library of the simulated accelerator: what is asked for it, and when it is built."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.simdev import build


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NoCompiler, match="found no no-such-compiler: expected a .* Install g"):
        build.library()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One that writes its arguments down, and gives an empty file."""
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "$@" >> "$0.log"\nwhile [ "$1" != -o ]; do shift; '
                      'done\n: > "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return script


def test_it_is_built_once(compiler: Path) -> None:
    first, second = build.library(), build.library()
    assert first == second and first.exists()
    assert len(Path(f"{compiler}.log").read_text().splitlines()) == 1
    assert {file.name for file in first.parent.iterdir()} <= {first.name, "lock"}


def test_who_had_to_wait_finds_it_built(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def alone(folder: Path) -> Iterator[None]:
        with monkeypatch.context() as here:
            here.setattr(build, "_alone", real)
            build.library()
        yield

    real = build._alone
    monkeypatch.setattr(build, "_alone", alone)
    assert build.library().exists()
    assert len(Path(f"{compiler}.log").read_text().splitlines()) == 1


def test_one_at_a_time(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl", reason="needs locks of files, and this system has none that Python knows")
    with build._alone(tmp_path), (tmp_path / "lock").open("w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with build._alone(tmp_path):
        pass


def test_another_torch_gets_a_library_of_its_own(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library()
    monkeypatch.setattr(build.torch, "__version__", "0.0")
    assert build.library() != first


def test_what_the_compiler_says_is_told(compiler: Path) -> None:
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "no such header" >&2; exit 1\n')
    with pytest.raises(RuntimeError, match="no such header"):
        build.library()
