"""Commit versions, compare digests and decide from which version a generation may start.

A version is committed when every rank keeps it and its bytes are in as many places as the job asks for. It stays until
each rank has heard of a later commit, so one complete version always exists.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from everstep.ids import Version
from everstep.vocabulary import FindingKind
from everstep.wire.v1.directives import VersionNotice
from everstep.wire.v1.training import GenerationSpec, RestoreRule, VersionSealed
from everstep_controller.core.checkpoints.parity import consider_protection, drop_corrupt_protection
from everstep_controller.core.checkpoints.storage import NO_VERSION, consider_spill, mark_stored_corrupt
from everstep_controller.core.effects import PutVersion
from everstep_controller.core.records import JobRecord, ShareLocations, VersionLocations, VersionRecord, node_kind
from everstep_controller.core.state import JobRuntime, VersionSeals
from everstep_controller.core.transition import Transition

AUDIT_CONVICTION_KEY = f"{FindingKind.AUDIT_MISMATCH}/work"
"""Key of the finding on a node that audits have convicted."""
MIN_SCATTERED = 3
"""Fewest replicas that say, by all being different, that the program is the cause. Two differ by one fault."""
MAX_COMPARED_RANKS = 16
"""Most ranks that compare their parameters one by one, of which one reads what the others have."""
UNKNOWN_CANDIDATE = -1
"""A candidate step that no version has."""
SNAPSHOTS_BETWEEN_COMMITS = 2
"""Snapshots from one commit to the next where ranks do not store each step, because their cores are full. A commit
costs agent and controller some 5 ms of CPU. A restore takes a newer version if all of it is there."""


class KindPair(msgspec.Struct, frozen=True):
    """Two ranks of different kinds whose digests differ, which proves nothing."""

    ranks: tuple[int, int]
    kinds: tuple[str, str]


class DigestVote(msgspec.Struct, frozen=True):
    """Result of comparing digests."""

    divergent_ranks: frozenset[int] = frozenset()
    """Ranks that differ from a strict majority of their group."""
    tied_ranks: frozenset[int] = frozenset()
    """Ranks in a group without a strict majority."""
    incomparable: tuple[KindPair, ...] = ()
    """Ranks of different kinds whose digests differ, one pair for each two kinds."""
    scattered_ranks: frozenset[int] = frozenset()
    """Ranks of groups in which no two nodes agree, of ``MIN_SCATTERED`` or more; on one node, no two ranks."""

    @property
    def is_unanimous(self) -> bool:
        return not self.divergent_ranks and not self.tied_ranks


def divide_by_kind(digests: Mapping[str, Mapping[int, str]], kinds: Mapping[int, str]) -> dict[str, dict[int, str]]:
    """Divide each group whose digests differ into groups of one kind. Equal digests speak for all kinds."""
    divided: dict[str, dict[int, str]] = {}
    for group, votes in digests.items():
        differs = len(set(votes.values())) > 1
        for rank, vote in votes.items():
            key = f"{group} {kinds.get(rank, '')}" if differs else group
            divided.setdefault(key, {})[rank] = vote
    return divided


def find_incomparable(digests: Mapping[str, Mapping[int, str]], kinds: Mapping[int, str]) -> tuple[KindPair, ...]:
    """Return a pair of ranks for each two kinds whose digests differ within a group."""
    pairs: dict[tuple[str, str], KindPair] = {}
    for votes in digests.values():
        first: dict[tuple[str, str], int] = {}
        for rank, vote in sorted(votes.items()):
            first.setdefault((kinds.get(rank, ""), vote), rank)
        for (kind, vote), rank in first.items():
            for (other_kind, other_vote), other in first.items():
                if kind < other_kind and vote != other_vote:
                    pairs.setdefault((kind, other_kind), KindPair((rank, other), (kind, other_kind)))
    return tuple(pairs.values())


def _is_scattered(votes: Mapping[int, str], spec: GenerationSpec) -> bool:
    """Return whether all replicas of a group differ, which no fault of one node can cause."""
    nodes = {spec.node_of(rank) for rank in votes}
    if len(nodes) == 1:
        return len(votes) >= MIN_SCATTERED and len(set(votes.values())) == len(votes)
    by_digest: dict[str, set[str]] = {}
    for rank, vote in votes.items():
        by_digest.setdefault(vote, set()).add(spec.node_of(rank))
    return len(nodes) >= MIN_SCATTERED and all(len(holders) == 1 for holders in by_digest.values())


def compare_digests(digests: Mapping[str, Mapping[int, str]]) -> DigestVote:
    """Compare the digests inside each replica group."""
    divergent_ranks: set[int] = set()
    tied: set[int] = set()
    for votes in digests.values():
        vote_counts = Counter(votes.values())
        digest, most = max(vote_counts.items(), key=lambda item: item[1])
        if len(vote_counts) == 1:
            continue
        if 2 * most > len(votes):
            divergent_ranks |= {rank for rank, vote in votes.items() if vote != digest}
        else:
            tied |= set(votes)
    return DigestVote(frozenset(divergent_ranks), frozenset(tied - divergent_ranks))


def compare_digests_by_node(digests: Mapping[str, Mapping[int, str]], spec: GenerationSpec) -> DigestVote:
    """Compare digests, but let a majority on one node prove nothing: it could make all its ranks vote alike."""
    divergent_ranks: set[int] = set()
    tied: set[int] = set()
    scattered: set[int] = set()
    for group, votes in digests.items():
        vote = compare_digests({group: votes})
        if _is_scattered(votes, spec):
            scattered |= set(votes)
        accused = {spec.node_of(rank) for rank in vote.divergent_ranks}
        witnesses = {spec.node_of(rank) for rank in votes if rank not in vote.divergent_ranks}
        if len(witnesses) == 1 and not accused <= witnesses:
            tied |= set(votes)
        else:
            divergent_ranks |= vote.divergent_ranks
            tied |= vote.tied_ranks
    return DigestVote(
        frozenset(divergent_ranks), frozenset(tied - divergent_ranks), scattered_ranks=frozenset(scattered)
    )


def all_ranks_compared(digests: Mapping[str, Mapping[int, str]], ranks: frozenset[int]) -> bool:
    """Return whether every rank was compared with at least one other."""
    compared = {rank for votes in digests.values() if len(votes) > 1 for rank in votes}
    return compared >= ranks and all(len(votes) > 1 for votes in digests.values())


def record_seal(
    transition: Transition, job: JobRecord, spec: GenerationSpec, report: VersionSealed
) -> DigestVote | None:
    """Record a seal of the running generation ``spec``. Return the vote once it is complete and digests differ."""
    live = transition.state.job_runtime[job.job]
    ballot = _get_seals(transition, live, report.version)
    if ballot is None:
        transition.count_ignored("version_sealed.old_version")
        return None
    node = spec.node_of(report.rank)
    ballot.sealed_ranks.add(report.rank)
    ballot.bytes_by_rank[report.rank] = report.bytes
    ballot.full_copies.setdefault(node, {}).update(dict.fromkeys(report.full_copies))
    ballot.partial_copies.setdefault(node, {}).update(dict.fromkeys(report.partial_copies))
    for group, digest in report.digests.items():
        ballot.digests.setdefault(group, {})[report.rank] = digest
    ballot.kinds[report.rank] = report.kind
    if report.commit_candidate:
        ballot.retaining_ranks.add(report.rank)
    if report.durable and report.commit_candidate:
        ballot.safe_ranks.add(report.rank)
    if len(ballot.sealed_ranks) == spec.world_size:
        return _settle_version(transition, job, spec, report.version, ballot)
    return None


def _get_seals(transition: Transition, live: JobRuntime, version: Version) -> VersionSeals | None:
    """Return the seals of ``version``; None if it is settled or older than the window."""
    if live.commits.settled_version is not None and version <= live.commits.settled_version:
        return None
    if version not in live.commits.seals:
        if len(live.commits.seals) >= transition.policy.checkpoints.version_window:
            oldest = min(live.commits.seals)
            if version < oldest:
                return None
            del live.commits.seals[oldest]
        live.commits.seals[version] = VersionSeals()
    return live.commits.seals[version]


def _settle_version(
    transition: Transition, job: JobRecord, spec: GenerationSpec, version: Version, ballot: VersionSeals
) -> DigestVote | None:
    """Settle ``version``, which all ranks have sealed. Older versions will not be complete any more."""
    live = transition.state.job_runtime[job.job]
    vote, digests = DigestVote(), ballot.digests
    if not compare_digests(digests).is_unanimous and not job.audits.voting_off_reason:
        kinds = _kinds_of(transition, spec, ballot)
        digests = divide_by_kind(ballot.digests, kinds)
        vote = compare_digests_by_node(digests, spec)
        vote = msgspec.structs.replace(vote, incomparable=find_incomparable(ballot.digests, kinds))
        if not vote.is_unanimous:
            return vote
    live.commits.settled_version = version
    live.commits.seals = {v: b for v, b in live.commits.seals.items() if v > version}
    is_compared = all_ranks_compared(digests, frozenset(ballot.sealed_ranks))
    verified = is_compared and compare_digests(digests).is_unanimous
    if verified:
        live.commits.verified_version = version
    # past a boundary, ranks keep the earlier commit
    is_candidate = live.commits.candidate_step in (None, version.step) and job.outgoing_generation is None
    awaits_audits = bool(live.audits.cases) and job.spec.sdc_mode == "enforce"
    may_commit = not (transition.state.database.outage or awaits_audits)
    if is_candidate and ballot.safe_ranks == ballot.sealed_ranks and may_commit:
        _commit(transition, job, version, ballot, verified=verified)
    elif is_candidate and job.generation is not None:
        _count_missing_copies(transition, job.generation, live, ballot)
    return vote if vote.incomparable else None


def _kinds_of(transition: Transition, spec: GenerationSpec, ballot: VersionSeals) -> Mapping[int, str]:
    """Return what the ranks compute with: as they say or, if one does not, as their nodes' agents say."""
    if all(ballot.kinds.get(rank) for rank in ballot.sealed_ranks):
        return ballot.kinds
    nodes = transition.state.nodes
    return {
        rank: node_kind(nodes[node].identity) if (node := spec.node_of(rank)) in nodes else ""
        for rank in ballot.sealed_ranks
    }


