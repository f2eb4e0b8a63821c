"""Retention: the stored checkpoints that are removed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.ids import Version
from everstep.layout.stored_checkpoints import METADATA_FILE, folder_name, parse_folder_name
from everstep_agent.spill.target import DirectoryTarget
from everstep_agent.spill.writer import SpilledCheckpoint, prune, select_removable

versions = st.builds(Version, st.integers(1, 5), st.integers(0, 20))
times = st.none() | st.integers(0, 100).map(float)
stores = st.dictionaries(versions, times).map(lambda d: [SpilledCheckpoint(v, at) for v, at in d.items()])


@pytest.mark.parametrize("name", ["step-1-g1", "step-00000001", "step-00000001-g01", "mine", "step-00000001-g1.old"])
def test_foreign_folder_has_no_version(name: str) -> None:
    assert parse_folder_name(name) is None


@given(stores, st.integers(0, 4), st.sets(versions, max_size=3))
def test_retention_keeps_newest_and_named_checkpoints(
    stored: list[SpilledCheckpoint], keep: int, named: set[Version]
) -> None:
    gone = select_removable(stored, keep, named)
    left = [s for s in stored if s.version not in gone]
    whole = sorted(((s.completed_at, s.version) for s in stored if s.completed_at is not None), reverse=True)
    kept = {version for _, version in whole[: max(keep, 1)]}
    assert not set(gone) & (kept | named)
    assert gone == sorted(set(gone))
    assert {s.version for s in left if s.completed_at is not None} <= kept | named
    for checkpoint in left:
        if checkpoint.completed_at is None and whole and checkpoint.version not in named:
            assert checkpoint.version.step > whole[0][1].step, "only what may still be written"


def test_unfinished_newer_checkpoint_stays() -> None:
    stored = [
        SpilledCheckpoint(Version(1, 10), 5.0),
        SpilledCheckpoint(Version(1, 20), None),
        SpilledCheckpoint(Version(1, 5), None),
    ]
    assert select_removable(stored, 1) == [Version(1, 5)]


def test_concurrent_pruning_by_two_vaults_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other vault removes each version first. This once looked like a failure of the storage."""
    for step in (1, 2, 3, 4):
        folder = tmp_path / folder_name(Version(1, step))
        (folder / ".everstep").mkdir(parents=True)
        for name in ("__0_0.distcp", "__1_0.distcp", ".everstep/0", METADATA_FILE):
            (folder / name).write_bytes(b"x")
        os.utime(folder / METADATA_FILE, (step, step))
    unlink, others = os.unlink, [Version(1, 1), Version(1, 2)]

    def and_the_other_was_quicker(*path: Any, **where: Any) -> None:
        if others and where:
            with monkeypatch.context() as undisturbed:
                undisturbed.setattr(os, "unlink", unlink)
                shutil.rmtree(tmp_path / folder_name(others.pop(0)))
        unlink(*path, **where)

    monkeypatch.setattr(os, "unlink", and_the_other_was_quicker)
    gone, left = prune(DirectoryTarget(tmp_path), 2, Version(1, 4))
    assert (gone, left) == ([Version(1, 1), Version(1, 2)], [Version(1, 3), Version(1, 4)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder_name(version) for version in left]


def test_failed_removal_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rmdir", read_only)
    with pytest.raises(OSError, match="Read-only"):
        DirectoryTarget(tmp_path).remove("folder")


@pytest.mark.promise("resumed-by-default")
def test_work_of_an_earlier_run_beyond_the_resumed_step_stays() -> None:
    """An earlier run reached step 300; this one resumed from step 200, because the newest checkpoint was damaged."""
    earlier = [SpilledCheckpoint(Version(2, step), float(step)) for step in (100, 200, 300)]
    ours = [SpilledCheckpoint(Version(3, step), 1000.0 + step) for step in (250, 350, 450)]
    unfinished = SpilledCheckpoint(Version(2, 320), None)
    removable = select_removable([*earlier, unfinished, *ours], 2, earlier=Version(2, 200))
    assert removable == [Version(2, 100), Version(2, 200), Version(3, 250)]
