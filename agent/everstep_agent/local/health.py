"""Sum up a node's findings: its health, and the file that shell scripts read it from."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from everstep.host.private_files import write_private
from everstep.vocabulary import Action, Finding, Mode, Severity
from everstep.wire.v1.node_status import GpuSummary, NodeHealth, PortSummary
from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.drivers.samples import PortPresence
from everstep_agent.sensors.gauges import MAX_POLL_AGE_S
from everstep_agent.sensors.sensor_messages import PollResult, SensorReport

log = logging.getLogger(__name__)

NODE_ACTIONS = (Action.RESET_GPU, Action.REBOOT_NODE, Action.DRAIN, Action.REPAIR)
"""Actions on the node. A restart of a rank leaves the node in service."""

HEALTH_FILE_INTERVAL_S = 10.0
"""Seconds after which an unchanged health file is written again, so that its age tells that the agent lives."""

MAX_REASON_CHARACTERS = 200
"""Length of the reason in the health file. Slurm shows it beside the node."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 .,:;/_()%+=-]")


def asks_for_remedy(finding: Finding) -> bool:
    """Return whether the finding recommends or orders an action on the node."""
    return finding.severity is Severity.CRITICAL and finding.action in NODE_ACTIONS


def judge_health(findings: Iterable[Finding], polled_at: float, now: float) -> NodeHealth:
    """Return the node's health; ``polled_at`` and ``now`` in wall seconds."""
    worse = [finding for finding in findings if finding.severity is not Severity.INFO]
    if any(asks_for_remedy(finding) and finding.mode is Mode.ENFORCE for finding in worse):
        return NodeHealth.UNFIT
    if now - polled_at > MAX_POLL_AGE_S:
        return NodeHealth.UNKNOWN
    return NodeHealth.DEGRADED if worse else NodeHealth.HEALTHY


def health_reason(findings: Iterable[Finding]) -> str:
    """Return the gravest finding as one line, or "" if none is worse than information."""
    worse = [finding for finding in findings if finding.severity is not Severity.INFO]
    if not worse:
        return ""
    enforced = (finding for finding in worse if asks_for_remedy(finding) and finding.mode is Mode.ENFORCE)
    gravest = next(enforced, max(worse, key=lambda finding: finding.severity.gravity))
    return f"{gravest.key}: {gravest.message}"[:4096]


def gpu_summaries(poll: PollResult) -> tuple[GpuSummary, ...]:
    """Return the GPUs of a poll, for people."""
    names = {gpu.pci_bus_id: gpu.name for gpu in poll.known_gpus}
    return tuple(_gpu_summary(gpu, names.get(gpu.pci_bus_id, "")) for gpu in poll.gpus)


def _gpu_summary(gpu: GpuSample, name: str) -> GpuSummary:
    return GpuSummary(
        index=gpu.index,
        pci_bus_id=gpu.pci_bus_id,
        name=name,
        uuid=gpu.uuid,
        error=gpu.error[:4096],
        temperature_c=gpu.temperatures.temperature_c,
        power_w=gpu.power.power_w,
        utilization=gpu.utilization.gpu_utilization,
        memory_used_bytes=gpu.memory.memory_used_bytes,
        memory_total_bytes=gpu.memory.memory_total_bytes,
    )


def port_summaries(poll: PollResult) -> tuple[PortSummary, ...]:
    """Return the ports of a poll that are in this machine and namespace, for people."""
    return tuple(
        PortSummary(name=port.name, kind=port.kind, role=str(port.role), is_up=port.up, rate_gbps=port.rate_gbps)
        for port in poll.ports
        if port.presence is PortPresence.HERE
    )


class HealthFile:
    """Keep the file ``health`` in the run directory: lines ``NAME=VALUE`` with health, time and reason.

    A script that cannot afford the start of Python reads it. The reason has no characters that a shell or Slurm would
    interpret.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = ""
        self._written_at = 0.0
        self._has_failed = False

    def update(self, report: SensorReport, findings: Iterable[Finding], now: float) -> None:
        """Write the file if the health has changed, or the file is old; ``now`` in wall seconds."""
        findings = tuple(findings)
        health = judge_health(findings, report.polled_at, now)
        reason = _NOT_PLAIN.sub(" ", health_reason(findings))[:MAX_REASON_CHARACTERS]
        content = f"health={health}\nreason={reason}\n"
        if content == self._written and 0 <= now - self._written_at < HEALTH_FILE_INTERVAL_S:
            return
        try:
            write_private(self._path, f"at={int(now)}\n{content}".encode())
        except OSError as error:
            if not self._has_failed:
                log.warning("%s cannot be written: %s", self._path, error)
            self._has_failed = True
        else:
            self._written, self._written_at, self._has_failed = content, now, False
