"""Which versions are safe, which are clean, and what a generation may start from.

A version is committed when every rank keeps it (the controller announces the step in time, so that they all do) and
its bytes are in as many places as the job asks for. It stays until each rank has heard of a later commit, so that one
version that is whole is always there, however late a notice comes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from everstep.ids import Version
from everstep.wire.v1.directives import VersionNotice
from everstep.wire.v1.training import GenerationSpec, RestoreRule, Sealed
from everstep_controller.core.checkpoints.parity import (
    consider_protection,
    doubt_protected,
    forget_protection,
    pinned,
    protection_of,
)
from everstep_controller.core.checkpoints.storage import consider_spill, doubt_stored, end_spills, storage_of
from everstep_controller.core.effects import PutVersion
from everstep_controller.core.jobs.membership import seats_of
from everstep_controller.core.records import Homes, JobRecord, Share, VersionRecord
from everstep_controller.core.state import Ballot, JobLive
from everstep_controller.core.transition import Turn

FORGOTTEN = -1
"""A candidate that no version is of."""
NOTHING = Version(0, 0)
"""A ceiling below every version (generations count from 1): nothing that is stored may be restored."""


class Vote(msgspec.Struct, frozen=True):
    """What digests say: ``liars`` differ from a strict majority of their group; ``tied`` are in a group without one."""

    liars: frozenset[int] = frozenset()
    tied: frozenset[int] = frozenset()

    @property
    def unanimous(self) -> bool:
        return not self.liars and not self.tied


def count_votes(digests: Mapping[str, Mapping[int, str]]) -> Vote:
    """Compares the digests inside each replica group."""
    liars: set[int] = set()
    tied: set[int] = set()
    for votes in digests.values():
        tally = Counter(votes.values())
        digest, most = max(tally.items(), key=lambda item: item[1])
        if len(tally) == 1:
            continue
        if 2 * most > len(votes):
            liars |= {rank for rank, vote in votes.items() if vote != digest}
        else:
            tied |= set(votes)
    return Vote(frozenset(liars), frozenset(tied - liars))


def attested(digests: Mapping[str, Mapping[int, str]], spec: GenerationSpec) -> Vote:
    """``count_votes``, where a majority that is all on one node convicts nobody on another: whose group it is stands in
    no report, so one node could bring all its ranks to vote in a group of others."""
    liars: set[int] = set()
    tied: set[int] = set()
    for group, votes in digests.items():
        vote = count_votes({group: votes})
        accused = {spec.node_of(rank) for rank in vote.liars}
        witnesses = {spec.node_of(rank) for rank in votes if rank not in vote.liars}
        if len(witnesses) == 1 and not accused <= witnesses:
            tied |= set(votes)
        else:
            liars |= vote.liars
            tied |= vote.tied
    return Vote(frozenset(liars), frozenset(tied - liars))


def corroborated(digests: Mapping[str, Mapping[int, str]], ranks: frozenset[int]) -> bool:
    """Whether every rank was compared with at least one other."""
    compared = {rank for votes in digests.values() if len(votes) > 1 for rank in votes}
    return compared >= ranks and all(len(votes) > 1 for votes in digests.values())


# --- ballots -----------------------------------------------------------------------------------------------------


def take_seal(turn: Turn, job: JobRecord, spec: GenerationSpec, report: Sealed) -> Vote | None:
    """Counts a seal of the running generation ``spec``. The vote comes back when it is complete and not unanimous."""
    live = turn.state.live_jobs[job.job]
    ballot = _ballot(turn, live, report.version)
    if ballot is None:
        turn.ignore("sealed.old_version")
        return None
    node = spec.node_of(report.rank)
    ballot.said.add(report.rank)
    ballot.bytes[report.rank] = report.bytes
    ballot.copies.setdefault(node, {}).update(dict.fromkeys(report.replicas))
    ballot.alike.setdefault(node, {}).update(dict.fromkeys(report.alike))
    for group, digest in report.digests.items():
        ballot.digests.setdefault(group, {})[report.rank] = digest
    if report.kept:
        ballot.kept.add(report.rank)
    if report.safe and report.kept:
        ballot.safe.add(report.rank)
    if len(ballot.said) == spec.world_size:
        return _settle(turn, job, spec, report.version, ballot)
    return None


def _ballot(turn: Turn, live: JobLive, version: Version) -> Ballot | None:
    """The ballot of ``version``, or None for one that is decided or has fallen out of the window."""
    if live.settled is not None and version <= live.settled:
        return None
    if version not in live.ballots:
        if len(live.ballots) >= turn.policy.version_window:
            oldest = min(live.ballots)
            if version < oldest:
                return None
            del live.ballots[oldest]
        live.ballots[version] = Ballot()
    return live.ballots[version]


def _settle(turn: Turn, job: JobRecord, spec: GenerationSpec, version: Version, ballot: Ballot) -> Vote | None:
    """All ranks have told of ``version``. What they told of older ones will not be complete any more."""
    live = turn.state.live_jobs[job.job]
    if not count_votes(ballot.digests).unanimous:
        return attested(ballot.digests, spec)
    live.settled = version
    live.ballots = {v: b for v, b in live.ballots.items() if v > version}
    verified = corroborated(ballot.digests, frozenset(ballot.said))
    if verified:
        live.verified = version
    announced = live.candidate in (None, version.step)
    if ballot.safe == ballot.said and announced and job.leaving is None and not turn.state.store_away:
        _commit(turn, job, version, ballot, verified=verified)  # past a boundary, ranks keep what was committed before
    elif announced and job.leaving is None and job.generation is not None:
        _count_missing_copies(turn, job.generation, live, ballot)
    return None


def _count_missing_copies(turn: Turn, spec: GenerationSpec, live: JobLive, ballot: Ballot) -> None:
    """By home: versions in a row. A rank that did not keep the version at all says nothing of its homes."""
    missing: set[str] = set()
    for rank in ballot.kept - ballot.safe:
        node = spec.node_of(rank)
        missing.update(home for home in spec.replica_nodes.get(node, ()) if home not in ballot.copies.get(node, ()))
    live.missed = {home: live.missed.get(home, 0) + 1 for home in sorted(missing)}
    if max(live.missed.values(), default=0) >= turn.policy.copy_misses:
        turn.wake(turn.now, "job", spec.job)


# --- commits -----------------------------------------------------------------------------------------------------


def _commit(turn: Turn, job: JobRecord, version: Version, ballot: Ballot, *, verified: bool) -> None:
    """Logs ``version`` as durable: every rank keeps it, and its bytes are in as many places as the job asks for."""
    live = turn.state.live_jobs[job.job]
    live.committed, live.committed_at, live.missed = version, turn.now, {}
    homes = _homes(version, ballot, seats_of(job.generation))
    if job.ceiling is not None or job.homes != homes:
        job.ceiling, job.homes = None, homes
        turn.job_changed(job.job)
    turn.emit(
        PutVersion(
            VersionRecord(
                job=job.job,
                version=version,
                committed_at=turn.now,
                verified_at=turn.now if verified else None,
                bytes=sum(ballot.bytes.values()),
                ranks=len(ballot.said),
            )
        )
    )
    consider_spill(turn, job, version, sum(ballot.bytes.values()))
    consider_protection(turn, job, version)
    _announce(turn, job, live)


def _homes(version: Version, ballot: Ballot, seats: Sequence[str]) -> Homes:
    """The same for all versions of a generation, as a rule: placement is the generation's."""
    shares = {node: Share(tuple(sorted(ballot.copies[node])), tuple(sorted(ballot.alike[node]))) for node in seats}
    return Homes(version.generation, shares)


