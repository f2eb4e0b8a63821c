from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import everstep_controller.core

ALONE = """
import importlib, sys
for name in sys.argv[1:]:
    for loaded in [module for module in sys.modules if module.startswith("everstep_controller")]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""


def test_every_core_module_can_be_imported_first() -> None:
    core = Path(everstep_controller.core.__file__).parent
    parts = sorted(path.relative_to(core).with_suffix("").parts for path in core.rglob("*.py"))
    names = [".".join(("everstep_controller.core", *part)) for part in parts if part[-1] != "__init__"]
    done = subprocess.run([sys.executable, "-c", ALONE, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