def _count_missing_copies(transition: Transition, spec: GenerationSpec, live: JobRuntime, ballot: VersionSeals) -> None:
    """Count consecutive versions without a copy, by replica node. Ranks that did not keep the version prove nothing."""
    missing: set[str] = set()
    for node in {spec.node_of(rank) for rank in ballot.retaining_ranks - ballot.safe_ranks}:
        missing.update(set(spec.replica_nodes.get(node, ())) - ballot.full_copies.get(node, {}).keys())
    missed = live.commits.missed_copies
    live.commits.missed_copies = {node: missed.get(node, 0) + 1 for node in sorted(missing)}
    if max(live.commits.missed_copies.values(), default=0) >= transition.policy.checkpoints.missed_copies_count:
        transition.schedule_job(transition.now, spec.job)


def _commit(transition: Transition, job: JobRecord, version: Version, ballot: VersionSeals, *, verified: bool) -> None:
    """Commit ``version``: every rank keeps it, and its bytes are in as many places as the job asks for."""
    live = transition.state.job_runtime[job.job]
    assert live.commits.settled_version == version, f"{job.job}: {version} is committed before it is settled"
    live.commits.committed_version, live.commits.committed_at, live.commits.missed_copies = version, transition.now, {}
    live.commits.committed_bytes = sum(ballot.bytes_by_rank.values())
    shares = {
        node: ShareLocations(tuple(sorted(ballot.full_copies[node])), tuple(sorted(ballot.partial_copies[node])))
        for node in job.seats
    }
    locations = VersionLocations(version.generation, shares)  # usually equal for all versions of a generation
    if job.commits.restore_ceiling is not None or job.commits.locations != locations:
        _keep_earlier_locations(job, version)
        job.commits.restore_ceiling, job.commits.locations = None, locations
        transition.mark_job_changed(job.job)
    record = VersionRecord(
        job=job.job,
        version=version,
        committed_at=transition.now,
        verified_at=transition.now if verified else None,
        bytes=sum(ballot.bytes_by_rank.values()),
        rank_count=len(ballot.sealed_ranks),
    )
    transition.emit(PutVersion(record))
    _choose_audit_candidate(transition, job, record)
    consider_spill(transition, job, version, sum(ballot.bytes_by_rank.values()))
    consider_protection(transition, job, version)
    _announce_next(transition, job, live)


