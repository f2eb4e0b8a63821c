"""Every program says its release, by each way to start it, and without anything that has to run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from everstep import __version__

pytestmark = pytest.mark.slow  # starts processes

SCRIPTS = ("everstep", "everstep-agent", "everstep-controller", "everstep-launch")
MODULES = ("everstep.cli.main", "everstep_agent.main", "everstep_controller.main", "everstep_trainer.launch")


@pytest.mark.parametrize("name", SCRIPTS)
def test_program_prints_its_version(name: str) -> None:
    script = Path(sys.executable).with_name(name)
    if not script.exists():
        pytest.skip("the package is not installed beside this interpreter")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == __version__


@pytest.mark.parametrize("name", MODULES)
def test_module_prints_its_version(name: str) -> None:
    command = [sys.executable, "-m", name, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == __version__
