"""The bundle for make gpu: its packages, its size, and an environment that sees installed packages."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from bench import gpu_bundle
from bench.gpu_bundle import absent, install


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


@pytest.mark.slow
def test_environment_sees_bundled_and_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel_of(tmp_path / "bundle", "packed_for_gpus")
    monkeypatch.setattr(gpu_bundle, "IMPORTED", ("torch", "msgspec", "packed_for_gpus"))
    assert install(tmp_path / "bundle", tmp_path / "venv") == 0
    python = tmp_path / "venv" / "bin" / "python"
    assert absent(python, ("bench.gpu", "trainer_hooks", "no_such_module")) == ["no_such_module"]
    assert absent(Path(sys.executable), ("packed_for_gpus",)) == ["packed_for_gpus"]
