"""Logs and sockets of runs go to /tmp if the home directory cannot hold them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.cli.context import state_dir
from everstep.host.state_directory import preferred_state_directory, state_directory, why_unusable

FALLBACK = Path(f"/tmp/everstep-{os.geteuid()}/state")


@pytest.fixture
def home(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(short_path))
    return short_path


def test_state_directory_is_in_the_home(home: Path) -> None:
    assert state_directory({}) == home / ".local" / "state" / "everstep"


def test_long_home_falls_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = home / ("h" * 100)
    long.mkdir()
    monkeypatch.setenv("HOME", str(long))
    assert state_directory({}) == FALLBACK
    assert state_dir({}) == FALLBACK  # the commands look where the launcher writes
    assert "too long" in why_unusable(preferred_state_directory({}))


def test_unwritable_home_falls_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != home)  # root may write to any directory
    assert state_directory({}) == FALLBACK
    assert why_unusable(preferred_state_directory({})) == f"{home} cannot be written"
    assert state_directory({"XDG_STATE_HOME": str(home)}) == home / "everstep"


def test_home_that_is_no_directory_falls_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))  # as /dev/null is of some accounts
    assert state_directory({}) == FALLBACK
    assert why_unusable(preferred_state_directory({})) == f"{home / 'file'} cannot be written"
