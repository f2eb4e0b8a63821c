"""Default name of this machine's node, and default run directory of its agent."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path


def local_node_name() -> str:
    """Return the default name of this machine's node: the host name up to the first dot."""
    return socket.gethostname().partition(".")[0]


def default_run_dir(node: str, environ: Mapping[str, str]) -> Path:
    """Return the run directory of an agent that was given none."""
    base = environ.get("XDG_RUNTIME_DIR") or ("/run" if os.getuid() == 0 else f"/tmp/everstep-{os.getuid()}")  # noqa: S108 - made 0700
    return Path(base) / "everstep" / node
