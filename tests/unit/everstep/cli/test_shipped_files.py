"""``everstep files``: what it lists and copies, and that wheels hold the same files and no others."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from everstep.cli.files import SHIPPED, shipped
from everstep.cli.main import app
from hatch_build import FILES

ROOT = Path(__file__).parents[4]


def run(*arguments: str) -> int:
    """Run ``everstep files`` and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        app(["files", *arguments], prog_name="everstep")
    return int(ended.value.code or 0)


def test_files_lists_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    groups = {group["name"]: group for group in json.loads(capsys.readouterr().out)}
    assert groups.keys() == SHIPPED.keys()
    for group in groups.values():
        assert group["files"], group["name"]
        assert all(Path(group["folder"], name).is_file() for name in group["files"])


def test_files_copies_a_group_without_overwriting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "units"
    assert run("systemd", "--to", str(target)) == 0
    unit = target / "everstep-agent.service"
    shipped = unit.read_text()
    assert run("systemd", "--to", str(target)) == 0, "the same contents may be copied again"
    unit.write_text("mine")
    (target / "everstep-controller.service").unlink()
    assert run("systemd", "--to", str(target)) == 2
    assert "nothing was copied; --force overwrites it" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == [unit.name]
    assert unit.read_text() == "mine"
    assert run("systemd", "--to", str(target), "--force") == 0
    assert unit.read_text() == shipped


@pytest.mark.parametrize("arguments", [("wrong",), ("--to", "there")])
def test_files_refuses_an_unknown_or_missing_group(arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 2


@pytest.mark.slow
def test_wheel_holds_every_shipped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_NATIVE", "0")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("everstep/files/")}
    assert held == {f"everstep/files/{SHIPPED[name][0]}/{path}" for name in SHIPPED for path in shipped(name).files}
    assert sorted(FILES) == sorted(folder for folder, _ in SHIPPED.values())
