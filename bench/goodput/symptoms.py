"""Symptoms of each cause of the failure table: a process that ends, a finding, or silence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from everstep.vocabulary import Action, Finding, FindingKind, Severity


class Sign(Enum):
    """What the controller gets to hear of it."""

    PROCESS = "a rank's process ends, and another takes its place"
    FINDING = "ranks end, and a sensor names the part"
    SILENCE = "the machine says nothing any more"
    LIE = "nothing, until digests differ"


@dataclass(frozen=True)
class Symptom:
    sign: Sign
    kind: FindingKind | None = None
    action: Action = Action.NONE

    def finding(self, cause: str, since: float) -> Finding:
        """Return the agent's finding."""
        assert self.kind is not None
        return Finding(
            kind=self.kind,
            subject="GPU-0",
            severity=Severity.CRITICAL,
            message=cause.replace("_", " "),
            action=self.action,
            since=since,
        )


SYMPTOMS = {
    "faulty_gpu": Symptom(Sign.FINDING, FindingKind.GPU_LOST, Action.REPAIR),
    "hbm3": Symptom(Sign.FINDING, FindingKind.GPU_ECC_UNCORRECTABLE, Action.RESET_GPU),
    "software_bug": Symptom(Sign.PROCESS),
    "network_switch_or_cable": Symptom(Sign.SILENCE),
    "host_maintenance": Symptom(Sign.SILENCE),
    "gpu_sram": Symptom(Sign.FINDING, FindingKind.GPU_ROW_REMAP_FAILURE, Action.REPAIR),
    "gsp": Symptom(Sign.FINDING, FindingKind.GPU_XID, Action.REBOOT_NODE),
    "nic": Symptom(Sign.FINDING, FindingKind.NETWORK_PORT_DOWN, Action.REPAIR),
    "nccl_watchdog_timeout": Symptom(Sign.PROCESS),
    "silent_data_corruption": Symptom(Sign.LIE),
    "thermal": Symptom(Sign.FINDING, FindingKind.GPU_TEMPERATURE, Action.DRAIN),
    "host_parts": Symptom(Sign.SILENCE),
    "agent_restart": Symptom(Sign.SILENCE),
    "network_blip": Symptom(Sign.SILENCE),
}
