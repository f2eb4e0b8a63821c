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
from everstep_controller.core.records import JobRecord, Spilling, StoredCheckpoint
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Turn

LISTED = 100
"""Checkpoints on storage that a job's record lists, the newest ones."""
NAMED = 4
"""Of these a generation is told so many: should the newest be damaged, the one before it serves."""


def folder_of_job(job: JobRecord) -> str:
    """Where all of the job's checkpoints go."""
    assert job.spec.spill is not None
    return f"{job.spec.spill.to.rstrip('/')}/{job.job}"


# --- ordering ----------------------------------------------------------------------------------------------------


def consider_spill(turn: Turn, job: JobRecord, version: Version, nbytes: int) -> None:
    """``version`` was committed: orders it to be written where one is due and none is on its way."""
    plan, running = job.spec.spill, job.generation
    if plan is None or running is None or job.spilling is not None or turn.now < job.spill_not_before:
        return
    if abs(version.step - job.spilled_step) < plan.every:
        return
    turn.state.live_jobs[job.job].spill_done = set()
    job.spilling = Spilling(
        version=version,
        url=folder_of_job(job),
        writers={node: tuple(member.rank for member in running.on(node)) for node in running.seats},
        begun_at=turn.now,
        bytes=nbytes,
        trace=turn.trace,
    )
    turn.job_changed(job.job)
    _order(turn, job, job.spilling)


def _order(turn: Turn, job: JobRecord, spilling: Spilling) -> None:
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
        keep=plan.keep,
        attempt=spilling.attempt,
    )
    live = turn.state.live_jobs[job.job]
    for node in spilling.writers:
        if node not in live.spill_done and node in turn.state.reachable:
            turn.send(node, body)
    live.spill_due = turn.now + turn.policy.order_again_s
    turn.wake(live.spill_due, "job", job.job)


def check_spill(turn: Turn, job: JobRecord) -> None:
    """At a deadline: whoever has not answered is asked again; a version that has lost a share is given up."""
    spilling = job.spilling
    if spilling is None or job.state is not JobState.RUNNING or turn.state.store_away:
        return
    reconsider_spill(turn, job)
    if job.spilling is not None and turn.now >= turn.state.live_jobs[job.job].spill_due:
        _order(turn, job, spilling)


def reconsider_spill(turn: Turn, job: JobRecord) -> None:
    """Nodes may have gone. A share that no other node has a copy of goes with its node, and the version with it."""
    spilling, done = job.spilling, turn.state.live_jobs[job.job].spill_done
    if spilling is None:
        return
    if job.spec.spill is None:
        give_up_spill(turn, job, "the job asks for none any more")
        return
    for node in [node for node in spilling.writers if node not in done and not _has_slots(turn.state, node)]:
        copies = job.homes.shares[node].copies if job.homes is not None and node in job.homes.shares else ()
        heir = next((copy for copy in copies if _has_slots(turn.state, copy)), None)
        if heir is None or job.homes is None or job.homes.generation != spilling.version.generation:
            give_up_spill(turn, job, f"{node}, which has shares of it, is out of reach")
            return
        ranks = spilling.writers.pop(node)
        spilling.writers[heir] = (*spilling.writers.get(heir, ()), *ranks)
        done.discard(heir)
        spilling.attempt += 1
        turn.state.live_jobs[job.job].spill_due = 0.0
        turn.job_changed(job.job)


def _has_slots(state: FleetState, node: str) -> bool:
    return node in state.reachable and not state.nodes[node].condemned


def give_up_spill(turn: Turn, job: JobRecord, why: str) -> None:
    """The version will not come to storage. The next one is ordered after a wait that grows with each in a row."""
    spilling = job.spilling
    if spilling is None:
        return
    job.spilling, job.spills_lost, job.spill_trouble = None, job.spills_lost + 1, why
    job.spill_failures += 1
    waits = Backoff(floor_s=turn.policy.order_again_s, ceiling_s=turn.policy.order_again_max_s)
    job.spill_not_before = turn.now + waits.limit_s(job.spill_failures - 1)
    sentence = f"version {spilling.version} is not written to storage: {why}"
    turn.audit("spill.given_up", sentence, job=job.job, trace=spilling.trace, data={"version": str(spilling.version)})
    turn.job_changed(job.job)


# --- answers -----------------------------------------------------------------------------------------------------


def version_spilled(turn: Turn, job: JobRecord, node: str, report: VersionSpilled) -> None:
    """A node's vault has written its part, or could not."""
    spilling = job.spilling
    if job.job not in turn.state.live_nodes[node].jobs:
        turn.ignore("version_spilled.stranger")
        return
    _strike_removed(turn, job, report)
    said = (report.version, report.attempt)
    if spilling is None or said != (spilling.version, spilling.attempt) or node not in spilling.writers:
        turn.ignore("version_spilled.stale")
    elif report.code:
        _failed(turn, job, spilling, node, report)
    elif not _is_beneath(spilling.url, report.url):  # ranks on other nodes would read what lies there
        turn.ignore("version_spilled.elsewhere")
    else:
        _written(turn, job, spilling, node, report)


