"""Which versions are safe, which are clean, and what a generation may start from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from controller.core.effects import PutVersion
from controller.core.signals import notice_versions
from controller.core.state import Ballot, JobLive, JobRecord, VersionRecord
from controller.core.turn import Turn
from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec, RestoreRule, Sealed

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
    complete_before = len(ballot.said) == spec.world_size
    ballot.said.add(report.rank)
    ballot.bytes[report.rank] = report.bytes
    for group, digest in report.digests.items():
        ballot.digests.setdefault(group, {})[report.rank] = digest
    if report.safe:
        ballot.safe.add(report.rank)
    if len(ballot.said) < spec.world_size:
        return None
    if ballot.digests and not (complete_before and ballot.agreed):
        vote = count_votes(ballot.digests)
        if not vote.unanimous:
            return vote
        ballot.agreed = corroborated(ballot.digests, frozenset(ballot.said))
    if len(ballot.safe) == spec.world_size:
        _finish(turn, job, live, report.version, ballot)
    return None


def _ballot(turn: Turn, live: JobLive, version: Version) -> Ballot | None:
    """The ballot of ``version``, or None for one that is decided or has fallen out of the window."""
    if live.committed is not None and version <= live.committed:
        return None
    if version not in live.ballots:
        if len(live.ballots) >= turn.policy.version_window:
            oldest = min(live.ballots)
            if version < oldest:
                return None
            del live.ballots[oldest]
        live.ballots[version] = Ballot()
    return live.ballots[version]


def _finish(turn: Turn, job: JobRecord, live: JobLive, version: Version, ballot: Ballot) -> None:
    for old in [v for v in live.ballots if v <= version]:
        del live.ballots[old]
    commit(turn, job, version, verified=ballot.agreed, size=sum(ballot.bytes.values()), ranks=len(ballot.said))


def commit(turn: Turn, job: JobRecord, version: Version, *, verified: bool, size: int = 0, ranks: int = 0) -> None:
    """Logs ``version`` as durable, and as clean where ``verified``. Older than what is known: no effect."""
    live = turn.state.live_jobs[job.job]
    if live.committed is not None and version <= live.committed:
        return
    live.committed = version
    if verified:
        live.verified = version
    if job.ceiling is not None:
        job.ceiling = None
        turn.job_changed(job.job)
    verified_at = turn.now if verified else None
    record = VersionRecord(
        job=job.job, version=version, committed_at=turn.now, verified_at=verified_at, bytes=size, ranks=ranks
    )
    turn.emit(PutVersion(record))
    notice_versions(turn, job)


def note_restored(turn: Turn, job: JobRecord, restored: Version) -> None:
    """The ranks chose a version that was not logged yet: all of them found it whole, which is a commit."""
    live = turn.state.live_jobs[job.job]
    if job.ceiling is not None:
        return
    if live.committed is None or restored > live.committed:
        commit(turn, job, restored, verified=False, ranks=job.generation.world_size if job.generation else 0)


# --- what a generation may start from ----------------------------------------------------------------------------


def restore_rule(turn: Turn, job: JobRecord) -> RestoreRule:
    """Not older than what was committed, not newer than what is known clean after corruption.

    A job's first generation starts anew. A later one without a commit may still find its own steps whole.
    """
    if job.ceiling == NOTHING or job.last_number == 0:
        return RestoreRule(scratch=True)
    if job.ceiling is not None:
        # What was verified last may be overwritten already: ranks pin by notices, which take their time. Any older
        # version is clean too; Version(0, 0) admits it, and still forbids to start anew in silence.
        return RestoreRule(floor=Version(0, 0), ceiling=job.ceiling)
    return RestoreRule(floor=turn.state.live_jobs[job.job].committed)


def roll_back(turn: Turn, job: JobRecord) -> str:
    """After corruption: nothing newer than the newest verified version counts. Returns the words for it."""
    live = turn.state.live_jobs[job.job]
    live.ballots = {}
    live.committed = live.verified
    job.ceiling = live.verified or NOTHING
    turn.job_changed(job.job)
    notice_versions(turn, job)
    if live.verified is None:
        return "no version was ever verified, so the job starts anew"
    return f"the job goes back to version {live.verified}, the newest verified one"


def doubt_open_votes(turn: Turn, job: JobRecord) -> None:
    """Before a regrouping cuts votes off: if those counted so far already differ, nothing unverified is restored."""
    live = turn.state.live_jobs[job.job]
    doubtful = [v for v, b in live.ballots.items() if b.digests and not count_votes(b.digests).unanimous]
    if not doubtful:
        return
    words = roll_back(turn, job)
    sentence = f"digests of version {min(doubtful)} differ in a vote that a regrouping cuts short; {words}"
    turn.audit("corruption.doubt", sentence, job=job.job, generation=job.last_number)
