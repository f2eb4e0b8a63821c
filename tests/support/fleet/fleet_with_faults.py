"""A fleet of six nodes with a history of faults, which sends its messages to a controller process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from everstep.bearer_tokens import TokenRole
from everstep.ids import Version
from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep.wire.v1 import operator_history
from everstep.wire.v1.agent import Domain, Gpu, GpuGauges, Heartbeat, NumberedReport, Register, Reports
from everstep.wire.v1.operator import ProgressHistory
from everstep.wire.v1.training import AnyReport, FindingRaised, RankLost, RankProgress, Resumed, VersionSealed
from tests.support.fleet import in_process_fleet
from tests.support.fleet.controllers import SECRET, bearer, joined, registration
from tests.support.fleet.session_client import SessionOwner, send_message

Ask = Callable[[str, str, Any, dict[str, str]], tuple[int, bytes]]
"""A function from method, path, body and headers to status and answer, as ``ControllerProcess.ask``."""

RACKS = {"node-1": "r1", "node-2": "r1", "node-3": "r1", "node-4": "r2", "node-5": "r2", "node-6": "r3"}
FELL_OFF = msgspec.structs.replace(in_process_fleet.FELL_OFF, subject="GPU-node-1", since=1.0)
WORN_OUT = Finding(
    kind=FindingKind.GPU_ROW_REMAP_FAILURE,
    subject="GPU-node-5",
    severity=Severity.CRITICAL,
    message="a memory row could not be remapped",
    action=Action.REPAIR,
    rule="row-remap-failure",
    source="NVIDIA GPU memory error management",
    since=1.0,
    trace="rows-5",
)


GAUGES = GpuGauges(
    index=0,
    temperature_c=61,
    power_w=644.5,
    power_limit_w=700.0,
    utilization=0.98,
    memory_used_bytes=112 << 30,
    sm_clock_mhz=1755,
    throttled_by=("power_cap",),
    ecc_corrected=0,
    ecc_uncorrected=0,
)


def write_settings(folder: Path) -> Path:
    """Write the settings of a controller with a journal, a budget of one eviction, and long silence limits."""
    file = folder / "settings.toml"
    file.write_text(
        f'journal_dir = "{folder / "journal"}"\n\n'
        "[policy.liveness]\nsuspect_after_s = 600.0\nsuspect_after_max_s = 1000.0\nlost_after_s = 2000.0\n"
        "[policy.regroups]\nresume_deadline_s = 600.0\nresume_deadline_max_s = 3600.0\n[policy.budget]\nshare = 0.1\n"
    )
    return file


class FleetWithFaults:
    """Six nodes. Job ``llama`` lost a rank, and node-1 with a failed GPU; the eviction of node-5 is deferred."""

    def __init__(self, ask: Ask, owner: SessionOwner, secret: bytes = SECRET) -> None:
        self._ask = ask
        self._owner = owner
        self._secret = secret
        self._numbers: dict[str, int] = {}
        self._heartbeats = 1000  # beyond the numbers of the heartbeats below
        for node in RACKS:
            self._register(node)
        for node in ("node-1", "node-2", "node-4"):
            self.report(node, joined("llama", 1.0, nodes=2))
        self._report_resumed(1, "node-1", "node-2")
        lost = RankLost(job="llama", at=1.0, generation=1, rank=1, local_rank=0, detail="killed", signal=9, trace="k-1")
        self.report("node-2", lost)
        self._report_resumed(2, "node-1", "node-2")
        self._report_sealed(2, "node-1", "node-2")
        self._report_progress(2, "node-1", "node-2")
        self.report("node-1", FindingRaised(finding=FELL_OFF))
        self._report_resumed(3, "node-4", "node-2")
        self._report_progress(3, "node-4", "node-2")
        self.report("node-5", FindingRaised(finding=WORN_OUT))
        self._wait_for_cordon()

    def report(self, node: str, body: AnyReport) -> None:
        number = self._numbers[node] = self._numbers.get(node, 0) + 1
        self._send(node, Reports(incarnation=1, reports=(NumberedReport(number=number, body=body),)))

    def beat(self) -> None:
        """Send one heartbeat of every node without findings, so that no node is lost meanwhile."""
        self._heartbeats += 1
        for node in RACKS:
            self._send(node, Heartbeat(incarnation=1, seq=self._heartbeats, sent_at=0.0))

    def _send(self, node: str, message: Register | Heartbeat | Reports) -> None:
        status, answer = send_message(self._owner, node, message, bearer(TokenRole.AGENT, node, self._secret))
        assert status == 200, answer

    def _register(self, node: str) -> None:
        gpu = Gpu(
            index=0,
            uuid=f"GPU-{node}",
            name="NVIDIA H200",
            pci_bus_id="0000:1b:00.0",
            memory_bytes=141 << 30,
            serial=f"16524{node[-1]}",
        )
        message = registration(
            node, gpus=(gpu,), domain=Domain(rack=RACKS[node]), labels={"pool": "train"}, agent_version="0.1.0"
        )
        self._send(node, message)
        self._send(node, Heartbeat(incarnation=1, seq=1, sent_at=0.0, findings=(), gpu_gauges=(GAUGES,)))

    def _report_resumed(self, generation: int, *nodes: str) -> None:
        restored = Version(1, 1) if generation > 1 else None
        phases = {"abort": 0.01, "rendezvous": 0.06, "restore": 0.03, "first_step": 0.04}
        for rank, node in enumerate(nodes):
            report = Resumed(
                job="llama", at=1.0, generation=generation, rank=rank, step=2, restored=restored, phases_s=phases
            )
            self.report(node, report)

    def _report_sealed(self, generation: int, *nodes: str) -> None:
        for rank, node in enumerate(nodes):
            report = VersionSealed(
                job="llama",
                at=1.0,
                generation=generation,
                rank=rank,
                version=Version(generation, 2),
                bytes=21 << 30,
                durable=True,
                commit_candidate=True,
                digests={"world": "d0"},
            )
            self.report(node, report)

    def _report_progress(self, generation: int, *nodes: str) -> None:
        for rank, node in enumerate(nodes):
            progress = RankProgress(
                job="llama", generation=generation, rank=rank, step=7 * generation, step_s=0.04, loss=2.25
            )
            self._send(node, Heartbeat(incarnation=1, seq=generation, sent_at=0.0, ranks=(progress,)))

    def wait_for_progress(self) -> None:
        """Wait until the controller has taken a sample of the job's progress, which it does twice a second."""
        self._wait_for("/v1/jobs/llama/progress", lambda body: msgspec.json.decode(body, type=ProgressHistory).samples)

    def _wait_for_cordon(self) -> None:
        """Wait for a cordon, since remediations are carried out beside the controller's loop."""
        path, kind = "/v1/remediations?remediation_state=confirmed", operator_history.RemediationList
        self._wait_for(path, lambda body: msgspec.json.decode(body, type=kind).remediations)

    def _wait_for(self, path: str, condition: Callable[[bytes], object]) -> None:
        """Wait until the answer to a GET request meets a condition."""
        deadline = time.perf_counter() + 60.0
        while True:
            _, body = self._ask("GET", path, None, bearer(TokenRole.VIEWER, "vera", self._secret))
            if condition(body):
                return
            assert time.perf_counter() < deadline, body
            time.sleep(0.01)
