"""A fleet that feeds events to the decision core, keeps its effects, and checks invariants after every event."""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.ids import Version
from everstep.vocabulary import AuditKind, AuditRole, Finding, JobState, NodeState, RankActivity
from everstep.wire.v1.agent import Domain, Gpu, Register
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import (
    AuditsClean,
    AuditStatement,
    CollectiveFailed,
    FindingCleared,
    FindingRaised,
    GenerationSpec,
    JobSpec,
    LauncherJoined,
    LauncherLeaving,
    LauncherLeft,
    PeerConnectionLost,
    ProbeFinished,
    RankFinished,
    RankLost,
    RankProgress,
    RankStalled,
    RankUnresponsive,
    Resumed,
    UserError,
    VersionSealed,
)
from everstep_controller.core.effects import AppendToEventLog, Effect, PutGeneration, PutVerdict, PutVersion, Send
from everstep_controller.core.engine import HeartbeatResult, apply_heartbeat, handle, next_deadline
from everstep_controller.core.events import (
    AgentRegistered,
    ControllerStarted,
    Event,
    HeartbeatChanged,
    NodeDisconnected,
    NodeSeen,
    OperatorAction,
    OperatorCommand,
    ReportArrived,
    Tick,
)
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import FleetRecord, JobRecord, NodeRecord, VersionRecord
from everstep_controller.core.startup import restore_state
from everstep_controller.core.state import FleetState
from everstep_controller.policy.rulebook import with_rules
from tests.support.fleet import invariants

START = 1_700_000_000.0
ENTROPY = "ab" * 32
STEP_S = 0.05