def _is_beneath(root: str, url: str) -> bool:
    before, _, folder = url.rpartition("/")
    return before == root and folder not in ("", ".", "..")


def _strike_removed(turn: Turn, job: JobRecord, report: VersionSpilled) -> None:
    """What is not on storage any more is nothing to go back to, whatever became of the order. What was stored later
    than the report's version is not in its picture."""
    root = report.url.rpartition("/")[0]
    gone, left = ({f"{root}/{folder}" for folder in folders} for folders in (report.removed, report.left))
    if left:
        older = (one.url for one in job.stored if one.version < report.version and one.url.startswith(f"{root}/"))
        gone |= set(older) - left
    if any(one.url in gone for one in job.stored):
        job.stored = [one for one in job.stored if one.url not in gone]
        turn.job_changed(job.job)


def _failed(turn: Turn, job: JobRecord, spilling: Spilling, node: str, report: VersionSpilled) -> None:
    """What may pass is tried again later; a share that is gone, or storage that cannot be, ends the order."""
    if report.code == StaleGeneration.code:
        return  # the order was of a generation that is over by now; it is repeated in the newer one's name
    spilling.failures += 1
    if report.code != Unavailable.code or spilling.failures >= turn.policy.order_failures:
        give_up_spill(turn, job, f"{node}: {report.message}")
        return
    spilling.trouble = f"{node}: {report.message}"
    turn.job_changed(job.job)


def _written(turn: Turn, job: JobRecord, spilling: Spilling, node: str, report: VersionSpilled) -> None:
    live = turn.state.live_jobs[job.job]
    live.spill_done.add(node)
    if report.whole:
        _complete(turn, job, spilling, report)
    elif len(live.spill_done) == len(spilling.writers):  # each wrote its part, and the last did not find somebody's
        live.spill_done, spilling.attempt = set(), spilling.attempt + 1
        spilling.failures += 1
        turn.job_changed(job.job)
        if spilling.failures >= turn.policy.order_failures:
            give_up_spill(turn, job, "all parts are written, and the storage does not show them all")
        else:
            live.spill_due = turn.now + turn.policy.order_again_s


def _complete(turn: Turn, job: JobRecord, spilling: Spilling, report: VersionSpilled) -> None:
    stored = StoredCheckpoint(
        version=spilling.version, url=report.url, bytes=spilling.bytes, begun_at=spilling.begun_at, at=turn.now
    )
    kept = [one for one in job.stored if one.version != stored.version]
    job.stored = [*kept, stored][-LISTED:]
    job.spilling, job.spilled_step = None, spilling.version.step
    job.spill_failures, job.spill_trouble, job.spill_not_before = 0, "", 0.0
    took_s = turn.now - spilling.begun_at
    turn.audit(
        "spill.stored",
        f"version {stored.version} is whole on storage after {took_s:.1f} s: {stored.url}",
        job=job.job,
        trace=spilling.trace,
        data={"version": str(stored.version), "url": stored.url, "removed": ", ".join(report.removed)},
    )
    turn.job_changed(job.job)


def end_spills(turn: Turn, job: JobRecord) -> None:
    """The job is over, and its slots with it. What is on storage stays, for a job of the same name that goes on there
    if this one did not reach its end; one that did begins anew."""
    if job.spilling is not None:
        sentence = f"version {job.spilling.version} is not written to storage: the job is over"
        turn.audit("spill.given_up", sentence, job=job.job, trace=job.spilling.trace)
        job.spilling = None
    if job.state is JobState.FINISHED:
        job.stored, job.spilled_step = [], 0
    job.spill_failures, job.spill_not_before = 0, 0.0


# --- restoring ---------------------------------------------------------------------------------------------------


def doubt_stored(turn: Turn, job: JobRecord, clean: Version | None) -> None:
    """After corruption: nothing newer than ``clean`` that this run wrote is restored from storage by itself either."""
    if job.spilling is not None and (clean is None or job.spilling.version > clean):
        give_up_spill(turn, job, "it may be corrupt")
    for at, one in enumerate(job.stored):
        if (clean is None or one.version > clean) and one.begun_at >= job.created_at and not one.suspect:
            job.stored[at] = StoredCheckpoint(one.version, one.url, one.bytes, one.begun_at, one.at, suspect=True)
            turn.job_changed(job.job)


def storage_of(job: JobRecord) -> list[str]:
    """The checkpoints to start from where memory has nothing: those that nothing speaks against, written last first."""
    return [one.url for one in reversed(job.stored) if not one.suspect][:NAMED]
