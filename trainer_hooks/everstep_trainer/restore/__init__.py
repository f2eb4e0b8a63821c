"""Restore live tensors, in any layout of the new generation, from the newest complete version in the vaults."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep_trainer.restore.restorer import Restoration, RestoreResult

__all__ = ["Restoration", "RestoreResult"]


def __getattr__(name: str) -> Any:
    """Import the restorer when it is asked for: it imports the snapshot package, which imports a module of this one."""
    if name not in __all__:
        raise AttributeError(name)
    from everstep_trainer.restore import restorer

    return getattr(restorer, name)