class CoreFleet:
    """The core with a clock, and short methods for the messages of nodes and ranks.

    ``effects`` holds all effects so far. ``invariants.check`` runs after every event. ``pass_solo_diagnostics``: report
    success of the diagnostics that a node runs alone.
    """

    def __init__(self, policy: CorePolicy | None = None) -> None:
        self.policy = with_rules(policy or CorePolicy.lab_preset())
        self.pass_solo_diagnostics = True
        self.state: FleetState = restore_state(self.policy)
        self.now = START
        self.effects: list[Effect] = []
        self.incarnations: dict[str, int] = {}
        self.launchers: dict[tuple[str, str], int] = {}
        self.number = 0
        self.traces = 0
        self.epoch = 0
        self.feed(ControllerStarted())

    def feed(self, event: Event) -> list[Effect]:
        """Handle one event, keep its effects, and return them."""
        effects = handle(self.state, event, self.now)
        invariants.check(self.state)
        self.effects += effects
        self._report_solo_diagnostics(effects)
        return effects

    def _report_solo_diagnostics(self, effects: list[Effect]) -> None:
        """Report success of the diagnostics that nodes run alone, if ``pass_solo_diagnostics`` is set."""
        for effect in effects if self.pass_solo_diagnostics else ():
            if isinstance(effect, Send) and isinstance(effect.body, RunProbe) and len(effect.body.nodes) == 1:
                self.report(effect.node, ProbeFinished(probe=effect.body.probe, ok=True))

    def touch(self, node: str, *ranks: RankProgress) -> HeartbeatResult:
        """Send a heartbeat without findings, as an event if it has consequences."""
        incarnation = self.incarnations[node]
        result = apply_heartbeat(self.state, node, incarnation, self.now, ranks)
        if result is HeartbeatResult.NEEDS_EVENT:
            self.feed(HeartbeatChanged(node=node, incarnation=incarnation, ranks=ranks, trace=self.trace()))
        elif node in self.state.rejoin_window.unseen_nodes:
            self.mark_seen(node)
        return result

    def advance(self, seconds: float, *beating: str) -> list[Effect]:
        """Let time pass, with a Tick at every deadline, and a heartbeat each second of the nodes ``beating``."""
        before, end = len(self.effects), self.now + seconds
        beat = self.now
        while self.now < end:
            if self.now >= beat:
                for node in beating:
                    self.touch(node)
                beat += 1.0
            due = next_deadline(self.state)
            self.now = min(end, beat, max(self.now + 1e-6, end if due is None else due))
            self.feed(Tick(trace=self.trace()))
        return self.effects[before:]

    def stop_controller(self, seconds: float) -> list[Effect]:
        """Stop the controller for a while. Its late Tick comes before the heartbeats that wait unread."""
        self.now += seconds
        return self.feed(Tick(lag_s=seconds, trace=self.trace()))

    def trace(self) -> str:
        self.traces += 1
        return f"t{self.traces}"

    def restart(self) -> list[Effect]:
        """Restart the controller from the stored records in their wire form."""
        nodes = [msgspec.json.decode(msgspec.json.encode(n), type=NodeRecord) for n in self.state.nodes.values()]
        jobs = [msgspec.json.decode(msgspec.json.encode(j), type=JobRecord) for j in self.state.jobs.values()]
        fleet = msgspec.json.decode(msgspec.json.encode(self.state.fleet), type=FleetRecord)
        versions = [
            msgspec.json.decode(msgspec.json.encode(e.doc), type=VersionRecord)
            for e in self.effects
            if isinstance(e, PutVersion)
        ]
        self.state = restore_state(self.policy, fleet, nodes, jobs, versions)
        return self.feed(ControllerStarted(epoch=self.epoch, trace=self.trace()))

    def register(
        self, *nodes: str, domain: Domain | None = None, findings: tuple[Finding, ...] = (), **more: Any
    ) -> None:
        """Register agents. A known node begins its next life."""
        for node in nodes:
            self.incarnations[node] = self.incarnations.get(node, 0) + 1
            gpu = Gpu(index=0, uuid=f"GPU-{node}", name="virtual", pci_bus_id="0", memory_bytes=1 << 30)
            fields = {"gpus": (gpu,), "boot_id": "boot-1"} | more
            message = Register(
                protocols=(1,),
                node=node,
                incarnation=self.incarnations[node],
                agent_version="1",
                vault=f"{node}:7000",
                domain=domain or Domain(),
                findings=findings,
                **fields,
            )
            self.feed(AgentRegistered(register=message, trace=self.trace()))

    def beat(self, node: str, *findings: Finding, ranks: tuple[RankProgress, ...] = ()) -> list[Effect]:
        """Send a heartbeat with findings as an event."""
        event = HeartbeatChanged(
            node=node, incarnation=self.incarnations[node], findings=findings, ranks=ranks, trace=self.trace()
        )
        return self.feed(event)

    def disconnect(self, node: str) -> list[Effect]:
        """Close the connection of a node's agent."""
        return self.feed(NodeDisconnected(node=node, incarnation=self.incarnations[node], trace=self.trace()))

    def mark_seen(self, node: str, *others: str) -> list[Effect]:
        """Report that the controller received messages of these nodes again."""
        more = tuple((other, self.incarnations[other]) for other in others)
        return self.feed(NodeSeen(node=node, incarnation=self.incarnations[node], others=more, trace=self.trace()))

    def report(self, node: str, body: Any) -> list[Effect]:
        self.number += 1
        event = ReportArrived(
            node=node,
            incarnation=self.incarnations[node],
            number=self.number,
            body=body,
            entropy=ENTROPY,
            trace=self.trace(),
        )
        return self.feed(event)

    def lose_peer(self, node: str, peer: str, job: str = "job") -> list[Effect]:
        """Report that the vault on ``node`` cannot reach the one on ``peer`` any more."""
        return self.report(node, PeerConnectionLost(job=job, at=self.now, peer=peer, detail="connection refused"))

    def raise_finding(self, node: str, finding: Finding) -> list[Effect]:
        return self.report(node, FindingRaised(finding=finding))

    def clear_finding(self, node: str, key: str) -> list[Effect]:
        return self.report(node, FindingCleared(key=key))

    def probe_result(self, node: str, ok: bool = True, detail: str = "") -> list[Effect]:
        """Report the node's result of the newest probe in which it takes part."""
        name = next(name for name, probe in reversed(self.state.diagnostics.probes.items()) if node in probe.nodes)
        return self.report(node, ProbeFinished(probe=name, ok=ok, detail=detail, rows=((8, 1e-4, 1e6),), started=True))

    def finish_probe(self, candidate: str, *, ok: bool) -> list[Effect]:
        """Report the newest probe of ``candidate`` from all sides, until it is decided."""
        before = len(self.effects)
        name, probe = next(
            (n, p) for n, p in reversed(self.state.diagnostics.probes.items()) if p.tested_node == candidate
        )
        for node in probe.nodes:
            if name in self.state.diagnostics.probes:
                self.report(node, ProbeFinished(probe=name, ok=ok, started=True, detail="" if ok else "timed out"))
        return self.effects[before:]

    def order(self, kind: OperatorAction, **subject: Any) -> list[Effect]:
        return self.feed(OperatorCommand(action=kind, actor="ada", reason="because", trace=self.trace(), **subject))

    def join(self, *nodes: str, job: str = "job", generation: int = 0, again: bool = False, **spec: Any) -> None:
        """Let launchers offer their nodes. ``again``: the same launchers after a reconnect."""
        for node in nodes:
            life = self.launchers.get((job, node), 0)
            self.launchers[job, node] = life if again else life + 1
            report = LauncherJoined(
                job=job,
                at=self.now,
                spec=JobSpec(job=job, **spec) if spec or job not in self.state.jobs else self.state.jobs[job].spec,
                launcher=self.launchers[job, node],
                store=f"{node}:8000",
                generation=generation,
            )
            self.report(node, report)

    def leave(self, node: str, orderly: bool = False, job: str = "job") -> list[Effect]:
        life = self.launchers[job, node]
        return self.report(node, LauncherLeft(job=job, at=self.now, launcher=life, orderly=orderly))

    def announce_leaving(
        self, *nodes: str, ranks_ended: bool = False, is_notice: bool = False, grace_s: float = 30.0
    ) -> list[Effect]:
        """Report that the launchers on these nodes received SIGTERM or a notice of their end."""
        before = len(self.effects)
        for node in nodes:
            report = LauncherLeaving(
                job="job",
                at=self.now,
                launcher=self.launchers["job", node],
                cause="SIGUSR1" if is_notice else "SIGTERM",
                grace_s=grace_s,
                ranks_ended=ranks_ended,
                is_notice=is_notice,
            )
            self.report(node, report)
        return self.effects[before:]

    def start(self, nodes: int = 4, spares: int = 0, **spec: Any) -> None:
        """Start a job on ``nodes`` nodes n1, n2, ... in generation 1, which has resumed, with ``spares`` more nodes."""
        names = [f"n{i + 1}" for i in range(nodes + spares)]
        shape = {"min_nodes": 1, "max_nodes": nodes} | spec
        self.register(*names)
        for node in names:
            self.beat(node)
        self.join(*names[:nodes], **shape)
        self.resume()
        if spares:
            self.join(*names[nodes:], **shape)

    def resume(self, job: str = "job", restored: Version | None = None, step: int = 1) -> None:
        """Report the first step of every rank in the current generation."""
        spec = self.spec(job)
        for member in spec.roster:
            phases = {"abort": 0.005, "rendezvous": 0.02, "restore": 0.01, "first_step": STEP_S}
            report = Resumed(
                job=job,
                at=self.now,
                generation=spec.number,
                rank=member.rank,
                step=step,
                restored=restored,
                phases_s=phases,
            )
            self.report(member.node, report)
        self.progress(step, job=job)

    def progress(self, step: int, job: str = "job", step_s: float = STEP_S) -> None:
        spec = self.running(job)
        for member in spec.roster:
            self.progress_of(member.rank, step, job, step_s, spec)

    def progress_of(
        self,
        rank: int,
        step: int,
        job: str = "job",
        step_s: float = STEP_S,
        spec: GenerationSpec | None = None,
        started_step: int = 0,
    ) -> None:
        """Report a rank's step. ``spec``: the rank's generation; the running one by default."""
        spec = spec or self.running(job)
        progress = RankProgress(
            job=job, generation=spec.number, rank=rank, step=step, step_s=step_s, started_step=started_step
        )
        self.touch(spec.roster[rank].node, progress)

    def train(self, seconds: int, busy: dict[int, float], job: str = "job", step_s: float = STEP_S) -> None:
        """Let all nodes beat and all ranks step together. ``busy``: factors on the ranks' own time, 1 by default."""
        step = self.state.job_runtime[job].progress.furthest_step or 0
        longest = step_s * max(busy.values(), default=1.0)
        for second in range(seconds):
            self.advance(1.0, *self.state.nodes)
            spec, now_at = self.running(job), step + int((second + 1) / longest)
            for member in spec.roster:
                busy_s = step_s * busy.get(member.rank, 1.0)
                progress = RankProgress(
                    job=job, generation=spec.number, rank=member.rank, step=now_at, step_s=longest, busy_s=busy_s
                )
                self.touch(member.node, progress)

    def seal(
        self,
        step: int,
        *ranks: int,
        job: str = "job",
        durable: bool = True,
        commit_candidate: bool = True,
        digests: dict[int, str] | None = None,
        generation: int | None = None,
        copied: bool = False,
    ) -> list[Effect]:
        """Let ``ranks`` (default: all) seal the version after ``step``, with equal digests by default.

        ``copied``: each reports that its share is copied to the nodes that the generation chose.
        """
        spec, before = self.running(job), len(self.effects)
        for member in spec.roster:
            if ranks and member.rank not in ranks:
                continue
            digest = "d0" if digests is None else digests.get(member.rank, "d0")
            self.seal_one(
                step,
                member.rank,
                job,
                generation,
                spec,
                durable=durable,
                commit_candidate=commit_candidate,
                digests={"world": digest} if digest else {},
                full_copies=tuple(spec.replica_nodes.get(member.node, ())) if copied else (),
            )
        return self.effects[before:]

    def seal_one(
        self,
        step: int,
        rank: int,
        job: str = "job",
        generation: int | None = None,
        spec: GenerationSpec | None = None,
        **more: Any,
    ) -> list[Effect]:
        """Let one rank seal its share of the version after ``step``.

        ``spec``: its generation; the running one by default. ``more``: further fields, or other values.
        """
        spec = spec or self.running(job)
        number = spec.number if generation is None else generation
        fields = {"bytes": 100, "durable": True, "commit_candidate": True} | more
        report = VersionSealed(
            job=job, at=self.now, generation=number, rank=rank, version=Version(number, step), **fields
        )
        return self.report(spec.roster[rank].node, report)

    def state_result(
        self,
        rank: int,
        owner: int,
        step: int,
        *,
        original: str = "",
        digest: str = "",
        job: str = "job",
        spec: GenerationSpec | None = None,
        role: AuditRole | None = None,
        node: str = "",
        **more: Any,
    ) -> list[Effect]:
        """Report a rank's result in an audit of ``owner``'s work. The peer is the rank after the owner."""
        spec = spec or self.running(job)
        guess = AuditRole.PEER if rank == (owner + 1) % spec.world_size else AuditRole.ARBITER
        fields: dict[str, Any] = {
            "audit": AuditKind.PEER_REPLAY,
            "unit": "layers.3 backward",
            "generation": spec.number,
        } | more
        report = AuditStatement(
            job=job,
            at=self.now,
            rank=rank,
            step=step,
            owner=owner,
            role=role or (AuditRole.OWNER if rank == owner else guess),
            original=original,
            digest=digest,
            **fields,
        )
        return self.report(node or spec.node_of(rank), report)

    def audit(
        self,
        owner: int,
        step: int,
        original: str,
        again: str,
        *others: str,
        job: str = "job",
        settle: bool = True,
        **more: Any,
    ) -> list[Effect]:
        """Report an audit with a difference: the owner's original and repeated result, the peer's and the arbiter's.

        ``settle``: wait until it is judged.
        """
        spec, before = self.running(job), len(self.effects)
        fields: dict[str, Any] = {"job": job, "spec": spec, "expects_arbiter": len(others) > 1} | more
        self.state_result(owner, owner, step, original=original, digest=again, **fields)
        for at, digest in enumerate(others):
            self.state_result((owner + 1 + at) % spec.world_size, owner, step, digest=digest, **fields)
        if settle and self.state.job_runtime[job].audits.cases:
            self.settle_audits()
        return self.effects[before:]

    def settle_audits(self) -> list[Effect]:
        """Let the time pass in which other ranks may report results of the same step."""
        return self.advance(self.policy.audits.case_s + 0.1, *self.state.liveness.reachable_nodes)

    def audited(self, step: int, *ranks: int, job: str = "job") -> list[Effect]:
        """Report that all work of ``ranks`` (default: all) since ``step`` was audited."""
        spec, before = self.running(job), len(self.effects)
        for member in spec.roster:
            if not ranks or member.rank in ranks:
                report = AuditsClean(job=job, at=self.now, generation=spec.number, rank=member.rank, step=step)
                self.report(member.node, report)
        return self.effects[before:]

    def lose_rank(
        self, rank: int, job: str = "job", replacement: bool = True, generation: int | None = None
    ) -> list[Effect]:
        spec = self.running(job)
        member = spec.roster[rank]
        report = RankLost(
            job=job,
            at=self.now,
            generation=spec.number if generation is None else generation,
            rank=rank,
            local_rank=member.local_rank,
            detail="end of file",
            signal=9,
            has_replacement=replacement,
        )
        return self.report(member.node, report)

    def fail_collective(self, rank: int, job: str = "job", generation: int | None = None) -> list[Effect]:
        spec = self.running(job)
        number = spec.number if generation is None else generation
        report = CollectiveFailed(job=job, at=self.now, generation=number, rank=rank, step=1, detail="reset by peer")
        return self.report(spec.roster[rank].node, report)

    def stall(
        self,
        rank: int,
        step: int = 5,
        collectives: int = 10,
        job: str = "job",
        stalled_s: float = 1.0,
        started_step: int = 0,
        **state: Any,
    ) -> list[Effect]:
        """Report that a rank makes no progress. ``state``: further fields of the report."""
        spec = self.running(job)
        report = RankStalled(
            job=job,
            at=self.now,
            generation=spec.number,
            rank=rank,
            step=step,
            collectives=collectives,
            stalled_s=stalled_s,
            threshold_s=1.0,
            stacks="Thread main: all_reduce",
            begun=started_step,
            **state,
        )
        return self.report(spec.roster[rank].node, report)

    def unresponsive(
        self, rank: int, job: str = "job", generation: int | None = None, activity: RankActivity | None = None
    ) -> list[Effect]:
        spec = self.running(job)
        member = spec.roster[rank]
        report = RankUnresponsive(
            job=job,
            at=self.now,
            generation=spec.number if generation is None else generation,
            rank=rank,
            local_rank=member.local_rank,
            unresponsive_s=1.0,
            process_state="T (stopped)" if activity in (None, RankActivity.STOPPED) else "R",
            activity=activity,
        )
        return self.report(member.node, report)

    def raise_user_error(self, rank: int, job: str = "job", started: int | None = None) -> list[Effect]:
        spec = self.running(job)
        report = UserError(
            job=job,
            at=self.now,
            generation=spec.number,
            rank=rank,
            step=3,
            error="ValueError: bad batch",
            traceback="Traceback ...",
            started_step=started,
        )
        return self.report(spec.roster[rank].node, report)

    def finish(
        self,
        *ranks: int,
        job: str = "job",
        step: int = 9,
        started_step: int | None = None,
        collectives: int | None = None,
        losses: dict[int, float] | None = None,
    ) -> None:
        spec = self.running(job)
        for member in spec.roster:
            if not ranks or member.rank in ranks:
                report = RankFinished(
                    job=job,
                    at=self.now,
                    generation=spec.number,
                    rank=member.rank,
                    step=step,
                    started_step=started_step,
                    collectives=collectives,
                    loss=(losses or {}).get(member.rank),
                )
                self.report(member.node, report)

    def job(self, job: str = "job") -> JobRecord:
        return self.state.jobs[job]

    def job_state(self, job: str = "job") -> JobState:
        return self.state.jobs[job].status.state

    def node_state(self, node: str) -> NodeState:
        return self.state.nodes[node].state

    def spec(self, job: str = "job") -> GenerationSpec:
        spec = self.state.jobs[job].generation
        assert spec is not None
        return spec

    def running(self, job: str = "job") -> GenerationSpec:
        return self.state.jobs[job].outgoing_generation or self.spec(job)

    def seats(self, job: str = "job") -> list[str]:
        return list(dict.fromkeys(member.node for member in self.spec(job).roster))


def generations(effects: list[Effect]) -> list[GenerationSpec]:
    """Return the generations opened in ``effects``."""
    return [effect.spec for effect in effects if isinstance(effect, PutGeneration)]


def sent(effects: list[Effect], kind: type[Any]) -> dict[str, Any]:
    """Return for each node the last directive of a kind in ``effects``."""
    return {
        effect.node: effect.body for effect in effects if isinstance(effect, Send) and isinstance(effect.body, kind)
    }


def decisions(effects: list[Effect]) -> list[tuple[str, str]]:
    """Return (node, decision) of the verdicts in ``effects``."""
    return [(e.verdict.node, str(e.verdict.decision)) for e in effects if isinstance(e, PutVerdict)]


def logged_sentences(effects: list[Effect], kind: str) -> list[str]:
    """Return the sentences of one kind in the event log."""
    return [
        effect.entry.sentence
        for effect in effects
        if isinstance(effect, AppendToEventLog) and effect.entry.kind == kind
    ]
