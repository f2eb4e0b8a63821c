"""Build the chain of audits of one generation from its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from everstep.vocabulary import AuditLink
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.options import LinkOptions

AUDITS: dict[AuditLink, Callable[[AuditSetup], Audit]] = {}
"""The links that check work on the training thread, in the order in which they are called."""


def build_chain(
    options: Mapping[AuditLink, LinkOptions], setup: AuditSetup, first_step: int, on_clean: Callable[[int], None]
) -> AuditChain | None:
    """Return the chain; None if no link of it is on."""
    audits = [make(setup) for link, make in AUDITS.items() if link in options]
    return AuditChain(audits, options, setup, first_step, on_clean) if audits else None