def let_go(turn: Turn, job: JobRecord) -> None:
    """The job is over: its memory is given back, and what was being read of it will not be written."""
    end_spills(turn, job)
    forget_protection(turn, job)


def expect_commit(turn: Turn, job: JobRecord) -> None:
    """A generation steps. Its first candidate is the first version it seals, which every rank knows by itself."""
    live = turn.state.live_jobs[job.job]
    if live.candidate is None and live.candidate_due == 0.0:
        _look_later(turn, job, live, turn.policy.candidate_patience_s)


def resume_commits(turn: Turn, job: JobRecord) -> None:
    """After a restart nobody knows what was announced, or given up, before: nothing is committed until the next is.

    But for a generation of which nothing can have been announced yet, since it neither stepped nor committed anything.
    """
    live, running = turn.state.live_jobs[job.job], job.leaving or job.generation
    committed = live.committed.generation if live.committed is not None else 0
    if running is None or (job.resumed_at is None and committed < running.number):
        return
    live.candidate = FORGOTTEN
    _look_later(turn, job, live, turn.policy.candidate_patience_s)


def check_candidate(turn: Turn, job: JobRecord) -> None:
    """At a deadline: a candidate that not every rank kept, because one heard of it too late, gives way to another."""
    live = turn.state.live_jobs[job.job]
    if not live.candidate_due or turn.now < live.candidate_due or job.leaving is not None:
        return
    if turn.state.store_away:
        _look_later(turn, job, live, turn.policy.candidate_patience_s)
        return
    if live.candidate is not None and (turn.stride(job.job).step or 0) < live.candidate:
        _look_later(turn, job, live, turn.policy.candidate_patience_s)
    else:
        _announce(turn, job, live)


