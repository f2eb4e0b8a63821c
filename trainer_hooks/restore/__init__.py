"""From the newest whole version in the vaults to live tensors, in whatever layout the new generation has."""

from trainer_hooks.restore.restorer import RestoreResult, restore

__all__ = ["RestoreResult", "restore"]
