"""Track XIDs over time: one finding per GPU and number, from all sources and repetitions."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity
from everstep_agent.drivers.gpu_samples import XidEvent
from everstep_agent.findings.memory_errors import XID_UNCORRECTABLE, Containment
from everstep_agent.policy.nvlink_errors import MAX_LINKS, LinkError, decode_link_error
from everstep_agent.policy.rules import ClearEvent, FindingPolicy
from everstep_agent.policy.xids import (
    DRAIN_AND_RESET,
    XID_RECOVERY_ACTION_CHANGED,
    XidEntry,
    is_known_recovery,
    recovery_action,
    recovery_name,
)

RECOVERY_SETTLE_S = 10.0
"""Seconds that NVML must contradict a recovery action of the kernel log before NVML is believed."""

MAX_XID_RECORDS = 256
"""Limit against a log of garbage, which must not grow the daemon or its heartbeat."""


class XidRecord(msgspec.Struct, kw_only=True):
    """State of one XID on one GPU. Times are wall seconds, except ``last_seen_s``, which is monotonic.

    ``counts`` is by source: the kernel log and NVML report the same events, so the larger count is their number.
    ``reported_count`` is the count last shown in the finding. It is updated when the count has doubled, so that a storm
    of hundreds of thousands of lines makes twenty updates.
    """

    pci_bus_id: str
    xid: int
    first_seen_at: float
    text: str
    counts: dict[str, int]
    reported_count: int = 1
    last_seen_s: float = 0.0
    link_error: LinkError | None = None  # the gravest decoded NVLink error
    link_counts: dict[str, int] = {}  # errors that are tolerated a few times, by name and link

    @property
    def count(self) -> int:
        return max(self.counts.values(), default=0)

    def add_link_error(self, error: LinkError, text: str) -> bool:
        """Add a decoded error. Returns whether the judgement of the record changed."""
        if error.tolerated:
            key = f"{error.name}/{error.link}"
            if key not in self.link_counts and len(self.link_counts) >= MAX_LINKS:
                return False
            self.link_counts[key] = self.link_counts.get(key, 0) + 1
            if self.link_counts[key] <= error.tolerated:
                error = msgspec.structs.replace(error, action=Action.NONE)
        known = self.link_error
        if known is not None and _gravity(error) <= _gravity(known):
            return False
        self.link_error, self.text = error, text
        return True


class XidHistory:
    """All XIDs of a node that have not cleared."""

    def __init__(self, policy: FindingPolicy, records: tuple[XidRecord, ...] = (), now_s: float = 0.0) -> None:
        self._policy = policy
        self._records = {(each.pci_bus_id, each.xid): each for each in records}
        self._recovery: dict[str, tuple[int, float, float]] = {}
        self.totals: dict[tuple[str, int], int] = {}
        for record in records:
            record.last_seen_s = now_s

    @property
    def records(self) -> tuple[XidRecord, ...]:
        return tuple(self._records.values())

    def change_policy(self, policy: FindingPolicy) -> None:
        """Judge the XIDs by a changed policy from now on."""
        self._policy = policy

    def has_room(self, event: XidEvent) -> bool:
        """Return whether the event can be told apart from others."""
        return (event.pci_bus_id, event.xid) in self._records or len(self._records) < MAX_XID_RECORDS

    def add_event(self, event: XidEvent, wall: float, now_s: float) -> bool:
        """Add one event. Returns whether the findings changed."""
        if event.xid == XID_RECOVERY_ACTION_CHANGED and event.recovery_action is not None:
            if event.pci_bus_id not in self._recovery and len(self._recovery) >= MAX_XID_RECORDS:
                return False
            return self._set_recovery_action(event.pci_bus_id, event.recovery_action, wall, now_s)
        key = (event.pci_bus_id, event.xid)
        if key not in self._records and len(self._records) >= MAX_XID_RECORDS:
            return False
        new = XidRecord(pci_bus_id=key[0], xid=key[1], first_seen_at=wall, text=event.text, counts={})
        record = self._records.setdefault(key, new)
        before = record.count
        record.counts[event.source] = record.counts.get(event.source, 0) + event.count
        record.text = record.text or event.text
        record.last_seen_s = now_s
        if key in self.totals or len(self.totals) < MAX_XID_RECORDS:
            self.totals[key] = self.totals.get(key, 0) + record.count - before
        error = None if event.xid in self._policy.xids_of_site else decode_link_error(event.xid, event.text)
        is_news = error is not None and record.add_link_error(error, event.text)
        if before and record.count < 2 * record.reported_count and not is_news:
            return False
        record.reported_count = record.count
        return True

    def clear_recovery_action(self, pci_bus_id: str, action_number: int, now_s: float) -> bool:
        """Apply NVML's recovery action, which ends the one from the log after a settling time. Returns whether it
        did."""
        known = self._recovery.get(pci_bus_id)
        if known is None or action_number != 0 or now_s - known[2] < RECOVERY_SETTLE_S:
            return False
        del self._recovery[pci_bus_id]
        return True

    def drop_quiet(self, now_s: float) -> bool:
        """Drop XIDs that were quiet for as long as their clearing rule asks. Returns whether there were any."""
        over = [
            key
            for key, record in self._records.items()
            if (after_s := self._policy.xid_clearing[self._action(record)].clear_after_s) is not None
            and now_s - record.last_seen_s >= after_s
        ]
        for key in over:
            del self._records[key]
        return bool(over)

    def apply_clear_event(self, event: ClearEvent, pci_bus_id: str | None = None) -> bool:
        """Apply a boot (all GPUs), a reset or a replacement (one GPU). Returns whether findings cleared."""
        over = [
            key
            for key, record in self._records.items()
            if pci_bus_id in (None, key[0]) and event in self._policy.xid_clearing[self._action(record)].clear_on
        ]
        known = [bus_id for bus_id in self._recovery if pci_bus_id in (None, bus_id)]
        for key in over:
            del self._records[key]
        for bus_id in known:
            del self._recovery[bus_id]
        return bool(over or known)

    def findings(
        self,
        uuids: dict[str, str],
        containment: Callable[[str], Containment] = lambda bus_id: Containment.UNCONTAINED,
    ) -> list[Finding]:
        """Return one finding for each record and each recovery action.

        Args:
            uuids: UUIDs of the GPUs by PCI address, as far as known.
            containment: Returns how the memory errors of the GPU at a PCI address are judged.
        """
        found = [self._finding(record, uuids, containment) for record in self._records.values()]
        return found + [self._recovery_finding(bus_id, uuids, containment) for bus_id in self._recovery]

    def _set_recovery_action(self, pci_bus_id: str, action_number: int, wall: float, now_s: float) -> bool:
        known = self._recovery.get(pci_bus_id)
        if action_number == 0:
            return self._recovery.pop(pci_bus_id, None) is not None
        self._recovery[pci_bus_id] = (action_number, wall if known is None else known[1], now_s)
        return known is None or known[0] != action_number

    def _driver_action(self, pci_bus_id: str) -> Action:
        known = self._recovery.get(pci_bus_id)
        return Action.NONE if known is None else recovery_action(known[0])

    def _judge(self, record: XidRecord) -> XidEntry:
        """Return the number's entry, with the judgement of a decoded error in place of the table's."""
        entry = self._policy.get_xid_entry(record.xid)
        error = record.link_error
        if error is None or record.xid in self._policy.xids_of_site:
            return entry
        name = error.name if error.link is None else f"{error.name} on link {error.link}"
        return msgspec.structs.replace(
            entry, name=name, severity=error.severity, action=error.action, advice=error.advice
        )

    def _action(self, record: XidRecord) -> Action:
        """Return the stronger of the table's action and the driver's demand."""
        return Action.strongest(self._judge(record).action, self._driver_action(record.pci_bus_id))

    def _mode(self, record: XidRecord, entry: XidEntry) -> Mode:
        """Return the permitted automatic response: a site's, or the table's, or what a decoded error needs."""
        if record.link_error is None or record.xid in self._policy.xid_modes:
            return self._policy.get_xid_mode(record.xid)
        if entry.severity is Severity.CRITICAL:
            return Mode.ENFORCE
        return Mode.RECOMMEND if entry.action is Action.REPAIR else Mode.OBSERVE

    def _finding(self, record: XidRecord, uuids: dict[str, str], containment: Callable[[str], Containment]) -> Finding:
        entry = self._judge(record)
        containment_here = containment(record.pci_bus_id)
        demanded = self._driver_action(record.pci_bus_id) is not Action.NONE
        demanded &= not self._may_wait(record.pci_bus_id, containment_here)
        times = f", {record.reported_count} times" if record.reported_count > 1 else ""
        finding = Finding(
            kind=FindingKind.GPU_XID,
            subject=record.pci_bus_id,
            severity=Severity.CRITICAL if demanded else entry.severity,
            message=f"XID {record.xid} ({entry.name}) on GPU {record.pci_bus_id}{times}",
            action=self._action(record),
            mode=Mode.ENFORCE if demanded else self._mode(record, entry),
            rule=f"xid-{record.xid}",
            source=entry.source,
            value=float(record.reported_count),
            xid=record.xid,
            since=record.first_seen_at,
            evidence=_evidence(record, entry.advice, uuids),
        )
        is_table = record.xid not in self._policy.xids_of_site and not demanded
        if record.xid == XID_UNCORRECTABLE and is_table:
            return wait_for_job_end(finding, containment_here)
        return finding

    def _may_wait(self, pci_bus_id: str, containment: Containment) -> bool:
        """Return whether the driver asks to drain and reset for an error that is contained."""
        known = self._recovery.get(pci_bus_id)
        return known is not None and known[0] == DRAIN_AND_RESET and containment is not Containment.UNCONTAINED

    def _recovery_finding(
        self, pci_bus_id: str, uuids: dict[str, str], containment: Callable[[str], Containment]
    ) -> Finding:
        number, since, _ = self._recovery[pci_bus_id]
        is_known = is_known_recovery(number)
        finding = Finding(
            kind=FindingKind.GPU_RECOVERY_ACTION,
            subject=pci_bus_id,
            severity=Severity.CRITICAL if is_known else Severity.WARNING,
            mode=Mode.ENFORCE if is_known else Mode.RECOMMEND,
            message=f"the driver asks for recovery of GPU {pci_bus_id}: {recovery_name(number)}",
            action=recovery_action(number),
            rule=f"xid-{XID_RECOVERY_ACTION_CHANGED}",
            source="XID 154: the driver's own recovery action",
            value=float(number),
            since=since,
            evidence={"uuid": uuids[pci_bus_id]} if pci_bus_id in uuids else {},
        )
        judged = containment(pci_bus_id)
        return wait_for_job_end(finding, judged) if self._may_wait(pci_bus_id, judged) else finding


def wait_for_job_end(finding: Finding, containment: Containment) -> Finding:
    """Return the finding of a memory error as it is, or, unless it is uncontained, as one whose reset can wait."""
    if containment is Containment.UNCONTAINED:
        return finding
    words = "contained, so the reset can wait for the end of the job"
    return msgspec.structs.replace(
        finding,
        severity=Severity.WARNING,
        mode=Mode.weakest(finding.mode, Mode.RECOMMEND),
        message=f"{finding.message} ({words if containment is Containment.CONTAINED else 'not judged yet'})",
    )


def _gravity(error: LinkError) -> tuple[int, int]:
    return error.severity.gravity, list(Action).index(error.action)


def _evidence(record: XidRecord, advice: str, uuids: dict[str, str]) -> dict[str, str]:
    evidence = {"advice": advice, "sources": " and ".join(sorted(record.counts))}
    if record.text:
        evidence["line"] = record.text
    if record.link_error is not None and record.link_error.link is not None:
        evidence["link"] = str(record.link_error.link)
    if record.pci_bus_id in uuids:
        evidence["uuid"] = uuids[record.pci_bus_id]
    return evidence