def _interval_s(turn: Turn, running: GenerationSpec) -> float:
    return max(turn.policy.commit_interval_s, running.world_size * turn.policy.commit_rank_s)


def _announce(turn: Turn, job: JobRecord, live: JobLive) -> None:
    """Tells ranks what is committed, and which step's version is next: one that none of them has finished yet."""
    running = job.leaving or job.generation
    stride = turn.stride(job.job)
    step_s = stride.step_s
    if running is None or stride.step is None or step_s <= 0:
        _look_later(turn, job, live, turn.policy.commit_interval_s)
        return
    now_at = stride.step_by(turn.now, turn.policy.candidate_patience_s)
    live.candidate = now_at + 1 + math.ceil(_interval_s(turn, running) / step_s)
    steps_s = (live.candidate - now_at) * step_s
    _look_later(turn, job, live, turn.policy.candidate_patience_s + 2 * steps_s)
    _tell(turn, job, live, running)


def aim_at(turn: Turn, job: JobRecord, step: int) -> None:
    """A boundary after ``step`` was announced: that version is the one to keep, whatever was announced before.

    It is not committed, since the generation to come has named its floor; but each rank keeps it, and its copies.
    """
    live, running = turn.state.live_jobs[job.job], job.leaving
    if running is None or live.candidate == step:
        return
    live.candidate = step
    _tell(turn, job, live, running)


def _tell(turn: Turn, job: JobRecord, live: JobLive, running: GenerationSpec) -> None:
    notice = VersionNotice(
        job=job.job,
        generation=running.number,
        committed=live.committed,
        candidate=live.candidate,
        pinned=pinned(job),
    )
    for node in seats_of(running):
        if node in turn.state.reachable:
            turn.send(node, notice)


def _look_later(turn: Turn, job: JobRecord, live: JobLive, seconds: float) -> None:
    live.candidate_due = turn.now + seconds
    turn.wake(live.candidate_due, "job", job.job)


# --- what a generation may start from ----------------------------------------------------------------------------


def restore_rule(turn: Turn, job: JobRecord) -> RestoreRule:
    """Not older than what was committed, not newer than what is known clean after corruption.

    A job's first generation starts anew. A later one without a commit may still find its own steps whole.
    """
    storage, *before = storage_of(job) or [""]
    if job.ceiling == NOTHING or job.last_number == 0:
        return RestoreRule(scratch=True, storage=storage, storage_before=tuple(before))
    committed = turn.state.live_jobs[job.job].committed
    return RestoreRule(
        floor=committed,
        ceiling=job.ceiling,
        pinned=pinned(job),
        protection=protection_of(job),
        storage=storage,
        storage_before=tuple(before),
    )


def roll_back(turn: Turn, job: JobRecord) -> str:
    """After corruption: nothing newer than the newest clean version counts. Returns the words for it.

    Clean is what was verified, and what was committed where there was nobody to compare with.
    """
    live = turn.state.live_jobs[job.job]
    live.ballots = {}
    clean = max((v for v in (live.verified, live.committed) if v is not None), default=None)
    job.ceiling = clean or NOTHING
    doubt_stored(turn, job, clean)
    doubt_protected(turn, job, clean)
    turn.job_changed(job.job)
    if clean is None:
        return "no version was ever committed, so the job starts anew"
    return f"nothing newer than version {clean}, the newest known to be clean, is restored"


def doubt_open_votes(turn: Turn, job: JobRecord) -> None:
    """Before a regrouping cuts votes off: if those counted so far already differ, nothing unverified is restored."""
    live = turn.state.live_jobs[job.job]
    doubtful = [v for v, b in live.ballots.items() if b.digests and not count_votes(b.digests).unanimous]
    if not doubtful:
        return
    words = roll_back(turn, job)
    sentence = f"digests of version {min(doubtful)} differ in a vote that a regrouping cuts short; {words}"
    turn.audit("corruption.doubt", sentence, job=job.job, generation=job.last_number)
