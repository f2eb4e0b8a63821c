"""One node's jobs as its agent knows them, with recorded peers and a manual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from everstep.clock import ManualClock
from everstep.host.process_activity import ProcessSample
from everstep.vocabulary import GenerationReason
from everstep.wire.v1.directives import KillRank, NewGeneration
from everstep.wire.v1.local import ConnectionRole, Hello, RankExited, RankHeartbeat, WrongProduct
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Holder, JobSpec, LauncherJoined, RestoreRule
from everstep_agent.jobs.local_processes import LocalJob, ProcessEnd
from everstep_agent.jobs.registry import JobRegistry

T = TypeVar("T")
JOB = JobSpec(job="j", max_nodes=2, nproc_per_node=2)


def generation(number: int, *members: tuple[int, str, int], job: str = "j") -> GenerationSpec:
    """Return a generation of the members (rank, node, local rank), by default two ranks on each of two nodes."""
    members = members or ((0, "n1", 0), (1, "n1", 1), (2, "n2", 0), (3, "n2", 1))
    seats = tuple(dict.fromkeys(node for _, node, _ in members))
    return GenerationSpec(
        job=job,
        number=number,
        reason=GenerationReason.FORMED,
        sentence="",
        trace="",
        seats=seats,
        store="127.0.0.1:1",
        store_node="n1",
        restore=RestoreRule(),
        holders=(Holder(node="n1", vault="127.0.0.1:2"),),
        replica_nodes={},
        secret="s" * 16,
        spec=msgspec.structs.replace(JOB, nproc_per_node=len(members) // len(seats)),
        issued_at=0.0,
    )


class FakePeer:
    """A connection that records the sent messages."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sent: list[Any] = []
        self.killed = False
        self.closed = False
        self.end: ProcessEnd | None = None
        self.state = "S"
        self.cpu_share = 0.0

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True

    def handle_death(self, end: ProcessEnd) -> None:
        self.end = end

    def process_state(self) -> str:
        return self.state

    def sample(self, at: float) -> ProcessSample | None:
        return ProcessSample(at=at, state=self.state, cpu_s=self.cpu_share * at) if self.state else None

    def messages_of(self, kind: type[T]) -> list[T]:
        return [m for m in self.sent if isinstance(m, kind)]

    @property
    def generations(self) -> list[int]:
        return [m.spec.number for m in self.messages_of(NewGeneration)]


class Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class NodeJobs:
    """One node's job registry, which records its reports, findings and calls."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.reports: list[Any] = []
        self.findings: list[FindingRaised] = []
        self.configured: list[int] = []
        self.forgotten: list[str] = []
        self.seals_from: dict[str, int] = {}
        self.products: list[WrongProduct] = []
        self._timers: list[Timer] = []
        self._traces = 0
        self._pids = 1000
        self.jobs = JobRegistry(
            "n1", self.clock, self, exit_grace_s=0.003, stopped_after_s=0.3, unresponsive_after_s=1.0
        )

    # --- called by JobRegistry
    def report(self, report: Any) -> None:
        self.reports.append(report)

    def report_finding(self, raised: FindingRaised) -> None:
        self.findings.append(raised)

    def configure_vault_job(self, job: LocalJob) -> None:
        assert job.spec is not None
        self.configured.append(job.oldest_generation)

    def delete_from_vault(self, job: str) -> None:
        self.forgotten.append(job)

    def drop_seals(self, job: str, before_generation: int) -> None:
        self.seals_from[job] = before_generation

    def keep_wrong_product(self, product: WrongProduct) -> None:
        self.products.append(product)

    def new_trace_id(self) -> str:
        self._traces += 1
        return f"t{self._traces}"

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        self._timers.append(Timer(self.clock.monotonic() + delay_s, callback))
        return self._timers[-1]

    # --- called by tests
    def wait(self, seconds: float = 0.01) -> None:
        self.clock.advance(seconds)
        due = [t for t in self._timers if t.at <= self.clock.monotonic() and not t.cancelled]
        self._timers = [t for t in self._timers if t not in due]
        for timer in due:
            timer.call()

    def launcher(self, incarnation: int = 5, job: str = "j") -> FakePeer:
        peer = self.peer(ConnectionRole.LAUNCHER, None, job)
        spec = JobSpec(job=job, max_nodes=2, nproc_per_node=2)
        offer = LauncherJoined(job=job, at=0.0, spec=spec, launcher=incarnation, store="127.0.0.1:1")
        self.jobs.handle_message(peer, offer)
        return peer

    def rank(self, local_rank: int, job: str = "j") -> FakePeer:
        return self.peer(ConnectionRole.RANK, local_rank, job)

    def peer(self, role: ConnectionRole, local_rank: int | None, job: str = "j", pid: int | None = None) -> FakePeer:
        self._pids += 1
        peer = FakePeer(pid or self._pids)
        self.jobs.handle_hello(peer, Hello(protocols=(1,), role=role, job=job, pid=peer.pid, local_rank=local_rank))
        return peer

    def push(self, *bodies: Any) -> None:
        self.jobs.handle_directives(list(bodies))

    def regroup(self, number: int, *members: tuple[int, str, int]) -> None:
        self.push(NewGeneration(spec=generation(number, *members)))

    def heartbeat(self, peer: FakePeer, generation: int, rank: int, step: int = 1) -> None:
        self.jobs.handle_message(peer, RankHeartbeat(generation=generation, rank=rank, step=step, step_s=0.1))

    def reports_of(self, kind: type[T]) -> list[T]:
        return [r for r in self.reports if isinstance(r, kind)]


def kill(generation: int, local_rank: int = 0, rank: int = 0) -> KillRank:
    return KillRank(job="j", generation=generation, rank=rank, local_rank=local_rank, reason="it hangs")


def exited(peer: FakePeer, local_rank: int = 0, *, replacement: bool = True, signal: int | None = 9) -> RankExited:
    code = None if signal is not None else 1
    return RankExited(local_rank=local_rank, pid=peer.pid, exit_code=code, signal=signal, has_replacement=replacement)
