"""What is said of a slot that cannot be used: a line in the log, and a finding where its bytes are not those sealed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from everstep.clock import Clock
from everstep.vocabulary import FindingKind
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member
from trainer_hooks.findings import found_while_restoring
from trainer_hooks.restore.local import BadSlot
from trainer_hooks.restore.streams import BadTransfer

log = logging.getLogger(__name__)


class SlotReporter:
    """Tells of bad slots; callable from any thread.

    Args:
        on_finding: takes findings about slots on this rank's node, and about what came otherwise than it was sent; of
            a slot elsewhere its own vault tells.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        member: Member,
        on_finding: Callable[[FindingRaised], None] | None,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._member = member
        self._on_finding = on_finding
        self._clock = clock
        self._where = {"node": member.node, "job": spec.job, "generation": spec.number}

    def __call__(self, bad: BadSlot) -> None:
        log.warning("rank %d's slot on %s is not used: %s", bad.slot.rank, bad.slot.node, bad.reason, extra=self._where)
        slot = bad.slot
        if isinstance(bad, BadTransfer):
            evidence = {"rank": str(slot.rank), "version": str(slot.version), "received_by": self._member.node}
            self._tell(FindingKind.TRANSFER_CORRUPT, slot.node, bad.reason, evidence)
        elif bad.corrupt and slot.is_on(self._member.node):
            evidence = {"path": slot.path, "slot": str(slot.slot)}
            self._tell(
                FindingKind.SLOT_CORRUPT, f"{self._spec.job}/rank{slot.rank}/{slot.version}", bad.reason, evidence
            )

    def _tell(self, kind: FindingKind, subject: str, reason: str, evidence: dict[str, str]) -> None:
        if self._on_finding is not None:
            source, instead = "xxh3-128 of each 8 MiB chunk", "another copy is used"
            self._on_finding(
                found_while_restoring(
                    self._spec, self._clock, kind, subject, reason, instead=instead, source=source, evidence=evidence
                )
            )
