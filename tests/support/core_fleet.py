"""A fleet to drive the decision core with: words in, effects out, invariants checked after every event."""

from __future__ import annotations

from typing import Any

import msgspec
from everstep_controller.core.effects import Audit, Effect, PutGeneration, PutVerdict, PutVersion, Send
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
from everstep_controller.rulebook import with_rules

from everstep.ids import Version
from everstep.vocabulary import AuditLink, AuditRole, Finding, JobState, NodeState, RankActivity
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
from tests.support import invariants

START = 1_700_000_000.0
ENTROPY = "ab" * 32
STEP_S = 0.05


class CoreFleet:
    """The core with a clock, and short words for what nodes and ranks say.

    ``effects`` holds all effects so far; every event is followed by ``invariants.check``. ``solos``: diagnostics that
    a node runs alone pass by themselves.
    """

    def __init__(self, policy: CorePolicy | None = None) -> None:
        self.policy = with_rules(policy or CorePolicy.lab_preset())
        self.solos = True
        self.state: FleetState = restore_state(self.policy)
        self.now = START
        self.effects: list[Effect] = []
        self.incarnations: dict[str, int] = {}
        self.launchers: dict[tuple[str, str], int] = {}
        self.number = 0
        self.traces = 0
        self.epoch = 0
        self.feed(ControllerStarted())

    # --- driving ---------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> list[Effect]:
        """One event; its effects come back and are kept."""
        effects = handle(self.state, event, self.now)
        invariants.check(self.state)
        self.effects += effects
        self._pass_solos(effects)
        return effects

    def _pass_solos(self, effects: list[Effect]) -> None:
        """What nodes are asked to compute by themselves comes out right, unless ``solos`` says otherwise."""
        for effect in effects if self.solos else ():
            if isinstance(effect, Send) and isinstance(effect.body, RunProbe) and len(effect.body.nodes) == 1:
                self.report(effect.node, ProbeFinished(probe=effect.body.probe, ok=True))

    def touch(self, node: str, *ranks: RankProgress) -> HeartbeatResult:
        """A heartbeat that tells of no findings; where something follows from it, as an event."""
        incarnation = self.incarnations[node]
        heard = apply_heartbeat(self.state, node, incarnation, self.now, ranks)
        if heard is HeartbeatResult.NEEDS_EVENT:
            self.feed(HeartbeatChanged(node=node, incarnation=incarnation, ranks=ranks, trace=self.trace()))
        elif node in self.state.unseen_nodes:
            self.hear(node)
        return heard

    def advance(self, seconds: float, *beating: str) -> list[Effect]:
        """Lets time pass: Ticks at every deadline, and a heartbeat a second from the nodes ``beating``."""
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
        """The controller stands still and goes on: a Tick that is so late comes before the beats that wait unread."""
        self.now += seconds
        return self.feed(Tick(lag_s=seconds, trace=self.trace()))

    def trace(self) -> str:
        self.traces += 1
        return f"t{self.traces}"

    def restart(self) -> list[Effect]:
        """The controller dies and comes back with what was stored, through its wire form."""
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

    # --- nodes -----------------------------------------------------------------------------------------------

    def register(
        self, *nodes: str, domain: Domain | None = None, findings: tuple[Finding, ...] = (), **more: Any
    ) -> None:
        """Agents begin a life; a name that is known begins the next one."""
        for node in nodes:
            self.incarnations[node] = self.incarnations.get(node, 0) + 1
            gpu = Gpu(index=0, uuid=f"GPU-{node}", name="virtual", pci_bus_id="0", memory_bytes=1 << 30)
            fields = {"gpus": (gpu,), "boot_id": "boot-1"} | more
            words = Register(
                protocols=(1,),
                node=node,
                incarnation=self.incarnations[node],
                agent_version="1",
                vault=f"{node}:7000",
                domain=domain or Domain(),
                findings=findings,
                **fields,
            )
            self.feed(AgentRegistered(register=words, trace=self.trace()))

    def beat(self, node: str, *findings: Finding, ranks: tuple[RankProgress, ...] = ()) -> list[Effect]:
        words = HeartbeatChanged(
            node=node, incarnation=self.incarnations[node], findings=findings, ranks=ranks, trace=self.trace()
        )
        return self.feed(words)

    def disconnect(self, node: str) -> list[Effect]:
        return self.feed(NodeDisconnected(node=node, incarnation=self.incarnations[node], trace=self.trace()))

    def hear(self, node: str, *others: str) -> list[Effect]:
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
        """The vault on ``node`` cannot reach the one on ``peer`` any more."""
        return self.report(node, PeerConnectionLost(job=job, at=self.now, peer=peer, detail="connection refused"))

    def raise_finding(self, node: str, finding: Finding) -> list[Effect]:
        return self.report(node, FindingRaised(finding=finding))

    def clear_finding(self, node: str, key: str) -> list[Effect]:
        return self.report(node, FindingCleared(key=key))

    def probe_result(self, node: str, ok: bool = True, detail: str = "") -> list[Effect]:
        """The node's answer to the newest probe it takes part in, which it could run."""
        name = next(name for name, probe in reversed(self.state.probes.items()) if node in probe.nodes)
        return self.report(node, ProbeFinished(probe=name, ok=ok, detail=detail, rows=((8, 1e-4, 1e6),), started=True))

    def finish_probe(self, candidate: str, *, ok: bool) -> list[Effect]:
        """All sides of the newest probe that tries ``candidate`` report it, until it is decided."""
        before = len(self.effects)
        name, probe = next((n, p) for n, p in reversed(self.state.probes.items()) if p.tested_node == candidate)
        for node in probe.nodes:
            if name in self.state.probes:
                self.report(node, ProbeFinished(probe=name, ok=ok, started=True, detail="" if ok else "timed out"))
        return self.effects[before:]

    def order(self, kind: OperatorAction, **subject: Any) -> list[Effect]:
        return self.feed(OperatorCommand(action=kind, actor="ada", reason="because", trace=self.trace(), **subject))

    # --- jobs ------------------------------------------------------------------------------------------------

    def join(self, *nodes: str, job: str = "job", generation: int = 0, again: bool = False, **spec: Any) -> None:
        """Launchers offer their nodes; ``again``: the same launchers, after a reconnect."""
        for node in nodes:
            life = self.launchers.get((job, node), 0)
            self.launchers[job, node] = life if again else life + 1
            words = LauncherJoined(
                job=job,
                at=self.now,
                spec=JobSpec(job=job, **spec) if spec or job not in self.state.jobs else self.state.jobs[job].spec,
                launcher=self.launchers[job, node],
                store=f"{node}:8000",
                generation=generation,
            )
            self.report(node, words)

    def leave(self, node: str, orderly: bool = False, job: str = "job") -> list[Effect]:
        life = self.launchers[job, node]
        return self.report(node, LauncherLeft(job=job, at=self.now, launcher=life, orderly=orderly))

    def announce_leaving(
        self, *nodes: str, ranks_ended: bool = False, is_notice: bool = False, grace_s: float = 30.0
    ) -> list[Effect]:
        """The launchers on these nodes received SIGTERM, or the notice of an end."""
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
        """``nodes`` nodes n1, n2, ... with a launcher each, running and resumed in generation 1; ``spares`` more."""
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
        """Every rank of the current generation finishes its first step, and says where it is."""
        spec = self.spec(job)
        for member in spec.roster:
            phases = {"abort": 0.005, "rendezvous": 0.02, "restore": 0.01, "first_step": STEP_S}
            words = Resumed(
                job=job,
                at=self.now,
                generation=spec.number,
                rank=member.rank,
                step=step,
                restored=restored,
                phases_s=phases,
            )
            self.report(member.node, words)
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
        begun: int = 0,
    ) -> None:
        """``spec``: the generation that the rank is in; the running one, unless a beat before has changed that."""
        spec = spec or self.running(job)
        word = RankProgress(job=job, generation=spec.number, rank=rank, step=step, step_s=step_s, started_step=begun)
        self.touch(spec.roster[rank].node, word)

    def train(self, seconds: int, busy: dict[int, float], job: str = "job", step_s: float = STEP_S) -> None:
        """All nodes beat and all ranks step in lock step; a rank is busy ``busy`` times as long as others, or once."""
        step = self.state.job_runtime[job].progress.furthest_step or 0
        longest = step_s * max(busy.values(), default=1.0)
        for second in range(seconds):
            self.advance(1.0, *self.state.nodes)
            spec, now_at = self.running(job), step + int((second + 1) / longest)
            for member in spec.roster:
                busy_s = step_s * busy.get(member.rank, 1.0)
                word = RankProgress(
                    job=job, generation=spec.number, rank=member.rank, step=now_at, step_s=longest, busy_s=busy_s
                )
                self.touch(member.node, word)

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
        """``ranks`` (default: all) seal the version after ``step``; digests by rank in one group, alike by default.

        ``copied``: each says that its share lies where the generation placed its copies.
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
        """One rank seals its share of the version after ``step``. ``spec``: its generation; the running one,
        unless a seal before has changed that. ``more``: other fields, or other values."""
        spec = spec or self.running(job)
        number = spec.number if generation is None else generation
        fields = {"bytes": 100, "durable": True, "commit_candidate": True} | more
        words = VersionSealed(
            job=job, at=self.now, generation=number, rank=rank, version=Version(number, step), **fields
        )
        return self.report(spec.roster[rank].node, words)

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
        """A rank states what it computed for an audit of ``owner``'s work; the peer is the rank after it."""
        spec = spec or self.running(job)
        guess = AuditRole.PEER if rank == (owner + 1) % spec.world_size else AuditRole.ARBITER
        fields = {"link": AuditLink.PEER_REPLAY, "unit": "layers.3 backward", "generation": spec.number} | more
        words = AuditStatement(
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
        return self.report(node or spec.node_of(rank), words)

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
        """An audit that found a difference: what the owner used and got again, what its peer and an arbiter got.

        ``settle``: wait until it is judged.
        """
        spec, before = self.running(job), len(self.effects)
        fields = {"job": job, "spec": spec, "expects_arbiter": len(others) > 1} | more
        self.state_result(owner, owner, step, original=original, digest=again, **fields)
        for at, digest in enumerate(others):
            self.state_result((owner + 1 + at) % spec.world_size, owner, step, digest=digest, **fields)
        if settle and self.state.job_runtime[job].audits.cases:
            self.settle_audits()
        return self.effects[before:]

    def settle_audits(self) -> list[Effect]:
        """Let the time pass in which other ranks may state what they found in the same step."""
        return self.advance(self.policy.audit_case_s + 0.1, *self.state.reachable_nodes)

    def audited(self, step: int, *ranks: int, job: str = "job") -> list[Effect]:
        """``ranks`` (default: all) had all their work since ``step`` audited."""
        spec, before = self.running(job), len(self.effects)
        for member in spec.roster:
            if not ranks or member.rank in ranks:
                words = AuditsClean(job=job, at=self.now, generation=spec.number, rank=member.rank, step=step)
                self.report(member.node, words)
        return self.effects[before:]

    def lose_rank(
        self, rank: int, job: str = "job", replacement: bool = True, generation: int | None = None
    ) -> list[Effect]:
        spec = self.running(job)
        member = spec.roster[rank]
        words = RankLost(
            job=job,
            at=self.now,
            generation=spec.number if generation is None else generation,
            rank=rank,
            local_rank=member.local_rank,
            detail="end of file",
            signal=9,
            has_replacement=replacement,
        )
        return self.report(member.node, words)

    def fail_collective(self, rank: int, job: str = "job", generation: int | None = None) -> list[Effect]:
        spec = self.running(job)
        number = spec.number if generation is None else generation
        words = CollectiveFailed(job=job, at=self.now, generation=number, rank=rank, step=1, detail="reset by peer")
        return self.report(spec.roster[rank].node, words)

    def stall(
        self,
        rank: int,
        step: int = 5,
        collectives: int = 10,
        job: str = "job",
        stalled_s: float = 1.0,
        begun: int = 0,
        **state: Any,
    ) -> list[Effect]:
        """A rank reports that it makes no progress; ``state`` has further fields of the report."""
        spec = self.running(job)
        words = RankStalled(
            job=job,
            at=self.now,
            generation=spec.number,
            rank=rank,
            step=step,
            collectives=collectives,
            stalled_s=stalled_s,
            threshold_s=1.0,
            stacks="Thread main: all_reduce",
            begun=begun,
            **state,
        )
        return self.report(spec.roster[rank].node, words)

    def unresponsive(
        self, rank: int, job: str = "job", generation: int | None = None, activity: RankActivity | None = None
    ) -> list[Effect]:
        spec = self.running(job)
        member = spec.roster[rank]
        words = RankUnresponsive(
            job=job,
            at=self.now,
            generation=spec.number if generation is None else generation,
            rank=rank,
            local_rank=member.local_rank,
            unresponsive_s=1.0,
            process_state="T (stopped)" if activity in (None, RankActivity.STOPPED) else "R",
            activity=activity,
        )
        return self.report(member.node, words)

    def raise_user_error(self, rank: int, job: str = "job", started: int | None = None) -> list[Effect]:
        spec = self.running(job)
        words = UserError(
            job=job,
            at=self.now,
            generation=spec.number,
            rank=rank,
            step=3,
            error="ValueError: bad batch",
            traceback="Traceback ...",
            started_step=started,
        )
        return self.report(spec.roster[rank].node, words)

    def finish(
        self,
        *ranks: int,
        job: str = "job",
        step: int = 9,
        begun: int | None = None,
        collectives: int | None = None,
        losses: dict[int, float] | None = None,
    ) -> None:
        spec = self.running(job)
        for member in spec.roster:
            if not ranks or member.rank in ranks:
                words = RankFinished(
                    job=job,
                    at=self.now,
                    generation=spec.number,
                    rank=member.rank,
                    step=step,
                    started_step=begun,
                    collectives=collectives,
                    loss=(losses or {}).get(member.rank),
                )
                self.report(member.node, words)

    # --- looking ---------------------------------------------------------------------------------------------

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
    """The generations opened in ``effects``."""
    return [effect.spec for effect in effects if isinstance(effect, PutGeneration)]


def sent(effects: list[Effect], kind: type[Any]) -> dict[str, Any]:
    """The last directive of a kind by node, of those sent in ``effects``."""
    return {
        effect.node: effect.body for effect in effects if isinstance(effect, Send) and isinstance(effect.body, kind)
    }


def decisions(effects: list[Effect]) -> list[tuple[str, str]]:
    """(node, decision) of the verdicts in ``effects``."""
    return [(e.verdict.node, str(e.verdict.decision)) for e in effects if isinstance(e, PutVerdict)]


def audits(effects: list[Effect], kind: str) -> list[str]:
    """The sentences of one kind in the audit log."""
    return [effect.entry.sentence for effect in effects if isinstance(effect, Audit) and effect.entry.kind == kind]
