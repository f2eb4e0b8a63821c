"""What operators are shown: the fleet's state as messages, read in the event loop's thread.

What is shown may be ahead of the database by the one transaction that is being written; directives and answers to
changes never are.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable

import msgspec

from controller.core.budget import budget_left
from controller.core.membership import able_nodes, seats_of, spares
from controller.core.state import FleetState, JobLive, JobRecord, NodeRecord
from controller.keeping import Absence
from controller.push import Outbox
from everstep import __version__
from everstep.errors import NotFound
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1 import operator as op
from everstep.wire.v1.training import GenerationSpec, RankProgress

OVER = (JobState.FINISHED, JobState.FAILED)


class Desk(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a view may look at."""

    state: FleetState
    outbox: Outbox
    epoch: int
    started_at: float
    now: Callable[[], float]
    lag_s: Callable[[], float]
    queued: Callable[[], int]
    newest_event: Callable[[], int]
    away: Callable[[], Absence | None] = lambda: None

    def budget_left(self) -> int:
        """How many nodes may be evicted now."""
        return budget_left(self.state, self.now())

    def node(self, node: str) -> NodeRecord:
        """Raises NotFound."""
        record = self.state.nodes.get(node)
        if record is None:
            raise NotFound(f"no node {node!r}: `everstep nodes` lists them; a node appears when its agent registers")
        return record

    def job(self, job: str) -> JobRecord:
        """Raises NotFound."""
        record = self.state.jobs.get(job)
        if record is None:
            raise NotFound(f"no job {job!r}: `everstep jobs` lists them; a job appears when its first launcher joins")
        return record


def _placements(state: FleetState) -> dict[str, str]:
    """Node to the job whose running roster it is in."""
    return {
        member.node: job.job
        for job in state.jobs.values()
        if job.generation is not None and job.state not in OVER
        for member in job.generation.roster
    }


def node_summary(desk: Desk, record: NodeRecord, job: str | None) -> op.NodeSummary:
    live = desk.state.live_nodes.get(record.node)
    return op.NodeSummary(
        node=record.node,
        state=record.state,
        since=record.since,
        reason=record.sentence,
        connected=desk.outbox.waiting(record.node),
        last_seen_at=live.pulse.heard_at if live is not None and live.pulse.heard_at > 0 else None,
        job=job,
        gpus=len(record.gpus),
        findings=len(record.findings),
        domain=record.domain,
    )


def node_list(desk: Desk) -> op.NodeList:
    jobs = _placements(desk.state)
    records = sorted(desk.state.nodes.values(), key=lambda record: record.node)
    return op.NodeList(nodes=tuple(node_summary(desk, record, jobs.get(record.node)) for record in records))


def node_detail(desk: Desk, node: str) -> op.NodeDetail:
    """All but the verdicts, which are in the store. Raises NotFound."""
    record = desk.node(node)
    return op.NodeDetail(
        summary=node_summary(desk, record, _placements(desk.state).get(node)),
        incarnation=record.incarnation,
        agent_version=record.agent_version,
        driver_version=record.driver_version,
        boot_id=record.boot_id,
        vault=record.vault,
        gpus=record.gpus,
        findings=tuple(record.findings.values()),
        evictions=len(record.evictions),
        outbox=desk.outbox.depth(node),
        registered_at=record.registered_at,
    )


def _progress(spec: GenerationSpec | None, live: JobLive | None) -> list[RankProgress]:
    """The running generation's progress, by rank."""
    if spec is None or live is None:
        return []
    known = live.pace.progress
    return [known[rank] for rank in sorted(known) if known[rank].generation == spec.number]


def _unable(state: FleetState, job: JobRecord) -> dict[str, str]:
    """Nodes that offer themselves to the job and may not be seated now, and why."""
    fit = {*able_nodes(state, job), *seats_of(job.generation)}
    return {node: _why_unable(state, job, node) for node in job.launchers if node not in fit}


def _why_unable(state: FleetState, job: JobRecord, node: str) -> str:
    launcher, record = job.launchers[node], state.nodes.get(node)
    if node in job.excluded:
        return job.excluded[node]
    if not launcher.able:
        return launcher.why_not
    if record is None or record.state is not NodeState.HEALTHY:
        return record.sentence if record is not None and record.sentence else "its agent has not registered"
    return (
        "its agent has not been heard"
        if launcher.confirmed
        else "its agent began anew, and the launcher has not said so"
    )


def job_summary(state: FleetState, job: JobRecord) -> op.JobSummary:
    spec, live = job.generation, state.live_jobs.get(job.job)
    progress = _progress(spec, live)
    return op.JobSummary(
        job=job.job,
        state=job.state,
        generation=spec.number if spec else 0,
        world_size=spec.world_size if spec else 0,
        nodes=len({member.node for member in spec.roster}) if spec else 0,
        spares=len(spares(state, job)),
        step=min((one.step for one in progress), default=(live.pace.newest_step or 0) if live else 0),
        step_s=max((one.step_s for one in progress), default=0.0),
        loss=next((one.loss for one in progress if one.loss is not None), None),
        committed=live.committed if live else None,
        verified=live.verified if live else None,
        reason=job.sentence,
    )


def job_list(desk: Desk) -> op.JobList:
    jobs = sorted(desk.state.jobs.values(), key=lambda job: job.created_at)
    return op.JobList(jobs=tuple(job_summary(desk.state, job) for job in jobs))


def job_detail(desk: Desk, job: str) -> op.JobDetail:
    """All but the recoveries, which are in the store. Raises NotFound."""
    record = desk.job(job)
    spec = record.generation
    nodes = {member.rank: member.node for member in spec.roster} if spec else {}
    return op.JobDetail(
        summary=job_summary(desk.state, record),
        spec=record.spec,
        roster=spec.roster if spec else (),
        spares=tuple(spares(desk.state, record)),
        store=spec.store if spec else None,
        ranks=tuple(
            op.RankStatus(rank=one.rank, node=nodes[one.rank], step=one.step, step_s=one.step_s, loss=one.loss)
            for one in _progress(spec, desk.state.live_jobs.get(job))
            if one.rank in nodes
        ),
        unable=_unable(desk.state, record),
    )


def fleet_status(desk: Desk) -> op.FleetStatus:
    state = desk.state
    return op.FleetStatus(
        version=__version__,
        epoch=desk.epoch,
        now=desk.now(),
        started_at=desk.started_at,
        nodes=dict(Tally(str(node.state) for node in state.nodes.values())),
        jobs=tuple(job_summary(state, job) for job in state.jobs.values() if job.state not in OVER),
        connected=desk.outbox.connected(),
        budget_left=desk.budget_left(),
        breaker=state.fleet.breaker,
        newest_event=desk.newest_event(),
        breaker_at=state.fleet.breaker_at if state.fleet.breaker else 0.0,
        store_away=state.store_away,
    )
