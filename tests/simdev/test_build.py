"""The library of the simulated accelerator: what is asked for it, and when it is built."""
from __future__ import annotations

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
    assert list(first.parent.iterdir()) == [first]


def test_another_torch_gets_a_library_of_its_own(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library()
    monkeypatch.setattr(build.torch, "__version__", "0.0")
    assert build.library() != first


def test_what_the_compiler_says_is_told(compiler: Path) -> None:
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "no such header" >&2; exit 1\n')
    with pytest.raises(RuntimeError, match="no such header"):
        build.library()
