"""The newest run of a job, and of no other job, that a launcher finds at ``--spill-to``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.errors import ConfigurationError, Unavailable
from everstep.ids import Version
from everstep.layout.stored_checkpoints import METADATA_FILE, StoredRun, find_stored_run, folder_name


def store(root: Path, folder: str, *versions: Version, whole: bool = True) -> None:
    """Make checkpoints in this order of time."""
    for number, version in enumerate(versions):
        path = root / folder / folder_name(version)
        path.mkdir(parents=True)
        if whole:
            (path / METADATA_FILE).touch()
            os.utime(path / METADATA_FILE, (1000 + number, 1000 + number))


def test_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert find_stored_run(str(tmp_path / "none"), "llama", fresh=False) == StoredRun("llama")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_newest_whole_checkpoints_are_listed_first(tmp_path: Path, scheme: str) -> None:
    store(tmp_path, "llama", Version(3, 900), Version(4, 500))  # written last, after a return to an earlier step
    store(tmp_path, "llama", Version(7, 600), whole=False)
    (tmp_path / "llama" / "notes").mkdir()
    found = find_stored_run(f"{scheme}{tmp_path}", "llama", fresh=False)
    assert [version for version, _, _ in found.checkpoints] == [Version(4, 500), Version(3, 900)]
    assert found.checkpoints[0][1] == f"{scheme}{tmp_path}/llama/step-00000500-g4"
    assert found.generation == 7


def test_fresh_run_gets_the_next_folder_of_its_job(tmp_path: Path) -> None:
    assert find_stored_run(str(tmp_path), "llama", fresh=True) == StoredRun("llama")
    store(tmp_path, "llama", Version(1, 10))
    store(tmp_path, "llama.2", Version(1, 10))  # another job
    assert find_stored_run(str(tmp_path), "llama", fresh=True) == StoredRun("llama~2")
    store(tmp_path, "llama~2", Version(1, 20))
    store(tmp_path, "llama~x", Version(1, 30))
    assert find_stored_run(str(tmp_path), "llama", fresh=True) == StoredRun("llama~3")


def test_newest_run_is_continued(tmp_path: Path) -> None:
    store(tmp_path, "llama", Version(9, 10))
    store(tmp_path, "llama~10", Version(1, 20))
    store(tmp_path, "llama~9", Version(1, 30))
    found = find_stored_run(str(tmp_path), "llama", fresh=False)
    assert (found.folder, found.generation) == ("llama~10", 1)


def test_storage_that_cannot_be_listed_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="Nothing was started"):
        find_stored_run(str(tmp_path / "file"), "llama", fresh=False)


def test_url_of_an_unknown_kind_is_refused_with_advice() -> None:
    with pytest.raises(ConfigurationError, match="install fsspec"):
        find_stored_run("unheard-of://bucket", "llama", fresh=False)
