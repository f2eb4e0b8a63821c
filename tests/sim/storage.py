"""Storage that all machines reach: folders of checkpoints, whole or not, on good and on bad days."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from everstep_agent.spill.writer import (
    MIN_KEPT_CHECKPOINTS,
    SpilledCheckpoint,
    folder_name,
    parse_folder_name,
    select_removable,
)

from everstep.errors import ConfigurationError, Unavailable
from everstep.ids import Version
from tests.sim.training_state import TrainingState

HIDDEN_SHARE = 0.5
"""Of looks that do not see all that is there, while listings are late."""


@dataclass
class _Folder:
    """A version's. ``files``: what each rank's file holds. ``whole_at``: when ``.metadata`` was written."""

    files: dict[int, TrainingState] = field(default_factory=dict)
    whole_at: float | None = None


class Storage:
    """One for all. ``away``: nobody is answered; ``refuses``: everybody is told no; ``slow_s``: how much longer a write
    takes; ``lists_late``: what was written is not always seen at once."""

    def __init__(self, now: Callable[[], float], rng: random.Random) -> None:
        self.away = self.refuses = self.lists_late = False
        self.slow_s = 0.0
        self._now = now
        self._rng = rng
        self._roots: dict[str, dict[str, _Folder]] = {}

    def mend(self) -> None:
        self.away = self.refuses = self.lists_late = False
        self.slow_s = 0.0

    def _check(self) -> None:
        if self.away:
            raise Unavailable("the storage does not answer")
        if self.refuses:
            raise ConfigurationError("the storage refuses: access denied")

    def write(self, root: str, version: Version, files: Mapping[int, TrainingState]) -> None:
        """Some ranks' files; what is there already is written over with the same. Raises Unavailable,
        ConfigurationError."""
        self._check()
        folder = self._roots.setdefault(root, {}).setdefault(folder_name(version), _Folder())
        folder.files.update(files)

    def complete(self, root: str, version: Version, ranks: Collection[int]) -> bool:
        """Writes ``.metadata`` where every rank's file is seen; whether it was."""
        self._check()
        folder = self._roots[root][folder_name(version)]
        if not set(ranks) <= set(folder.files) or (self.lists_late and self._rng.random() < HIDDEN_SHARE):
            return False
        folder.whole_at = folder.whole_at or self._now()
        return True

    def prune(self, root: str, keep: int, named: Version) -> tuple[str, ...]:
        """Removes what the real retention names; the names of the folders."""
        found = self._roots[root]
        stored = [
            SpilledCheckpoint(version, folder.whole_at)
            for name, folder in found.items()
            if (version := parse_folder_name(name)) is not None
        ]
        gone = (
            tuple(
                folder_name(version) for version in select_removable(stored, max(keep, MIN_KEPT_CHECKPOINTS), [named])
            )
            if keep
            else ()
        )
        for name in gone:
            del found[name]
        return gone

    def whole(self, root: str) -> dict[str, Version]:
        """The checkpoints that can be loaded, by their folders' URLs."""
        found = {
            name: parse_folder_name(name) for name, f in self._roots.get(root, {}).items() if f.whole_at is not None
        }
        return {f"{root}/{name}": version for name, version in found.items() if version is not None}

    def load(self, url: str) -> list[TrainingState] | None:
        """What the ranks wrote of a whole checkpoint; None where there is none. Raises as ``write``."""
        self._check()
        root, _, name = url.rpartition("/")
        folder = self._roots.get(root, {}).get(name)
        if folder is None or folder.whole_at is None:
            return None
        return [folder.files[rank] for rank in sorted(folder.files)]
