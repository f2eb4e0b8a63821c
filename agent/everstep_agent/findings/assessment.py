"""Compute findings from samples, policy and history. Pure: no clock, no files, no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any, NamedTuple

import msgspec
import xxhash

from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity, gravest_by_key
from everstep_agent.drivers.gpu_samples import GpuSample, LinkSample, XidEvent
from everstep_agent.drivers.samples import (
    EARLIER_BOOT_S,
    EarlierBootSample,
    HostSample,
    MachinePart,
    PciErrorSample,
    SensorState,
    value_reader,
)
from everstep_agent.findings.boot_judgement import EARLIER_BOOT_SUBJECT, judge_earlier_boot
from everstep_agent.findings.gpu_peers import compare_gpus
from everstep_agent.findings.kernel_lines import LineFindings
from everstep_agent.findings.memory_errors import MemoryErrors
from everstep_agent.findings.xid_history import XidHistory, XidRecord, wait_for_job_end
from everstep_agent.node_profile.profile import NodeProfile
from everstep_agent.policy.rules import SCOPES, ClearEvent, FindingPolicy, FindingRule, RuleHistory
from everstep_agent.policy.xids import DRAIN_AND_RESET, XidParser, is_known_recovery, recovery_action, recovery_name
from everstep_agent.sensors.sensor_messages import PollResult

DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
LIBRARY_MISMATCH = 18
CURABLE_NVML_ERRORS = (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIBRARY_MISMATCH)
"""Errors of opening NVML (nvml.h, nvmlReturn_t) that software cures, and that stop no job which runs."""

SENSOR_SUBJECT = "nvml"
HOST_SUBJECT = "host"
PORT_SCOPES = ("port", "counter")
FABRIC_SUBJECT = "nvlink-fabric"
UNCORRECTED_METRIC = "gpu.ecc_uncorrected"
"""The count whose rise XIDs 94 and 95 explain."""


PROFILE_INTERVAL_S = 10.0
"""Seconds between comparisons with the node's profile, whose values change rarely."""


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
    contained_gpus: tuple[str, ...] = ()  # GPUs whose memory errors were all contained


