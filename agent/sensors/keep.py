"""What the sensors keep on disk between two lives of the agent."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from agent.assess import Memory
from agent.drivers.kmsg import LogPosition
from everstep.errors import UNREADABLE

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 20


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The assessor's memory, and how far the kernel's log had been read when it was written."""

    memory: Memory = Memory()
    log: LogPosition | None = None


def load_kept(path: str) -> Kept:
    """What is kept at ``path``; nothing where there is no file, or one that cannot be used (that is logged)."""
    if not path:
        return Kept()
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Kept)
    except FileNotFoundError:
        return Kept()
    except (OSError, *UNREADABLE) as error:
        logger.warning("sensor state %s cannot be used, starting without: %s", path, error)
        return Kept()


def store_kept(path: str, kept: Kept) -> None:
    """Replaces the file at once or not at all; a failure is logged, since sensing goes on without it."""
    if not path:
        return
    draft = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(kept))
        draft.rename(path)
    except OSError as error:
        logger.warning("sensor state %s cannot be written: %s", path, error)
