"""Choose the directory in which runs without an agent keep their logs, receipts and sockets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

LONGEST_SOCKET = "run-12345678/agent/agent.sock"
"""Path of a private agent's socket below the state directory."""
MAX_SOCKET_BYTES = 99
"""Longest path of that socket: unix sockets allow 107 bytes, and its draft has a longer name."""


def preferred_state_directory(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_STATE_HOME/everstep``, or the same in the home directory, whether it can be used or not."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~")) / ".local" / "state") / "everstep"


def state_directory(environ: Mapping[str, str]) -> Path:
    """Return the preferred directory, or one in /tmp if the home directory cannot hold it.

    A directory that ``XDG_STATE_HOME`` names is taken as it is.
    """
    wanted = preferred_state_directory(environ)
    if environ.get("XDG_STATE_HOME") or not why_unusable(wanted):
        return wanted
    return Path(f"/tmp/everstep-{os.geteuid()}/state")  # noqa: S108 - made 0700, after a check of its owner


def why_unusable(directory: Path) -> str:
    """Return why runs cannot keep files and sockets in a directory; "" if they can."""
    if len(os.fsencode(directory.absolute() / LONGEST_SOCKET)) > MAX_SOCKET_BYTES:
        return "it is too long a path for unix sockets"
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return "" if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"
