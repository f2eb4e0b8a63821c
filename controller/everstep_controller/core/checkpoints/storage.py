"""Which versions go to storage, who writes them, and what is there.

A version is ordered when it is committed, so that every rank keeps it without a gap, and stays pinned until it is on
storage or given up. Each of its nodes is asked for its ranks' shares, and asked again until it answers: a vault that
is asked again goes on where it ended, so crashes of vaults, agents and controllers cost nothing but time. One version
is on its way at a time; what falls due meanwhile is passed over, and the next commit after its end is looked at.
"""

from __future__ import annotations

from everstep.clock import Backoff
from everstep.errors import StaleGeneration, Unavailable
from everstep.ids import Version
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import SpillVersion
from everstep.wire.v1.vault_orders import VersionSpilled
from everstep_controller.core.records import JobRecord, PendingSpill, StoredCheckpoint
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition

MAX_STORED = 100
"""Checkpoints on storage that a job's record lists, the newest ones."""
MAX_RESTORE_URLS = 4
"""Of these a generation is told so many: should the newest be damaged, the one before it serves."""


def job_folder(job: JobRecord) -> str:
    """Where all of the job's checkpoints go."""
    assert job.spec.spill is not None
    return f"{job.spec.spill.url.rstrip('/')}/{job.job}"


# --- ordering ----------------------------------------------------------------------------------------------------


def consider_spill(transition: Transition, job: JobRecord, version: Version, nbytes: int) -> None:
    """``version`` was committed: orders it to be written where one is due and none is on its way."""
    plan, running = job.spec.spill, job.generation
    if plan is None or running is None or job.pending_spill is not None or transition.now < job.spill_not_before:
        return
    if abs(version.step - job.last_spilled_step) < plan.every_steps:
        return
    transition.state.job_runtime[job.job].spilled_nodes = set()
    job.pending_spill = PendingSpill(
        version=version,
        url=job_folder(job),
        writers={node: tuple(member.rank for member in running.members_on(node)) for node in running.seats},
        started_at=transition.now,
        bytes=nbytes,
        trace=transition.trace,
    )
    transition.mark_job_changed(job.job)
    _send_spill_order(transition, job, job.pending_spill)


def _send_spill_order(transition: Transition, job: JobRecord, spilling: PendingSpill) -> None:
    """Asks those that have not answered, and looks again later."""
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
    )
    live = transition.state.job_runtime[job.job]
    for node in spilling.writers:
        if node not in live.spilled_nodes and node in transition.state.reachable:
            transition.send(node, body)
    live.spill_due = transition.now + transition.policy.vault_order_retry_s
    transition.schedule(live.spill_due, "job", job.job)


def check_spill(transition: Transition, job: JobRecord) -> None:
    """At a deadline: whoever has not answered is asked again; a version that has lost a share is given up."""
    spilling = job.pending_spill
    if spilling is None or job.state is not JobState.RUNNING or transition.state.database_outage:
        return
    reconsider_spill(transition, job)
    if job.pending_spill is not None and transition.now >= transition.state.job_runtime[job.job].spill_due:
        _send_spill_order(transition, job, spilling)


def reconsider_spill(transition: Transition, job: JobRecord) -> None:
    """Nodes may have gone. A share that no other node has a copy of goes with its node, and the version with it."""
    spilling, done = job.pending_spill, transition.state.job_runtime[job.job].spilled_nodes
    if spilling is None:
        return
    if job.spec.spill is None:
        give_up_spill(transition, job, "the job asks for none any more")
        return
    for node in [node for node in spilling.writers if node not in done and not _holds_slots(transition.state, node)]:
        copies = (
            job.version_locations.shares[node].full_copies
            if job.version_locations is not None and node in job.version_locations.shares
            else ()
        )
        heir = next((copy for copy in copies if _holds_slots(transition.state, copy)), None)
        if (
            heir is None
            or job.version_locations is None
            or job.version_locations.generation != spilling.version.generation
        ):
            give_up_spill(transition, job, f"{node}, which has shares of it, is out of reach")
            return
        ranks = spilling.writers.pop(node)
        spilling.writers[heir] = (*spilling.writers.get(heir, ()), *ranks)
        done.discard(heir)
        spilling.attempt += 1
        transition.state.job_runtime[job.job].spill_due = 0.0
        transition.mark_job_changed(job.job)


def _holds_slots(state: FleetState, node: str) -> bool:
    return node in state.reachable and not state.nodes[node].defective_gpus


def give_up_spill(transition: Transition, job: JobRecord, reason: str) -> None:
    """The version will not come to storage. The next one is ordered after a wait that grows with each in a row."""
    spilling = job.pending_spill
    if spilling is None:
        return
    job.pending_spill, job.spills_lost, job.spill_error = None, job.spills_lost + 1, reason
    job.spill_failures += 1
    waits = Backoff(floor_s=transition.policy.vault_order_retry_s, ceiling_s=transition.policy.vault_order_retry_max_s)
    job.spill_not_before = transition.now + waits.limit_s(job.spill_failures - 1)
    sentence = f"version {spilling.version} is not written to storage: {reason}"
    transition.audit(
        "spill.given_up", sentence, job=job.job, trace=spilling.trace, data={"version": str(spilling.version)}
    )
    transition.mark_job_changed(job.job)


# --- answers -----------------------------------------------------------------------------------------------------


