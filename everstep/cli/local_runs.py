"""Find the private controllers of runs that this user has started with everstep-launch on this machine.

The launcher keeps the address and an operator's token of its private controller in a directory of its own, below
``$XDG_STATE_HOME/everstep``. Only files of the calling user, in directories that are closed to everybody else, are
believed, and only a controller that listens on loopback is spoken to.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from everstep.errors import ConfigurationError
from everstep.ids import check_name, split_address

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_BYTES = 64 << 10
"""Of a file in a run directory; more is none of ours."""


class LocalRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run with a private controller: its job, where that listens, and the file with a token for it."""

    job: str
    url: str
    token_file: str
    directory: Path


def state_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory in which everstep-launch makes run directories, where --state-dir names no other."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "everstep"


def local_runs(folder: Path) -> list[LocalRun]:
    """Return the runs whose private controller is alive, by the names of their jobs."""
    found = (_run_in(directory) for directory in folder.glob("run-*"))
    return sorted((run for run in found if run is not None), key=lambda run: (run.job, run.directory))


def choose(folder: Path, name: str) -> LocalRun | None:
    """Return the run to speak to; None where there is none and none was named.

    Args:
        folder: where run directories are.
        name: a job or a run directory, as a person named it; empty takes the only one there is.

    Raises:
        ConfigurationError: there are several, or none of that name. The message lists those that there are.
    """
    runs = local_runs(folder)
    fitting = [run for run in runs if name in ("", run.job, run.directory.name)]
    if len(fitting) == 1:
        return fitting[0]
    listed = "".join(f"\n  {run.job}  ({run.directory.name}, {run.url})" for run in runs)
    if len(fitting) > 1:
        raise ConfigurationError(
            f"{len(fitting)} runs of everstep-launch fit on this machine: choose one with --run NAME{listed}"
        )
    if name:
        there = f"; there are:{listed}" if runs else ""
        raise ConfigurationError(f"no run {name} of this user is on this machine, by what is in {folder}{there}")
    return None


def _run_in(directory: Path) -> LocalRun | None:
    """The run of a directory; None where anything about it is not as a launcher of this user leaves it."""
    try:
        about = directory.lstat()
        if not stat.S_ISDIR(about.st_mode) or not _is_private(about):
            return None
        ready = json.loads(_read(directory / "controller.json"))
        job = check_name(_read(directory / "job"), "job")
        _read(directory / "operator.token")
        pid, address = int(ready["pid"]), str(ready["address"])
        if split_address(address)[0] not in LOOPBACK or not _is_alive(pid, directory):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return LocalRun(job=job, url=f"http://{address}", token_file=str(directory / "operator.token"), directory=directory)


def _is_private(about: os.stat_result) -> bool:
    return about.st_uid == os.geteuid() and not about.st_mode & 0o077


def _read(path: Path) -> str:
    """The text of a plain file of this user, which nobody else can reach. Raises OSError or ValueError for others."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            raise ValueError(f"{path} is not a file of this user")
        return file.read(MOST_BYTES).decode()


def _is_alive(pid: int, directory: Path) -> bool:
    """Whether the controller that was started over the directory runs; its number may be another process's by now."""
    process = Path("/proc", str(pid))
    return process.stat().st_uid == os.geteuid() and os.fsencode(directory) in (process / "cmdline").read_bytes()
