"""A folder on this node for what the processes of one job make and the next ones need again: compiled code, imports.

Ranks of a node share it, replacements find it, and so does the next launcher of the same job. Without it torch keeps
compiled code in a folder of the system's temporary directory whose name anybody can guess.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from trainer_hooks.launch.imports import CACHE

log = logging.getLogger(__name__)

USED = "used"
"""A file in each folder, touched when a launcher begins to use it."""
UNUSED_DAYS = 30
"""After so long without a launcher of its job a folder is removed by the next launcher of any job."""


def cache_environment(state_dir: Path, name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Make a job's folder, and return the variables by which ranks find it; empty where it cannot be made.

    Where ``environ`` sets torch's or Triton's variables already, these stay as they are.

    Args:
        state_dir: where launchers keep files; the folder is ``cache/NAME`` in it, for this user alone (mode 0700).
        name: the job's, or its script's where the job's name was drawn.
        environ: the launcher's environment.
    """
    folder = state_dir / "cache" / name
    try:
        for directory in (state_dir, folder.parent, folder):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_own(folder)
        (folder / USED).touch()
        _sweep(folder.parent, (folder / USED).stat().st_mtime)
    except OSError as error:
        log.warning("no folder for compiled code and imports, ranks go without: %s", error)
        return {}
    wanted = {
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    if "TORCHINDUCTOR_CACHE_DIR" not in environ:  # inductor's Triton cache is inside its own folder otherwise
        wanted["TRITON_CACHE_DIR"] = str(folder / "triton")
    return {CACHE: str(folder), **{name: value for name, value in wanted.items() if name not in environ}}


def _require_own(folder: Path) -> None:
    """Code is loaded from it. Raises PermissionError where somebody else could write there."""
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(f"{folder} belongs to or can be written by another user; remove it, or set --state-dir")


def _sweep(parent: Path, now: float) -> None:
    """Remove the folders that no launcher has used for long. A job that has run for longer compiles anew."""
    for used in parent.glob(f"*/{USED}"):
        if used.stat().st_mtime < now - UNUSED_DAYS * 86_400:
            shutil.rmtree(used.parent, ignore_errors=True)
