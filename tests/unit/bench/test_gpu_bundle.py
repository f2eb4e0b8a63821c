"""Packing and installing what make gpu needs: which packages, how large, and an environment that sees what is there."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench import gpu_bundle
from bench.gpu_bundle import MOST_BYTES, ROOT, absent, install, pack, report, wanted


def wheel_of(folder: Path, name: str) -> Path:
    """A wheel with one module of that name."""
    folder.mkdir(exist_ok=True)
    path, about = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "here = True\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    return path


def test_bundle_holds_pinned_packages_without_torch() -> None:
    names = {gpu_bundle._name(requirement) for requirement in wanted()}
    assert {"msgspec", "xxhash", "typer", "rich", "fastapi", "sqlalchemy", "nvidia-ml-py", "pytest"} <= names
    assert not names & {"torch", "numpy", "matplotlib"}
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert names <= pinned


@pytest.mark.parametrize(("nbytes", "status"), [(MOST_BYTES - 10, 0), (MOST_BYTES + 1, 1)])
def test_oversized_bundle_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nbytes: int, status: int
) -> None:
    (tmp_path / "small-1.0-py3-none-any.whl").write_bytes(b"12345")
    with (tmp_path / "large-1.0-py3-none-any.whl").open("wb") as file:
        file.truncate(nbytes)
    assert report(tmp_path) == status
    listed = capsys.readouterr().out
    assert listed.index("large-1.0") < listed.index("small-1.0") < listed.index("2 wheels")


def test_wheels_are_packed_for_the_gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones go, and those that are asked for are of its Python and platform, never sources to be built."""
    asked: list[list[str]] = []
    wheel_of(tmp_path, "old")
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command))
    assert pack(tmp_path) == 0
    assert list(tmp_path.glob("*.whl")) == []
    (command,) = asked
    assert "--only-binary=:all:" in command
    assert command[command.index("--python-version") + 1] == "3.12"
    assert command[-len(wanted()) :] == wanted()


@pytest.mark.slow
def test_environment_sees_bundled_and_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel_of(tmp_path / "bundle", "packed_for_gpus")
    monkeypatch.setattr(gpu_bundle, "IMPORTED", ("torch", "msgspec", "packed_for_gpus"))
    assert install(tmp_path / "bundle", tmp_path / "venv") == 0
    python = tmp_path / "venv" / "bin" / "python"
    assert absent(python, ("bench.gpu", "trainer_hooks", "no_such_module")) == ["no_such_module"]
    assert absent(Path(sys.executable), ("packed_for_gpus",)) == ["packed_for_gpus"]


def test_missing_packages_are_named_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_bundle, "IMPORTED", ("json", "no_such_module"))
    assert install(tmp_path / "bundle", tmp_path / "venv") == 1
    said = capsys.readouterr().out
    assert "no_such_module cannot be imported" in said
    assert "make gpu-bundle" in said
