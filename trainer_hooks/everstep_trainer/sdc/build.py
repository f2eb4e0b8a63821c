"""Build the chain of audits of one generation from its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from everstep.vocabulary import AuditKind
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.coverage import Coverage
from everstep_trainer.sdc.gradients.collectives import Collectives
from everstep_trainer.sdc.gradients.gradient_buffers import GradientBuffers
from everstep_trainer.sdc.gradients.gradient_exchange import GradientTap
from everstep_trainer.sdc.gradients.gradient_norms import GradientNorms
from everstep_trainer.sdc.matmul import Matmul
from everstep_trainer.sdc.presets import AuditOptions
from everstep_trainer.sdc.replay.peer_replay import PeerReplay
from everstep_trainer.sdc.state_digests import StateAudit
from everstep_trainer.sdc.updates import UpdateAudit

AUDITS: dict[AuditKind, Callable[[AuditSetup], Audit]] = {
    AuditKind.MATMUL: Matmul,
    AuditKind.PEER_REPLAY: PeerReplay,
    AuditKind.UPDATE: UpdateAudit,
    AuditKind.STATE: StateAudit,
}
"""The audits that check work on the training thread and need nothing else; all are called in the order of AuditKind."""
GRADIENT_AUDITS = (GradientNorms, GradientBuffers, Collectives)
"""Those that read gradients on their way to other ranks."""


def build_chain(
    options: Mapping[AuditKind, AuditOptions],
    setup: AuditSetup,
    first_step: int,
    on_clean: Callable[[int], None],
    name: str = "",
) -> AuditChain | None:
    """Return the chain; None if no audit of it is on.

    Args:
        options: Of the audits that are on.
        setup: The generation.
        first_step: The next step.
        on_clean: See `AuditChain`.
        name: Of the preset, where the log is to say what no audit covers; empty: it says nothing.
    """
    makers = dict(AUDITS)
    if setup.world_size > 1 and {audit.kind for audit in GRADIENT_AUDITS} & options.keys():
        tap = GradientTap([*setup.objects.values(), *setup.ddp_wrappers], setup.world_size)
        makers |= {audit.kind: partial(audit, tap=tap) for audit in GRADIENT_AUDITS}
    audits = [makers[kind](setup) for kind in AuditKind if kind in options and kind in makers]
    if not audits:
        return None
    coverage = Coverage(name, audits, setup, _missing_audits(options, makers)) if name else None
    return AuditChain(audits, options, setup, first_step, on_clean, coverage=coverage)


def _missing_audits(options: Mapping[AuditKind, AuditOptions], makers: Mapping[AuditKind, object]) -> list[str]:
    alone = [audit.kind for audit in GRADIENT_AUDITS if audit.kind in options and audit.kind not in makers]
    return [f"audit {kind} is off: it needs a second rank" for kind in alone]