def _keep_earlier_locations(job: JobRecord, version: Version) -> None:
    """Before ``version`` is committed, keep where versions for audits are whose generation is over."""
    commits = job.commits
    kept = {audited.version.generation for audited in (commits.audited, commits.audit_candidate) if audited is not None}
    known = [commits.locations] if commits.locations is not None else []
    commits.earlier_locations = [
        location
        for location in (*commits.earlier_locations, *known)
        if location.generation in kept and location.generation != version.generation
    ]


def _choose_audit_candidate(transition: Transition, job: JobRecord, record: VersionRecord) -> None:
    """Let audits verify the committed version next, unless they are at work on an earlier one. Ranks keep it."""
    commits = job.commits
    if not job.spec.keeps_audited_version:
        if commits.audited is not None or commits.audit_candidate is not None:
            commits.audited = commits.audit_candidate = None
            transition.mark_job_changed(job.job)
        return
    waits = commits.audit_candidate
    if waits is None or transition.now - waits.committed_at > transition.policy.audits.candidate_max_s:
        commits.audit_candidate = record
        transition.mark_job_changed(job.job)


def verify_audit_candidate(transition: Transition, job: JobRecord) -> None:
    """Verify the candidate, if there is one: audits have checked all work since once."""
    candidate = job.commits.audit_candidate
    if candidate is None:
        return
    audited = msgspec.structs.replace(candidate, audited_at=transition.now)
    job.commits.audited, job.commits.audit_candidate = audited, None
    transition.mark_job_changed(job.job)
    transition.emit(PutVersion(audited))