class FindingAssessor:
    """A node's findings. Every method that adds input returns whether ``findings`` changed.

    ``node`` is part of the traces; without ``expected_gpus`` the PCI bus tells how many GPUs there should be.
    """

    def __init__(
        self,
        policy: FindingPolicy,
        node: str,
        expected_gpus: int | None,
        state: AssessorState,
        now: Instant,
        profile: NodeProfile | None = None,
    ) -> None:
        self.profile = profile or NodeProfile()
        self._profile_due = now.monotonic
        self._use(policy)
        self._node = node
        self._expected_gpus = expected_gpus
        self._boot_id = state.boot_id
        self._gpus = dict(state.gpu_reset_states)
        self._ports: dict[str, dict[str, str]] = {}
        self._uptime_s: float | None = None
        self._earlier_boot: EarlierBootSample | None = None
        self._histories: dict[tuple[str, str], RuleHistory] = {}
        self._rule_findings: dict[tuple[str, str], Finding] = {}
        self.lines = LineFindings(policy)
        self._memory_errors = MemoryErrors(state.contained_gpus)
        self._far_ends: dict[str, tuple[str, ...]] = {}  # of a GPU's links, as last known, by PCI address
        self.xid_history = XidHistory(policy, state.xid_records, now.monotonic)
        self._reader = XidParser(self._bus_of)
        self._restore(state.lasting_findings)
        self.findings: tuple[Finding, ...] = ()
        self._dirty = True
        self._rebuild_findings()

    def _use(self, policy: FindingPolicy) -> None:
        self._policy = policy
        # Readers are made once: Python's attribute cache keeps every new string used for a lookup.
        self._rules_by_scope: dict[str, list[tuple[FindingRule, Callable[[Any], Any]]]] = {}
        for rule in policy.rules:
            reader = value_reader(SCOPES[rule.scope], rule.field)
            self._rules_by_scope.setdefault(rule.scope, []).append((rule, reader))
        self._count_rules = {rule.id for rule in policy.rules if rule.metric == UNCORRECTED_METRIC}

    def change_policy(self, policy: FindingPolicy) -> bool:
        """Judge by a changed policy from now on. Histories and findings of rules that are as before stay."""
        self._use(policy)
        rules = {rule.id: rule for rule in policy.rules}
        for key, history in list(self._histories.items()):
            rule = rules.get(key[0])
            if rule == history.rule:
                continue
            if rule is None or not history.change_rule(rule):
                del self._histories[key]
            if rule is None or key not in self._histories or not history.is_active:
                self._rule_findings.pop(key, None)
            elif key in self._rule_findings:
                self._rule_findings[key] = _judged_again(rule, self._rule_findings[key])
        self.lines.change_policy(policy)
        self.xid_history.change_policy(policy)
        self._dirty = True
        return self._rebuild_findings()

    # Input

    def process_poll(self, poll: PollResult, clock_skew_s: float | None, now: Instant) -> bool:
        self._detect_boot(poll.boot_id)
        self._uptime_s = poll.host.uptime_s
        for gpu in poll.gpus:
            self._detect_reset(gpu)
            self._dirty |= self._memory_errors.note_count(
                gpu.pci_bus_id, gpu.memory_errors.ecc_uncorrected, now.monotonic
            )
            if (action := gpu.recovery_action) is not None:
                self._dirty |= self.xid_history.clear_recovery_action(gpu.pci_bus_id, action, now.monotonic)
            self._apply_rules("gpu", gpu.pci_bus_id, gpu, gpu.error or gpu.failures, now)
            for link in gpu.nvlink.links if gpu.links_were_read else ():
                self._apply_rules("link", _link_subject(gpu.pci_bus_id, link.link), link, "", now)
            if (fabric := gpu.nvlink.fabric) is not None and gpu.links_were_read:
                self._apply_rules("fabric", gpu.pci_bus_id, fabric, fabric.detail, now)
        compared = compare_gpus(poll.gpus, {gpu.uuid: gpu.name for gpu in poll.known_gpus})
        for bus_id, comparison in compared.items():
            self._apply_rules("gpu_peers", bus_id, comparison, "", now)
        self._apply_rules("node_fabric", FABRIC_SUBJECT, poll.fabric, poll.fabric.detail, now)
        for other in poll.other_gpus:
            self._apply_rules("vendor", other.vendor, other, "", now)
        self._dirty |= self._memory_errors.settle(now.monotonic)
        self._far_ends |= {gpu.pci_bus_id: ends for gpu in poll.gpus if any(ends := gpu.nvlink.nvlink_far_ends)}
        ports = {port.name: port.identity for port in poll.ports}
        self._forget_ports(self._ports.keys() - ports.keys())
        self._ports = ports
        for port in poll.ports:
            self._apply_rules("port", port.name, port, port.bond, now)
            self._apply_rules("counter", port.name, port.counts, "", now)
        for path in poll.paths:
            self._apply_rules("path", path.path, path, "", now)
        host: HostSample = msgspec.structs.replace(poll.host, clock_skew_s=clock_skew_s)
        self._apply_rules("host", HOST_SUBJECT, host, host.error, now)
        for scope, samples in poll.hardware.by_scope.items() if poll.hardware.is_new else ():
            for part in samples:
                self._apply_rules(scope, part.name, part, part.detail, now)
        self._assess_earlier_boot(poll, now)
        sensing = self._sensor_state(poll)
        self._apply_rules("sensor", SENSOR_SUBJECT, sensing, sensing.detail, now)
        self._apply_profile(poll, now)
        self._dirty |= self.xid_history.drop_quiet(now.monotonic)
        self._dirty |= self.lines.expire(now.monotonic)
        return self.process_xid_events(poll.xids, now)

    def process_boot(self, boot_id: str) -> bool:
        """Process the boot id as soon as it is known; a new one clears the findings that a boot clears."""
        self._detect_boot(boot_id)
        return self._rebuild_findings()

    def process_kernel_lines(self, lines: Iterable[str], now: Instant) -> bool:
        for line in lines:
            event = self._reader.parse_line(line)
            if event is not None:
                self._add_xid_event(event, now)
            else:
                self._dirty |= self.lines.process(line, now.wall, now.monotonic)
        return self._rebuild_findings()

    def process_xid_events(self, events: Iterable[XidEvent], now: Instant) -> bool:
        """Process XIDs that NVML reported between polls."""
        for event in events:
            self._add_xid_event(event, now)
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
            contained_gpus=self._memory_errors.contained,
        )

    def _add_xid_event(self, event: XidEvent, now: Instant) -> None:
        if not self.xid_history.has_room(event):
            self._dirty |= self.lines.note_overflow(event.text or f"XID {event.xid}", now.wall, now.monotonic)
        self._dirty |= self.xid_history.add_event(event, now.wall, now.monotonic)
        self._dirty |= self._memory_errors.note_xid(event.pci_bus_id, event.xid, now.monotonic)

    # GPUs

    def _bus_of(self, uuid: str) -> str | None:
        return next((bus_id for bus_id, gpu in self._gpus.items() if gpu.uuid == uuid), None)

    def _detect_reset(self, sample: GpuSample) -> None:
        """Detect a reset: the energy counter restarted, a lost GPU answers, or the driver no longer asks for one."""
        bus_id, before = sample.pci_bus_id, self._gpus.get(sample.pci_bus_id)
        energy = sample.power.energy_j
        if energy is None and before is not None:
            energy = before.energy_j
        uuid = sample.uuid or ("" if before is None else before.uuid)
        self._gpus[bus_id] = GpuResetState(uuid, energy, sample.lost, sample.recovery_action)
        if before is None or sample.lost or sample.error:
            return
        restarted = before.energy_j is not None and energy is not None and energy < before.energy_j
        demanded = recovery_action(before.recovery_action or 0) is not Action.NONE
        recovered = demanded and sample.recovery_action == 0
        if before.uuid and sample.uuid and before.uuid != sample.uuid:
            self._apply_clear_event(ClearEvent.REPLACED, bus_id)
        elif restarted or recovered or before.lost:
            self._apply_clear_event(ClearEvent.RESET, bus_id)

    def _detect_boot(self, boot_id: str) -> None:
        before, self._boot_id = self._boot_id, boot_id or self._boot_id
        if before and before != self._boot_id:
            self._earlier_boot = None
            self._apply_clear_event(ClearEvent.BOOT, None)
            self._dirty |= self.lines.apply_boot()

    def _apply_clear_event(self, event: ClearEvent, subject: str | None) -> None:
        self._dirty |= self.xid_history.apply_clear_event(event, subject)
        self._memory_errors.clear(subject)
        for key, history in self._histories.items():
            if subject in (None, key[1], _gpu_of_link(key[1])) and history.apply_clear_event(event):
                self._rule_findings.pop(key, None)
                self._dirty = True

    def _assess_earlier_boot(self, poll: PollResult, now: Instant) -> None:
        """Show what the boot before left, until this one has lasted for a day."""
        if poll.earlier_boot is not None:
            self._earlier_boot = judge_earlier_boot(self._policy, poll.earlier_boot)
        if self._earlier_boot is not None and poll.hardware.is_new:
            is_news = (self._uptime_s or 0.0) < EARLIER_BOOT_S
            sample = self._earlier_boot if is_news else EarlierBootSample()
            self._apply_rules("earlier_boot", EARLIER_BOOT_SUBJECT, sample, sample.detail, now)

    # Ports

    def _forget_ports(self, names: Set[str]) -> None:
        """Drop findings on ports that the sensor has forgotten, so that no poll would clear them.

        A port that is down or gone stays so: after a restart, the sensor does not know that there was one.
        """
        for key, history in list(self._histories.items()) if names else ():
            rule, subject = history.rule, key[1]
            if subject in names and rule.scope in PORT_SCOPES and rule.kind is not FindingKind.NETWORK_PORT_DOWN:
                del self._histories[key]
                self._dirty |= self._rule_findings.pop(key, None) is not None

    # Health of the sensing

    def _sensor_state(self, poll: PollResult) -> SensorState:
        nvml = poll.nvml
        expected = self._expected_gpus if self._expected_gpus is not None else (poll.pci_gpus.usable or 0)
        is_held = nvml.paused_s is not None
        has_gpus = not is_held and (expected > 0 or poll.pci_gpus.unbound > 0 or bool(poll.gpus))
        readable = sum(not gpu.error for gpu in poll.gpus)
        code = nvml.error_code
        is_open = not code and not nvml.busy_with and not is_held
        missing = max(0, expected - len(poll.gpus)) if poll.gpus and is_open else 0
        faults = [f"{sensor}: {error}" for sensor, error in poll.sensor_errors]
        details = [
            nvml.busy_with,
            nvml.error,
            f"{readable} of {expected} GPUs answer" if missing else "",
            *faults,
        ]
        has_failed = expected > 0 and not is_held and (not poll.gpus or (bool(nvml.error) and not readable))
        return SensorState(
            hangs=0,
            crashes=0,
            nvml_failed=int(has_failed and not nvml.busy_with and code not in CURABLE_NVML_ERRORS),
            nvml_hung_s=nvml.hung_s,
            nvml_paused_s=nvml.paused_s or 0.0,
            driver_missing=int(has_gpus and code == DRIVER_NOT_LOADED),
            library_missing=int(has_gpus and code == LIBRARY_NOT_FOUND),
            library_mismatch=int(has_gpus and code == LIBRARY_MISMATCH),
            gpus_unbound=poll.pci_gpus.unbound if is_open else 0,
            gpus_hidden=poll.pci_gpus.hidden,
            gpus_missing=missing,
            faults=len(faults),
            detail="; ".join(each for each in details if each),
        )

    # Rules

    def _apply_rules(self, scope: str, subject: str, sample: msgspec.Struct, detail: str, now: Instant) -> None:
        for rule, read in self._rules_by_scope.get(scope, ()):
            key, value = (rule.id, subject), read(sample)
            if (history := self._histories.get(key)) is None:
                if value is None:  # a device has few of the values that rules know
                    continue
                history = self._histories[key] = RuleHistory(rule)
            if not history.add_value(value, now.monotonic, self._uptime_s):
                continue
            self._dirty = True
            if history.is_active:
                finding = self._finding(rule, subject, history.value, detail, now)
                self._rule_findings[key] = self._with_part(_with_links(finding, sample), sample)
            else:
                self._rule_findings.pop(key, None)

    def _apply_profile(self, poll: PollResult, now: Instant) -> None:
        """Compare the node with its profile if it is time to. Nothing is learned from a part with a fault."""
        if now.monotonic < self._profile_due:
            return
        self._profile_due = now.monotonic + PROFILE_INTERVAL_S
        own = {rule.id for rule, _ in self._rules_by_scope.get("profile", ())}
        faulty = {f.subject for f in self.findings if f.severity is not Severity.INFO and f.rule not in own}
        samples = self.profile.update(poll, faulty, now.wall, now.monotonic)
        for subject, sample in samples.items():
            hint = f"if it is meant to be so, run: {self.profile.accept_command} {subject}"
            self._apply_rules("profile", subject, sample, hint, now)
        for key in [key for key in self._rule_findings if key[0] in own and key[1] not in samples]:
            del self._rule_findings[key], self._histories[key]
            self._dirty = True

    def _finding(self, rule: FindingRule, subject: str, value: float, detail: str, now: Instant) -> Finding:
        place = _gpu_of_link(subject) if rule.scope == "link" else subject
        gpu = self._gpus.get(place)
        identity = self._ports.get(subject, {}) if rule.scope in (*PORT_SCOPES, "profile") else {}
        shown = {"threshold": rule.threshold, "window_s": rule.window_s, "detail": detail or "no detail"}
        message = rule.message.format(subject=subject, value=value, **shown)
        finding = msgspec.structs.replace(
            rule.finding(rule.subject or place, message, now.wall),
            value=value,
            threshold=rule.threshold,
            evidence=dict(identity) if gpu is None else {"uuid": gpu.uuid},
        )
        if rule.kind is not FindingKind.GPU_RECOVERY_ACTION:
            return finding
        named = msgspec.structs.replace(finding, message=f"{message} ({recovery_name(int(value))})")
        return _with_recovery_action(named)

    def _with_part(self, finding: Finding, sample: msgspec.Struct) -> Finding:
        """Return a finding about a part of the machine with what a vendor asks for. Others stay as they are."""
        if not isinstance(sample, MachinePart):
            return finding
        identity = {name: text for name, text in sample.identity.items() if text}
        finding = msgspec.structs.replace(finding, subject=sample.subject, evidence=finding.evidence | identity)
        return self._with_device(finding) if isinstance(sample, PciErrorSample) else finding

    def _restore(self, findings: tuple[Finding, ...]) -> None:
        rules = {rule.id: rule for rule in self._policy.rules}
        for finding in findings:
            if (rule := rules.get(finding.rule)) is not None:
                links = finding.evidence.get("links", "")
                is_of_link = rule.scope == "link" and links.isdigit()
                key = (rule.id, _link_subject(finding.subject, int(links)) if is_of_link else finding.subject)
                self._histories[key] = RuleHistory(rule)
                self._histories[key].restore_active(finding.value or 0.0)
                self._rule_findings[key] = _judged_again(rule, finding)

    # Result

    def _rebuild_findings(self) -> bool:
        """Rebuild the findings if anything changed: the gravest for each key, since its first appearance."""
        if not self._dirty:
            return False
        self._dirty = False
        before = {finding.key: finding for finding in self.findings}
        uuids = {bus_id: gpu.uuid for bus_id, gpu in self._gpus.items()}
        containment = self._memory_errors.containment
        of_rules = (
            wait_for_job_end(finding, containment(subject)) if self._may_wait(rule, finding) else finding
            for (rule, subject), finding in self._rule_findings.items()
        )
        of_lines = map(self._with_device, self.lines.findings)
        of_xids = map(self._with_far_end, self.xid_history.findings(uuids, containment))
        gravest = gravest_by_key([*of_rules, *of_lines, *of_xids])
        result = tuple(self._with_trace(finding, before.get(key)) for key, finding in sorted(gravest.items()))
        changed = result != self.findings
        self.findings = result
        return changed

    def _may_wait(self, rule: str, finding: Finding) -> bool:
        """Return whether the finding is of a memory error, whose reset waits for the job's end if it is contained."""
        if finding.kind is FindingKind.GPU_RECOVERY_ACTION:
            return finding.value == DRAIN_AND_RESET
        return rule in self._count_rules

    def _with_device(self, finding: Finding) -> Finding:
        """Return the finding with the GPU or ports at its subject's PCI address, and the GPUs at its links."""
        address = finding.subject.rpartition(".")[0] or finding.subject
        found = {}
        if (gpu := self._gpus.get(address)) is not None:
            found["uuid"] = gpu.uuid
        ports = [name for name, identity in self._ports.items() if identity.get("pci_bus_id") == finding.subject]
        if ports:
            found["ports"] = ", ".join(ports)
        links = filter(None, finding.evidence.get("links", "").split(", "))
        if gpus := [end for link in links if (end := self._near_end(f"{address} link {link}"))]:
            found["gpus"] = ", ".join(gpus)
        return msgspec.structs.replace(finding, evidence=finding.evidence | found) if found else finding

    def _near_end(self, switch_link: str) -> str:
        """Return the GPU and link at the other end of a switch's link, or nothing if it is unknown."""
        return next(
            (
                _link_subject(bus_id, link)
                for bus_id, ends in self._far_ends.items()
                for link, end in enumerate(ends)
                if switch_link in (end, end.partition(" ")[2])  # without and with the kind of the far device
            ),
            "",
        )

    def _with_far_end(self, finding: Finding) -> Finding:
        """Return the finding of an XID with the far end of the link that the XID names."""
        link = finding.evidence.get("link", "")
        ends = dict(enumerate(self._far_ends.get(finding.subject, ())))
        end = ends.get(int(link)) if link.isdigit() else None
        if not end:
            return finding
        return msgspec.structs.replace(
            finding, message=f"{finding.message}; the link leads to {end}", evidence=finding.evidence | {"far_end": end}
        )

    def _with_trace(self, finding: Finding, before: Finding | None) -> Finding:
        since = finding.since if before is None else before.since
        name = f"{self._node}/{finding.key}/{since}"
        return msgspec.structs.replace(finding, since=since, trace=xxhash.xxh3_64_hexdigest(name.encode()))


