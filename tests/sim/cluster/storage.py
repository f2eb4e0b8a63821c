"""Simulate the storage that all machines share: complete and incomplete checkpoint folders, and storage faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from everstep.errors import ConfigurationError, Unavailable
from everstep.ids import Version
from everstep.layout.stored_checkpoints import folder_name, parse_folder_name
from everstep_agent.spill.writer import (
    MIN_KEPT_CHECKPOINTS,
    SpilledCheckpoint,
    select_removable,
)
from tests.sim.cluster.training_state import TrainingState

INCOMPLETE_LISTINGS_SHARE = 0.5
"""Share of listings that miss files while ``delays_listings`` is set."""


@dataclass
class _Folder:
    """A version's folder.

    ``files``: each rank's state. ``completed_at``: seconds at which ``.metadata`` was written, None before.
    """

    files: dict[int, TrainingState] = field(default_factory=dict)
    completed_at: float | None = None


class Storage:
    """The shared storage, with switches for its faults.

    Attributes:
        is_unavailable: Whether no call is answered.
        denies_access: Whether every call is refused.
        delays_listings: Whether listings may miss new files.
        extra_write_s: Seconds added to each write.
    """

    def __init__(self, now: Callable[[], float], rng: random.Random) -> None:
        self.is_unavailable = self.denies_access = self.delays_listings = False
        self.extra_write_s = 0.0
        self._now = now
        self._rng = rng
        self._roots: dict[str, dict[str, _Folder]] = {}

    def restore(self) -> None:
        """End all faults."""
        self.is_unavailable = self.denies_access = self.delays_listings = False
        self.extra_write_s = 0.0

    def _check(self) -> None:
        if self.is_unavailable:
            raise Unavailable("the storage does not answer")
        if self.denies_access:
            raise ConfigurationError("the storage refuses: access denied")

    def write(self, root: str, version: Version, files: Mapping[int, TrainingState]) -> None:
        """Write the files of some ranks, and replace existing ones.

        Raises:
            Unavailable: The storage does not answer.
            ConfigurationError: The storage denies access.
        """
        self._check()
        folder = self._roots.setdefault(root, {}).setdefault(folder_name(version), _Folder())
        folder.files.update(files)

    def mark_complete(self, root: str, version: Version, ranks: Collection[int]) -> bool:
        """Write ``.metadata`` if the listing shows every rank's file, and return whether it was written."""
        self._check()
        folder = self._roots[root][folder_name(version)]
        if not set(ranks) <= set(folder.files):
            return False
        if self.delays_listings and self._rng.random() < INCOMPLETE_LISTINGS_SHARE:
            return False
        folder.completed_at = folder.completed_at or self._now()
        return True

    def prune(self, root: str, keep: int, protected: Version) -> tuple[str, ...]:
        """Remove the folders that the product's retention selects, and return their names.

        Args:
            root: The URL of the job's folder.
            keep: The number of checkpoints to keep; 0 for all.
            protected: The version that must stay.
        """
        folders = self._roots[root]
        stored = [
            SpilledCheckpoint(version, folder.completed_at)
            for name, folder in folders.items()
            if (version := parse_folder_name(name)) is not None
        ]
        removable = select_removable(stored, max(keep, MIN_KEPT_CHECKPOINTS), [protected]) if keep else []
        removed = tuple(folder_name(version) for version in removable)
        for name in removed:
            del folders[name]
        return removed

    def complete_checkpoints(self, root: str) -> dict[str, Version]:
        """Return the checkpoints that can be loaded, by the URLs of their folders."""
        found = {
            name: parse_folder_name(name) for name, f in self._roots.get(root, {}).items() if f.completed_at is not None
        }
        return {f"{root}/{name}": version for name, version in found.items() if version is not None}

    def load(self, url: str) -> list[TrainingState] | None:
        """Return the ranks' states of a complete checkpoint, or None if there is none. Raises as ``write``."""
        self._check()
        root, _, name = url.rpartition("/")
        folder = self._roots.get(root, {}).get(name)
        if folder is None or folder.completed_at is None:
            return None
        return [folder.files[rank] for rank in sorted(folder.files)]
