"""Compiles everstep/native/copy_hash.c while a wheel is built, or the project is installed in place.

Where that fails the package is built without it, and works all the same, slower: EVERSTEP_NATIVE=require makes it an
error, EVERSTEP_NATIVE=0 leaves it out.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


class CopyHashHook(BuildHookInterface):
    """Hatchling finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """``version``: "standard" for a wheel, "editable" for an installation in place."""
        wanted = os.environ.get("EVERSTEP_NATIVE", "")
        if self.target_name != "wheel" or wanted == "0":
            return
        folder = Path(self.root, "everstep", "native")
        why = compiled(folder / "copy_hash.c", folder / "copy_hash.so")
        if why:
            if wanted == "require":
                raise RuntimeError(why)
            self.app.display_warning(f"without everstep/native/copy_hash.so, so checkpoints are slower: {why}")
            return
        build_data["artifacts"].append("everstep/native/copy_hash.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compiled(source: Path, library: Path) -> str:
    """Why it did not come about; empty where it did."""
    library.unlink(missing_ok=True)
    if platform.machine() != "x86_64":
        return f"it is for x86-64, and this is {platform.machine()}"
    compiler, made = shlex.split(os.environ.get("CC", "cc")), library.with_suffix(".made")
    try:
        done = subprocess.run([*compiler, *FLAGS, "-o", str(made), str(source)], capture_output=True, text=True)
    except OSError as error:
        return f"no C compiler: {error}"
    if done.returncode:
        return done.stderr or f"{compiler[0]} ended with {done.returncode}"
    made.replace(library)  # whoever loads it finds it whole
    return ""
