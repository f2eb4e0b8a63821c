"""What a job has to go back to, place by place: answered from the records, asking nobody."""

from __future__ import annotations

from collections.abc import Iterator

from controller.core.checkpoints import NOTHING
from controller.core.protecting import groups_of_homes, lost_of_protected
from controller.core.records import JobRecord
from controller.core.restorability import restorability_of
from controller.core.state import FleetState
from controller.core.wording import named
from everstep.wire.v1.kept import JobCheckpoints, KeptVersion


def kept_of(state: FleetState, job: JobRecord) -> JobCheckpoints:
    """In the order in which the job would go back to it: memory, parity, storage, the newest of each first."""
    versions = (*_in_memory(state, job), *_by_parity(state, job), *_on_storage(state, job))
    first = next((one for one in versions if one.restorable), None)
    if first is None:
        sentence = f"nothing of job {job.job} is kept that it could go back to"
    else:
        sentence = f"after a loss now, job {job.job} goes back to {first.version} or a newer one: {first.sentence}"
    return JobCheckpoints(
        job=job.job,
        sentence=sentence,
        versions=versions,
        spills_lost=job.spills_lost,
        trouble="; ".join(filter(None, (job.spill_trouble, job.protect_trouble)))[:4096],
    )


def _in_memory(state: FleetState, job: JobRecord) -> Iterator[KeptVersion]:
    live = state.live_jobs[job.job]
    told = restorability_of(state, job)
    if live.committed is None:
        return
    barred = job.ceiling is not None and (job.ceiling == NOTHING or live.committed > job.ceiling)
    lost = bool(told.missing)
    why = "it was committed, and every share of it is held"
    if lost:
        why = "ranks' shares of it are held by nobody in reach"
    elif barred:
        why = "it may be corrupt"
    yield KeptVersion(
        version=live.committed,
        place="memory",
        state="whole",
        restorable=not lost and not barred,
        sentence=why,
        at=live.committed_at,
        verified=told.verified,
    )


def _by_parity(state: FleetState, job: JobRecord) -> Iterator[KeptVersion]:
    verified = state.live_jobs[job.job].verified
    if job.shielded is not None:
        version, lost = job.shielded.protection.version, lost_of_protected(state, job)
        why = f"its shards lie in {len(job.shielded.protection.groups)} groups, each of which bears two losses"
        yield KeptVersion(
            version=version,
            place="parity",
            state="whole",
            restorable=not lost,
            sentence=f"more of a group is gone than it bears: {named(lost)}" if lost else why,
            at=job.shielded.at,
            verified=verified is not None and version <= verified,
        )
    if job.protecting is not None:
        homes = groups_of_homes(job.protecting.protection)
        yield KeptVersion(
            version=job.protecting.protection.version,
            place="parity",
            state="way",
            restorable=False,
            sentence=f"{len(state.live_jobs[job.job].protect_made)} of {len(homes)} homes have made their parity",
            at=job.protecting.begun_at,
        )


def _on_storage(state: FleetState, job: JobRecord) -> Iterator[KeptVersion]:
    spilling, done = job.spilling, state.live_jobs[job.job].spill_done
    if spilling is not None:
        trouble = f"; {spilling.trouble}" if spilling.trouble else ""
        yield KeptVersion(
            version=spilling.version,
            place="storage",
            state="way",
            restorable=False,
            sentence=f"{len(done)} of {len(spilling.writers)} nodes have written their part{trouble}"[:4096],
            at=spilling.begun_at,
            bytes=spilling.bytes,
            url=spilling.url,
        )
    for one in reversed(job.stored):
        yield KeptVersion(
            version=one.version,
            place="storage",
            state="whole",
            restorable=not one.suspect,
            sentence="it may be corrupt" if one.suspect else "it is whole on storage",
            at=one.at,
            bytes=one.bytes,
            url=one.url,
        )
