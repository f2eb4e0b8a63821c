"""Keep a node's profile on disk, and take orders to accept the node's present state."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from everstep.errors import DECODE_ERRORS
from everstep_agent.lifecycle import write_atomically
from everstep_agent.node_profile.profile import PROFILE_VERSION, NodeProfile, SavedProfile

logger = logging.getLogger(__name__)

PROFILE_FILE = "profile.json"
ACCEPT_FILE = "profile.accept"
MAX_PROFILE_BYTES = 1 << 20

SAVE_EVERY_S = 60.0
"""Least seconds between two writes of a profile that changes."""
SAVE_PROGRESS_S = 3600.0
"""Seconds after which the profile is written without a change, to keep how long values have been steady."""


class _Version(msgspec.Struct):
    version: int = 0


def read_profile(folder: Path) -> SavedProfile:
    """Return the profile in the folder, or an empty one if there is none.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, or of a version that this agent does not know.
    """
    path = folder / PROFILE_FILE
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PROFILE_BYTES)
    except FileNotFoundError:
        return SavedProfile()
    try:
        version = msgspec.json.decode(content, type=_Version).version
        if version == PROFILE_VERSION:
            return msgspec.json.decode(content, type=SavedProfile)
    except DECODE_ERRORS as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    raise ValueError(f"{path} has version {version}, and this agent knows version {PROFILE_VERSION}")


def order_acceptance(folder: Path, subjects: list[str]) -> None:
    """Order the agent to accept the present state of some parts; none means all. Raises OSError."""
    write_atomically(folder / ACCEPT_FILE, subjects)


class ProfileStore:
    """The profile of a running agent, and its file. Without a folder nothing is stored."""

    def __init__(self, folder: Path | None, monotonic: float) -> None:
        self._folder = folder
        self._saved_at = monotonic
        place = "" if folder is None else f" --state-dir {folder}"
        self.profile = NodeProfile(self._load(), f"everstep-agent profile accept{place}")

    def _load(self) -> SavedProfile:
        if self._folder is None:
            return SavedProfile()
        try:
            return read_profile(self._folder)
        except (OSError, ValueError) as error:
            logger.warning("the node profile cannot be used, and is learned anew: %s", error)
            return SavedProfile()

    def take_orders(self) -> None:
        """Carry out an order to accept the node's present state, once a poll was compared."""
        if self._folder is None or not self.profile.has_compared:
            return
        path = self._folder / ACCEPT_FILE
        try:
            with path.open("rb") as file:
                subjects = msgspec.json.decode(file.read(MAX_PROFILE_BYTES), type=list[str])
            path.unlink()
        except FileNotFoundError:
            return
        except (OSError, *DECODE_ERRORS) as error:
            logger.warning("%s cannot be used: %s", path, error)
            path.unlink(missing_ok=True)
            return
        known = self.profile.accept(subjects)
        unknown = [subject for subject in subjects if subject not in known]
        logger.info("the present state is accepted of %s", ", ".join(known) or "nothing")
        if unknown:
            logger.warning("the node profile knows no %s", ", ".join(unknown))

    def save(self, monotonic: float, *, is_final: bool = False) -> None:
        """Write the profile if it is time to. A failure is logged, since sensing continues without the file."""
        elapsed_s = monotonic - self._saved_at
        is_due = self.profile.has_changed and (is_final or elapsed_s >= SAVE_EVERY_S)
        if self._folder is None or not (is_due or is_final or elapsed_s >= SAVE_PROGRESS_S):
            return
        self._saved_at, self.profile.has_changed = monotonic, False
        try:
            write_atomically(self._folder / PROFILE_FILE, self.profile.export())
        except OSError as error:
            logger.warning("the node profile cannot be written: %s", error)
