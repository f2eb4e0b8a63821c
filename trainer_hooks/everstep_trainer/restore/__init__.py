"""From the newest whole version in the vaults to live tensors, in whatever layout the new generation has."""

from everstep_trainer.restore.restorer import Restoration, RestoreResult

__all__ = ["Restoration", "RestoreResult"]
