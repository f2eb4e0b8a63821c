"""Modules that standbys import in advance, because ranks of their node have imported them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from everstep_trainer.launch.job_cache import (
    MAX_FILE_BYTES,
    MAX_MODULES,
    ImportRecorder,
    RecordedImportLoader,
    is_preloaded_after_import,
    read_imports,
)

MODULES = ("wave", "xml.dom.minidom")
"""Of the standard library, and imported by nothing here."""


@pytest.fixture(autouse=True)
def unimported(monkeypatch: pytest.MonkeyPatch) -> None:
    """MODULES are not imported when a test begins, and are as before when it ends."""
    for name in (*MODULES, "xml.dom"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def never() -> bool:
    return False


def test_standby_imports_modules_noted_by_a_rank(tmp_path: Path) -> None:
    noted = ImportRecorder(tmp_path, 3)
    for name in MODULES:
        importlib.import_module(name)
    noted.record()
    for name in MODULES:
        del sys.modules[name]
    RecordedImportLoader(tmp_path, never).import_new()
    assert set(MODULES) <= sys.modules.keys()


def test_note_leaves_out_modules_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reads_rank_on_import.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    noted = ImportRecorder(tmp_path, 0)
    importlib.import_module("wave")
    importlib.import_module("reads_rank_on_import")
    monkeypatch.delitem(sys.modules, "reads_rank_on_import")
    noted.record()
    assert "reads_rank_on_import" not in (tmp_path / "imports-0").read_text()


def test_follower_imports_only_followed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imports-0").write_text("planted\nplanted.torch\n\n../wave\nwave")
    RecordedImportLoader(tmp_path, never).import_new()
    assert "wave" in sys.modules
    assert "planted" not in sys.modules
    assert not is_preloaded_after_import("planted")


def test_follower_stops_when_the_standby_is_needed(tmp_path: Path) -> None:
    (tmp_path / "imports-0").write_text("\n".join(MODULES))
    RecordedImportLoader(tmp_path, lambda: "wave" in sys.modules).import_new()
    assert "wave" in sys.modules
    assert "xml.dom.minidom" not in sys.modules


def test_read_bounds_names_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "imports-0"
    file.write_text("wave\n" * (MAX_MODULES + 1))
    assert len(read_imports(file)) == MAX_MODULES
    file.write_text("wave\n" * MAX_FILE_BYTES)
    assert read_imports(file) == []
    file.write_bytes(b"\xff\xfe")
    assert read_imports(file) == []
