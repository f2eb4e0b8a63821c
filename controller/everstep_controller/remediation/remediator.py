"""Define the interface to systems that drain, reboot and repair machines, and its default, a dry run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from everstep.errors import Conflict, EverstepError, Unavailable
from everstep.ids import NodeId
from everstep_controller.core.effects import Remediation, RemediationKind

CORDON_OWNER = "everstep"
"""Marks our own cordons in external systems: their reason begins with this."""


class CordonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node's cordon as shown by the external system."""

    cordoned_by: str = ""  # owner of the cordon, CORDON_OWNER for ourselves, empty if there is none
    reason: str = ""  # as shown there


class RemediationIncomplete(Unavailable):
    """The request took effect, but a part of it did not yet; it will be tried again."""


class Remediator(Protocol):
    """Acts on nodes. Every method may block for a bounded time of some seconds, and runs in a thread.

    Raises:
        Unavailable: the external system does not answer; the call is repeated.
        RemediationIncomplete: a part of the request is delayed; the call is repeated.
        Conflict: the request can never succeed (an unknown node, a foreign cordon).
    """

    name: str
    kinds: frozenset[RemediationKind]
    """Supported kinds; any other is given up with an explanation."""
    dry_run: bool
    """Whether it only logs actions. Actions reported as done were not done."""

    def apply(self, remediation: Remediation) -> None:
        """Request ``remediation``. Repeating a request that is done or in progress changes nothing."""

    def is_done(self, remediation: Remediation) -> bool:
        """Return whether ``remediation`` has taken effect."""

    def cordon_status(self, nodes: Sequence[NodeId]) -> dict[NodeId, CordonStatus]:
        """Return the status of each known node of ``nodes``; empty if the system has no such status."""

    def close(self) -> None:
        """Release resources; no more calls follow."""


def foreign_cordon(node: NodeId, detail: str = "") -> Conflict:
    """Return the error for a node that another system or person has cordoned."""
    by = f" ({detail})" if detail else ""
    return Conflict(f"{node} was cordoned outside Everstep{by}, so Everstep leaves it as it is")


def cordon_reason(remediation: Remediation, max_chars: int = 256) -> str:
    """Return the reason to store with a cordon, by which people and ``is_done`` identify it."""
    return f"{CORDON_OWNER} {remediation.id}: {remediation.sentence}"[:max_chars]


# A call to an external system may raise anything; the caller must go on and log the error.

log = logging.getLogger(__name__)

T = TypeVar("T")


class UnexpectedFailure(Unavailable):
    """The external system or its client failed unexpectedly."""


def call_guarded(call: Callable[..., T], *arguments: object) -> T:
    """Call ``call``. Raises its EverstepErrors; any other error is logged and becomes UnexpectedFailure."""
    try:
        return call(*arguments)
    except EverstepError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        log.exception("a call to an external system failed unexpectedly and will be repeated: %s", message)
        raise UnexpectedFailure(message) from error


class DryRunRemediator:
    """Implements ``Remediator`` by logging each action, and counts it as done at once. The default."""

    name = "dry_run"
    dry_run = True
    kinds = frozenset(RemediationKind)

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def apply(self, remediation: Remediation) -> None:
        if remediation.id in self._logged:
            return
        self._logged.add(remediation.id)
        action = (remediation.kind, remediation.node, remediation.sentence)
        extra = {"node": remediation.node, "trace": remediation.trace}
        log.info("dry run, no action is taken: %s node %s: %s", *action, extra=extra)

    def is_done(self, remediation: Remediation) -> bool:
        return remediation.id in self._logged

    def cordon_status(self, nodes: Sequence[NodeId]) -> dict[NodeId, CordonStatus]:
        return {}

    def close(self) -> None:
        pass