def restart_commits(transition: Transition, job: JobRecord) -> None:
    """Drop open votes and the announced candidate: they were of ranks that no longer count."""
    commits = transition.state.job_runtime[job.job].commits
    commits.seals, commits.candidate_step, commits.candidate_due = {}, None, 0.0


def start_commits(transition: Transition, job: JobRecord) -> None:
    """Start commits once a generation steps. The first candidate is its first version, which every rank knows."""
    live = transition.state.job_runtime[job.job]
    if live.commits.candidate_step is None and live.commits.candidate_due == 0.0:
        _schedule_check(transition, job, live, transition.policy.checkpoints.candidate_timeout_s)


def resume_commits(transition: Transition, job: JobRecord) -> None:
    """After a restart, commit nothing before the next announcement: earlier ones are unknown."""
    live, running = transition.state.job_runtime[job.job], job.running_generation
    committed = live.commits.committed_version.generation if live.commits.committed_version is not None else 0
    if running is None or (job.progress.resumed_at is None and committed < running.number):
        return
    live.commits.candidate_step = UNKNOWN_CANDIDATE
    _schedule_check(transition, job, live, transition.policy.checkpoints.candidate_timeout_s)


def replace_late_candidate(transition: Transition, job: JobRecord) -> None:
    """At a deadline, replace a candidate that not every rank kept because one heard of it too late."""
    live = transition.state.job_runtime[job.job]
    due, step = live.commits.candidate_due, live.commits.candidate_step
    if not due or transition.now < due or job.outgoing_generation is not None:
        return
    if transition.state.database.outage or (step is not None and (transition.read_step_rate(job.job).step or 0) < step):
        _schedule_check(transition, job, live, transition.policy.checkpoints.candidate_timeout_s)
    else:
        _announce_next(transition, job, live)


def _announce_next(transition: Transition, job: JobRecord, live: JobRuntime) -> None:
    """Announce the latest commit, and the next candidate: a step that no rank has finished yet."""
    running = job.running_generation
    stride = transition.read_step_rate(job.job)
    step_s = stride.step_s
    if running is None or stride.step is None or step_s <= 0:
        _schedule_check(transition, job, live, transition.policy.checkpoints.commit_interval_s)
        return
    now_at = stride.predict_step(transition.now, transition.policy.checkpoints.candidate_timeout_s)
    policy = transition.policy
    interval_s = max(
        policy.checkpoints.commit_interval_s, running.world_size * policy.checkpoints.commit_interval_per_rank_s
    )
    every = max((progress.snapshot_every for progress in live.progress.by_rank.values()), default=1)
    if every > 1:  # ranks take few snapshots to save cores, which commits need too
        interval_s = max(interval_s, SNAPSHOTS_BETWEEN_COMMITS * every * step_s)
    live.commits.candidate_step = _stored_anyway(
        now_at + 1 + math.ceil(interval_s / step_s), every, interval_s / step_s
    )
    last = max((progress.until_step for progress in live.progress.by_rank.values()), default=0)
    if now_at < last < live.commits.candidate_step:
        live.commits.candidate_step = last  # the state that training ends with
    steps_s = (live.commits.candidate_step - now_at) * step_s
    _schedule_check(transition, job, live, transition.policy.checkpoints.candidate_timeout_s + 2 * steps_s)
    _send_notice(transition, job, live, running)


