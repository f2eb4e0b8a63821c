"""The seam to whatever drains, reboots and repairs machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from controller.core.effects import Remedy, RemedyKind
from everstep.errors import Unavailable
from everstep.ids import NodeId

MARK = "everstep"
"""How our own cordons are known again outside: their reason begins with it."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What the outside shows of a node. ``cordoned_by``: who keeps it out of service, ``MARK`` for ourselves, empty
    for nobody; ``reason`` as it stands there."""

    cordoned_by: str = ""
    reason: str = ""


class Unfinished(Unavailable):
    """What was asked for stands outside, and something that goes with it does not yet; it will be tried again."""


class Remediator(Protocol):
    """Acts on nodes. Every method may block for some seconds (a thread calls it) and bounds that by itself.

    Raises Unavailable where the outside does not answer (it will be tried again), Unfinished where a part of it is held
    up, and Conflict where it will never do
    as asked (a node it does not know, a cordon that is somebody else's).
    """

    name: str
    kinds: frozenset[RemedyKind]
    """What it can do; anything else is given up with a sentence."""
    dry_run: bool
    """Whether it only says what it would do. What it reports as done was not done."""

    def apply(self, remedy: Remedy) -> None:
        """Has ``remedy`` carried out. To ask again for what is done, or under way, changes nothing."""

    def is_done(self, remedy: Remedy) -> bool:
        """Reads back whether ``remedy`` has come about."""

    def standing(self, nodes: Sequence[NodeId]) -> dict[NodeId, Standing]:
        """What is shown of each of ``nodes`` that the outside knows; empty where it shows nothing of the kind."""

    def close(self) -> None:
        """No more calls come."""


def reason_of(remedy: Remedy, longest: int = 256) -> str:
    """What is written beside a cordon, so that people and ``is_done`` know whose it is and why."""
    return f"{MARK} {remedy.id}: {remedy.sentence}"[:longest]
