"""Interpreters of other versions are found where they really start, and a missing one is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import other_pythons as tool

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``bin``, the whole PATH, and ``pyenv``."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def real(path: Path) -> Path:
    return program(path, f'exec {sys.executable} "$@"')


def test_interpreter_on_path_is_preferred(machine: Path) -> None:
    on_path = real(machine / "bin" / f"python{VERSION}")
    real(machine / "pyenv" / "versions" / f"{VERSION}.1" / "bin" / "python")
    assert tool.find_interpreter(VERSION) == on_path


def test_missing_version_is_a_failure_where_it_is_required(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["9.9"]) == 0
    assert capsys.readouterr().out.startswith("Python 9.9: not tested")
    assert tool.main(["--require", "9.9"]) == 1
