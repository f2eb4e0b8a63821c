"""The folder on a node in which a job's processes keep compiled code for later processes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from everstep_trainer.launch.job_cache import UNUSED_DAYS, cache_environment
from everstep_trainer.launch.processes import fork_server_environment
from tests.support.documents.command_lines import launch_settings


def test_cache_folder_is_private_to_the_user(tmp_path: Path) -> None:
    found = cache_environment(tmp_path / "state", "llama", {})
    folder = tmp_path / "state" / "cache" / "llama"
    assert found == {
        "EVERSTEP_CACHE": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("mine", "kept"),
    [
        ({"TORCHINDUCTOR_CACHE_DIR": "/scratch"}, {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}),
        ({"TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}, {}),
        ({"TRITON_CACHE_DIR": "/scratch"}, {}),
    ],
)
def test_cache_settings_of_the_user_stay(tmp_path: Path, mine: dict[str, str], kept: dict[str, str]) -> None:
    (tmp_path / "train.py").touch()
    options = launch_settings(["--state-dir", str(tmp_path), "--agent-socket", "/a", str(tmp_path / "train.py")], {})
    made = fork_server_environment(options, mine)
    assert {name: made[name] for name in mine} == mine
    assert kept.items() <= made.items()
    if "TORCHINDUCTOR_CACHE_DIR" in mine:
        assert "TRITON_CACHE_DIR" not in made, "torch keeps what Triton makes for it in its own folder"


@pytest.mark.parametrize(("mine", "value"), [({}, "0"), ({"TORCH_DIST_USE_NCCL2": "1"}, "1")])
def test_proved_nccl_backend_is_the_default(tmp_path: Path, mine: dict[str, str], value: str) -> None:
    (tmp_path / "train.py").touch()
    options = launch_settings(["--state-dir", str(tmp_path), "--agent-socket", "/a", str(tmp_path / "train.py")], {})
    assert fork_server_environment(options, mine)["TORCH_DIST_USE_NCCL2"] == value


def test_cache_folder_others_can_write_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache" / "llama"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert cache_environment(tmp_path, "llama", {}) == {}
    assert "is writable for another user" in caplog.text


def test_cache_folders_unused_for_long_are_removed(tmp_path: Path) -> None:
    for name, days in (("old", UNUSED_DAYS + 1), ("late", UNUSED_DAYS - 1)):
        cache_environment(tmp_path, name, {})
        used = tmp_path / "cache" / name / "used"
        at = used.stat().st_mtime - days * 86_400
        os.utime(used, (at, at))
    cache_environment(tmp_path, "new", {})
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["late", "new"]
