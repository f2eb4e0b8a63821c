"""The base class of checkers, which observe a world from outside and report broken promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

Handlers = dict[type, Callable[[Any], None]]
"""The classes of observations that a checker needs, each with its handler, which may raise Violation."""


class Violation(AssertionError):
    """A promise was broken. ``checker`` is the name of the checker that detected it."""

    def __init__(self, checker: str, sentence: str) -> None:
        super().__init__(f"{checker}: {sentence}")
        self.checker = checker


class Checker:
    """A checker. ``world`` is set before the first observation."""

    name: str
    world: World

    def handlers(self) -> Handlers:
        """Return the handler of each observation that the checker needs."""
        raise NotImplementedError

    def remaining_problem(self) -> str:
        """Return the problem that remains after all faults, or an empty string."""
        return ""
