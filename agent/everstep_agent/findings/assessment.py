"""Compute findings from samples, policy and history. Pure: no clock, no files, no processes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import xxhash

from everstep.vocabulary import Finding, FindingKind, gravest_by_key
from everstep_agent.findings.rules import ClearEvent, FindingPolicy, FindingRule, KernelLineRule, RuleHistory
from everstep_agent.findings.xid_history import XidHistory, XidRecord
from everstep_agent.findings.xids import XidParser, recovery_action, recovery_name
from everstep_agent.sensors.samples import GpuSample, HostSample, SensorState, XidEvent
from everstep_agent.sensors.sensor_messages import PollResult

SENSOR_SUBJECT = "nvml"
HOST_SUBJECT = "host"
MAX_LINE_FINDINGS = 64
"""Maximum number of active findings from kernel log lines."""


class Instant(NamedTuple):
    """The current time on both clocks."""

    wall: float
    monotonic: float


class GpuResetState(msgspec.Struct, frozen=True):
    """Values that reveal a reset or an exchange of the GPU at a PCI address."""

    uuid: str
    energy_j: float | None = None
    lost: bool = False
    recovery_action: int | None = None


class AssessorState(msgspec.Struct, frozen=True, kw_only=True):
    """State kept across runs: findings that only a reset, a boot or an exchange clears, and how to detect those."""

    boot_id: str = ""
    xid_records: tuple[XidRecord, ...] = ()
    lasting_findings: tuple[Finding, ...] = ()
    gpu_reset_states: dict[str, GpuResetState] = {}


class FindingAssessor:
    """A node's findings. Every method that adds input returns whether ``findings`` changed.

    ``node`` is part of the traces; without ``expected_gpus`` the PCI bus tells how many GPUs there should be.
    """

    def __init__(
        self, policy: FindingPolicy, node: str, expected_gpus: int | None, state: AssessorState, now: Instant
    ) -> None:
        self._policy = policy
        self._node = node
        self._expected_gpus = expected_gpus
        self._boot_id = state.boot_id
        self._gpus = dict(state.gpu_reset_states)
        self._ports: dict[str, dict[str, str]] = {}
        self._uptime_s: float | None = None
        self._histories: dict[tuple[str, str], RuleHistory] = {}
        self._rule_findings: dict[tuple[str, str], Finding] = {}
        self._line_findings: dict[tuple[str, str], tuple[KernelLineRule, Finding, float]] = {}
        # Field names are computed once: Python's attribute cache keeps every new string used for a lookup.
        self._rules_by_scope: dict[str, list[tuple[FindingRule, str]]] = {}
        for rule in policy.rules:
            self._rules_by_scope.setdefault(rule.scope, []).append((rule, rule.field))
        self._line_rules = [(rule, re.compile(rule.pattern)) for rule in policy.line_rules]
        self.xid_history = XidHistory(policy, state.xid_records, now.monotonic)
        self._reader = XidParser(self._bus_of)
        self._restore(state.lasting_findings)
        self.findings: tuple[Finding, ...] = ()
        self._dirty = True
        self._rebuild_findings()

    # Input

    def process_poll(self, poll: PollResult, clock_skew_s: float | None, now: Instant) -> bool:
        self._detect_boot(poll.boot_id)
        self._uptime_s = poll.host.uptime_s
        for gpu in poll.gpus:
            self._detect_reset(gpu)
            if (action := gpu.recovery_action) is not None:
                self._dirty |= self.xid_history.clear_recovery_action(gpu.pci_bus_id, action, now.monotonic)
            self._apply_rules("gpu", gpu.pci_bus_id, gpu, gpu.error, now)
        self._ports = {port.name: port.identity for port in poll.ports}
        for port in poll.ports:
            self._apply_rules("port", port.name, port, "", now)
        for path in poll.paths:
            self._apply_rules("path", path.path, path, "", now)
        host: HostSample = msgspec.structs.replace(poll.host, clock_skew_s=clock_skew_s)
        self._apply_rules("host", HOST_SUBJECT, host, host.error, now)
        sensing = self._sensor_state(poll)
        self._apply_rules("sensor", SENSOR_SUBJECT, sensing, sensing.detail, now)
        self._dirty |= self.xid_history.drop_quiet(now.monotonic)
        self._clear_lines(
            key
            for key, (rule, _, last) in self._line_findings.items()
            if rule.clear_after_s is not None and now.monotonic - last >= rule.clear_after_s
        )
        return self.process_xid_events(poll.xids, now)

    def process_boot(self, boot_id: str) -> bool:
        """Process the boot id as soon as it is known; a new one clears the findings that a boot clears."""
        self._detect_boot(boot_id)
        return self._rebuild_findings()

    def process_kernel_lines(self, lines: Iterable[str], now: Instant) -> bool:
        for line in lines:
            event = self._reader.parse_line(line)
            if event is not None:
                self._dirty |= self.xid_history.add_event(event, now.wall, now.monotonic)
                continue
            for rule, pattern in self._line_rules:
                if (match := pattern.search(line)) is not None:
                    self._add_line_finding(rule, match.groupdict().get("subject") or rule.id, line, now)
        return self._rebuild_findings()

    def process_xid_events(self, events: Iterable[XidEvent], now: Instant) -> bool:
        """Process XIDs that NVML reported between polls."""
        for event in events:
            self._dirty |= self.xid_history.add_event(event, now.wall, now.monotonic)
        return self._rebuild_findings()

    def process_sensor_state(self, state: SensorState, now: Instant) -> bool:
        """Process the health of the sensing itself. Fields that are None stay as they were."""
        self._apply_rules("sensor", SENSOR_SUBJECT, state, state.detail, now)
        return self._rebuild_findings()

    def export_state(self) -> AssessorState:
        """Return the state to keep for the next run of the agent."""
        sticky = {rule.id for rule in self._policy.rules if rule.clear_after_s is None}
        return AssessorState(
            boot_id=self._boot_id,
            xid_records=self.xid_history.records,
            lasting_findings=tuple(f for (rule, _), f in self._rule_findings.items() if rule in sticky),
            gpu_reset_states=dict(self._gpus),
        )

    # GPUs

    def _bus_of(self, uuid: str) -> str | None:
        return next((bus_id for bus_id, gpu in self._gpus.items() if gpu.uuid == uuid), None)

    def _detect_reset(self, sample: GpuSample) -> None:
        """Detect a reset: the energy counter restarted, a lost GPU answers, or the driver no longer asks for one."""
        bus_id, before = sample.pci_bus_id, self._gpus.get(sample.pci_bus_id)
        energy = sample.energy_j if sample.energy_j is not None or before is None else before.energy_j
        self._gpus[bus_id] = GpuResetState(sample.uuid, energy, sample.lost, sample.recovery_action)
        if before is None or sample.lost or sample.error:
            return
        restarted = before.energy_j is not None and energy is not None and energy < before.energy_j
        recovered = bool(before.recovery_action) and sample.recovery_action == 0
        if before.uuid != sample.uuid:
            self._apply_clear_event(ClearEvent.REPLACED, bus_id)
        elif restarted or recovered or before.lost:
            self._apply_clear_event(ClearEvent.RESET, bus_id)

    def _detect_boot(self, boot_id: str) -> None:
        before, self._boot_id = self._boot_id, boot_id or self._boot_id
        if before and before != self._boot_id:
            self._apply_clear_event(ClearEvent.BOOT, None)
            self._clear_lines(
                key for key, (rule, _, _) in self._line_findings.items() if ClearEvent.BOOT in rule.clear_on
            )

    def _apply_clear_event(self, event: ClearEvent, subject: str | None) -> None:
        self._dirty |= self.xid_history.apply_clear_event(event, subject)
        for key, history in self._histories.items():
            if subject in (None, key[1]) and history.apply_clear_event(event):
                self._rule_findings.pop(key, None)
                self._dirty = True

    # Health of the sensing

    def _sensor_state(self, poll: PollResult) -> SensorState:
        expected = self._expected_gpus if self._expected_gpus is not None else (poll.pci_gpu_count or 0)
        readable = sum(not gpu.error for gpu in poll.gpus)
        missing = max(0, expected - len(poll.gpus)) if poll.gpus else 0
        faults = [f"{sensor}: {error}" for sensor, error in poll.sensor_errors]
        details = [poll.nvml_error, f"{readable} of {expected} GPUs answer" if missing else "", *faults]
        return SensorState(
            hangs=0,
            crashes=0,
            nvml_failed=int(expected > 0 and (not poll.gpus or (bool(poll.nvml_error) and not readable))),
            gpus_missing=missing,
            faults=len(faults),
            detail="; ".join(each for each in details if each),
        )

    # Rules

    def _apply_rules(self, scope: str, subject: str, sample: msgspec.Struct, detail: str, now: Instant) -> None:
        for rule, field in self._rules_by_scope.get(scope, ()):
            key = (rule.id, subject)
            if (history := self._histories.get(key)) is None:
                history = self._histories[key] = RuleHistory(rule)
            if not history.add_value(getattr(sample, field), now.monotonic, self._uptime_s):
                continue
            self._dirty = True
            if history.is_active:
                self._rule_findings[key] = self._finding(rule, subject, history.value, detail, now)
            else:
                self._rule_findings.pop(key, None)

    def _finding(self, rule: FindingRule, subject: str, value: float, detail: str, now: Instant) -> Finding:
        gpu = self._gpus.get(subject)
        identity = self._ports.get(subject, {}) if rule.scope == "port" else {}
        shown = {"threshold": rule.threshold, "window_s": rule.window_s, "detail": detail or "no detail"}
        message = rule.message.format(subject=subject, value=value, **shown)
        finding = msgspec.structs.replace(
            rule.finding(rule.subject or subject, message, now.wall),
            value=value,
            threshold=rule.threshold,
            evidence=dict(identity) if gpu is None else {"uuid": gpu.uuid},
        )
        if rule.kind is not FindingKind.GPU_RECOVERY_ACTION:
            return finding
        action, name = recovery_action(int(value)), recovery_name(int(value))
        return msgspec.structs.replace(finding, action=action, message=f"{message} ({name})")

    def _add_line_finding(self, rule: KernelLineRule, subject: str, line: str, now: Instant) -> None:
        key = (rule.id, subject)
        if (before := self._line_findings.get(key)) is not None:
            self._line_findings[key] = (rule, before[1], now.monotonic)
            return
        if len(self._line_findings) >= MAX_LINE_FINDINGS:
            return
        finding = rule.finding(subject, rule.message.format(subject=subject, line=line[:300]), now.wall)
        self._line_findings[key] = (rule, finding, now.monotonic)
        self._dirty = True

    def _clear_lines(self, keys: Iterable[tuple[str, str]]) -> None:
        for key in list(keys):
            del self._line_findings[key]
            self._dirty = True

    def _restore(self, findings: tuple[Finding, ...]) -> None:
        rules = {rule.id: rule for rule in self._policy.rules}
        for finding in findings:
            if (rule := rules.get(finding.rule)) is not None:
                key = (rule.id, finding.subject)
                self._histories[key] = RuleHistory(rule)
                self._histories[key].restore_active(finding.value or 0.0)
                self._rule_findings[key] = finding

    # Result

    def _rebuild_findings(self) -> bool:
        """Rebuild the findings if anything changed: the gravest for each key, since its first appearance."""
        if not self._dirty:
            return False
        self._dirty = False
        before = {finding.key: finding for finding in self.findings}
        uuids = {bus_id: gpu.uuid for bus_id, gpu in self._gpus.items()}
        of_lines = (finding for _, finding, _ in self._line_findings.values())
        gravest = gravest_by_key([*self._rule_findings.values(), *of_lines, *self.xid_history.findings(uuids)])
        result = tuple(self._with_trace(finding, before.get(key)) for key, finding in sorted(gravest.items()))
        changed = result != self.findings
        self.findings = result
        return changed

    def _with_trace(self, finding: Finding, before: Finding | None) -> Finding:
        since = finding.since if before is None else before.since
        name = f"{self._node}/{finding.key}/{since}"
        return msgspec.structs.replace(finding, since=since, trace=xxhash.xxh3_64_hexdigest(name.encode()))
