"""Remedies as the core asks for them, carried out without a desk."""

from __future__ import annotations

import time

from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.remediation.remediator import Remediator


def remedy(number: int, kind: RemediationKind = RemediationKind.CORDON, node: str = "n1") -> Remediation:
    return Remediation(id=f"{node}-a{number}", node=node, kind=kind, sentence="GPU x=1 was not found", at=1.7e9)


def carry_out(remediator: Remediator, remedy: Remediation, deadline_s: float = 20.0) -> None:
    """Asks for it and waits until it is read back."""
    remediator.apply(remedy)
    end = time.perf_counter() + deadline_s
    while not remediator.is_done(remedy):
        assert time.perf_counter() < end, f"{remedy.kind} was not read back"
        time.sleep(0.02)
