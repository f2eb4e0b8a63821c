"""Write versions to storage, and track which checkpoints are there.

A version is ordered at its commit and stays pinned until it is stored or given up. Each node is asked for its ranks'
shares until it answers; a vault that is asked again continues where it stopped. One version is written at a time.
"""

from __future__ import annotations

import msgspec

from everstep.clock import Backoff
from everstep.errors import StaleGeneration, Unavailable
from everstep.ids import NodeId, Rank, Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import SpillVersion
from everstep.wire.v1.training import EarlierRun, SpillPlan
from everstep.wire.v1.vault_reports import VersionSpilled
from everstep_controller.core.records import JobRecord, PendingSpill, StoredCheckpoint
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition

NO_VERSION = Version(0, 0)
"""A ceiling below every version (generations count from 1): no stored version may be restored."""
MAX_LAST_ORDERS = 2
"""Orders after all ranks have returned: the newest version, and one that was committed meanwhile, or that one again."""
MAX_STORED = 100
"""Number of checkpoints on storage listed in a job's record; the newest ones."""


def consider_spill(transition: Transition, job: JobRecord, version: Version, nbytes: int) -> None:
    """Order ``version``, which has just been committed, to be written if one is due and none is pending."""
    plan = job.spec.spill
    if plan is None or job.spills.pending is not None or transition.now < job.spills.not_before:
        return
    if abs(version.step - job.spills.last_step) >= plan.every_steps:
        _order_spill(transition, job, plan, version, nbytes)


def spill_newest(transition: Transition, job: JobRecord) -> None:
    """Order the newest committed version to be written, since the job is about to stop; it need not be due."""
    plan, commits = job.spec.spill, transition.state.job_runtime[job.job].commits
    version = commits.committed_version
    if plan is None or version is None or job.spills.pending is not None or transition.state.database.outage:
        return
    if all(checkpoint.version < version for checkpoint in job.spills.stored if not checkpoint.maybe_corrupt):
        _order_spill(transition, job, plan, version, commits.committed_bytes)


def _order_spill(transition: Transition, job: JobRecord, plan: SpillPlan, version: Version, nbytes: int) -> None:
    writers = _ranks_by_node(job, version)
    if not writers:
        return
    transition.state.job_runtime[job.job].vault_orders.spilled_nodes = set()
    job.spills.pending = PendingSpill(
        version=version,
        url=f"{plan.url.rstrip('/')}/{job.spills.folder or job.job}",
        writers=writers,
        started_at=transition.now,
        bytes=nbytes,
        trace=transition.trace,
    )
    transition.mark_job_changed(job.job)
    _send_spill_order(transition, job, job.spills.pending)


def _ranks_by_node(job: JobRecord, version: Version) -> dict[NodeId, tuple[Rank, ...]]:
    """Return the ranks that stored the version, by node: each node has consecutive ranks, in the order of seats."""
    for spec in (job.generation, job.outgoing_generation):
        if spec is not None and spec.number == version.generation:
            return {node: tuple(member.rank for member in spec.members_on(node)) for node in spec.seats}
    count = job.spec.nproc_per_node
    nodes = job.commits.shares_of(version.generation)
    return {node: tuple(range(seat * count, (seat + 1) * count)) for seat, node in enumerate(nodes)}


def _send_spill_order(transition: Transition, job: JobRecord, spilling: PendingSpill) -> None:
    """Send the order to nodes that have not answered, and schedule the next check."""
    plan, running = job.spec.spill, job.generation
    if plan is None or running is None:
        return
    body = SpillVersion(
        job=job.job,
        generation=running.number,
        version=spilling.version,
        url=spilling.url,
        writers=spilling.writers,
        keep_last=plan.keep_last,
        attempt=spilling.attempt,
        earlier=job.spills.earlier,
    )
    live = transition.state.job_runtime[job.job]
    for node in spilling.writers:
        if node not in live.vault_orders.spilled_nodes and node in transition.state.liveness.reachable_nodes:
            transition.send(node, body)
    live.vault_orders.spill_due = transition.now + transition.policy.checkpoints.vault_order_retry_s
    transition.schedule_job(live.vault_orders.spill_due, job.job)


def advance_spill(transition: Transition, job: JobRecord) -> None:
    """At a deadline, repeat the order to nodes that have not answered; give up if a share is lost."""
    spilling = job.spills.pending
    if spilling is None or job.is_ended or transition.state.database.outage:
        return
    reconsider_spill(transition, job)
    due = transition.state.job_runtime[job.job].vault_orders.spill_due
    if job.spills.pending is not None and transition.now >= due:
        _send_spill_order(transition, job, spilling)


