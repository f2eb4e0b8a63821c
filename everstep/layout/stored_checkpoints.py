"""Find the checkpoints that earlier runs of a job left on storage, without torch.

A job has the folder ``JOB`` under ``--spill-to``. A run that starts anew (``--fresh``) gets the next of ``JOB~2``,
``JOB~3``, and so on. No name of a job contains ``~``, so folders of different jobs never meet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from everstep.errors import ConfigurationError, Unavailable
from everstep.ids import Version
from everstep.layout.object_storage import filesystem_of, storage_errors

METADATA_FILE = ".metadata"
"""The file that torch reads first, and that is written last: a folder without it is no checkpoint."""
MAX_LISTED = 4
"""Number of checkpoints that are listed; if the newest is damaged, the one before it serves."""
_FOLDER = re.compile(r"step-(\d{8,19})-g(\d{1,10})")


def folder_name(version: Version) -> str:
    """Return the name of a version's folder; names sort by step."""
    return f"step-{version.step:08d}-g{version.generation}"


def parse_folder_name(folder: str) -> Version | None:
    """Return the version of a folder named by ``folder_name``; None for any other, which belongs to another program."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    version = Version(int(match[2]), int(match[1]))
    return version if folder_name(version) == folder else None


class StoredRun(msgspec.Struct, frozen=True):
    """The folder of a job's newest run, and what is in it."""

    folder: str
    """Name of the folder under ``--spill-to``."""
    checkpoints: tuple[tuple[Version, str, float], ...] = ()
    """Version, URL and time of writing (unix seconds) of the newest whole checkpoints, newest first."""
    generation: int = 0
    """The highest generation of any version there, whole or not."""


def find_stored_run(root: str, job: str, *, fresh: bool) -> StoredRun:
    """Return the job's newest run under ``root``, a path or URL; with ``fresh`` the next, empty folder.

    Raises:
        ConfigurationError: No package opens the URL.
        Unavailable: The storage cannot be listed, so its checkpoints are unknown.
    """
    try:
        storage = _open(root)
        runs = sorted(_run_number(name, job) for name in storage.list("") if _run_number(name, job))
        if fresh:
            return StoredRun(_run_folder(job, runs[-1] + 1 if runs else 1))
        folder = _run_folder(job, runs[-1] if runs else 1)
        versions = sorted(filter(None, map(parse_folder_name, storage.list(folder))), key=lambda one: one.step)
        highest = max((version.generation for version in versions), default=0)
        return StoredRun(folder, _newest(storage, root, folder, versions), highest)
    except storage_errors() as error:
        raise Unavailable(
            f"--spill-to: earlier checkpoints of job {job} cannot be looked for in {root}: {error}. Nothing was "
            "started, because it would begin anew: repair the storage, or give another --spill-to"
        ) from error


def _newest(
    storage: _Storage, root: str, folder: str, versions: Sequence[Version]
) -> tuple[tuple[Version, str, float], ...]:
    found = []
    for version in versions:
        written_at = storage.written_at(f"{folder}/{folder_name(version)}/{METADATA_FILE}")
        if written_at is not None:
            found.append((version, f"{root.rstrip('/')}/{folder}/{folder_name(version)}", written_at))
    found.sort(key=lambda one: one[2], reverse=True)
    return tuple(found[:MAX_LISTED])


def _run_folder(job: str, number: int) -> str:
    return job if number == 1 else f"{job}~{number}"


def _run_number(folder: str, job: str) -> int:
    """Return which run of the job a folder belongs to; 0 if it is another job's."""
    if folder == job:
        return 1
    name, _, number = folder.rpartition("~")
    return int(number) if name == job and number.isdecimal() and number[0] != "0" and number != "1" else 0


class _Storage:
    """A directory, or with a file system of fsspec a folder of it."""

    def __init__(self, root: str, filesystem: Any = None) -> None:
        self._root, self._filesystem = root.rstrip("/"), filesystem

    def list(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder; none if it does not exist."""
        path = f"{self._root}/{folder}".rstrip("/")
        with suppress(FileNotFoundError):
            if self._filesystem is None:
                return [entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
            self._filesystem.invalidate_cache()
            entries = self._filesystem.ls(path, detail=True)
            return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
        return []

    def written_at(self, name: str) -> float | None:
        """Return when a file was written; None if there is none."""
        path = f"{self._root}/{name}"
        with suppress(FileNotFoundError):
            if self._filesystem is None:
                return Path(path).stat().st_mtime
            return float(self._filesystem.modified(path).timestamp())
        return None


def _open(root: str) -> _Storage:
    if "://" not in root:
        return _Storage(root)
    try:
        filesystem, path = filesystem_of(root)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"--spill-to: earlier checkpoints cannot be looked for in {root}: {error}; install fsspec and its package "
            "for this storage, or obstore, beside the launcher"
        ) from error
    return _Storage(path, filesystem)
