"""Which step a checkpoint is of, where only DCP's name for it is known."""

from __future__ import annotations

import os
import re


def step_of(checkpoint_id: str | os.PathLike[str] | None) -> int:
    """The number at its end. Raises ValueError where there is none."""
    found = re.search(r"(\d+)\D*$", os.fspath(checkpoint_id or ""))
    if found is None:
        raise ValueError(f"which step {checkpoint_id!r} is cannot be told: give VaultWriter or VaultReader the step")
    return int(found[1])
