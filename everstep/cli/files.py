"""``everstep files``: list and copy the files for deployment that come with Everstep, such as dashboards and units."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import everstep
from everstep.cli.context import Json, reporting_errors, show
from everstep.errors import ConfigurationError

PACKAGE = Path(everstep.__file__).parent
SHIPPED = {
    "dashboards": ("dashboards/grafana", "Grafana dashboards"),
    "alerts": ("dashboards/prometheus", "Prometheus rules and alerts, and an example of Alertmanager's routes"),
    "prometheus": ("deploy/prometheus", "Prometheus configuration that scrapes controllers and agents"),
    "slurm": ("deploy/slurm", "batch scripts that train in a Slurm allocation, and health checks of nodes"),
    "systemd": ("deploy/systemd", "systemd units of the controller and the agent"),
    "helm": ("deploy/helm/everstep", "Helm chart of controllers and agents"),
    "kubernetes": ("deploy/kubernetes/examples", "trainers on Kubernetes: a Pod on one node, a JobSet on several"),
}
"""By the name on the command line: a folder of the repository, and what it holds. ``hatch_build.py`` puts the same
folders into wheels, under ``everstep/files``."""


class FileGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of files.

    Attributes:
        name: The group's name on the command line.
        holds: What the files are.
        folder: Absolute path of the folder that holds them.
        files: Their paths, relative to ``folder``.
    """

    name: str
    holds: str
    folder: str
    files: tuple[str, ...]


def files(
    group: Annotated[str, typer.Argument(metavar="[GROUP]", help="A group from `everstep files`.")] = "",
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Copy the files to this folder.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files in DIR that differ.")] = False,
    as_json: Json = False,
) -> None:
    """List the files for deployment that come with Everstep, or print or copy those of a group."""
    with reporting_errors():
        if not group:
            if to is not None:
                raise ConfigurationError("--to needs a group: everstep files dashboards --to DIR")
            found = [shipped(name) for name in SHIPPED]
            show(found, as_json, _table(found))
            return
        chosen = shipped(group)
        paths = [Path(chosen.folder, name) for name in chosen.files]
        if to is not None:
            paths = copy_files(chosen, to, force)
        show(chosen, as_json, Text("\n".join(map(str, paths))))


def shipped(name: str) -> FileGroup:
    """Return a group of files: of the wheel, or of the repository that the package is imported from.

    Raises:
        ConfigurationError: No group has this name, or the files are in neither place.
    """
    if name not in SHIPPED:
        raise ConfigurationError(f"no group of files is called {name!r}; the groups are {', '.join(SHIPPED)}")
    path, holds = SHIPPED[name]
    for root in (PACKAGE / "files", PACKAGE.parent):
        if (root / path).is_dir():
            folder = root / path
            names = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
            wanted = tuple(each for each in names if "__pycache__" not in each)
            return FileGroup(name=name, holds=holds, folder=str(folder), files=wanted)
    raise ConfigurationError(f"{PACKAGE} was installed without {path}; install a wheel of Everstep")


def copy_files(group: FileGroup, target: Path, force: bool) -> list[Path]:
    """Copy a group of files, all or nothing, and return their new paths.

    Args:
        group: The files.
        target: The folder to copy to; made if it does not exist.
        force: Whether to overwrite files whose contents differ.

    Raises:
        ConfigurationError: A file exists, differs, and ``force`` is false.
    """
    moves = {target / name: Path(group.folder, name) for name in group.files}
    differing = [new for new, old in moves.items() if new.exists() and new.read_bytes() != old.read_bytes()]
    if differing and not force:
        raise ConfigurationError(f"{differing[0]} exists and differs, so nothing was copied; --force overwrites it")
    for new, old in moves.items():
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(old, new)
    return list(moves)


def _table(found: list[FileGroup]) -> RenderableType:
    table = Table("group", "files", "what they are", box=None, pad_edge=False)
    for group in found:
        table.add_row(group.name, str(len(group.files)), group.holds)
    return table
