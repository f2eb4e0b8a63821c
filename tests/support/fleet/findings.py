"""Findings of agents for tests."""

from __future__ import annotations

from typing import Any

from everstep.vocabulary import Action, Finding, FindingKind, Severity


def xid(number: int = 79, action: Action = Action.REPAIR) -> Finding:
    """Return the finding of an XID, by default of a GPU that has fallen off the bus."""
    return Finding(
        kind=FindingKind.GPU_XID,
        subject="GPU-0",
        severity=Severity.CRITICAL,
        message=f"XID {number}: GPU has fallen off the bus",
        action=action,
        xid=number,
    )


def uncorrectable_ecc() -> Finding:
    """Return the finding of an uncorrectable error in a GPU's memory."""
    return Finding(
        kind=FindingKind.GPU_ECC_UNCORRECTABLE,
        subject="GPU-0",
        severity=Severity.CRITICAL,
        message="an uncorrectable error",
        action=Action.RESET_GPU,
    )


def port_down(subject: str = "mlx5_0", **more: Any) -> Finding:
    """Return the finding of a port that is down. ``more``: further fields, or other values."""
    fields = {"severity": Severity.CRITICAL, "action": Action.DRAIN, "message": f"port {subject} was up and is down"}
    return Finding(kind=FindingKind.NETWORK_PORT_DOWN, subject=subject, **(fields | more))


def slow_link(peer: str = "n2", severity: Severity = Severity.WARNING) -> Finding:
    """Return the finding of a slow link, which either node may have caused."""
    return Finding(
        kind=FindingKind.NETWORK_SLOW_LINK,
        subject=peer,
        severity=severity,
        message=f"0.4 GB/s to {peer}",
        evidence={"peer": peer},
    )
