"""Compile everstep/native/copy_hash.c for a wheel or an installation in place, and add files for deployment to wheels.

If the compilation fails, the package is built without the library and copies more slowly. EVERSTEP_NATIVE=require makes
that an error; EVERSTEP_NATIVE=0 leaves the library out.
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

FILES = (
    "dashboards/grafana",
    "dashboards/prometheus",
    "deploy/helm/everstep",
    "deploy/kubernetes/examples",
    "deploy/prometheus",
    "deploy/slurm",
    "deploy/systemd",
)
"""Folders that wheels hold under everstep/files, for `everstep files`. Not all of deploy: deploy/secrets is private."""
FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


class WheelHook(BuildHookInterface):
    """Hatchling finds the hook by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """``version``: "standard" for a wheel, "editable" for an installation in place."""
        if self.target_name != "wheel":
            return
        if version == "standard":
            build_data["force_include"].update({path: f"everstep/files/{path}" for path in FILES})
        wanted = os.environ.get("EVERSTEP_NATIVE", "")
        if wanted == "0":
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
    made.replace(library)  # a process that loads it finds it whole
    return ""