def handle_version_spilled(transition: Transition, job: JobRecord, node: str, report: VersionSpilled) -> None:
    """A node's vault has written its part, or could not."""
    spilling = job.pending_spill
    if job.job not in transition.state.node_runtime[node].jobs:
        transition.count_ignored("version_spilled.not_a_member")
        return
    _drop_removed(transition, job, report)
    said = (report.version, report.attempt)
    if spilling is None or said != (spilling.version, spilling.attempt) or node not in spilling.writers:
        transition.count_ignored("version_spilled.stale")
    elif report.code:
        _failed(transition, job, spilling, node, report)
    elif not _is_direct_child(spilling.url, report.url):  # ranks on other nodes would read what lies there
        transition.count_ignored("version_spilled.wrong_folder")
    else:
        _written(transition, job, spilling, node, report)


def _is_direct_child(root: str, url: str) -> bool:
    before, _, folder = url.rpartition("/")
    return before == root and folder not in ("", ".", "..")


def _drop_removed(transition: Transition, job: JobRecord, report: VersionSpilled) -> None:
    """What is not on storage any more is nothing to go back to, whatever became of the order. What was stored later
    than the report's version is not in its picture."""
    root = report.url.rpartition("/")[0]
    gone, left = ({f"{root}/{folder}" for folder in folders} for folders in (report.removed, report.remaining))
    if left:
        older = (
            one.url for one in job.stored_checkpoints if one.version < report.version and one.url.startswith(f"{root}/")
        )
        gone |= set(older) - left
    if any(one.url in gone for one in job.stored_checkpoints):
        job.stored_checkpoints = [one for one in job.stored_checkpoints if one.url not in gone]
        transition.mark_job_changed(job.job)


def _failed(transition: Transition, job: JobRecord, spilling: PendingSpill, node: str, report: VersionSpilled) -> None:
    """What may pass is tried again later; a share that is gone, or storage that cannot be, ends the order."""
    if report.code == StaleGeneration.code:
        return  # the order was of a generation that is over by now; it is repeated in the newer one's name
    spilling.failures += 1
    if report.code != Unavailable.code or spilling.failures >= transition.policy.vault_order_failures:
        give_up_spill(transition, job, f"{node}: {report.message}")
        return
    spilling.last_error = f"{node}: {report.message}"
    transition.mark_job_changed(job.job)


def _written(transition: Transition, job: JobRecord, spilling: PendingSpill, node: str, report: VersionSpilled) -> None:
    live = transition.state.job_runtime[job.job]
    live.spilled_nodes.add(node)
    if report.complete:
        _complete(transition, job, spilling, report)
    elif len(live.spilled_nodes) == len(spilling.writers):  # each wrote its part, and the last did not find somebody's
        live.spilled_nodes, spilling.attempt = set(), spilling.attempt + 1
        spilling.failures += 1
        transition.mark_job_changed(job.job)
        if spilling.failures >= transition.policy.vault_order_failures:
            give_up_spill(transition, job, "all parts are written, and the storage does not show them all")
        else:
            live.spill_due = transition.now + transition.policy.vault_order_retry_s


def _complete(transition: Transition, job: JobRecord, spilling: PendingSpill, report: VersionSpilled) -> None:
    stored = StoredCheckpoint(
        version=spilling.version,
        url=report.url,
        bytes=spilling.bytes,
        started_at=spilling.started_at,
        stored_at=transition.now,
    )
    kept = [one for one in job.stored_checkpoints if one.version != stored.version]
    job.stored_checkpoints = [*kept, stored][-MAX_STORED:]
    job.pending_spill, job.last_spilled_step = None, spilling.version.step
    job.spill_failures, job.spill_error, job.spill_not_before = 0, "", 0.0
    took_s = transition.now - spilling.started_at
    transition.audit(
        "spill.stored",
        f"version {stored.version} is whole on storage after {took_s:.1f} s: {stored.url}",
        job=job.job,
        trace=spilling.trace,
        data={"version": str(stored.version), "url": stored.url, "removed": ", ".join(report.removed)},
    )
    transition.mark_job_changed(job.job)


def end_spills(transition: Transition, job: JobRecord) -> None:
    """The job is over, and its slots with it. What is on storage stays, for a job of the same name that goes on there
    if this one did not reach its end; one that did begins anew."""
    if job.pending_spill is not None:
        sentence = f"version {job.pending_spill.version} is not written to storage: the job is over"
        transition.audit("spill.given_up", sentence, job=job.job, trace=job.pending_spill.trace)
        job.pending_spill = None
    if job.state is JobState.FINISHED:
        job.stored_checkpoints, job.last_spilled_step = [], 0
    job.spill_failures, job.spill_not_before = 0, 0.0


# --- restoring ---------------------------------------------------------------------------------------------------


def mark_stored_corrupt(transition: Transition, job: JobRecord, clean: Version | None) -> None:
    """After corruption: nothing newer than ``clean`` that this run wrote is restored from storage by itself either."""
    if job.pending_spill is not None and (clean is None or job.pending_spill.version > clean):
        give_up_spill(transition, job, "it may be corrupt")
    for at, one in enumerate(job.stored_checkpoints):
        if (clean is None or one.version > clean) and one.started_at >= job.created_at and not one.maybe_corrupt:
            job.stored_checkpoints[at] = StoredCheckpoint(
                one.version, one.url, one.bytes, one.started_at, one.stored_at, maybe_corrupt=True
            )
            transition.mark_job_changed(job.job)


def restore_urls(job: JobRecord) -> list[str]:
    """The checkpoints to start from where memory has nothing: those that nothing speaks against, written last first."""
    return [one.url for one in reversed(job.stored_checkpoints) if not one.maybe_corrupt][:MAX_RESTORE_URLS]
