"""The seam to whatever drains, reboots and repairs machines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from everstep.errors import EverstepError, Unavailable
from everstep.ids import NodeId
from everstep_controller.core.effects import Remediation, RemediationKind

CORDON_OWNER = "everstep"
"""How our own cordons are known again outside: their reason begins with it."""


class CordonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the outside shows of a node. ``cordoned_by``: who keeps it out of service, ``MARK`` for ourselves, empty
    for nobody; ``reason`` as it stands there."""

    cordoned_by: str = ""
    reason: str = ""


class PartiallyDone(Unavailable):
    """What was asked for stands outside, and something that goes with it does not yet; it will be tried again."""


class Remediator(Protocol):
    """Acts on nodes. Every method may block for some seconds (a thread calls it) and bounds that by itself.

    Raises Unavailable where the outside does not answer (it will be tried again), Unfinished where a part of it is held
    up, and Conflict where it will never do
    as asked (a node it does not know, a cordon that is somebody else's).
    """

    name: str
    kinds: frozenset[RemediationKind]
    """What it can do; anything else is given up with a sentence."""
    dry_run: bool
    """Whether it only says what it would do. What it reports as done was not done."""

    def apply(self, remediation: Remediation) -> None:
        """Has ``remedy`` carried out. To ask again for what is done, or under way, changes nothing."""

    def is_done(self, remediation: Remediation) -> bool:
        """Reads back whether ``remedy`` has come about."""

    def cordon_status(self, nodes: Sequence[NodeId]) -> dict[NodeId, CordonStatus]:
        """What is shown of each of ``nodes`` that the outside knows; empty where it shows nothing of the kind."""

    def close(self) -> None:
        """No more calls come."""


def cordon_reason(remediation: Remediation, max_chars: int = 256) -> str:
    """What is written beside a cordon, so that people and ``is_done`` know whose it is and why."""
    return f"{CORDON_OWNER} {remediation.id}: {remediation.sentence}"[:max_chars]


# ---- boundary
# Where calls to the outside leave our own thread: whatever they raise, somebody goes on and says so.

log = logging.getLogger(__name__)

T = TypeVar("T")


class UnexpectedFailure(Unavailable):
    """The outside, or what speaks to it, failed in a way that nobody has thought of."""


def call_guarded(call: Callable[..., T], *arguments: object) -> T:
    """What ``call`` returns. Raises what it raises of ours, and Unexpected for anything else, which is logged."""
    try:
        return call(*arguments)
    except EverstepError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        log.exception("a call to the outside failed unexpectedly, to be tried again: %s", what)
        raise UnexpectedFailure(what) from error


# ---- dry run
# The default: what would be done is said in the log, and nothing is done.


class DryRunRemediator:
    """Satisfies ``Remediator``; takes everything for done at once."""

    name = "dry_run"
    dry_run = True
    kinds = frozenset(RemediationKind)

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def apply(self, remediation: Remediation) -> None:
        if remediation.id in self._logged:
            return
        self._logged.add(remediation.id)
        log.info(
            "dry run, nothing is done: %s node %s: %s",
            remediation.kind,
            remediation.node,
            remediation.sentence,
            extra={"node": remediation.node, "trace": remediation.trace},
        )

    def is_done(self, remediation: Remediation) -> bool:
        return remediation.id in self._logged

    def cordon_status(self, nodes: Sequence[NodeId]) -> dict[NodeId, CordonStatus]:
        return {}

    def close(self) -> None:
        pass