def reconsider_spill(transition: Transition, job: JobRecord) -> None:
    """Reassign the shares of lost nodes to their copies; give up if a share has no copy."""
    spilling, done = job.spills.pending, transition.state.job_runtime[job.job].vault_orders.spilled_nodes
    if spilling is None:
        return
    if job.spec.spill is None:
        give_up_spill(transition, job, "the job asks for none any more")
        return
    locations = job.commits.locations
    shares = locations.shares if locations and locations.generation == spilling.version.generation else {}
    for node in [node for node in spilling.writers if node not in done and not _holds_slots(transition.state, node)]:
        copies = shares[node].full_copies if node in shares else ()
        heir = next((copy for copy in copies if _holds_slots(transition.state, copy)), None)
        if heir is None:
            give_up_spill(transition, job, f"{node}, which has shares of it, is out of reach")
            return
        ranks = spilling.writers.pop(node)
        spilling.writers[heir] = (*spilling.writers.get(heir, ()), *ranks)
        done.discard(heir)
        spilling.attempt += 1
        transition.state.job_runtime[job.job].vault_orders.spill_due = 0.0
        transition.mark_job_changed(job.job)


def _holds_slots(state: FleetState, node: str) -> bool:
    return node in state.liveness.reachable_nodes and not state.nodes[node].health.defective_gpus


def renew_spill_order(transition: Transition, job: JobRecord) -> None:
    """Repeat the pending order at once in the name of the generation that begins."""
    job.spills.last_orders = 0
    if job.spills.pending is not None:
        transition.state.job_runtime[job.job].vault_orders.spill_due = transition.now
        transition.schedule_job(transition.now, job.job)


def give_up_spill(transition: Transition, job: JobRecord, reason: str) -> None:
    """Give up the pending version. The wait for the next one grows with each failure in a row."""
    spilling = job.spills.pending
    if spilling is None:
        return
    job.spills.pending, job.spills.failed_versions, job.spills.error = None, job.spills.failed_versions + 1, reason
    job.spills.failures_in_row += 1
    waits = Backoff(
        floor_s=transition.policy.checkpoints.vault_order_retry_s,
        ceiling_s=transition.policy.checkpoints.vault_order_retry_max_s,
    )
    job.spills.not_before = transition.now + waits.limit_s(job.spills.failures_in_row - 1)
    sentence = f"version {spilling.version} is not written to storage: {reason}"
    data = {"version": str(spilling.version)}
    transition.log_event("spill.given_up", sentence, job=job.job, trace=spilling.trace, data=data)
    transition.mark_job_changed(job.job)
    transition.schedule_job(transition.now, job.job)


def handle_version_spilled(transition: Transition, job: JobRecord, node: str, report: VersionSpilled) -> None:
    """Handle a vault's report that it wrote its part, or could not."""
    spilling = job.spills.pending
    if job.job not in transition.state.node_runtime[node].jobs:
        transition.count_ignored("version_spilled.not_a_member")
        return
    _drop_removed(transition, job, report)
    said = (report.version, report.attempt)
    if spilling is None or said != (spilling.version, spilling.attempt) or node not in spilling.writers:
        transition.count_ignored("version_spilled.stale")
    elif report.code:
        _failed(transition, job, spilling, node, report)
    elif not _is_direct_child(spilling.url, report.url):  # ranks on other nodes would read from that folder
        transition.count_ignored("version_spilled.wrong_folder")
    else:
        _written(transition, job, spilling, node, report)


def adopt_earlier_run(transition: Transition, job: JobRecord, found: EarlierRun) -> None:
    """Before the first generation: continue from what earlier runs of the job left on storage, or start anew."""
    spills = job.spills
    if found.fresh and spills.folder != found.folder:
        spills.stored = []
    spills.folder = found.folder
    known = {checkpoint.url for checkpoint in spills.stored}
    for version in found.versions:
        if version.url not in known:
            at = version.written_at
            stored = StoredCheckpoint(version=version.version, url=version.url, bytes=0, started_at=0.0, stored_at=at)
            spills.stored.append(stored)
    spills.stored.sort(key=lambda one: one.stored_at)
    job.progress.last_number = max(job.progress.last_number, found.generation)
    if job.progress.last_number:
        job.commits.restore_ceiling = NO_VERSION
    spills.earlier = Version(job.progress.last_number, 0) if job.progress.last_number else None
    spills.last_step = spills.stored[-1].version.step if spills.stored else 0
    transition.mark_job_changed(job.job)


def note_resumed_step(transition: Transition, job: JobRecord, step: int) -> None:
    """Note the step that this run's first generation resumed from: what earlier runs wrote beyond it stays."""
    earlier = job.spills.earlier
    if earlier is not None and job.generation is not None and job.generation.number == earlier.generation + 1:
        job.spills.earlier, job.spills.last_step = Version(earlier.generation, step), step
        transition.mark_job_changed(job.job)


def _is_direct_child(root: str, url: str) -> bool:
    before, _, folder = url.rpartition("/")
    return before == root and folder not in ("", ".", "..")


