"""What every checker is: it looks on from outside and says what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.world import World

Watches = dict[type, Callable[[Any], None]]
"""The facts that a checker wants, each with the method that takes it and raises Violation."""


class Checker:
    """``world``: set before it sees the first fact."""

    name: str
    world: World

    def watches(self) -> Watches:
        raise NotImplementedError

    def complaint(self) -> str:
        """What is still wrong after all faults; empty when nothing is."""
        return ""
