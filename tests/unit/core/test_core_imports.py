from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import controller.core

ALONE = """
import importlib, sys
for name in sys.argv[1:]:
    for loaded in [one for one in sys.modules if one.startswith("controller")]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""


def test_every_part_of_the_core_can_be_imported_first() -> None:
    parts = sorted(path.stem for path in Path(controller.core.__file__).parent.glob("*.py") if path.stem != "__init__")
    names = [f"controller.core.{part}" for part in parts]
    done = subprocess.run([sys.executable, "-c", ALONE, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
