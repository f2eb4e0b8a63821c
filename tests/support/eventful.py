"""A small fleet that has lived through something, spoken for over HTTP."""

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
from tests.support import spoken
from tests.support.controllers import SECRET, bearer, joined, registration
from tests.support.sessions import Doors, tell

Ask = Callable[[str, str, Any, dict[str, str]], tuple[int, bytes]]
"""Method, path, body and headers of a request; its status and answer. As ``ControllerProcess.ask``."""

RACKS = {"node-1": "r1", "node-2": "r1", "node-3": "r1", "node-4": "r2", "node-5": "r2", "node-6": "r3"}
FELL_OFF = msgspec.structs.replace(spoken.FELL_OFF, subject="GPU-node-1", since=1.0)
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
    """Of a controller that keeps a journal, evicts one node and no second, and waits for words for ever."""
    file = folder / "settings.toml"
    file.write_text(
        f'journal_dir = "{folder / "journal"}"\n\n'
        "[policy]\nsuspect_after_s = 600.0\nsuspect_after_max_s = 1000.0\nlost_after_s = 2000.0\n"
        "resume_deadline_s = 600.0\nresume_deadline_max_s = 3600.0\neviction_share = 0.1\n"
    )
    return file


class EventfulFleet:
    """Six nodes, of which job ``llama`` lost a rank, and then node-1 to a fallen GPU; node-5, sick as well, is held."""

    def __init__(self, ask: Ask, door: Doors, secret: bytes = SECRET) -> None:
        self._ask = ask
        self._door = door
        self._secret = secret
        self._numbers: dict[str, int] = {}
        self._beats = 1000  # beyond the numbers of the beats below
        for node in RACKS:
            self._appear(node)
        for node in ("node-1", "node-2", "node-4"):
            self.report(node, joined("llama", 1.0, nodes=2))
        self._resumed(1, "node-1", "node-2")
        lost = RankLost(job="llama", at=1.0, generation=1, rank=1, local_rank=0, detail="killed", signal=9, trace="k-1")
        self.report("node-2", lost)
        self._resumed(2, "node-1", "node-2")
        self._sealed(2, "node-1", "node-2")
        self._stepped(2, "node-1", "node-2")
        self.report("node-1", FindingRaised(finding=FELL_OFF))
        self._resumed(3, "node-4", "node-2")
        self._stepped(3, "node-4", "node-2")
        self.report("node-5", FindingRaised(finding=WORN_OUT))
        self._wait_for_cordon()

    def report(self, node: str, body: AnyReport) -> None:
        number = self._numbers[node] = self._numbers.get(node, 0) + 1
        self._tell(node, Reports(incarnation=1, reports=(NumberedReport(number=number, body=body),)))

    def beat(self) -> None:
        """Send one quiet heartbeat of every node, so that none of them is lost meanwhile."""
        self._beats += 1
        for node in RACKS:
            self._tell(node, Heartbeat(incarnation=1, seq=self._beats, sent_at=0.0))

    def _tell(self, node: str, message: Register | Heartbeat | Reports) -> None:
        status, answer = tell(self._door, node, message, bearer(TokenRole.AGENT, node, self._secret))
        assert status == 200, answer

    def _appear(self, node: str) -> None:
        gpu = Gpu(
            index=0,
            uuid=f"GPU-{node}",
            name="NVIDIA H200",
            pci_bus_id="0000:1b:00.0",
            memory_bytes=141 << 30,
            serial=f"16524{node[-1]}",
        )
        words = registration(
            node, gpus=(gpu,), domain=Domain(rack=RACKS[node]), labels={"pool": "train"}, agent_version="0.1.0"
        )
        self._tell(node, words)
        self._tell(node, Heartbeat(incarnation=1, seq=1, sent_at=0.0, findings=(), gpu_gauges=(GAUGES,)))

    def _resumed(self, generation: int, *nodes: str) -> None:
        restored = Version(1, 1) if generation > 1 else None
        phases = {"abort": 0.01, "rendezvous": 0.06, "restore": 0.03, "first_step": 0.04}
        for rank, node in enumerate(nodes):
            words = Resumed(
                job="llama", at=1.0, generation=generation, rank=rank, step=2, restored=restored, phases_s=phases
            )
            self.report(node, words)

    def _sealed(self, generation: int, *nodes: str) -> None:
        for rank, node in enumerate(nodes):
            words = VersionSealed(
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
            self.report(node, words)

    def _stepped(self, generation: int, *nodes: str) -> None:
        for rank, node in enumerate(nodes):
            done = RankProgress(
                job="llama", generation=generation, rank=rank, step=7 * generation, step_s=0.04, loss=2.25
            )
            self._tell(node, Heartbeat(incarnation=1, seq=generation, sent_at=0.0, ranks=(done,)))

    def wait_for_progress(self) -> None:
        """Wait until the controller has taken a sample of the job's progress, which it does twice a second."""
        self._wait_for("/v1/jobs/llama/progress", lambda body: msgspec.json.decode(body, type=ProgressHistory).samples)

    def _wait_for_cordon(self) -> None:
        """Remedies are carried out beside the loop; what follows from them comes when it comes."""
        path, kind = "/v1/remediations?remediation_state=confirmed", operator_history.RemediationList
        self._wait_for(path, lambda body: msgspec.json.decode(body, type=kind).remediations)

    def _wait_for(self, path: str, found: Callable[[bytes], object]) -> None:
        """Wait until there is something in the answer to a question."""
        deadline = time.perf_counter() + 60.0
        while True:
            _, body = self._ask("GET", path, None, bearer(TokenRole.VIEWER, "vera", self._secret))
            if found(body):
                return
            assert time.perf_counter() < deadline, body
            time.sleep(0.01)
