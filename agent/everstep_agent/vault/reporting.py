"""Count the vault's work and report corrupt bytes to the supervisor."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from everstep.clock import Clock
from everstep.ids import Version
from everstep.layout.slot_header import SlotHeader
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.training import FindingRaised
from everstep_agent.vault.memory.segments import DamageReport, SegmentFile

# Counters of the vault's work.

COUNTER_NAMES = (
    "replicated_slots",
    "replicated_bytes",
    "received_slots",
    "received_bytes",
    "received_manifests",
    "reused_bytes",
    "superseded_copies",
    "served_bytes",
    "fetched_bytes",
    "parity_slots",
    "parity_bytes",
    "parity_recovered_bytes",
    "spilled_slots",
    "spilled_bytes",
    "scrubbed_slots",
    "scrubbed_bytes",
    "corrupt_slots",
    "corrupt_transfers",
)
"""All counters. Each starts at 0, so that a rate over it is never undefined."""


class VaultCounters:
    """Counters, and refusals by error code. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counter(dict.fromkeys(COUNTER_NAMES, 0))
        self._refused: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            if name not in self._counters:
                raise KeyError(name)
            self._counters[name] += amount

    def count_refusal(self, code: str) -> None:
        with self._lock:
            self._refused[code] += 1

    def read_all(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the current counters, and refusals by code."""
        with self._lock:
            return dict(self._counters), dict(self._refused)


log = logging.getLogger(__name__)


@dataclass(eq=False)
class FindingReporter:
    """Report this vault's findings. ``send_finding`` passes each one to the supervisor, from any thread."""

    _node: str
    _clock: Clock
    _counters: VaultCounters
    _send_finding: Callable[[FindingRaised], None]

    def report_corrupt_slot(
        self, segment: SegmentFile, slot: int, header: SlotHeader, error: object, detected_by: str
    ) -> bool:
        """Discard and report a sealed slot with wrong bytes. Returns False if the slot has changed since."""
        if not segment.discard(slot, header):
            return False
        self.report_damage(segment.describe_damage(slot, header, f"{error}; the slot is discarded"), detected_by)
        return True

    def report_damage(self, damage: DamageReport, detected_by: str = "store") -> None:
        """Report stored bytes that differ from the written ones."""
        self._counters.add("corrupt_slots")
        evidence = {**damage.evidence, "detected_by": detected_by}
        self._report(FindingKind.SLOT_CORRUPT, damage.job, damage.subject, damage.message, evidence)

    def report_corrupt_transfer(self, job: str, peer: str, rank: int, version: Version, detail: str) -> None:
        """Report that bytes sent by ``peer`` do not hash to the digests sent with them."""
        self._counters.add("corrupt_transfers")
        message = f"{peer} sent version {version} of rank {rank}: {detail}"
        evidence = {"rank": str(rank), "version": str(version), "received_by": self._node}
        self._report(FindingKind.TRANSFER_CORRUPT, job, peer, message, evidence)

    def report_memory_shortage(self, job: str, message: str) -> None:
        """Report that the job needs more memory than this node has. The finding says nothing about the hardware."""
        self._report(FindingKind.MEMORY_LOW, job, f"memory/{job}", message, {}, "the sum of the planned slots")

    def _report(
        self,
        kind: FindingKind,
        job: str,
        subject: str,
        message: str,
        evidence: dict[str, str],
        source: str = "xxh3-128 of each 8 MiB chunk",
    ) -> None:
        finding = Finding(
            kind=kind,
            subject=subject,
            severity=Severity.WARNING,
            message=message,
            mode=Mode.OBSERVE,
            source=source,
            since=self._clock.wall(),
            trace=uuid.uuid4().hex[:16],
            evidence=evidence,
        )
        log.warning("%s %s: %s", kind, subject, message, extra={"node": self._node, "job": job, "trace": finding.trace})
        self._send_finding(FindingRaised(finding=finding, job=job))
