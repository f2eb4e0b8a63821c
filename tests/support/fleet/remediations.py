"""Remediations carried out without the controller's executor."""

from __future__ import annotations

import time

from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.remediation.remediator import Remediator


def remediation(number: int, kind: RemediationKind = RemediationKind.CORDON, node: str = "n1") -> Remediation:
    """Return a remediation of one node."""
    return Remediation(id=f"{node}-a{number}", node=node, kind=kind, sentence="GPU x=1 was not found", at=1.7e9)


def apply_and_wait(remediator: Remediator, remediation: Remediation, deadline_s: float = 20.0) -> None:
    """Request a remediation, and wait until it is read back."""
    remediator.apply(remediation)
    end = time.perf_counter() + deadline_s
    while not remediator.is_done(remediation):
        assert time.perf_counter() < end, f"{remediation.kind} was not read back"
        time.sleep(0.02)
