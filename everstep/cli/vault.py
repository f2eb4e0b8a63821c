"""``everstep vault``: show the checkpoint memory of this machine, and free unused memory."""

from __future__ import annotations

import os
import select
import shutil
import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from everstep.cli import tables
from everstep.cli.context import Json, console, reporting_errors, show
from everstep.cli.tables import age, size
from everstep.command_line import make_app
from everstep.errors import ConfigurationError, Unavailable
from everstep.layout.vault_status import is_locked, read_status
from everstep.system_clock import SYSTEM_CLOCK

app = make_app("List the checkpoint memory of this machine, and free unused memory.")

STOP_TIMEOUT_S = 30.0
Directory = Annotated[
    Path | None, typer.Option("--dir", help="Directory of all vaults: the parent of an agent's --segment-dir.")
]


class VaultMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One directory of slots. Times are as in ``VaultStatusFile``."""

    name: str
    jobs: tuple[str, ...]
    bytes: int
    pid: int  # the vault; 0 if none lives
    idle_since: float | None
    ends_at: float | None


@app.command("list")
def list_(directory: Directory = None, as_json: Json = False) -> None:
    """List the memory of all vaults of this user, and what stopped vaults left."""
    found = [_memory(path) for path in _vault_directories(directory)]
    view = tables.table("name", "jobs", "memory", "vault", right=("memory",))
    for vault in found:
        view.add_row(vault.name, ", ".join(vault.jobs) or "-", size(vault.bytes), _state(vault))
    show(found, as_json, view)


@app.command()
def drop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `everstep vault list`.")],
    directory: Directory = None,
) -> None:
    """Free the memory of a vault without clients, or of a stopped vault. Its checkpoints are lost."""
    with reporting_errors():
        path = next((path for path in _vault_directories(directory) if path.name == name), None)
        if path is None:
            raise ConfigurationError(f"there is no vault {name!r} in {_base(directory)}: see `everstep vault list`")
        before = _memory(path)
        _stop_vault(path, before)
        shutil.rmtree(path, ignore_errors=True)
        console.print(f"{name}: {size(before.bytes)} freed")


def _base(directory: Path | None) -> Path:
    return directory or Path(f"/dev/shm/everstep-{os.getuid()}")  # noqa: S108


def _vault_directories(directory: Path | None) -> list[Path]:
    base = _base(directory)
    found = base.iterdir() if base.is_dir() else ()  # unlike glob, it raises if the directory cannot be read
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def _memory(path: Path) -> VaultMemory:
    note = read_status(path) if is_locked(path) else None
    files = [file for file in path.rglob("*") if file.is_file()]
    return VaultMemory(
        name=path.name,
        jobs=tuple(sorted(job.name for job in path.iterdir() if job.is_dir())),
        bytes=sum(file.stat().st_size for file in files),
        pid=note.pid if note else 0,
        idle_since=note.idle_since if note else None,
        ends_at=note.ends_at if note else None,
    )


def _state(one: VaultMemory) -> str:
    if not one.pid:
        return "stopped"
    if one.idle_since is None:
        return f"pid {one.pid}, in use"
    now = SYSTEM_CLOCK.wall()
    ends = "" if one.ends_at is None else f", ends in {age(one.ends_at - now)}"
    return f"pid {one.pid}, no client for {age(now - one.idle_since)}{ends}"


def _stop_vault(path: Path, memory: VaultMemory) -> None:
    """End the vault, if one lives. Raises ConfigurationError if it is in use, Unavailable if it does not end."""
    if not is_locked(path):
        return
    if not memory.pid or memory.idle_since is None:
        raise ConfigurationError(f"{path.name} is in use: stop its job's launcher or the node's agent first")
    with os.fdopen(os.pidfd_open(memory.pid)) as vault:
        signal.pidfd_send_signal(vault.fileno(), signal.SIGTERM)
        if not select.select([vault], [], [], STOP_TIMEOUT_S)[0]:
            raise Unavailable(f"the vault (pid {memory.pid}) did not end within {STOP_TIMEOUT_S:g} s of SIGTERM")
