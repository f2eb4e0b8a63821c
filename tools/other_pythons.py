#!/usr/bin/env python3
"""Run the fast tests that need no torch under other versions of Python.

``python tools/other_pythons.py 3.12 3.13`` makes a virtual environment for each version in ``out/pythons``, installs
this checkout there with everything pinned by ``constraints.txt`` but torch, and runs the tests. A version without an
interpreter on this machine is named in the last lines and left out; with ``--require`` it is a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SELECTION = "not slow and not nightly and not frameworks"
FOLDERS = ("tests/unit", "tests/contract", "tests/scenarios")
"""Not tests/model and tests/sim: they search for faults of logic, for as long as all other tests take."""
LEFT_OUT = ("tests/unit/docs", "tests/unit/trainer_hooks")
"""The first read documents, which are the same under each Python; the others need torch."""

MISSING = "not tested, since no interpreter was found on PATH or among pyenv's versions"


def main(arguments: list[str]) -> int:
    """Test each version and return the exit status: 0 if no test failed, and none of required versions is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="for example 3.12")
    parser.add_argument("--numprocesses", type=int, default=4, help="processes that share the tests")
    parser.add_argument("--require", action="store_true", help="fail if a version is missing")
    options = parser.parse_args(arguments)
    results = {version: test(version, options.numprocesses) for version in options.versions}
    for version, result in results.items():
        print(f"Python {version}: {result}", flush=True)
    return 1 if "failed" in results.values() or (options.require and MISSING in results.values()) else 0


def test(version: str, processes: int) -> str:
    """Run the tests under one version and return how they ended."""
    interpreter = find_interpreter(version)
    if interpreter is None:
        return MISSING
    python = install(interpreter, ROOT / "out" / "pythons" / version)
    pytest = [str(python), "-m", "pytest", "-q", "-m", SELECTION, *FOLDERS]
    pytest += ["--numprocesses", str(processes), "--dist", "loadfile"]
    pytest += [f"--ignore={folder}" for folder in LEFT_OUT]
    command = [str(python), "tools/rerun_failed.py", *pytest]
    return "passed" if subprocess.run(command, cwd=ROOT).returncode == 0 else "failed"


def find_interpreter(version: str) -> Path | None:
    """Find a Python of this version that starts.

    Args:
        version: Major and minor version, as in "3.12".
    """
    return next((path for path in candidates(version) if reports_version(path, version)), None)


def candidates(version: str) -> Iterator[Path]:
    """Yield where an interpreter may be: first on PATH, then pyenv's, the newest first."""
    if on_path := shutil.which(f"python{version}"):
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = pyenv.glob(f"versions/{version}.*/bin/python")
    yield from sorted(installed, key=lambda path: [int(number) for number in re.findall(r"\d+", path.parts[-3])])[::-1]


def reports_version(path: Path, version: str) -> bool:
    """Tell whether a program starts and is this version: a shim of pyenv fails if its version is not activated."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        ended = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0 and ended.stdout.strip() == version


def install(interpreter: Path, folder: Path) -> Path:
    """Make or update a virtual environment with this checkout and what its tests need, and return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", "--editable", ".[test]"]
    # The compiled library of an editable installation lies in the checkout, where `make setup` has put it.
    subprocess.run(pip, cwd=ROOT, check=True, env=os.environ | {"EVERSTEP_NATIVE": "0"})
    return python


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
