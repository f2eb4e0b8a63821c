"""Every program prints its release, however it is started, and without a running service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from everstep import __version__

pytestmark = pytest.mark.slow  # starts processes

SCRIPTS = ("everstep", "everstep-agent", "everstep-controller", "everstep-launch")


@pytest.mark.parametrize("name", SCRIPTS)
def test_program_prints_its_version(name: str) -> None:
    script = Path(sys.executable).with_name(name)
    if not script.exists():
        pytest.skip("the package is not installed beside this interpreter")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == __version__