def _judged_again(rule: FindingRule, finding: Finding) -> Finding:
    """Return a finding with the judgement of its changed rule."""
    judged = rule.judge(finding)
    if rule.subject:
        judged = msgspec.structs.replace(judged, subject=rule.subject)
    judged = msgspec.structs.replace(judged, threshold=rule.threshold)
    return _with_recovery_action(judged) if rule.kind is FindingKind.GPU_RECOVERY_ACTION else judged


def _with_recovery_action(finding: Finding) -> Finding:
    """Return a finding with the action that the driver asks for by number; an unknown one costs no node."""
    number = int(finding.value or 0)
    finding = msgspec.structs.replace(finding, action=recovery_action(number))
    if is_known_recovery(number):
        return finding
    return msgspec.structs.replace(finding, severity=Severity.WARNING, mode=Mode.weakest(finding.mode, Mode.RECOMMEND))


def _link_subject(bus_id: str, link: int) -> str:
    return f"{bus_id} link {link}"


def _gpu_of_link(subject: str) -> str:
    """Return the PCI address in the subject of a link; other subjects have no such part."""
    return subject.partition(" link ")[0]


def _with_links(finding: Finding, sample: msgspec.Struct) -> Finding:
    """Return a finding about NVLinks with their numbers and far ends."""
    if isinstance(sample, LinkSample):
        links, ends = str(sample.link), sample.far_end
    elif isinstance(sample, GpuSample) and finding.kind is FindingKind.GPU_NVLINK:
        down = sample.nvlink.nvlinks_down_at
        links = ", ".join(map(str, down))
        far_ends = dict(enumerate(sample.nvlink.nvlink_far_ends))
        ends = ", ".join(end for link in down if (end := far_ends.get(link)))
    else:
        return finding
    evidence = {name: text for name, text in (("links", links), ("far_ends", ends)) if text}
    shown = f" (links {links}{f', which lead to {ends}' if ends else ''})" if links else ""
    return msgspec.structs.replace(finding, message=finding.message + shown, evidence=finding.evidence | evidence)
