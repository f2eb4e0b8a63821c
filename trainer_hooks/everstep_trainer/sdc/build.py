"""Build the chain of audits of one generation from its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from everstep.vocabulary import AuditLink
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.coverage import Coverage
from everstep_trainer.sdc.gradients.collectives import Collectives
from everstep_trainer.sdc.gradients.gradient_buffers import GradientBuffers
from everstep_trainer.sdc.gradients.gradient_exchange import GradientTap
from everstep_trainer.sdc.gradients.gradient_norms import GradientNorms
from everstep_trainer.sdc.matmul import Matmul
from everstep_trainer.sdc.presets import LinkOptions
from everstep_trainer.sdc.replay.peer_replay import PeerReplay
from everstep_trainer.sdc.state_digests import StateAudit
from everstep_trainer.sdc.updates import UpdateAudit

AUDITS: dict[AuditLink, Callable[[AuditSetup], Audit]] = {
    AuditLink.MATMUL: Matmul,
    AuditLink.PEER_REPLAY: PeerReplay,
    AuditLink.UPDATE: UpdateAudit,
    AuditLink.STATE: StateAudit,
}
"""The links that check work on the training thread and need nothing else; all are called in the order of AuditLink."""
GRADIENT_AUDITS = (GradientNorms, GradientBuffers, Collectives)
"""Those that read gradients on their way to other ranks."""


def build_chain(
    options: Mapping[AuditLink, LinkOptions],
    setup: AuditSetup,
    first_step: int,
    on_clean: Callable[[int], None],
    name: str = "",
) -> AuditChain | None:
    """Return the chain; None if no link of it is on.

    Args:
        options: Of the links that are on.
        setup: The generation.
        first_step: The next step.
        on_clean: See `AuditChain`.
        name: Of the preset, where the log is to say what no audit covers; empty: it says nothing.
    """
    makers = dict(AUDITS)
    if setup.world_size > 1 and {audit.link for audit in GRADIENT_AUDITS} & options.keys():
        tap = GradientTap([*setup.objects.values(), *setup.ddp_wrappers], setup.world_size)
        makers |= {audit.link: partial(audit, tap=tap) for audit in GRADIENT_AUDITS}
    audits = [makers[link](setup) for link in AuditLink if link in options and link in makers]
    if not audits:
        return None
    coverage = Coverage(name, audits, setup, _missing_links(options, makers)) if name else None
    return AuditChain(audits, options, setup, first_step, on_clean, coverage=coverage)


def _missing_links(options: Mapping[AuditLink, LinkOptions], makers: Mapping[AuditLink, object]) -> list[str]:
    alone = [audit.link for audit in GRADIENT_AUDITS if audit.link in options and audit.link not in makers]
    return [f"audit {link} is off: it needs a second rank" for link in alone]