def _stored_anyway(step: int, every: int, interval_steps: float) -> int:
    """Return the first step from ``step`` on that ranks store in any case, each ``every`` steps: another one would cost
    them a snapshot more. If that is further away than the commits are apart, return ``step``."""
    later = -step % every if every > 1 else 0
    return step + later if later <= interval_steps else step


def set_boundary_candidate(transition: Transition, job: JobRecord) -> None:
    """Make the version at an announced boundary the candidate. It is not committed, but each rank keeps it."""
    live, running, coming = transition.state.job_runtime[job.job], job.outgoing_generation, job.generation
    if running is None or coming is None or live.commits.candidate_step == coming.after_step:
        return
    live.commits.candidate_step = coming.after_step
    _send_notice(transition, job, live, running)


def _send_notice(transition: Transition, job: JobRecord, live: JobRuntime, running: GenerationSpec) -> None:
    notice = VersionNotice(
        job=job.job,
        generation=running.number,
        committed=live.commits.committed_version,
        candidate=live.commits.candidate_step,
        pinned=job.pinned_versions(),
        compared_ranks=_compared_ranks(job, running),
    )
    for node in running.seats:
        if node in transition.state.liveness.reachable_nodes:
            transition.send(node, notice)


def _compared_ranks(job: JobRecord, running: GenerationSpec) -> tuple[int, ...]:
    """Return some ranks of each node whose parameters are to be compared; none if only one rank would."""
    nodes = [node for node in job.audits.compared_nodes if node in running.seated_nodes][:MAX_COMPARED_RANKS]
    ranks = [rank for node in nodes for rank in running.ranks_on(node)[: MAX_COMPARED_RANKS // len(nodes)]]
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()


def _schedule_check(transition: Transition, job: JobRecord, live: JobRuntime, seconds: float) -> None:
    live.commits.candidate_due = transition.now + seconds
    transition.schedule_job(live.commits.candidate_due, job.job)


def restore_rule(transition: Transition, job: JobRecord) -> RestoreRule:
    """Return the rule for restoring: from the commit on, and after corruption up to the newest clean version."""
    storage, *before = job.spills.restore_urls() or [""]
    if job.commits.restore_ceiling == NO_VERSION or job.progress.last_number == 0:
        return RestoreRule(from_scratch=True, storage_url=storage, older_storage_urls=tuple(before))
    committed = transition.state.job_runtime[job.job].commits.committed_version
    return RestoreRule(
        floor=committed,
        ceiling=job.commits.restore_ceiling,
        pinned=job.pinned_versions(),
        protection=job.parity.active.protection if job.parity.active is not None else None,
        storage_url=storage,
        older_storage_urls=tuple(before),
    )


def roll_back_to_clean(transition: Transition, job: JobRecord) -> str:
    """After corruption, forbid versions newer than the newest clean one, and return this as a phrase."""
    live = transition.state.job_runtime[job.job]
    live.commits.seals = {}
    clean = max(
        (v for v in (live.commits.verified_version, live.commits.committed_version) if v is not None), default=None
    )
    job.commits.restore_ceiling = clean or NO_VERSION
    mark_stored_corrupt(transition, job, clean)
    drop_corrupt_protection(transition, job, clean)
    transition.mark_job_changed(job.job)
    if clean is None:
        return "no version was ever committed, so the job restarts from scratch"
    return f"nothing newer than version {clean}, the newest known to be clean, is restored"


def newest_version_before(transition: Transition, job: JobRecord, step: int) -> Version | None:
    """Return the newest known version from before ``step``, audited or not."""
    live, commits = transition.state.job_runtime[job.job], job.commits
    kept = (audited.version for audited in (commits.audited, commits.audit_candidate) if audited is not None)
    known = (live.commits.committed_version, live.commits.verified_version, *kept)
    return max((version for version in known if version is not None and version.step < step), default=None)


def roll_back_before(transition: Transition, job: JobRecord, step: int, *, to_audited: bool = True) -> str:
    """After audits found wrong work, forbid versions from ``step`` on, and return this as a phrase.

    With ``to_audited`` nothing newer than the version verified by audits is restored, because the fault may be older
    than its first sign. Before the first such version, it is the one that audits were to verify next, if it is older
    than ``step``.
    """
    live, commits = transition.state.job_runtime[job.job], job.commits
    live.commits.seals = {}
    kept = [
        audited
        for audited in (commits.audited, commits.audit_candidate)
        if audited is not None and audited.version.step < step
    ]
    newest = newest_version_before(transition, job, step) or NO_VERSION
    ceiling = kept[0].version if to_audited and kept else newest
    if commits.restore_ceiling is not None:
        ceiling = min(ceiling, commits.restore_ceiling)
    record = next((audited for audited in kept if audited.version == ceiling), None)
    _forget_newer(job, live, ceiling, record)
    clean = ceiling if ceiling != NO_VERSION else None
    mark_stored_corrupt(transition, job, clean)
    drop_corrupt_protection(transition, job, clean)
    transition.mark_job_changed(job.job)
    if clean is None:
        return f"no version from before step {step} is known, so the job restarts from scratch"
    audited = commits.audited is not None and clean <= commits.audited.version
    why = "the newest that audits have verified" if audited else f"committed before step {step}"
    return f"nothing newer than version {clean}, {why}, is restored"


def _forget_newer(job: JobRecord, live: JobRuntime, ceiling: Version, record: VersionRecord | None) -> None:
    """Set the ceiling, and forget versions above it. ``record``: the version at the ceiling, if it was committed."""
    commits = job.commits
    commits.restore_ceiling = ceiling
    if commits.audited is not None and commits.audited.version > ceiling:
        commits.audited = None
    if commits.audit_candidate is not None and commits.audit_candidate.version > ceiling:
        commits.audit_candidate = None
    if live.commits.committed_version is not None and live.commits.committed_version > ceiling:
        live.commits.committed_version = record.version if record is not None else None
        live.commits.committed_at = record.committed_at if record is not None else 0.0
    if live.commits.verified_version is not None and live.commits.verified_version > ceiling:
        is_verified = record is not None and record.verified_at is not None
        live.commits.verified_version = ceiling if is_verified else None


def roll_back_open_cases(transition: Transition, job: JobRecord) -> None:
    """Before a regroup, forbid versions that may hold wrong work: an audit of it is not judged yet, or a convicted node
    has stayed in the roster because its eviction is deferred."""
    spec, ceiling = job.running_generation, job.commits.restore_ceiling
    if spec is None:
        return
    cases = transition.state.job_runtime[job.job].audits.cases if job.spec.sdc_mode == "enforce" else {}
    open_cases = [
        (case.first_bad_step, f"results of step {case.key.step} differ in an audit that a regrouping cuts short")
        for case in cases.values()
        if case.key.generation == spec.number and case.is_about_parameters
    ]
    reasons = [*open_cases, *_convicted_seats(transition, job, spec)]
    if not reasons:
        return
    step, why = min(reasons)
    if ceiling is None or ceiling.step >= step:
        words = roll_back_before(transition, job, step)
        sentence = f"{why}; {words}"
        transition.log_event("corruption.unresolved_audit", sentence, job=job.job, generation=job.progress.last_number)


def _convicted_seats(transition: Transition, job: JobRecord, spec: GenerationSpec) -> list[tuple[int, str]]:
    """Return the first wrong step of each seated node that audits of this job have convicted, and why it is wrong."""
    found = []
    for node in spec.seats:
        finding = transition.state.nodes[node].health.controller_findings.get(AUDIT_CONVICTION_KEY)
        if finding is not None and finding.evidence.get("job") == job.job:
            found.append((int(finding.evidence["step"]), f"{node} was convicted by an audit and stayed in the job"))
    return found


def _differ_within_kinds(transition: Transition, spec: GenerationSpec, ballot: VersionSeals) -> bool:
    kinds = _kinds_of(transition, spec, ballot)
    return not compare_digests(divide_by_kind(ballot.digests, kinds)).is_unanimous


def roll_back_open_votes(transition: Transition, job: JobRecord) -> None:
    """Before a regroup ends a vote, forbid unverified versions if the digests so far already differ."""
    live = transition.state.job_runtime[job.job]
    spec, seals = job.running_generation, live.commits.seals.items()
    if spec is None or job.audits.voting_off_reason:
        return
    unresolved = [v for v, b in seals if b.digests and _differ_within_kinds(transition, spec, b)]
    if not unresolved:
        return
    words = roll_back_to_clean(transition, job)
    sentence = f"digests of version {min(unresolved)} differ in a vote that a regrouping cuts short; {words}"
    transition.log_event("corruption.unresolved_vote", sentence, job=job.job, generation=job.progress.last_number)