def _drop_removed(transition: Transition, job: JobRecord, report: VersionSpilled) -> None:
    """Drop checkpoints that are no longer on storage. The report says nothing about those stored after its version."""
    root = report.url.rpartition("/")[0]
    gone, left = ({f"{root}/{folder}" for folder in folders} for folders in (report.removed, report.remaining))
    if left:
        older = (
            checkpoint.url
            for checkpoint in job.spills.stored
            if checkpoint.version < report.version and checkpoint.url.startswith(f"{root}/")
        )
        gone |= set(older) - left
    if any(checkpoint.url in gone for checkpoint in job.spills.stored):
        job.spills.stored = [checkpoint for checkpoint in job.spills.stored if checkpoint.url not in gone]
        transition.mark_job_changed(job.job)


def _failed(transition: Transition, job: JobRecord, spilling: PendingSpill, node: str, report: VersionSpilled) -> None:
    """Retry transient failures later; a lost share or unusable storage ends the order."""
    if report.code == StaleGeneration.code:
        return  # the order's generation is over; it is repeated in the newer one's name
    spilling.failures += 1
    if report.code != Unavailable.code or spilling.failures >= transition.policy.checkpoints.vault_order_failures:
        give_up_spill(transition, job, f"{node}: {report.message}")
        return
    spilling.last_error = f"{node}: {report.message}"
    transition.mark_job_changed(job.job)


def _written(transition: Transition, job: JobRecord, spilling: PendingSpill, node: str, report: VersionSpilled) -> None:
    live = transition.state.job_runtime[job.job]
    live.vault_orders.spilled_nodes.add(node)
    if report.complete:
        _complete(transition, job, spilling, report)
    elif len(live.vault_orders.spilled_nodes) == len(spilling.writers):  # the last one did not find all parts
        live.vault_orders.spilled_nodes, spilling.attempt = set(), spilling.attempt + 1
        spilling.failures += 1
        transition.mark_job_changed(job.job)
        if spilling.failures >= transition.policy.checkpoints.vault_order_failures:
            reason = "all nodes have written their parts, but not all parts are listed on storage"
            give_up_spill(transition, job, reason)
        else:
            live.vault_orders.spill_due = transition.now + transition.policy.checkpoints.vault_order_retry_s


def _complete(transition: Transition, job: JobRecord, spilling: PendingSpill, report: VersionSpilled) -> None:
    stored = StoredCheckpoint(
        version=spilling.version,
        url=report.url,
        bytes=spilling.bytes,
        started_at=spilling.started_at,
        stored_at=transition.now,
    )
    kept = [checkpoint for checkpoint in job.spills.stored if checkpoint.version != stored.version]
    job.spills.stored = [*kept, stored][-MAX_STORED:]
    job.spills.pending, job.spills.last_step = None, spilling.version.step
    job.spills.failures_in_row, job.spills.error, job.spills.not_before = 0, "", 0.0
    took_s = transition.now - spilling.started_at
    transition.log_event(
        "spill.stored",
        f"version {stored.version} is complete on storage after {took_s:.1f} s: {stored.url}",
        job=job.job,
        trace=spilling.trace,
        data={"version": str(stored.version), "url": stored.url, "removed": ", ".join(report.removed)},
    )
    transition.mark_job_changed(job.job)
    transition.schedule_job(transition.now, job.job)  # ranks that have all returned wait for it
    if job.status.state is JobState.PAUSED:
        spill_newest(transition, job)


def awaits_last_spill(transition: Transition, job: JobRecord) -> bool:
    """Return whether a job whose ranks have returned waits for its newest version on storage; order it if need be."""
    if job.spills.pending is None and job.spills.last_orders < MAX_LAST_ORDERS:
        job.spills.last_orders += 1
        transition.mark_job_changed(job.job)
        spill_newest(transition, job)
    return job.spills.pending is not None


def end_spills(transition: Transition, job: JobRecord) -> None:
    """Stop the spills of an ended job. Its checkpoints stay for a later run of the same name."""
    if job.spills.pending is not None:
        sentence = f"version {job.spills.pending.version} is not written to storage: the job has ended"
        transition.log_event("spill.given_up", sentence, job=job.job, trace=job.spills.pending.trace)
        job.spills.pending = None
    job.spills.failures_in_row, job.spills.not_before = 0, 0.0


def mark_stored_corrupt(transition: Transition, job: JobRecord, clean: Version | None) -> None:
    """After corruption, mark this run's checkpoints newer than ``clean``; marked ones are not restored."""
    if job.spills.pending is not None and (clean is None or job.spills.pending.version > clean):
        give_up_spill(transition, job, "it may be corrupt")
    for at, checkpoint in enumerate(job.spills.stored):
        newer = (clean is None or checkpoint.version > clean) and checkpoint.started_at >= job.progress.created_at
        if newer and not checkpoint.maybe_corrupt:
            job.spills.stored[at] = msgspec.structs.replace(checkpoint, maybe_corrupt=True)
            transition.mark_job_changed(job.job)
